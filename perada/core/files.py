# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes, locks, and temporary folders.

What is being written is locked meanwhile (``flock``, where the system has it): so what a killed process left behind
can be told from what another process is writing.
"""

import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

LOCK = "lock"
"""Name of the file in a folder by which a process locks it."""
_LOCK_BYTES = 512
"""Bytes that this file may hold: no more than one sector of a disk."""
PREFIX = "perada-scratch-"
"""Of the names of temporary folders."""
_TOGETHER = 16
"""Files that are synced at a time: a file system writes them down in one go."""


def sync(paths: Iterable[Path]) -> None:
    """Have files, and names in folders, written to the disk, where the system can, so that power may fail from now on.

    An OSError if they cannot be written.
    """
    if os.name != "posix":
        return
    paths = [*paths]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(_sync, (paths[at::_TOGETHER] for at in range(_TOGETHER))))


def is_owner_only(status: os.stat_result, rights: int = 0o7) -> bool:
    """Tell whether only the owner has rights to a file or folder: not other users, nor a group that has other members.

    A group may have them if it is one of this process's and no other account is in it. Kubernetes gives a Secret to
    the root user and the Pod's ``fsGroup``, with mode 0440.

    Args:
        status: What ``stat`` returns of the file or folder.
        rights: Which rights count: 4 to read, 2 to write, 1 to execute, or a sum of them.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & rights:
        return False
    if not mode & (rights << 3):
        return True
    if os.name != "posix":  # nobody knows the members of a group there
        return False
    groups_of_process = {os.getegid(), *os.getgroups()}
    return status.st_gid in groups_of_process and not _other_members(status.st_gid)


def _other_members(group: int) -> set[int]:
    """Return the ids of the accounts in a group, except for root and this process's own."""
    import grp  # only on POSIX systems
    import pwd

    accounts = pwd.getpwall()
    members = {account.pw_uid for account in accounts if account.pw_gid == group}
    try:
        names = grp.getgrgid(group).gr_mem
    except KeyError:  # a number without a name, such as an fsGroup: no account is listed in it
        names = []
    members |= {account.pw_uid for account in accounts if account.pw_name in names}
    return members - {0, os.geteuid()}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have an error of the disk name the file that is being written: those of writes have no path."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def open_atomic(
    path: Path, *, private: bool = False, durable: bool = True, former: Path | None = None
) -> Iterator[BinaryIO]:
    """Open a file that is written beside its place and put there by one renaming, at the end of a ``with`` statement.

    A process that is killed, or a disk that is full, leaves the file that was there before.

    Args:
        path: The file, in a folder that exists.
        private: Let only its owner read it.
        durable: Return when it is on the disk; otherwise the caller calls :func:`sync`.
        former: Where the file that is replaced is kept; ``None`` for nowhere. ``path`` is there at every moment if the
            file system has hard links.

    Raises:
        OSError: Of the disk; it names the file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # what a crash left: it may be open to others, or a link of theirs
        with writing(path), open(partial, "xb", opener=opener(0o600 if private else 0o666)) as file:
            with suppress(OSError):  # a file system without locks
                _lock(file.fileno())
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if former is not None and path.is_file():
                _keep(path, former)
                if durable:
                    sync([former.parent])
            os.replace(partial, path)
        if durable:
            sync([path.parent])
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes, **options: Any) -> None:
    """Write a file as :func:`open_atomic` does, which has the same options."""
    with open_atomic(path, **options) as file:
        file.write(content)


def opener(mode: int = 0o666) -> Callable[[str, int], int]:
    """For :func:`open`: a file with these rights, and an OSError where a symbolic link stands in its place."""
    return lambda path, flags: os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), mode)


def _keep(path: Path, other: Path) -> None:
    """Give a file a second name, in place of what has that name."""
    second = other.with_name(f".{other.name}.partial")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:  # a file system without links
        path.replace(other)
    else:
        second.replace(other)


def check_links(folder: Path, pattern: re.Pattern[str]) -> None:
    """Refuse links that lead out of a folder, among what is called as in ``own`` and in folders among these.

    The Hub's cache keeps the files of a snapshot in a folder ``blobs`` of its own, which may be linked to.

    Raises:
        ValueError: With the name of the link and where it leads.
    """
    root = folder.resolve()
    allowed = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in folder.iterdir():
        for one in _with_content(path) if pattern.fullmatch(path.name) else ():
            if one.is_symlink() and not any(one.resolve().is_relative_to(place) for place in allowed):
                raise ValueError(
                    f"{str(one)!r} is a link to {str(one.resolve())!r}, out of the folder; if you trust it, put a copy "
                    "in its place"
                )


def _with_content(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir():  # a link was refused before
        yield from path.iterdir()


def clear(paths: Iterable[Path]) -> None:
    """Delete files, or folders with all that is in them, that nobody is writing: who did was killed."""
    for path in paths:
        if fcntl is None or path.is_symlink():
            continue
        with suppress(OSError):  # it is locked, another user's, or gone
            handle = _locked(path)
            assert handle is not None
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(handle)


class Scratch:
    """A temporary folder, ``path``, which goes with this object or at the end of a ``with`` statement.

    Those of processes that were killed are deleted when the next is made.
    """

    def __init__(self) -> None:
        clear(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        handle = None
        with suppress(OSError):  # a file system without locks
            handle = _locked(self.path)
        self.close = weakref.finalize(self, _remove, self.path, handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(path: Path, handle: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if handle is not None:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, if it is there, until the end; whether nobody else has it, for whom one may ``wait``."""
    handle = None
    alone = True
    try:
        handle = _locked(folder, wait)
    except BlockingIOError:
        alone = False
    except OSError:  # it is gone, a link, or on a file system without locks
        pass
    try:
        yield alone
    finally:
        if handle is not None:
            os.close(handle)


def _locked(path: Path, wait: bool = False) -> int | None:
    """A handle of a file or folder that is locked until it is closed; a BlockingIOError if somebody else's is open.

    What a link leads to is not opened, which is an OSError.
    """
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _lock(handle, wait)
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(handle: int, wait: bool = False) -> None:
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            with writing(path):
                os.fsync(handle)
        finally:
            os.close(handle)


class FolderLock:
    """A folder of one process, made for its owner alone; it is free again after ``close()`` or with the process.

    Raises:
        OSError: If another process has it, others may write to it, or it cannot be made; the message names it.
    """

    def __init__(self, folder: Path, whose: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_owner_only(folder.stat(), rights=0o2):
            raise OSError(f"the folder {str(folder)!r} can be written to by other users; chmod 700 it")
        self._file = file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, file)
        try:
            _lock(file)
        except OSError:
            self.close()
            reason = f"the folder {str(folder)!r} is in use by another {whose}; stop that one first"
            raise OSError(reason) from None

    def read(self) -> bytes:
        """The content of the lock's file, which :meth:`write` wrote; empty if nothing was ever written."""
        return os.pread(self._file, _LOCK_BYTES, 0)

    def write(self, content: bytes) -> None:
        """Replace the content of the lock's file, on the disk.

        This is not atomic: after a power failure the file may hold a mixture of two contents. A content that always has
        the same, small length is as good as safe, since it is in one sector of a disk.
        """
        if len(content) > _LOCK_BYTES:
            raise ValueError(f"the lock's file holds at most {_LOCK_BYTES} bytes, got {len(content)}")
        os.pwrite(self._file, content, 0)
        if os.fstat(self._file).st_size != len(content):
            os.ftruncate(self._file, len(content))
        # Where the size stays the content is all that must be on the disk, which takes half the time.
        getattr(os, "fdatasync", os.fsync)(self._file)
