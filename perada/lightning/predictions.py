# SPDX-License-Identifier: Apache-2.0
"""Predictions as a table."""

import csv
from collections.abc import Mapping
from pathlib import Path

import pytorch_lightning as pl
from torch import Tensor

from perada.core.files import writing


class PredictionFile(pl.Callback):
    """Writes ``predictions.csv`` into the run's folder when the trainer predicts, a row per test image.

    Columns: ``image`` (counted over all clients' test sets, in order of client), ``client`` who owns it, ``label``, and
    what the owner's ``personal`` and the ``global`` model predict (where there is one); the 0/1 labels of a multi-label
    image are separated by spaces.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._rows: list[list[str]] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an empty table."""
        self._rows = []

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Mapping[str, Tensor],
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        models = [name for name in ("personal", "global") if name in outputs]
        self._rows = self._rows or [["image", "client", "label", *models]]
        columns = [outputs["owner"], outputs["y"]]
        for name in models:
            logits = outputs[name]
            columns.append((logits > 0).long() if outputs["y"].dim() > 1 else logits.argmax(-1))
        for row in zip(*(column.tolist() for column in columns), strict=True):
            self._rows.append([str(len(self._rows) - 1), *map(_cell, row)])

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the table."""
        folder = trainer.log_dir if trainer.loggers else None  # all processes ask, rank 0 writes
        if self._rows and folder and trainer.is_global_zero:
            self.path = Path(folder) / "predictions.csv"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with writing(self.path), self.path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self._rows)


def _cell(value: object) -> str:
    return " ".join(str(int(one)) for one in value) if isinstance(value, list) else str(value)
