# SPDX-License-Identifier: Apache-2.0
"""What changes in a trainer where several processes share the work."""

import warnings
from typing import Any

import pytorch_lightning as pl

from perada.ranks import Ranks


def share_work(trainer: pl.Trainer) -> None:
    """Leave the batches as the datamodule gives them, and the logged values as they are on every process."""
    # Lightning would divide the steps of a round among the processes; the datamodule divides its clients.
    trainer._accelerator_connector.use_distributed_sampler = False
    # Every process logs the same values, those of all clients.
    warnings.filterwarnings("ignore", "It is recommended to use .* when logging on epoch level in distributed setting")


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
