# SPDX-License-Identifier: Apache-2.0
"""AUROC and DeLong's variance against a double loop over pairs, a bootstrap and scikit-learn."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from perada.scores.auroc import (
    auroc,
    auroc_interval,
    auroc_of_histograms,
    mean_auroc,
    score_bins,
)


def images_of(seed, num_images=60, num_models=2):
    """Scores (models, images) in [0, 1] with ties, and labels, of which models know something."""
    random = np.random.default_rng(seed)
    labels = random.random(num_images) < 0.4
    logits = random.normal(labels * 1.2, 1.0, (num_models, num_images))
    return (1 / (1 + np.exp(-logits))).round(2), labels


def auroc_by_pairs(scores, labels):
    """AUROC as the share of pairs in the right order; faster than scikit-learn's for few images without ties."""
    return np.mean(scores[labels][:, None] > scores[~labels]) + 0.5 * np.mean(
        scores[labels][:, None] == scores[~labels]
    )


def win(positive, negative):
    return 1.0 if positive > negative else 0.5 if positive == negative else 0.0


def delong_by_loops(scores, labels):
    """AUROC (M,) and covariance (M, M) as in DeLong et al. (1988), with a loop over all pairs."""
    values, placements_of_positives, placements_of_negatives = [], [], []
    for model_scores in scores:
        positives, negatives = model_scores[labels], model_scores[~labels]
        wins = [[win(x, y) for y in negatives] for x in positives]
        values.append(sum(map(sum, wins)) / (len(positives) * len(negatives)))
        placements_of_positives.append([sum(row) / len(negatives) for row in wins])
        placements_of_negatives.append([sum(row[j] for row in wins) / len(positives) for j in range(len(negatives))])
    covariance = np.zeros((len(scores), len(scores)))
    for a in range(len(scores)):
        for b in range(len(scores)):
            for placements in (placements_of_positives, placements_of_negatives):
                count = len(placements[a])
                products = [
                    (x - values[a]) * (y - values[b]) for x, y in zip(placements[a], placements[b], strict=True)
                ]
                covariance[a, b] += sum(products) / (count - 1) / count
    return values, covariance


@pytest.mark.parametrize("seed", range(3))
def test_variance_and_covariance_are_those_of_a_double_loop(seed):
    scores, labels = images_of(seed)
    values, covariance = delong_by_loops(scores, labels)
    first, second = (auroc(each, labels) for each in scores)
    assert [first.value, second.value] == pytest.approx(values, rel=1e-12)
    assert first.value == pytest.approx(roc_auc_score(labels, scores[0]), rel=1e-12)
    assert first.standard_error() ** 2 == pytest.approx(covariance[0, 0], rel=1e-10)
    of_difference = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    difference = first.minus(second)
    assert difference.value == pytest.approx(values[0] - values[1], abs=1e-12)
    assert difference.standard_error() ** 2 == pytest.approx(of_difference, rel=1e-10)


def test_variance_is_that_of_a_bootstrap():
    scores, labels = images_of(7, num_images=300)
    random = np.random.default_rng(1)
    draws = []
    for _ in range(2000):
        rows = random.integers(0, len(labels), len(labels))
        draws.append([auroc_by_pairs(each[rows], labels[rows]) for each in scores])
    first, second = (auroc(each, labels) for each in scores)
    deviations = np.std(draws, axis=0)
    # The standard error of a standard deviation of 2,000 draws is 1.6 %.
    assert first.standard_error() == pytest.approx(deviations[0], rel=0.06)
    assert first.minus(second).standard_error() == pytest.approx(np.std(np.diff(draws)), rel=0.06)


def test_images_of_a_patient_count_together():
    scores, labels = images_of(3, num_images=80)
    # Each image three times: the variance must be that of single images, and not a third of it.
    patients = np.repeat(np.arange(80), 3)
    single = auroc(scores[0], labels)
    tripled = auroc(np.repeat(scores[0], 3), np.repeat(labels, 3), patients)
    assert tripled.value == pytest.approx(single.value)
    assert tripled.standard_error(patients) == pytest.approx(single.standard_error(), rel=1e-10)
    assert tripled.fewest == single.fewest == min(labels.sum(), (~labels).sum())


def test_mean_over_classes_has_the_variance_of_a_bootstrap():
    random = np.random.default_rng(5)
    classes = random.integers(0, 3, 400)
    scores = random.normal(np.eye(3)[classes], 1.0)
    draws = []
    for _ in range(1000):
        rows = random.integers(0, 400, 400)
        draws.append(np.mean([auroc_by_pairs(scores[rows, k], classes[rows] == k) for k in range(3)]))
    mean = mean_auroc([auroc(scores[:, k], classes == k) for k in range(3)])
    assert mean.standard_error() == pytest.approx(np.std(draws), rel=0.08)


def test_histograms_give_the_same_as_binned_scores_and_nearly_the_same_as_scores():
    scores, labels = images_of(4, num_images=500)
    bins = [score_bins(each) for each in scores]
    positives, negatives = (np.bincount(bins[0][rows], minlength=4096) for rows in (labels, ~labels))
    pooled = auroc_of_histograms(positives, negatives)
    of_bins = auroc(bins[0].astype(float), labels)
    assert pooled.value == pytest.approx(of_bins.value, rel=1e-12)
    assert pooled.standard_error() == pytest.approx(of_bins.standard_error(), rel=1e-12)
    exact = auroc(scores[0], labels)
    assert pooled.value == pytest.approx(exact.value, abs=0.002)


def test_intervals_stay_between_0_and_1_and_have_a_width():
    assert auroc_interval(1.0, 0.0, 10) == pytest.approx((0.025 ** (1 / 10), 1.0))
    assert auroc_interval(0.0, 0.0, 10) == pytest.approx((0.0, 1 - 0.025 ** (1 / 10)))
    low, high = auroc_interval(0.99, 0.05, 10)
    assert 0 < low < 0.99 < high < 1


@pytest.mark.parametrize("labels", [np.ones(4, dtype=bool), np.zeros(4, dtype=bool)])
def test_a_single_class_has_no_auroc(labels):
    undefined = auroc(np.arange(4.0), labels)
    assert math.isnan(undefined.value)
    assert undefined.fewest == 0
    assert all(map(math.isnan, auroc_interval(undefined.value, undefined.standard_error(), 0)))
