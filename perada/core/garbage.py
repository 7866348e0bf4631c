# SPDX-License-Identifier: Apache-2.0
"""Control when Python's garbage collector runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while large libraries are imported.

    Importing PyTorch Lightning, PEFT and timm makes about a million objects, of which next to none is garbage. The
    collector would nevertheless visit all of them again and again, which takes a sixth of the time of the import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Have the garbage collector skip all current objects, most of which belong to imported modules.

    Each full collection would visit them all. They are handed back to it at the end.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
