# SPDX-License-Identifier: Apache-2.0
"""What changes in a trainer where several processes share the work."""

import warnings
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl

from perada.core.ranks import Ranks
from perada.lightning.steps import parts

if TYPE_CHECKING:
    from perada.lightning.federated_loop import FederatedLoop


def share_work(trainer: pl.Trainer) -> None:
    """Leave the batches as the datamodule gives them, and the logged values as they are on every process."""
    # Lightning would divide the steps of a round among the processes; the datamodule divides its clients.
    trainer._accelerator_connector.use_distributed_sampler = False
    # Every process logs the same values, those of all clients.
    warnings.filterwarnings("ignore", "It is recommended to use .* when logging on epoch level in distributed setting")


def options_here(loop: "FederatedLoop", trainer: pl.Trainer, done: int) -> dict[str, Any]:
    """Options that change what a run computes or how often its processes meet, in plain types.

    Args:
        loop: The federated loop.
        trainer: Its trainer.
        done: Rounds behind the checkpoint that the run goes on from.
    """
    data, module = parts(trainer, trainer.lightning_module)
    schedule = module.lr_schedule, module.lr_gamma, module.lr_every
    return {
        "number of rounds (max_epochs)": trainer.max_epochs,
        "number of rounds behind it": done,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
        "precision": trainer.precision,
        "batch_size": data.batch_size,
        "eval_batch_size": data.eval_batch_size,
        "clients_per_round": loop.clients_per_round,
        "global_test_clients": module.global_test_clients,
        "metric": module.metric,
        "weighting": loop.weighting,
        "length of local training": repr(loop.phases),
        "local training": repr((module.training_options, schedule)),
        "distillation": repr(loop.distillation),
        "privacy": repr((loop.privacy, loop.client_privacy)),
        "algorithm": _plain(loop.algorithm),
        "server rule": _plain(loop.server_rule),
    }


def _plain(thing: object) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if isinstance(value, int | float | str | None)}


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
