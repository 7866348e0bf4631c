# SPDX-License-Identifier: Apache-2.0
"""Options of the losses and unknown labels, against torch's own losses and plain formulas."""

import math

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.nn import functional as F

from perada.core.checks import OptionError
from perada.tasks import Classification, MultiLabel

CLASSES = 3
RANDOM = torch.Generator().manual_seed(5)
LOGITS = torch.randn(7, CLASSES, generator=RANDOM, dtype=torch.float64)
CLASS_OF_IMAGE = torch.tensor([0, 0, 0, 1, 2, 2, 0])
LABELS = torch.tensor(
    [[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1], [0, 0, 1]], dtype=torch.float64
)
WEIGHTS = [0.5, 2.0, 3.0]


def probability(row, label):
    """Softmax in plain Python."""
    exponentials = [math.exp(value) for value in row.tolist()]
    return exponentials[label] / sum(exponentials)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_smoothed_and_weighted_losses_are_those_of_the_definition(smoothing, weights):
    losses = Classification(label_smoothing=smoothing, class_weights=weights).loss(LOGITS, CLASS_OF_IMAGE)
    factors = weights or [1.0] * CLASSES
    for row, label, loss in zip(LOGITS, CLASS_OF_IMAGE.tolist(), losses.tolist(), strict=True):
        negative_logs = [-factors[k] * math.log(probability(row, k)) for k in range(CLASSES)]
        expected = (1 - smoothing) * negative_logs[label] + smoothing * sum(negative_logs) / CLASSES
        assert loss == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_focal_loss_is_that_of_the_paper(gamma, weights):
    losses = Classification(focal_gamma=gamma, class_weights=weights).loss(LOGITS, CLASS_OF_IMAGE)
    factors = weights or [1.0] * CLASSES
    for row, label, loss in zip(LOGITS, CLASS_OF_IMAGE.tolist(), losses.tolist(), strict=True):
        p = probability(row, label)
        assert loss == pytest.approx(-factors[label] * (1 - p) ** gamma * math.log(p))


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_the_focal_loss_has_finite_gradients_for_certain_predictions(gamma):
    logits = torch.tensor([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0]], requires_grad=True)
    Classification(focal_gamma=gamma).loss(logits, torch.tensor([0, 0])).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().max() > 0.9  # a certain error has the gradient of the cross-entropy


def test_balanced_class_weights_are_scikit_learns():
    task = Classification(class_weights="balanced").fitted_to(CLASS_OF_IMAGE, CLASSES)
    expected = compute_class_weight("balanced", classes=np.arange(CLASSES), y=CLASS_OF_IMAGE.numpy())
    assert task.class_weights == pytest.approx(expected.tolist())
    assert not task.uses_all_targets


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_weighted_loss_of_labels_is_torchs(weights):
    pos_weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    losses = MultiLabel(positive_weights=weights).loss(LOGITS, LABELS)
    for logits, labels, loss in zip(LOGITS, LABELS, losses, strict=True):
        torch.testing.assert_close(loss, nn.BCEWithLogitsLoss(pos_weight=pos_weight)(logits, labels))


def test_balanced_positive_weights_count_known_labels_only():
    labels = LABELS.clone()
    labels[0, 0] = math.nan
    labels[1, 1] = -1
    task = MultiLabel(positive_weights="balanced").fitted_to(labels, CLASSES)
    # Label 0: 3 present, 3 absent; label 1: 3 present, 3 absent; label 2: 4 present, 3 absent.
    assert task.positive_weights == pytest.approx([1.0, 1.0, 3 / 4])


@pytest.mark.parametrize("unknown", [math.nan, -1.0])
def test_unknown_labels_take_no_part_in_the_loss(unknown):
    labels = LABELS.clone()
    labels[0, 1] = unknown
    labels[3] = unknown
    logits = LOGITS.clone().requires_grad_()
    losses = MultiLabel().loss(logits, labels)
    expected = F.binary_cross_entropy_with_logits(LOGITS[0, [0, 2]], LABELS[0, [0, 2]])
    torch.testing.assert_close(losses[0], expected)
    assert losses[3] == 0
    torch.testing.assert_close(losses[4:], MultiLabel().loss(LOGITS, LABELS)[4:])
    losses.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0 and not logits.grad[3].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classification(label_smoothing=1.0), r"label_smoothing .*got 1.0"),
        (lambda: Classification(label_smoothing=0.1, focal_gamma=2), "combined with focal_gamma=2"),
        (lambda: Classification(focal_gamma=-1), r"focal_gamma .*got -1"),
        (lambda: Classification(class_weights="inverse"), r"class_weights .*got 'inverse'"),
        (lambda: Classification(class_weights=[1.0, 0.0]), r"class_weights .*got 0.0"),
        (lambda: Classification(class_weights=[1.0]).check_classes(3), r"class_weights.*3 numbers"),
        (lambda: MultiLabel(positive_weights=[1.0] * 4).check_classes(3), r"positive_weights.*3"),
        (
            lambda: Classification(class_weights="balanced").fitted_to(torch.tensor([0, 0, 2]), 3),
            r"class_weights .*got 'balanced'.* class 1",
        ),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_tasks_with_the_same_options_are_equal():
    assert Classification(class_weights=[1, 2]) == Classification(class_weights=(1.0, 2.0))
    assert len({Classification(class_weights=[1, 2]), Classification(class_weights=(1.0, 2.0))}) == 1
