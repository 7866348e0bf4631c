# SPDX-License-Identifier: Apache-2.0
"""What server rules are built on: their input, their interface, the mean, and rules on the result of another rule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from perada.core.options import Options
from perada.core.states import State
from perada.server.aggregate import mean

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
    """

    updates: Mapping[str, Tensor]
    weights: Tensor
    previous: State
    parameters: frozenset[str]
    round: int
    state: dict[str, State] = field(default_factory=dict)
    predict: Callable[[Mapping[str, Tensor], int, bool], tuple[Tensor, Tensor | None]] | None = None


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
    """

    weighted: bool = True
    function_of_mean: bool = False
    needs: Literal["public", "labelled"] | None = None

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
            raise ValueError(f"aggregate={aggregate!r} is not a server rule; give a ServerRule, such as Median()")
        self.aggregate = Mean() if aggregate is None else aggregate
        self.weighted = self.aggregate.weighted
        self.function_of_mean = self.function_of_mean and self.aggregate.function_of_mean
        self.needs = self.aggregate.needs

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
