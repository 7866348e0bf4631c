# SPDX-License-Identifier: Apache-2.0
"""The processes that share the work of a run, for all code below the trainer."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """A single process, or all processes of torch's default group (gloo or NCCL).

    Every method is a collective: all ranks must call it in the same order. Tensors may be on any device.

    Args:
        together: Use the processes of torch's default group; otherwise this process is the only rank.

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
            # NCCL transfers only tensors on a GPU; gloo takes those on the CPU.
            if torch.distributed.get_backend() == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks."""
        self._apply_collective(tensors, lambda buffer: torch.distributed.all_reduce(buffer))

    def max_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its element-wise maximum over the ranks."""
        self._apply_collective(
            tensors, lambda buffer: torch.distributed.all_reduce(buffer, torch.distributed.ReduceOp.MAX)
        )

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by that of rank 0."""
        self._apply_collective(tensors, lambda buffer: torch.distributed.broadcast(buffer, 0))

    def _apply_collective(self, tensors: Iterable[Tensor], collective: Callable[[Tensor], object]) -> None:
        """Apply a collective in place.

        Args:
            tensors: Tensors of any dtypes, shapes and devices; the same ones in the same order on all ranks.
            collective: Changes a buffer in place.
        """
        if self.size == 1:
            return
        # Each call has a latency, so all tensors of one dtype are sent as one flat buffer.
        tensors_of_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            tensors_of_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in tensors_of_dtype.values():
            flat = [tensor.detach().reshape(-1).to(self._device) for tensor in group]
            buffer = torch.cat(flat)
            collective(buffer)
            sizes = [tensor.numel() for tensor in group]
            for tensor, result in zip(group, torch.split(buffer, sizes), strict=True):
                tensor.detach().copy_(result.view(tensor.shape))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order; values must be picklable, with tensors on the CPU.

        >>> Ranks().gather(3)
        [3]
        """
        values = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, in rank order, and an empty list on the other ranks."""
        if self.size == 1:
            return [value]
        collected: list[T] | None = None
        if self.rank == 0:
            # gather_object fills this list. Ranks that receive nothing must pass None.
            collected = [value] * self.size
        torch.distributed.gather_object(value, collected)
        return collected or []

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Exchange tensors with other ranks.

        Args:
            outgoing: Tensors to send, by the rank that receives them.
            incoming: Tensors to fill in place, by the rank that sends them; their dtypes and shapes must be those sent.
        """
        operations = []
        for rank, tensor in outgoing.items():
            # Point-to-point transfers require contiguous tensors.
            on_device = tensor.to(self._device).contiguous()
            operations.append(torch.distributed.P2POp(torch.distributed.isend, on_device, rank))
        buffers = {}
        for rank, tensor in incoming.items():
            buffers[rank] = torch.empty_like(tensor, device=self._device)
            operations.append(torch.distributed.P2POp(torch.distributed.irecv, buffers[rank], rank))
        if operations:
            # All transfers are one batch: two ranks that each first send to the other would wait for ever.
            for transfer in torch.distributed.batch_isend_irecv(operations):
                transfer.wait()
        for rank, buffer in buffers.items():
            incoming[rank].copy_(buffer)


def this_rank() -> int:
    """Return the number of this process among those that share the work; 0 for a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
