# SPDX-License-Identifier: Apache-2.0
"""Whether an algorithm's server needs no more of the clients than sums, tried at set-up."""

import copy
from collections.abc import Sequence

import torch

from perada.algorithms import Algorithm, ServerStep, TensorNames
from perada.algorithms.dry_run import example_sent
from perada.core.states import State, clone
from perada.federation.settings import Settings
from perada.server import Updates, client_weights
from perada.server.aggregate import ServerRule

TRIED_CLIENTS = 4
"""Clients in the trial of a server."""


def check_secure_sums(settings: Settings, tensor_names: TensorNames, initial: State, clients: int) -> None:
    """Refuse, by a ValueError, what needs more of the clients than sums over the round's.

    ``initial`` is the algorithm's initial state, ``clients`` the number of all.
    """
    secure = settings.secure_sums
    algorithm = settings.algorithm
    rule = settings.rule
    if secure is None:
        return
    name = type(algorithm).__name__
    drawn = min(clients, settings.clients_per_round or clients)
    instead = "or leave secure_sums out"
    reasons = {
        f"{name}: its clients send nothing; leave it out": not algorithm.sends_updates,
        f"{name}: it compares models on the clients' images, and their losses are no sums; choose PerAda, {instead}": (
            algorithm.compares_models
        ),
        f"drop_outliers=True: it compares single updates; leave it out, {instead}": settings.drop_outliers,
        f"clients_per_round={drawn}: more than {secure.threshold:g} of them, and at least {secure.min_sites}, must be "
        f"there to the end; take more, {instead}": drawn < secure.min_sites,
        f"the server rule {rule.kind}: it looks at single updates; choose 'mean' or 'fedavgm', {instead}": (
            not rule.function_of_mean
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"secure_sums cannot be used with {reason}")
    if not only_the_mean_counts(algorithm, rule, tensor_names, initial):
        raise ValueError(
            f"secure_sums cannot be used with {name}: what its server makes of the clients' updates does not follow "
            f"from their mean, as a trial at set-up shows; choose PerAda, FedAvg or Ditto, {instead}"
        )


def only_the_mean_counts(algorithm: Algorithm, rule: ServerRule, tensor_names: TensorNames, initial: State) -> bool:
    """Try three rounds of a server on updates, and on their mean in every row: whether the results are the same."""
    example = example_sent(algorithm, tensor_names, initial)
    random = torch.Generator().manual_seed(0)
    rounds: list[State] = []
    for _ in range(3):
        rows: State = {}
        for name, value in example.items():
            if value.is_floating_point():
                noise = torch.randn(TRIED_CLIENTS, *value.shape[1:], generator=random, dtype=torch.float64)
                rows[name] = 1.0 + 0.5 * noise
        rounds.append(rows)
    means = [{name: value.mean(0).expand_as(value).clone() for name, value in rows.items()} for rows in rounds]
    try:
        of_rows = _states_after(algorithm, rule, tensor_names, initial, rounds)
        of_means = _states_after(algorithm, rule, tensor_names, initial, means)
    except Exception:  # the server's step needs what a sum has not
        return False
    if of_rows.keys() != of_means.keys():
        return False
    for name, state in of_rows.items():
        if state.keys() != of_means[name].keys():
            return False
        if not all(torch.allclose(value, of_means[name][key], 1e-9, 1e-9) for key, value in state.items()):
            return False
    return True


def _states_after(
    algorithm: Algorithm, rule: ServerRule, tensor_names: TensorNames, initial: State, rounds: Sequence[State]
) -> dict[str, State]:
    """Take a server's steps on updates (C, ...), one a round: the server's states, and under "" the global one."""
    algorithm = copy.deepcopy(algorithm)
    rule = copy.deepcopy(rule)
    state: dict[str, State] = {}
    # In double precision a difference is none of rounding.
    previous = {name: value.double() if value.is_floating_point() else value for name, value in initial.items()}
    for round, rows in enumerate(rounds):
        step = ServerStep(
            round=round,
            clients=tuple(range(TRIED_CLIENTS)),
            num_clients=TRIED_CLIENTS + 1,
            tensor_names=tensor_names,
            seed=0,
            previous=clone(previous),
            updates=Updates(rows),
            weights=client_weights("uniform", [1] * TRIED_CLIENTS),
            state=state,
            rule=rule,
            distiller=_distilled,
        )
        previous |= algorithm.server_step(step)
        state = step.state
    return {"": previous} | state


def _distilled(
    student: State,
    teachers: Updates | State,
    average_from: float | None = None,
    previous: State | None = None,
) -> State:
    """Stand in for a distiller, which is given the mean of the clients' logits, and of no other teachers."""
    rows = teachers.gathered_all() if isinstance(teachers, Updates) else teachers
    return {name: value + rows[name].mean(0) if name in rows else value for name, value in student.items()}
