# SPDX-License-Identifier: Apache-2.0
"""Fits with options of the tasks, against plain loops over clients and images."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import perada
from perada.core.checks import OptionError
from perada.tasks import Classification, MultiLabel

PIXELS = 12
CLASSES = 3
IMAGES = 6
WEIGHTS = [1.0, 2.0, 0.5]
LR = 0.1


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))


def classes(client):
    return (torch.arange(IMAGES) + client) % CLASSES


def labels(client, unknown=False):
    # Of each label, a client has images with and without it.
    indices = torch.arange(IMAGES).unsqueeze(1) + client
    targets = (indices // torch.arange(1, CLASSES + 1) % 2).float()
    if unknown:
        targets[0] = -1.0
        targets[1, 0] = math.nan
        targets[2, 1:] = -1.0
    return targets


def images(client):
    return torch.randn(IMAGES, 1, 1, PIXELS, generator=torch.Generator().manual_seed(client))


def data(task, targets):
    parts = [TensorDataset(images(client), targets(client)) for client in range(2)]
    federated = perada.FederatedData(parts, num_classes=CLASSES)
    return perada.FederatedDataModule(federated, batch_size="full", task=task)


def fit(served, **options):
    training = {"momentum": 0.0} | options.pop("training", {})
    options = {"rounds": 1, "logger": False} | options
    return perada.finetune(
        network(), served, adapter="full", algorithm="fedavg", local_steps=1, lr_local=LR, training=training, **options,
    )  # fmt: skip


def log_probability(logits, target):
    return logits[target] - logits.exp().sum().log()


def smoothed(logits, target):
    terms = [log_probability(logits, k) for k in range(CLASSES)]
    return -0.9 * terms[int(target)] - 0.1 * sum(terms) / CLASSES


def weighted(logits, target):
    return -WEIGHTS[int(target)] * log_probability(logits, int(target))


def focal(logits, target):
    log_p = log_probability(logits, int(target))
    return -((1 - log_p.exp()) ** 2) * log_p


def of_known_labels(weights):
    def loss(logits, target):
        terms = []
        for k in range(CLASSES):
            if target[k] == 1:
                terms.append(-weights[k] * F.logsigmoid(logits[k]))
            elif target[k] == 0:
                terms.append(-F.logsigmoid(-logits[k]))
        return sum(terms) / len(terms) if terms else logits.sum() * 0

    return loss


def unknown_labels(client):
    return labels(client, unknown=True)


CASES = {
    "label_smoothing": (Classification(label_smoothing=0.1), classes, smoothed),
    "class_weights": (Classification(class_weights=WEIGHTS), classes, weighted),
    "focal_gamma": (Classification(focal_gamma=2.0), classes, focal),
    "positive_weights": (MultiLabel(positive_weights=WEIGHTS), labels, of_known_labels(WEIGHTS)),
    "unknown": (MultiLabel(), unknown_labels, of_known_labels([1.0] * CLASSES)),
}


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_a_plain_loop_over_images(case, engine):
    task, targets, loss_of_image = CASES[case]
    run = fit(data(task, targets), training={"engine": engine})

    weights = []
    for client in range(2):
        model = network()
        losses = []
        for image, target in zip(images(client), targets(client), strict=True):
            losses.append(loss_of_image(model(image.unsqueeze(0))[0], target))
        mean_loss = sum(losses) / IMAGES
        mean_loss.backward()
        weights.append(model[1].weight.detach() - LR * model[1].weight.grad)
    expected = (weights[0] + weights[1]) / 2
    torch.testing.assert_close(run.global_model()[1].weight, expected)
    assert not torch.allclose(expected, network()[1].weight)


BALANCED = {
    "class_weights": (Classification(class_weights="balanced"), classes),
    "positive_weights": (MultiLabel(positive_weights="balanced"), labels),
}


@pytest.mark.parametrize("protection", ["privacy", "client_privacy"])
@pytest.mark.parametrize("case", BALANCED)
def test_balanced_weights_are_rejected_with_differential_privacy(case, protection):
    task, targets = BALANCED[case]
    with pytest.raises(OptionError, match="clients' labels"):
        fit(data(task, targets), **{protection: {"noise_multiplier": 1.0}})


SKEWED = ([0, 0, 0, 0, 1, 2], [2, 2, 1, 2, 2, 2])
"""Classes of two clients, of which the second has no image of class 0."""


def skewed(client):
    return torch.tensor(SKEWED[client])


def weights_of_client(client):
    """n / (k n_c) for the k classes that the client has, else 0."""
    labels = SKEWED[client]
    num_classes = len(set(labels))
    return [len(labels) / (num_classes * labels.count(k)) if k in labels else 0.0 for k in range(CLASSES)]


@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"focal_gamma": 2.0}], ids=str)
def test_weights_per_client_are_those_of_its_own_counts(options, engine):
    task = Classification(class_weights="balanced_per_client", **options)
    run = fit(data(task, skewed), training={"engine": engine})
    trained = []
    for client in range(2):
        weights = torch.tensor(weights_of_client(client))
        assert float(weights[skewed(client)].mean()) == pytest.approx(1)
        model = network()
        logits = model(images(client))
        if "focal_gamma" in options:
            log_p = F.log_softmax(logits, -1)[torch.arange(IMAGES), skewed(client)]
            losses = -weights[skewed(client)] * (1 - log_p.exp()) ** 2 * log_p
        else:
            losses = F.cross_entropy(logits, skewed(client), weight=weights, reduction="none", **options)
        losses.mean().backward()
        trained.append(model[1].weight.detach() - LR * model[1].weight.grad)
    torch.testing.assert_close(run.global_model()[1].weight, (trained[0] + trained[1]) / 2)


def test_weights_per_client_weight_the_parts_of_mixed_targets():
    task = Classification(class_weights="balanced_per_client", label_smoothing=0.2)
    counts = torch.tensor([[4, 1, 0], [2, 2, 6]])
    targets = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.5, 0.5]])
    logits = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(2))
    weights = [[5 / 8, 5 / 2, 0.0], [10 / 6, 10 / 6, 10 / 18]]
    expected = [
        F.cross_entropy(logits[row], targets[row], weight=torch.tensor(weights[row]), label_smoothing=0.2)
        for row in range(2)
    ]
    torch.testing.assert_close(task.client_loss(logits, targets, counts), torch.stack(expected))


def test_weights_per_client_are_rejected_with_the_privacy_of_images_only():
    served = data(Classification(class_weights="balanced_per_client"), skewed)
    with pytest.raises(OptionError, match="labels of the client's other images"):
        fit(served, privacy={"noise_multiplier": 1.0})
    fit(served, client_privacy={"noise_multiplier": 1.0, "delta": 0.1}, clients_per_round=1)
    with pytest.raises(OptionError, match="positive_weights"):
        MultiLabel(positive_weights="balanced_per_client")


@pytest.mark.parametrize("case", ["label_smoothing", "class_weights"])
def test_a_run_resumes_with_the_same_task_only(case, tmp_path):
    task, targets, _ = CASES[case]
    fit(data(task, targets), logger=True, default_root_dir=str(tmp_path))
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    resume = {"rounds": 2, "ckpt_path": str(checkpoint)}
    resumed = fit(data(task, targets), **resume)
    uninterrupted = fit(data(task, targets), rounds=2)
    assert torch.equal(resumed.global_model()[1].weight, uninterrupted.global_model()[1].weight)

    other = Classification(label_smoothing=0.2, class_weights=WEIGHTS)
    message = f"belongs to a run with task={str(task)!r}, but this run has {str(other)!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(data(other, targets), **resume)
