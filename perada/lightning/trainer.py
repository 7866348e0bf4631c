# SPDX-License-Identifier: Apache-2.0
"""A Lightning trainer with perada's defaults."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger

from perada.lightning.callbacks import round_progress
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.checks import check_precision, check_trainer
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.strategies import choose_strategy, device_defaults


def make_trainer(loop: FederatedLoop, rounds: int, eval_every: int = 1, **options: Any) -> pl.Trainer:
    """A trainer for ``rounds`` rounds with perada's defaults: one device, CSV logs, a checkpoint after every round.

    Under torchrun it has as many devices as processes were started. Without a logger there is no run folder, and no
    checkpoint unless a callback writes one.

    Raises:
        ValueError: If an option cannot be used.
    """
    given = listed(options.pop("callbacks", None))
    defaults: dict[str, Any] = {
        **device_defaults(),
        "max_epochs": rounds,
        "check_val_every_n_epoch": eval_every,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    }
    options = defaults | options
    chosen, added = own_parts(options, given)
    trainer = pl.Trainer(callbacks=[loop, *given, *added], **options | chosen)
    check_trainer(trainer)
    return trainer


def own_parts(options: Mapping[str, Any], callbacks: list[pl.Callback]) -> tuple[dict[str, Any], list[pl.Callback]]:
    """What a trainer with these options and callbacks lacks: perada's logger and strategy, bar and checkpoint.

    Returns:
        Options over those given, and callbacks beside those given.

    Raises:
        ValueError: If the precision is none that rounds support.
    """
    check_precision(options.get("precision"))
    chosen: dict[str, Any] = {}
    added: list[pl.Callback] = []
    if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
        added.append(round_progress())
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        if options.get("logger") is False and options.get("enable_checkpointing") is None:
            chosen["enable_checkpointing"] = False  # without a logger there is no run folder to write to
        elif options.get("enable_checkpointing") is not False:
            added.append(RoundCheckpoint())
    if options.get("logger") in (None, True):
        chosen["logger"] = CSVLogger(options.get("default_root_dir") or ".")
    chosen["strategy"] = choose_strategy(options.get("strategy"), options["devices"], options.get("num_nodes", 1))
    return chosen, added


def listed(callbacks: pl.Callback | list[pl.Callback] | None) -> list[pl.Callback]:
    """Callbacks as Lightning takes them, none, one or several, as a list."""
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
