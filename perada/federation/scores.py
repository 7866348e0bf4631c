# SPDX-License-Identifier: Apache-2.0
"""Counts of predictions during evaluation, which processes add up at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.states import to_device_async
from perada.federation.metrics import Compute, Metric
from perada.server.aggregate import double


def probabilities(logits: Tensor, multilabel: bool) -> Tensor:
    """Compute predictions (..., K) from logits (..., K), in double precision where the device has it."""
    if multilabel:
        return double(logits).sigmoid()
    return double(logits).softmax(-1)


@dataclass(frozen=True)
class _Predictions:
    """Predictions of some models on a batch, on the CPU.

    Attributes:
        models: Which p models.
        probabilities: (p, B, K).
        labels: Classes (B,) or labels (B, K).
        groups: Groups (B,) of the images.
    """

    models: tuple[int, ...]
    probabilities: Tensor
    labels: Tensor
    groups: Tensor


class Scores:
    """Scores P models on G groups of images by several metrics.

    Accuracy is counted on the device, and nothing is copied from it before the end. The other metrics are no sums over
    batches, so all predictions are kept for them, on the CPU.

    Args:
        metrics: The metrics.
        multilabel: Whether images have several labels, 0 or 1 for each class.
        models: P.
        groups: G.
    """

    def __init__(self, metrics: Sequence[Metric], multilabel: bool, models: int = 1, groups: int = 1) -> None:
        self.metrics = metrics
        self.multilabel = multilabel
        self._counts_accuracy = any(metric.compute is None for metric in metrics)
        self._functions: dict[str, Compute] = {}
        for metric in metrics:
            if metric.compute is not None:
                self._functions[metric.name] = metric.compute
        self._counts = torch.zeros(2, models, groups, dtype=torch.int64)  # right predictions, and all
        self._pieces: list[_Predictions] = []

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
            logits: Logits (p, B, K) of p models.
            y: Classes (B,) or labels (B, K).
            groups: Groups (B,) of the images, by default group 0.
            models: Which p models, by default all.
            counted: Whether each image (B,) counts, by default all do.
        """
        if models is None:
            models = range(self._counts.shape[1])
        if groups is None:
            groups = y.new_zeros(len(y), dtype=torch.int64)
        if self._counts_accuracy:
            self._count(logits, y, groups, models, counted)
        if not self._functions:
            return
        # In double precision, which the device may not have: in single, confident predictions would be ranked alike.
        predictions = probabilities(logits.cpu(), self.multilabel)
        rows = slice(None) if counted is None else counted.cpu()
        self._pieces.append(
            _Predictions(
                models=tuple(models),
                probabilities=predictions[:, rows],
                labels=y.cpu()[rows],
                groups=groups.cpu()[rows],
            )
        )

    def _count(self, logits: Tensor, y: Tensor, groups: Tensor, models: Sequence[int], counted: Tensor | None) -> None:
        """Count the correct and the total predictions of a batch, on the device."""
        if self.multilabel:
            right = ((logits.float().sigmoid() > 0.5) == y.long()).sum(-1)
            predictions_made = torch.full_like(right, logits.shape[-1])
        else:
            right = (logits.argmax(-1) == y).long()
            predictions_made = torch.ones_like(right)
        counts = torch.stack([right, predictions_made])
        if counted is not None:
            counts = counts * counted
        self._counts = to_device_async(self._counts, counts.device)
        # First over the images of a group, (2, p, G), then into the rows of the p models.
        sums = counts.new_zeros(*counts.shape[:2], self._counts.shape[2]).index_add_(2, groups, counts)
        self._counts.index_add_(1, to_device_async(torch.tensor(models), counts.device), sums)

    @property
    def counts(self) -> Tensor:
        """Correct and total predictions, (2, P, G), on the CPU; zeros unless a metric is accuracy."""
        return self._counts.cpu()

    def merge(self, ranks: Ranks) -> None:
        """Add the counts of the other processes. A collective: all of them must call this, once, at the end."""
        ranks.sum_([self._counts])
        if self._functions:
            self._pieces = [piece for pieces in ranks.gather(self._pieces) for piece in pieces]

    def means(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by each metric; for per-class metrics, the mean over the classes that occur."""
        means = {}
        for name, scores in self.all().items():
            means[name] = scores if scores.dim() == 2 else scores.nanmean(-1)
        return means

    def all(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by each metric, or (P, G, K) by per-class metrics, on the CPU.

        NaN where a model has no image of a group.
        """
        counts = self._counts.cpu().float()
        results = {metric.name: counts[0] / counts[1] for metric in self.metrics if metric.compute is None}
        scores: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        # Batches of the same models are scored together: a metric such as AUROC is not a mean over batches.
        for models in dict.fromkeys(piece.models for piece in self._pieces):
            pieces = [piece for piece in self._pieces if piece.models == models]
            for name, scores_of_models in self._score(pieces).items():
                scores[name] |= scores_of_models
        for name, score_of in scores.items():
            results[name] = self._table(score_of)
        return results

    def _score(self, pieces: Sequence[_Predictions]) -> Mapping[str, dict[tuple[int, int], Tensor]]:
        """Compute the scores of the models whose predictions are ``pieces``, by metric and by (model, group)."""
        predictions = torch.cat([piece.probabilities for piece in pieces], 1)
        labels = torch.cat([piece.labels for piece in pieces])
        groups = torch.cat([piece.groups for piece in pieces])
        sizes = groups.bincount(minlength=self._counts.shape[2]).tolist()
        rows_of_groups = torch.split(groups.argsort(stable=True), sizes)
        scores: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        for group, rows in enumerate(rows_of_groups):
            if not len(rows):
                continue
            for place, model in enumerate(pieces[0].models):
                for name, compute in self._functions.items():
                    score = compute(predictions[place, rows], labels[rows])
                    scores[name][model, group] = score.to(torch.get_default_dtype())
        return scores

    def _table(self, score_of: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Arrange scores by (model, group), one or one per class, in a table (P, G) or (P, G, K)."""
        shape_of_score: tuple[int, ...] = ()
        if score_of:
            shape_of_score = tuple(next(iter(score_of.values())).shape)
        table = torch.full((*self._counts.shape[1:], *shape_of_score), torch.nan)
        for (model, group), score in score_of.items():
            table[model, group] = score
        return table


BINS = 15
"""Bins of equal width between confidence 0 and 1, as in Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599."""


class Tally:
    """Counts one model's predictions for each client: calibration, and confusion between classes.

    Nothing is copied from the device before the end. Of each image the tally keeps one number at most, its *code*, for
    client, class and predicted class. With several labels an image, each label is a prediction of its own, and only
    calibration is counted.
    """

    def __init__(self, multilabel: bool) -> None:
        self.multilabel = multilabel
        self._classes = 0  # unknown before the first batch
        self._codes: list[Tensor] = []
        self._bins = torch.zeros(3, BINS, dtype=torch.float64)  # predictions, right ones, sum of confidences

    def update(self, logits: Tensor, y: Tensor, owner: Tensor, counted: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            logits: Logits (B, K).
            y: Classes (B,) or labels (B, K).
            owner: The clients (B,) whose images they are.
            counted: Whether each image (B,) counts, by default all do.
        """
        if counted is not None:
            logits = logits[counted]
            y = y[counted]
            owner = owner[counted]
        if self.multilabel:
            likely = logits.float().sigmoid()
            predicted = (likely > 0.5).long()
            confidence = torch.maximum(likely, 1 - likely).flatten()
            right = (predicted == y.long()).flatten()
        else:
            confidence, predicted = logits.float().softmax(-1).max(-1)
            right = predicted == y
            self._classes = logits.shape[-1]
            self._codes.append((owner * self._classes + y) * self._classes + predicted)
        confidence = double(confidence)  # float32 stops counting at 16 million
        self._bins = self._bins.to(confidence)
        bins = (confidence * BINS).long().clamp(0, BINS - 1)  # NaN, of a model that broke, has no bin of its own
        of_predictions = torch.stack([torch.ones_like(confidence), right.to(confidence), confidence.nan_to_num()])
        self._bins.index_add_(1, bins, of_predictions)

    def record(self, ranks: Ranks) -> dict[str, Any]:
        """Return the counts of all processes, in plain types. A collective: all must call this, once, at the end.

        Returns:
            ``calibration`` with ``count``, ``right`` and the mean ``confidence`` of each of the :data:`BINS`; with one
            label an image also ``confusion``, rows of client, class, predicted class and number of images above 0.
        """
        bins = self._bins.double().cpu()
        ranks.sum_([bins])
        own_codes = torch.empty(0, dtype=torch.int64)
        if self._codes:
            own_codes = torch.cat(self._codes).cpu()
        codes, counts = torch.cat(ranks.gather(own_codes)).unique(return_counts=True)
        classes = max(ranks.gather(self._classes))
        mean_confidence = bins[2] / bins[0].clamp(min=1)
        record: dict[str, Any] = {
            "calibration": {
                "count": bins[0].long().tolist(),
                "right": bins[1].long().tolist(),
                "confidence": [round(value, 6) for value in mean_confidence.tolist()],
            }
        }
        if not self.multilabel:
            confusion = []
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
                # A code is client · K² + class · K + predicted class.
                client_and_class, predicted_class = divmod(code, classes)
                client, true_class = divmod(client_and_class, classes)
                confusion.append([client, true_class, predicted_class, count])
            record["confusion"] = confusion
        return record
