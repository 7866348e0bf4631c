# SPDX-License-Identifier: Apache-2.0
"""Scores of many models on test images, counted as batches come."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from perada.core.ranks import Ranks
from perada.core.states import send

MetricName = Literal["accuracy", "auroc"]


class _Piece(NamedTuple):
    """Predictions of some models on some images, on the CPU."""

    models: tuple[int, ...]
    predictions: Tensor
    labels: Tensor
    groups: Tensor


class Scores:
    """Scores P models on G groups of images each.

    Accuracy is counted on the device, and nothing is copied from it before the end; AUROC has to keep all predictions.

    Args:
        metric: ``"accuracy"`` or ``"auroc"`` (macro average over the classes that occur both ways).
        multilabel: Labels are 0/1 per class.
        models: P.
        groups: G.
    """

    def __init__(self, metric: MetricName, multilabel: bool, models: int = 1, groups: int = 1) -> None:
        self.metric, self.multilabel = metric, multilabel
        self._counts = torch.zeros(2, models, groups, dtype=torch.int64)  # right predictions, and all
        self._pieces: list[_Piece] = []

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self._pieces) or bool(self._counts.any())

    def update(
        self,
        logits: Tensor,
        y: Tensor,
        groups: Tensor | None = None,
        *,
        models: Sequence[int] | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            logits: (p, B, K) of some models.
            y: (B,) classes or (B, K) labels.
            groups: (B,) group of each image; by default all are of group 0.
            models: Which p of the P models these are; by default all.
            counted: (B,) which images count; by default all.
        """
        models = range(self._counts.shape[1]) if models is None else models
        groups = y.new_zeros(len(y), dtype=torch.int64) if groups is None else groups
        if self.metric == "accuracy":
            self._count(logits, y, groups, models, counted)
            return
        # In double precision: in single, confident predictions would all be ranked alike.
        predictions = logits.double().sigmoid() if self.multilabel else logits.double().softmax(-1)
        rows = slice(None) if counted is None else counted.cpu()
        self._pieces.append(_Piece(tuple(models), predictions.cpu()[:, rows], y.cpu()[rows], groups.cpu()[rows]))

    def _count(self, logits: Tensor, y: Tensor, groups: Tensor, models: Sequence[int], counted: Tensor | None) -> None:
        if self.multilabel:
            right = ((logits.float().sigmoid() > 0.5) == y.long()).sum(-1)
            every = torch.full_like(right, logits.shape[-1])
        else:
            right = (logits.argmax(-1) == y).long()
            every = torch.ones_like(right)
        both = torch.stack([right, every])
        if counted is not None:
            both = both * counted
        self._counts = send(self._counts, both.device)
        sums = both.new_zeros(*both.shape[:2], self._counts.shape[2]).index_add_(2, groups, both)
        self._counts.index_add_(1, send(torch.tensor(models), both.device), sums)

    def merge(self, ranks: Ranks) -> None:
        """Add what the other processes counted; all of them call it, once, at the end."""
        ranks.sum_([self._counts])
        if self.metric == "auroc":
            self._pieces = [piece for pieces in ranks.gather(self._pieces) for piece in pieces]

    def compute(self) -> Tensor:
        """Scores (P, G), on the CPU; NaN where a model has no image of a group."""
        if self.metric == "accuracy":
            counts = self._counts.cpu().float()
            return counts[0] / counts[1]
        scores = torch.full(self._counts.shape[1:], torch.nan)
        for models in dict.fromkeys(piece.models for piece in self._pieces):
            own = [piece for piece in self._pieces if piece.models == models]
            predictions = torch.cat([piece.predictions for piece in own], 1)
            labels = torch.cat([piece.labels for piece in own])
            groups = torch.cat([piece.groups for piece in own])
            sizes = groups.bincount(minlength=scores.shape[1]).tolist()
            for group, rows in enumerate(torch.split(groups.argsort(stable=True), sizes)):
                for place, model in enumerate(models if len(rows) else ()):
                    scores[model, group] = self._auroc(predictions[place, rows], labels[rows])
        return scores

    def _auroc(self, predictions: Tensor, labels: Tensor) -> Tensor:
        truth = labels.long() if self.multilabel else torch.nn.functional.one_hot(labels, predictions.shape[-1])
        positives = truth.sum(0)
        both = ((positives > 0) & (positives < len(truth))).nonzero().flatten().tolist()
        if not both:
            return torch.tensor(torch.nan)
        return torch.stack([binary_auroc(predictions[:, k], truth[:, k]) for k in both]).mean()


def predictive_entropy(logits: Tensor, multilabel: bool) -> Tensor:
    """Entropy of each prediction, in nats.

    Args:
        logits: (B, K).
        multilabel: The mean of the entropies of K Bernoulli distributions.

    Returns:
        Entropies (B,).

    >>> predictive_entropy(torch.zeros(1, 4), False).exp().tolist()
    [4.0]
    """
    p: Tensor = logits.double().sigmoid() if multilabel else logits.double().softmax(-1)
    terms = -torch.xlogy(p, p) - (torch.xlogy(1 - p, 1 - p) if multilabel else 0)
    return terms.mean(-1) if multilabel else terms.sum(-1)
