# SPDX-License-Identifier: Apache-2.0
"""Dry runs without images that try an algorithm and a server rule at set-up, before anything is trained.

:class:`DryRun` runs rounds on made-up gradients, counts the gradients that a local step computes, and takes server
steps on made-up updates. It answers three questions:

- :func:`perada.algorithms.dry_run_results.dry_run_rounds`: do all methods return states of the right form?
- :func:`server_follows_from_mean`: does the server need more than the mean of the updates?
- :mod:`perada.privacy.dry_run_checks`: what must privacy accounting count?
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.algorithms.dry_run_step import DryRunStep
from perada.core.checks import Options
from perada.core.rounds import Phase
from perada.core.states import State, clone, expand, stack_size
from perada.server import ServerRule, Updates, client_weights
from perada.tasks import Classification, Task

T = TypeVar("T")

SERVER_ROUNDS = 3
"""Number of rounds in which server steps on updates and on their mean are compared."""
SERVER_CLIENTS = 4
"""Number of clients in these rounds."""


def is_foreign(component: Options) -> bool:
    """Return whether the class of an algorithm or a rule, or of one that it contains, is from outside perada."""
    if not type(component).__module__.startswith("perada."):
        return True
    return any(is_foreign(part) for part in vars(component).values() if isinstance(part, Options))


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

    def rounds(self, round_indices: Iterable[int]) -> Iterator[DryRunRound]:
        """Run rounds on made-up gradients, with a distillation that changes nothing.

        Args:
            round_indices: Numbers of the rounds.

        Yields:
            The result of each round.
        """
        algorithm = self.algorithm
        global_state = self.initial
        server_state: dict[str, State] = {}
        first_state = self.call("initial_client_state", algorithm.initial_client_state, self.initial, self.tensor_names)
        client_state = _stack_equal_rows(first_state, len(self.clients))
        for round in round_indices:
            sending = self._make_sending(round, global_state, server_state)
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
                    predict=partial(_make_predictions, self.num_classes or 2),
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
        step = self._make_step(opened, client_state, received, round)
        for phase in self.phases:
            self.call("trainable_keys", step.begin, phase.name, self.tensor_names)
            # Two steps, since the second one starts from the state that the first one left.
            self.call("client_step", algorithm.client_step, step)
            self.call("client_step", algorithm.client_step, step)
        return self.call("end_round", algorithm.end_round, step.finished(), client_state, received, self.tensor_names)

    def queries(self) -> tuple[dict[str, int], ...]:
        """Count the gradients that one local step of the first round computes.

        Returns:
            For each phase, the number of gradients by stream of batches.
        """
        algorithm = self.algorithm
        tensor_names = self.tensor_names
        first_state = algorithm.initial_client_state(self.initial, tensor_names)
        client_state = _stack_equal_rows(first_state, len(self.clients))
        received = algorithm.broadcast(self._make_sending(0, self.initial, {}))
        counts = []
        for phase in self.phases:
            opened = algorithm.begin_round(client_state, received, tensor_names)
            step = self._make_step(opened, client_state, received, round=0)
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

    def call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the algorithm. A subclass overrides this to check the result.

        Args:
            method: Name of the method.
            function: The bound method.
            arguments: Its arguments.
        """
        return function(*arguments)

    def _make_sending(self, round: int, global_state: State, server_state: dict[str, State]) -> Broadcast:
        """Return the argument of the algorithm's broadcast."""
        return Broadcast(
            global_state, self.tensor_names, round, self.clients, self.num_clients, seed=0, state=server_state
        )

    def _make_step(self, opened: Stacks, client_state: Stacks, received: State, round: int) -> DryRunStep:
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


def _stack_equal_rows(states: Stacks, num_clients: int) -> Stacks:
    """Return each role's state as a stack (C, ...) with one equal row per client."""
    stacks = {}
    for role, state in states.items():
        stacks[role] = expand(state, num_clients)
    return stacks


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


def _are_close(named_states: dict[str, State], other_states: dict[str, State]) -> bool:
    """Return whether two collections of states have the same names, and tensors that are equal up to rounding."""
    if named_states.keys() != other_states.keys():
        return False
    for name, state in named_states.items():
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
    clients_of_teachers: Sequence[int | None] = (),
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


def _make_predictions(
    num_classes: int,
    previous: State,
    model_states: Updates | State,
    num_images: int,
    labelled: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return made-up predictions (C, 1, K) on one image, and its labels (1, K); None without labels."""
    if isinstance(model_states, Updates):
        model_states = model_states.local_rows
    clients = stack_size(model_states)
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
    client_state = _stack_equal_rows(algorithm.initial_client_state(initial, tensor_names), 1)
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
