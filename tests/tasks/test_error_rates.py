# SPDX-License-Identifier: Apache-2.0
"""How wrong the prediction for an image is, by plain loops."""

import pytest
import torch

from perada.tasks import Classification, MultiLabel, Regression, Segmentation

RANDOM = torch.Generator().manual_seed(0)


def test_of_a_class_it_is_zero_or_one():
    logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    assert Classification().error_rates(logits, torch.tensor([1, 1])).tolist() == [0, 1]


def test_of_labels_it_is_the_share_of_known_ones_that_are_wrong():
    logits = torch.randn(20, 5, generator=RANDOM)
    targets = torch.randint(-1, 2, (20, 5), generator=RANDOM).float()
    targets[0] = -1
    for image, rate in enumerate(MultiLabel().error_rates(logits, targets).tolist()):
        known = [label for label in range(5) if targets[image, label] >= 0]
        wrong = [label for label in known if (logits[image, label] > 0) != (targets[image, label] == 1)]
        assert rate == pytest.approx(len(wrong) / max(1, len(known)))


def test_of_a_mask_it_is_the_share_of_foreground_that_is_wrong():
    logits = torch.randn(6, 4, 5, 3, generator=RANDOM)
    targets = torch.randint(3, (6, 4, 5), generator=RANDOM)
    targets[:, 0] = 255
    targets[5] = 0
    logits[5, ..., 0] = 99.0
    for image, rate in enumerate(Segmentation().error_rates(logits, targets).tolist()):
        foreground = wrong = 0
        for row in range(4):
            for column in range(5):
                target = int(targets[image, row, column])
                predicted = int(logits[image, row, column].argmax())
                if target != 255 and (target or predicted):
                    foreground += 1
                    wrong += target != predicted
        assert rate == pytest.approx(wrong / max(1, foreground))
    assert rate == 0


def test_of_numbers_it_is_the_squared_error_in_variances():
    task = Regression(mean=10.0, std=2.0)
    rates = task.error_rates(torch.tensor([[0.0], [0.5], [9.0]]), torch.tensor([10.0, 12.0, 10.0]))
    assert rates.tolist() == [0, 0.25, 1]
