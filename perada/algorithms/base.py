# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: what clients keep and send, one client's step, and the server's step.

Roles are named as in PerAda: ``personal`` is what a client keeps and predicts with, ``local`` is what it trains from
the received global state and sends back. Every method sees the states of C clients as one stack with a leading client
axis, and must treat each client as if it were alone.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Literal, Protocol

from torch import Tensor

from perada.core.checks import OptionError, Options
from perada.core.rounds import Phase
from perada.core.states import Factors, State, expand
from perada.server.aggregate import Aggregation, ServerRule, Updates

Inference = Literal["personal", "global"]
Average = Literal["logits", "probabilities"]
Stacks = dict[str, State]
"""Stacked states by role."""
RULE = "rule/"
"""FrozenTrunk of the server rule's tensors among the server's."""


@dataclass(frozen=True)
class TensorNames:
    """The names of a state's tensors, by what they are.

    Attributes:
        keys: All names: trained parameters, and the running statistics and integer counters of trained norms.
        parameters: The trained parameters.
        head: Parameters of the classification head.
        norms: Parameters and running statistics of normalisation layers.
        input: All names in the first layer that images pass.
        adapter: All names that the adapter adds to the backbone.
        factors: The pairs of LoRA's factors, in the model's order.
        shared, private: All names of either branch of the adapter ``dual_lora``. A gate belongs to the private one.
        merged: Weights into which the server merges, and which no client trains; see
            :attr:`Algorithm.merges_into_backbone`.
    """

    keys: tuple[str, ...]
    parameters: tuple[str, ...]
    head: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    input: frozenset[str] = frozenset()
    adapter: frozenset[str] = frozenset()
    factors: tuple[Factors, ...] = ()
    shared: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()

    @property
    def parameter_range(self) -> str:
        """How many parameters are trained, with the first and the last name, for messages."""
        return f"{len(self.parameters)} tensors from {self.parameters[0]!r} to {self.parameters[-1]!r}"

    @property
    def head_module(self) -> str:
        """Name of the module that the head's parameters are in; empty if none is trained.

        >>> TensorNames((), (), head=frozenset({"fc.lora_A.default.weight", "fc.lora_B.default.weight"})).head_module
        'fc'
        """
        levels = zip(*(name.split(".")[:-1] for name in self.head), strict=False)
        return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


class ClientStep(Protocol):
    """One local step of C clients, as an algorithm sees it; :class:`perada.federation.cohort.Cohort` makes it.

    C counts the clients that are still training. Those with fewer steps have finished; in small memory, or one by one,
    the others take the step in several parts.

    Attributes:
        states: What is being trained, by role, (C, ...): the roles of :meth:`Algorithm.begin_round`. Parameters that
            the phase trains are leaves that require gradients. Other tensors may be changed in place.
        received: What the server sent, (C, ...). Read only.
        client_state: What the clients kept before the round, by role, (C, ...). Read only.
        round: The round, counted from 0.
        phase: Name of the phase, as :meth:`Algorithm.phases` gives it.
        tensor_names: The names of the model's tensors.
    """

    states: Stacks
    received: State
    client_state: Stacks
    round: int
    phase: str
    tensor_names: TensorNames

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Training-mode logits (C, B, K) of a role's states, or of any stack, on the step's images.

        ``stream`` is the role whose random stream dropout draws from. Default: the role, or the first for a stack.
        """

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Logits, as of :meth:`logits`, and the representations (C, B, F) that the head made them of.

        Without ``training``, in evaluation mode: nothing is dropped, and running statistics are used and stay.
        """

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Each client's task loss (C,), the mean over its images.

        Takes the arguments of :meth:`logits`, or logits (C, B, K).
        """

    def class_counts(self, classes: int) -> Tensor:
        """How many training images of each of K ``classes`` a client has, (C, K).

        Only for algorithms that set :attr:`Algorithm.needs_class_counts`.
        """

    @property
    def labels(self) -> Tensor:
        """Labels of the step's images: classes (C, B), or (C, B, K) of several labels an image. Some rows are padding.

        :meth:`loss` and :meth:`mean` leave padding out.
        """

    def mean(self, values: Tensor) -> Tensor:
        """Mean (C, ...) of values (C, B, ...), one for each row of the logits, over a client's images."""

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start`` (C, ...), and clear the state of its optimiser."""

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """Take one optimiser step on a role's parameters, or on those of several from one gradient.

        Args:
            role: One or several.
            loss: (C,), differentiated for each client alone. ``None``: only the terms below.
            pull: ``(strength, anchor)`` adds the gradient of strength/2 · ||parameters − anchor||².
            slope: Adds this gradient, which is that of <slope, parameters>.

        The anchor and the slope (C, ...) need every parameter that the phase trains in the role. The gradient that the
        step was taken with, with these terms, stays in the parameters' ``grad`` until the next one.
        """


@dataclass(frozen=True)
class Broadcast:
    """What the server knows when it sends a round's C clients their states.

    The round is counted from 0, ``clients`` are ids, ``num_clients`` is M of the federation, ``seed`` that of the run.
    ``losses`` (C, K) are those of K global models on each client's training images, where clients compare them.
    ``state`` has the server's own tensors, as of :class:`ServerStep`, to be read only. ``lora_ranks`` are what
    :meth:`Algorithm.lora_rank` says of the clients; empty where that is nothing.
    """

    global_state: State
    tensor_names: TensorNames
    round: int
    clients: tuple[int, ...]
    num_clients: int
    seed: int
    losses: Tensor | None = None
    state: Mapping[str, State] = field(default_factory=dict)
    lora_ranks: tuple[int, ...] = ()


@dataclass
class ServerStep:
    """The server's side of a round.

    Attributes:
        round, num_clients, tensor_names, seed: As of :class:`Broadcast`.
        clients: Who sent the updates, in their order.
        previous: Global state before the round.
        updates: What the clients sent, (C, ...), each on the device that trained it. :meth:`mean` and :attr:`distill`
            move only sums over clients; ``updates.gathered(name)`` gathers the tensors of all clients. With privacy of
            whole clients, every row is their noisy mean.
        weights: Aggregation weights (C,) that sum to one.
        state: The server's own tensors, ``{name: state}``, kept between rounds and in checkpoints. The algorithm may
            replace entries. Those whose names begin with ``rule/`` are the server rule's.
        rule: The server rule, which :meth:`mean` applies.
        distiller: What :meth:`distill` calls, a :class:`perada.server.Distiller`.
        predict: As of :class:`perada.server.Aggregation`, given the state before the round, too.
        metrics: What is measured in the step, for the metrics of the round; the server rule's too.
    """

    round: int
    clients: tuple[int, ...]
    num_clients: int
    tensor_names: TensorNames
    seed: int
    previous: State
    updates: Updates
    weights: Tensor
    state: dict[str, State]
    rule: ServerRule
    distiller: Callable[..., State]
    predict: Callable[[State, Updates | State, int, bool], tuple[Tensor, Tensor | None]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def mean(self, updates: Updates | State, weights: Tensor) -> State:
        """Aggregate by the server rule, by default the weighted mean."""
        try:
            self.rule.check(len(self.clients))
        except ValueError as error:  # fewer than planned, since some broke or were given other models
            warnings.warn(f"round {self.round + 1}: the server rule cannot do what it is for: {error}", stacklevel=2)
        aggregation = Aggregation(
            updates=updates if isinstance(updates, Updates) else Updates(updates),
            weights=weights,
            previous=self.previous,
            parameters=frozenset(self.tensor_names.parameters),
            round=self.round,
            state={name.removeprefix(RULE): state for name, state in self.state.items() if name.startswith(RULE)},
            predict=None if self.predict is None else partial(self.predict, self.previous),
            factors=self.tensor_names.factors,
            metrics=self.metrics,
        )
        result = self.rule(aggregation)
        self.state.update({RULE + name: state for name, state in aggregation.state.items()})
        return result

    def distill(self, student: State, teachers: Updates | State, average_from: float | None = None) -> State:
        """Distil the ensemble of a stack of teachers into a state, as :class:`perada.server.Distiller` does.

        How far the student may go follows from its distance from :attr:`previous`.
        """
        return self.distiller(student, teachers, average_from, self.previous)


class Algorithm(Options):
    """A federated algorithm. A subclass overrides only what differs from FedAvg.

    Whoever makes one with an option that cannot be used, such as a negative strength, gets a ValueError.

    Attributes:
        inference: Which state a client predicts with: its ``personal`` one, or the ``global`` one.
        roles: What a client trains: ``personal`` begins with what it kept, ``local`` with what it received.
        sends_updates: Whether clients send anything.
        global_model: Whether the server holds a whole model, which can be evaluated.
        uses_distillation: Whether the server distils, which takes a public set.
        own_teachers: Whether it distils from models of its own making, and not from those of the clients.
        unsent: Streams of batches that nothing a client sends depends on, in this round or later. Default: none, so
            all of a client's training counts as sent.
        modes: Models that a round's clients are divided among.
        compares_models: Whether clients compare the models on their own training images before each round.
        needs_class_counts: Whether a step asks for the clients' numbers of images of each class.
        merges_into_backbone: Whether the server merges what clients trained into the weights that LoRA adapts. They are
            then a part of all states.
        average: What of several global models is averaged to predict: ``logits`` or ``probabilities``.
    """

    inference: Inference = "global"
    roles: tuple[str, ...] = ("local",)
    sends_updates: bool = True
    global_model: bool = True
    uses_distillation: bool = False
    own_teachers: bool = False
    unsent: frozenset[str] = frozenset()
    modes: int = 1
    compares_models: bool = False
    needs_class_counts: bool = False
    merges_into_backbone: bool = False
    average: Average = "logits"

    @property
    def kind(self) -> str:
        """What saved states belong to: training resumes only with an algorithm of the same kind."""
        return type(self).__name__

    @property
    def is_ensemble(self) -> bool:
        """Whether several global models predict together."""
        return type(self).members is not Algorithm.members

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse, by a ValueError at set-up, trained tensors or a number of clients that it cannot work with."""

    def lora_rank(self, number: int, name: str, size: int | None, most: int) -> int | None:
        """LoRA's rank of a client, where it need not be the adapter's, which is ``most``; None if it is.

        A ValueError if it cannot be told. The ``size`` are its training images, None where nobody may know them.
        """
        return None

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """The phases of a round of local training. Every client finishes one before any starts the next."""
        return (Phase("train", epochs, steps),)

    def initial(self, make: Callable[[int], State]) -> State:
        """The first global state; ``make(k)`` gives the k-th random initialisation, ``make(0)`` the model's own."""
        return make(0)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """What one client stores before the first round, by role and without a client axis."""
        return {"personal": initial} if self.inference == "personal" else {}

    def broadcast(self, sending: Broadcast) -> State:
        """What the server sends to each of C clients, (C, ...)."""
        return expand(sending.global_state, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The stacks (C, ...) to train in this round, made from what the clients kept and received, (C, ...)."""
        return {role: client_state["personal"] if role == "personal" else received for role in self.roles}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Parameters that ``phase`` trains in ``role`` in a round; those that the role lacks are ignored."""
        return tensor_names.parameters

    def client_step(self, step: ClientStep) -> None:
        """One local step of every client."""
        step.descend("local", step.loss("local"))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """What the clients keep, and what they send, (C, ...) each.

        What is kept has the roles and names of :meth:`initial_client_state`.
        """
        new_client_state = {"personal": trained["personal"]} if self.inference == "personal" else {}
        return new_client_state, trained["local"] if self.sends_updates else {}

    def server_step(self, server: ServerStep) -> State:
        """The new global state, without a client axis: the mean, distilled if the algorithm ``uses_distillation``.

        Names that are left out stay as they were: all, where clients send nothing.
        """
        if not self.sends_updates:
            return {}
        average = server.mean(server.updates, server.weights)
        return server.distill(server.previous | average, server.updates) if self.uses_distillation else average

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """The global models (K, ...) whose averaged outputs predict; usually one."""
        return expand(global_state, 1)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """The states (C, ...) that clients predict with, where ``inference`` is ``"personal"``."""
        return client_state["personal"]

    def personalization(self) -> "tuple[Algorithm, Phase] | None":
        """What every client trains alone from the final global state after the last round, and for how long."""
        return None


class AlgorithmWrapper(Algorithm):
    """An algorithm that changes what another one keeps or sends, and trains as that one does.

    Attributes:
        base: The other one.
    """

    base: Algorithm

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """The names that the other one trains."""
        return self.base.trainable_keys(role, phase, tensor_names, round)

    def client_step(self, step: ClientStep) -> None:
        """The other one's step."""
        self.base.client_step(step)


def check_base(outer: Algorithm, base: object) -> None:
    """Refuse, by a ValueError, what is no algorithm, or one that has to be around ``outer``, since it gives ranks."""
    if not isinstance(base, Algorithm):
        raise OptionError(f"base={base!r} is not an algorithm; give one, such as PerAda()", name="base", value=base)
    own = type(base).__name__
    name = type(outer).__name__
    if type(base).lora_rank is not Algorithm.lora_rank:
        around = not outer.is_ensemble and type(outer).lora_rank is Algorithm.lora_rank
        remedy = f"give {own}(base={name}(...))" if around else f"choose one of {own} and {name} alone"
        remedy = f"give one {own} alone" if type(base) is type(outer) else remedy
        raise OptionError(
            f"base={own} gives clients ranks, and has to be around all else; {remedy}", name="base", value=own
        )
