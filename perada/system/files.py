# SPDX-License-Identifier: Apache-2.0
"""Atomic file writes, locks, and temporary folders.

Files are locked while they are written, if their file system has locks. This distinguishes files that a killed process
has left from files that another process is writing.

The locks are those of filelock, on handles that this module opens: the written file or the folder itself is locked, and
links are not followed. ``FileLock`` would create another file next to each one, which would stay in users' folders.
"""

import errno
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

from perada.system.disk_errors import DiskError, naming_disk

LOCK = "lock"
"""Name of the file in a folder by which a process locks it."""
_LOCK_BYTES = 512
"""Maximum size of this file in bytes: one sector of a disk."""
PREFIX = "perada-scratch-"
"""Prefix of the names of temporary folders."""
_LOCK_ATTEMPTS = 10
"""Number of times that a new file or folder is created again if another process deletes it before it is locked."""
_SYNC_THREADS = 16
"""Number of files that are synced at the same time, which a file system writes together."""
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
"""Flag for not opening symbolic links, if the system has one."""


def sync(paths: Iterable[Path]) -> None:
    """Flush files and folder entries to disk, so that they survive a power failure.

    This does nothing on systems other than POSIX.

    Raises:
        OSError: If they cannot be written.
    """
    if os.name != "posix":
        return
    paths = list(paths)
    if len(paths) <= 1:
        # One path is synchronised without the start of a pool of threads.
        _sync_paths(paths)
        return
    parts = [paths[start::_SYNC_THREADS] for start in range(_SYNC_THREADS)]
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        # Reading the results raises the errors of the threads.
        list(pool.map(_sync_paths, parts))


def is_owner_only(status: os.stat_result, rights: int = 0o7) -> bool:
    """Return whether only the owner has rights to a file or folder, and neither other users nor a group with members.

    A group may have them if it is one of this process's and no other account is in it. Kubernetes gives a Secret to
    the root user and the Pod's ``fsGroup``, with mode 0440.

    Args:
        status: Result of ``stat`` for the file or folder.
        rights: Rights to check: 4 to read, 2 to write, 1 to execute, or a sum of them.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & rights:
        return False
    if not mode & (rights << 3):
        return True
    if os.name != "posix":
        # The members of a group are unknown there.
        return False
    groups_of_process = {os.getegid(), *os.getgroups()}
    return status.st_gid in groups_of_process and not _other_members(status.st_gid)


def check_owner_only(file: Path) -> None:
    """Raise a ValueError if a private key or identity can be read by users other than its owner."""
    status = file.stat()
    if not is_owner_only(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"{str(file)!r} is readable by other users (mode {mode:04o}); chmod 0400, so that only its owner can read "
            "it"
        )


def _other_members(group_id: int) -> set[int]:
    """Return the ids of the accounts in a group, except for those of root and this process."""
    import grp  # only on POSIX systems
    import pwd

    accounts = pwd.getpwall()
    members = {account.pw_uid for account in accounts if account.pw_gid == group_id}
    try:
        names = grp.getgrgid(group_id).gr_mem
    except KeyError:
        # A number without a name, such as an fsGroup, lists no accounts.
        names = []
    members |= {account.pw_uid for account in accounts if account.pw_name in names}
    return members - {0, os.geteuid()}


def check_output_folder(option: str, folder: Path) -> None:
    """Check that a folder can be created or written to, before anything is computed.

    Args:
        option: Option that names it, for the message, such as ``--output``.
        folder: The folder, which need not exist.

    Raises:
        NotADirectoryError: If it, or a folder above it, is a file.
        PermissionError: If this user may not write to it, or may not create it.
    """
    for path in (folder, *folder.parents):
        if path.is_dir():
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(f"{option}={folder}: you may not write to {str(path)!r}; choose another folder")
            return
        if path.exists():
            problem = "is a file" if path == folder else f"cannot be created, since {str(path)!r} is a file"
            raise NotADirectoryError(f"{option}={folder} {problem}; choose a folder")


def check_output_file(option: str, file: Path, example: str) -> None:
    """Check that a file can be written, before anything is computed; its folder need not exist.

    Args:
        option: Option that names it, for the message, such as ``--output``.
        file: The file.
        example: Name of a file to propose for a folder.

    Raises:
        IsADirectoryError: If it is a folder.
        NotADirectoryError: If a folder above it is a file.
        PermissionError: If this user may not write it.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{option}={file} is a folder; choose a file, such as {file / example}")
    check_output_folder(option, file.parent)


def check_new_files(folder: Path, file_names: Iterable[str]) -> None:
    """Check that files can be created in a folder, which need not exist, and that none of them exists.

    Raises:
        FileExistsError: If one of them exists.
        NotADirectoryError: If the folder, or one above it, is a file.
        PermissionError: If this user may not write to it.
    """
    check_output_folder("folder", folder)
    for name in file_names:
        file = folder / name
        if file.exists():
            raise FileExistsError(f"{str(file)!r} already exists; choose a different folder, or move it away")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path to disk errors, which ``write()`` leaves out."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def open_atomic(
    path: Path,
    *,
    private: bool = False,
    durable: bool = True,
    backup_path: Path | None = None,
) -> Iterator[BinaryIO]:
    """Open a temporary file that atomically replaces another one at the end of the ``with`` statement.

    If the process is killed or the disk is full, the former file remains.

    Args:
        path: The file, in an existing folder.
        private: Whether only the owner may read the file.
        durable: Whether to return only once the file is on disk; otherwise the caller must call :func:`sync`.
        backup_path: Path to which the former file is moved; ``None`` to delete it. ``path`` exists at every moment.

    Raises:
        OSError: If the file cannot be written; the error contains the path.
    """
    partial = path.with_name(f".{path.name}.partial")
    mode = 0o600 if private else 0o666
    try:
        with _naming_target(partial, path):
            with writing(path), _create_locked_file(partial, mode) as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                if backup_path is not None and path.is_file():
                    _link_as(path, backup_path)
                    if durable:
                        sync([backup_path.parent])
                os.replace(partial, path)
            if durable:
                sync([path.parent])
    except Exception:
        # A disk that fails may also fail now, which would hide the first error.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _create_locked_file(path: Path, mode: int) -> BinaryIO:
    """Create a file, replacing any other of this name, and lock it.

    Another process may take the file for one that a killed process left (see :func:`clear`), and delete it before it is
    locked. It is then created again.
    """
    for _ in range(_LOCK_ATTEMPTS):
        # A file from a crash is not reused: another process may have it open, or it may be a foreign link.
        path.unlink(missing_ok=True)
        file = open(path, "xb", opener=opener(mode))
        try:
            is_locked = try_lock(file.fileno())
        except OSError:
            # The file system has no locks, so no process deletes the files of others.
            return file
        if is_locked and _is_in_place(file.fileno(), path):
            return file
        file.close()
    raise FileNotFoundError(errno.ENOENT, "another process deletes the file as soon as it is created", str(path))


def write_atomic(path: Path, content: bytes, **options: Any) -> None:
    """Write a file like :func:`open_atomic`, with the same options."""
    with open_atomic(path, **options) as file:
        file.write(content)


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Create a file with its final mode from the start, or leave none if the disk fails.

    Args:
        path: The file, which must not exist.
        content: Its content.
        mode: Its mode, less the umask.

    Raises:
        FileExistsError: If it exists.
        OSError: If it cannot be written; the error contains the path.
    """
    with writing(path), open(path, "xb", opener=opener(mode)) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise


@contextmanager
def removing_new(paths: Iterable[Path]) -> Iterator[None]:
    """Delete files if an error occurs, so that a second attempt can create them.

    Args:
        paths: Files that do not exist yet.
    """
    try:
        yield
    except Exception:
        for path in paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def check_space(path: Path, num_bytes: int) -> None:
    """Check that a file of some size can be written in place of another one, by writing and deleting such a file.

    Args:
        path: The other file, which is not changed.
        num_bytes: Number of bytes.

    Raises:
        OSError: If it cannot be written; the error contains the path.
    """
    partial = path.with_name(f".{path.name}.partial")
    with _naming_target(partial, path):
        partial.unlink(missing_ok=True)
        try:
            with writing(path), open(partial, "xb", opener=opener(0o600)) as file:
                file.write(bytes(num_bytes))
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


@contextmanager
def _naming_target(partial: Path, path: Path) -> Iterator[None]:
    """Name a file in errors about its temporary file, which users do not know."""
    try:
        yield
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)
            # None would be part of the message.
            del error.filename2
        raise


def opener(mode: int = 0o666) -> Callable[[str, int], int]:
    """Return an opener for :func:`open` that creates files with these rights and does not follow symbolic links."""
    return lambda path, flags: os.open(path, flags | _NO_FOLLOW, mode)


def _link_as(path: Path, other: Path) -> None:
    """Link a file to a second name, replacing any file of that name."""
    second = other.with_name(f".{other.name}.partial")
    second.unlink(missing_ok=True)
    try:
        os.link(path, second)
    except OSError:
        # The file system has no links. The file is not moved: if the disk failed next, it would be missing.
        _copy_durably(path, second)
    second.replace(other)


def _copy_durably(path: Path, other: Path) -> None:
    """Copy a file, with its rights, to a new one, and wait until it is on disk."""
    mode = stat.S_IMODE(path.stat().st_mode)
    with writing(other), path.open("rb") as source, open(other, "xb", opener=opener(mode)) as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def check_links(folder: Path, pattern: re.Pattern[str]) -> None:
    """Raise a ValueError if a symbolic link in a folder leads out of it.

    Args:
        folder: The folder.
        pattern: Names of the files to check, and of the folders whose files are checked.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        # The Hub's cache keeps the content of a snapshot's files in a folder `blobs`, to which they are links.
        allowed.append(root.parent.parent / "blobs")
    for entry in folder.iterdir():
        if not pattern.fullmatch(entry.name):
            continue
        _check_link(entry, allowed)
        # If the entry is a link, it stays within the folder.
        if entry.is_dir():
            for path in entry.iterdir():
                _check_link(path, allowed)


def _check_link(path: Path, allowed: Iterable[Path]) -> None:
    """Raise a ValueError if a path is a link to a file outside the ``allowed`` folders."""
    if not path.is_symlink():
        return
    target = path.resolve()
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise ValueError(
            f"{str(path)!r} is a link to {str(target)!r}, outside the folder; if you trust it, replace it by a copy"
        )


def clear(paths: Iterable[Path]) -> None:
    """Delete files and folders of killed processes: those that no running process has locked."""
    for path in paths:
        if path.is_symlink():
            continue
        # Errors mean that it is locked, cannot be locked, belongs to another user, or no longer exists.
        with suppress(OSError):
            handle = _open_locked(path)
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(handle)


class Scratch:
    """A temporary folder, which is deleted with this object or at the end of a ``with`` statement.

    Folders of processes that were killed are deleted when the next one is created.

    Attributes:
        path: Path of the folder.
        close: Function that deletes the folder.
    """

    def __init__(self) -> None:
        clear(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
        self.path, handle = _create_locked_folder()
        self.close = weakref.finalize(self, _remove_locked_folder, self.path, handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _create_locked_folder() -> tuple[Path, int | None]:
    """Create a temporary folder, and lock it.

    Another process may take the folder for one that a killed process left (see :func:`clear`), and delete it before it
    is locked. Another one is then created.

    Returns:
        The folder, and the handle that locks it; ``None`` on file systems without locks.
    """
    for _ in range(_LOCK_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            handle = _open_locked(path)
        except (BlockingIOError, FileNotFoundError):
            # Another process is deleting it, or has deleted it.
            continue
        except OSError:
            # The file system has no locks, so no process deletes the folders of others.
            return path, None
        if _is_in_place(handle, path):
            return path, handle
        os.close(handle)
    raise FileNotFoundError(
        errno.ENOENT, "another process deletes temporary folders as soon as they are created", tempfile.gettempdir()
    )


def _is_in_place(handle: int, path: Path) -> bool:
    """Return whether a path still leads to the file or folder of a handle."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), status)


def _remove_locked_folder(path: Path, handle: int | None) -> None:
    """Delete a folder, then close the handle that locks it."""
    shutil.rmtree(path, ignore_errors=True)
    if handle is not None:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, if it exists, until the end of the ``with`` statement.

    Args:
        folder: The folder.
        wait: Wait while another process has it locked.

    Yields:
        Whether no other process has the folder locked.
    """
    handle = None
    is_free = True
    try:
        handle = _open_locked(folder, wait)
    except BlockingIOError:
        is_free = False
    except OSError:
        # The folder does not exist, is a link, or is on a file system without locks.
        pass
    try:
        yield is_free
    finally:
        if handle is not None:
            os.close(handle)


def _open_locked(path: Path, wait: bool = False) -> int:
    """Return a handle of a file or folder, which is locked until the handle is closed.

    Args:
        path: The file or folder.
        wait: Wait while another process has it locked.

    Raises:
        BlockingIOError: If another process has it locked.
        OSError: If it cannot be opened, is a link, or is on a file system without locks.
    """
    handle = os.open(path, os.O_RDONLY | _NO_FOLLOW)
    try:
        is_locked = try_lock(handle, wait)
    except OSError:
        os.close(handle)
        raise
    if not is_locked:
        os.close(handle)
        raise BlockingIOError(errno.EAGAIN, "another process has it locked", str(path))
    return handle


def try_lock(handle: int, wait: bool = False) -> bool:
    """Lock the file or folder of a handle until it is closed; return False if another process has locked it.

    Raises:
        OSError: If the file system has no locks.
    """
    # The import stands here, since it takes about 50 ms, a quarter of the start of the command line.
    from filelock import lock_descriptor

    return lock_descriptor(handle, blocking=wait)


def _sync_paths(paths: Iterable[Path]) -> None:
    """Make sure that files and folders are on disk and survive a power failure."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            with writing(path):
                os.fsync(handle)
        finally:
            os.close(handle)


class FolderLock:
    """Reserves a folder for one process, and creates it with rights only for its owner.

    The folder is released by ``close()`` or at the end of the process.

    Args:
        folder: The folder.
        whose: Kind of process that uses it, for the message about another one.

    Raises:
        OSError: If another process uses the folder, other users may write to it, or it cannot be created or locked.
    """

    def __init__(self, folder: Path, whose: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_owner_only(folder.stat(), rights=0o2):
            raise OSError(f"the folder {str(folder)!r} is writable by other users; chmod 700 it")
        self._folder = folder
        self._path = folder / LOCK
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o600)
        self.close = weakref.finalize(self, os.close, self._file)
        try:
            with writing(self._path):
                self._status = folder.stat()
                is_locked = try_lock(self._file)
        except OSError:
            self.close()
            raise
        if not is_locked:
            self.close()
            raise OSError(f"the folder {str(folder)!r} is in use by another {whose}; stop it first")

    def check_in_place(self) -> None:
        """Check that the folder is still at its path.

        If its disk is unmounted, the path is gone, or is the empty folder at which the disk was mounted. Files written
        there would be missing once the disk is mounted again.

        Raises:
            DiskError: If it is gone, or another folder is in its place.
        """
        with naming_disk(self._folder):
            is_same = os.path.samestat(self._folder.stat(), self._status)
        if not is_same:
            reason = "another folder is in its place, as when its disk is not mounted"
            raise DiskError(errno.ENODEV, reason, str(self._folder))

    def read(self) -> bytes:
        """Return the content of the lock file; empty if nothing was ever written."""
        return os.pread(self._file, _LOCK_BYTES, 0)

    def write(self, content: bytes) -> None:
        """Replace the content of the lock file, and wait until it is on disk.

        This is not atomic: after a power failure the file may contain a mixture of two contents. Content of a small and
        constant length is safe in practice, since it is in one sector of the disk.
        """
        if len(content) > _LOCK_BYTES:
            raise ValueError(f"the lock file holds at most {_LOCK_BYTES} bytes, got {len(content)}")
        with writing(self._path):
            written = 0
            while written < len(content):
                # On a disk that is nearly full fewer bytes may be written.
                written += os.pwrite(self._file, content[written:], written)
            if os.fstat(self._file).st_size != len(content):
                os.ftruncate(self._file, len(content))
            # If the size is unchanged, fdatasync() writes only the content, which takes half the time.
            getattr(os, "fdatasync", os.fsync)(self._file)
