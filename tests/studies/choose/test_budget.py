# SPDX-License-Identifier: Apache-2.0
"""Durations, the rungs of a search, and the plan that fits into a budget."""

import itertools
import math
from dataclasses import replace

import pytest

from perada.studies.choose.budget import (
    CANDIDATES,
    Cost,
    SearchPlan,
    final_plans,
    fit_plan,
    format_duration,
    growing_plans,
    make_rungs,
    num_draws_for,
    parse_duration,
    shrinking_plans,
)

METHODS = ("standalone", "fedavg", "fedavg_ft", "fedbn", "ditto", "perada")
LARGEST = SearchPlan(METHODS, CANDIDATES[0], num_draws=5, num_finalists=6, seeds=(0, 1, 2), rounds=30)
COSTS = {method: Cost(per_run=2.0, per_round=0.5 + place / 4) for place, method in enumerate(METHODS)}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5h", 5400), ("1h30m", 5400), (" 2M ", 120)]
)
def test_a_duration_has_a_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-5m", "0s", "5 m", "5d", "m5", "5m!", "nan", "1e3s"])
def test_anything_else_is_no_duration(text):
    with pytest.raises(ValueError, match="90s, 30m or 2h"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [1, 59, 60, 61, 599, 601, 3599, 3601, 86400])
def test_a_printed_duration_is_read_as_at_least_as_long_and_hardly_longer(seconds):
    read = parse_duration(format_duration(seconds).replace(" min", "m").replace(" ", ""))
    assert seconds <= read <= seconds + 60


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 10, 30, 100])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 9, 27])
def test_each_rung_has_a_third_of_the_settings_and_longer_runs(number, rounds):
    rungs = make_rungs(number, rounds)
    assert rungs[0].num_candidates == number
    assert rungs[-1].rounds == rounds
    for former, rung in itertools.pairwise(rungs):
        assert rung.num_candidates == math.ceil(former.num_candidates / 3)
        assert former.rounds < rung.rounds <= 3 * former.rounds


def test_the_expected_time_is_that_of_a_plain_count_of_runs_and_rounds():
    plan = SearchPlan(METHODS, 9, num_draws=2, num_finalists=6, seeds=(0, 1), rounds=30)
    seconds = 0.0
    for cost in COSTS.values():
        # 9 settings for 4 rounds, 3 of them for 6 more, 1 for 20 more, all on two draws.
        seconds += 2 * (9 * (2 + 4 * cost.per_round) + 3 * (2 + 6 * cost.per_round) + (2 + 20 * cost.per_round))
        # Two seeds on all images.
        seconds += 2 * (2 + 30 * cost.per_round)
    assert plan.seconds(COSTS, jobs=1) == pytest.approx(seconds)
    assert plan.seconds(COSTS, jobs=2) == pytest.approx(seconds / 2)


def test_plans_shrink_in_the_documented_order():
    plans = list(shrinking_plans(LARGEST))
    seconds = [plan.seconds(COSTS, 1) for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    first_change = {}
    for former, plan in itertools.pairwise(plans):
        for name in ("num_candidates", "num_draws", "num_finalists", "seeds", "rounds", "methods"):
            if getattr(former, name) != getattr(plan, name):
                first_change.setdefault(name, len(first_change))
    assert list(first_change) == ["num_candidates", "num_finalists", "num_draws", "seeds", "rounds", "methods"]
    # Draws outlast the search for settings: one draw of few images would choose methods by chance.
    assert min(plan.num_draws for plan in plans if plan.num_candidates > 1) == 3
    smallest = plans[-1]
    assert {"standalone", "fedavg", "perada"} == set(smallest.methods)
    assert (smallest.num_candidates, smallest.num_draws, smallest.seeds, smallest.rounds) == (1, 1, (0,), 5)
    # A method is left out before runs have less than a third of the rounds.
    assert min(plan.rounds for plan in plans if plan.methods == METHODS) == 10


@pytest.mark.parametrize("rounds", [1, 4, 5, 6, 7, 15, 16, 200])
def test_no_plan_has_more_rounds_than_the_recipe_or_fewer_than_five_of_them(rounds):
    found = [plan.rounds for plan in shrinking_plans(replace(LARGEST, rounds=rounds))]
    assert found == sorted(found, reverse=True)
    assert found[0] == rounds
    assert found[-1] == min(rounds, 5)


@pytest.mark.parametrize("minutes", [8, 15, 30, 120, 600])
def test_the_plan_fits_and_a_larger_one_would_not(minutes):
    plan = fit_plan(LARGEST, COSTS, 60 * minutes, jobs=1)
    assert plan.seconds(COSTS, 1) <= 60 * minutes
    plans = list(shrinking_plans(LARGEST))
    place = plans.index(plan)
    assert all(larger.seconds(COSTS, 1) > 60 * minutes for larger in plans[:place])


def test_a_search_grows_by_draws_and_then_by_settings():
    small = replace(LARGEST, num_candidates=3, num_draws=2)
    sizes = [(plan.num_candidates, plan.num_draws) for plan in growing_plans(small, LARGEST)]
    assert sizes == [(3, 5), (3, 4), (3, 3), (27, 2), (18, 2), (12, 2), (9, 2), (6, 2)]


def test_no_plan_fits_into_no_time():
    assert fit_plan(LARGEST, COSTS, 1.0, jobs=1) is None


def test_the_last_rung_loses_methods_before_seeds():
    sizes = [(plan.num_finalists, len(plan.seeds)) for plan in final_plans(LARGEST, (0, 1, 2))]
    assert sizes[:4] == [(6, 3), (5, 3), (4, 3), (3, 3)]
    assert sizes[-1] == (3, 1)
    assert [seeds for _, seeds in sizes] == sorted([seeds for _, seeds in sizes], reverse=True)


def test_few_held_out_images_are_drawn_several_times():
    assert [num_draws_for(count) for count in (5000, 711, 400, 10, 0)] == [1, 2, 2, 5, 5]
    # The standard error of a share of 80 % over all draws is at most 1.5 points, unless that takes more than five.
    for count in (150, 200, 400, 800):
        assert 0.4 / math.sqrt(count * num_draws_for(count)) <= 0.0151
