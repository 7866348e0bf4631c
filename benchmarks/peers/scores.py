# SPDX-License-Identifier: Apache-2.0
"""Loss and accuracy of what each framework trained, by the same lines for all."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers.networks import build_network, train_mode
from benchmarks.peers.tasks import State, TaskData, Training

TOLERANCE = 0.005
"""Up to this relative difference, two losses count as the same: three digits."""


@dataclass(frozen=True)
class Score:
    """Mean loss and accuracy on the test images: of the global model, or of the personal ones where there are any."""

    loss: float
    accuracy: float


def score(data: TaskData, training: Training) -> Score:
    """Score what a framework trained."""
    network = build_network(data.task)
    network.load_state_dict(data.initial_state)
    states = list(training.personal_states.values()) or [training.global_state]
    scores = [_score_state(network, state, data) for state in states]
    return Score(
        loss=sum(each.loss for each in scores) / len(scores),
        accuracy=sum(each.accuracy for each in scores) / len(scores),
    )


@torch.no_grad()
def _score_state(network: nn.Module, state: State, data: TaskData) -> Score:
    """Score one model.

    Trained norms take the statistics of the test images: pfl lets running statistics drift from client to client.
    """
    model = copy.deepcopy(network)
    unknown = model.load_state_dict(state, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"the trained state has tensors that the network has not: {', '.join(unknown[:3])}")
    train_mode(model)
    logits = model(data.test_images)
    return Score(
        loss=F.cross_entropy(logits, data.test_labels).item(),
        accuracy=(logits.argmax(1) == data.test_labels).float().mean().item(),
    )
