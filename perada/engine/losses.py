# SPDX-License-Identifier: Apache-2.0
"""The clients' task loss, image by image and client by client."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.states import send


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
    """True where a row holds an image, (C, B), and is no padding.

    >>> real_rows((2, 1), 2, torch.device("cpu")).tolist()
    [[True, True], [True, False]]
    """
    return torch.arange(rows, device=device) < send(torch.tensor(counts), device).unsqueeze(1)
