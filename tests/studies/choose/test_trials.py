# SPDX-License-Identifier: Apache-2.0
"""Held-out scores of settings, and the choice by them."""

import numpy as np
import pytest

from perada.studies.choose.candidates import METHODS, Candidate
from perada.studies.choose.trials import best_of, choose_method, lead, prefer_both_models, rank_candidates, read_scores
from perada.studies.compare.comparison import EVERYONE, MEAN, OWN

SELECTION_SCORES = ["personal/local_test", "personal/global_test"]


def record(personal, everyone, both=None, **fields):
    clients = {"personal/local_test": personal, "personal/global_test": everyone}
    if both is not None:
        clients["both/local_test"] = personal
        clients["both/global_test"] = both
    return {"clients": clients, "diverged": False, "chosen_by": SELECTION_SCORES, **fields}


def candidate(number=0, method="ditto"):
    return Candidate(method, number, {})


def held_out(mean, method="ditto", number=0, lower=False):
    prefix = "-" if lower else ""
    fields = {"chosen_by": [f"{prefix}{name}" for name in SELECTION_SCORES]}
    (scores,) = read_scores(candidate(number, method), 3, [record([mean], [mean], **fields)], MEAN)
    return scores


def test_scores_are_means_over_clients_and_draws_by_each_goal():
    records = [record([0.9, 0.7], [0.5, 0.3], both=[0.6, 0.8]), record([0.8, 0.6], [0.4, 0.2], both=[0.5, 0.5])]
    means = {}
    for goal in (OWN, EVERYONE, MEAN):
        for scores in read_scores(candidate(), 3, records, goal):
            means[goal, scores.way] = scores.mean
    assert means[OWN, "personal"] == pytest.approx(0.75)
    assert means[EVERYONE, "personal"] == pytest.approx(0.35)
    assert means[EVERYONE, "both"] == pytest.approx(0.6)
    assert means[MEAN, "personal"] == pytest.approx((0.75 + 0.35) / 2)
    assert means[MEAN, "both"] == pytest.approx((0.75 + 0.6) / 2)


@pytest.mark.parametrize(
    "broken", [{"failed": "ValueError: no"}, {"diverged": True}, {"failed_outputs": "the model of client 0 has none"}]
)
def test_a_setting_that_broke_on_one_draw_has_no_score(broken):
    records = [record([0.9], [0.9]), record([0.99], [0.99]) | broken]
    assert read_scores(candidate(), 3, records, MEAN) == []


def test_a_client_without_a_score_is_left_out_of_the_mean():
    (scores,) = read_scores(candidate(), 3, [record([0.9, None], [0.9, 0.1])], OWN)
    assert scores.mean == pytest.approx(0.9)


@pytest.mark.parametrize(("lower", "order"), [(False, [1, 2, 0]), (True, [0, 2, 1])])
def test_settings_are_ranked_by_the_direction_of_the_metric(lower, order):
    scores = [held_out(mean, number=number, lower=lower) for number, mean in enumerate([0.2, 0.8, 0.5])]
    assert [entry.number for entry in rank_candidates(scores)] == order
    assert best_of(scores).candidate.number == order[0]


@pytest.mark.parametrize(("everyone", "both"), [(0.1, 0.9), (0.9, 0.1)])
def test_a_setting_counts_by_its_best_way_to_predict_and_once(everyone, both):
    scored = record([0.5], [everyone], both=[both])
    scores = [*read_scores(candidate(0), 3, [scored], MEAN), held_out(0.6, number=1)]
    assert [entry.number for entry in rank_candidates(scores)] == [0, 1]


@pytest.mark.parametrize(
    ("goal", "everyone", "both", "way"),
    [
        # Personal models are ahead by 0.02 ± 0.04: chance may explain it.
        (EVERYONE, [0.30, 0.40, 0.35, 0.45], [0.35, 0.25, 0.42, 0.40], "both"),
        (MEAN, [0.30, 0.40, 0.35, 0.45], [0.35, 0.25, 0.42, 0.40], "both"),
        # By 0.10 ± 0.004.
        (EVERYONE, [0.30, 0.40, 0.35, 0.45], [0.20, 0.31, 0.25, 0.34], "personal"),
        # Both models are ahead.
        (EVERYONE, [0.30, 0.40, 0.35, 0.45], [0.50, 0.60, 0.55, 0.65], "both"),
        (OWN, [0.30, 0.40, 0.35, 0.45], [0.50, 0.60, 0.55, 0.65], "personal"),
    ],
)
def test_both_models_are_taken_unless_personal_ones_are_clearly_better(goal, everyone, both, way):
    own = [0.9, 0.8, 0.9, 0.8]
    scores = read_scores(candidate(), 3, [record(own, everyone, both=both)], goal)
    best = best_of(scores)
    assert prefer_both_models(best, scores, goal).way == way


def test_both_models_of_another_setting_are_not_taken():
    chosen = read_scores(candidate(0), 3, [record([0.9, 0.8], [0.9, 0.8])], EVERYONE)
    other = read_scores(candidate(1), 3, [record([0.9, 0.8], [0.1, 0.1], both=[0.89, 0.8])], EVERYONE)
    scores = chosen + other
    assert prefer_both_models(best_of(scores), scores, EVERYONE).candidate.number == 0


def test_of_equal_methods_the_simplest_is_chosen():
    best = {method: held_out(0.5, method) for method in reversed(METHODS)}
    assert choose_method(best).candidate.method == "standalone"
    best["ditto"] = held_out(0.51, "ditto")
    assert choose_method(best).candidate.method == "ditto"


def test_the_lead_is_paired_by_client_and_its_error_covers_them():
    first = np.array([0.9, 0.6, 0.8, 0.7])
    second = first - np.array([0.1, 0.2, 0.1, 0.0])
    (better,) = read_scores(candidate(0), 3, [record(first.tolist(), first.tolist())], MEAN)
    (worse,) = read_scores(candidate(1), 3, [record(second.tolist(), second.tolist())], MEAN)
    difference = lead(better, worse)
    assert difference.mean == pytest.approx(0.1)
    # With one draw, that of a paired t-test.
    assert difference.standard_error == pytest.approx((first - second).std(ddof=1) / 2)
    assert lead(worse, better).mean == pytest.approx(-0.1)


def test_a_lead_is_positive_where_errors_are_smaller():
    difference = lead(held_out(2.0, number=0, lower=True), held_out(3.5, number=1, lower=True))
    assert difference.mean == pytest.approx(1.5)
