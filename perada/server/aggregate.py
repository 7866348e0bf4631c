# SPDX-License-Identifier: Apache-2.0
"""What the clients of a round sent, on whichever rank it is, and means over the client axis."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.core.checks import check_choice
from perada.core.ranks import Ranks
from perada.core.states import State

Weighting = Literal["uniform", "samples"]
WITHOUT_DOUBLE = {"mps"}
"""Kinds of devices that have no double precision."""


def client_weights(weighting: Weighting, samples: Sequence[int]) -> Tensor:
    """Weights (C,) of clients, in float64, that sum to one.

    They are ``"uniform"`` (PerAda, Algorithm 1, line 18), or each client's share of the images (FedAvg), of which
    ``samples`` has the numbers. Another word is a ValueError.

    >>> client_weights("samples", [1, 3]).tolist()
    [0.25, 0.75]
    """
    check_choice("weighting", weighting, get_args(Weighting))
    if weighting == "uniform":
        return torch.full((len(samples),), 1 / len(samples), dtype=torch.float64)
    counts = torch.tensor(samples, dtype=torch.float64)
    return counts / counts.sum()


class Updates(Mapping[str, Tensor]):
    """What C clients sent, by name, each on the rank that trained it.

    Reading a name brings its tensor (C, ...) to all ranks, so all must read it. :meth:`mean` moves only one state.

    Args:
        own: Stack (c, ...) of this rank's clients. With c = 0 the tensors still have their shapes.
        places: Which of the C clients they are, in order. Default: all.
        clients: C.
        ranks: The processes.
    """

    def __init__(
        self,
        own: Mapping[str, Tensor],
        places: Sequence[int] | None = None,
        clients: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        rows = len(next(iter(own.values()))) if own else 0
        self.own, self.places = dict(own), list(range(rows) if places is None else places)
        self.clients, self.ranks = rows if clients is None else clients, ranks or Ranks()
        self._gathered: State = {}

    def __getitem__(self, key: str) -> Tensor:
        value = self.own[key]
        if self.ranks.size == 1:
            return value
        if key not in self._gathered:
            whole = value.new_zeros(self.clients, *value.shape[1:])
            whole[self.places] = value.detach()
            self.ranks.sum_([whole])
            self._gathered[key] = whole
        return self._gathered[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    @classmethod
    def known(cls, stack: Mapping[str, Tensor], ranks: Ranks) -> "Updates":
        """A stack that every rank holds, and of which each takes its share."""
        clients = len(next(iter(stack.values())))
        places = list(range(ranks.rank, clients, ranks.size))
        updates = cls({key: value[ranks.rank :: ranks.size] for key, value in stack.items()}, places, clients, ranks)
        updates._gathered = dict(stack)
        return updates

    def part(self, rows: Sequence[int], without: Collection[str] = ()) -> "Updates":
        """The updates of the clients in ``rows``, without the names in ``without``."""
        index_of = {place: index for index, place in enumerate(self.places)}
        places = [place for place, row in enumerate(rows) if row in index_of]
        kept = [index_of[rows[place]] for place in places]
        own = {key: value[kept] for key, value in self.own.items() if key not in without}
        return Updates(own, places, len(rows), self.ranks)

    def mean(self, weights: Tensor) -> State:
        """Weighted mean over all C clients, on every rank, as of :func:`mean`."""
        weights = weights[self.places]
        floating = {key: value for key, value in self.own.items() if value.is_floating_point()}
        sums = {key: _weighted_sum(value, weights) for key, value in floating.items()}
        largest = {key: _largest(value) for key, value in self.own.items() if key not in floating}
        self.ranks.sum_(sums.values())
        self.ranks.max_(largest.values())
        return {key: sums[key].to(value.dtype) if key in sums else largest[key] for key, value in self.own.items()}


def mean(updates: Mapping[str, Tensor], weights: Tensor) -> State:
    """Weighted mean over the leading client axis, summed in double precision.

    The updates are a stack (C, ...) or :class:`Updates`, the weights (C,) sum to one. The mean has no client axis; of
    integer tensors (counters of BatchNorm) it is the maximum.

    >>> mean({"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([0.25, 0.75]))["w"].tolist()
    [4.0]
    """
    return (updates if isinstance(updates, Updates) else Updates(updates)).mean(weights)


def double(value: Tensor) -> Tensor:
    """``value`` in double precision, or in single where the device has no double.

    Sums of so many bits, once rounded, do not depend on the order in which ranks add them.
    """
    return value.to(double_dtype(value.device))


def double_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no double precision."""
    return torch.float32 if device.type in WITHOUT_DOUBLE else torch.float64


def _weighted_sum(value: Tensor, weights: Tensor) -> Tensor:
    # Elementwise: autocast would run a product of matrices, and so round the states, in half precision.
    value = double(value)
    return (value * weights.to(value).view(-1, *[1] * (value.dim() - 1))).sum(0)


def _largest(value: Tensor) -> Tensor:
    """Maximum over the client axis. Over no clients: the smallest number of the dtype."""
    return value.amax(0) if len(value) else value.new_full(value.shape[1:], torch.iinfo(value.dtype).min)
