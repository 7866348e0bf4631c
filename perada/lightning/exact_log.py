# SPDX-License-Identifier: Apache-2.0
"""Logs numbers without a loss of digits."""

import pytorch_lightning as pl
import torch


def log_exactly(module: pl.LightningModule, name: str, value: float, *, prog_bar: bool = False) -> None:
    """Log a number of the whole epoch with all its digits.

    ``LightningModule.log`` (2.6) converts a Python number to float32. The history of a run, its checkpoints and
    ``run.json`` have the number itself, and a resumed run writes earlier rounds from there: the tables of an
    interrupted and an uninterrupted run would differ. All processes must log the same number.

    Args:
        module: Module that logs.
        name: Name of the metric.
        value: The number.
        prog_bar: Whether the progress bar displays it.
    """
    # On the CPU: some accelerators have no float64.
    number = torch.tensor(value, dtype=torch.float64)
    module.log(name, number, on_step=False, on_epoch=True, batch_size=1, prog_bar=prog_bar)
