# SPDX-License-Identifier: Apache-2.0
"""The processes that share the work of a run, as everything below the trainer sees them."""

from collections.abc import Iterable
from typing import TypeVar

import torch.distributed
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One process, alone. Every method is a collective: all ranks call it, in the same order.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    rank = 0
    size = 1

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value (anything that pickles; tensors on the CPU), in order of rank.

        >>> Ranks().gather(3)
        [3]
        """
        return [value]


class Distributed(Ranks):
    """The processes of torch's default process group, gloo or NCCL."""

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks."""
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # each place was filled
