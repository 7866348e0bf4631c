# SPDX-License-Identifier: Apache-2.0
"""A progress bar that counts rounds."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar over the local steps of a round, labelled with the round."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Label the bar."""
        super().on_train_epoch_start(trainer, pl_module)
        last = f"/{trainer.max_epochs - 1}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch}{last}")
