# SPDX-License-Identifier: Apache-2.0
"""Confusion and calibration counts, against torchmetrics and a plain loop."""

import math

import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix

from perada.core.ranks import Ranks
from perada.scores.accumulation import BINS, Tally
from perada.tasks import Classification, MultiLabel


def test_counts_are_those_of_torchmetrics():
    logits = 2 * torch.randn(200, 4)
    y = torch.randint(0, 4, (200,))
    owner = torch.randint(0, 3, (200,))
    tally = Tally(Classification())
    for rows in torch.arange(200).split(64):
        tally.update(logits[rows], y[rows], owner[rows])
    actual = tally.record(Ranks())
    counts = torch.zeros(3, 4, 4, dtype=torch.int64)
    for client, true, predicted, count in actual["confusion"]:
        counts[client, true, predicted] = count
    for client in range(3):
        is_owned = owner == client
        expected = multiclass_confusion_matrix(logits[is_owned].argmax(-1), y[is_owned], num_classes=4)
        assert torch.equal(counts[client], expected)
    count, right, confidence = (torch.tensor(actual["calibration"][name]) for name in ("count", "right", "confidence"))
    assert (counts.sum(), right.sum()) == (200, counts.diagonal(dim1=1, dim2=2).sum())
    error = (right - count * confidence).abs().sum() / count.sum()
    expected = multiclass_calibration_error(logits, y, num_classes=4, n_bins=BINS)
    assert error.item() == pytest.approx(expected.item(), abs=1e-5)


def test_only_what_is_counted_counts():
    logits = torch.randn(9, 3)
    y = torch.arange(9) % 3
    owner = torch.arange(9) % 2
    some = Tally(Classification())
    owned = Tally(Classification())
    some.update(logits, y, owner, owner == 1)
    owned.update(logits[1::2], y[1::2], owner[1::2])
    assert some.record(Ranks()) == owned.record(Ranks())


def test_each_label_is_a_prediction_of_its_own():
    logits = torch.randn(5, 3)
    y = torch.randint(0, 2, (5, 3)).float()
    tally = Tally(MultiLabel())
    tally.update(logits, y, torch.zeros(5, dtype=torch.int64))
    result = tally.record(Ranks())
    count = [0] * BINS
    right = [0] * BINS
    total = [0.0] * BINS
    for p, truth in zip(logits.sigmoid().flatten().tolist(), y.flatten().tolist(), strict=True):
        confidence = max(p, 1 - p)
        place = int(confidence * BINS)
        count[place] += 1
        right[place] += (p > 0.5) == bool(truth)
        total[place] += confidence
    assert result.keys() == {"calibration"}
    assert result["calibration"]["count"] == count
    assert result["calibration"]["right"] == right
    means = [one / max(1, n) for one, n in zip(total, count, strict=True)]
    assert result["calibration"]["confidence"] == pytest.approx(means, abs=1e-5)


def test_certainty_has_a_bin():
    tally = Tally(Classification())
    tally.update(torch.tensor([[1000.0, 0.0]]), torch.tensor([0]), torch.tensor([0]))
    assert tally.record(Ranks())["calibration"]["count"] == [*[0] * (BINS - 1), 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("task", [Classification(), MultiLabel()])
def test_outputs_that_are_not_finite_are_counted_and_nothing_else(task, value):
    """A calibration of the other images would look like that of the model."""
    tally = Tally(task)
    logits = torch.tensor([[1.0, 0.0], [value, 0.0], [value, value], [0.0, 2.0]])
    y = torch.tensor([0, 1, 1, 0]) if isinstance(task, Classification) else torch.ones(4, 2)
    owner = torch.zeros(4, dtype=torch.int64)
    tally.update(logits, y, owner)
    assert tally.record(Ranks()) == {"failed_images": 2}
    others = Tally(task)
    others.update(logits, y, owner, counted=torch.tensor([True, False, False, True]))
    assert sum(others.record(Ranks())["calibration"]["count"]) == 2 * (1 + isinstance(task, MultiLabel))


def test_counts_and_confidences_do_not_stop_growing():
    """Beyond 2**24, where float32 counts no further."""
    tally = Tally(Classification())
    tally.update(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), torch.tensor([0]))
    tally._bins *= 2**24
    tally.update(torch.tensor([[3.0, 0.0]] * 3), torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0]))
    result = tally.record(Ranks())["calibration"]
    assert sum(result["count"]) == 2**24 + 3
    assert sum(result["right"]) == 2**24 + 2
    assert max(result["confidence"]) == pytest.approx(float(torch.tensor([3.0, 0.0]).double().softmax(0)[0]), abs=1e-6)
