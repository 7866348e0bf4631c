# SPDX-License-Identifier: Apache-2.0
"""A progress bar that counts rounds."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar over the local steps of a round, labelled with the round."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the round's bar; Lightning's own would first show it as an epoch's."""
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        last = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        self.train_progress_bar.reset(total=int(self.total_train_batches))
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch}{last}")
