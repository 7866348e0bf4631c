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
from perada.core.states import Factors, State, as_matrix, column_blocks, expand, gather, per_client, to_device_async

Weighting = Literal["uniform", "samples"]
WITHOUT_DOUBLE = {"mps"}
"""Device types without double precision."""


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

    This is not a dictionary, because reading the tensors of all clients is a collective: all ranks must call
    :meth:`gathered` alike. :meth:`mean` is one, too, but moves only one state.

    Args:
        local_rows: The stack (c, ...) of this rank's clients. With c = 0 the tensors still have their shapes.
        places: Where this rank's clients stand among all; by default they are all.
        clients: C, by default c.
        ranks: The processes among which the clients are divided; by default one.
    """

    def __init__(
        self,
        local_rows: Mapping[str, Tensor],
        places: Sequence[int] | None = None,
        clients: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        num_rows = 0
        if local_rows:
            num_rows = len(next(iter(local_rows.values())))
        if places is None:
            places = range(num_rows)
        if clients is None:
            clients = num_rows
        self.local_rows: State = dict(local_rows)
        self.places = list(places)
        self.clients = clients
        self.ranks = ranks or Ranks()
        self._gathered: State = {}

    @classmethod
    def replicated(cls, stack: Mapping[str, Tensor], ranks: Ranks) -> "Updates":
        """Create updates from a stack that every rank holds, of which each rank keeps its share."""
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
            KeyError: If nothing was sent by this name.
        """
        value = self.local_rows[name]
        if self.ranks.size == 1:
            return value
        if name not in self._gathered:
            # Ranks may hold different numbers of clients, so a sum of zero-padded stacks takes the place of all_gather.
            padded = value.new_zeros(self.clients, *value.shape[1:])
            padded[self.places] = value.detach()
            self.ranks.sum_([padded])
            self._gathered[name] = padded
        return self._gathered[name]

    def gathered_all(self) -> State:
        """Gather the tensors (C, ...) of all names; a collective, like :meth:`gathered`."""
        return {name: self.gathered(name) for name in self.local_rows}

    def replace(self, local_rows: Mapping[str, Tensor]) -> "Updates":
        """Replace the updates of this rank's clients by another stack (c, ...)."""
        return Updates(local_rows, self.places, self.clients, self.ranks)

    def repeat(self, state: State) -> "Updates":
        """Replace every client's update by one state, without a client axis."""
        return self.replace(expand(state, len(self.places)))

    def part(self, rows: Sequence[int], without: Collection[str] = ()) -> "Updates":
        """Select the updates of the clients in ``rows``, and leave out the names in ``without``."""
        index_of = {place: index for index, place in enumerate(self.places)}
        # Of the selected clients, those of this rank: where they stand among the selected, and in the stack.
        places = []
        indices = []
        for place, row in enumerate(rows):
            if row in index_of:
                places.append(place)
                indices.append(index_of[row])
        selected = {name: value for name, value in self.local_rows.items() if name not in without}
        is_everyone = indices == list(range(len(self.places)))
        if not is_everyone:
            selected = gather(selected, indices)
        return Updates(selected, places, len(rows), self.ranks)

    def completed(self, state: State) -> "Updates":
        """Add the names that clients did not send, with the values of a ``state`` without a client axis."""
        missing = {name: value for name, value in state.items() if name not in self.local_rows}
        missing_rows = expand(missing, len(self.places))
        return self.replace(missing_rows | self.local_rows)

    def mean(self, weights: Tensor) -> State:
        """Compute the weighted mean over all C clients, on every rank; a collective.

        Of integer tensors it is the maximum, as of :func:`mean`.
        """
        local_weights = _on_device_of(self.local_rows, weights[self.places])
        sums: State = {}
        largest: State = {}
        for name, value in self.local_rows.items():
            if value.is_floating_point():
                sums[name] = _weighted_sum(value, local_weights)
            else:
                largest[name] = _largest(value)
        self.ranks.sum_(sums.values())
        self.ranks.max_(largest.values())
        means: State = {}
        for name, value in self.local_rows.items():
            if name in sums:
                means[name] = _rounded(sums[name], value.dtype)
            else:
                means[name] = largest[name]
        return means


class UpdateSums:
    """The sums of a round's updates, added chunk by chunk, for a server that needs only their mean.

    No process then holds more updates than those of a chunk.

    Args:
        shares: Weights of the round's C clients, not yet divided by their sum.
        places: Where this rank's clients stand among all.
        parameters: Names of trained parameters, whose changes are measured.
        ranks: The processes among which the clients are divided; by default one.

    Attributes:
        example: What a client sent, without a client axis, for its names, shapes and types; empty before the first
            chunk.
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
            sent: Their updates, (c, ...).
            received: What the server had sent them, (c, ...).
            start: Place of the first one among this rank's clients. A rank without clients trains a stand-in, which
                is beyond them and left out.
            accepted: Which updates count, (c,). Others, which may not be finite, are left out.
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
                before: Tensor | None = None
                if name in measured:
                    before = received[name].detach()[:clients]
                self._add_numbers(name, value, weights, accepted, before, squares)
            else:
                largest = _largest(value, accepted)
                if name in self._largest:
                    largest = torch.maximum(largest, self._largest[name])
                self._largest[name] = largest
        self._squares[start] = squares

    def _add_numbers(
        self, name: str, value: Tensor, weights: Tensor, accepted: Tensor, before: Tensor | None, squares: Tensor
    ) -> None:
        """Add a stack (c, ...) to the sum of its name, and its squared changes to ``squares`` (c,).

        Both in one pass over blocks that stay in the processor's caches: memory is read once.

        Args:
            name: Name of the stack.
            value: The stack.
            weights: Weights of the clients, (c,).
            accepted: Which clients count, (c,).
            before: The stack (c, ...) before training; None if its change is not measured.
            squares: Squared norms (c,) of the clients' changes so far, to which those of this stack are added in place.
        """
        rows = as_matrix(value)
        rows_before = None if before is None else as_matrix(_read_once(before))
        # On a GPU always: the host would have to wait for it to find out whether all clients count.
        excludes = rows.device.type != "cpu" or not accepted.all()
        excluded = ~accepted.unsqueeze(1)
        if name not in self._sums:
            self._sums[name] = weights.new_zeros(value.shape[1:])
        sums = self._sums[name].view(-1)
        for block in column_blocks(rows):
            # A copy also of what is in double precision, since it is changed.
            numbers = rows[:, block].to(weights.dtype, copy=True)
            if excludes:
                # Zero times NaN would be NaN.
                numbers.masked_fill_(excluded, 0)
            # Elementwise: autocast would run a product of matrices, and so round the states, in half precision.
            sums[block] += (numbers * weights.unsqueeze(1)).sum(0)
            if rows_before is not None:
                numbers -= rows_before[:, block]
                squares += numbers.square_().sum(1)

    def change_norms(self) -> Tensor:
        """Return the norms (C,) of the changes of all clients' parameters, on the CPU; a collective.

        Those of clients that are left out may not be finite.
        """
        squares_of_rank = torch.cat([self._squares[start] for start in sorted(self._squares)])
        squares = torch.zeros(len(self._shares), dtype=torch.float64)
        squares[self._places] = squares_of_rank.cpu().double()
        self._ranks.sum_([squares])
        return squares.sqrt()

    def means(self, places: Sequence[int]) -> Updates:
        """Return updates that are all equal, and have the mean of those that were added; a collective.

        Args:
            places: Places of all clients whose updates were accepted, of all ranks.
        """
        self._ranks.sum_(self._sums.values())
        self._ranks.max_(self._largest.values())
        total = float(self._shares[list(places)].sum())
        mean: State = {}
        for name, example in self.example.items():
            if name in self._sums:
                mean[name] = _rounded(self._sums[name] / total, example.dtype)
            else:
                mean[name] = self._largest[name]
        local = set(self._places)
        local_places = [index for index, place in enumerate(places) if place in local]
        return Updates(expand(mean, len(local_places)), local_places, len(places), self._ranks)


def mean(updates: Updates | Mapping[str, Tensor], weights: Tensor) -> State:
    """Compute the weighted mean over the leading client axis, summed in double precision.

    Args:
        updates: :class:`Updates`, or a stack (C, ...) that all ranks hold.
        weights: Weights (C,) that sum to one.

    Returns:
        The mean, without a client axis. Of integer tensors (counters of BatchNorm) it is the maximum.

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


def double(value: Tensor) -> Tensor:
    """Convert to double precision, or to single if the device has no double.

    Sums of so many bits, once rounded, do not depend on the order in which ranks add them.
    """
    return value.to(double_dtype(value.device))


def double_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device has no double precision."""
    if device.type in WITHOUT_DOUBLE:
        return torch.float32
    return torch.float64


def _weighted_sum(value: Tensor, weights: Tensor) -> Tensor:
    """Return the sum (...) of a stack (C, ...) over clients, times their weights (C,), in double precision.

    Block by block: a copy of all updates in double precision would not fit the processor's caches, and new memory of
    its size costs more than the sum.
    """
    weights = weights.to(double_dtype(value.device))
    distinct = _read_once(value)
    if len(distinct) < len(value):
        weights = weights.sum(0, keepdim=True)
    columns = as_matrix(distinct)
    weights = weights.unsqueeze(1)
    sums = columns.new_empty(columns.shape[1], dtype=weights.dtype)
    for block in column_blocks(columns):
        # Elementwise: autocast would run a product of matrices, and so round the states, in half precision.
        sums[block] = (double(columns[:, block]) * weights).sum(0)
    return sums.view(value.shape[1:])


def _read_once(stack: Tensor) -> Tensor:
    """Return a stack (C, ...), or its first row (1, ...) if all clients share one tensor in memory, as of expand()."""
    if len(stack) > 1 and stack.stride(0) == 0:
        return stack[:1]
    return stack


def _largest(value: Tensor, accepted: Tensor | None = None) -> Tensor:
    """Return the maximum (...) of a stack (C, ...) of integers over clients, of those that count where it is given."""
    smallest_number = torch.iinfo(value.dtype).min
    if not len(value):
        # A rank without clients takes part in the collective: any other rank's numbers are at least as large.
        return value.new_full(value.shape[1:], smallest_number)
    if accepted is not None:
        value = value.masked_fill(~per_client(accepted, value), smallest_number)
    return value.amax(0)


def names_with_change(names: Iterable[str], sent: State, received: State) -> list[str]:
    """Return the names of tensors that clients sent and had received in the same shape, whose change can be measured.

    Args:
        names: Names to select from.
        sent: What the clients sent, (C, ...).
        received: What they had received, (C, ...).
    """
    return [name for name in names if name in sent and name in received and received[name].shape == sent[name].shape]


def squared_changes(names: Iterable[str], sent: State, received: State) -> Tensor:
    """Return the squared norms (C,) of the clients' changes, in double precision.

    Args:
        names: Tensors whose change counts, where a client received one of the same shape.
        sent: What the clients sent, (C, ...).
        received: What they had received, (C, ...).
    """
    first_stack = next(iter(sent.values()))
    device = first_stack.device
    squares = torch.zeros(len(first_stack), dtype=double_dtype(device), device=device)
    for name in names_with_change(names, sent, received):
        sent_rows = as_matrix(sent[name])
        received_rows = as_matrix(received[name])
        # Block by block: changes of all clients in double precision would not fit the caches.
        for block in column_blocks(sent_rows):
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            squares += change.square().sum(1)
    return squares


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
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
        updates: What the clients sent; it may lack names of ``previous``. ``updates.gathered(name)`` is the tensor
            (C, ...) of all clients, which moves between devices, where :func:`mean` moves one state. Given as a stack
            (C, ...), it becomes an :class:`Updates`. A rule does not change its tensors, which may be those of clients.
        weights: Weights (C,) in float64 that sum to one.
        previous: Global state before the round.
        parameters: Names of trained parameters. Other names are running statistics and counters.
        round: Counted from 0.
        state: The rule's own tensors, which are kept between rounds and in checkpoints; empty at first. The rule
            replaces entries and does not change tensors in place.
        predict: ``predict(models, N, labelled)`` gives probabilities (C, N, K) of models (C, ...) on N of the server's
            images, fewer where there are fewer, and the labels as 0 and 1 (N, K). They are public ones, which the seed
            and the round draw, and have no labels (None), or the first ``labelled`` ones. All ranks call it alike.
            None unless the rule declares its ``needs``.
        factors: The pairs of LoRA's factors among the parameters.
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

    A rule has only options; it raises a ValueError for one that is out of range. What it must remember goes to
    :attr:`Aggregation.state`.

    Attributes:
        weighted: Whether the clients' weights matter. If not, ``weighting='samples'`` is rejected.
        function_of_mean: Whether the result depends only on the mean of the updates and on earlier results, so that
            noise on the mean protects it. Client-level privacy accepts only such rules, and checks at set-up that it
            is true.
        needs: Images of the server on which it needs predictions: ``public`` or ``labelled`` ones, or None.
        needs_factors: Whether clients must send both of LoRA's factors of a layer.
    """

    weighted: bool = True
    function_of_mean: bool = False
    needs: Literal["public", "labelled"] | None = None
    needs_factors: bool = False

    @property
    def kind(self) -> str:
        """Identifies the owner of saved tensors: training resumes only with a rule of the same kind."""
        return type(self).__name__

    def check(self, clients: int) -> None:
        """Raise a ValueError if the rule requires more clients per round. Most rules accept any number."""

    @abstractmethod
    def __call__(self, aggregation: Aggregation) -> State:
        """Return a state with the names of ``aggregation.updates``, without the client axis.

        Of integer tensors (counters of BatchNorm) it holds the maximum, not an average.
        """


class Mean(ServerRule):
    """The weighted mean (FedAvg; McMahan et al., 2017).

    Source: [McMahan et al., AISTATS 2017](https://arxiv.org/abs/1602.05629).
    """

    function_of_mean = True

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        return mean(aggregation.updates, aggregation.weights)


class ComposedRule(ServerRule):
    """Base class of rules on the result of an inner rule.

    A class sets ``function_of_mean`` for the case that the inner rule is the mean.
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

    def check(self, clients: int) -> None:
        """Raise the errors of the inner rule."""
        self.aggregate.check(clients)

    def _aggregate(self, aggregation: Aggregation) -> State:
        """Apply the inner rule, whose state is kept separate from this rule's by a prefix."""
        inner = {key.removeprefix(_INNER): state for key, state in aggregation.state.items() if key.startswith(_INNER)}
        result = self.aggregate(replace(aggregation, state=inner))
        aggregation.state.update({_INNER + key: state for key, state in inner.items()})
        return result
