# SPDX-License-Identifier: Apache-2.0
"""The interface of an algorithm: what clients keep and send, one client's step, and the server's step.

Roles are named as in PerAda: ``personal`` is what a client keeps and predicts with, ``local`` is what it trains from
the received global state and sends back. Every method sees the states of C clients as one stack with a leading client
axis, and must treat each client independently of the others.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
"""Prefix of the server rule's tensors among the server's."""


@dataclass(frozen=True)
class TensorNames:
    """The names of a state's tensors, by kind.

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
        """The number of trained parameters, with the first and the last name, for messages."""
        return f"{len(self.parameters)} tensors from {self.parameters[0]!r} to {self.parameters[-1]!r}"

    @property
    def head_module(self) -> str:
        """Name of the module that the head's parameters are in; empty if none is trained.

        >>> TensorNames((), (), head=frozenset({"fc.lora_A.default.weight", "fc.lora_B.default.weight"})).head_module
        'fc'
        """
        paths = [name.split(".")[:-1] for name in self.head]
        module: list[str] = []
        # The parameters of an adapter in the head are deeper inside, so only the common beginning counts.
        for components in zip(*paths, strict=False):
            if len(set(components)) > 1:
                break
            module.append(components[0])
        return ".".join(module)


class ClientStep(Protocol):
    """One local step of C clients, as an algorithm sees it.

    C counts the clients that are still training; those with fewer steps have finished. Where memory is small, or
    clients train one after another, the algorithm is called several times a step, each time for a part of them.
    :class:`perada.federation.cohort.Cohort` makes the steps.

    Attributes:
        states: States (C, ...) under training, by role: the roles of :meth:`Algorithm.begin_round`. Parameters that
            the phase trains are leaves that require gradients. Other tensors may be changed in place.
        round: The round, counted from 0.
        phase: Name of the phase, as :meth:`Algorithm.phases` gives it.
        tensor_names: The names of the model's tensors.
    """

    states: Stacks
    round: int
    phase: str
    tensor_names: TensorNames

    @property
    def received(self) -> State:
        """The states that the server sent, (C, ...)."""

    @property
    def client_state(self) -> Stacks:
        """The states that the clients kept before the round, by role, (C, ...)."""

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Compute the training-mode logits (C, B, K) of a role's states, or of any stack, on the step's images.

        Args:
            states: A role, or a stack (C, ...).
            stream: The role whose random stream dropout draws from. Default: the role, or the first for a stack.
        """

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Compute logits like :meth:`logits`, and the representations (C, B, F) that the head receives.

        Args:
            states: A role, or a stack (C, ...).
            stream: As of :meth:`logits`.
            training: False runs the model in evaluation mode: no dropout, and running statistics are used as they are.
        """

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Compute each client's task loss (C,), the mean over its images.

        Args:
            states: A role, a stack (C, ...), or logits (C, B, K).
            stream: As of :meth:`logits`.
        """

    def class_counts(self, classes: int) -> Tensor:
        """Return the clients' numbers of training images of each of K ``classes``, (C, K).

        Only for algorithms that set :attr:`Algorithm.needs_class_counts`.
        """

    @property
    def labels(self) -> Tensor:
        """Labels of the step's images: classes (C, B), or (C, B, K) of several labels an image. Some rows are padding.

        :meth:`loss` and :meth:`mean` leave padding out.
        """

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean (C, ...) of values (C, B, ...) over each client's images, without the rows of padding."""

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start`` (C, ...), and reset the state of its optimiser."""

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
            loss: Losses (C,), each differentiated by its own client's parameters. ``None``: only the terms below.
            pull: ``(strength, anchor)`` adds the gradient of strength/2 · ||parameters − anchor||².
            slope: Adds this gradient, which is that of <slope, parameters>.

        The anchor and the slope (C, ...) need every parameter that the phase trains in the role. The gradient that the
        step was taken with, with these terms, stays in the parameters' ``grad`` until the next one.
        """


@dataclass(frozen=True)
class Broadcast:
    """The server's knowledge when it sends a round's C clients their states.

    Attributes:
        global_state: The global state, without a client axis, or a stack of several.
        tensor_names: The names of its tensors.
        round: The round, counted from 0.
        clients: Ids of the round's clients.
        num_clients: M, the number of all clients of the federation.
        seed: Seed of the run.
        losses: Losses (C, K) of K global models on each client's training images, where clients compare them.
        state: The server's own tensors, as of :class:`ServerStep`. Read only.
        lora_ranks: The clients' ranks, as :meth:`Algorithm.lora_rank` gives them; empty where it gives None.
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
        updates: Updates (C, ...) of the clients, each on the device that trained it. :meth:`mean` and :attr:`distill`
            move only sums over clients; ``updates.gathered(name)`` gathers the tensors of all clients. With privacy of
            whole clients, every row is their noisy mean.
        weights: Aggregation weights (C,) that sum to one.
        state: The server's own tensors, ``{name: state}``, kept between rounds and in checkpoints. The algorithm may
            replace entries. Those whose names begin with ``rule/`` are the server rule's.
        rule: The server rule, which :meth:`mean` applies.
        distiller: The :class:`perada.server.Distiller` that :meth:`distill` calls.
        predict: As of :class:`perada.server.Aggregation`, given the state before the round, too.
        metrics: Metrics of the round that are measured in the step, including those of the server rule.
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
        except ValueError as error:
            # Set-up has checked the planned number. Fewer are left if some broke, or were given other models.
            warnings.warn(f"round {self.round + 1}: the server rule cannot be applied: {error}", stacklevel=2)
        if not isinstance(updates, Updates):
            updates = Updates(updates)
        predict = None
        if self.predict is not None:
            predict = partial(self.predict, self.previous)
        aggregation = Aggregation(
            updates=updates,
            weights=weights,
            previous=self.previous,
            parameters=frozenset(self.tensor_names.parameters),
            round=self.round,
            state={name.removeprefix(RULE): state for name, state in self.state.items() if name.startswith(RULE)},
            predict=predict,
            factors=self.tensor_names.factors,
            metrics=self.metrics,
        )
        result = self.rule(aggregation)
        for name, state in aggregation.state.items():
            self.state[RULE + name] = state
        return result

    def distill(self, student: State, teachers: Updates | State, average_from: float | None = None) -> State:
        """Distil the ensemble of a stack of teachers into a state, as :class:`perada.server.Distiller` does.

        How far the student may go follows from its distance from :attr:`previous`.
        """
        return self.distiller(student, teachers, average_from, self.previous)


class Algorithm(Options):
    """A federated algorithm. A subclass overrides only what differs from FedAvg.

    The constructor raises a ValueError for an option that cannot be used, such as a negative strength.

    Attributes:
        inference: Which state a client predicts with: its ``personal`` one, or the ``global`` one.
        roles: Names of the states that a client trains: ``personal`` starts from its own, ``local`` from the received.
        sends_updates: Whether clients send anything.
        global_model: Whether the server holds a whole model, which can be evaluated.
        uses_distillation: Whether the server distils, which takes a public set.
        own_teachers: Whether the server makes the teachers itself, instead of distilling from the clients' models.
        unsent: Streams of batches that nothing a client sends depends on, in this round or later. Default: none, so
            all of a client's training counts as sent.
        modes: Models that a round's clients are divided among.
        compares_models: Whether clients compare the models on their own training images before each round.
        needs_class_counts: Whether a step asks for the clients' numbers of images of each class.
        merges_into_backbone: Whether the server merges what clients trained into the weights that LoRA adapts. They are
            then a part of all states.
        average: Which outputs of several global models are averaged to predict: ``logits`` or ``probabilities``.
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
        """Identifies the algorithm of saved states: training resumes only with an algorithm of the same kind."""
        return type(self).__name__

    @property
    def is_ensemble(self) -> bool:
        """Whether several global models predict together."""
        return type(self).members is not Algorithm.members

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the algorithm does not support the trained tensors or the number of clients. Called at set-up.

        Args:
            tensor_names: Names of the model's tensors.
            num_clients: M, the number of all clients.

        Raises:
            ValueError: With the reason and the remedy.
        """

    def lora_rank(self, number: int, name: str, size: int | None, most: int) -> int | None:
        """Return a client's LoRA rank, or None if clients have the adapter's rank.

        Args:
            number: The client's id.
            name: The client's name.
            size: Its number of training images; None if it must stay unknown.
            most: The adapter's rank.

        Raises:
            ValueError: If the rank cannot be determined.
        """
        return None

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Return the phases of a round of local training. Every client finishes one before any starts the next.

        Args:
            epochs: The option ``local_epochs``.
            steps: The option ``local_steps``.
        """
        return (Phase("train", epochs, steps),)

    def initial(self, make: Callable[[int], State]) -> State:
        """Return the first global state.

        Args:
            make: Gives the k-th random initialisation; that of 0 is the model's own.
        """
        return make(0)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Return what one client stores before the first round, by role and without a client axis."""
        if self.inference == "personal":
            return {"personal": initial}
        return {}

    def broadcast(self, sending: Broadcast) -> State:
        """Return what the server sends to each of C clients, (C, ...)."""
        return expand(sending.global_state, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Return the stacks (C, ...) to train in this round, by role.

        Args:
            client_state: States (C, ...) that the clients kept, by role.
            received: States (C, ...) that the server sent them.
            tensor_names: Names of the model's tensors.
        """
        stacks: Stacks = {}
        for role in self.roles:
            if role == "personal":
                stacks[role] = client_state["personal"]
            else:
                stacks[role] = received
        return stacks

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Return the parameters of ``role`` that ``phase`` trains in a round; names that the role lacks are ignored."""
        return tensor_names.parameters

    def client_step(self, step: ClientStep) -> None:
        """Take one local step of every client. The step's states are changed in place, nothing is returned."""
        step.descend("local", step.loss("local"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Return the states that the clients keep, and those that they send.

        Args:
            trained: The stacks (C, ...) of :meth:`begin_round` after training, by role.
            client_state: States (C, ...) that the clients kept before the round, by role.
            received: States (C, ...) that the server sent them.
            tensor_names: Names of the model's tensors.

        Returns:
            The stacks (C, ...) to keep, with the roles and names of :meth:`initial_client_state`, and the stack
            (C, ...) to send.
        """
        new_client_state: Stacks = {}
        update: State = {}
        if self.inference == "personal":
            new_client_state = {"personal": trained["personal"]}
        if self.sends_updates:
            update = trained["local"]
        return new_client_state, update

    def server_step(self, server: ServerStep) -> State:
        """Return the new global state, without a client axis. Names that are left out keep their values.

        The default is the mean of the updates, distilled if the algorithm ``uses_distillation``.
        """
        if not self.sends_updates:
            return {}
        average = server.mean(server.updates, server.weights)
        if self.uses_distillation:
            return server.distill(server.previous | average, server.updates)
        return average

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the global models (K, ...) whose averaged outputs predict; usually one."""
        return expand(global_state, 1)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Return the states (C, ...) that clients predict with, where ``inference`` is ``"personal"``."""
        return client_state["personal"]

    def personalization(self) -> "tuple[Algorithm, Phase] | None":
        """Return the algorithm and phase of the clients' fine-tuning after the last round, from the final global state.

        The default is None: nothing.
        """
        return None


def moved_towards(previous: State, target: State, share: float) -> State:
    """Return previous + share · (target − previous) for each tensor of ``target``; integer counters are the target's.

    >>> import torch
    >>> moved_towards({"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, 0.5)
    {'w': tensor([2.])}
    """
    moved = {}
    for key, value in target.items():
        if value.is_floating_point():
            moved[key] = previous[key] + share * (value - previous[key])
        else:
            moved[key] = value
    return moved


class ClientSideWrapper(Algorithm):
    """An algorithm whose clients behave like those of its base, another algorithm.

    The client's methods that a subclass does not override are the base's. The server's side is not the base's.

    Attributes:
        base: The algorithm inside.
    """

    def __init__(self, base: Algorithm) -> None:
        self.base = base

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the base does not support the trained tensors or the number of clients."""
        self.base.check(tensor_names, num_clients)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Return what a client of the base stores before the first round."""
        return self.base.initial_client_state(initial, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Return what the base sends to each client."""
        return self.base.broadcast(sending)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Return the stacks that the base trains."""
        return self.base.begin_round(client_state, received, tensor_names)

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Return the parameters that the base trains."""
        return self.base.trainable_keys(role, phase, tensor_names, round)

    def client_step(self, step: ClientStep) -> None:
        """Take the base's local step."""
        self.base.client_step(step)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Return what clients of the base keep and send."""
        return self.base.end_round(trained, client_state, received, tensor_names)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Return what clients of the base predict with."""
        return self.base.personal(client_state, global_state)


class AlgorithmWrapper(ClientSideWrapper):
    """An algorithm that wraps another one, its base, and changes part of its behaviour.

    Whatever a subclass does not override comes from the base: attributes are copied when the wrapper is made, methods
    are called.

    Attributes:
        base: The algorithm inside.

    Raises:
        ValueError: If ``base`` is not an algorithm.
    """

    def __init__(self, base: Algorithm) -> None:
        if not isinstance(base, Algorithm):
            raise OptionError(
                f"base={base!r} is not an algorithm; pass an Algorithm object, such as PerAda()",
                name="base",
                value=base,
            )
        super().__init__(base)
        self.inference = base.inference
        self.roles = base.roles
        self.sends_updates = base.sends_updates
        self.global_model = base.global_model
        self.uses_distillation = base.uses_distillation
        self.own_teachers = base.own_teachers
        self.unsent = base.unsent
        self.modes = base.modes
        self.compares_models = base.compares_models
        self.needs_class_counts = base.needs_class_counts
        self.merges_into_backbone = base.merges_into_backbone
        self.average = base.average

    @property
    def kind(self) -> str:
        """The class and the base."""
        return f"{type(self).__name__} of {self.base.kind}"

    @property
    def is_ensemble(self) -> bool:
        """Whether several global models of the base predict together."""
        return self.base.is_ensemble

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Return the base's phases."""
        return self.base.phases(epochs, steps)

    def initial(self, make: Callable[[int], State]) -> State:
        """Return the base's first global state."""
        return self.base.initial(make)

    def server_step(self, server: ServerStep) -> State:
        """Take the base's server step."""
        return self.base.server_step(server)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the base's global models."""
        return self.base.members(global_state, server_state)

    def personalization(self) -> "tuple[Algorithm, Phase] | None":
        """Return what clients of the base train after the last round."""
        return self.base.personalization()


def check_outermost(wrapper: AlgorithmWrapper) -> None:
    """Raise if the base of ``wrapper`` assigns LoRA ranks to clients.

    Ranks are cut from everything that a client receives, keeps and sends, so HetLoRA has to be the outermost wrapper.

    Raises:
        ValueError: With the order that works.
    """
    if type(wrapper.base).lora_rank is Algorithm.lora_rank:
        return
    base_name = type(wrapper.base).__name__
    wrapper_name = type(wrapper).__name__
    wrapper_has_ranks = type(wrapper).lora_rank is not Algorithm.lora_rank
    if type(wrapper.base) is type(wrapper):
        remedy = f"use only one {base_name}"
    elif wrapper.is_ensemble or wrapper_has_ranks:
        remedy = f"choose only one of {base_name} and {wrapper_name}"
    else:
        remedy = f"use {base_name}(base={wrapper_name}(...))"
    raise OptionError(
        f"base={base_name} assigns LoRA ranks to clients and must be the outermost wrapper; {remedy}",
        name="base",
        value=base_name,
    )
