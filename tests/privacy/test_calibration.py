# SPDX-License-Identifier: Apache-2.0
"""Noise for a budget: reached, never exceeded, by the accountant's own word."""

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

from perada.privacy import calibrate, history_epsilon
from tests.rejections import rejects

DELTA = 1e-5


@pytest.mark.every(3)
@pytest.mark.parametrize(("accountant", "reference"), [("rdp", RDPAccountant), ("prv", PRVAccountant)])
@pytest.mark.parametrize("target", [0.5, 3.0])
def test_the_budget_is_reached_and_never_exceeded(accountant, reference, target):
    sigma = calibrate(target, DELTA, 0.02, 300, accountant)
    opacus = reference()
    opacus.history = [(sigma, 0.02, 300)]
    spent = opacus.get_epsilon(DELTA)
    assert target - min(0.01, target / 100) <= spent <= target


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")  # of Opacus's search, called here by hand
def test_noise_is_that_of_opacus():
    expected = get_noise_multiplier(target_epsilon=3.0, target_delta=DELTA, sample_rate=0.02, steps=1000)
    assert calibrate(3.0, DELTA, 0.02, 1000) == expected


def test_more_steps_need_more_noise():
    assert calibrate(3.0, DELTA, 0.02, 300) > calibrate(3.0, DELTA, 0.02, 200)


def test_a_budget_below_the_accountants_reach_is_rejected():
    with pytest.raises(ValueError, match=r"target_epsilon=0\.05 .*delta=1e-05 .*rdp"):
        calibrate(0.05, DELTA, 0.02, 300)
    assert history_epsilon({(calibrate(0.05, DELTA, 0.02, 3, "prv"), 0.02): 3}, DELTA, "prv") <= 0.05


@pytest.mark.parametrize("target", [0, -1.0, float("nan"), float("inf"), 50.1, 1000])
def test_impossible_budgets_are_rejected(target):
    with pytest.raises(ValueError, match=r"target_epsilon must be a finite number > 0 and <= 50, got .*"):
        calibrate(target, DELTA, 0.02, 300)


def test_a_plan_without_steps_is_rejected():
    with pytest.raises(ValueError, match="no steps"):
        calibrate(1.0, DELTA, 0.02, 0)
    with rejects("sample_rate", 0):
        calibrate(1.0, DELTA, 0, 1)
