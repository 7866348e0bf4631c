# SPDX-License-Identifier: Apache-2.0
"""The Unix socket between a site's worker, which has the data, and the ClientApp, which has the network.

A frame is a head of 15 bytes, the run's name and the payload. The head holds ``PRDA``, a kind (0 for a payload,
otherwise 1 + the index of a code in `FAILURE_CODES`), the length of the name and the length of the payload. This module
depends on the standard library only.
"""

import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from perada.core.files import is_owner_only
from perada.deploy.transport import FAILURE_CODES, MAX_MESSAGE_BYTES, Failure

LONGEST_NAME = 200
"""Bytes of a run's name."""
STALLED = 30.0
"""Seconds in which a request must be there in full, and an answer be taken."""
_HEAD = struct.Struct(">4sBHQ")
_MARK = b"PRDA"
_CHUNK = 2**20

log = logging.getLogger(__name__)


def frame(payload: bytes | Failure, run: str = "") -> bytes:
    """A payload or a code as bytes."""
    kind, body = (0, payload) if isinstance(payload, bytes) else (1 + FAILURE_CODES.index(payload.code), b"")
    name = run.encode()
    return _HEAD.pack(_MARK, kind, len(name), len(body)) + name + body


def read_frame(connection: socket.socket, most: int, seconds: float) -> tuple[bytes | Failure, str]:
    """The payload or code, and the run's name; ``most`` bytes are read, within so many ``seconds``.

    Nothing is set aside for bytes that have not come. An OSError if the connection fails, a TimeoutError if the time is
    over, and a Failure: ``malformed`` if it is not a frame, ``refused`` if it is too long, ``crashed`` if cut off.
    """
    end = time.monotonic() + seconds
    mark, kind, name_length, length = _HEAD.unpack(_exactly(connection, _HEAD.size, end))
    if mark != _MARK or kind > len(FAILURE_CODES) or name_length > LONGEST_NAME or (kind and length):
        raise Failure("malformed")
    if length > most:
        raise Failure("refused")
    try:
        run = _exactly(connection, name_length, end).decode()
    except UnicodeDecodeError:
        raise Failure("malformed") from None
    return (Failure(FAILURE_CODES[kind - 1]) if kind else _exactly(connection, length, end)), run


def _exactly(connection: socket.socket, length: int, end: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(min(_CHUNK, length - len(parts)))
        if not part:
            raise Failure("crashed")
        parts += part
    return bytes(parts)


def ask(path: Path | str, message: bytes, run: str, deadline: float, most: int = MAX_MESSAGE_BYTES) -> bytes | Failure:
    """Have the worker behind a socket answer a message of a run, in so many seconds and bytes. Never raises.

    Returns:
        The answer, or ``unreachable`` (no worker), ``refused`` (a socket that does not belong to this process's user
        alone, or too many bytes), ``late``, ``crashed`` or ``malformed``.
    """
    end = time.monotonic() + deadline
    if deadline <= 0:
        return Failure("late")
    try:
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return Failure("refused")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(min(STALLED, deadline))
            connection.connect(os.fspath(path))
            with suppress(BrokenPipeError):  # refused at the head: the code is there to be read
                connection.sendall(frame(message, run))
            return read_frame(connection, most, end - time.monotonic())[0]
    except Failure as failure:
        return failure
    except TimeoutError:
        return Failure("late")
    except ConnectionResetError:
        return Failure("crashed")
    except OSError:
        return Failure("unreachable")
    except Exception:  # a frame too long for its head, a name that is not text: nothing of it may leave
        return Failure("malformed")


class Listener(AbstractContextManager["Listener"]):
    """The worker's end of the socket. It answers one request at a time; of those that wait, the newest.

    One that a newer one overtakes is told ``late``: its server has given it up, and nothing stale is trained. The
    socket is made at ``path`` with mode 0600, in a folder that only its owner can write to, unless systemd has opened
    one for this process. What a worker left that was killed is replaced.

    Raises:
        ValueError: If the path cannot be used, or another worker listens there.
    """

    def __init__(self, path: Path | str | None, most: int = MAX_MESSAGE_BYTES) -> None:
        self._path = None if supervised() else Path(path or "")
        self._most = most
        self._waiting: tuple[socket.socket, bytes, str] | None = None
        self._changed = threading.Condition()
        self._closed = False
        # 3 is where the protocol of systemd begins
        self._socket = socket.socket(fileno=3) if self._path is None else _bound(self._path)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._accept, name="perada-socket", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more requests, and remove the socket's file if this listener made it."""
        self._closed = True
        self._wait(None, "unreachable")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(STALLED)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def serve(self, answer: Callable[[bytes, str], bytes]) -> None:
        """Answer requests in this thread until `close`.

        ``answer`` makes a reply of a message and its run's name. If it raises, the other side is told ``crashed`` and
        the reason stays in this process's log.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._waiting is None:
                    return
                (connection, message, run), self._waiting = self._waiting, None
            if _gone(connection):
                connection.close()
                continue
            reply: bytes | Failure
            try:
                reply = answer(message, run)
            except Exception:
                log.exception("a request failed")
                reply = Failure("crashed")
            _reply(connection, reply)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # too many files are open, or this is closed
                time.sleep(0.1)
                continue
            try:
                message, run = read_frame(connection, self._most, STALLED)
                if isinstance(message, Failure):
                    raise Failure("malformed")
            except Exception as error:  # also where memory does not suffice: the next one is to be heard
                failure = error if isinstance(error, Failure) else Failure("malformed")
                log.warning("a request was turned away: %s (%s)", failure.code, type(error).__name__)
                _reply(connection, failure)
                continue
            self._wait((connection, message, run), "late")

    def _wait(self, request: tuple[socket.socket, bytes, str] | None, code: str) -> None:
        """Put a request in the place of the one that waits, if one does, which is told the code."""
        with self._changed:
            overtaken, self._waiting = self._waiting, request
            self._changed.notify_all()
        if overtaken is not None:
            _reply(overtaken[0], Failure(code))


def supervised() -> bool:
    """Whether systemd opened a socket for this process.

    A socket unit may give the file to the SuperNode's user while the worker runs as another, who owns the data.
    """
    return os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1"


def _bound(path: Path) -> socket.socket:
    folder = path.parent.stat()
    is_sticky = folder.st_mode & stat.S_ISVTX
    if not is_sticky and not is_owner_only(folder, rights=0o2):
        raise ValueError(f"{str(path.parent)!r}, the socket's folder, can be written to by other users; chmod 700 it")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"{str(path)!r} is there and is not a socket; remove it, or give another path")
        with socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()  # of a worker that was killed
            else:
                raise ValueError(f"another worker listens at {str(path)!r}; stop it, or give another path")
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listening.bind(os.fspath(path))
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    listening.listen(8)
    return listening


def _gone(connection: socket.socket) -> bool:
    """Whether the other side has given up."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _reply(connection: socket.socket, reply: bytes | Failure) -> None:
    """Send what there is, if anybody still waits for it."""
    with connection, suppress(OSError):
        connection.settimeout(STALLED)
        connection.sendall(frame(reply))
