# SPDX-License-Identifier: Apache-2.0
"""What private training must know of an algorithm and a server rule, found out before anything is trained.

That is how often a step looks at a batch, what is never sent, and whether privacy of whole clients can be had.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from perada.algorithms import Algorithm, Broadcast, FedBE, TensorNames
from perada.algorithms.base import AlgorithmWrapper
from perada.algorithms.dry_run import DryRun, DryRunStep
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import State, clone, expand
from perada.server import Aggregation, Mean, ServerRule, Updates, client_weights

REHEARSED = 3
"""Rounds in which what a client keeps may find its way into what it sends; after them the last one is rehearsed."""
UNPLANNED = 10**6
"""Rounds of a run of which nobody said how many it has."""
TRIED = 6
"""Clients in the trial of a rule."""


@dataclass(frozen=True)
class QueryPlan:
    """Phases of local training, and streams on which nothing that is sent depends.

    For each phase, ``queries`` tell how often one local step asks for a gradient, by the stream whose batch it is of.
    """

    phases: tuple[Phase, ...]
    queries: tuple[dict[str, int], ...]
    unsent: frozenset[str] = frozenset()

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of all streams, in the order of their first use."""
        return tuple(dict.fromkeys(chain.from_iterable(self.queries)))


def rehearse(
    algorithm: Algorithm,
    tensor_names: TensorNames,
    initial: State,
    phases: tuple[Phase, ...],
    num_clients: int,
    rounds: int | None = None,
) -> QueryPlan:
    """Go through one local step of every phase without images, and count the gradients it asks for.

    Where the algorithm's ``unsent`` names a stream, the first rounds and the last one are rehearsed, and once more with
    other gradients from it. Such made-up gradients depend on the states at which they are asked for, as real ones do.
    A ValueError if a step asks for what private training cannot give, or what is sent depends on such a stream.
    """
    kept = {role: expand(state, 1) for role, state in algorithm.initial_client_state(initial, tensor_names).items()}
    received = algorithm.broadcast(Broadcast(initial, tensor_names, 0, (0,), num_clients, 0))
    counts = []
    for phase in phases:
        step = DryRunStep(algorithm, algorithm.begin_round(kept, received, tensor_names), kept, received)
        step.begin(phase.name, tensor_names)
        algorithm.client_step(step)
        counts.append(dict(step.queries))
    named = sorted(algorithm.unsent & {stream for asked in counts for stream in asked})
    numbers = sorted({*range(REHEARSED), max(REHEARSED, rounds or UNPLANNED) - 1})
    two = tuple(range(min(2, num_clients)))

    def sent_in_rounds(changed: str = "") -> Iterator[State]:
        dry_run = DryRun(
            copy.deepcopy(algorithm), Mean(), tensor_names, initial, phases, num_clients, two, changed=changed
        )
        for update, _, _ in dry_run.rounds(numbers):
            yield update

    for stream in named:
        for round, usual, changed in zip(numbers, sent_in_rounds(), sent_in_rounds(stream), strict=True):
            for key in usual:
                if not torch.equal(usual[key], changed[key]):
                    raise OptionError(
                        f"privacy: {type(algorithm).__name__}.unsent names {stream!r}, and {key!r} that a client sends "
                        f"in round {round + 1} depends on it: the server's ledger would count too little; leave it out",
                        name="privacy",
                    )
    return QueryPlan(phases, tuple(counts), algorithm.unsent)


def check_client_level(algorithm: Algorithm, rule: ServerRule, weighting: str, distils: bool) -> None:
    """Refuse, by a ValueError, what is made for more of the clients' updates than their uniform mean.

    The mean alone has all of the noise, and it is all that the server's step is given: every row of its updates is the
    noisy mean. So nothing here could leak, but what is refused could not do what it is for.
    """
    name, modes = type(algorithm).__name__, algorithm.modes
    inner = algorithm
    while isinstance(inner, AlgorithmWrapper):
        inner = inner.base
    sample_level = "or protect single images instead (the section privacy)"
    reasons = {
        f"{name}: its clients send nothing; leave it out": not algorithm.sends_updates,
        f"{weighting=}: a client's number of images is private; choose weighting='uniform'": weighting != "uniform",
        f"the server rule {rule.kind}: it is not a function of the clients' mean, which alone has the noise; choose a "
        "rule on the mean, such as 'mean' or 'fedavgm', or set function_of_mean in a rule of your own that is one": (
            not rule.function_of_mean or not only_the_mean_counts(rule)
        ),
        "FedBE(moments=True): its clients also send squares of their changes, which clipping does not cover; choose "
        f"FedAvg, {sample_level}": isinstance(inner, FedBE) and inner.moments,
        "FedBE(distill=False): its ensemble holds single clients' updates and models drawn from them; choose FedAvg, "
        f"{sample_level}": isinstance(inner, FedBE) and not inner.distill,
        f"{name} with distillation: the teachers are single clients' updates, which have only a share of the noise; "
        f"choose PerAda(distill=False), or set distillation.steps=0, {sample_level}": (
            algorithm.uses_distillation and distils
        ),
        f"{name}: it merges the products B·A of the clients' factors, and sees the noisy mean of each factor alone; "
        f"choose FedAvg, or FFALoRA, {sample_level}": algorithm.merges_into_backbone,
        f"{name}({modes=}): a mode's mean is over a part of the clients, with a part of the noise; set modes=1, "
        f"{sample_level}": modes > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"client_privacy cannot be used with {reason}")


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
                previous |= tried(
                    Aggregation(Updates(updates), weights, clone(previous), frozenset(previous), round, state)
                )
            except Exception as error:  # a rule of the caller's own
                raise OptionError(
                    f"client_privacy: the server rule {rule.kind} says that it is a function of the mean, and fails "
                    f"where that is tried ({type(error).__name__}: {error})",
                    name="client_privacy",
                ) from error
        parts = {"": previous} | state
        results.append({f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()})
    one, other = results
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], 1e-9, 1e-12) for key in one)
