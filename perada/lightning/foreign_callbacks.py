# SPDX-License-Identifier: Apache-2.0
"""Lightning's callbacks that act on a module's weights, gradients or steps, and cannot be used in federated rounds."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)

from perada.lightning.trainer_attributes import callbacks_of

_TRIES_STEPS = "it trains steps on trial, which no ledger counts; set batch_size and learning rates yourself"
_AVERAGES = (
    "it averages the weights of the module, and those that are trained are the clients' states, kept beside it; "
    "choose an algorithm or a server rule that averages, or export another round's checkpoint"
)
UNSUPPORTED_CALLBACKS: dict[type[pl.Callback], str] = {
    BatchSizeFinder: _TRIES_STEPS,
    LearningRateFinder: _TRIES_STEPS,
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    BaseFinetuning: (
        "it freezes and unfreezes the module's parameters in training, and what clients train is settled at set-up; "
        "choose the adapter, its last_blocks or train_backbone"
    ),
    ModelPruning: (
        "it prunes the weights of the module, and those that are trained are the clients' states, kept beside it; "
        "prune a model that Run.personal or Run.merged returns"
    ),
    GradientAccumulationScheduler: "a batch is one local step of every client; give a larger batch_size",
    LearningRateMonitor: (
        "it would log 0, the rate of an optimiser without effect; the clients' rates follow from lr_personal, lr_local "
        "and lr_schedule"
    ),
    SpikeDetection: (
        "it looks at the loss that a training step returns, and rounds return none; max_failures ends a run whose "
        "clients fail"
    ),
}
"""Why a kind of callback, or one derived from it, cannot be used, and what to do."""


def check_callbacks(trainer: pl.Trainer) -> None:
    """Reject, by a ValueError, callbacks of a trainer that federated rounds cannot run with."""
    for callback in callbacks_of(trainer):
        for kind, reason in UNSUPPORTED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} cannot be used: {reason}")
