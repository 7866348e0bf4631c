# SPDX-License-Identifier: Apache-2.0
"""Files that come into a folder together: whoever is killed while writing them leaves the former ones or the new."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from perada.core.files import locked, sync, sync_tree

STAGE, READY = ".perada-saving", ".perada-saved"
"""Folders within the folder: of what is being written, and of what has been written in full and is to be moved."""


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """Give a folder to write into; at the end its files take their places in ``folder``, in which others stay.

    Until the last of them is written nothing in ``folder`` has changed. From then on the new ones count: if moving them
    is interrupted, :func:`finish` completes it. Files are locked meanwhile, by which those of a living process can be
    told from what one that was killed left behind. An OSError of the disk, such as that it is full, names the folder
    and says which of both is the case; a BlockingIOError that another process writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finish(folder)
    stage = folder / STAGE
    with ExitStack() as held:
        try:
            stage.mkdir()
        except FileExistsError:
            raise _busy(folder) from None
        if not held.enter_context(locked(stage)) or not stage.is_dir():
            raise _busy(folder)
        try:
            yield stage
            sync_tree(stage)
            stage.rename(folder / READY)
        except BaseException as error:
            shutil.rmtree(stage, ignore_errors=True)
            named = _named(error, f"{str(folder)!r} could not be written, and was not changed")
            if named is None:
                raise
            raise named from error
        try:
            sync([folder])
            _move(folder)
        except OSError as error:
            what = f"{str(folder)!r} was written, but not all files are in their places: load it, or write it again"
            raise OSError(error.errno, f"{what} ({error})") from error


def _busy(folder: Path) -> BlockingIOError:
    what = f"another process is writing a run into {str(folder)!r}; wait until it has ended, or give another folder"
    return BlockingIOError(errno.EAGAIN, what)


def _named(error: BaseException, what: str) -> OSError | None:
    """An error of the disk with ``what`` in front; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError) and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    if number is None:
        return None
    reason = error.strerror if isinstance(error, OSError) and error.filename is None else error
    return OSError(number, f"{what} ({reason})")


def finish(folder: Path) -> None:
    """Put in place what was written in full before whoever wrote it was killed, and delete what was not.

    What a living process writes is left to it; while it moves files, it is waited for. A ValueError if this would move
    files out of the folder or into it, since links lead there.
    """
    with locked(folder / READY, wait=True):
        _move(folder)
    with locked(folder / STAGE) as alone:
        if alone and (folder / STAGE).is_dir():
            shutil.rmtree(folder / STAGE)


def _move(folder: Path) -> None:
    """Put the files in their places."""
    ready, changed = folder / READY, {folder}
    moved = [] if ready.is_symlink() else sorted(ready.rglob("*"))
    places = {path: folder / path.relative_to(ready) for path in moved}
    for path in (ready, folder / STAGE, *moved, *(places[path] for path in moved if path.is_dir())):
        if path.is_symlink():
            raise ValueError(
                f"{str(path)!r} is a link to {str(path.resolve())!r}, and files of the run would be moved there; "
                "delete the link, or save the run into another folder"
            )
    for path, target in places.items():
        if path.is_dir():
            target.mkdir(exist_ok=True)
            changed.add(target)
        else:
            path.replace(target)
    if ready.is_dir():
        sync(changed)  # before the last trace of what is to be moved goes
        with suppress(FileNotFoundError):  # somebody deletes the folder meanwhile
            shutil.rmtree(ready)
