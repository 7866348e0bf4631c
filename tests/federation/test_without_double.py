# SPDX-License-Identifier: Apache-2.0
"""Devices without double precision, as Apple's: torch's device "meta", which computes nothing, stands for one here.

What has float64 there is noticed as it is made.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perada.algorithms import APFL
from perada.core import states
from perada.privacy.client_level import clip_updates, noisy_updates
from perada.privacy.gradients import PerSampleGrads
from perada.scores.accumulation import Tally, probabilities
from perada.server import aggregate
from tests.label_kinds import task_of


class NoDouble(TorchDispatchMode):
    """Rejects a tensor of float64 on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.device.type == "meta" and value.dtype == torch.float64:
                raise TypeError(f"{func} makes float64 on a device that has none")
        return out


@pytest.fixture(autouse=True)
def _meta(monkeypatch):
    monkeypatch.setattr(states, "WITHOUT_DOUBLE", {"meta"})


def empty_on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_stand_in_notices():
    with NoDouble(), pytest.raises(TypeError, match="float64"):
        empty_on_meta(2).double()


@pytest.mark.parametrize("multilabel", [False, True])
def test_evaluation(multilabel):
    task = task_of(multilabel)
    with NoDouble():
        assert task.entropy(probabilities(empty_on_meta(4, 3), task)).dtype == torch.float32
        tally = Tally(task)
        y = empty_on_meta(4, 3, dtype=torch.int64) if multilabel else empty_on_meta(4, dtype=torch.int64)
        tally.update(empty_on_meta(4, 3), y, empty_on_meta(4, dtype=torch.int64))
        assert tally._bins.dtype == torch.float32


def test_apfl():
    with NoDouble():
        kept = APFL(alpha=0.3).initial_client_state({"w": empty_on_meta(2)}, None)
    assert kept["share"]["alpha"].dtype == torch.float32


def test_privacy():
    with NoDouble():
        clipped, norms = clip_updates({"w": empty_on_meta(2, 3)}, {"w": empty_on_meta(2, 3)}, 1.0)
        noisy = noisy_updates({"w": empty_on_meta(2, 3)}, {"w": empty_on_meta(2, 3)}, clipped, 0.5, None)
        assert (norms.dtype, noisy["w"].dtype) == (torch.float32, torch.float32)
        assert PerSampleGrads(empty_on_meta(6, 5)).weighted_sums(empty_on_meta(2, 3)).shape == (2, 5)


def test_means_and_sums():
    with NoDouble():
        assert aggregate.mean({"w": empty_on_meta(2, 3)}, torch.tensor([0.5, 0.5], dtype=torch.float64))["w"].shape == (
            3,
        )
