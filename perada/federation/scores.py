# SPDX-License-Identifier: Apache-2.0
"""Counts of predictions during evaluation, which are summed over the processes at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.states import to_device_async
from perada.federation.metrics import Compute, Metric
from perada.server.aggregate import double
from perada.tasks import Task


def probabilities(logits: Tensor, task: Task) -> Tensor:
    """Compute probabilities (..., K) from logits (..., K), in double precision where the device supports it."""
    return task.predictions(double(logits))


@dataclass(frozen=True)
class _Predictions:
    """Predictions of some models on a batch, on the CPU.

    Attributes:
        models: Indices of the p models.
        probabilities: Probabilities (p, B, K) that they predict.
        labels: Classes (B,) or labels (B, K).
        groups: Group (B,) of each image.
    """

    models: tuple[int, ...]
    probabilities: Tensor
    labels: Tensor
    groups: Tensor


class Scores:
    """Scores P models on G groups of images by several metrics.

    Accuracy and metrics of masks are computed from sums, which are copied to the host only at the end. The other
    metrics are not sums over batches, so all predictions are stored for them on the CPU.

    Args:
        metrics: The metrics.
        task: What the models predict.
        models: Number P of models.
        groups: Number G of groups.
    """

    def __init__(self, metrics: Sequence[Metric], task: Task, models: int = 1, groups: int = 1) -> None:
        self.metrics = metrics
        self.task = task
        self._counts_accuracy = any(metric.is_accuracy for metric in metrics)
        self._functions: dict[str, Compute] = {}
        for metric in metrics:
            if metric.compute is not None:
                self._functions[metric.name] = metric.compute
        self._summed = {metric.name: metric.summed for metric in metrics if metric.summed is not None}
        # Numbers of right and of all predictions.
        self._counts = torch.zeros(2, models, groups, dtype=torch.int64)
        # Sums (P, G, S) of the summed metrics by name; empty before the first batch.
        self._sums: dict[str, Tensor] = {}
        self._pieces: list[_Predictions] = []

    def __bool__(self) -> bool:
        """Return whether any batch was added."""
        return bool(self._pieces) or bool(self._sums) or bool(self._counts.any())

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
            groups: Group (B,) of each image; by default group 0.
            models: Indices of the p models; by default all.
            counted: Mask (B,) of the images to include; by default all.
        """
        if models is None:
            models = range(self._counts.shape[1])
        if groups is None:
            groups = y.new_zeros(len(y), dtype=torch.int64)
        if self._counts_accuracy:
            self._count(logits, y, groups, models, counted)
        if self._summed:
            self._sum(logits, y, groups, models, counted)
        if not self._functions:
            return
        # On the CPU, since the device may not support double precision. In single precision, many confident predictions
        # would be equal, and could not be ranked.
        predictions = probabilities(logits.cpu(), self.task)
        rows: slice | Tensor = slice(None)
        if counted is not None:
            rows = counted.cpu()
        piece = _Predictions(
            models=tuple(models),
            probabilities=predictions[:, rows],
            labels=y.cpu()[rows],
            groups=groups.cpu()[rows],
        )
        self._pieces.append(piece)

    def _count(self, logits: Tensor, y: Tensor, groups: Tensor, models: Sequence[int], counted: Tensor | None) -> None:
        """Count the correct and the total predictions of a batch, on the device."""
        has_label = self.task.known(y)
        hits = (self.task.predicted(logits) == y.long()) & has_label
        # With several labels per image, each is a separate prediction.
        right = hits.view(*logits.shape[:2], -1).sum(-1)
        num_predictions = has_label.view(len(y), -1).sum(-1).expand_as(right)
        counts = torch.stack([right, num_predictions])  # (2, p, B)
        if counted is not None:
            counts = counts * counted

        self._counts = to_device_async(self._counts, counts.device)
        _, num_models, _ = counts.shape
        num_groups = self._counts.shape[2]
        # First summed over the images of each group, then added to the rows of the p models.
        sums = counts.new_zeros(2, num_models, num_groups)
        sums.index_add_(2, groups, counts)
        rows = to_device_async(torch.tensor(models), counts.device)
        self._counts.index_add_(1, rows, sums)

    def _sum(self, logits: Tensor, y: Tensor, groups: Tensor, models: Sequence[int], counted: Tensor | None) -> None:
        """Add the summands of a batch, on the device."""
        predicted = self.task.predicted(logits)
        rows = to_device_async(torch.tensor(models), y.device)
        _, num_models, num_groups = self._counts.shape
        for name, metric in self._summed.items():
            summands = double(metric.summands(predicted, y))  # (p, B, S)
            if counted is not None:
                summands = summands * counted.unsqueeze(-1)
            if name not in self._sums:
                self._sums[name] = summands.new_zeros(num_models, num_groups, summands.shape[-1])
            sums = summands.new_zeros(len(models), num_groups, summands.shape[-1])
            sums.index_add_(1, groups, summands)
            self._sums[name].index_add_(0, rows, sums)

    @property
    def counts(self) -> Tensor:
        """Numbers of right and of all predictions, (2, P, G) on the CPU; zeros unless a metric is accuracy."""
        return self._counts.cpu()

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums (P, G, S) of the summed metrics by name, on the CPU; empty before the first batch."""
        return {name: sums.cpu() for name, sums in self._sums.items()}

    def merge(self, ranks: Ranks) -> None:
        """Add the counts of the other processes. A collective: all must call this once, at the end."""
        ranks.sum_([self._counts])
        if self._summed:
            self._merge_sums(ranks)
        if self._functions:
            pieces_of_ranks = ranks.gather(self._pieces)
            self._pieces = list(chain.from_iterable(pieces_of_ranks))

    def _merge_sums(self, ranks: Ranks) -> None:
        """Add the sums of the other processes. A collective."""
        sums_of_ranks = ranks.gather(self.sums)
        self._sums = {}
        for sums_of_rank in sums_of_ranks:
            for name, sums in sums_of_rank.items():
                # A rank without batches has no sums.
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def means(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by metric; for per-class metrics, the mean over the classes that occur."""
        means = {}
        for name, scores in self.all().items():
            is_per_class = scores.dim() == 3
            means[name] = scores.nanmean(-1) if is_per_class else scores
        return means

    def all(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by metric, or (P, G, K) for per-class metrics, on the CPU.

        A score is NaN if the model was not evaluated on any image of the group.
        """
        results = {}
        right, num_predictions = self._counts.cpu().float()
        for metric in self.metrics:
            if metric.is_accuracy:
                results[metric.name] = right / num_predictions
        _, num_models, num_groups = self._counts.shape
        for name, summed in self._summed.items():
            if name in self._sums:
                results[name] = summed.score(self._sums[name].cpu()).to(torch.get_default_dtype())
            else:
                results[name] = torch.full((num_models, num_groups), torch.nan)

        # Batches of the same models are scored together, since metrics such as AUROC are not means over batches.
        pieces_of_models: dict[tuple[int, ...], list[_Predictions]] = {}
        for piece in self._pieces:
            pieces_of_models.setdefault(piece.models, []).append(piece)
        scores: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        for pieces in pieces_of_models.values():
            for name, scores_of_models in self._score(pieces).items():
                scores[name] |= scores_of_models
        for name, score_of in scores.items():
            results[name] = self._table(score_of)
        return results

    def _score(self, pieces: Sequence[_Predictions]) -> Mapping[str, dict[tuple[int, int], Tensor]]:
        """Compute scores by metric and by (model, group).

        Args:
            pieces: Predictions of the same models on several batches.
        """
        predictions = torch.cat([piece.probabilities for piece in pieces], 1)
        labels = torch.cat([piece.labels for piece in pieces])
        groups = torch.cat([piece.groups for piece in pieces])
        num_groups = self._counts.shape[2]
        sizes = groups.bincount(minlength=num_groups).tolist()
        rows_of_groups = torch.split(groups.argsort(stable=True), sizes)
        scores: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        for group, rows in enumerate(rows_of_groups):
            if len(rows) == 0:
                continue
            for place, model in enumerate(pieces[0].models):
                for name, compute in self._functions.items():
                    score = compute(predictions[place, rows], labels[rows])
                    scores[name][model, group] = score.to(torch.get_default_dtype())
        return scores

    def _table(self, score_of: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Arrange scores by (model, group) in a table (P, G), or (P, G, K) if there is a score for each class."""
        shape_of_score: tuple[int, ...] = ()
        if score_of:
            shape_of_score = tuple(next(iter(score_of.values())).shape)
        _, num_models, num_groups = self._counts.shape
        table = torch.full((num_models, num_groups, *shape_of_score), torch.nan)
        for (model, group), score in score_of.items():
            table[model, group] = score
        return table


BINS = 15
"""Number of bins of equal width between confidence 0 and 1, as in Guo et al., ICML 2017 (arXiv 1706.04599)."""


class Tally:
    """Counts one model's predictions for each client: calibration, and confusion between classes.

    Nothing is copied to the host before the end. For each image, at most one number is stored, its *code*, which
    combines client, class and predicted class. With several labels per image, each label is a separate prediction, and
    only calibration is counted.

    Args:
        task: What the model predicts.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        # Unknown before the first batch.
        self._classes = 0
        self._codes: list[Tensor] = []
        # Number of predictions, number of right ones, and sum of confidences, by bin.
        self._bins = torch.zeros(3, BINS, dtype=torch.float64)

    def update(self, logits: Tensor, y: Tensor, owner: Tensor, counted: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            logits: Logits (B, K).
            y: Classes (B,) or labels (B, K).
            owner: Client (B,) that owns each image.
            counted: Mask (B,) of the images to include; by default all.
        """
        if counted is not None:
            logits = logits[counted]
            y = y[counted]
            owner = owner[counted]
        logits = logits.float()
        predicted = self.task.predicted(logits)
        # A mask, and not a selection of rows, whose number the host would have to wait for.
        has_label = self.task.known(y).flatten()
        right = (predicted == y.long()).flatten() & has_label
        confidence = self.task.confidence(logits).flatten()
        if self.task.exclusive:
            self._classes = logits.shape[-1]
            # client · K² + class · K + predicted class
            client_and_class = owner * self._classes + y
            self._codes.append(client_and_class * self._classes + predicted)
        # In double precision, since a sum of ones in float32 does not grow beyond 16 million.
        confidence = double(confidence)
        self._bins = self._bins.to(confidence)
        # A confidence of NaN, from a model that is not finite, is counted in some bin.
        bins = (confidence * BINS).long().clamp(0, BINS - 1)
        label_counts = has_label.to(confidence)
        summands = torch.stack([label_counts, right.to(confidence), confidence.nan_to_num() * label_counts])
        self._bins.index_add_(1, bins, summands)

    def record(self, ranks: Ranks) -> dict[str, Any]:
        """Return the counts of all processes, in plain types. A collective: all must call this once, at the end.

        Returns:
            ``calibration`` with ``count``, ``right`` and the mean ``confidence`` of each of the :data:`BINS`; with one
            label per image also ``confusion``, rows of client, class, predicted class and number of images, if above 0.
        """
        bins = self._bins.double().cpu()
        ranks.sum_([bins])
        local_codes = torch.empty(0, dtype=torch.int64)
        if self._codes:
            local_codes = torch.cat(self._codes).cpu()
        all_codes = torch.cat(ranks.gather(local_codes))
        codes, counts = all_codes.unique(return_counts=True)
        # A rank without batches does not know the number of classes.
        classes = max(ranks.gather(self._classes))
        num_predictions, num_right, sum_of_confidences = bins
        mean_confidence = sum_of_confidences / num_predictions.clamp(min=1)
        record: dict[str, Any] = {
            "calibration": {
                "count": num_predictions.long().tolist(),
                "right": num_right.long().tolist(),
                "confidence": [round(value, 6) for value in mean_confidence.tolist()],
            }
        }
        if self.task.exclusive:
            confusion = []
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
                client_and_class, predicted_class = divmod(code, classes)
                client, true_class = divmod(client_and_class, classes)
                confusion.append([client, true_class, predicted_class, count])
            record["confusion"] = confusion
        return record
