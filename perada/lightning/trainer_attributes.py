# SPDX-License-Identifier: Apache-2.0
"""Attributes of a Trainer that Lightning's own modules set without declaring them, with their types."""

from typing import Any

import pytorch_lightning as pl


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the trainer's list of callbacks itself; a callback appended to it takes part in the run."""
    undeclared: Any = trainer
    callbacks: list[pl.Callback] = undeclared.callbacks
    return callbacks


def datamodule_of(trainer: pl.Trainer) -> object:
    """Return the data module of the running fit, validation or test; None without one."""
    undeclared: Any = trainer
    datamodule: object = undeclared.datamodule
    return datamodule


def is_dev_run(trainer: pl.Trainer) -> bool:
    """Return whether ``fast_dev_run`` is set: a test run of a few steps that writes nothing."""
    undeclared: Any = trainer
    return bool(undeclared.fast_dev_run)
