# SPDX-License-Identifier: Apache-2.0
"""pFedMe's inner problem with a momentum, which no step of another minibatch may have left behind."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import PFedMe

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
INNER, OUTER, STRENGTH, MOMENTUM = 0.1, 0.05, 2.0, 0.9


def test_the_inner_optimiser_starts_afresh_on_each_minibatch():
    random = torch.Generator().manual_seed(0)
    images, labels = torch.randn(6, 3, generator=random, dtype=torch.float64), torch.arange(6) % 3
    network = nn.Sequential(nn.Linear(3, 3)).double()
    run = perada.finetune(
        network,
        perada.FederatedData([TensorDataset(images, labels)]),
        adapter="full",
        algorithm=PFedMe(STRENGTH, inner_steps=2),
        rounds=1,
        batch_size="full",
        local_steps=3,
        lr_personal=INNER,
        lr_local=OUTER,
        momentum=MOMENTUM,
        **QUIET,
    )
    outer_model = copy.deepcopy(network)
    outer = torch.optim.SGD(outer_model.parameters(), lr=OUTER, momentum=MOMENTUM)
    for _ in range(3):
        theta = copy.deepcopy(outer_model)
        inner = torch.optim.SGD(theta.parameters(), lr=INNER, momentum=MOMENTUM)
        for _ in range(2):
            loss = F.cross_entropy(theta(images), labels)
            for one, other in zip(theta.parameters(), outer_model.parameters(), strict=True):
                loss = loss + STRENGTH / 2 * (one - other.detach()).square().sum()
            inner.zero_grad()
            loss.backward()
            inner.step()
        for one, other in zip(theta.parameters(), outer_model.parameters(), strict=True):
            other.grad = STRENGTH * (other - one).detach()
        outer.step()
    for key, value in outer_model.state_dict().items():
        torch.testing.assert_close(run.state("global")[key], value)
    for key, value in theta.state_dict().items():
        torch.testing.assert_close(run.state("personal", 0)[key], value)
