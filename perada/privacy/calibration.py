# SPDX-License-Identifier: Apache-2.0
"""The noise that a budget asks for."""

import math
from collections import Counter

from perada.privacy.accounting import check_accountant, check_delta, check_step, history_epsilon, quiet_opacus


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
    *,
    second: tuple[float, int] | None = None,
) -> float:
    """Smallest noise multiplier, up to a tolerance, whose planned steps stay within a budget.

    Args:
        target_epsilon: The budget.
        delta: Probability of failure, in (0, 1).
        sample_rate: q of the run, in (0, 1]; 1.0 for shuffled passes.
        steps: Steps of the whole plan, all rounds together; passes where they are shuffled.
        accountant: One of ``rdp``, ``prv`` and ``gdp``.
        second: Rate and steps of a second run on the same images with the same noise multiplier, to stay within the
            budget of both composed.

    Returns:
        σ, whose epsilon lies in [target − tolerance, target], with a tolerance of 0.01 or 1 % of the target,
        whichever is less. Less than that is spent only where the accountant jumps.

    Raises:
        ValueError: If a number is out of its range, or no noise brings the accountant's bound down to the target.
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon={target_epsilon} is not a positive number; usual budgets lie from 1 to 10")
    check_delta(delta)
    check_accountant(accountant)
    plan: Counter[float] = Counter()
    for rate, count in [(sample_rate, steps), *([second] if second else [])]:
        check_step(1.0, rate, count)
        plan[float(rate)] += count
    if not +plan:
        raise ValueError("the plan has no steps, so that any noise would do; give the steps of all rounds together")
    tolerance = min(0.01, target_epsilon / 100)
    if len(plan) == 1 and accountant != "gdp":
        sigma = _opacus_noise(target_epsilon, delta, plan, accountant, tolerance)
    else:  # two rates, which Opacus has no search for; and its search with gdp fails where epsilon is 0
        sigma = _search_noise(target_epsilon, delta, plan, accountant, tolerance)
    if not _plan_epsilon(sigma, plan, delta, accountant) <= target_epsilon:
        raise _unreachable(target_epsilon, delta, accountant)
    return sigma


def _opacus_noise(target: float, delta: float, plan: Counter[float], accountant: str, tolerance: float) -> float:
    """Opacus's search, for one rate; with steps, because from epochs it would round the steps down."""
    from opacus.accountants.utils import get_noise_multiplier

    ((rate, steps),) = plan.items()
    try:
        with quiet_opacus():
            found = get_noise_multiplier(
                target_epsilon=target,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant=accountant,
                epsilon_tolerance=tolerance,
            )
    except ValueError as error:
        raise _unreachable(target, delta, accountant) from error
    return float(found)


def _search_noise(target: float, delta: float, plan: Counter[float], accountant: str, tolerance: float) -> float:
    """Bisection on the epsilon of the composed plan, which falls as the noise grows."""
    low, high = 0.0, 1.0
    while not (spent := _plan_epsilon(high, plan, delta, accountant)) <= target:
        low, high = high, 2 * high
        if high > 1e6:  # as in Opacus's search
            raise _unreachable(target, delta, accountant)
    while target - spent > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        epsilon = _plan_epsilon(middle, plan, delta, accountant)
        if epsilon <= target:
            high, spent = middle, epsilon
        else:
            low = middle
    return high


def _plan_epsilon(sigma: float, plan: Counter[float], delta: float, accountant: str) -> float:
    return history_epsilon({(sigma, rate): steps for rate, steps in plan.items()}, delta, accountant)


def _unreachable(target: float, delta: float, accountant: str) -> ValueError:
    return ValueError(
        f"target_epsilon={target} at delta={delta} is below what the {accountant} accountant can show with any noise; "
        "raise the target, or use 'prv', whose bound goes lower than that of 'rdp'"
    )
