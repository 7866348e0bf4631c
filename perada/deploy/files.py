# SPDX-License-Identifier: Apache-2.0
"""Files that are there in full or not at all, and the lock of a folder."""

import fcntl
import os
import weakref
from pathlib import Path

from perada.core.files import writing


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, for its owner alone, and put it there by one renaming; it is then on disk.

    Whoever crashes in between leaves the file that was there before. So does a disk that is full, by an OSError.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # what a crash left: it may be open to others, or a link of theirs
    try:
        with (
            writing(path),
            open(
                part, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            ) as file,
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def keep_link(path: Path, other: Path) -> None:
    """Let ``other`` be the file at ``path`` too, also after ``path`` is replaced."""
    part = other.with_name(f".{other.name}.part")
    part.unlink(missing_ok=True)
    os.link(path, part)
    os.replace(part, other)
    sync(other.parent)


def sync(folder: Path) -> None:
    """Have what was renamed in a folder on disk."""
    at = os.open(folder, os.O_RDONLY)
    try:
        with writing(folder):
            os.fsync(at)
    finally:
        os.close(at)


class Lock:
    """A folder of one process, made for its owner alone; it is free again after ``close()`` or with the process.

    Raises:
        OSError: If another process has it, others may write to it, or it cannot be made; the message names it.
    """

    def __init__(self, folder: Path, whose: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & 0o022:
            raise OSError(f"the folder {str(folder)!r} can be written to by others; chmod 700 it")
        self._file = file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.close = weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            reason = f"the folder {str(folder)!r} is in use by another {whose}; stop that one first"
            raise OSError(reason) from None

    @property
    def marked(self) -> bool:
        """Whether :meth:`mark` was ever called, by any process."""
        return os.fstat(self._file).st_size > 0

    def mark(self) -> None:
        """Remember, on the disk, that the folder holds what must not be lost."""
        if not self.marked:
            os.pwrite(self._file, b"used\n", 0)
            os.fsync(self._file)
