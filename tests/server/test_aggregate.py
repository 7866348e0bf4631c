# SPDX-License-Identifier: Apache-2.0
"""Means over the client axis."""

import math

import numpy as np
import pytest
import torch

from perada.core.ranks import Ranks
from perada.server import Updates, client_weights, mean
from tests.rejections import rejects


def test_weights_are_equal_or_shares_of_the_samples():
    assert client_weights("uniform", [1, 100, 7]).tolist() == pytest.approx([1 / 3] * 3)
    assert client_weights("samples", [1, 100, 7]).tolist() == pytest.approx([1 / 108, 100 / 108, 7 / 108])


def test_unknown_weighting_is_rejected():
    with rejects("weighting", "size"):
        client_weights("size", [1])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_mean_equals_numpys(weighting):
    updates = {"w": torch.randn(4, 3, 2), "scalar": torch.randn(4), "seen": torch.tensor([3, 9, 1, 0])}
    samples = [5, 1, 8, 30]
    out = mean(updates, client_weights(weighting, samples))
    share = None if weighting == "uniform" else samples
    for key in ("w", "scalar"):
        expected = np.average(updates[key].double().numpy(), axis=0, weights=share)
        torch.testing.assert_close(out[key].double(), torch.as_tensor(expected), rtol=1e-6, atol=1e-6)
        assert out[key].dtype == torch.float32
    assert out["seen"] == 9
    assert out["seen"].dtype == torch.int64


def test_only_reading_a_name_moves_it():
    """What moves for a mere question would do so in an order of each process's own, if sets are asked for."""

    class Two(Ranks):
        size = 2

        def sum_(self, tensors):
            raise AssertionError

    updates = Updates({"w": torch.ones(1, 2)}, [0], 2, Two())
    assert "w" in updates
    assert updates.names == ("w",)
    assert "v" not in updates
    with pytest.raises(AssertionError):
        updates.gathered("w")


def test_a_mean_is_the_nearest_float_in_whatever_order_it_is_summed():
    """By numpy's sum in 80 bits; halves between two floats, which are common, go to the even one."""
    states = torch.randn(7, 20_000)
    states[:3] *= 0.4
    longer = states.numpy().astype(np.longdouble)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    expected = torch.from_numpy((longer.sum(0) / 7).astype(np.float32))
    for _ in range(3):
        order = torch.randperm(7)
        assert torch.equal(mean({"w": states[order]}, weights)["w"], expected)
    huge = torch.tensor([[3e38], [3e38]])
    assert mean({"w": huge}, weights[:2] * 3.5)["w"].item() == huge[0].item()
    assert mean({"w": huge * math.inf}, weights[:2])["w"].item() == math.inf
