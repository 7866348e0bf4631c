# SPDX-License-Identifier: Apache-2.0
"""Counts of predicted numbers, against numpy's histograms."""

import numpy as np
import pytest
import torch

from perada.core.ranks import Ranks
from perada.scores.number_counts import BINS, NumberCounts
from perada.tasks import Keypoints, Regression


@pytest.mark.parametrize("targets", [1, 2])
def test_counts_are_those_of_numpy(targets):
    random = torch.Generator().manual_seed(0)
    y = 50 + 10 * torch.randn(300, targets, generator=random)
    outputs = (y - 50) / 10 + 0.3 * torch.randn(300, targets, generator=random)
    owner = torch.arange(300) % 3
    counts = NumberCounts(Regression(mean=50, std=10))
    for rows in torch.arange(300).split(64):
        counts.update(outputs[rows], y[rows], owner[rows])
    records = counts.record(Ranks())["numbers"]
    assert len(records) == targets
    for place, record in enumerate(records):
        truth = y[:, place].double().numpy()
        predicted = (50 + 10 * outputs[:, place]).double().numpy()
        edges = np.array(record["edges"])
        span = truth.max() - truth.min()
        assert edges[[0, -1]] == pytest.approx([truth.min() - 0.1 * span, truth.max() + 0.1 * span])
        inside = np.clip(predicted, edges[0], edges[-1])
        expected, _, _ = np.histogram2d(truth, inside, bins=[edges, edges])
        assert np.array_equal(record["counts"], expected)
        residuals = predicted - truth
        residual_edges = np.array(record["residual_edges"])
        assert residual_edges[[0, -1]] == pytest.approx(
            np.quantile(np.abs(residuals), 0.99) * np.array([-1, 1]), rel=1e-5
        )
        inside = np.clip(residuals, residual_edges[0], residual_edges[-1])
        assert np.array_equal(record["residual_counts"], np.histogram(inside, residual_edges)[0])
        assert record["residual_mean"] == pytest.approx(residuals.mean(), abs=1e-4)
        assert record["residual_std"] == pytest.approx(residuals.std(), rel=1e-4)


def test_only_counted_predictions_count():
    outputs = torch.tensor([[1.0], [float("nan")], [3.0]])
    counts = NumberCounts(Regression())
    counts.update(outputs, torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3, dtype=torch.int64), torch.arange(3) != 1)
    (record,) = counts.record(Ranks())["numbers"]
    assert sum(record["residual_counts"]) == 2
    assert record["residual_mean"] == pytest.approx(-0.5)


def test_unknown_true_values_are_left_out():
    """Of coordinates, some images or all may have no value."""
    nan = float("nan")
    y = torch.tensor([[nan, nan, 5.0, nan], [4.0, 6.0, 7.0, nan], [1.0, 2.0, 3.0, nan]])
    counts = NumberCounts(Keypoints(8))
    outputs = torch.tensor([[0.0, 0.25, -0.5, 0.0]]).expand(3, 4)  # pixels 3.5, 4.5, 1.5 and 3.5
    counts.update(outputs, y, torch.zeros(3, dtype=torch.int64))
    records = counts.record(Ranks())["numbers"]
    assert [sum(record["residual_counts"]) for record in records] == [2, 2, 3, 0]
    assert [sum(map(sum, record["counts"])) for record in records] == [2, 2, 3, 0]
    assert [record["residual_mean"] for record in records] == pytest.approx([1.0, 0.5, -3.5, 0.0])


def test_predictions_that_are_not_finite_are_counted_and_nothing_else():
    """Bins of the other predictions would look like those of the model."""
    outputs = torch.tensor([[1.0], [float("nan")], [3.0], [float("inf")]])
    counts = NumberCounts(Regression())
    counts.update(outputs, torch.arange(4.0), torch.zeros(4, dtype=torch.int64))
    assert counts.record(Ranks()) == {"failed_images": 2}


class TwoProcesses:
    """Ranks of which another process has counted some batches, too."""

    def __init__(self, batches_of_other):
        self.batches_of_other = batches_of_other

    def gather(self, batches):
        return [batches, self.batches_of_other]


def test_counts_of_two_processes_are_those_of_all_images():
    random = torch.Generator().manual_seed(1)
    y = torch.randn(40, 1, generator=random)
    outputs = y + torch.randn(40, 1, generator=random)
    owner = torch.zeros(40, dtype=torch.int64)
    together = NumberCounts(Regression())
    together.update(outputs, y, owner)
    first = NumberCounts(Regression())
    first.update(outputs[:25], y[:25], owner[:25])
    assert first.record(TwoProcesses([(outputs[25:], y[25:])])) == together.record(Ranks())


def test_equal_targets_and_no_images():
    counts = NumberCounts(Regression())
    assert counts.record(Ranks()) == {"numbers": []}
    counts.update(torch.full((3, 1), 7.0), torch.full((3,), 7.0), torch.zeros(3, dtype=torch.int64))
    (record,) = counts.record(Ranks())["numbers"]
    assert record["edges"][0] == pytest.approx(6)
    assert record["edges"][-1] == pytest.approx(8)
    assert np.array(record["counts"])[BINS // 2, BINS // 2] == 3
    assert record["residual_std"] == 0
