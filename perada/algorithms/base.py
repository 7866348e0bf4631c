# SPDX-License-Identifier: Apache-2.0
"""The interface of an algorithm: what clients keep and send, one client's step, and the server's step.

A role is one of the states that a client trains, named as in PerAda: the client keeps ``personal`` and predicts with
it; ``local`` starts from the received global state and is sent back. Every method receives the states of C clients as
one stack with a leading client axis, and must treat each client independently of the others.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from perada.core.checks import OptionError, Options
from perada.core.rounds import Phase
from perada.core.states import Factors, State, expand
from perada.server.aggregate import Aggregation, ServerRule, Updates
from perada.tasks.base import Average

Inference = Literal["personal", "global"]
Stacks = dict[str, State]
"""Stacked states by role."""
RULE = "rule/"
"""Prefix that distinguishes the server rule's tensors from those of the algorithm in the server's state."""


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
        shared, private: All names of the shared and of the private branch of the adapter ``dual_lora``. A gate belongs
            to the private one.
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
        # Parameters of an adapter are deeper inside the head, so the module is the common beginning of all paths.
        for components in zip(*paths, strict=False):
            if len(set(components)) > 1:
                break
            module.append(components[0])
        return ".".join(module)


class ClientStep(Protocol):
    """One local step of C clients, as an algorithm sees it.

    C is the number of clients that are still training; those with fewer steps have finished. Where memory is limited,
    or clients train one after another, the algorithm is called several times, each time for some of the clients.
    :class:`perada.federation.chunk.Chunk` implements it.

    Attributes:
        states: States (C, ...) under training, by role: the roles of :meth:`Algorithm.begin_round`. Parameters that
            the phase trains are leaves that require gradients. Other tensors may be changed in place.
        round: Number of the round, counted from 0.
        phase: Name of the phase, one of those of :meth:`Algorithm.phases`.
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
        """Compute logits (C, B, K) of the step's images in training mode.

        Args:
            states: A role, or any stack (C, ...).
            stream: Role from whose random stream dropout draws. Default: the role of ``states``, or the first role if
                they are a stack.
        """

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Compute logits like :meth:`logits`, and the representations (C, B, F) that the head receives.

        Args:
            states: A role, or a stack (C, ...).
            stream: As for :meth:`logits`.
            training: Whether the model runs in training mode. In evaluation mode there is no dropout, and running
                statistics are used and not updated.
        """

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Compute each client's task loss (C,), the mean over its images.

        Args:
            states: A role, a stack (C, ...), or logits (C, B, K).
            stream: As for :meth:`logits`.
        """

    def class_counts(self, num_classes: int) -> Tensor:
        """Return the number of training images (C, K) of each client and class.

        Available only to algorithms that set :attr:`Algorithm.needs_class_counts`.

        Args:
            num_classes: Number K of classes.
        """

    @property
    def labels(self) -> Tensor:
        """Labels of the step's images: classes (C, B), or (C, B, K) with several labels per image.

        Some rows may be padding, which :meth:`loss` and :meth:`mean` leave out.
        """

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean (C, ...) of values (C, B, ...) over each client's images, leaving out padding."""

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
        """Take one optimiser step on the parameters of a role, or of several roles from one backward pass.

        The gradient of the step, including the terms below, stays in the parameters' ``grad`` until the next step.

        Args:
            role: One role, or several.
            loss: Loss (C,) of each client, which is differentiated with respect to the client's parameters. ``None``
                for a step on the terms below only.
            pull: ``(strength, anchor)`` adds the gradient of strength/2 · ||parameters − anchor||². The anchor (C, ...)
                must have every parameter that the phase trains in the role.
            slope: Gradient (C, ...) to add, which is that of <slope, parameters>. It must have the same parameters.
        """


@dataclass(frozen=True)
class Broadcast:
    """Inputs of :meth:`Algorithm.broadcast`: what the server has when it sends states to the C clients of a round.

    Attributes:
        global_state: The global state, without a client axis, or a stack of several.
        tensor_names: The names of its tensors.
        round: Number of the round, counted from 0.
        clients: Ids of the round's clients.
        num_clients: Number M of all clients of the federation.
        seed: Seed of the run.
        losses: Losses (C, K) of K global models on each client's training images; None unless clients compare them.
        state: The server's tensors, as in :class:`ServerStep`. They must not be changed.
        lora_ranks: Rank of each client (:meth:`Algorithm.lora_rank`); empty if all have the adapter's rank.
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
    """Inputs of :meth:`Algorithm.server_step`, and the operations that it may use.

    Attributes:
        round, num_clients, tensor_names, seed: As in :class:`Broadcast`.
        clients: Ids of the clients that sent the updates, in the order of the updates.
        previous: Global state before the round.
        updates: Updates (C, ...) of the clients, each on the device that trained it. Between devices, :meth:`mean` and
            :meth:`distill` transfer only sums over clients; ``updates.gathered(name)`` transfers the tensors of all
            clients. With client-level privacy every row is the noisy mean of all clients.
        weights: Aggregation weights (C,) that sum to one.
        state: The server's tensors, ``{name: state}``, which are kept between rounds and saved in checkpoints. The
            algorithm may replace entries. Those whose names begin with ``rule/`` belong to the server rule.
        rule: The server rule, which :meth:`mean` applies.
        distiller: The :class:`perada.server.Distiller` that :meth:`distill` calls.
        predict: As in :class:`perada.server.Aggregation`, but with the state before the round as its first argument.
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
        """Aggregate updates by the server rule, which is the weighted mean by default.

        Args:
            updates: Updates (C, ...).
            weights: Weight (C,) of each update; they sum to one.

        Returns:
            The aggregate, without a client axis.
        """
        try:
            self.rule.check(len(self.clients))
        except ValueError as error:
            # The planned number was checked at set-up. There may be fewer, if the training of some clients failed or if
            # the clients are divided among several models.
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

    def distill(
        self,
        student: State,
        teachers: Updates | State,
        average_from: float | None = None,
        clients_of_teachers: Sequence[int | None] | None = None,
    ) -> State:
        """Distil an ensemble of teachers into a student, as :class:`perada.server.Distiller` does.

        Args:
            student: State from which the student starts. Its distance from :attr:`previous` limits how far it may move.
            teachers: States (K, ...) of the teachers.
            average_from: As in :class:`perada.server.Distiller`.
            clients_of_teachers: For warnings, the client whose model each teacher is, or None for the model of no
                single client. By default :attr:`clients`, if the teachers are the updates of all of them.

        Returns:
            The student's state.
        """
        if clients_of_teachers is None:
            are_all_updates = isinstance(teachers, Updates) and teachers.num_clients == len(self.clients)
            clients_of_teachers = self.clients if are_all_updates else ()
        return self.distiller(student, teachers, average_from, self.previous, clients_of_teachers)


class Algorithm(Options):
    """Base class of federated algorithms. It is FedAvg: a subclass overrides only what differs.

    The constructor raises a ValueError for an invalid option, such as a negative strength.

    Attributes:
        inference: Which state a client predicts with: its ``personal`` one, or the ``global`` one.
        roles: Names of the states that a client trains: ``personal`` starts from its own, ``local`` from the received.
        sends_updates: Whether clients send anything.
        global_model: Whether the server has a complete model, which can be evaluated.
        uses_distillation: Whether the server distils, which requires public images.
        builds_teachers: Whether the server builds the teachers itself, instead of distilling from the clients' models.
        unsent: Names of streams of batches on which nothing that a client ever sends depends. By default there are
            none, so that privacy accounting treats all training as visible to the server.
        modes: Number of global models among which a round's clients are divided.
        compares_models: Whether clients compare the models on their own training images before each round.
        needs_class_counts: Whether a step requires the clients' numbers of images of each class.
        merges_into_backbone: Whether the server merges the clients' updates into the weights that LoRA adapts, which
            are then part of all states.
        average: Which outputs of several global models are averaged to predict: ``logits`` or ``probabilities``.
        instead_of_factors: What clients send under the names of LoRA's factors, if a server rule must not combine it as
            factors; empty for factors.
        needs_plain_mean: Why no server rule may take the place of the mean of the updates, and what to choose instead:
            the end of a sentence that begins with "it". Empty if rules are allowed.
        personal_pull: Strength λ, if clients minimise loss(v) + λ/2 ||v − w||² of their personal state v and the
            received state w; None if they minimise something else. Diagnostics measure the gradient of this objective.
        mean_is_enough: Whether :meth:`server_step` reads nothing of the updates but
            ``server.mean(server.updates, server.weights)``, as the default does, and its teachers where it distils. A
            simulation then adds the updates up while clients train, and does not keep them. A class that overrides
            ``server_step`` has to state it; otherwise all updates are kept.
    """

    inference: Inference = "global"
    roles: tuple[str, ...] = ("local",)
    sends_updates: bool = True
    global_model: bool = True
    uses_distillation: bool = False
    builds_teachers: bool = False
    unsent: frozenset[str] = frozenset()
    modes: int = 1
    compares_models: bool = False
    needs_class_counts: bool = False
    merges_into_backbone: bool = False
    average: Average = "logits"
    instead_of_factors: str = ""
    needs_plain_mean: str = ""
    personal_pull: float | None = None
    mean_is_enough: bool = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The value holds for the server step of the class that states it. Any other one may read single updates,
        # whether this class defines it or inherits it from a mixin, which need not be an algorithm.
        stated_by = next(base for base in cls.__mro__ if "mean_is_enough" in vars(base))
        if cls.server_step is not getattr(stated_by, "server_step", cls.server_step):
            cls.mean_is_enough = False

    @property
    def kind(self) -> str:
        """Name that is saved with states: training can be resumed only with an algorithm of the same kind."""
        return type(self).__name__

    @property
    def is_ensemble(self) -> bool:
        """Whether several global models predict together."""
        return type(self).members is not Algorithm.members

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the algorithm does not support the trained tensors or the number of clients.

        Called at set-up. The message should give the reason and a remedy.

        Args:
            tensor_names: Names of the model's tensors.
            num_clients: Number M of all clients.
        """

    def lora_rank(self, number: int, name: str, size: int | None, most: int) -> int | None:
        """Return a client's LoRA rank, or None if clients have the adapter's rank.

        Args:
            number: Id of the client.
            name: Name of the client.
            size: Number of its training images; None if it must stay unknown.
            most: Rank of the adapter, which no client may exceed.

        Raises:
            ValueError: If the rank cannot be determined.
        """
        return None

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Return the phases of a round of local training. All clients finish a phase before the next one begins.

        Args:
            epochs: The option ``local_epochs``; None if it is not set.
            steps: The option ``local_steps``; None if it is not set.
        """
        return (Phase("train", epochs, steps),)

    def initial(self, make: Callable[[int], State]) -> State:
        """Return the first global state.

        Args:
            make: Function of k that returns the k-th random initialisation; number 0 is that of the model itself.
        """
        return make(0)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Return the states that a client keeps before the first round, by role and without a client axis."""
        if self.inference == "personal":
            return {"personal": initial}
        return {}

    def broadcast(self, sending: Broadcast) -> State:
        """Return the states (C, ...) that the server sends to the clients of a round."""
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
        """Return the names of the parameters that a phase trains in a role; names that the role lacks are ignored."""
        return tensor_names.parameters

    def client_step(self, step: ClientStep) -> None:
        """Take one local step for every client, changing ``step.states`` in place."""
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

        The default is the mean of the updates, which is then distilled if the algorithm ``uses_distillation``.
        """
        if not self.sends_updates:
            return {}
        average = server.mean(server.updates, server.weights)
        if self.uses_distillation:
            return server.distill(server.previous | average, server.updates)
        return average

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the states (K, ...) of the global models whose outputs are averaged to predict; by default one."""
        return expand(global_state, 1)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Return the states (C, ...) that clients predict with, if ``inference`` is ``"personal"``."""
        return client_state["personal"]

    def personalization(self) -> "tuple[Algorithm, Phase] | None":
        """Return the algorithm and the phase of the clients' fine-tuning after the last round.

        It starts from the final global state. By default there is none, and None is returned.
        """
        return None

    def joining(self, phases: tuple[Phase, ...]) -> "tuple[Algorithm, tuple[Phase, ...]] | None":
        """Return the algorithm with which a client joins a finished run, and the phases of its rounds.

        Nothing that the client sends is used. By default None is returned: a client then trains as after the last round
        (:meth:`personalization`), if that is defined; else it fine-tunes the global model, if clients predict with it;
        else it trains like the clients of the run.

        Args:
            phases: Phases of the run's rounds.
        """
        return None

    def beyond_client_privacy(self) -> str:
        """Return what client-level privacy does not cover, with a remedy; empty if it covers all that clients send.

        It clips and protects what the mean of updates contains, and nothing else.
        """
        return ""


def moved_towards(previous: State, target: State, share: float) -> State:
    """Return previous + share · (target − previous) for each tensor of ``target``; integers are taken from it as is.

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
    """Base class of algorithms whose clients behave like those of another one, the base.

    Methods of the client's side that a subclass does not override are forwarded to the base. The server's side is not.

    Attributes:
        base: The other algorithm.
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
    """Base class of algorithms that change part of the behaviour of another one, the base.

    Methods that a subclass does not override are forwarded to the base, except for :meth:`joining`. Attributes of
    :class:`Algorithm` that a subclass does not set are copied from the base when the wrapper is created.

    Attributes:
        base: The other algorithm.

    Raises:
        ValueError: If ``base`` is not an algorithm.
    """

    # The inherited server step only calls that of the base, whose value is read when the wrapper is created.
    mean_is_enough = True
    # The objective of the base may be that of other tensors than the wrapper's.
    personal_pull = None

    def __init__(self, base: Algorithm) -> None:
        if not isinstance(base, Algorithm):
            raise OptionError(
                f"base={base!r} is not an algorithm; pass an Algorithm object, such as PerAda()",
                name="base",
                value=base,
            )
        super().__init__(base)
        for name in Algorithm.__annotations__:
            if not self._sets_attribute(name):
                setattr(self, name, getattr(base, name))
        # False for a subclass that overrides the server step without stating otherwise.
        self.mean_is_enough = type(self).mean_is_enough and base.mean_is_enough

    @classmethod
    def _sets_attribute(cls, name: str) -> bool:
        """Return whether the wrapper's class sets an attribute itself, or one of its classes up to this one does."""
        wrapper_classes = cls.__mro__[: cls.__mro__.index(AlgorithmWrapper) + 1]
        return any(name in vars(wrapper_class) for wrapper_class in wrapper_classes)

    @property
    def kind(self) -> str:
        """Name of the class and the kind of the base."""
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

    def beyond_client_privacy(self) -> str:
        """Return what of the base client-level privacy does not cover."""
        return self.base.beyond_client_privacy()


def check_outermost(wrapper: AlgorithmWrapper) -> None:
    """Raise a ValueError if the base of a wrapper assigns LoRA ranks to clients.

    Everything that a client receives, keeps and sends is cut to its rank, so HetLoRA must be the outermost wrapper.
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
