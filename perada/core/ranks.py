# SPDX-License-Identifier: Apache-2.0
"""The processes that share the work of a run, as everything below the trainer sees them."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One process, alone, or all of torch's default process group, gloo or NCCL.

    Every method is a collective: all ranks call it, in the same order. Tensors may be on any device.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    rank = 0
    size = 1

    def __init__(self, together: bool = False) -> None:
        self._device = torch.device("cpu")
        if together:
            self.rank = torch.distributed.get_rank()
            self.size = torch.distributed.get_world_size()
            if torch.distributed.get_backend() == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks; those of one dtype travel together."""
        self._together(tensors, lambda buffer: torch.distributed.all_reduce(buffer))

    def max_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its largest values over the ranks."""
        self._together(tensors, lambda buffer: torch.distributed.all_reduce(buffer, torch.distributed.ReduceOp.MAX))

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by that of rank 0."""
        self._together(tensors, lambda buffer: torch.distributed.broadcast(buffer, 0))

    def _together(self, tensors: Iterable[Tensor], collective: Callable[[Tensor], object]) -> None:
        """Apply a collective to all tensors of one dtype as one flat buffer."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors if self.size > 1 else ():
            groups.setdefault(tensor.dtype, []).append(tensor)
        for group in groups.values():
            buffer = torch.cat([tensor.detach().reshape(-1).to(self._device) for tensor in group])
            collective(buffer)
            for tensor, part in zip(group, torch.split(buffer, [tensor.numel() for tensor in group]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def gather(self, value: T) -> list[T]:
        """Every rank's value (anything that pickles; tensors on the CPU), in order of rank.

        >>> Ranks().gather(3)
        [3]
        """
        values = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        """Every rank's value on rank 0; an empty list on the others."""
        values = [value] * self.size if self.rank == 0 else None
        if self.size > 1:
            torch.distributed.gather_object(value, values)
        return values or []

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send a tensor to each rank named in ``outgoing``, and fill those of ``incoming`` by the rank they are from.

        What a rank sends to another must have the dtype and shape that the other one expects.
        """
        buffers = {rank: torch.empty_like(tensor, device=self._device) for rank, tensor in incoming.items()}
        transfers = [
            torch.distributed.P2POp(torch.distributed.isend, tensor.to(self._device).contiguous(), rank)
            for rank, tensor in outgoing.items()
        ] + [torch.distributed.P2POp(torch.distributed.irecv, buffer, rank) for rank, buffer in buffers.items()]
        for transfer in torch.distributed.batch_isend_irecv(transfers) if transfers else ():
            transfer.wait()
        for rank, buffer in buffers.items():
            incoming[rank].copy_(buffer)


def this_rank() -> int:
    """Number of this process among those that share the work; 0 where it is alone."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if together else 0
