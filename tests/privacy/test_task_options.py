# SPDX-License-Identifier: Apache-2.0
"""Sums of clipped per-image gradients with options of the tasks, image by image with torch's own losses."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from perada.engine import Engine
from perada.privacy import Privacy
from perada.tasks import Classification, Keypoints, MultiLabel, Regression

from .opacus_loop import NoisyGradients
from .test_gradients import CLASSES, COUNTS, assert_same, model, query

WEIGHTS = [1.0, 4.0, 0.5, 2.0]
MEANS = [0.0, 10.0, -3.0, 100.0]
STDS = [1.0, 2.0, 0.5, 30.0]


def weighted(logits, label):
    return F.cross_entropy(logits, label, weight=torch.tensor(WEIGHTS), reduction="none")[0]


def smoothed(logits, label):
    return F.cross_entropy(logits, label, label_smoothing=0.2)


def focal(logits, label):
    cross_entropy = F.cross_entropy(logits, label)
    return (1 - (-cross_entropy).exp()) ** 2 * cross_entropy


def of_known_labels(logits, labels):
    terms = []
    for logit, label, weight in zip(logits[0], labels[0], WEIGHTS, strict=True):
        if float(label) in (0.0, 1.0):
            terms.append(F.binary_cross_entropy_with_logits(logit, label, pos_weight=torch.tensor(weight)))
    return sum(terms) / len(terms) if terms else logits.sum() * 0


def of_numbers(outputs, targets):
    terms = []
    for output, target, mean, std in zip(outputs[0], targets[0], MEANS, STDS, strict=True):
        deviation = abs(output - (target - mean) / std)
        terms.append(deviation**2 / 2 if deviation <= 0.7 else 0.7 * (deviation - 0.35))
    return sum(terms) / len(terms)


def of_known_points(outputs, targets):
    terms = []
    for place, (output, target) in enumerate(zip(outputs[0], targets[0], strict=True)):
        side = (16, 12)[place % 2]
        if not targets[0, place - place % 2 : place - place % 2 + 2].isnan().any():
            terms.append((output - ((target + 0.5) / (side / 2) - 1)) ** 2)
    return sum(terms) / len(terms) if terms else outputs.sum() * 0


def points():
    """Points in images of 12 × 16 pixels, of which the last image has no known one."""
    coordinates = 12 * torch.rand(len(COUNTS), max(COUNTS), CLASSES, generator=torch.Generator().manual_seed(5))
    coordinates[0, 0, :2] = math.nan
    coordinates[0, 1, 2] = math.nan
    coordinates[2, 1] = math.nan
    return coordinates


def numbers():
    """Targets in the units of the means, some of them far away."""
    random = torch.Generator().manual_seed(4)
    deviations = 3 * torch.randn(len(COUNTS), max(COUNTS), CLASSES, generator=random)
    return torch.tensor(MEANS) + torch.tensor(STDS) * deviations


def unknown_labels():
    """Vectors of labels with NaN and -1, of which the last image has no known one."""
    labels = torch.randint(2, (len(COUNTS), max(COUNTS), CLASSES), generator=torch.Generator().manual_seed(3)).float()
    labels[0, 0, 1] = math.nan
    labels[0, 1, 2:] = -1.0
    labels[2, 1] = -1.0
    return labels


CASES = {
    "class_weights": (Classification(class_weights=WEIGHTS), weighted),
    "label_smoothing": (Classification(label_smoothing=0.2), smoothed),
    "focal_gamma": (Classification(focal_gamma=2.0), focal),
    "numbers": (Regression("huber", delta=0.7, mean=MEANS, std=STDS), of_numbers),
    "keypoints": (Keypoints([12, 16]), of_known_points),
    "unknown labels": (MultiLabel(positive_weights=WEIGHTS), of_known_labels),
}


def image_gradients(net, asked, client, loss_of_image):
    net.eval()
    for index in range(asked.counts[client]):
        leaves = {
            key: value[client].detach().requires_grad_(value.requires_grad) for key, value in asked.states.items()
        }
        logits = functional_call(net, leaves, (asked.x[client, index : index + 1],))
        trained = {key: value for key, value in leaves.items() if value.requires_grad}
        loss = loss_of_image(logits, asked.y[client, index : index + 1])
        gradients = torch.autograd.grad(loss, list(trained.values()))
        yield dict(zip(trained, gradients, strict=True))


def norm_of(gradient):
    return float(torch.cat([values.flatten() for values in gradient.values()]).norm())


@pytest.mark.parametrize("case", CASES)
def test_each_image_is_clipped_by_the_gradient_of_its_own_loss(case):
    task, loss_of_image = CASES[case]
    net = model("small")
    asked = query(net)
    if case == "numbers":
        asked = replace(asked, y=numbers())
    if case == "keypoints":
        asked = replace(asked, y=points())
    if case == "unknown labels":
        asked = replace(asked, y=unknown_labels())
    gradients = [list(image_gradients(net, asked, client, loss_of_image)) for client in range(len(COUNTS))]
    norms = sorted(norm_of(gradient) for of_client in gradients for gradient in of_client)
    bound = norms[len(norms) // 2]
    assert norms[0] < bound < norms[-1]
    expected = {key: torch.zeros_like(value) for key, value in asked.states.items() if value.requires_grad}
    for client, of_client in enumerate(gradients):
        for gradient in of_client:
            factor = min(1.0, bound / (norm_of(gradient) + 1e-6))
            for key, values in gradient.items():
                expected[key][client] += factor * values / asked.expected_batch[client]
    answer = NoisyGradients(Privacy(0.0, max_norm=bound), Engine(net), task)(asked)
    assert_same(answer, expected)
