# SPDX-License-Identifier: Apache-2.0
"""Frozen layers against torch's own."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from perada.core.states import train_mode
from perada.engine.fold import fold


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_frozen_batch_norm_is_torchs_and_keeps_no_input(affine, half, memory_format):
    norm = nn.BatchNorm2d(6, affine=affine)
    for value in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(value, 0.5, 2)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(6, 2, 1))
    model[1].requires_grad_(False)
    plain, folded = copy.deepcopy(model), train_mode(fold(model, random_only=True).model)
    assert folded[1] is not norm
    plain.train()[1].eval()
    x, kept = torch.randn(4, 3, 8, 8).to(memory_format=memory_format), []

    def keep(value):
        kept.append(value.data_ptr())
        return value

    inputs = []
    folded[1].register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=half), saved_tensors_hooks(keep, lambda value: value):
        ours = folded(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        theirs = plain(x)
    assert torch.equal(ours, theirs)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert got.grad is None if wanted.grad is None else torch.equal(got.grad, wanted.grad)
    assert inputs[0].data_ptr() not in kept


def test_a_folded_frozen_batch_norm_follows_the_model():
    norm = nn.BatchNorm2d(3).requires_grad_(False)
    folded = fold(nn.Sequential(norm), random_only=True).model
    norm.double()
    nn.init.constant_(norm.running_mean, 2.0)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(folded(x), (x - 2) / (1 + norm.eps) ** 0.5)


def test_a_norm_without_running_statistics_stays_as_it_is():
    norm = nn.BatchNorm2d(3, track_running_stats=False).requires_grad_(False)
    assert fold(nn.Sequential(norm)).model[0] is norm
