# SPDX-License-Identifier: Apache-2.0
"""What changes in a trainer where several processes share the work."""

import warnings
from typing import Any

import pytorch_lightning as pl

from perada.core.ranks import Ranks
from perada.data import FederatedDataModule
from perada.federation.settings import Settings
from perada.lightning.module import FederatedClassifier


def share_work(trainer: pl.Trainer) -> None:
    """Leave the batches as the datamodule gives them, and the logged values as they are on every process."""
    # Lightning would divide the steps of a round among the processes; the datamodule divides its clients.
    trainer._accelerator_connector.use_distributed_sampler = False
    # Every process logs the same values, those of all clients.
    warnings.filterwarnings("ignore", "It is recommended to use .* when logging on epoch level in distributed setting")


def options_here(
    settings: Settings, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier, done: int
) -> dict[str, Any]:
    """Options that change what a run computes or how often its processes meet, in plain types.

    Args:
        settings: How the rounds go.
        trainer: The trainer.
        data: The clients' data.
        module: The model.
        done: Rounds behind the checkpoint that the run is resumed from.
    """
    return {
        "number of rounds (max_epochs)": trainer.max_epochs,
        "number of rounds behind it": done,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
        "precision": trainer.precision,
        "batch_size": data.batch_size,
        "eval_batch_size": data.eval_batch_size,
        "clients_per_round": settings.clients_per_round,
        "global_test_clients": module.global_test_clients,
        "metric": module.metric,
        "weighting": settings.weighting,
        "length of local training": repr(settings.phases),
        "local training": repr((settings.training, module.lr_schedule, module.lr_gamma, module.lr_every)),
        "distillation": repr(settings.distillation),
        "privacy": repr((settings.privacy, settings.client_privacy)),
        "algorithm": repr(settings.algorithm),
        "server rule": repr(settings.rule),
    }


def check_alike(ranks: Ranks, belongs: dict[str, Any]) -> None:
    """Compare what the processes are about to train.

    Args:
        ranks: The processes.
        belongs: What a checkpoint of this process would have to belong to.

    Raises:
        ValueError: If they differ; the first difference is named.
    """
    for rank, other in enumerate(ranks.gather(belongs)):
        for name, value in belongs.items():
            if other.get(name) != value:
                raise ValueError(
                    f"process {rank} has another {name} than process {ranks.rank}: data and options must be the same "
                    "in all; draw what is random in your script from a fixed seed"
                )
