# SPDX-License-Identifier: Apache-2.0
"""Trainers with perada's defaults: logger, strategy, progress bar and checkpoints."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger

from perada.lightning.callbacks import round_progress
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.strategies import choose_strategy, device_defaults
from perada.lightning.trainer_setup import check_devices, check_trainer, check_words

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False}
"""Options of a trainer whose defaults differ from Lightning's."""


def make_trainer(loop: FederatedLoop, rounds: int, **options: Any) -> pl.Trainer:
    """Create a trainer with perada's defaults: one device, CSV logs, a checkpoint after every round.

    Under torchrun it has as many devices as processes were started. Without a logger there is no run folder, and no
    checkpoint unless a callback writes one.

    Args:
        loop: The loop, which becomes the first callback.
        rounds: Number of rounds.
        options: Options of Lightning's Trainer, such as ``check_val_every_n_epoch``, the number of rounds from one
            evaluation to the next.

    Raises:
        ValueError: If an option cannot be used.
    """
    callbacks = as_callback_list(options.pop("callbacks", None))
    options = TRAINER_DEFAULTS | {"max_epochs": rounds} | device_defaults() | options
    check_devices(options.get("accelerator", "auto"), options["devices"])
    check_words(options)
    default_options, default_callbacks = default_components(options, callbacks)
    trainer = pl.Trainer(callbacks=[loop, *callbacks, *default_callbacks], **options | default_options)
    check_trainer(trainer)
    return trainer


def default_components(
    options: Mapping[str, Any], callbacks: list[pl.Callback]
) -> tuple[dict[str, Any], list[pl.Callback]]:
    """Choose perada's logger, strategy, progress bar and checkpoint for a trainer that lacks them.

    Args:
        options: The trainer's options, with ``devices``.
        callbacks: The trainer's callbacks.

    Returns:
        Options that replace the trainer's, and further callbacks.
    """
    replaced: dict[str, Any] = {}
    added: list[pl.Callback] = []
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if options.get("enable_progress_bar") is not False and not has_bar:
        added.append(round_progress())

    has_logger = options.get("logger") is not False
    writers = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    saves = options.get("enable_checkpointing")
    if saves is None and not has_logger:
        # Lightning would add a ModelCheckpoint of its own, which writes below default_root_dir.
        saves = bool(writers)
        replaced["enable_checkpointing"] = saves
    # A callback such as OnExceptionCheckpoint does not replace the checkpoints of the rounds. Without a logger there is
    # no folder for these, and any callback that writes checkpoints is enough.
    writes_rounds = any(isinstance(writer, ModelCheckpoint) for writer in writers)
    if saves is not False and not writes_rounds and (has_logger or not writers):
        added.append(RoundCheckpoint())

    if options.get("logger") in (None, True):
        replaced["logger"] = CSVLogger(options.get("default_root_dir") or ".")
    replaced["strategy"] = choose_strategy(options.get("strategy"), options["devices"], options.get("num_nodes", 1))
    return replaced, added


def as_callback_list(callbacks: pl.Callback | list[pl.Callback] | None) -> list[pl.Callback]:
    """Return the callbacks of a trainer, which Lightning takes as none, one or a list, as a list."""
    if isinstance(callbacks, list):
        return callbacks
    return [callbacks] if callbacks else []
