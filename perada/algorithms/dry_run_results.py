# SPDX-License-Identifier: Apache-2.0
"""A dry run that checks what all methods of an algorithm and of a server rule return.

This is for classes from outside perada, since perada's are covered by its tests.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from perada.algorithms.base import Algorithm, Stacks, TensorNames
from perada.algorithms.dry_run import DryRun
from perada.core.checks import check_choice
from perada.core.rounds import Phase
from perada.core.states import State, numel
from perada.core.text import dtype_name, quoted, value_text
from perada.server import Aggregation, Mean, ServerRule
from perada.tasks import DEFAULT_TASK, Task

T = TypeVar("T")

MAX_NUMBERS = 10**8
"""Largest number of elements in the clients' states of a dry run, which limits its memory."""


def dry_run_rounds(
    algorithm: Algorithm,
    rule: ServerRule,
    tensor_names: TensorNames,
    initial: State,
    phases: Sequence[Phase],
    *,
    num_clients: int,
    clients_per_round: int,
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
        clients_per_round: Number of clients per round. Fewer are tried if their states are large; if the rule does not
            accept so few, the mean is used instead.
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
    num_tried = min(max(2, min(clients_per_round, affordable_clients)), num_clients)
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

    def call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the algorithm; raise a ValueError if it fails or its result has the wrong form."""
        who = f"{type(self.algorithm).__name__}.{method}"
        former_client_state: Stacks = {}
        if method == "end_round":
            # The client state, the second argument, is read before the call, which might change it in place.
            former_client_state = _first_rows(arguments[1])
        result = _call_foreign(who, function, *arguments)
        if method in ("initial_client_state", "begin_round"):
            _check_stacks(who, result)
        elif method == "broadcast":
            self._check_received(who, result)
        elif method == "end_round":
            self._check_round_end(who, result, former_client_state)
        elif method == "server_step":
            _check_state(who, result, self.initial, partial=True)
            server_state = arguments[0].state
            _check_stacks(f"{who} (server.state)", server_state)
        elif method == "personal":
            _check_state(who, result, self.initial, len(self.clients))
        return result

    def _check_received(self, who: str, result: object) -> None:
        """Raise unless the server sends stacks (C, ...). There may be other names than the model's, for client_step."""
        expected = dict(self.initial)
        for name, value in _tensors_by_name(who, result).items():
            if name not in self.initial:
                expected[name] = value.new_empty(value.shape[1:])
        _check_state(who, result, expected, len(self.clients), partial=True)

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
        _check_stacks(f"{who} (client states)", client_state)
        _check_roles(f"{who} (client states)", client_state, former_client_state, len(self.clients))
        # Clients may send other tensors than the model's, which the algorithm's server_step reads.
        expected = dict(self.initial)
        for name, value in _tensors_by_name(f"{who} (updates)", update).items():
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
        _check_stacks(f"{name} (aggregation.state)", aggregation.state)
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


def _check_stacks(who: str, stacks: object) -> None:
    """Raise unless a method returned states by role, whatever their names and shapes.

    Args:
        who: Name of the method, for the message.
        stacks: What it returned.
    """
    if not isinstance(stacks, Mapping):
        raise _MisfitError(f"{who} returned {value_text(stacks)}; return states by role, {{role: {{name: tensor}}}}")
    for role, state in stacks.items():
        _tensors_by_name(f"{who} for role {role!r}", state)


def _check_roles(who: str, stacks: Stacks, expected_stacks: Stacks, num_clients: int) -> None:
    """Raise unless states have the expected roles, names, shapes and dtypes.

    Args:
        who: Name of the method that returned them, for the message.
        stacks: States (C, ...) by role.
        expected_stacks: The expected states by role, without a client axis.
        num_clients: Number C of clients.
    """
    if set(stacks) != set(expected_stacks):
        roles = sorted(map(str, stacks))
        raise _MisfitError(f"{who} returned {roles} instead of states for the roles {quoted(sorted(expected_stacks))}")
    for role, state in stacks.items():
        _check_state(f"{who} for role {role!r}", state, expected_stacks[role], num_clients)


def _tensors_by_name(who: str, state: object) -> State:
    """Return a state that a method returned; raise unless it is tensors by name."""
    if isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values()):
        return dict(state)
    raise _MisfitError(f"{who} returned {value_text(state)}; return tensors by name, {{name: tensor}}")


def _check_state(
    who: str, state: object, expected: State, num_clients: int | None = None, partial: bool = False
) -> None:
    """Raise unless a state has the expected names, shapes and dtypes.

    Args:
        who: Name of the method, for the message.
        state: The state, as returned by the method.
        expected: A state with the expected names, shapes and dtypes, without a client axis.
        num_clients: Number C of clients in the state; None if it has no client axis.
        partial: Whether names may be missing.
    """
    tensors = _tensors_by_name(who, state)
    for name, value in tensors.items():
        if name not in expected:
            message = f"{who} returned {name!r}, which is not the name of a trained tensor"
            if who.endswith("server_step"):
                message += (
                    "; store other values that clients send in server.state (server.updates.part leaves names out of "
                    "the mean)"
                )
            raise _MisfitError(message)
        shape = tuple(expected[name].shape)
        if num_clients is not None:
            shape = (num_clients, *shape)
        dtype = expected[name].dtype
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise _MisfitError(
                f"{who} returned {name!r} with shape {tuple(value.shape)} and {dtype_name(value.dtype)} "
                f"instead of {shape} and {dtype_name(dtype)}"
            )
    missing = sorted(expected.keys() - tensors.keys())
    if missing and not partial:
        message = f"{who} lacks {missing[0]!r}"
        if len(missing) > 1:
            message += f" and {len(missing) - 1} more names"
        raise _MisfitError(message)


def _first_rows(stacks: Stacks) -> Stacks:
    """Return the states of the first client by role, without the client axis."""
    states: Stacks = {}
    for role, stack in stacks.items():
        states[role] = {name: value[0] for name, value in stack.items()}
    return states
