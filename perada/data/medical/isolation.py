# SPDX-License-Identifier: Apache-2.0
"""Decode compressed frames in a process of their own, which damaged ones may crash."""

import atexit
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perada.data.medical.decoder_process import DecoderMessage, read_message, write_message
from perada.data.medical.errors import MedicalImageError

SECONDS = 10.0
"""Time that decoding a frame may take."""
SECONDS_PER_MEGABYTE = 0.5
"""Further time for each megabyte of the decoded frame."""
_PROGRAM = Path(__file__).with_name("decoder_process.py")


@dataclass(frozen=True)
class DecodedFrame:
    """The values of a frame.

    Attributes:
        values: The values (H, W) or (H, W, 3).
        photometric: Their photometric interpretation.
    """

    values: np.ndarray[Any, Any]
    photometric: str


class DecoderProcess:
    """A process that decodes frames, one after the other. It is started when it is needed, and again after a crash."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._foreign: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)

    def decode(
        self, frame: bytes, syntax: str, plugins: list[str], options: dict[str, Any], frame_bytes: int
    ) -> DecodedFrame:
        """Decode a frame.

        Args:
            frame: The compressed frame.
            syntax: UID of the transfer syntax.
            plugins: Names of pydicom's plugins, the preferred one first.
            options: Options of pydicom's ``Decoder.as_array``.
            frame_bytes: Bytes of the decoded frame.

        Raises:
            MedicalImageError: If the frame is damaged.
        """
        request = {"syntax": syntax, "plugins": plugins, "options": options, "frame_bytes": frame_bytes}
        seconds = SECONDS + SECONDS_PER_MEGABYTE * frame_bytes / 2**20
        with self._lock:
            answer = self._send_request(DecoderMessage(request, frame), seconds)
        header = answer.header
        if "error" in header:
            raise MedicalImageError(f"its compressed pixel data are damaged ({header['error']})")
        values = np.frombuffer(answer.content, dtype=np.dtype(header["dtype"])).reshape(header["shape"])
        return DecodedFrame(values, header["photometric"])

    def _send_request(self, request: DecoderMessage, seconds: float) -> DecoderMessage:
        """Send a request and return the answer; an answer with ``error`` if the process crashed or took too long."""
        process = self._running_process()
        assert process.stdin is not None and process.stdout is not None
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            # The process may have crashed, and its pipe be closed.
            with suppress(OSError, ValueError):
                write_message(process.stdin, request)
                answer = read_message(process.stdout)
        finally:
            timer.cancel()
        if answer is not None and len(answer.content) == answer.header["size"]:
            if answer.header["is_last"]:
                self.close()
            return answer
        self.close()
        reason = f"not decoded in {seconds:.0f} s" if timed_out.is_set() else "the decoder crashed"
        return DecoderMessage({"error": reason}, b"")

    def _running_process(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none. A forked process does not use that of its parent."""
        is_own = self._process is not None and self._owner == os.getpid()
        if not is_own or self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                # -P keeps the folder of the program, whose modules have common names, out of the search path.
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """End the process, unless it is that of a parent."""
        process = self._process
        self._process = None
        if process is None:
            return
        if self._owner != os.getpid():
            # Its destructor would warn of a process that still runs.
            self._foreign.append(process)
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


DECODER = DecoderProcess()
"""The process of all frames that this process reads. Its lock is held for one frame."""


def _renew_lock() -> None:
    """Give a forked process a lock of its own: a thread of the parent may hold the lock forever."""
    DECODER._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
