# SPDX-License-Identifier: Apache-2.0
"""Intervals of 95 % contain the true score at about 950 of 1,000 simulated sites, if these have enough images."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from perada.scores.auroc import auroc, auroc_difference_interval, auroc_interval
from perada.scores.intervals import (
    FEWEST,
    LEVEL,
    GroupSums,
    bootstrap_interval,
    paired_share_interval,
    ratio,
    share_interval,
    sum_groups,
)
from perada.scores.summed_scores import predictions_for, summed_scores
from perada.tasks import Classification

SITES = 1000
# Two standard deviations of a binomial share of 0.95.
ERROR = 2 * math.sqrt(LEVEL * (1 - LEVEL) / SITES)


def covered(interval, truth):
    return interval.low <= truth <= interval.high


def binormal(random, truth, positives, negatives, shared=0.0):
    """Scores (2, N) of two models with these AUROC, which share a part of their noise, and labels."""
    labels = np.arange(positives + negatives) < positives
    noise = random.normal(size=(2, len(labels)))
    common = random.normal(size=len(labels))
    scores = math.sqrt(1 - shared) * noise + math.sqrt(shared) * common
    return scores + np.outer(norm.ppf(truth) * math.sqrt(2), labels), labels


@pytest.mark.slow
@pytest.mark.parametrize("truth", [0.7, 0.8, 0.9])
@pytest.mark.parametrize(("positives", "negatives"), [(FEWEST, FEWEST), (FEWEST, 30), (20, 100), (50, 50)])
def test_auroc(truth, positives, negatives):
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(SITES):
        scores, labels = binormal(random, [truth, truth], positives, negatives)
        found = auroc(scores[0], labels)
        hits += covered(auroc_interval(found.value, found.standard_error(), found.fewest), truth)
    # With few images, intervals are wider than they would have to be.
    assert hits / SITES >= LEVEL - ERROR
    if positives == negatives == 50:
        assert hits / SITES <= LEVEL + ERROR + 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("positives", "negatives"), [(FEWEST, 30), (40, 40)])
def test_difference_of_auroc_on_the_same_images(positives, negatives):
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(SITES):
        scores, labels = binormal(random, [0.85, 0.75], positives, negatives, shared=0.6)
        difference = auroc(scores[0], labels).minus(auroc(scores[1], labels))
        hits += covered(auroc_difference_interval(difference, difference.standard_error()), 0.1)
    assert hits / SITES >= LEVEL - ERROR


@pytest.mark.slow
@pytest.mark.parametrize("images_per_patient", [1, 4])
def test_auroc_with_several_images_of_a_patient(images_per_patient):
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(SITES):
        patients = np.repeat(np.arange(60), images_per_patient)
        # The images of a patient have one label, and share half of the variance.
        (own, _), labels_of_patients = binormal(random, [0.8, 0.8], 30, 30)
        labels = labels_of_patients[patients]
        mean = norm.ppf(0.8) * math.sqrt(2) * labels
        of_patient = (own - norm.ppf(0.8) * math.sqrt(2) * labels_of_patients)[patients]
        scores = mean + math.sqrt(0.5) * (of_patient + random.normal(size=len(patients)))
        found = auroc(scores, labels, patients)
        hits += covered(auroc_interval(found.value, found.standard_error(patients), found.fewest), 0.8)
    assert abs(hits / SITES - LEVEL) <= ERROR + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("images_per_patient", [1, 3])
@pytest.mark.parametrize("truth", [0.7, 0.9])
def test_accuracy(truth, images_per_patient):
    random = np.random.default_rng(2)
    hits = 0
    for _ in range(SITES):
        # Beta-binomial: the accuracy differs between patients.
        shares = random.beta(4 * truth, 4 * (1 - truth), 40)
        right = random.random((40, images_per_patient)) < shares[:, None]
        sums = torch.tensor(np.stack([right.sum(1), np.full(40, images_per_patient)], 1)).double()
        hits += covered(share_interval(GroupSums.of(sums)), truth)
    assert abs(hits / SITES - LEVEL) <= ERROR + 0.01


@pytest.mark.slow
def test_difference_of_accuracies_on_the_same_images():
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(SITES):
        # The first model alone is right for 15 % of the images, the second alone for 5 %.
        difference = random.choice([1.0, -1.0, 0.0], 60, p=[0.15, 0.05, 0.8])
        sums = torch.tensor(np.stack([difference, np.ones(60)], 1))
        hits += covered(paired_share_interval(GroupSums.of(sums)), 0.1)
    assert abs(hits / SITES - LEVEL) <= ERROR + 0.01


@pytest.mark.slow
def test_bootstrap_of_the_brier_score_over_patients():
    generator = torch.Generator().manual_seed(0)
    brier = next(each for each in summed_scores(Classification(), 2) if each.name == "brier")

    def draw(num_patients):
        """Return the sums of patients with two images, whose predictions resemble each other."""
        patients = np.repeat(np.arange(num_patients), 2)
        targets = torch.randint(0, 2, (num_patients,), generator=generator)[patients]
        margins = torch.randn(num_patients, generator=generator)[patients] + torch.randn(
            len(patients), generator=generator
        )
        margins = margins + (2.0 * targets - 1)
        logits = torch.stack([-margins / 2, margins / 2], 1)
        return sum_groups(brier.summands(predictions_for(Classification(), logits), targets), patients)

    truth = float(ratio(draw(200_000).sum(0)))
    hits = sum(covered(bootstrap_interval(draw(50), ratio, seed=site), truth) for site in range(SITES))
    assert abs(hits / SITES - LEVEL) <= ERROR + 0.01
