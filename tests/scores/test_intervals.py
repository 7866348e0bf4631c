# SPDX-License-Identifier: Apache-2.0
"""Intervals of scores against closed forms, scipy and statistics by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from perada.scores.intervals import (
    GroupSums,
    bootstrap_interval,
    paired_share_interval,
    ratio,
    share_interval,
    standard_error_of_sums,
    student_interval,
    sum_groups,
)


def hits_of(right, total):
    return torch.tensor([[1.0, 1.0]] * right + [[0.0, 1.0]] * (total - right))


@pytest.mark.parametrize(("right", "total"), [(0, 12), (7, 9), (30, 40), (40, 40)])
def test_accuracy_of_single_images_has_wilsons_interval(right, total):
    expected = stats.binomtest(right, total).proportion_ci(0.95, "wilson")
    assert share_interval(GroupSums.of(hits_of(right, total))) == pytest.approx((expected.low, expected.high))


def test_images_of_a_patient_count_as_one():
    # Each patient's four images are all right or all wrong.
    patients = np.repeat(np.arange(30), 4)
    images = hits_of(24, 30).repeat_interleave(4, 0)
    grouped = share_interval(GroupSums.of(sum_groups(images, patients)))
    # The effective number of images is that of patients, but for the factors n / (n - 1).
    expected = stats.binomtest(24, 30).proportion_ci(0.95, "wilson")
    assert grouped == pytest.approx((expected.low, expected.high), abs=0.004)
    all_right = share_interval(GroupSums.of(sum_groups(hits_of(120, 120), patients)))
    assert all_right.low == pytest.approx(stats.binomtest(30, 30).proportion_ci(0.95, "wilson").low)


def test_standard_error_is_that_of_a_ratio_estimator():
    random = np.random.default_rng(0)
    sums = torch.from_numpy(random.integers(1, 9, (25, 2))).double()
    numerators, denominators = sums.T.numpy()
    value = numerators.sum() / denominators.sum()
    residuals = numerators - value * denominators
    expected = math.sqrt(25 / 24 * (residuals**2).sum()) / denominators.sum()
    assert standard_error_of_sums(ratio, GroupSums.of(sums)) == pytest.approx(expected, rel=1e-7)


def test_sums_of_classes_that_do_not_occur_have_no_influence():
    def mean_of_classes(sums):
        hits, images = sums.chunk(2, -1)
        return (hits / images).nanmean(-1)

    groups = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    expected = standard_error_of_sums(ratio, GroupSums.of(groups[:, [0, 2]]))
    assert standard_error_of_sums(mean_of_classes, GroupSums.of(groups)) == pytest.approx(expected)


def test_paired_interval_is_that_of_bonett_and_price():
    first_only, second_only, both = 9, 3, 48
    differences = torch.tensor([[1.0, 1.0]] * first_only + [[-1.0, 1.0]] * second_only + [[0.0, 1.0]] * both)
    total = first_only + second_only + both
    p12 = (first_only + 1) / (total + 2)
    p21 = (second_only + 1) / (total + 2)
    error = math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (total + 2))
    expected = (p12 - p21 - 1.96 * error, p12 - p21 + 1.96 * error)
    assert paired_share_interval(GroupSums.of(differences)) == pytest.approx(expected, abs=0.002)


def test_bootstrap_is_scipys_of_groups():
    random = np.random.default_rng(1)
    values = random.gamma(1.0, 1.0, 40)
    sums = torch.from_numpy(np.stack([values, np.ones(40)], 1))
    expected = stats.bootstrap((values,), np.mean, method="BCa", n_resamples=20_000, random_state=2)
    ours = bootstrap_interval(sums, ratio, seed=0, resamples=20_000)
    assert ours == pytest.approx(tuple(expected.confidence_interval), rel=0.03)
    assert ours == bootstrap_interval(sums, ratio, seed=0, resamples=20_000)


@pytest.mark.parametrize("rows", [1, 20])
def test_no_interval_pretends_certainty(rows):
    equal = torch.tensor([[0.5, 1.0]] * rows)
    assert all(map(math.isnan, bootstrap_interval(equal, ratio, seed=0)))
    error = standard_error_of_sums(ratio, GroupSums.of(equal))
    assert all(map(math.isnan, student_interval(0.5, error, rows)))


def test_many_groups_take_percentiles():
    random = torch.Generator().manual_seed(0)
    values = torch.rand(2001, generator=random, dtype=torch.float64)
    interval = bootstrap_interval(torch.stack([values, torch.ones_like(values)], 1), ratio, seed=0)
    error = float(values.std()) / math.sqrt(2001)
    assert interval == pytest.approx(
        (float(values.mean()) - 1.96 * error, float(values.mean()) + 1.96 * error), rel=0.01
    )
