# SPDX-License-Identifier: Apache-2.0
"""Whether an algorithm's server needs no more of the clients than sums, tried at set-up."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from perada.algorithms import Algorithm, ServerStep, TensorNames
from perada.algorithms.dry_run import example_sent
from perada.core.states import State, clone
from perada.federation.settings import Settings
from perada.server import Updates, client_weights
from perada.server.aggregate import ServerRule

TRIED = 4


def check_secure_sums(settings: Settings, tensor_names: TensorNames, initial: State, clients: int) -> None:
    """Refuse, by a ValueError, what needs more of the clients than sums over the round's.

    ``initial`` is the algorithm's initial state, ``clients`` the number of all.
    """
    secure, algorithm, rule = settings.secure_sums, settings.algorithm, settings.rule
    if secure is None:
        return
    name, drawn = type(algorithm).__name__, min(clients, settings.clients_per_round or clients)
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
    example, random = example_sent(algorithm, tensor_names, initial), torch.Generator().manual_seed(0)
    sent = [
        {
            key: 1.0 + 0.5 * torch.randn(TRIED, *value.shape[1:], generator=random, dtype=torch.float64)
            for key, value in example.items()
            if value.is_floating_point()
        }
        for _ in range(3)
    ]
    weights, results = client_weights("uniform", [1] * TRIED), []
    for alike in (False, True):
        tried, by, state = copy.deepcopy(algorithm), copy.deepcopy(rule), dict[str, State]()
        previous = {key: value.double() if value.is_floating_point() else value for key, value in initial.items()}
        for round, rows in enumerate(sent):
            given = {key: value.mean(0).expand_as(value).clone() for key, value in rows.items()} if alike else rows
            step = ServerStep(
                round,
                tuple(range(TRIED)),
                TRIED + 1,
                tensor_names,
                0,
                clone(previous),
                Updates(given),
                weights,
                state,
                by,
                _distilled,
            )
            try:
                previous |= tried.server_step(step)
            except Exception:  # it needs what a sum has not
                return False
            state = step.state
        results.append({"": previous} | state)
    one, other = results
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.allclose(value, other[name][key], 1e-9, 1e-9) for key, value in part.items())
        for name, part in one.items()
    )


def _distilled(student: State, teachers: Mapping[str, Tensor], average_from: float | None = None) -> State:
    """In place of a distiller: it is given the mean of the clients' logits, and of no other teachers."""
    return {key: value + teachers[key].mean(0) if key in teachers else value for key, value in student.items()}
