# SPDX-License-Identifier: Apache-2.0
"""Dry runs without images that check an algorithm and a server rule at set-up, before anything is trained.

:class:`DryRun` runs rounds on made-up gradients, counts the gradients that a local step computes, and takes server
steps on made-up updates. It answers three questions:

- :func:`dry_run_rounds`: do all methods return states of the right form? This is for classes from outside perada, since
  perada's are covered by its tests.
- :func:`server_follows_from_mean`: does the server need more than the mean of the updates?
- :mod:`perada.privacy.dry_run_checks`: what must privacy accounting count?
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.core.checks import Options, check_choice
from perada.core.rounds import Phase
from perada.core.seeding import generator
from perada.core.states import State, clone, device_of, expand, numel, stack_size
from perada.core.text import dtype_name, quoted, value_text
from perada.server import Aggregation, Mean, ServerRule, Updates, client_weights
from perada.tasks import DEFAULT_TASK, Classification, Task

T = TypeVar("T")

MAX_NUMBERS = 10**8
"""Largest number of elements in the clients' states of a dry run, which limits its memory."""
SERVER_ROUNDS = 3
"""Number of rounds in which server steps on updates and on their mean are compared."""
SERVER_CLIENTS = 4
"""Number of clients in these rounds."""
LEARNING_RATE = 0.1
"""Learning rate of the local steps."""


def is_foreign(options: Options) -> bool:
    """Return whether the class of an algorithm or a rule, or of one that it contains, is from outside perada."""
    if not type(options).__module__.startswith("perada."):
        return True
    return any(is_foreign(part) for part in vars(options).values() if isinstance(part, Options))


@dataclass(frozen=True)
class DryRunRound:
    """The result of a round of a dry run.

    Attributes:
        sent: Updates (C, ...) of the clients.
        client_state: States (C, ...) that they keep, by role.
        global_state: The global state after the round.
    """

    sent: State
    client_state: Stacks
    global_state: State


@dataclass(frozen=True)
class DryRun:
    """A dry run of an algorithm and a server rule, without images.

    Attributes:
        algorithm, rule: The algorithm and the server rule to try. They are not copied.
        tensor_names: Names of the state's tensors.
        initial: The initial state.
        phases: Phases of local training.
        num_clients: Number of all clients of the federation.
        clients: Ids of the clients of every round.
        num_classes: Number of classes; None to reject algorithms that read logits or labels.
        task: What the clients learn.
        changed: Name of a stream of batches that gets different made-up gradients than by default. What then differs
            between two dry runs depends on this stream. Empty for none.
    """

    algorithm: Algorithm
    rule: ServerRule
    tensor_names: TensorNames
    initial: State
    phases: Sequence[Phase]
    num_clients: int
    clients: tuple[int, ...]
    num_classes: int | None = None
    task: Task = field(default_factory=Classification)
    changed: str = ""

    def rounds(self, numbers: Iterable[int]) -> Iterator[DryRunRound]:
        """Run rounds on made-up gradients, with a distillation that changes nothing.

        Args:
            numbers: Numbers of the rounds.

        Yields:
            The result of each round.
        """
        algorithm = self.algorithm
        global_state = self.initial
        server_state: dict[str, State] = {}
        first_state = self.call("initial_client_state", algorithm.initial_client_state, self.initial, self.tensor_names)
        client_state = _stacked(first_state, len(self.clients))
        for round in numbers:
            sending = self._sending(round, global_state, server_state)
            received = self.call("broadcast", algorithm.broadcast, sending)
            client_state, update = self._train_clients(round, client_state, received)
            if update:
                server = self._server_step(
                    round,
                    global_state,
                    # A copy, since a server step may change the updates in place.
                    updates=Updates(clone(update)),
                    state=server_state,
                    distiller=_keep_student,
                    predict=partial(_predicted, self.num_classes or 2),
                )
                new_state = self.call("server_step", algorithm.server_step, server)
                global_state = global_state | new_state
                server_state = server.state
            yield DryRunRound(update, client_state, global_state)

    def _train_clients(self, round: int, client_state: Stacks, received: State) -> tuple[Stacks, State]:
        """Take two local steps of each phase.

        Returns:
            What clients keep and what they send, as :meth:`.Algorithm.end_round` returns them.
        """
        algorithm = self.algorithm
        opened = self.call("begin_round", algorithm.begin_round, client_state, received, self.tensor_names)
        step = self._step(opened, client_state, received, round)
        for phase in self.phases:
            self.call("trainable_keys", step.begin, phase.name, self.tensor_names)
            # Two steps, since the second one starts from the state that the first one left.
            self.call("client_step", algorithm.client_step, step)
            self.call("client_step", algorithm.client_step, step)
        kept_and_sent: tuple[Stacks, State] = self.call(
            "end_round", algorithm.end_round, step.finished(), client_state, received, self.tensor_names
        )
        return kept_and_sent

    def queries(self) -> tuple[dict[str, int], ...]:
        """Count the gradients that one local step of the first round computes.

        Returns:
            For each phase, the number of gradients by stream of batches.
        """
        algorithm = self.algorithm
        tensor_names = self.tensor_names
        first_state = algorithm.initial_client_state(self.initial, tensor_names)
        client_state = _stacked(first_state, len(self.clients))
        received = algorithm.broadcast(self._sending(0, self.initial, {}))
        counts = []
        for phase in self.phases:
            opened = algorithm.begin_round(client_state, received, tensor_names)
            step = self._step(opened, client_state, received, round=0)
            step.begin(phase.name, tensor_names)
            algorithm.client_step(step)
            counts.append(dict(step.queries))
        return tuple(counts)

    def server_states_after(self, updates_of_rounds: Iterable[State]) -> dict[str, State]:
        """Take a server step for each round, with copies of the algorithm and the rule.

        Args:
            updates_of_rounds: Updates (C, ...) of each round.

        Returns:
            The server's states by name, and the global state under ``""``.
        """
        dry_run = replace(self, algorithm=copy.deepcopy(self.algorithm), rule=copy.deepcopy(self.rule))
        server_state: dict[str, State] = {}
        # In double precision, so that differences between two dry runs are not due to rounding.
        global_state: State = {}
        for name, value in self.initial.items():
            if value.is_floating_point():
                value = value.double()
            global_state[name] = value
        for round, updates in enumerate(updates_of_rounds):
            server = dry_run._server_step(
                round, clone(global_state), Updates(updates), server_state, distiller=_add_mean_of_teachers
            )
            with warnings.catch_warnings():
                # A rule may warn that there are few clients.
                warnings.simplefilter("ignore")
                global_state |= dry_run.algorithm.server_step(server)
            server_state = server.state
        return {"": global_state} | server_state

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  # any method's result
        """Call a method of the algorithm. A subclass overrides this to check the result.

        Args:
            method: Name of the method.
            function: The bound method.
            arguments: Its arguments.
        """
        return function(*arguments)

    def _sending(self, round: int, global_state: State, server_state: dict[str, State]) -> Broadcast:
        """Return the argument of the algorithm's broadcast."""
        return Broadcast(
            global_state, self.tensor_names, round, self.clients, self.num_clients, seed=0, state=server_state
        )

    def _step(self, opened: Stacks, client_state: Stacks, received: State, round: int) -> "DryRunStep":
        """Return the object that stands for the local steps of a round.

        Args:
            opened: States (C, ...) that the round begins with, by role.
            client_state: States (C, ...) that the clients kept, by role.
            received: States (C, ...) that the server sent.
            round: Number of the round.
        """
        # The width of the representations is that of the head's input, if the head is trained.
        width: int | None = None
        head_weight = self.initial.get(f"{self.tensor_names.head_module}.weight")
        if head_weight is not None:
            width = head_weight.shape[1]
        return DryRunStep(
            self.algorithm,
            opened,
            client_state,
            received,
            round=round,
            changed=self.changed,
            num_classes=self.num_classes,
            width=width,
            task=self.task,
        )

    def _server_step(
        self,
        round: int,
        previous: State,
        updates: Updates,
        state: dict[str, State],
        distiller: Callable[..., State],
        predict: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
    ) -> ServerStep:
        """Return the argument of the algorithm's server step, with equal weights for all clients."""
        return ServerStep(
            round=round,
            clients=self.clients,
            num_clients=self.num_clients,
            tensor_names=self.tensor_names,
            seed=0,
            previous=previous,
            updates=updates,
            weights=client_weights("uniform", self.clients),
            state=state,
            rule=self.rule,
            distiller=distiller,
            predict=predict,
        )


def _stacked(states: Stacks, clients: int) -> Stacks:
    """Return each role's state as a stack (C, ...) with one equal row per client."""
    stacks = {}
    for role, state in states.items():
        stacks[role] = expand(state, clients)
    return stacks


def _first_rows(stacks: Stacks) -> Stacks:
    """Return the states of the first client by role, without the client axis."""
    states: Stacks = {}
    for role, stack in stacks.items():
        states[role] = {name: value[0] for name, value in stack.items()}
    return states


def server_follows_from_mean(
    algorithm: Algorithm,
    rule: ServerRule,
    tensor_names: TensorNames,
    initial: State,
    sent: State,
) -> bool:
    """Return whether the server needs no more than the mean of the updates.

    Server steps are taken on made-up updates and on stacks in which every row is their mean; the results must be equal.
    Errors of the algorithm and of the rule are not caught.

    Args:
        algorithm: The algorithm.
        rule: The server rule.
        tensor_names: Names of the state's tensors.
        initial: The initial state.
        sent: Update (1, ...) of a client, for the names and shapes.
    """
    dry_run = DryRun(
        algorithm,
        rule,
        tensor_names,
        initial,
        phases=(),
        num_clients=SERVER_CLIENTS + 1,
        clients=tuple(range(SERVER_CLIENTS)),
    )
    random = torch.Generator().manual_seed(0)
    updates_of_rounds: list[State] = []
    means_of_rounds: list[State] = []
    for _ in range(SERVER_ROUNDS):
        updates: State = {}
        means: State = {}
        for name, value in sent.items():
            if value.is_floating_point():
                noise = torch.randn(SERVER_CLIENTS, *value.shape[1:], generator=random, dtype=torch.float64)
                updates[name] = 1.0 + 0.5 * noise
                # Every client's row is the mean.
                means[name] = updates[name].mean(0).expand_as(updates[name]).clone()
        updates_of_rounds.append(updates)
        means_of_rounds.append(means)
    states = dry_run.server_states_after(updates_of_rounds)
    states_of_means = dry_run.server_states_after(means_of_rounds)
    return _are_close(states, states_of_means)


def _are_close(states: dict[str, State], other_states: dict[str, State]) -> bool:
    """Return whether two collections of states have the same names, and tensors that are equal up to rounding."""
    if states.keys() != other_states.keys():
        return False
    for name, state in states.items():
        if state.keys() != other_states[name].keys():
            return False
        for key, value in state.items():
            if not torch.allclose(value, other_states[name][key], 1e-9, 1e-9):
                return False
    return True


def _add_mean_of_teachers(
    student: State,
    teachers: Updates | State,
    average_from: float | None = None,
    previous: State | None = None,
) -> State:
    """Add the mean of the teachers to the student, in place of a distiller, which also uses only their mean."""
    if isinstance(teachers, Updates):
        teachers = teachers.gathered_all()
    distilled = dict(student)
    for name, value in student.items():
        if name in teachers:
            distilled[name] = value + teachers[name].mean(0)
    return distilled


def _keep_student(student: State, *_: object, **__: object) -> State:
    """Return the student unchanged, in place of a distiller."""
    return student


def _predicted(
    num_classes: int,
    previous: State,
    models: Updates | State,
    images: int,
    labelled: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return made-up predictions (C, 1, K) on one image, and its labels (1, K); None without labels."""
    if isinstance(models, Updates):
        models = models.local_rows
    clients = stack_size(models)
    predictions = torch.full((clients, 1, num_classes), 0.5)
    if not labelled:
        return predictions, None
    return predictions, torch.ones(1, num_classes)


@dataclass(frozen=True)
class _FirstRound:
    """The only client of a federation, at the beginning of the first round.

    Attributes:
        client_state: States (1, ...) that it has kept, by role.
        received: States (1, ...) that the server has sent.
        opened: States (1, ...) with which it begins to train, by role.
    """

    client_state: Stacks
    received: State
    opened: Stacks


def _begin_first_round(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> _FirstRound:
    """Begin the first round of a federation of one client."""
    client_state = _stacked(algorithm.initial_client_state(initial, tensor_names), 1)
    losses: Tensor | None = None
    if algorithm.compares_models:
        losses = torch.zeros(1, algorithm.modes)
    sending = Broadcast(initial, tensor_names, round=0, clients=(0,), num_clients=1, seed=0, losses=losses)
    received = algorithm.broadcast(sending)
    opened = algorithm.begin_round(client_state, received, tensor_names)
    return _FirstRound(client_state, received, opened)


def example_sent(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> State:
    """Return the update (1, ...) that a client without any training sends in the first round."""
    first = _begin_first_round(algorithm, tensor_names, initial)
    _, sent = algorithm.end_round(first.opened, first.client_state, first.received, tensor_names)
    return sent


def example_opened(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> Stacks:
    """Return the states with which a client begins the first round, (1, ...) by role."""
    return _begin_first_round(algorithm, tensor_names, initial).opened


def dry_run_rounds(
    algorithm: Algorithm,
    rule: ServerRule,
    tensor_names: TensorNames,
    initial: State,
    phases: Sequence[Phase],
    *,
    num_clients: int,
    clients: int,
    num_classes: int,
    task: Task = DEFAULT_TASK,
) -> None:
    """Run two rounds on made-up gradients, and check all returned states.

    Args:
        algorithm: The algorithm, which is copied.
        rule: The server rule, which is copied.
        tensor_names: Names of the state's tensors.
        initial: The initial state.
        phases: Phases of local training.
        num_clients: Number of all clients of the federation.
        clients: Number of clients per round. Fewer are tried if their states are large; if the rule does not accept so
            few, the mean is used instead.
        num_classes: Number of classes.
        task: What the clients learn.

    Raises:
        ValueError: If a method fails, or if its result has the wrong form; the message names the method.
    """
    name = type(algorithm).__name__
    algorithm = copy.deepcopy(algorithm)
    rule = copy.deepcopy(rule)
    check_choice(f"{name}.inference", algorithm.inference, ["personal", "global"])
    for phase in phases:
        if not isinstance(phase, Phase):
            raise _MisfitError(f"{name}.phases returned {phase!r}; return perada.data.Phase(name, epochs, steps)")
    affordable_clients = MAX_NUMBERS // numel(initial)
    num_tried = min(max(2, min(clients, affordable_clients)), num_clients)
    try:
        rule.check(num_tried)
    except ValueError:
        rule = Mean()
    dry_run = _CheckedDryRun(
        algorithm,
        _CheckedRule(rule),
        tensor_names,
        initial,
        phases,
        num_clients,
        clients=tuple(range(num_tried)),
        num_classes=num_classes,
        task=task,
    )
    for result in dry_run.rounds(range(2)):
        last = result
    if algorithm.inference == "personal":
        dry_run.call("personal", algorithm.personal, last.client_state, last.global_state)


@dataclass(frozen=True)
class _CheckedDryRun(DryRun):
    """A dry run that checks the results of all methods of the algorithm."""

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  # any method's result
        """Call a method of the algorithm; raise a ValueError if it fails or its result has the wrong form."""
        who = f"{type(self.algorithm).__name__}.{method}"
        former_client_state: Stacks = {}
        if method == "end_round":
            # Read before the call, which might change its arguments in place. The second one is the client state.
            former_client_state = _first_rows(arguments[1])
        result = _call_foreign(who, function, *arguments)
        if method == "initial_client_state":
            _check_stacks(who, result, result)
        elif method == "broadcast":
            self._check_received(who, result)
        elif method == "end_round":
            self._check_round_end(who, result, former_client_state)
        elif method == "server_step":
            _check_state(who, result, self.initial, partial=True)
            server_state = arguments[0].state
            _check_stacks(f"{who} (server.state)", server_state, server_state)
        elif method == "personal":
            _check_state(who, result, self.initial, len(self.clients))
        return result

    def _check_received(self, who: str, received: State) -> None:
        """Raise unless the server sends stacks (C, ...). There may be other names than the model's, for client_step."""
        # First that these are tensors, since their shapes are read below.
        _check_state(who, received, received)
        expected = dict(self.initial)
        for name, value in received.items():
            if name not in self.initial:
                expected[name] = value.new_empty(value.shape[1:])
        _check_state(who, received, expected, len(self.clients), partial=True)

    def _check_round_end(self, who: str, result: object, former_client_state: Stacks) -> None:
        """Raise unless the result of end_round is a pair of stacks (C, ...): those to keep and those to send.

        Args:
            who: Name of the method, for the message.
            result: Its result.
            former_client_state: The states of one client before the round, by role and without a client axis. Those
                after it must have the same roles, names and shapes.
        """
        if not isinstance(result, tuple) or len(result) != 2:
            raise _MisfitError(
                f"{who} returned {value_text(result)}; return a pair of what clients keep and what they send"
            )
        client_state, update = result
        _check_stacks(f"{who} (client states)", client_state, former_client_state, len(self.clients))
        # Clients may send other tensors than the model's, which the algorithm's server_step reads.
        expected = dict(self.initial)
        for name, value in update.items():
            if name not in self.initial:
                expected[name] = value[0]
        _check_state(f"{who} (updates)", update, expected, len(self.clients), partial=True)


class _CheckedRule(ServerRule):
    """A server rule that checks the results of another one."""

    def __init__(self, rule: ServerRule) -> None:
        self.rule = rule

    def __call__(self, aggregation: Aggregation) -> State:
        name = type(self.rule).__name__
        result: State = _call_foreign(name, self.rule, aggregation)
        expected: State = {}
        for key, value in aggregation.updates.gathered_all().items():
            expected[key] = aggregation.previous.get(key, value[0])
        _check_state(name, result, expected)
        _check_stacks(f"{name} (aggregation.state)", aggregation.state, aggregation.state)
        return result


class _MisfitError(ValueError):
    """Raised if the result of an algorithm's or a rule's method is invalid."""


def _call_foreign(who: str, function: Callable[..., T], *arguments: object) -> T:
    """Call a function of a class that may be from outside perada; an error is raised again with the name ``who``."""
    try:
        return function(*arguments)
    except _MisfitError:
        raise
    except Exception as error:  # a user's class may raise errors of any kind
        reason = " ".join(str(error).split())[:200]
        raise _MisfitError(f"{who} fails in the dry run at set-up ({type(error).__name__}: {reason})") from error


def _check_stacks(who: str, stacks: object, expected: Mapping[str, State], clients: int | None = None) -> None:
    """Raise unless states have the expected roles and form.

    Args:
        who: Name of the method, for the message.
        stacks: States by role, as returned by the method.
        expected: The expected roles and, if ``clients`` is set, the expected states without a client axis.
        clients: Number C of clients in the stacks; None if only the roles are known.
    """
    if not isinstance(stacks, Mapping) or set(stacks) != set(expected):
        actual = sorted(map(str, stacks)) if isinstance(stacks, Mapping) else type(stacks).__name__
        raise _MisfitError(f"{who} returned {actual} instead of states for the roles {quoted(sorted(expected))}")
    for role, state in stacks.items():
        # If only the roles are known, any names and shapes are accepted.
        expected_state = state if clients is None else expected[role]
        _check_state(f"{who} for role {role!r}", state, expected_state, clients)


def _check_state(who: str, state: object, expected: State, clients: int | None = None, partial: bool = False) -> None:
    """Raise unless a state has the expected names, shapes and dtypes.

    Args:
        who: Name of the method, for the message.
        state: The state, as returned by the method.
        expected: A state with the expected names, shapes and dtypes, without a client axis.
        clients: Number C of clients in the state; None if it has no client axis.
        partial: Whether names may be missing.
    """
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise _MisfitError(f"{who} returned {value_text(state)}; return tensors by name, {{name: tensor}}")
    for name, value in state.items():
        if name not in expected:
            message = f"{who} returned {name!r}, which is not the name of a trained tensor"
            if who.endswith("server_step"):
                message += (
                    "; store other values that clients send in server.state (server.updates.part leaves names out of "
                    "the mean)"
                )
            raise _MisfitError(message)
        shape = tuple(expected[name].shape)
        if clients is not None:
            shape = (clients, *shape)
        dtype = expected[name].dtype
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise _MisfitError(
                f"{who} returned {name!r} with shape {tuple(value.shape)} and {dtype_name(value.dtype)} "
                f"instead of {shape} and {dtype_name(dtype)}"
            )
    missing = sorted(expected.keys() - state.keys())
    if missing and not partial:
        message = f"{who} lacks {missing[0]!r}"
        if len(missing) > 1:
            message += f" and {len(missing) - 1} more names"
        raise _MisfitError(message)


class DryRunStep:
    """Local steps without images, on made-up gradients (a :class:`perada.algorithms.base.ClientStep`).

    Args:
        algorithm: The algorithm, which determines the trained parameters.
        opened: States (C, ...) that the round begins with, by role.
        client_state: States (C, ...) that the clients kept, by role.
        received: States (C, ...) that the server sent.
        round: Number of the round.
        changed: As in :class:`DryRun`.
        num_classes: Number of classes; None to raise if logits or labels are read.
        width: Width of the representations; None for the number of classes.
        task: What the clients learn.

    Attributes:
        queries: Number of gradients that were computed, by stream.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        opened: Stacks,
        client_state: Stacks,
        received: State,
        *,
        round: int = 0,
        changed: str = "",
        num_classes: int | None = None,
        width: int | None = None,
        task: Task = DEFAULT_TASK,
    ) -> None:
        self.algorithm = algorithm
        self.client_state = client_state
        self.received = received
        self.round = round
        self.phase = ""
        self.tensor_names = TensorNames((), ())
        self.states: Stacks = {role: clone(state) for role, state in opened.items()}
        self.queries: Counter[str] = Counter()
        self._changed = changed
        self._num_classes = num_classes
        self._width = width
        self._task = task

    @property
    def _clients(self) -> int:
        """Number C of clients."""
        return stack_size(self.received)

    def begin(self, phase: str, tensor_names: TensorNames) -> None:
        """Begin a phase, after which the tensors that it trains require gradients."""
        self.phase = phase
        self.tensor_names = tensor_names
        self.states = self.finished()
        for role, state in self.states.items():
            for key in self.algorithm.trainable_keys(role, phase, tensor_names, self.round):
                if key in state:
                    state[key].requires_grad_()

    def finished(self) -> Stacks:
        """Return the current states, without gradients."""
        states: Stacks = {}
        for role, state in self.states.items():
            states[role] = {key: value.detach() for key, value in state.items()}
        return states

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Return made-up logits (C, 2, K) of two images."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        # All logits of a client are its made-up loss, so that they have a gradient.
        losses = self.loss(states, stream)
        return losses.view(-1, 1, 1).expand(-1, 2, self._num_classes)

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Return made-up logits (C, 2, K) and representations (C, 2, F) of two images."""
        logits = self.logits(states, stream)
        width = self._width or logits.shape[-1]
        # Not zero, since an algorithm may divide by their length.
        representations = 1 + logits[..., :1].expand(-1, -1, width)
        return logits, representations

    def class_counts(self, classes: int) -> Tensor:
        """Return counts of one image of each class."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        return torch.ones(self._clients, classes)

    @property
    def labels(self) -> Tensor:
        """Labels of the two images: both of class 0, or without a label."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        device = device_of(self.received)
        return self._task.blank_targets((self._clients, 2), self._num_classes, device)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the two images."""
        return values.mean(1)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Return a loss (C,) of 0 with a made-up gradient that depends on the states; for logits, return their mean."""
        if isinstance(states, Tensor):
            return states.flatten(1).mean(1)
        if isinstance(states, str):
            stream = stream or states
            states = self.states[states]
        stream = stream or next(iter(self.states))
        self.queries[stream] += 1
        purpose = f"rehearsal/{stream}"
        if stream == self._changed:
            purpose += "/changed"
        random = generator(0, purpose, self.round, self.queries[stream])
        device = device_of(states)
        total = torch.zeros(self._clients, device=device)
        for _, value in sorted(states.items()):
            if value.requires_grad:
                slope = (torch.rand(value.shape, generator=random) - 0.5).to(value)
                # The square makes the gradient depend on the state at which it is computed, like real ones.
                terms = slope * value + value**2 / 2
                total = total + terms.flatten(1).sum(1)
        # The value is zero, but the gradient is that of the total.
        return total - total.detach()

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start`` (C, ...)."""
        with torch.no_grad():
            for key, value in self.states[role].items():
                if value.requires_grad:
                    value.copy_(start[key])

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """Take a step of gradient descent; see :meth:`.ClientStep.descend`."""
        roles = (role,) if isinstance(role, str) else role
        leaves: list[tuple[str, Tensor]] = []
        for name in roles:
            for key, value in self.states[name].items():
                if value.requires_grad:
                    leaves.append((key, value))
        for _, leaf in leaves:
            leaf.grad = None
        if loss is not None:
            self._check_loss(role, loss)
            loss.sum().backward()
        with torch.no_grad():
            for key, leaf in leaves:
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                if pull is not None:
                    strength, anchor = pull
                    gradient = gradient + strength * (leaf - anchor[key])
                if slope is not None:
                    gradient = gradient + slope[key]
                leaf.grad = gradient
                leaf -= LEARNING_RATE * gradient

    def _check_loss(self, role: str | tuple[str, ...], loss: Tensor) -> None:
        """Raise a ValueError unless a loss has one value per client, and depends on what the phase trains."""
        if loss.shape != (self._clients,):
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)} instead of ({self._clients},), one value per client"
            )
        if not loss.requires_grad:
            raise ValueError(
                f"the loss of step.descend({role!r}) does not depend on any parameter that phase {self.phase!r} "
                f"trains ({type(self.algorithm).__name__}.trainable_keys); choose an adapter that trains one, or "
                "skip the step"
            )


def no_logits(algorithm: Algorithm) -> ValueError:
    """Return the error for an algorithm that reads outputs or labels in private training."""
    return ValueError(
        f"privacy does not support {algorithm.kind}: its local step reads the model's outputs on private images "
        "(step.logits, step.outputs), or their labels (step.labels, step.class_counts), which no noise covers; choose "
        "a different algorithm, or client_privacy; in a custom algorithm use step.loss, whose gradient is private"
    )


def no_counts(algorithm: Algorithm) -> ValueError:
    """Return the error for an algorithm that requires class counts that are not available."""
    return ValueError(
        f"algorithm {algorithm.kind} requires each client's number of images per class, but images have several "
        "labels or numbers, or labels are unknown until they are read; choose a different algorithm"
    )
