# SPDX-License-Identifier: Apache-2.0
"""pFedMe's inner problem: where it starts, with which momentum, and how far its steps get."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import PFedMe
from tests.options import sections

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
INNER = 0.1
OUTER = 0.05
STRENGTH = 2.0
MOMENTUM = 0.9


@pytest.mark.parametrize("restart", [False, True])
def test_the_inner_problem_starts_where_the_last_one_ended_or_afresh(restart):
    """With its momentum, which no step of another minibatch may have left behind if it starts afresh."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, generator=random, dtype=torch.float64)
    labels = torch.arange(6) % 3
    network = nn.Sequential(nn.Linear(3, 3)).double()
    run = perada.finetune(
        network,
        perada.FederatedData([TensorDataset(images, labels)]),
        **sections(
            adapter="full",
            algorithm=PFedMe(STRENGTH, inner_steps=2, restart=restart),
            rounds=1,
            batch_size="full",
            local_steps=3,
            lr_personal=INNER,
            lr_local=OUTER,
            momentum=MOMENTUM,
            **QUIET,
        ),
    )
    outer_model = copy.deepcopy(network)
    outer = torch.optim.SGD(outer_model.parameters(), lr=OUTER, momentum=MOMENTUM)
    for step in range(3):
        if restart or step == 0:
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


class Slope:
    """One number for θ and one for w_m on a loss whose gradient is 1 everywhere, by plain gradient descent."""

    def __init__(self, rate, outer_rate):
        self.states = {"personal": 0.0, "local": 0.0}
        self.rates = {"personal": rate, "local": outer_rate}
        self.left = []

    def loss(self, role):
        return 1.0

    def restart(self, role, start):
        self.states[role] = self.states["local"]

    def descend(self, role, loss=0.0, pull=None):
        strength = pull[0]
        apart = self.states["personal"] - self.states["local"]
        if role == "local":  # of the minibatch that ends here: the inner gradient, of 1 at the start
            self.left.append(1 + strength * apart)
        self.states[role] -= self.rates[role] * (loss + strength * (apart if role == "personal" else -apart))


@pytest.mark.parametrize(("outer_rate", "kept"), [(0.005, 0.107), (0.01, 0.193)])
def test_how_much_of_the_inner_gradient_is_left(outer_rate, kept):
    """Its share x comes from the fixed point of x ← (1 − η_p λ)^K (x + (1 − x) η λ); restarted, from x = 1."""
    for restart in (True, False):
        step = Slope(0.01, outer_rate)
        algorithm = PFedMe(restart=restart)
        for _ in range(20):
            algorithm.client_step(step)
        shrinks = (1 - 0.01 * 15) ** 3
        moved = outer_rate * 15
        expected = shrinks if restart else shrinks * moved / (1 - shrinks * (1 - moved))
        assert step.left[-1] == pytest.approx(expected, abs=1e-4)
        assert step.left[-1] == pytest.approx(0.614 if restart else kept, abs=1e-3)
