# SPDX-License-Identifier: Apache-2.0
"""The noise that a budget asks for."""

from perada.core.checks import check_choice, check_number
from perada.privacy.accounting import ACCOUNTANTS, check_delta, check_step, history_epsilon, quiet_opacus


def calibrate(target_epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str = "rdp") -> float:
    """Smallest noise multiplier, up to a tolerance, whose planned steps stay within a budget.

    Args:
        target_epsilon: The budget.
        delta: Probability of failure, in (0, 1).
        sample_rate: q of the run, in (0, 1]; 1.0 for shuffled passes.
        steps: Steps of the whole plan, all rounds together; passes where they are shuffled.
        accountant: One of ``rdp``, ``prv`` and ``gdp``.

    Returns:
        σ, whose epsilon lies in [target − tolerance, target], with a tolerance of 0.01 or 1 % of the target,
        whichever is less. Less than that is spent only where the accountant jumps.

    Raises:
        ValueError: If a number is out of its range, or no noise brings the accountant's bound down to the target.
    """
    check_number("target_epsilon", target_epsilon, above=0, hint="usual budgets lie from 1 to 10")
    check_delta(delta)
    check_choice("accountant", accountant, ACCOUNTANTS)
    check_step(1.0, sample_rate, steps)
    if not steps:
        raise ValueError("the plan has no steps, so that any noise would do; give the steps of all rounds together")
    tolerance = min(0.01, target_epsilon / 100)
    search = _search_noise if accountant == "gdp" else _opacus_noise  # Opacus's search for gdp fails where epsilon is 0
    sigma = search(target_epsilon, delta, float(sample_rate), steps, accountant, tolerance)
    if not history_epsilon({(sigma, sample_rate): steps}, delta, accountant) <= target_epsilon:
        raise _unreachable(target_epsilon, delta, accountant)
    return sigma


def _opacus_noise(target: float, delta: float, rate: float, steps: int, accountant: str, tolerance: float) -> float:
    """Opacus's search; with steps, because from epochs it would round the steps down."""
    from opacus.accountants.utils import get_noise_multiplier

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


def _search_noise(target: float, delta: float, rate: float, steps: int, accountant: str, tolerance: float) -> float:
    """Bisection on the epsilon of the plan, which falls as the noise grows."""
    low, high = 0.0, 1.0
    while not (spent := history_epsilon({(high, rate): steps}, delta, accountant)) <= target:
        low, high = high, 2 * high
        if high > 1e6:  # as in Opacus's search
            raise _unreachable(target, delta, accountant)
    while target - spent > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        epsilon = history_epsilon({(middle, rate): steps}, delta, accountant)
        if epsilon <= target:
            high, spent = middle, epsilon
        else:
            low = middle
    return high


def _unreachable(target: float, delta: float, accountant: str) -> ValueError:
    return ValueError(
        f"target_epsilon={target} at delta={delta} is below what the {accountant} accountant can show with any noise; "
        "raise the target, or use 'prv', whose bound goes lower than that of 'rdp'"
    )
