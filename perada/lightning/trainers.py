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
from perada.lightning.trainer_setup import check_devices, check_objects, check_trainer, check_words

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
    check_objects(options, callbacks)
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
        Options that take the place of the trainer's, and further callbacks.
    """
    default_options: dict[str, Any] = {}
    default_callbacks: list[pl.Callback] = []
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    wants_bar = options.get("enable_progress_bar") is not False
    if wants_bar and not has_bar:
        default_callbacks.append(round_progress())

    has_logger = options.get("logger") is not False
    writers = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    checkpointing = options.get("enable_checkpointing")
    if checkpointing is None and not has_logger:
        # Lightning would add its own ModelCheckpoint, which writes below default_root_dir.
        checkpointing = bool(writers)
        default_options["enable_checkpointing"] = checkpointing
    if has_logger:
        # A callback such as OnExceptionCheckpoint does not replace the checkpoints of the rounds.
        has_writer = any(isinstance(writer, ModelCheckpoint) for writer in writers)
    else:
        # There is no folder for these, and any callback that writes checkpoints is enough.
        has_writer = bool(writers)
    if checkpointing is not False and not has_writer:
        default_callbacks.append(RoundCheckpoint())

    if options.get("logger") in (None, True):
        folder = options.get("default_root_dir") or "."
        default_options["logger"] = CSVLogger(folder)
    num_nodes = options.get("num_nodes", 1)
    default_options["strategy"] = choose_strategy(options.get("strategy"), options["devices"], num_nodes)
    return default_options, default_callbacks


def as_callback_list(callbacks: pl.Callback | list[pl.Callback] | None) -> list[pl.Callback]:
    """Return the callbacks of a trainer, which Lightning takes as none, one or a list, as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, list):
        return callbacks
    return [callbacks]
