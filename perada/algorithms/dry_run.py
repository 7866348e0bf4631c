# SPDX-License-Identifier: Apache-2.0
"""Dry runs without images that check an algorithm and a server rule at set-up, before anything is trained.

:class:`DryRun` goes through rounds on made-up gradients, counts the gradients that a local step asks for, or takes
server steps on made-up updates. What is asked of it:

- :func:`dry_run_rounds`: do states fit? Only of classes that are not perada's; perada's own are covered by its tests.
- :func:`server_follows_from_mean`: does the server need more than the mean of the updates?
- :mod:`perada.privacy.dry_run_checks`: what do ledgers have to count?
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.core.checks import Options, check_choice
from perada.core.rounds import Phase
from perada.core.seeding import generator
from perada.core.states import State, clone, expand, numel, stack_size
from perada.server import Aggregation, Mean, ServerRule, Updates, client_weights

T = TypeVar("T")

MAX_NUMBERS = 10**8
"""Largest number of numbers in the clients' states of a dry run."""
SERVER_ROUNDS = 3
"""Number of rounds in which server steps on updates and on their mean are compared."""
SERVER_CLIENTS = 4
"""Number of clients in these rounds."""


def is_foreign(options: Options) -> bool:
    """Return whether an algorithm or a rule, or one that it contains, is of a class from outside perada."""
    if not type(options).__module__.startswith("perada."):
        return True
    return any(is_foreign(part) for part in vars(options).values() if isinstance(part, Options))


@dataclass(frozen=True)
class DryRunRound:
    """The result of a round of a dry run.

    Attributes:
        sent: Updates (C, ...) of the clients.
        client_state: States (C, ...) that they keep, by role.
        global_state: The global state after it.
    """

    sent: State
    client_state: Stacks
    global_state: State


@dataclass(frozen=True)
class DryRun:
    """A dry run of an algorithm and a server rule, without images.

    Attributes:
        algorithm, rule: The algorithm and the server rule to try. They are not copied.
        tensor_names, initial: The initial state, and the names of its tensors.
        phases: Phases of local training.
        num_clients: Number of all clients of the federation.
        clients: Clients of every round.
        num_classes: Number of classes; None where an algorithm may not ask for logits or labels.
        multilabel: Whether images have several labels.
        changed: The stream of batches whose gradients differ from the usual ones.
    """

    algorithm: Algorithm
    rule: ServerRule
    tensor_names: TensorNames
    initial: State
    phases: Sequence[Phase]
    num_clients: int
    clients: tuple[int, ...]
    num_classes: int | None = None
    multilabel: bool = False
    changed: str = ""

    def rounds(self, numbers: Iterable[int]) -> Iterator[DryRunRound]:
        """Run the rounds with these numbers on made-up gradients, with a distillation that changes nothing."""
        algorithm = self.algorithm
        tensor_names = self.tensor_names
        global_state = self.initial
        server_state: dict[str, State] = {}
        first_state = self.call("initial_client_state", algorithm.initial_client_state, self.initial, tensor_names)
        client_state = _stacked(first_state, len(self.clients))
        for round in numbers:
            sending = Broadcast(
                global_state, tensor_names, round, self.clients, self.num_clients, seed=0, state=server_state
            )
            received = self.call("broadcast", algorithm.broadcast, sending)
            opened = self.call("begin_round", algorithm.begin_round, client_state, received, tensor_names)
            step = self._step(opened, client_state, received, round)
            for phase in self.phases:
                self.call("trainable_keys", step.begin, phase.name, tensor_names)
                # Twice, since a second step starts from what the first left.
                self.call("client_step", algorithm.client_step, step)
                self.call("client_step", algorithm.client_step, step)
            client_state, update = self.call(
                "end_round", algorithm.end_round, step.finished(), client_state, received, tensor_names
            )
            if update:
                server = self._server_step(
                    round,
                    global_state,
                    # Copies, since a step may change them.
                    updates=Updates(clone(update)),
                    state=server_state,
                    distiller=lambda student, *_, **__: student,
                    predict=partial(_predicted, self.num_classes or 2),
                )
                new_state = self.call("server_step", algorithm.server_step, server)
                global_state = global_state | new_state
                server_state = server.state
            yield DryRunRound(update, client_state, global_state)

    def queries(self) -> tuple[dict[str, int], ...]:
        """Count the gradients that one local step of the first round asks for, by phase and by stream of batches."""
        algorithm = self.algorithm
        tensor_names = self.tensor_names
        first_state = algorithm.initial_client_state(self.initial, tensor_names)
        client_state = _stacked(first_state, len(self.clients))
        sending = Broadcast(self.initial, tensor_names, 0, self.clients, self.num_clients, seed=0)
        received = algorithm.broadcast(sending)
        counts = []
        for phase in self.phases:
            opened = algorithm.begin_round(client_state, received, tensor_names)
            step = self._step(opened, client_state, received, round=0)
            step.begin(phase.name, tensor_names)
            algorithm.client_step(step)
            counts.append(dict(step.queries))
        return tuple(counts)

    def server_states_after(self, updates_of_rounds: Iterable[State]) -> dict[str, State]:
        """Return the server's states, and under "" the global one, after one step a round on given updates (C, ...).

        Copies of algorithm and rule are tried.
        """
        dry_run = replace(self, algorithm=copy.deepcopy(self.algorithm), rule=copy.deepcopy(self.rule))
        server_state: dict[str, State] = {}
        # In double precision, so that no difference is one of rounding.
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
                # A rule may warn of so few clients.
                warnings.simplefilter("ignore")
                global_state |= dry_run.algorithm.server_step(server)
            server_state = server.state
        return {"": global_state} | server_state

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  # any method's result
        """Call a method of the algorithm; overridden to check what it returns."""
        return function(*arguments)

    def _step(self, opened: Stacks, client_state: Stacks, received: State, round: int) -> "DryRunStep":
        """Return the local steps of a round."""
        head = self.initial.get(f"{self.tensor_names.head_module}.weight")
        return DryRunStep(
            self.algorithm,
            opened,
            client_state,
            received,
            round=round,
            changed=self.changed,
            num_classes=self.num_classes,
            width=None if head is None else head.shape[1],
            multilabel=self.multilabel,
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
        """Return the server's side of a round."""
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
    """Return the states of each role as a stack of equal ones, (C, ...)."""
    stacks = {}
    for role, state in states.items():
        stacks[role] = expand(state, clients)
    return stacks


def _first_rows(stacks: Stacks) -> Stacks:
    """Return the states of the first client, without the client axis."""
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
    """Return whether server steps give the same result for made-up updates as for their mean in every row.

    Whatever the algorithm or the rule raises is raised here too.

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
                # The mean in every client's row.
                means[name] = updates[name].mean(0).expand_as(updates[name]).clone()
        updates_of_rounds.append(updates)
        means_of_rounds.append(means)
    states = dry_run.server_states_after(updates_of_rounds)
    states_of_means = dry_run.server_states_after(means_of_rounds)
    return _are_close(states, states_of_means)


def _are_close(states: dict[str, State], other_states: dict[str, State]) -> bool:
    """Return whether states have the same names, and tensors that are equal up to rounding."""
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
    """Stand in for a distiller, which receives the mean of the clients' logits, and no other teachers."""
    if isinstance(teachers, Updates):
        teachers = teachers.gathered_all()
    distilled = dict(student)
    for name, value in student.items():
        if name in teachers:
            distilled[name] = value + teachers[name].mean(0)
    return distilled


def _predicted(
    num_classes: int,
    previous: State,
    models: Updates | State,
    images: int,
    labelled: bool,
) -> tuple[Tensor, Tensor | None]:
    """Make up predictions (C, 1, K) on one image, and its labels."""
    if isinstance(models, Updates):
        models = models.local_rows
    clients = stack_size(models)
    predictions = torch.full((clients, 1, num_classes), 0.5)
    if not labelled:
        return predictions, None
    return predictions, torch.ones(1, num_classes)


def example_sent(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> State:
    """Return what a client that trains nothing sends in the first round, (1, ...)."""
    first_state = algorithm.initial_client_state(initial, tensor_names)
    client_state = _stacked(first_state, 1)
    losses: Tensor | None = None
    if algorithm.compares_models:
        losses = torch.zeros(1, algorithm.modes)
    sending = Broadcast(initial, tensor_names, round=0, clients=(0,), num_clients=1, seed=0, losses=losses)
    received = algorithm.broadcast(sending)
    opened = algorithm.begin_round(client_state, received, tensor_names)
    client_results = algorithm.end_round(opened, client_state, received, tensor_names)
    return client_results[1]  # the first are the states that it keeps


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
    multilabel: bool = False,
) -> None:
    """Run two rounds of ``clients`` on made-up gradients, and check all returned states.

    Copies are tried, with fewer clients where those are large; where the rule refuses so few, the mean stands for it.

    Raises:
        ValueError: If something fails or does not fit, with the name of the method.
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
        multilabel=multilabel,
    )
    for result in dry_run.rounds(range(2)):
        last = result
    if algorithm.inference == "personal":
        dry_run.call("personal", algorithm.personal, last.client_state, last.global_state)


@dataclass(frozen=True)
class _CheckedDryRun(DryRun):
    """A dry run in which everything that the algorithm's methods return is checked."""

    def call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  # any method's result
        """Call a method of the algorithm, and raise if it fails or what it returns does not fit."""
        who = f"{type(self.algorithm).__name__}.{method}"
        former_client_state: Stacks = {}
        if method == "end_round":
            # Before the call, which might change what it is given.
            _, client_state, _, _ = arguments
            former_client_state = _first_rows(client_state)
        result = _call_foreign(who, function, *arguments)
        if method == "initial_client_state":
            _check_stacks(who, result, result)
        elif method == "broadcast":
            self._check_received(who, result)
        elif method == "end_round":
            self._check_round_end(who, result, former_client_state)
        elif method == "server_step":
            _check_state(who, result, self.initial, partial=True)
            (server,) = arguments
            _check_stacks(f"{who} (server.state)", server.state, server.state)
        elif method == "personal":
            _check_state(who, result, self.initial, len(self.clients))
        return result

    def _check_received(self, who: str, received: State) -> None:
        """Raise if this is no stack (C, ...) of states. It may have more names than the model, for client_step."""
        # Before their shapes are read.
        _check_state(who, received, received)
        expected = dict(self.initial)
        for name, value in received.items():
            if name not in self.initial:
                expected[name] = value.new_empty(value.shape[1:])
        _check_state(who, received, expected, len(self.clients), partial=True)

    def _check_round_end(self, who: str, result: object, former_client_state: Stacks) -> None:
        """Raise unless the result is what clients keep and what they send, as stacks (C, ...).

        They must keep tensors of the roles, names and shapes of ``former_client_state``, which has no client axis.
        """
        if not isinstance(result, tuple) or len(result) != 2:
            raise _MisfitError(
                f"{who} returned {type(result).__name__}; return a pair of what clients keep and what they send"
            )
        client_state, update = result
        _check_stacks(f"{who} (client states)", client_state, former_client_state, len(self.clients))
        # Clients may send more than the model, for the algorithm's own server_step.
        expected = dict(self.initial)
        for name, value in update.items():
            if name not in self.initial:
                expected[name] = value[0]
        _check_state(f"{who} (updates)", update, expected, len(self.clients), partial=True)


class _CheckedRule(ServerRule):
    """A rule whose results are checked."""

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
    """Call a method, and name it in the error if it raises."""
    try:
        return function(*arguments)
    except _MisfitError:
        raise
    except Exception as error:  # whatever a class of the caller's own does
        reason = " ".join(str(error).split())[:200]
        raise _MisfitError(f"{who} fails in the dry run at set-up ({type(error).__name__}: {reason})") from error


def _check_stacks(who: str, stacks: object, expected: Mapping[str, State], clients: int | None = None) -> None:
    """Raise unless ``stacks`` are the states of the ``expected`` roles, with a leading axis of ``clients`` if set."""
    if not isinstance(stacks, Mapping) or set(stacks) != set(expected):
        actual = sorted(map(str, stacks)) if isinstance(stacks, Mapping) else type(stacks).__name__
        raise _MisfitError(f"{who} returned {actual} instead of states for the roles {sorted(expected)}")
    for role, state in stacks.items():
        # Without clients, a state of any names and shapes will do.
        expected_state = state if clients is None else expected[role]
        _check_state(f"{who} for role {role!r}", state, expected_state, clients)


def _check_state(who: str, state: object, expected: State, clients: int | None = None, partial: bool = False) -> None:
    """Raise unless ``state`` has tensors in the shapes of ``expected``, with a leading axis of ``clients`` if set."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise _MisfitError(f"{who} returned {type(state).__name__}; return tensors by name, {{name: tensor}}")
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
                f"{who} returned {name!r} with shape {tuple(value.shape)} and {value.dtype} instead of {shape} and "
                f"{dtype}"
            )
    missing = sorted(expected.keys() - state.keys())
    if missing and not partial:
        message = f"{who} lacks {missing[0]!r}"
        if len(missing) > 1:
            message += f" and {len(missing) - 1} more names"
        raise _MisfitError(message)


class DryRunStep:
    """Local steps without images, on made-up gradients; satisfies :class:`perada.algorithms.base.ClientStep`.

    Args:
        algorithm: The algorithm, which chooses what is trained.
        opened: States (C, ...) that the round begins with, by role.
        client_state: States (C, ...) that the clients kept, by role.
        received: States (C, ...) that the server sent.
        round: Number of the round.
        changed: The stream of batches whose gradients differ from the usual ones.
        num_classes: Number of classes; None to reject that logits or labels are read.
        width: Width of the representations.
        multilabel: Whether images have several labels.

    Attributes:
        queries: Numbers of gradients that were asked for, by stream.
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
        multilabel: bool = False,
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
        self._multilabel = multilabel

    @property
    def _clients(self) -> int:
        return len(next(iter(self.received.values())))

    def begin(self, phase: str, tensor_names: TensorNames) -> None:
        """Begin a phase: from now on the tensors that it trains require gradients."""
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
        # The made-up loss of each client as all its logits, so that they have a gradient.
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
        device = next(iter(self.received.values())).device
        if self._multilabel:
            return torch.zeros(self._clients, 2, self._num_classes, dtype=torch.float32, device=device)
        return torch.zeros(self._clients, 2, dtype=torch.int64, device=device)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the two images."""
        return values.mean(1)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Return a loss of 0 with a made-up gradient, which depends on the states; of logits, return their mean."""
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
        device = next(iter(states.values())).device
        total = torch.zeros(self._clients, device=device)
        for _, value in sorted(states.items()):
            if value.requires_grad:
                slope = (torch.rand(value.shape, generator=random) - 0.5).to(value)
                # The square makes the gradient depend on where it is taken, as real ones do.
                terms = slope * value + value**2 / 2
                total = total + terms.flatten(1).sum(1)
        # Zero, with the gradient of the total.
        return total - total.detach()

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start``."""
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
        """Take a step of gradient descent at a rate of 0.1."""
        roles = (role,) if isinstance(role, str) else role
        leaves: list[tuple[str, Tensor]] = []
        for name in roles:
            for key, value in self.states[name].items():
                if value.requires_grad:
                    value.grad = None
                    leaves.append((key, value))
        if loss is not None:
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
                leaf -= 0.1 * gradient


def no_logits(algorithm: Algorithm) -> ValueError:
    """Return the error of an algorithm that reads outputs or labels in private training."""
    return ValueError(
        f"privacy does not support {algorithm.kind}: its local step reads the model's outputs on private images "
        "(step.logits, step.outputs), or their labels (step.labels, step.class_counts), which no noise covers; choose "
        "a different algorithm, or client_privacy; in a custom algorithm use step.loss, whose gradient is private"
    )


def no_counts(algorithm: Algorithm) -> ValueError:
    """Return the error of an algorithm that needs class counts that are not available."""
    return ValueError(
        f"algorithm {algorithm.kind} requires each client's number of images per class, but images have several "
        "labels, or labels are unknown until they are read; choose a different algorithm"
    )
