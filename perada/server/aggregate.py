# SPDX-License-Identifier: Apache-2.0
"""Updates of clients, their mean, and the base classes of server rules."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.core.checks import OptionError, Options, check_choice
from perada.core.ranks import Ranks
from perada.core.states import (
    Factors,
    State,
    as_matrix,
    column_blocks,
    double,
    double_dtype,
    expand,
    gather,
    per_client,
    to_device_async,
)

Weighting = Literal["uniform", "samples"]


def client_weights(weighting: Weighting, samples: Sequence[int]) -> Tensor:
    """Return the weights (C,) of clients, in float64, that sum to one.

    Args:
        weighting: ``"uniform"`` (PerAda, Algorithm 1, line 18), or ``"samples"`` for each client's share of the images
            (FedAvg).
        samples: Number of images of each client.

    Raises:
        OptionError: If there is no such weighting.

    >>> client_weights("samples", [1, 3]).tolist()
    [0.25, 0.75]
    """
    check_choice("weighting", weighting, get_args(Weighting))
    if weighting == "uniform":
        return torch.full((len(samples),), 1 / len(samples), dtype=torch.float64)
    counts = torch.tensor(samples, dtype=torch.float64)
    return counts / counts.sum()


class Updates:
    """The updates of a round's C clients, by name, each part on the rank that trained it.

    This is not a dictionary, because reading the tensors of all clients is a collective: all ranks must make the same
    calls of :meth:`gathered`. :meth:`mean` is a collective too, but transfers only one state.

    Args:
        local_rows: The stack (c, ...) of this rank's clients. With c = 0 the tensors still have their shapes.
        places: Positions of this rank's clients among all C clients. Default: this rank has all clients.
        num_clients: Number C of all clients; by default c.
        ranks: The processes among which the clients are divided; by default a single one.
    """

    def __init__(
        self,
        local_rows: Mapping[str, Tensor],
        places: Sequence[int] | None = None,
        num_clients: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        num_rows = 0
        if local_rows:
            num_rows = len(next(iter(local_rows.values())))
        if places is None:
            places = range(num_rows)
        if num_clients is None:
            num_clients = num_rows
        self.local_rows: State = dict(local_rows)
        self.places = list(places)
        self.num_clients = num_clients
        self.ranks = ranks or Ranks()
        self._gathered: State = {}

    @classmethod
    def replicated(cls, stack: Mapping[str, Tensor], ranks: Ranks) -> "Updates":
        """Divide a stack (C, ...) that every rank has among the ranks."""
        clients = len(next(iter(stack.values())))
        places = list(range(ranks.rank, clients, ranks.size))
        local_rows = {name: value[ranks.rank :: ranks.size] for name, value in stack.items()}
        updates = cls(local_rows, places, clients, ranks)
        updates._gathered = dict(stack)
        return updates

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that were sent, in order."""
        return tuple(self.local_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.local_rows

    def gathered(self, name: str) -> Tensor:
        """Gather the tensor (C, ...) of all clients on every rank.

        This is a collective: all ranks must gather the same names in the same order, or the job hangs.

        Raises:
            KeyError: If clients did not send a tensor of this name.
        """
        value = self.local_rows[name]
        if self.ranks.size == 1:
            return value
        if name not in self._gathered:
            # all_gather requires equal sizes, but ranks may have different numbers of clients. The sum of zero-padded
            # stacks is the same.
            padded = value.new_zeros(self.num_clients, *value.shape[1:])
            padded[self.places] = value.detach()
            self.ranks.sum_([padded])
            self._gathered[name] = padded
        return self._gathered[name]

    def gathered_all(self) -> State:
        """Gather the tensors (C, ...) of all names; a collective, like :meth:`gathered`."""
        return {name: self.gathered(name) for name in self.local_rows}

    def replace(self, local_rows: Mapping[str, Tensor]) -> "Updates":
        """Return the updates with another stack (c, ...) for this rank's clients."""
        return Updates(local_rows, self.places, self.num_clients, self.ranks)

    def repeat(self, state: State) -> "Updates":
        """Return updates in which every client has sent the same ``state``, which has no client axis."""
        return self.replace(expand(state, len(self.places)))

    def part(self, positions: Sequence[int], without: Collection[str] = ()) -> "Updates":
        """Return the updates of some clients.

        Args:
            positions: Positions of the clients among all C, in the order of the result.
            without: Names of tensors to leave out.
        """
        index_of = {place: index for index, place in enumerate(self.places)}
        # These are the positions of this rank's clients among the selected ones, and their indices in the stack.
        places = []
        indices = []
        for place, position in enumerate(positions):
            if position in index_of:
                places.append(place)
                indices.append(index_of[position])
        selected = {name: value for name, value in self.local_rows.items() if name not in without}
        is_everyone = indices == list(range(len(self.places)))
        if not is_everyone:
            selected = gather(selected, indices)
        return Updates(selected, places, len(positions), self.ranks)

    def completed(self, state: State) -> "Updates":
        """Return the updates with the tensors of ``state`` (no client axis) for names that clients did not send."""
        missing = {name: value for name, value in state.items() if name not in self.local_rows}
        missing_rows = expand(missing, len(self.places))
        return self.replace(missing_rows | self.local_rows)

    def mean(self, weights: Tensor) -> State:
        """Compute the weighted mean over all C clients, on every rank; a collective.

        Integer tensors get their maximum, as in :func:`mean`.
        """
        local_weights = _on_device_of(self.local_rows, weights[self.places])
        sums: State = {}
        largest: State = {}
        for name, value in self.local_rows.items():
            if value.is_floating_point():
                sums[name] = _weighted_sum(value, local_weights)
            else:
                largest[name] = _largest_over_clients(value)
        self.ranks.sum_(sums.values())
        self.ranks.max_(largest.values())
        means: State = {}
        for name, value in self.local_rows.items():
            if name in sums:
                means[name] = _round_sum(sums[name], value.dtype)
            else:
                means[name] = largest[name]
        return means


class UpdateSums:
    """The sums of a round's updates, added chunk by chunk, for a server that needs only their mean.

    The updates of only one chunk at a time are in memory.

    Args:
        shares: Weights of the round's C clients; they need not sum to one.
        places: Positions of this rank's clients among all C.
        parameters: Names of trained parameters, whose changes are measured.
        ranks: The processes among which the clients are divided; by default a single one.

    Attributes:
        example: Uninitialised tensors with the names, shapes and dtypes of a client's update, without a client axis;
            empty before the first chunk.
    """

    def __init__(
        self, shares: Sequence[float], places: Sequence[int], parameters: Iterable[str], ranks: Ranks | None = None
    ) -> None:
        self.example: State = {}
        self._shares = torch.tensor(shares, dtype=torch.float64)
        self._places = list(places)
        self._parameters = set(parameters)
        self._ranks = ranks or Ranks()
        self._sums: State = {}
        self._largest: State = {}
        # Squared norms (c,) of the changes of each chunk, by the place of its first client among this rank's: chunks
        # that train side by side end in any order.
        self._squares: dict[int, Tensor] = {}

    def add(self, sent: State, received: State, start: int, accepted: Tensor) -> None:
        """Add the updates of a chunk, c of this rank's clients. Chunks may come in any order.

        Args:
            sent: Updates (c, ...) of these clients.
            received: States (c, ...) that the server had sent them.
            start: Position of the first of them among this rank's clients. A rank without clients trains a stand-in,
                which is left out since it has no position.
            accepted: Mask (c,) of the updates to add. The others may not be finite.
        """
        places = self._places[start : start + len(accepted)]
        clients = len(places)
        accepted = accepted[:clients]
        weights = _on_device_of(sent, self._shares[places])
        squares = weights.new_zeros(clients)
        measured = set(names_with_change(self._parameters, sent, received))
        for name, stack in sent.items():
            value = stack.detach()[:clients]
            if name not in self.example:
                self.example[name] = value.new_empty(value.shape[1:])
            if value.is_floating_point():
                summed_before: Tensor | None = None
                if name in measured:
                    summed_before = received[name].detach()[:clients]
                self._add_numbers(name, value, weights, accepted, summed_before, squares)
            else:
                largest = _largest_over_clients(value, accepted)
                if name in self._largest:
                    largest = torch.maximum(largest, self._largest[name])
                self._largest[name] = largest
        self._squares[start] = squares

    def _add_numbers(
        self, name: str, value: Tensor, weights: Tensor, accepted: Tensor, summed_before: Tensor | None, squares: Tensor
    ) -> None:
        """Add the rows of a stack to the sum of its name, and the squared norms of its changes to ``squares``.

        This takes one pass over blocks that fit the processor's caches, so memory is read once.

        Args:
            name: Name of the stack.
            value: The stack (c, ...).
            weights: Weights (c,) of the clients.
            accepted: Mask (c,) of the clients to add.
            summed_before: The stack (c, ...) before training; None if its change is not measured.
            squares: Squared norms (c,) of the clients' changes so far; changed in place.
        """
        rows = as_matrix(value)
        rows_before = None if summed_before is None else as_matrix(_read_once(summed_before))
        # On a GPU always, since the host would have to wait for it to find out whether all clients are accepted.
        excludes = rows.device.type != "cpu" or not accepted.all()
        excluded = ~accepted.unsqueeze(1)
        if name not in self._sums:
            self._sums[name] = weights.new_zeros(value.shape[1:])
        sums = self._sums[name].view(-1)
        for block in column_blocks(rows):
            # The state is copied even if it is in double precision already, since it is changed below.
            numbers = rows[:, block].to(weights.dtype, copy=True)
            if excludes:
                # Zero times NaN would be NaN.
                numbers.masked_fill_(excluded, 0)
            # In place, since autocast would otherwise round the states to half precision where there is no double.
            sums[block].addmv_(numbers.T, weights)
            if rows_before is not None:
                numbers -= rows_before[:, block]
                squares += numbers.square_().sum(1)

    def change_norms(self) -> Tensor:
        """Return the norms (C,) of the changes of all clients' parameters, on the CPU; a collective.

        The norms of clients that were not accepted may not be finite.
        """
        squares_of_rank = torch.cat([self._squares[start] for start in sorted(self._squares)])
        squares = torch.zeros(len(self._shares), dtype=torch.float64)
        squares[self._places] = squares_of_rank.cpu().double()
        self._ranks.sum_([squares])
        return squares.sqrt()

    def means(self, places: Sequence[int]) -> Updates:
        """Return updates in which every accepted client has sent the mean of the added ones; a collective.

        Args:
            places: Positions of the accepted clients of all ranks.
        """
        self._ranks.sum_(self._sums.values())
        self._ranks.max_(self._largest.values())
        total = float(self._shares[list(places)].sum())
        mean: State = {}
        for name, example in self.example.items():
            if name in self._sums:
                mean[name] = _round_sum(self._sums[name] / total, example.dtype)
            else:
                mean[name] = self._largest[name]
        local = set(self._places)
        local_places = [index for index, place in enumerate(places) if place in local]
        return Updates(expand(mean, len(local_places)), local_places, len(places), self._ranks)


def mean(updates: Updates | Mapping[str, Tensor], weights: Tensor) -> State:
    """Compute the weighted mean over the leading client axis, summed in double precision.

    Args:
        updates: :class:`Updates`, or a stack (C, ...) that all ranks have.
        weights: Weights (C,) that sum to one.

    Returns:
        The mean, without a client axis. Integer tensors (counters of BatchNorm) have the maximum instead.

    >>> mean({"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([0.25, 0.75]))["w"].tolist()
    [4.0]
    """
    if not isinstance(updates, Updates):
        updates = Updates(updates)
    return updates.mean(weights)


def _on_device_of(stack: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """Copy the weights to the device of the stack: once, and not for each tensor."""
    if not stack:
        return weights
    device = next(iter(stack.values())).device
    return to_device_async(weights.to(double_dtype(device)), device)


def _weighted_sum(value: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (...) of a stack (C, ...) over clients with weights (C,), in double precision.

    It is computed block by block: a copy of all updates in double precision would not fit the processor's caches, and
    allocating it takes longer than the sum.
    """
    weights = weights.to(double_dtype(value.device))
    distinct = _read_once(value)
    if len(distinct) < len(value):
        weights = weights.sum(0, keepdim=True)
    rows = as_matrix(distinct)
    sums = rows.new_zeros(rows.shape[1], dtype=weights.dtype)
    for block in column_blocks(rows):
        # In place, since autocast would otherwise round the states to half precision where there is no double.
        sums[block].addmv_(double(rows[:, block]).T, weights)
    return sums.view(value.shape[1:])


def _read_once(stack: Tensor) -> Tensor:
    """Return a stack (C, ...), or its first row (1, ...) if all clients share it in memory, as after expand()."""
    if len(stack) > 1 and stack.stride(0) == 0:
        return stack[:1]
    return stack


def _largest_over_clients(value: Tensor, accepted: Tensor | None = None) -> Tensor:
    """Return the maximum (...) of a stack (C, ...) of integers over clients, or over those of the mask ``accepted``."""
    smallest_number = torch.iinfo(value.dtype).min
    if not len(value):
        # A rank without clients takes part in the collective, but must not change the maximum.
        return value.new_full(value.shape[1:], smallest_number)
    if accepted is not None:
        value = value.masked_fill(~per_client(accepted, value), smallest_number)
    return value.amax(0)


def names_with_change(tensor_names: Iterable[str], sent: State, received: State) -> list[str]:
    """Return the names of tensors that clients received and sent in the same shape, so their change can be measured.

    Args:
        tensor_names: Names to select from.
        sent: What the clients sent, (C, ...).
        received: What they had received, (C, ...).
    """
    measurable = []
    for name in tensor_names:
        if name in sent and name in received and received[name].shape == sent[name].shape:
            measurable.append(name)
    return measurable


def squared_changes(tensor_names: Iterable[str], sent: State, received: State) -> Tensor:
    """Return the squared norms (C,) of the clients' changes, in double precision.

    Args:
        tensor_names: Names of the tensors to measure, as far as clients received them in the same shape.
        sent: What the clients sent, (C, ...).
        received: What they had received, (C, ...).
    """
    first_stack = next(iter(sent.values()))
    device = first_stack.device
    squares = torch.zeros(len(first_stack), dtype=double_dtype(device), device=device)
    for name in names_with_change(tensor_names, sent, received):
        sent_rows = as_matrix(sent[name])
        received_rows = as_matrix(received[name])
        # Block by block: changes of all clients in double precision would not fit the caches.
        for block in column_blocks(sent_rows):
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            squares += change.square().sum(1)
    return squares


def _round_sum(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum in double precision to 41 bits, and then to a ``dtype``.

    The result does not depend on the order of the summands. The exact mean of a few numbers often lies halfway between
    two neighbours of the dtype, and the last bit of the sum would decide between them.
    """
    if value.dtype == torch.float64 and dtype != torch.float64:
        # Veltkamp's splitting: the rounding errors of these two operations cut off the lowest 12 bits.
        scaled = value * (2**12 + 1)
        high_bits = scaled - (scaled - value)
        # The product overflows for the largest numbers, which stay as they are.
        value = torch.where(high_bits.isfinite(), high_bits, value)
    return value.to(dtype)


_INNER = "aggregate/"
"""Prefix of the inner rule's tensors in the state of a composed rule."""


@dataclass
class Aggregation:
    """The input of a rule in a round.

    Attributes:
        updates: The clients' updates, or a stack (C, ...) to make them from. They may lack names of ``previous``.
            ``updates.gathered(name)`` transfers the tensors (C, ...) of all clients between devices; :func:`mean`
            transfers only one state. A rule must not change these tensors, which may be those of clients.
        weights: Weights (C,) in float64 that sum to one.
        previous: Global state before the round.
        parameters: Names of trained parameters. Other names are running statistics and counters.
        round: Number of the round, counted from 0.
        state: Tensors that the rule keeps between rounds and in checkpoints; empty at first. The rule replaces entries
            and does not change tensors in place.
        predict: Function ``predict(models, N, labelled)`` that returns probabilities (C, N, K) of models (C, ...) on
            N of the server's images, or fewer if it has fewer, and their labels (N, K) as 0 and 1. If ``labelled``,
            these are its first labelled images; otherwise public images, drawn by the seed and the round, whose labels
            are None. A collective. None unless the rule declares its ``needs``.
        factors: Names of each layer's LoRA factors among the parameters.
        metrics: Metrics of the round, to which the rule adds its own.
    """

    updates: Updates
    weights: Tensor
    previous: State
    parameters: frozenset[str]
    round: int
    state: dict[str, State] = field(default_factory=dict)
    predict: Callable[[Updates | State, int, bool], tuple[Tensor, Tensor | None]] | None = None
    factors: tuple[Factors, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.updates, Updates):
            self.updates = Updates(self.updates)


class ServerRule(Options, ABC):
    """Base class of server rules: call one with an :class:`Aggregation` to get the next global state.

    The attributes of a rule are its options; the constructor raises a ValueError for an invalid one. Tensors to be kept
    between rounds go into :attr:`Aggregation.state`.

    Attributes:
        weighted: Whether the clients' weights matter. If not, ``weighting='samples'`` is rejected.
        function_of_mean: Whether the result depends only on the mean of the updates and on earlier results, so that
            noise on the mean protects it. Client-level privacy accepts only such rules, and verifies it at set-up.
        needs: Kind of the server's images on which the rule needs predictions: ``public``, ``labelled`` or None.
        needs_factors: Whether clients must send both of LoRA's factors of a layer.
    """

    weighted: bool = True
    function_of_mean: bool = False
    needs: Literal["public", "labelled"] | None = None
    needs_factors: bool = False

    @property
    def kind(self) -> str:
        """Name in checkpoints: training resumes only with a rule of the same kind."""
        return type(self).__name__

    def check(self, num_clients: int) -> None:
        """Raise a ValueError if the rule requires more clients per round. Most rules accept any number."""

    @abstractmethod
    def __call__(self, aggregation: Aggregation) -> State:
        """Return a state with the names of ``aggregation.updates``, without the client axis.

        Integer tensors (counters of BatchNorm) have the maximum, not an average.
        """


class Mean(ServerRule):
    """The weighted mean (FedAvg; McMahan et al., 2017).

    Source: [McMahan et al., AISTATS 2017](https://arxiv.org/abs/1602.05629).
    """

    function_of_mean = True

    def __call__(self, aggregation: Aggregation) -> State:
        """Return the weighted mean of the updates."""
        return mean(aggregation.updates, aggregation.weights)


class ComposedRule(ServerRule):
    """Base class of rules that modify the result of an inner rule.

    A subclass sets ``function_of_mean`` as if the inner rule were the mean.
    """

    def __init__(self, aggregate: ServerRule | None) -> None:
        if aggregate is not None and not isinstance(aggregate, ServerRule):
            raise OptionError(
                f"aggregate={aggregate!r} is not a server rule; pass a ServerRule, such as Median()",
                name="aggregate",
                value=aggregate,
            )
        self.aggregate = Mean() if aggregate is None else aggregate
        self.weighted = self.aggregate.weighted
        self.function_of_mean = self.function_of_mean and self.aggregate.function_of_mean
        self.needs = self.aggregate.needs
        self.needs_factors = self.needs_factors or self.aggregate.needs_factors

    @property
    def kind(self) -> str:
        """Name of the class, and the kind of the inner rule."""
        return f"{type(self).__name__} on {self.aggregate.kind}"

    def check(self, num_clients: int) -> None:
        """Raise the errors of the inner rule."""
        self.aggregate.check(num_clients)

    def _aggregate_inner(self, aggregation: Aggregation) -> State:
        """Apply the inner rule, whose tensors are kept separate from this rule's by a prefix."""
        inner_state = {}
        for key, state in aggregation.state.items():
            if key.startswith(_INNER):
                inner_state[key.removeprefix(_INNER)] = state
        result = self.aggregate(replace(aggregation, state=inner_state))
        for key, state in inner_state.items():
            aggregation.state[_INNER + key] = state
        return result
