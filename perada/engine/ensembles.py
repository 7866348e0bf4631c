# SPDX-License-Identifier: Apache-2.0
"""Several global models: what they predict together, and how they compare on clients' images."""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.batches import CohortBatch
from perada.core.states import State, expand, unstack
from perada.engine.engine import Engine
from perada.engine.losses import client_losses


def ensemble(logits: Tensor, average: Literal["logits", "probabilities"], multilabel: bool) -> Tensor:
    """Logits (..., classes) of the ensemble of K models, from theirs (K, ..., classes).

    Either ``logits`` are averaged, or ``probabilities``: those of each class's own Bernoulli if ``multilabel``.

    >>> ensemble(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), "probabilities", False).softmax(-1).tolist()
    [0.5, 0.5]
    """
    if len(logits) == 1:
        return logits[0]
    if average == "logits":
        return logits.mean(0)
    if not multilabel:
        return logits.log_softmax(-1).logsumexp(0)
    return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)


def compare(engine: Engine, members: State, batches: Iterable[CohortBatch], clients: int, multilabel: bool) -> Tensor:
    """Mean losses (C, K) of K models, a stack (K, ...), on each of C clients' images, in evaluation mode.

    In each batch, the active clients are a prefix of all; rows beyond a client's count are not looked at.
    """
    states = unstack(members)
    device = next(iter(members.values())).device
    losses, rows = torch.zeros(clients, len(states), device=device), torch.zeros(clients, device=device)
    with torch.no_grad():
        for batch in batches:
            active, counts = len(batch.clients), torch.tensor(batch.counts, device=device)
            for index, state in enumerate(states):
                logits = engine.logits(expand(state, active), batch.x, counts=batch.counts)
                losses[:active, index] += counts * client_losses(logits, batch.y, batch.counts, multilabel)
            rows[:active] += counts
    return losses / rows.unsqueeze(1)
