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

_TRIES_STEPS = "it runs trial training steps, which no ledger counts; set batch_size and learning rates yourself"
_AVERAGES = (
    "it averages the module's weights, but the trained ones are the clients' states, stored outside the module; "
    "choose an algorithm or a server rule that averages, or export the checkpoint of a different round"
)
UNSUPPORTED_CALLBACKS: dict[type[pl.Callback], str] = {
    BatchSizeFinder: _TRIES_STEPS,
    LearningRateFinder: _TRIES_STEPS,
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    BaseFinetuning: (
        "it freezes and unfreezes the module's parameters during training, but what clients train is fixed at set-up; "
        "use the adapter, its last_blocks or train_backbone instead"
    ),
    ModelPruning: (
        "it prunes the module's weights, but the trained ones are the clients' states, stored outside the module; "
        "prune a model returned by Run.personal or Run.merged"
    ),
    GradientAccumulationScheduler: "a batch is one local step of every client; set a larger batch_size",
    LearningRateMonitor: (
        "it would log 0, the rate of a dummy optimiser; the clients' rates follow from lr_personal, lr_local and "
        "lr_schedule"
    ),
    SpikeDetection: (
        "it inspects the loss that a training step returns, but rounds return none; set max_failures to end a run "
        "whose clients fail"
    ),
}
"""Why a callback class and its subclasses are not supported, and what to do instead."""


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raise a ValueError for a trainer's callbacks that federated rounds do not support."""
    for callback in callbacks_of(trainer):
        for kind, reason in UNSUPPORTED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} is not supported: {reason}")
