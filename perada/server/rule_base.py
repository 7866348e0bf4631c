# SPDX-License-Identifier: Apache-2.0
"""What every server rule builds on: what it is given, its interface, the mean, and rules on the result of others."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from perada.core.options import Options
from perada.core.states import State
from perada.server.aggregate import mean

_INNER = "aggregate/"  # prefix of what the inner rule of a composed one keeps


@dataclass
class Aggregation:
    """What a rule is given in a round.

    Attributes:
        updates: Stack (C, ...) of what the clients sent; it may hold only some of the names of ``previous``. On several
            devices it is an :class:`~perada.server.Updates`: its mean moves one state between them, and reading a name
            the tensors of all clients.
        weights: Weights (C,) in float64 that sum to one.
        previous: Global state before the round.
        parameters: Names of trained parameters. Other names are running statistics and counters.
        round: Counted from 0.
        state: The rule's own tensors, kept between rounds and in checkpoints; empty at first. The rule reads entries
            and puts new ones in their place.
    """

    updates: Mapping[str, Tensor]
    weights: Tensor
    previous: State
    parameters: frozenset[str]
    round: int
    state: dict[str, State] = field(default_factory=dict)


class ServerRule(Options, ABC):
    """How the server aggregates: call it with an :class:`Aggregation`, get the next global state.

    A rule object holds options only. What it remembers goes to :attr:`Aggregation.state`.

    Attributes:
        weighted: Whether the clients' weights count. A rule without them cannot go with ``weighting='samples'``.
        function_of_mean: Whether the result follows from the mean of the updates and from earlier results alone, so
            that whatever noise the mean has protects it. Privacy of whole clients takes no other rule. False unless a
            rule says so; what it says is tried at set-up.
    """

    weighted: bool = True
    function_of_mean: bool = False

    @property
    def kind(self) -> str:
        """What the rule's tensors belong to: those of another kind of rule cannot be gone on with."""
        return type(self).__name__

    def check(self, clients: int) -> None:  # most rules can work with any number
        """Refuse what cannot work.

        Args:
            clients: Clients C that send updates in a round.

        Raises:
            ValueError: If this rule cannot aggregate so few.
        """

    @abstractmethod
    def __call__(self, given: Aggregation) -> State:
        """Aggregate.

        Returns:
            A state with the names of ``given.updates``, without the client axis. Integer tensors (counters of
            BatchNorm) are never averaged: their maximum is taken.
        """


class Mean(ServerRule):
    """The weighted mean (FedAvg; McMahan et al., 2017)."""

    function_of_mean = True

    def __call__(self, given: Aggregation) -> State:
        """Aggregate."""
        return mean(given.updates, given.weights)


class ComposedRule(ServerRule):
    """A rule on the result of another one. ``function_of_mean`` of a class is said for the mean as the other one."""

    def __init__(self, aggregate: ServerRule | None) -> None:
        if aggregate is not None and not isinstance(aggregate, ServerRule):
            raise ValueError(f"aggregate={aggregate!r} is not a server rule; give a ServerRule, such as Median()")
        self.aggregate = Mean() if aggregate is None else aggregate
        self.weighted = self.aggregate.weighted
        self.function_of_mean = self.function_of_mean and self.aggregate.function_of_mean

    @property
    def kind(self) -> str:
        """The class, and the kind of the inner rule."""
        return f"{type(self).__name__} on {self.aggregate.kind}"

    def check(self, clients: int) -> None:
        """Refuse what the inner rule refuses."""
        self.aggregate.check(clients)

    def _aggregate(self, given: Aggregation) -> State:
        """Result of the inner rule, whose tensors stay apart from this one's."""
        inner = {key.removeprefix(_INNER): state for key, state in given.state.items() if key.startswith(_INNER)}
        result = self.aggregate(replace(given, state=inner))
        given.state.update({_INNER + key: state for key, state in inner.items()})
        return result
