# SPDX-License-Identifier: Apache-2.0
"""A Lightning trainer with perada's defaults."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.checks import check_precision, check_trainer
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.progress import round_progress
from perada.lightning.strategies import choose_strategy, device_defaults


def make_trainer(loop: FederatedLoop, rounds: int, eval_every: int = 1, **options: Any) -> pl.Trainer:
    """A trainer for ``rounds`` rounds with perada's defaults: one device, CSV logs, a checkpoint after every round.

    Under torchrun it has as many devices as processes were started. Without a logger there is no run folder, and no
    checkpoint unless a callback writes one.

    Raises:
        ValueError: If an option cannot be used.
    """
    check_precision(options.get("precision"))
    given = options.pop("callbacks", None) or []
    callbacks = [loop, *(given if isinstance(given, list) else [given])]
    own = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if not own:
        options.setdefault("enable_checkpointing", options.get("logger") is not False)
        if options["enable_checkpointing"]:
            callbacks.append(RoundCheckpoint())
    if options.get("enable_progress_bar", True) and not any(isinstance(c, pl.callbacks.ProgressBar) for c in callbacks):
        callbacks.append(round_progress())
    defaults: dict[str, Any] = {
        **device_defaults(),
        "max_epochs": rounds,
        "check_val_every_n_epoch": eval_every,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "enable_model_summary": False,
    }
    if options.get("logger", True) is True:
        options["logger"] = CSVLogger(options.get("default_root_dir") or ".")
    options = defaults | options
    options["strategy"] = choose_strategy(options.get("strategy"), options["devices"], options.get("num_nodes", 1))
    trainer = pl.Trainer(callbacks=callbacks, **options)
    check_trainer(trainer)
    return trainer
