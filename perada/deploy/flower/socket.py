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
from dataclasses import dataclass
from pathlib import Path

from perada.core.text import printable
from perada.deploy.transport import FAILURE_CODES, MAX_MESSAGE_BYTES, Failure
from perada.system.disk_errors import DiskError
from perada.system.files import is_owner_only

MAX_NAME_BYTES = 200
"""Largest size of a run's name."""
TRANSFER_TIMEOUT = 30.0
"""Seconds within which a request must arrive in full, and a reply must be taken."""
_HEAD = struct.Struct(">4sBHQ")
_MARK = b"PRDA"
_CHUNK = 2**20

log = logging.getLogger(__name__)


def encode_frame(payload: bytes | Failure, run: str = "") -> bytes:
    """Encode a payload or a failure, and the name of the run."""
    kind = 0
    body = b""
    if isinstance(payload, bytes):
        body = payload
    else:
        kind = 1 + FAILURE_CODES.index(payload.code)
    name = run.encode()
    return _HEAD.pack(_MARK, kind, len(name), len(body)) + name + body


@dataclass(frozen=True)
class Frame:
    """Content of a frame.

    Attributes:
        payload: The message, or the failure in its place.
        run: Name of the run.
    """

    payload: bytes | Failure
    run: str


def read_frame(connection: socket.socket, max_bytes: int, seconds: float) -> Frame:
    """Read a frame. No memory is allocated for bytes that have not arrived.

    Args:
        connection: Connection to read from.
        max_bytes: Largest size of the payload.
        seconds: Time within which the frame must arrive.

    Raises:
        Failure: ``malformed`` if it is not a frame, ``rejected`` if it is too large, ``crashed`` if it is cut off.
        OSError: If the connection fails; a TimeoutError if the time is over.
    """
    end = time.monotonic() + seconds
    mark, kind, name_length, length = _HEAD.unpack(_read_exactly(connection, _HEAD.size, end))
    is_known_kind = mark == _MARK and kind <= len(FAILURE_CODES)
    # A failure has no payload.
    are_lengths_valid = name_length <= MAX_NAME_BYTES and not (kind and length)
    if not is_known_kind or not are_lengths_valid:
        raise Failure("malformed")
    if length > max_bytes:
        raise Failure("rejected")
    try:
        run = _read_exactly(connection, name_length, end).decode()
    except UnicodeDecodeError:
        raise Failure("malformed") from None
    if kind:
        return Frame(Failure(FAILURE_CODES[kind - 1]), run)
    return Frame(_read_exactly(connection, length, end), run)


def _read_exactly(connection: socket.socket, length: int, end: float) -> bytes:
    """Read ``length`` bytes, waiting at most until the time ``end``."""
    content = bytearray()
    while len(content) < length:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(min(_CHUNK, length - len(content)))
        if not part:
            raise Failure("crashed")
        content += part
    return bytes(content)


def ask_worker(
    path: Path | str,
    message: bytes,
    run: str,
    deadline: float,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> bytes | Failure:
    """Have the worker behind a socket answer a message. Never raises.

    Args:
        path: Path of the socket.
        message: The message.
        run: Name of the run.
        deadline: Seconds to wait.
        max_bytes: Largest size of the reply.

    Returns:
        The reply, or ``unreachable`` (no worker), ``rejected`` (a socket that other users may use, or too many bytes),
        ``late``, ``crashed`` or ``malformed``.
    """
    end = time.monotonic() + deadline
    if deadline <= 0:
        return Failure("late")
    try:
        status = os.lstat(path)
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not stat.S_ISSOCK(status.st_mode) or not is_private:
            return Failure("rejected")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(min(TRANSFER_TIMEOUT, deadline))
            connection.connect(os.fspath(path))
            # The worker closes the connection if it rejects the head; its code can still be read.
            with suppress(BrokenPipeError):
                connection.sendall(encode_frame(message, run))
            return read_frame(connection, max_bytes, end - time.monotonic()).payload
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


@dataclass(frozen=True)
class _WaitingRequest:
    """A request that was read and not yet answered.

    Attributes:
        connection: Connection on which the reply is expected.
        message: The message.
        run: Name of the run.
    """

    connection: socket.socket
    message: bytes
    run: str


class Listener(AbstractContextManager["Listener"]):
    """The worker's end of the socket. It answers one request at a time, the newest of those waiting.

    A request that is overtaken by a newer one is answered ``late``: its server has given it up, and nothing stale is
    trained. Unless systemd has opened a socket for this process, one is created with mode 0600. The socket of a worker
    that was killed is replaced.

    Args:
        path: Path of the socket, in a folder that only its owner can write to.
        max_bytes: Largest size of a message.

    Raises:
        ValueError: If the path cannot be used, or another worker listens there.
    """

    def __init__(self, path: Path | str | None, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._path = None if supervised() else Path(path or "")
        self._max_bytes = max_bytes
        self._waiting: _WaitingRequest | None = None
        self._changed = threading.Condition()
        self._closed = False
        if self._path is None:
            # systemd passes file descriptors from number 3 on.
            self._socket = socket.socket(fileno=3)
        else:
            self._socket = _bind_socket(self._path)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._accept_requests, name="perada-socket", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more requests, and remove the socket's file if this listener created it."""
        self._closed = True
        self._replace_waiting(None, "unreachable")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._thread.join(TRANSFER_TIMEOUT)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def serve(self, answer: Callable[[bytes, str], bytes]) -> None:
        """Answer requests in this thread until :meth:`close`.

        Args:
            answer: Returns the reply to a message of a run. If it raises a DiskError, which it has logged, the other
                side receives ``disk``. If it raises any other error, the other side receives ``crashed``, and the
                reason stays in this process's log.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._waiting is None:
                    return
                request = self._waiting
                self._waiting = None
            if _is_closed(request.connection):
                request.connection.close()
                continue
            reply: bytes | Failure
            try:
                reply = answer(request.message, request.run)
            except DiskError:
                reply = Failure("disk")
            except (OSError, ValueError) as error:  # their message suffices
                log.error("run %s: nothing leaves this site: %s", printable(request.run), error)
                reply = Failure("crashed")
            except Exception:  # no request may end the worker
                log.exception("a request failed")
                reply = Failure("crashed")
            _send_reply(request.connection, reply)

    def _accept_requests(self) -> None:
        """Read requests until the listener is closed."""
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Too many files are open, or this listener is closed.
                time.sleep(0.1)
                continue
            try:
                request = read_frame(connection, self._max_bytes, TRANSFER_TIMEOUT)
                if isinstance(request.payload, Failure):
                    raise Failure("malformed")
            except Exception as error:  # whatever one request causes, such as a lack of memory, the next one is read
                failure = error if isinstance(error, Failure) else Failure("malformed")
                log.warning("a request was rejected: %s (%s)", failure.code, type(error).__name__)
                _send_reply(connection, failure)
                continue
            self._replace_waiting(_WaitingRequest(connection, request.payload, request.run), "late")

    def _replace_waiting(self, request: _WaitingRequest | None, code: str) -> None:
        """Queue a request in place of the waiting one, which is answered with a failure of this code."""
        with self._changed:
            overtaken = self._waiting
            self._waiting = request
            self._changed.notify_all()
        if overtaken is not None:
            _send_reply(overtaken.connection, Failure(code))


def supervised() -> bool:
    """Return whether systemd opened a socket for this process.

    A socket unit may give the file to the SuperNode's user while the worker runs as another, who owns the data.
    """
    return os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1"


def _bind_socket(path: Path) -> socket.socket:
    """Create a socket that only its owner can use."""
    folder = path.parent.stat()
    is_sticky = folder.st_mode & stat.S_ISVTX
    if not is_sticky and not is_owner_only(folder, rights=0o2):
        raise ValueError(f"{str(path.parent)!r}, the socket's folder, is writable by other users; chmod 700 it")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"{str(path)!r} exists and is not a socket; remove it, or choose a different path")
        with socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(os.fspath(path))
            except ConnectionRefusedError:
                # A worker that was killed has left its socket.
                path.unlink()
            else:
                raise ValueError(f"another worker is listening at {str(path)!r}; stop it, or choose a different path")
    listening = socket.socket(socket.AF_UNIX)
    # The mode of the file is set when it is created; a later chmod would leave a gap.
    former_umask = os.umask(0o177)
    try:
        listening.bind(os.fspath(path))
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(former_umask)
    listening.listen(8)
    return listening


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send_reply(connection: socket.socket, reply: bytes | Failure) -> None:
    """Send a reply, if the other side still waits for it."""
    with connection, suppress(OSError):
        connection.settimeout(TRANSFER_TIMEOUT)
        connection.sendall(encode_frame(reply))
