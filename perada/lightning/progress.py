# SPDX-License-Identifier: Apache-2.0
"""How far a run is: a bar that counts rounds, or a line for each."""

import sys
import time

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar
from tqdm import tqdm

from perada.core.text import SPREADS
from perada.lightning.federated_loop import ON_THE_BAR, FederatedLoop


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar over the local steps of a round, labelled with the round."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the round's bar; Lightning's own would first show it as an epoch's."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        last = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        self.train_progress_bar.reset(total=int(self.total_train_batches))
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch}{last}")


class RoundLines(pl.callbacks.ProgressBar):
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
        known = trainer.max_epochs is not None and trainer.max_epochs > 0
        words = [f"{now - self._since:.1f} s"]
        if known and (left := (trainer.max_epochs or 0) - 1 - round):
            words.append(f"{tqdm.format_interval((now - self._began) / (round + 1 - self._first) * left)} left")
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning
        record = next((one.history[-1] for one in callbacks if isinstance(one, FederatedLoop) and one.history), {})
        scores = {name: value for name, value in record.items() if name.startswith(("personal/", "global/"))}
        words += [f"{name} {100 * value:.2f} %" for name, value in scores.items() if not name.endswith(SPREADS)]
        words += [f"{name} {record[name]:.3g}" for name in ON_THE_BAR if name in record]
        last = f"/{(trainer.max_epochs or 0) - 1}" if known else ""
        print(f"Round {round}{last}: {', '.join(words)}", file=sys.stderr, flush=True)


def round_progress() -> RoundProgressBar | RoundLines:
    """Bars in a terminal or a notebook, elsewhere lines."""
    return RoundProgressBar() if sys.stderr.isatty() or "ipykernel" in sys.modules else RoundLines()
