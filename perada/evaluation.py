# SPDX-License-Identifier: Apache-2.0
"""Scores of many models on one test set whose images each belong to one client."""

from typing import Literal

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, multiclass_accuracy, multilabel_accuracy

MetricName = Literal["accuracy", "auroc"]


class Scores:
    """Collects the predictions of P models on N images, and scores them.

    Args:
        metric: ``"accuracy"`` or ``"auroc"`` (macro average over the classes that occur both ways).
        multilabel: Labels are 0/1 per class.
    """

    def __init__(self, metric: MetricName, multilabel: bool) -> None:
        self.metric, self.multilabel = metric, multilabel
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._owners: list[Tensor] = []
        self._classes = 0

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self._predictions)

    def update(self, logits: Tensor, y: Tensor, owner: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (P, B, K).
            y: (B,) classes or (B, K) labels.
            owner: (B,) client of each image.
        """
        self._classes = logits.shape[-1]
        if self.metric == "auroc":  # in double precision: in single, confident predictions would all be ranked alike
            predictions = logits.double().sigmoid() if self.multilabel else logits.double().softmax(-1)
        else:
            predictions = logits.float().sigmoid() if self.multilabel else logits.argmax(-1)
        self._predictions.append(predictions.cpu())
        self._labels.append(y.cpu())
        self._owners.append(owner.cpu())

    def global_test(self) -> Tensor:
        """Score (P,) of each model on all images."""
        predictions, labels = torch.cat(self._predictions, 1), torch.cat(self._labels)
        return torch.stack([self._score(model, labels) for model in predictions])

    def local_test(self, clients: int) -> Tensor:
        """Score (clients,) of model m on the images of client m; NaN where it has none to score.

        A single model is scored as every client's.
        """
        predictions, labels, owners = torch.cat(self._predictions, 1), torch.cat(self._labels), torch.cat(self._owners)
        scores = []
        for client in range(clients):
            own = owners == client
            model = predictions[client if len(predictions) > 1 else 0]
            scores.append(self._score(model[own], labels[own]) if own.any() else torch.tensor(torch.nan))
        return torch.stack(scores)

    def _score(self, predictions: Tensor, labels: Tensor) -> Tensor:
        if self.metric == "accuracy":
            if self.multilabel:
                return multilabel_accuracy(predictions, labels.long(), self._classes, average="micro")
            return multiclass_accuracy(predictions, labels, self._classes, average="micro")
        truth = labels.long() if self.multilabel else torch.nn.functional.one_hot(labels, self._classes)
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
