# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: which is whole, and what they hold. Anyone may have written them, so no code of theirs is run."""

import hashlib
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch

from perada.core.ranks import this_rank
from perada.federation.store import locate

CHECKPOINT_KEY = "perada"
"""Where a checkpoint of Lightning's has what perada puts into it."""
MARK = b"perada-sha256:"
COMMENT = len(MARK) + 64
LENGTH = struct.pack("<H", COMMENT)  # stands before the comment of a zip archive
LAST = "last.ckpt"
PREVIOUS = "last.previous.ckpt"
"""The checkpoint that :data:`LAST` replaced, beside it."""
_RESTORING = "while a checkpoint's content took its place"
_OTHER = "give another, or 'last' for the newest that is whole"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "federation": dict,
    "history": list,
    "step": int,
    "scores": dict,
    "per_client": dict,
    **dict.fromkeys(("belongs", "measured", "per_class", "shifted", "info", "options"), dict),
}


def check_whole_file(path: Path) -> None:
    """Refuse a checkpoint that is cut off or whose bytes are not those that were written, by a ValueError.

    Of one that another program wrote the checksums are compared that each tensor has in a zip archive.
    """
    damage = damage_of(path)
    if damage:
        raise ValueError(f"ckpt_path={str(path)!r} {damage}; give another, or 'last' for the newest that is whole")


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint file, to stand behind its name; ``None`` if it is as it was written."""
    with path.open("rb") as file:
        content = max(0, path.stat().st_size - len(LENGTH) - COMMENT)
        file.seek(content)
        end = file.read()
        if end.startswith(LENGTH + MARK):
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(min(content - file.tell(), 2**22)):
                digest.update(block)
            digest.update(b"\0\0")
            written = end.removeprefix(LENGTH + MARK).decode(errors="replace")
            return (
                None if digest.hexdigest() == written else "is damaged: its content does not have the digest it names"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.comment or MARK in end:
                return "is damaged: its end is not as it was written"
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        return f"is not a checkpoint, or was cut off ({' '.join(str(error).split())[:150]})"
    return None if broken is None else f"is damaged: the checksum of {broken!r} in it does not fit"


def newest_whole(paths: Iterable[Path]) -> Path | None:
    """The checkpoint written last that is whole, whatever its name; None if there is none.

    Damaged ones are left out with a warning. Where a folder has ``last.ckpt``, what that replaced is older, whatever
    the times of the files say: copying changes them.
    """
    found = set(paths)

    def age(path: Path) -> tuple[int, str, bool]:
        replaced = path.name == PREVIOUS and path.with_name(LAST) in found
        shown = path.with_name(LAST) if replaced else path
        return shown.stat().st_mtime_ns, str(shown), not replaced

    for path in sorted(found, key=age, reverse=True):
        damage = damage_of(path)
        if damage is None:
            return path
        if not this_rank():
            what = f"{str(path)!r} {damage}, so the checkpoint before it is taken, if there is one"
            warnings.warn(what, stacklevel=2)
    return None


def find_clients(states: dict[str, Any], path: str | Path | None) -> None:
    """Let the saved states of a federation name its clients' files where they are now, beside the checkpoint."""
    for name in ("clients", "tuned"):
        if path is not None and states[name] is not None:
            states[name] = locate(states[name], Path(path))


def contents(saved: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever a file holds
    """What perada put into a checkpoint, after checking that the parts are of the kinds that it writes.

    A ValueError if they are not.
    """
    if saved is None:
        raise ValueError("the checkpoint was not written by perada: it holds no federation; give one of a perada run")
    whole = isinstance(saved, dict) and all(isinstance(saved.get(name), kind) for name, kind in _KINDS.items())
    whole = whole and all(isinstance(values, torch.Tensor) for values in saved["per_client"].values())
    rows = saved["history"] if whole else []
    whole = whole and all(isinstance(row, dict) and {"round", "step"} <= row.keys() for row in rows)
    whole = whole and all(isinstance(value, int | float) for row in rows for value in row.values())
    scored = saved["measured"].get("by_round", []) if whole else []
    one_each = isinstance(scored, list) and all(isinstance(row, dict) for row in scored)
    if not whole or not one_each or not all(isinstance(row.get("round"), int) for row in scored):
        raise ValueError(f"the checkpoint does not hold what perada writes; {_OTHER}")
    return cast(dict[str, Any], saved)


@contextmanager
def restoring() -> Iterator[None]:
    """Mark the errors that come up while a checkpoint's content takes its place, for :func:`plain_data`."""
    try:
        yield
    except Exception as error:
        error.add_note(_RESTORING)
        raise


@contextmanager
def plain_data(ckpt_path: str | None, trainer: Any = None) -> Iterator[None]:  # noqa: ANN401  # a pl.Trainer
    """Say in one line, by a ValueError, that a checkpoint holds more than data, or other data than perada writes.

    No code that it brings is run. With a ``trainer`` this is of what it restores, else of all that is done in here.
    """
    if trainer is not None:
        connector = trainer._checkpoint_connector
        for name in ("_restore_modules_and_callbacks", "restore_training_state"):
            setattr(connector, name, restoring()(getattr(connector, name)))
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        marked = trainer is None or _RESTORING in getattr(error, "__notes__", ())
        if ckpt_path is None or isinstance(error, torch.distributed.DistError) or not marked:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"ckpt_path={ckpt_path!r} does not hold what perada writes ({reason}); {_OTHER}") from error
    except UnpicklingError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"ckpt_path={ckpt_path!r} holds more than tensors and plain data, and is not read, since it could run any "
            f"code ({reason}); if you trust it, and a callback of your own put that there, give weights_only=False to "
            "Trainer.fit, or --weights_only=false to the program"
        ) from error
