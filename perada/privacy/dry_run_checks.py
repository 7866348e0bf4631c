# SPDX-License-Identifier: Apache-2.0
"""Dry runs at set-up that determine what private training depends on in an algorithm and a server rule.

These are the number of gradients that a step computes, whether streams that are declared unsent are never sent, and
whether client-level privacy is possible. The network is checked in :mod:`perada.privacy.model_checks`.
"""

import copy
from collections.abc import Iterator, Sequence

import torch

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.dry_run import DryRun, is_foreign, server_follows_from_mean
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import State, expand
from perada.privacy.account import QueryPlan
from perada.server import Mean, ServerRule

FIRST_ROUNDS = 3
"""Number of rounds that are tried, before the last one: a client may send in one round what it kept in another."""
UNPLANNED = 10**6
"""Number of rounds that is assumed if a run has no fixed number."""


def plan_queries(
    algorithm: Algorithm,
    tensor_names: TensorNames,
    initial: State,
    phases: tuple[Phase, ...],
    num_clients: int,
    rounds: int | None = None,
) -> QueryPlan:
    """Find the gradients that local training computes, by running one local step of each phase without images.

    Args:
        algorithm: The algorithm.
        tensor_names: Names of the state's tensors.
        initial: The initial state.
        phases: Phases of local training.
        num_clients: Number of all clients.
        rounds: Number of rounds; None if it is not fixed.

    Raises:
        ValueError: If a step reads what private training does not provide, or if clients send something that depends on
            a stream that the algorithm declares unsent.
    """
    dry_run = DryRun(algorithm, Mean(), tensor_names, initial, phases, num_clients, clients=(0,))
    plan = QueryPlan(phases, dry_run.queries(), algorithm.unsent)
    last_round = (rounds or UNPLANNED) - 1
    tried_rounds = sorted({*range(FIRST_ROUNDS), max(FIRST_ROUNDS - 1, last_round)})
    for stream in sorted(plan.unsent.intersection(plan.streams)):
        check_unsent(algorithm, stream, tensor_names, initial, phases, num_clients, tried_rounds)
    return plan


def check_unsent(
    algorithm: Algorithm,
    stream: str,
    tensor_names: TensorNames,
    initial: State,
    phases: tuple[Phase, ...],
    num_clients: int,
    tried_rounds: Sequence[int],
) -> None:
    """Check that what clients send is independent of the gradients of a stream that the algorithm declares unsent.

    Two dry runs, of which one has other gradients in that stream, must send the same. Like real gradients, those that
    are made up depend on the states at which they are computed.

    Args:
        algorithm: The algorithm.
        stream: Name of the stream of batches.
        tensor_names: Names of the state's tensors.
        initial: The initial state.
        phases: Phases of local training.
        num_clients: Number of all clients.
        tried_rounds: Numbers of the rounds to compare.

    Raises:
        ValueError: If they send different tensors.
    """
    clients = tuple(range(min(2, num_clients)))

    def sent_in_rounds(changed: str) -> Iterator[State]:
        """Yield what clients send in each round, with different gradients from the ``changed`` stream."""
        dry_run = DryRun(
            copy.deepcopy(algorithm), Mean(), tensor_names, initial, phases, num_clients, clients, changed=changed
        )
        for result in dry_run.rounds(tried_rounds):
            yield result.sent

    usual_rounds = sent_in_rounds(changed="")
    changed_rounds = sent_in_rounds(changed=stream)
    for round, usual, changed in zip(tried_rounds, usual_rounds, changed_rounds, strict=True):
        for key in usual:
            if not torch.equal(usual[key], changed[key]):
                raise OptionError(
                    f"privacy: {type(algorithm).__name__}.unsent lists {stream!r}, but {key!r}, which clients send in "
                    f"round {round + 1}, depends on it: the server's ledger would count too little; remove {stream!r} "
                    "from unsent",
                    name="privacy",
                )


def check_client_level(algorithm: Algorithm, rule: ServerRule, weighting: str, distills: bool) -> None:
    """Check that the algorithm and the server rule require only the uniform mean of the clients' updates.

    Only the mean carries all of the noise, so the server step sees nothing else: every row of its updates is the noisy
    mean. The rejected combinations would therefore leak nothing, but would not work as intended.

    Args:
        algorithm: The algorithm.
        rule: The server rule.
        weighting: How clients are weighted.
        distills: Whether the run has distillation steps.

    Raises:
        ValueError: If they require more; the message contains a remedy.
    """
    name = type(algorithm).__name__
    modes = algorithm.modes
    needs_more_than_mean = not rule.function_of_mean
    # For perada's own rules, tests verify that function_of_mean is true.
    if rule.function_of_mean and is_foreign(rule):
        needs_more_than_mean = not _rule_follows_from_mean(rule)
    if not algorithm.sends_updates:
        raise _incompatible_option(f"{name}: its clients send nothing; leave client_privacy out")
    if weighting != "uniform":
        raise _incompatible_option(f"{weighting=}: a client's number of images is private; choose weighting='uniform'")
    if needs_more_than_mean:
        raise _incompatible_option(
            f"the server rule {rule.kind}: it is not a function of the clients' mean, and only the mean carries the "
            "noise; choose a rule on the mean, such as 'mean' or 'fedavgm', or set function_of_mean in a custom rule "
            "that is one"
        )

    # The combinations below are possible with sample-level privacy.
    sample_level = "or protect single images instead (section privacy)"
    not_covered = algorithm.beyond_client_privacy()
    if not_covered:
        raise _incompatible_option(f"{not_covered}, {sample_level}")
    if algorithm.uses_distillation and distills:
        raise _incompatible_option(
            f"{name} with distillation: the teachers are single clients' updates, each with only a share of the "
            f"noise; choose PerAda(distill=False), or set distillation.steps=0, {sample_level}"
        )
    if algorithm.merges_into_backbone:
        raise _incompatible_option(
            f"{name}: it merges the products B·A of the clients' factors, but would see only the noisy mean of each "
            f"factor; choose FedAvg, or FFALoRA, {sample_level}"
        )
    if modes > 1:
        raise _incompatible_option(
            f"{name}({modes=}): the mean of a mode covers only some of the clients and carries only some of the "
            f"noise; set modes=1, {sample_level}"
        )


def _incompatible_option(reason: str) -> ValueError:
    """Return the error for a combination that client-level privacy does not support."""
    return ValueError(f"client_privacy does not support {reason}")


def _rule_follows_from_mean(rule: ServerRule) -> bool:
    """Return whether a rule gives the same result for updates as for their mean, with one tensor and FedAvg.

    Raises:
        ValueError: If the rule fails.
    """
    tensor_names = TensorNames(("weight",), ("weight",))
    initial = {"weight": torch.zeros(4, dtype=torch.float64)}
    try:
        return server_follows_from_mean(Algorithm(), rule, tensor_names, initial, sent=expand(initial, 1))
    except Exception as error:  # a user's rule may raise errors of any kind
        raise OptionError(
            f"client_privacy: the server rule {rule.kind} declares itself a function of the mean, but fails in the "
            f"dry run ({type(error).__name__}: {error}); mend it, or set its function_of_mean to False",
            name="client_privacy",
        ) from error
