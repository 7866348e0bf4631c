# SPDX-License-Identifier: Apache-2.0
"""What is in a run's folder."""

from dataclasses import replace
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger

from perada.federation.store import Storage
from perada.lightning.checkpoint import RoundCheckpoint


def run_folder(trainer: pl.Trainer) -> Path | None:
    """The run's folder; ``None`` where it has none."""
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        return None
    return Path(trainer.log_dir) if trainer.log_dir else None


def log_history(trainer: pl.Trainer, history: list[dict[str, float]]) -> None:
    """Give CSV files the rounds before a resumed one too, so that the run's folder holds them all."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            for record in history:
                values = {name: value for name, value in record.items() if name not in ("round", "step")}
                logger.log_metrics({"epoch": record["round"], **values}, step=int(record["step"]) - 1)


def storage(wanted: Storage, clients_per_round: int, num_clients: int, trainer: pl.Trainer) -> Storage:
    """Where a run holds its clients' states: their files, if any, are in its folder.

    Files that only older checkpoints name are deleted where all that writes checkpoints replaces its own.
    """
    limit, folder = trainer.max_epochs, run_folder(trainer)
    return replace(
        wanted,
        folder=None if folder is None else folder / "clients",
        prune=all(isinstance(callback, RoundCheckpoint) for callback in trainer.checkpoint_callbacks),
        clients=num_clients if limit is None or limit < 0 else min(num_clients, limit * clients_per_round),
    )
