# SPDX-License-Identifier: Apache-2.0
"""The noise that a budget asks for."""

from perada.core.checks import check_choice, check_number
from perada.privacy.accounting import ACCOUNTANTS, check_delta, check_step, history_epsilon


def calibrate(target_epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str = "rdp") -> float:
    """Smallest noise multiplier, up to a tolerance, whose planned steps stay within a budget.

    The steps, or shuffled passes at the rate 1, are those of all rounds together. The epsilon of the result lies in
    [target − tolerance, target], with a tolerance of 0.01 or 1 % of the target, whichever is less. Less than that is
    spent only where the accountant jumps.

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
    low, high = 0.0, 20.0  # bisection as in Opacus's search, which fails for gdp where epsilon is 0
    while not (spent := history_epsilon({(high, sample_rate): steps}, delta, accountant)) <= target_epsilon:
        high = 2 * high
        if high > 1e6:
            raise ValueError(
                f"target_epsilon={target_epsilon} at delta={delta} is below what the {accountant} accountant can show "
                "with any noise; raise the target, or use 'prv', whose bound goes lower than that of 'rdp'"
            )
    while target_epsilon - spent > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        epsilon = history_epsilon({(middle, sample_rate): steps}, delta, accountant)
        if epsilon <= target_epsilon:
            high, spent = middle, epsilon
        else:
            low = middle
    return high
