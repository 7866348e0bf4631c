# SPDX-License-Identifier: Apache-2.0
"""Losses of clients, and outputs of several models averaged."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.batches import CohortBatch
from perada.core.states import State, expand, send, unstack
from perada.engine.engine import Engine


def row_losses(logits: Tensor, y: Tensor, multilabel: bool) -> Tensor:
    """Losses (C, B) of every image, padding included, for logits (C, B, K).

    Cross-entropy of classes (C, B); if ``multilabel`` binary cross-entropy of 0/1 labels (C, B, K), mean over labels.
    """
    if multilabel:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits), reduction="none").mean(-1)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def client_losses(logits: Tensor, y: Tensor, counts: Sequence[int], multilabel: bool) -> Tensor:
    """Each client's task loss (C,): the mean of :func:`row_losses` over its first ``counts`` rows, the real ones."""
    losses = row_losses(logits, y, multilabel)
    if all(count == y.shape[1] for count in counts):
        return losses.mean(1)
    real = real_rows(counts, y.shape[1], losses.device)
    return losses.where(real, 0).sum(1) / send(torch.tensor(counts), losses.device)


def real_rows(counts: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """True where a row holds an image, (C, B), and is not padding.

    >>> real_rows((2, 1), 2, torch.device("cpu")).tolist()
    [[True, True], [True, False]]
    """
    return torch.arange(rows, device=device) < send(torch.tensor(counts), device).unsqueeze(1)


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
