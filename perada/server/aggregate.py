# SPDX-License-Identifier: Apache-2.0
"""What a server's rule is given, how it averages, and the base of rules."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.core.checks import OptionError, Options, check_choice
from perada.core.ranks import Ranks
from perada.core.states import Factors, State, expand, gather, to_device_async

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
    """What C ``clients`` sent, by name, each on the rank that trained it.

    ``own`` is the stack (c, ...) of this rank's clients, which stand at ``places`` among all; with c = 0 the tensors
    still have their shapes. Reading a name brings its tensor (C, ...) to all ranks, so all must read it. :meth:`mean`
    moves only one state.
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

    def __contains__(self, key: object) -> bool:
        return key in self.own  # a Mapping's own way reads the tensor, and so moves it

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
        own = gather({key: value for key, value in self.own.items() if key not in without}, kept)
        return Updates(own, places, len(rows), self.ranks)

    def whole(self, state: State) -> "Updates":
        """The updates, with the names that clients did not send as they are in a ``state`` without a client axis."""
        missing = {key: value for key, value in state.items() if key not in self.own}
        own = expand(missing, len(self.places)) | self.own
        return Updates(own, self.places, self.clients, self.ranks)

    def mean(self, weights: Tensor) -> State:
        """Weighted mean over all C clients, on every rank, as of :func:`mean`."""
        weights = _beside(self.own, weights[self.places])
        floating = {key: value for key, value in self.own.items() if value.is_floating_point()}
        sums = {key: _weighted_sum(value, weights) for key, value in floating.items()}
        largest = {
            # Over no clients, the smallest number of the dtype.
            key: value.amax(0) if len(value) else value.new_full(value.shape[1:], torch.iinfo(value.dtype).min)
            for key, value in self.own.items()
            if key not in floating
        }
        self.ranks.sum_(sums.values())
        self.ranks.max_(largest.values())
        return {
            key: _rounded(sums[key], value.dtype) if key in sums else largest[key] for key, value in self.own.items()
        }


def mean(updates: Mapping[str, Tensor], weights: Tensor) -> State:
    """Weighted mean over the leading client axis, summed in double precision.

    The updates are a stack (C, ...) or :class:`Updates`, the weights (C,) sum to one. The mean has no client axis; of
    integer tensors (counters of BatchNorm) it is the maximum.

    >>> mean({"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([0.25, 0.75]))["w"].tolist()
    [4.0]
    """
    return (updates if isinstance(updates, Updates) else Updates(updates)).mean(weights)


def _beside(stack: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """The weights where the stack is, sent once and not for each tensor."""
    device = next((value.device for value in stack.values()), weights.device)
    return to_device_async(weights.to(double_dtype(device)), device)


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


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in double precision as a ``dtype``, by way of 41 bits: so it does not depend on the order of the summands.

    The exact mean of a few numbers often lies halfway between two neighbours, and the last bit of the sum would decide.
    """
    if value.dtype == torch.float64 != dtype:
        scaled = value * (2**12 + 1)  # Veltkamp's splitting
        short = scaled - (scaled - value)
        value = torch.where(short.isfinite(), short, value)
    return value.to(dtype)


_INNER = "aggregate/"  # prefix of what the inner rule of a composed rule keeps


@dataclass
class Aggregation:
    """What a rule is given in a round.

    Attributes:
        updates: Stack (C, ...) of what the clients sent. It may lack names of ``previous``. On several devices it is an
            :class:`~perada.server.Updates`, whose mean moves one state between them, where reading a name moves the
            tensors of all clients.
        weights: Weights (C,) in float64 that sum to one.
        previous: Global state before the round.
        parameters: Names of trained parameters. Other names are running statistics and counters.
        round: Counted from 0.
        state: The rule's own tensors, kept between rounds and in checkpoints; empty at first. The rule replaces
            entries, and does not change tensors in place.
        predict: ``predict(models, N, labelled)`` gives probabilities (C, N, K) of models (C, ...) on N of the server's
            images, fewer where there are fewer, and the labels as 0 and 1 (N, K). They are public ones, which the seed
            and the round draw, and have no labels (None), or the first ``labelled`` ones. All ranks call it alike.
            None unless the rule says what it ``needs``.
        factors: The pairs of LoRA's factors among the parameters.
        metrics: What the rule measures, for the metrics of the round; it adds entries.
    """

    updates: Mapping[str, Tensor]
    weights: Tensor
    previous: State
    parameters: frozenset[str]
    round: int
    state: dict[str, State] = field(default_factory=dict)
    predict: Callable[[Mapping[str, Tensor], int, bool], tuple[Tensor, Tensor | None]] | None = None
    factors: tuple[Factors, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


class ServerRule(Options, ABC):
    """How the server aggregates: call it with an :class:`Aggregation`, get the next global state.

    A rule holds options only, and one that is out of its range is a ValueError. What it remembers goes to
    :attr:`Aggregation.state`.

    Attributes:
        weighted: Whether the clients' weights count. If not, ``weighting='samples'`` is refused.
        function_of_mean: Whether the result follows from the mean of the updates and from earlier results alone, so
            that the mean's noise protects it. Privacy of whole clients accepts only such rules, and tries at set-up
            whether it is true.
        needs: Images of the server's whose predictions it looks at: ``public`` or ``labelled`` ones, or None.
        needs_factors: Whether clients must send both of LoRA's factors of a layer.
    """

    weighted: bool = True
    function_of_mean: bool = False
    needs: Literal["public", "labelled"] | None = None
    needs_factors: bool = False

    @property
    def kind(self) -> str:
        """What saved tensors belong to: training resumes only with a rule of the same kind."""
        return type(self).__name__

    def check(self, clients: int) -> None:
        """Refuse, by a ValueError, to aggregate the updates of so few clients. Most rules accept any number."""

    @abstractmethod
    def __call__(self, given: Aggregation) -> State:
        """A state with the names of ``given.updates``, without the client axis.

        Of integer tensors (counters of BatchNorm) it holds the maximum, not an average.
        """


class Mean(ServerRule):
    """The weighted mean (FedAvg; McMahan et al., 2017)."""

    function_of_mean = True

    def __call__(self, given: Aggregation) -> State:
        """Aggregate."""
        return mean(given.updates, given.weights)


class ComposedRule(ServerRule):
    """A rule on the result of another one. A class states ``function_of_mean`` for the case that this is the mean."""

    def __init__(self, aggregate: ServerRule | None) -> None:
        if aggregate is not None and not isinstance(aggregate, ServerRule):
            raise OptionError(
                f"aggregate={aggregate!r} is not a server rule; give a ServerRule, such as Median()",
                name="aggregate",
                value=aggregate,
            )
        self.aggregate = Mean() if aggregate is None else aggregate
        self.weighted = self.aggregate.weighted
        self.function_of_mean = self.function_of_mean and self.aggregate.function_of_mean
        self.needs, self.needs_factors = self.aggregate.needs, self.needs_factors or self.aggregate.needs_factors

    @property
    def kind(self) -> str:
        """The class, and the kind of the inner rule."""
        return f"{type(self).__name__} on {self.aggregate.kind}"

    def check(self, clients: int) -> None:
        """Refuse what the inner rule refuses."""
        self.aggregate.check(clients)

    def _aggregate(self, given: Aggregation) -> State:
        """Result of the inner rule, whose tensors stay apart from this rule's."""
        inner = {key.removeprefix(_INNER): state for key, state in given.state.items() if key.startswith(_INNER)}
        result = self.aggregate(replace(given, state=inner))
        given.state.update({_INNER + key: state for key, state in inner.items()})
        return result
