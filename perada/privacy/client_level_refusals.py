# SPDX-License-Identifier: Apache-2.0
"""What privacy of whole clients cannot be used with."""

import copy

import torch

from perada.algorithms import Algorithm, FedBE, FedEnsemble, ensemble_of
from perada.core.states import State, clone
from perada.server import Aggregation, ServerRule, client_weights

TRIED = 6
"""Clients in the trial of a rule."""


def check_client_level(algorithm: Algorithm, rule: ServerRule, weighting: str, distils: bool) -> None:
    """Refuse, by a ValueError, what is made for more of the clients' updates than their uniform mean.

    The mean alone has all of the noise, and it is all that the server's step is given: every row of its updates is the
    noisy mean. So nothing here could leak, but what is refused could not do what it is for.
    """
    name = type(algorithm).__name__
    inner = algorithm.base if isinstance(algorithm, FedEnsemble) else algorithm
    sample_level = "or protect single images instead (the section privacy)"
    if not algorithm.sends:
        raise ValueError(f"client_privacy cannot be used with {name}: its clients send nothing; leave it out")
    if weighting != "uniform":
        raise ValueError(
            f"client_privacy cannot be used with weighting={weighting!r}: a client's number of images is private; "
            "choose weighting='uniform'"
        )
    if not rule.function_of_mean or not only_the_mean_counts(rule):
        raise ValueError(
            f"client_privacy cannot be used with the server rule {rule.kind}: it is not a function of the clients' "
            "mean, which alone has the noise; choose a rule on the mean, such as 'mean' or 'fedavgm', or set "
            "function_of_mean in a rule of your own that is one"
        )
    if isinstance(inner, FedBE) and not inner.distill:
        raise ValueError(
            f"client_privacy cannot be used with {name}(distill=False): its ensemble holds single clients' updates "
            f"and models drawn from them; choose FedAvg, {sample_level}"
        )
    if algorithm.distills and distils:
        raise ValueError(
            f"client_privacy cannot be used with {name} with distillation: the teachers are single clients' updates, "
            "which have only a share of the noise; choose PerAda(distill=False), or set distillation.steps=0, "
            f"{sample_level}"
        )
    if (modes := ensemble_of(algorithm).modes) > 1:
        raise ValueError(
            f"client_privacy cannot be used with {name}(modes={modes}): a mode's mean is over a part of the "
            f"clients, with a part of the noise; set modes=1, {sample_level}"
        )


def only_the_mean_counts(rule: ServerRule) -> bool:
    """Try a rule for three rounds on two sets of updates of one mean: whether the results are the same.

    A ValueError if it fails.
    """
    random = torch.Generator().manual_seed(0)
    rounds = [torch.randn(TRIED, 4, generator=random, dtype=torch.float64) for _ in range(3)]
    results = []
    for alike in (False, True):
        tried, state = copy.deepcopy(rule), dict[str, State]()
        previous = {"weight": torch.zeros(4, dtype=torch.float64)}
        for round, rows in enumerate(rounds):
            updates = {"weight": rows.mean(0).expand_as(rows) if alike else rows}
            weights = client_weights("uniform", [1] * TRIED)
            try:
                previous |= tried(Aggregation(updates, weights, clone(previous), frozenset(previous), round, state))
            except Exception as error:  # a rule of the caller's own
                raise ValueError(
                    f"client_privacy: the server rule {rule.kind} says that it is a function of the mean, and fails "
                    f"where that is tried ({type(error).__name__}: {error})"
                ) from error
        parts = {"": previous} | state
        results.append({f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()})
    one, other = results
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], 1e-9, 1e-12) for key in one)
