# SPDX-License-Identifier: Apache-2.0
"""Differences between rows of a comparison, against SciPy's paired tests, hand calculations and simulated scores."""

import math

import numpy as np
import pytest
from scipy import stats

from perada.studies.compare.differences import correct_p_values, difference, holm, seed_variance


def test_one_seed_is_the_paired_t_test_over_clients():
    random = np.random.default_rng(0)
    first = random.normal(0.8, 0.1, (1, 12))
    second = random.normal(0.7, 0.1, (1, 12))
    entry = difference("a", "b", first, second)
    reference = stats.ttest_rel(first[0], second[0])
    interval = reference.confidence_interval(0.95)
    assert entry.mean == pytest.approx((first - second).mean())
    assert entry.p_value == pytest.approx(reference.pvalue)
    assert [entry.low, entry.high] == pytest.approx([interval.low, interval.high])


def test_one_client_is_the_paired_t_test_over_seeds():
    random = np.random.default_rng(1)
    first = random.normal(0.8, 0.1, (5, 1))
    second = random.normal(0.7, 0.1, (5, 1))
    entry = difference("a", "b", first, second)
    reference = stats.ttest_rel(first[:, 0], second[:, 0])
    interval = reference.confidence_interval(0.95)
    assert entry.p_value == pytest.approx(reference.pvalue)
    assert [entry.low, entry.high] == pytest.approx([interval.low, interval.high])


def mean_squares(differences):
    """The mean squares of seeds, clients and the rest in a two-way analysis of variance of 4 seeds and 6 clients."""
    grand = sum(sum(row) for row in differences.tolist()) / 24
    of_seeds = [sum(row) / 6 for row in differences.tolist()]
    of_clients = [sum(row[client] for row in differences.tolist()) / 4 for client in range(6)]
    square_of_seeds = 6 * sum((mean - grand) ** 2 for mean in of_seeds) / 3
    square_of_clients = 4 * sum((mean - grand) ** 2 for mean in of_clients) / 5
    rest = 0.0
    for seed in range(4):
        for client in range(6):
            rest += (differences[seed, client] - of_seeds[seed] - of_clients[client] + grand) ** 2
    return square_of_seeds, square_of_clients, rest / 15


def test_seeds_and_clients_are_two_random_factors():
    """The mean squares of a two-way analysis of variance, written as loops over the cells of the table."""
    random = np.random.default_rng(2)
    seeds = random.normal(0, 0.02, (4, 1))
    clients = random.normal(0, 0.05, (1, 6))
    differences = 0.03 + seeds + clients + random.normal(0, 0.01, (4, 6))
    grand = differences.mean()
    square_of_seeds, square_of_clients, square_of_rest = mean_squares(differences)
    variance = (square_of_seeds + square_of_clients - square_of_rest) / 24
    degrees = variance**2 / (
        (square_of_seeds / 24) ** 2 / 3 + (square_of_clients / 24) ** 2 / 5 + (square_of_rest / 24) ** 2 / 15
    )
    entry = difference("a", "b", differences, np.zeros((4, 6)))
    half_width = stats.t.ppf(0.975, degrees) * math.sqrt(variance)
    assert [entry.low, entry.high] == pytest.approx([grand - half_width, grand + half_width])


def test_clients_that_differ_hardly_more_than_single_scores_do_not_widen_the_interval_without_bound():
    """Satterthwaite's formula alone gives less than one degree of freedom here: intervals of thousands of points."""
    random = np.random.default_rng(5)
    num_tried = 0
    num_below_one = 0
    while num_tried < 20:
        scores = random.normal(0, 0.05, (4, 6))
        scores -= 0.95 * scores.mean(1, keepdims=True)  # seeds that hardly differ
        square_of_seeds, square_of_clients, square_of_rest = mean_squares(scores)
        if not 1 < square_of_clients / square_of_rest < 1.3:
            continue
        num_tried += 1
        variance = (square_of_seeds + square_of_clients - square_of_rest) / 24
        spread = square_of_seeds**2 / 3 + square_of_clients**2 / 5 + square_of_rest**2 / 15
        num_below_one += (24 * variance) ** 2 / spread < 1
        entry = difference("a", "b", 0.3 + scores, np.zeros((4, 6)))
        # The seeds have three degrees of freedom, the clients five.
        assert entry.high - entry.mean == pytest.approx(stats.t.ppf(0.975, 3) * math.sqrt(variance))
        assert entry.is_significant
    assert num_below_one > 10


def test_holms_correction():
    # Holm by hand: the smallest times 4, the next times 3, and none below one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("num_better", "expected"), [(1, 0.00635), (6, 1.0), (12, 0.000488)])
def test_the_sign_test_counts_the_clients(num_better, expected):
    """Twice the tail of the binomial distribution of 12 fair coins: 2 · 13 / 4096 for 1 of 12."""
    first = np.where(np.arange(12) < num_better, 0.9, 0.5)[None]
    entry = difference("a", "b", first, np.full((1, 12), 0.7))
    assert (entry.num_better, entry.num_worse) == (num_better, 12 - num_better)
    assert entry.sign_p_value == pytest.approx(expected, abs=5e-6)


def test_ties_count_for_neither_side():
    entry = difference("a", "b", np.array([[0.5, 0.6, 0.7]]), np.array([[0.5, 0.5, 0.8]]))
    assert (entry.num_better, entry.num_worse, entry.sign_p_value) == (1, 1, 1.0)
    # Three clients of four are better, and one is equal: three fair coins agree with probability 1/4.
    entry = difference("a", "b", np.array([[0.6, 0.7, 0.8, 0.5]]), np.full((1, 4), 0.5))
    assert (entry.num_better, entry.num_worse) == (3, 0)
    assert entry.sign_p_value == pytest.approx(1 / 4)


def test_lower_errors_are_better():
    first = np.array([[3.0, 4.0, 5.0]])
    second = np.array([[4.0, 6.0, 6.0]])
    entry = difference("a", "b", first, second, lower_is_better=True)
    assert entry.mean == pytest.approx(4 / 3)
    assert entry.num_better == 3


def test_rows_that_are_equal_do_not_differ():
    scores = np.full((3, 4), 0.5)
    entry = difference("a", "b", scores, scores)
    assert (entry.mean, entry.low, entry.high, entry.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert not entry.is_significant


def test_one_score_tells_nothing():
    entry = difference("a", "b", np.array([[0.9]]), np.array([[0.1]]))
    assert math.isnan(entry.low)
    assert not entry.is_significant


def test_what_a_seed_changes_in_all_rows_is_no_noise():
    random = np.random.default_rng(3)
    first = random.normal(size=(4, 5))
    second = random.normal(size=(4, 5))
    division = random.normal(size=(4, 1)) * 10
    assert seed_variance([first + division, second + division]) == pytest.approx(seed_variance([first, second]))
    assert math.isnan(seed_variance([first]))
    assert math.isnan(seed_variance([first[:1], second[:1]]))


@pytest.mark.parametrize("noise", ["global model", "clients' models", "seeds of some rows"])
def test_rows_of_one_method_are_seldom_told_apart(noise):
    """Of 400 comparisons of five equal rows, the best one seems better than another in at most 5 % and their error."""
    random = np.random.default_rng(4)
    num_told_apart = 0
    for _ in range(400):
        rows = []
        for number in range(5):
            seeds = random.normal(size=(3, 1)) * (3 if noise == "seeds of some rows" and number < 2 else 1)
            clients = random.normal(size=(3, 8))
            rows.append(0.1 * seeds + clients if noise == "clients' models" else seeds + 0.3 * clients)
        pooled = seed_variance(rows)
        best = max(rows, key=lambda scores: scores.mean())
        entries = []
        for scores in rows:
            if scores is not best:
                entry = difference("best", "other", best, scores, pooled_seed_variance=pooled, num_rows=5)
                entries.append(entry)
        num_told_apart += any(entry.is_significant for entry in correct_p_values(entries))
    # The 99.9 % quantile of a binomial with 400 draws of 5 % is 34.
    assert num_told_apart <= 34
