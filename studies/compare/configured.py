# SPDX-License-Identifier: Apache-2.0
"""A run that is set up from options, as comparisons see it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import pytorch_lightning as pl
from jsonargparse import ArgumentParser, Namespace

from perada.data import FederatedDataModule
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier


class ConfiguredRun(Protocol):
    """Trainer, model, data and options of a run, as ``perada fit`` makes them.

    Attributes:
        model: The module.
        datamodule: The data.
        trainer: The trainer.
        config: The options.
    """

    model: FederatedClassifier
    datamodule: FederatedDataModule
    trainer: pl.Trainer
    config: Namespace

    @property
    def parser(self) -> ArgumentParser:
        """The parser of the options."""

    @property
    def loop(self) -> FederatedLoop:
        """The rounds."""


MakeCLI = Callable[[Sequence[str]], ConfiguredRun]
"""Builds trainer, model and data from options of ``perada fit``."""
