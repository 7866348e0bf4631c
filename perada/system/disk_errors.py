# SPDX-License-Identifier: Apache-2.0
"""Errors of disks that are full, read-only, failing or not mounted, as one sentence with the remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import fsdecode
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Numbers of errors that only disks cause, and neither a network nor a wrong path."""
_MOUNT_AGAIN = "mount its disk again, or restore the folder"
_REMEDIES = {
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "delete files, or raise this user's disk quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "make its disk writable again; the kernel's log (dmesg) has the reason if it failed",
    errno.EIO: "check its disk: the kernel's log (dmesg) has the failure",
    errno.EACCES: "let this user read and write it",
    errno.EPERM: "let this user read and write it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files",
    errno.ENOENT: _MOUNT_AGAIN,
    errno.ENOTDIR: _MOUNT_AGAIN,
    errno.ENODEV: _MOUNT_AGAIN,
    errno.ENXIO: _MOUNT_AGAIN,
    errno.ESTALE: _MOUNT_AGAIN,
    errno.ENOTCONN: _MOUNT_AGAIN,
}
_OTHER_REMEDY = "check that its disk is mounted and can be written"
_ONLY_READABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors after which files can still be read."""


class DiskError(OSError):
    """A file or folder that cannot be read or written. The message is one sentence: path, reason and remedy."""

    def __str__(self) -> str:
        access = "written" if self.errno in _ONLY_READABLE else "read or written"
        remedy = _REMEDIES.get(self.errno or 0, _OTHER_REMEDY)
        return f"{self.filename!r} cannot be {access}: {self.strerror}; {remedy}"


@contextmanager
def naming_disk(path: Path) -> Iterator[None]:
    """Raise the system's errors about files as a :class:`DiskError`.

    Errors that this package raises with a message of its own have no number, and are raised unchanged.

    Args:
        path: File or folder to name if the error does not name one.

    Raises:
        DiskError: If a system call fails.
    """
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        raise as_disk_error(error, path) from error


def as_disk_error(error: OSError, path: Path) -> DiskError:
    """Return an error of the system with the remedy.

    Args:
        error: The error.
        path: File or folder to name if the error does not name one.
    """
    name = path if error.filename is None or isinstance(error.filename, int) else error.filename
    return DiskError(error.errno, error.strerror, fsdecode(name))
