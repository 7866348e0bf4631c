# SPDX-License-Identifier: Apache-2.0
"""The terms that an algorithm adds to a loss are differentiated alike in training and in dry runs."""

import torch

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.client_steps import add_terms
from perada.algorithms.dry_run_step import LEARNING_RATE, DryRunStep

START = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=torch.float64)
ANCHOR = torch.tensor([[0.5, 0.0], [1.0, 1.0]], dtype=torch.float64)
SLOPE = torch.tensor([[0.25, -1.0], [2.0, 0.125]], dtype=torch.float64)


def test_terms_are_the_gradients_of_a_proximal_and_a_linear_loss():
    leaf = START.clone().requires_grad_()
    (leaf**3).sum().backward()
    add_terms({"w": leaf}, pull=(0.5, {"w": ANCHOR}), slope={"w": SLOPE})

    expected = START.clone().requires_grad_()
    proximal = 0.5 / 2 * ((expected - ANCHOR) ** 2).sum()
    ((expected**3).sum() + proximal + (SLOPE * expected).sum()).backward()
    torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-15, atol=0)


def test_without_terms_nothing_gets_a_gradient():
    leaf = START.clone().requires_grad_()
    add_terms({"w": leaf}, pull=None, slope=None)
    assert leaf.grad is None


def dry_run_step():
    names = TensorNames(("w", "v"), ("w", "v"))
    state = {"w": START.clone(), "v": ANCHOR.clone()}
    step = DryRunStep(Algorithm(), {"local": state}, {}, state)
    step.begin("train", names)
    return step


def test_a_dry_run_descends_on_the_terms_alone():
    step = dry_run_step()
    step.descend("local", pull=(0.5, {"w": ANCHOR, "v": ANCHOR}), slope={"w": SLOPE, "v": SLOPE})
    gradient = 0.5 * (START - ANCHOR) + SLOPE
    trained = step.states["local"]
    torch.testing.assert_close(trained["w"].grad, gradient, rtol=1e-15, atol=0)
    torch.testing.assert_close(trained["w"].detach(), START - LEARNING_RATE * gradient, rtol=1e-15, atol=0)
    torch.testing.assert_close(trained["v"].detach(), ANCHOR - LEARNING_RATE * SLOPE, rtol=1e-15, atol=0)


def test_as_in_training_a_parameter_outside_the_loss_has_no_gradient_in_a_dry_run():
    step = dry_run_step()
    step.descend("local", (step.states["local"]["w"] ** 2).flatten(1).sum(1))
    trained = step.states["local"]
    torch.testing.assert_close(trained["w"].grad, 2 * START, rtol=1e-15, atol=0)
    assert trained["v"].grad is None
    assert torch.equal(trained["v"].detach(), ANCHOR)
