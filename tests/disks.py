# SPDX-License-Identifier: Apache-2.0
"""Disks on which there is no room."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """Have the system reject every byte of a file beyond ``size``: as on a full disk, its error has no path."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
