# SPDX-License-Identifier: Apache-2.0
"""What is counted of predictions while models are scored, and added up over processes at the end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.states import to_device_async
from perada.federation.metrics import Metric
from perada.server.aggregate import double


def probabilities(logits: Tensor, multilabel: bool) -> Tensor:
    """Predictions (..., K) of logits (..., K), in double precision where the device has it."""
    return double(logits).sigmoid() if multilabel else double(logits).softmax(-1)


class Scores:
    """Scores P ``models`` on G ``groups`` of images each by some metrics; labels are 0/1 per class if ``multilabel``.

    Accuracy is counted on the device, and nothing is copied from it before the end; the others have to keep all
    predictions.
    """

    def __init__(self, metrics: Sequence[Metric], multilabel: bool, models: int = 1, groups: int = 1) -> None:
        self.metrics = metrics
        self.multilabel = multilabel
        self._counted = any(metric.compute is None for metric in metrics)
        self._kept = any(metric.compute is not None for metric in metrics)
        self._counts = torch.zeros(2, models, groups, dtype=torch.int64)  # right predictions, and all
        self._pieces: list[tuple[tuple[int, ...], Tensor, Tensor, Tensor]] = []  # models, predictions, labels, groups

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
        if self._counted:
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
            sums = counts.new_zeros(*counts.shape[:2], self._counts.shape[2]).index_add_(2, groups, counts)
            self._counts.index_add_(1, to_device_async(torch.tensor(models), counts.device), sums)
        if not self._kept:
            return
        # In double precision, which the device may not have: in single, confident predictions would be ranked alike.
        predictions = probabilities(logits.cpu(), self.multilabel)
        rows = slice(None) if counted is None else counted.cpu()
        self._pieces.append((tuple(models), predictions[:, rows], y.cpu()[rows], groups.cpu()[rows]))

    @property
    def counts(self) -> Tensor:
        """Right predictions and all, (2, P, G), on the CPU; zeros unless a metric is accuracy."""
        return self._counts.cpu()

    def merge(self, ranks: Ranks) -> None:
        """Add what the other processes counted; all of them call it, once, at the end."""
        ranks.sum_([self._counts])
        if self._kept:
            self._pieces = [piece for pieces in ranks.gather(self._pieces) for piece in pieces]

    def means(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by each metric; of one that scores each class, the mean of the classes that occur."""
        means = {}
        for name, scores in self.all().items():
            means[name] = scores if scores.dim() == 2 else scores.nanmean(-1)
        return means

    def all(self) -> dict[str, Tensor]:
        """Scores (P, G) by each metric, or (P, G, K) by one that scores each class, on the CPU.

        NaN where a model has no image of a group.
        """
        shape = self._counts.shape[1:]
        counts = self._counts.cpu().float()
        results = {metric.name: counts[0] / counts[1] for metric in self.metrics if metric.compute is None}
        functions = {metric.name: metric.compute for metric in self.metrics if metric.compute is not None}
        values: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in functions}
        # Batches of the same models are scored together: a metric such as AUROC is not a mean over batches.
        for models in dict.fromkeys(piece[0] for piece in self._pieces):
            pieces = [piece for piece in self._pieces if piece[0] == models]
            predictions = torch.cat([piece[1] for piece in pieces], 1)
            labels = torch.cat([piece[2] for piece in pieces])
            groups = torch.cat([piece[3] for piece in pieces])
            sizes = groups.bincount(minlength=shape[1]).tolist()
            for group, rows in enumerate(torch.split(groups.argsort(stable=True), sizes)):
                if not len(rows):
                    continue
                for place, model in enumerate(models):
                    for name, compute in functions.items():
                        score = compute(predictions[place, rows], labels[rows])
                        values[name][model, group] = score.to(torch.get_default_dtype())
        for name, scores in values.items():
            classes = next(iter(scores.values())).shape if scores else ()
            results[name] = torch.full((*shape, *classes), torch.nan)
            for (model, group), score in scores.items():
                results[name][model, group] = score
        return results


BINS = 15
"""Bins of equal width between confidence 0 and 1, as in Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599."""


class Tally:
    """Counts predictions of one model for each client; nothing is copied from the device before the end.

    Of each image the tally keeps one number at most: client, class and predicted class. With several labels an image,
    each label is a prediction of its own, and only calibration is counted.
    """

    def __init__(self, multilabel: bool) -> None:
        self.multilabel = multilabel
        self._classes = 0
        self._codes: list[Tensor] = []
        self._bins = torch.zeros(3, BINS, dtype=torch.float64)  # predictions, right ones, sum of confidences

    def update(self, logits: Tensor, y: Tensor, owner: Tensor, counted: Tensor | None = None) -> None:
        """Add logits (B, K) of images of the clients ``owner`` (B,), with classes (B,) or labels (B, K).

        ``counted`` (B,) tells which images count, by default all.
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
        each = torch.stack([torch.ones_like(confidence), right.to(confidence), confidence.nan_to_num()])
        self._bins.index_add_(1, bins, each)

    def record(self, ranks: Ranks) -> dict[str, Any]:
        """What all processes have counted, in plain types; all of them call it, once, at the end.

        Returns:
            ``calibration`` with ``count``, ``right`` and the mean ``confidence`` of each of the :data:`BINS`; with one
            label an image also ``confusion``, rows of client, class, predicted class and number of images above 0.
        """
        bins = self._bins.double().cpu()
        ranks.sum_([bins])
        own_codes = torch.cat(self._codes).cpu() if self._codes else torch.empty(0, dtype=torch.int64)
        codes, counts = torch.cat(ranks.gather(own_codes)).unique(return_counts=True)
        classes = max(ranks.gather(self._classes))
        record: dict[str, Any] = {
            "calibration": {
                "count": bins[0].long().tolist(),
                "right": bins[1].long().tolist(),
                "confidence": [round(value, 6) for value in (bins[2] / bins[0].clamp(min=1)).tolist()],
            }
        }
        if not self.multilabel:
            # A code is client · K² + class · K + predicted class.
            record["confusion"] = [
                [code // classes**2, code // classes % classes, code % classes, count]
                for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
            ]
        return record
