# SPDX-License-Identifier: Apache-2.0
"""Callbacks beside the loop: the progress bar, a table of predictions; and a trainer that has what a run needs."""

import csv
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint, ProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from tqdm import tqdm

from perada.core.files import writing
from perada.core.text import is_spread
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.federated_loop import ON_THE_BAR, FederatedLoop
from perada.lightning.strategies import check_devices, check_trainer, check_words, choose_strategy, device_defaults
from perada.results.report import ENTROPY, cell, title


def _round(trainer: pl.Trainer) -> str:
    # Rounds are counted from 1 wherever they are shown, and from 0 in metrics.csv and in what seeds are derived from.
    last = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
    return f"Round {trainer.current_epoch + 1}{last}"


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar over the local steps of a round, labelled with the round."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the round's bar; Lightning's own would first show it as an epoch's."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self.train_progress_bar.reset(total=int(self.total_train_batches))
        self.train_progress_bar.set_description(_round(trainer))


class RoundLines(ProgressBar):
    """One line on standard error for each round, for files and wherever else there is no terminal.

    A line has the round, its seconds with evaluation, what is left by the mean of the rounds before, and the scores of
    a round that was scored: means over the clients, without their spread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self._first: int | None = None
        self._began = self._since = 0.0

    def disable(self) -> None:
        """Print nothing."""
        self.enabled = False

    def enable(self) -> None:
        """Print lines."""
        self.enabled = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the time."""
        self._since = time.monotonic()
        if self._first is None:
            self._first, self._began = trainer.current_epoch, self._since

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the round, which has been scored by now if it is at all."""
        if not self.enabled or self._first is None:
            return
        now, round = time.monotonic(), trainer.current_epoch
        words = [f"{now - self._since:.1f} s"]
        if (left := (trainer.max_epochs or 0) - 1 - round) > 0:
            words.append(f"{tqdm.format_interval((now - self._began) / (round + 1 - self._first) * left)} left")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning
        record = next((one.history[-1] for one in callbacks if isinstance(one, FederatedLoop) and one.history), {})
        scores = {name: value for name, value in record.items() if name.startswith(("personal/", "global/"))}
        for name, value in scores.items():
            if not is_spread(name):
                unit = "" if name == ENTROPY else " %"
                words.append(f"{title(name)} {cell(name, value)}{unit}")
        words += [f"{name} {record[name]:.3g}" for name in ON_THE_BAR if name in record]
        print(f"{_round(trainer)}: {', '.join(words)}", file=sys.stderr, flush=True)


def round_progress() -> RoundProgressBar | RoundLines:
    """Bars in a terminal or a notebook, elsewhere lines."""
    return RoundProgressBar() if sys.stderr.isatty() or "ipykernel" in sys.modules else RoundLines()


class PredictionFile(pl.Callback):
    """Writes ``predictions.csv`` into the run's folder when the trainer predicts, a row per test image.

    Columns: ``image`` (counted over all clients' test sets, in order of client), ``client`` who owns it, ``label``, and
    what the owner's ``personal`` and the ``global`` model predict (where there is one); the 0/1 labels of a multi-label
    image are separated by spaces.
    """

    path: Path | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start an empty table."""
        self._rows: list[list[str]] = []

    def on_predict_batch_end(self, *hook: Any) -> None:
        """Add a batch; the loop itself keeps none where ``return_predictions`` is false."""
        batch: Mapping[str, Tensor] = hook[2]
        models = [name for name in ("personal", "global") if name in batch]
        self._rows = self._rows or [["image", "client", "label", *models]]
        columns = [batch["owner"], batch["y"]]
        for logits in (batch[name] for name in models):
            columns.append((logits > 0).long() if batch["y"].dim() > 1 else logits.argmax(-1))
        for row in zip(*(map(_cell, column.tolist()) for column in columns), strict=True):
            self._rows.append([str(len(self._rows) - 1), *row])

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the table."""
        folder = trainer.log_dir if trainer.loggers else None  # all processes ask, rank 0 writes
        if self._rows and folder and trainer.is_global_zero:
            self.path = Path(folder) / "predictions.csv"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with writing(self.path), self.path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self._rows)


def _cell(value: object) -> str:
    return " ".join(str(int(one)) for one in value) if isinstance(value, list) else str(value)


TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False}
"""Options of a trainer that have other defaults than Lightning's."""


def make_trainer(loop: FederatedLoop, rounds: int, eval_every: int = 1, **options: Any) -> pl.Trainer:
    """A trainer for ``rounds`` rounds with perada's defaults: one device, CSV logs, a checkpoint after every round.

    Under torchrun it has as many devices as processes were started. Without a logger there is no run folder, and no
    checkpoint unless a callback writes one.

    Raises:
        ValueError: If an option cannot be used.
    """
    given = listed(options.pop("callbacks", None))
    options = (
        TRAINER_DEFAULTS | {"max_epochs": rounds, "check_val_every_n_epoch": eval_every} | device_defaults() | options
    )
    check_devices(options.get("accelerator", "auto"), options["devices"])
    check_words(options)
    chosen, added = default_components(options, given)
    trainer = pl.Trainer(callbacks=[loop, *given, *added], **options | chosen)
    check_trainer(trainer)
    return trainer


def default_components(
    options: Mapping[str, Any], callbacks: list[pl.Callback]
) -> tuple[dict[str, Any], list[pl.Callback]]:
    """What a trainer with these options and callbacks lacks: perada's logger and strategy, bar and checkpoint.

    Returns:
        Options over those given, and callbacks beside those given.
    """
    chosen: dict[str, Any] = {}
    added: list[pl.Callback] = []
    if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
        added.append(round_progress())
    saving, logger = options.get("enable_checkpointing"), options.get("logger")
    writers = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if saving is None and logger is False:
        chosen["enable_checkpointing"] = saving = bool(writers)
    # A checkpoint that is written in an error does not replace those of the rounds, where there is a folder for them.
    every_round = any(isinstance(writer, ModelCheckpoint) for writer in writers) or (logger is False and writers)
    if saving is not False and not every_round:
        added.append(RoundCheckpoint())
    if logger in (None, True):
        chosen["logger"] = CSVLogger(options.get("default_root_dir") or ".")
    chosen["strategy"] = choose_strategy(options.get("strategy"), options["devices"], options.get("num_nodes", 1))
    return chosen, added


def listed(callbacks: pl.Callback | list[pl.Callback] | None) -> list[pl.Callback]:
    """Callbacks as Lightning takes them, none, one or several, as a list."""
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
