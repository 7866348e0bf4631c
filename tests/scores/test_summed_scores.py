# SPDX-License-Identifier: Apache-2.0
"""Scores from sums over images against torchmetrics and scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, brier_score_loss
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error
from torchmetrics.functional.regression import mean_absolute_error

from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics
from perada.scores.summed_scores import predictions_for, summed_scores
from perada.tasks import Classification, MultiLabel, Regression, Segmentation

IMAGES = 200


def scores_of(task, num_classes, logits, targets):
    """The scores by name, from sums over images."""
    predictions = predictions_for(task, logits)
    return {
        each.name: float(each.score(each.summands(predictions, targets).sum(0)))
        for each in summed_scores(task, num_classes)
    }


@pytest.mark.parametrize("num_classes", [2, 5])
def test_classes(num_classes):
    random = torch.Generator().manual_seed(num_classes)
    logits = 2 * torch.randn(IMAGES, num_classes, generator=random)
    targets = torch.randint(0, num_classes, (IMAGES,), generator=random)
    probabilities = logits.double().softmax(1)
    predicted = logits.argmax(1)
    scores = scores_of(Classification(), num_classes, logits, targets)
    assert scores["accuracy"] == pytest.approx(accuracy_score(targets, predicted))
    assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(targets, predicted))
    assert scores["ece"] == pytest.approx(
        float(multiclass_calibration_error(probabilities, targets, num_classes, n_bins=15)), abs=1e-6
    )
    labels = list(range(num_classes))
    assert scores["brier"] == pytest.approx(brier_score_loss(targets, probabilities.numpy(), labels=labels))


def test_several_labels_of_which_some_are_unknown():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(IMAGES, 3, generator=random)
    targets = torch.randint(-1, 2, (IMAGES, 3), generator=random).float()
    targets[0, 0] = torch.nan
    is_known = targets >= 0
    probabilities = logits.double().sigmoid()[is_known]
    truth = targets[is_known].long()
    scores = scores_of(MultiLabel(), 3, logits, targets)
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, probabilities > 0.5))
    assert scores["brier"] == pytest.approx(brier_score_loss(truth, probabilities))
    assert scores["ece"] == pytest.approx(float(binary_calibration_error(probabilities, truth, n_bins=15)), abs=1e-6)


def test_certain_predictions_are_in_the_last_bin():
    logits = torch.tensor([[100.0, 0.0], [100.0, 0.0]])
    assert scores_of(Classification(), 2, logits, torch.tensor([0, 1]))["ece"] == 0.5


def test_numbers():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(IMAGES, 2, generator=random)
    targets = torch.randn(IMAGES, 2, generator=random)
    task = Regression(mean=(1.0, 2.0), std=(3.0, 4.0))
    scores = scores_of(task, 2, logits, targets)
    predicted = logits.double() * torch.tensor([3.0, 4.0]) + torch.tensor([1.0, 2.0])
    expected = np.mean([float(mean_absolute_error(predicted[:, d], targets[:, d].double())) for d in range(2)])
    assert scores["mae"] == pytest.approx(expected)
    assert set(scores) == {"mae", "rmse"}


def test_masks_have_the_scores_of_a_run():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 6, 6, 3, generator=random)
    targets = torch.randint(0, 3, (12, 6, 6), generator=random)
    scores = scores_of(Segmentation(), 3, logits, targets)
    of_run = Scores(make_metrics(["dice", "miou"], Segmentation(), 3), Segmentation())
    of_run.update(logits.unsqueeze(0), targets)
    assert scores == pytest.approx({name: float(value) for name, value in of_run.means().items()})
