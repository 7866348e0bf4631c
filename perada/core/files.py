# SPDX-License-Identifier: Apache-2.0
"""What a process or a machine that stops leaves on the disk: files that are there in full, and nothing half-written.

What is being written is locked meanwhile (``flock``, where the system has it): so what somebody who was killed left
behind can be told from what another process is writing.
"""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

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
    chosen = list(paths)
    if len(chosen) < 2:
        for path in chosen:
            _sync(path)
        return
    with ThreadPoolExecutor(min(_TOGETHER, len(chosen))) as pool:
        list(pool.map(_sync, chosen))


def sync_tree(folder: Path) -> None:
    """Have a folder with all that is in it written to the disk."""
    sync([folder, *folder.rglob("*")])


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
def being_written(path: Path) -> Iterator[None]:
    """Keep :func:`clear` from deleting a file until the end; it is made if it is not there, or only a link."""
    handle = None
    if path.is_symlink():
        path.unlink()
    with suppress(OSError):  # a file system without locks
        handle = _locked(path, os.O_CREAT | os.O_RDWR)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def check_links(folder: Path, own: re.Pattern[str]) -> None:
    """Refuse links that lead out of a folder, among what is called as in ``own`` and in folders among these.

    The Hub's cache keeps the files of a snapshot in a folder ``blobs`` of its own, which may be linked to.

    Raises:
        ValueError: With the name of the link and where it leads.
    """
    root = folder.resolve()
    allowed = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in folder.iterdir():
        for one in _with_content(path) if own.fullmatch(path.name) else ():
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
            handle = _locked(path, os.O_RDONLY)
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
        while True:
            self.path, handle = Path(tempfile.mkdtemp(prefix=PREFIX)), None
            try:
                handle = _locked(self.path, os.O_RDONLY)
            except (FileNotFoundError, BlockingIOError):  # another process took it for one that was left
                continue
            except OSError:  # a file system without locks
                pass
            break
        self.close = weakref.finalize(self, _remove, self.path, handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(path: Path, handle: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if handle is not None:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, if it is there, until the end; whether nobody else has it, for whom one may ``wait``."""
    handle, alone = None, True
    try:
        handle = _locked(folder, os.O_RDONLY, wait)
    except BlockingIOError:
        alone = False
    except OSError:  # it is gone, or on a file system without locks
        pass
    try:
        yield alone
    finally:
        if handle is not None:
            os.close(handle)


def _locked(path: Path, flags: int, wait: bool = False) -> int | None:
    """A handle of a file or folder that is locked until it is closed; a BlockingIOError if somebody else's is open."""
    if fcntl is None:
        return None
    handle = os.open(path, flags, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        raise
    return handle


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
