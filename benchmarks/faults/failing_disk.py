# SPDX-License-Identifier: Apache-2.0
"""A disk that fails for some operations on files, and then heals. It is simulated within this process."""

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

ERRORS = {"ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EIO": errno.EIO}
"""A full disk, a read-only one, and one that is broken."""
BY_DESCRIPTOR = ("write", "pwrite", "fsync", "fdatasync", "ftruncate")
"""Functions of ``os`` that write to an open file."""
BY_PATH = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
"""Functions of ``os`` that change names."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FailingDisk:
    """A disk on which operations that write fail while ``with`` lasts, from one on and for some number of them.

    What a failed operation has done depends on the error, as it does on real disks. With ENOSPC half of the bytes of a
    write are there; with EROFS nothing is; with EIO everything is, but the caller is not told so.

    Args:
        folder: The folder that the disk has. Other folders are not affected.
        first: Number of operations before the first one that fails.
        count: Number of operations that fail; 0 only counts the operations.
        error: Number of the error, one of :data:`ERRORS`.

    Attributes:
        num_operations: Number of operations so far.
    """

    def __init__(self, folder: Path, first: int = 0, count: int = 0, error: int = errno.ENOSPC) -> None:
        self.folder = str(folder)
        self.first = first
        self.count = count
        self.error = error
        self.num_operations = 0
        self._patches = ExitStack()
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether an operation has failed."""
        return self.count > 0 and self.num_operations > self.first

    @property
    def is_healed(self) -> bool:
        """Whether no further operation fails."""
        return self.num_operations >= self.first + self.count

    def __enter__(self) -> "FailingDisk":
        replacements: list[tuple[Any, str, Callable[..., Any]]] = [(os, "open", self._os_open(os.open))]
        for name in BY_DESCRIPTOR:
            replacements.append((os, name, self._by_descriptor(getattr(os, name))))
        for name in BY_PATH:
            replacements.append((os, name, self._by_path(getattr(os, name))))
        # pathlib calls io.open.
        for module in (builtins, io):
            replacements.append((module, "open", self._open(open)))
        for module, name, function in replacements:
            self._patches.enter_context(mock.patch.object(module, name, function))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def fails(self) -> bool:
        """Count an operation, and return whether it fails."""
        with self._lock:
            number = self.num_operations
            self.num_operations += 1
        return self.first <= number < self.first + self.count

    def make_error(self, path: object = None) -> OSError:
        """Return the error of a failed operation; those on open files do not name the file."""
        if path is None:
            return OSError(self.error, os.strerror(self.error))
        return OSError(self.error, os.strerror(self.error), str(path))

    def _has(self, path: object) -> bool:
        """Return whether a path, or the file of a descriptor, is on the disk."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        if not isinstance(path, str | os.PathLike):
            return False
        text = os.fspath(path)
        return isinstance(text, str) and (text == self.folder or text.startswith(self.folder + os.sep))

    def _by_descriptor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that fails instead of one that writes to an open file."""

        def call(descriptor: int, *arguments: Any) -> object:
            if not self._has(descriptor) or not self.fails():
                return original(descriptor, *arguments)
            is_write = original.__name__ in ("write", "pwrite")
            if self.error == errno.EIO:
                original(descriptor, *arguments)
            elif self.error == errno.ENOSPC and is_write:
                content, *others = arguments
                original(descriptor, content[: len(content) // 2], *others)
            raise self.make_error()

        return call

    def _by_path(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that fails instead of one that changes names."""

        def call(path: object, *arguments: Any, **options: Any) -> object:
            if not self._has(path) or not self.fails():
                return original(path, *arguments, **options)
            if self.error == errno.EIO and _is_possible(original.__name__, path):
                original(path, *arguments, **options)
            raise self.make_error(path)

        return call

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        """Return a function that fails instead of ``os.open``, if the file is opened for writing."""

        def call(path: object, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & _WRITING and self._has(path) and self.fails():
                raise self.make_error(path)
            return original(path, flags, *arguments, **options)

        return call

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that opens files for writing in such a way that their writes may fail."""

        def call(file: object, mode: str = "r", *arguments: Any, **options: Any) -> object:
            is_written = any(letter in mode for letter in "wax+")
            if not is_written or not self._has(file):
                return original(file, mode, *arguments, **options)
            if "opener" not in options and self.fails():
                # An opener calls os.open, which may fail itself.
                raise self.make_error(file)
            opened = original(file, mode, *arguments, **options)
            return _FailingFile(opened, self)

        return call


class _FailingFile:
    """A file that is open for writing, whose writes may fail.

    Args:
        file: The file.
        disk: The disk.
    """

    def __init__(self, file: BinaryIO, disk: FailingDisk) -> None:
        self._file = file
        self._disk = disk

    def __enter__(self) -> "_FailingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, content: str | bytes) -> int:
        """Write text or bytes."""
        if not self._disk.fails():
            return self._file.write(content)
        if self._disk.error == errno.EIO:
            self._file.write(content)
        elif self._disk.error == errno.ENOSPC:
            self._file.write(content[: len(content) // 2])
        self._file.flush()
        raise self._disk.make_error()


def _is_possible(name: str, path: str | bytes | os.PathLike[str]) -> bool:
    """Return whether a function that changes names would succeed, as far as its first path decides."""
    return name == "mkdir" or os.path.lexists(path)
