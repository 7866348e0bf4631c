# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that anyone may have written: their code is not run, and what they hold is what perada writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any, cast

import pytorch_lightning as pl
import torch

_MARK = "while a checkpoint's content took its place"
_OTHER = "give another, or 'last' for the newest that is whole"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "federation": dict,
    "history": list,
    "step": int,
    "scores": dict,
    "per_client": dict,
    "belongs": dict,
}
_KINDS_OF_NEWER = dict.fromkeys(("measured", "per_class", "shifted", "info", "options"), dict)


def contents(saved: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever a file holds
    """What perada put into a checkpoint, after checking that the parts are of the kinds that it writes.

    A ValueError if they are not.
    """
    if saved is None:
        raise ValueError("the checkpoint was not written by perada: it holds no federation; give one of a perada run")
    kinds = _KINDS | {name: kind for name, kind in _KINDS_OF_NEWER.items() if isinstance(saved, dict) and name in saved}
    whole = isinstance(saved, dict) and all(isinstance(saved.get(name), kind) for name, kind in kinds.items())
    whole = whole and all(isinstance(values, torch.Tensor) for values in saved["per_client"].values())
    rows = saved["history"] if whole else []
    whole = whole and all(isinstance(row, dict) and {"round", "step"} <= row.keys() for row in rows)
    whole = whole and all(isinstance(value, int | float) for row in rows for value in row.values())
    scored = saved.get("measured", {}).get("by_round", []) if whole else []
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
        error.add_note(_MARK)
        raise


@contextmanager
def plain_data(ckpt_path: str | None, trainer: pl.Trainer | None = None) -> Iterator[None]:
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
        marked = trainer is None or _MARK in getattr(error, "__notes__", ())
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
