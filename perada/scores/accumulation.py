# SPDX-License-Identifier: Apache-2.0
"""Counts of predictions during evaluation, which are summed over the processes at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.states import double, to_device_async
from perada.scores.metrics import Metric
from perada.tasks import Task


def finite_outputs(logits: Tensor, leading_axes: int = 1) -> Tensor:
    """Return a mask of the images for which all outputs of a model are finite.

    Args:
        logits: Logits (..., K) or (..., H, W, K), with ``leading_axes`` axes of models and images.
        leading_axes: Number of axes of the mask.

    >>> finite_outputs(torch.tensor([[0.0, 1.0], [0.0, torch.inf], [torch.nan, 0.0]])).tolist()
    [True, False, False]
    """
    return logits.isfinite().flatten(leading_axes).all(-1)


def probabilities(logits: Tensor, task: Task) -> Tensor:
    """Compute probabilities (..., K) from logits (..., K), in double precision where the device supports it."""
    return task.predictions(double(logits))


@dataclass(frozen=True)
class _Outputs:
    """Outputs of some models on the images of a batch.

    Attributes:
        logits: Logits (p, B, K) of p models.
        y: Classes (B,) or labels (B, K).
        groups: Group (B,) of each image.
        models: Indices of the p models.
        counted: Mask (B,) of the images to include; None for all.
    """

    logits: Tensor
    y: Tensor
    groups: Tensor
    models: tuple[int, ...]
    counted: Tensor | None


class Scores:
    """Scores P models on G groups of images by several metrics.

    Args:
        metrics: The metrics.
        task: What the models predict.
        num_models: Number P of models.
        num_groups: Number G of groups.
    """

    def __init__(self, metrics: Sequence[Metric], task: Task, num_models: int = 1, num_groups: int = 1) -> None:
        self.metrics = metrics
        self.task = task
        self._num_models = num_models
        # A metric belongs to one of these three, which differ in what they keep of a batch.
        self._accuracy = _Accuracy(task, num_models, num_groups)
        self._statistics = _MetricStatistics(metrics, task, num_models, num_groups)
        self._predictions = _StoredPredictions(metrics, task, num_models, num_groups)
        self._failed_images = torch.zeros(num_models, num_groups, dtype=torch.int64)
        self._has_accuracy = any(metric.is_accuracy for metric in metrics)

    def __bool__(self) -> bool:
        """Return whether any batch was added."""
        return bool(self._predictions) or bool(self._statistics) or bool(self._accuracy)

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
            models = range(self._num_models)
        if groups is None:
            groups = y.new_zeros(len(y), dtype=torch.int64)
        outputs = _Outputs(logits, y, groups, tuple(models), counted)
        self._count_failed_images(outputs)
        if self._has_accuracy:
            self._accuracy.update(outputs)
        self._statistics.update(outputs)
        self._predictions.update(outputs)

    def _count_failed_images(self, batch_outputs: _Outputs) -> None:
        """Count the images of a batch for which a model's outputs are NaN or infinite, on the batch's device."""
        is_failed = ~finite_outputs(batch_outputs.logits, leading_axes=2)  # (p, B)
        if batch_outputs.counted is not None:
            is_failed = is_failed & batch_outputs.counted
        failed = is_failed.long()
        self._failed_images = to_device_async(self._failed_images, failed.device)
        by_group = failed.new_zeros(len(batch_outputs.models), self._failed_images.shape[1])
        by_group.index_add_(1, batch_outputs.groups, failed)
        rows = to_device_async(torch.tensor(batch_outputs.models), failed.device)
        self._failed_images.index_add_(0, rows, by_group)

    @property
    def failed_images(self) -> Tensor:
        """Number (P, G) of images for which a model's outputs are NaN or infinite, on the CPU."""
        return self._failed_images.cpu()

    @property
    def counts(self) -> Tensor:
        """Numbers of right and of all predictions, (2, P, G) on the CPU; zeros unless a metric is accuracy."""
        return self._accuracy.counts.cpu()

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Statistics (P, G, S) of the metrics that have some, by name, on the CPU; empty before the first batch."""
        return self._statistics.on_cpu()

    def merge(self, ranks: Ranks) -> None:
        """Add the counts of the other processes. A collective: all must call this once, at the end."""
        # The order of these collectives must be the same on all ranks.
        ranks.sum_([self._accuracy.counts, self._failed_images])
        self._statistics.merge(ranks)
        self._predictions.merge(ranks)

    def means(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by metric; for per-class metrics, the mean over the classes that occur."""
        means = {}
        for name, scores in self.all().items():
            is_per_class = scores.dim() == 3
            means[name] = scores.nanmean(-1) if is_per_class else scores
        return means

    def all(self) -> dict[str, Tensor]:
        """Compute scores (P, G) by metric, or (P, G, K) for per-class metrics, on the CPU.

        A score is NaN if the model was not evaluated on any image of the group, or if its outputs for any of them are
        NaN or infinite: such an image has no prediction, and a score of the others would be of a different set.
        """
        scores = self._statistics.scores() | self._predictions.scores()
        for metric in self.metrics:
            if metric.is_accuracy:
                scores[metric.name] = self._accuracy.scores()
        has_failed = self.failed_images > 0
        # In the order of the metrics: the first one is the run's main metric.
        results = {}
        for metric in self.metrics:
            values = scores[metric.name]
            mask = has_failed if values.dim() == 2 else has_failed.unsqueeze(-1)
            results[metric.name] = values.masked_fill(mask, torch.nan)
        return results


class _Accuracy:
    """Accuracy of P models on G groups of images, from counts that are copied to the host only at the end.

    Attributes:
        counts: Numbers of right and of all predictions, (2, P, G).
    """

    def __init__(self, task: Task, num_models: int, num_groups: int) -> None:
        self.counts = torch.zeros(2, num_models, num_groups, dtype=torch.int64)
        self._task = task

    def __bool__(self) -> bool:
        """Return whether any prediction was counted."""
        return bool(self.counts.any())

    def update(self, batch_outputs: _Outputs) -> None:
        """Count the right and all predictions of a batch, on its device."""
        y = batch_outputs.y
        has_label = self._task.known(y)
        hits = (self._task.predicted(batch_outputs.logits) == y.long()) & has_label
        # With several labels per image, each is a separate prediction.
        right = hits.view(*batch_outputs.logits.shape[:2], -1).sum(-1)
        num_predictions = has_label.view(len(y), -1).sum(-1).expand_as(right)
        counts = torch.stack([right, num_predictions])  # (2, p, B)
        if batch_outputs.counted is not None:
            counts = counts * batch_outputs.counted

        self.counts = to_device_async(self.counts, counts.device)
        # First summed over the images of each group, then added to the rows of the p models.
        sums = counts.new_zeros(2, len(batch_outputs.models), self.counts.shape[2])
        sums.index_add_(2, batch_outputs.groups, counts)
        rows = to_device_async(torch.tensor(batch_outputs.models), counts.device)
        self.counts.index_add_(1, rows, sums)

    def scores(self) -> Tensor:
        """Compute the accuracies (P, G), on the CPU."""
        # In double precision, since float32 has no odd numbers above 16 million, and masks have more pixels.
        right, num_predictions = self.counts.cpu().double()
        accuracies: Tensor = right / num_predictions
        return accuracies.to(torch.get_default_dtype())


class _MetricStatistics:
    """Metrics that are computed from statistics of the images, which are copied to the host only at the end."""

    def __init__(self, metrics: Sequence[Metric], task: Task, num_models: int, num_groups: int) -> None:
        self._metrics = {metric.name: metric.summed for metric in metrics if metric.summed is not None}
        self._task = task
        self._num_models = num_models
        self._num_groups = num_groups
        # Statistics (P, G, S) by metric; empty before the first batch.
        self._statistics: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        """Return whether any batch was added."""
        return bool(self._statistics)

    def update(self, batch_outputs: _Outputs) -> None:
        """Add the statistics of a batch, on its device."""
        if not self._metrics:
            return
        predicted = self._task.predicted(batch_outputs.logits)
        rows = to_device_async(torch.tensor(batch_outputs.models), batch_outputs.y.device)
        for name, metric in self._metrics.items():
            of_batch = metric.statistics(
                predicted, batch_outputs.y, batch_outputs.groups, self._num_groups, batch_outputs.counted
            )
            if name not in self._statistics:
                self._statistics[name] = of_batch.new_zeros(self._num_models, self._num_groups, of_batch.shape[-1])
            statistics = self._statistics[name]
            statistics[rows] = metric.combine(statistics[rows], of_batch)

    def on_cpu(self) -> dict[str, Tensor]:
        """Return the statistics (P, G, S) by metric, on the CPU."""
        return {name: statistics.cpu() for name, statistics in self._statistics.items()}

    def merge(self, ranks: Ranks) -> None:
        """Combine the statistics with those of the other processes. A collective, unless there is no such metric."""
        if not self._metrics:
            return
        statistics_of_ranks = ranks.gather(self.on_cpu())
        self._statistics = {}
        for statistics_of_rank in statistics_of_ranks:
            # A rank without batches has no statistics.
            for name, statistics in statistics_of_rank.items():
                if name in self._statistics:
                    self._statistics[name] = self._metrics[name].combine(self._statistics[name], statistics)
                else:
                    self._statistics[name] = statistics

    def scores(self) -> dict[str, Tensor]:
        """Compute the scores (P, G) or (P, G, K) by metric, on the CPU."""
        scores = {}
        for name, metric in self._metrics.items():
            if name in self._statistics:
                scores[name] = metric.score(self._statistics[name].cpu()).to(torch.get_default_dtype())
            else:
                scores[name] = torch.full((self._num_models, self._num_groups), torch.nan)
        return scores


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


class _StoredPredictions:
    """Metrics such as AUROC that are not sums over batches, for which all predictions are stored on the CPU."""

    def __init__(self, metrics: Sequence[Metric], task: Task, num_models: int, num_groups: int) -> None:
        self._functions = {metric.name: metric.compute for metric in metrics if metric.compute is not None}
        self._task = task
        self._num_models = num_models
        self._num_groups = num_groups
        self._batches: list[_Predictions] = []

    def __bool__(self) -> bool:
        """Return whether any batch was stored."""
        return bool(self._batches)

    def update(self, batch_outputs: _Outputs) -> None:
        """Store the predictions of a batch."""
        if not self._functions:
            return
        # On the CPU, since the device may not support double precision. In single precision, many confident predictions
        # would be equal, and could not be ranked.
        predictions = probabilities(batch_outputs.logits.cpu(), self._task)
        positions: slice | Tensor = slice(None)
        if batch_outputs.counted is not None:
            positions = batch_outputs.counted.cpu()
        batch = _Predictions(
            models=batch_outputs.models,
            probabilities=predictions[:, positions],
            labels=batch_outputs.y.cpu()[positions],
            groups=batch_outputs.groups.cpu()[positions],
        )
        self._batches.append(batch)

    def merge(self, ranks: Ranks) -> None:
        """Add the predictions of the other processes. A collective, unless nothing is stored for any metric."""
        if self._functions:
            batches_of_ranks = ranks.gather(self._batches)
            self._batches = list(chain.from_iterable(batches_of_ranks))

    def scores(self) -> dict[str, Tensor]:
        """Compute the scores (P, G) or (P, G, K) by metric, on the CPU."""
        batches_of_models: dict[tuple[int, ...], list[_Predictions]] = {}
        for batch in self._batches:
            batches_of_models.setdefault(batch.models, []).append(batch)
        score_of: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        for batches in batches_of_models.values():
            for name, scores_of_models in self._compute_scores(batches).items():
                score_of[name] |= scores_of_models
        return {name: self._arrange_scores(scores) for name, scores in score_of.items()}

    def _compute_scores(
        self, predictions_of_batches: Sequence[_Predictions]
    ) -> Mapping[str, dict[tuple[int, int], Tensor]]:
        """Compute scores by metric and by (model, group).

        Args:
            predictions_of_batches: Predictions of the same models on several batches, which are scored together.
        """
        predictions = torch.cat([batch.probabilities for batch in predictions_of_batches], 1)
        labels = torch.cat([batch.labels for batch in predictions_of_batches])
        groups = torch.cat([batch.groups for batch in predictions_of_batches])
        sizes = groups.bincount(minlength=self._num_groups).tolist()
        rows_of_groups = torch.split(groups.argsort(stable=True), sizes)
        scores_of_group: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in self._functions}
        for group, rows in enumerate(rows_of_groups):
            if len(rows) == 0:
                continue
            for place, model in enumerate(predictions_of_batches[0].models):
                predictions_of_group = predictions[place, rows]
                if not predictions_of_group.isfinite().all():
                    # Metrics of torchmetrics reject NaN, or rank it like a number. There is no score.
                    continue
                for name, compute in self._functions.items():
                    score = compute(predictions_of_group, labels[rows])
                    scores_of_group[name][model, group] = score.to(torch.get_default_dtype())
        return scores_of_group

    def _arrange_scores(self, score_of: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Arrange scores by (model, group) in a table (P, G), or (P, G, K) if there is a score for each class."""
        shape_of_score: tuple[int, ...] = ()
        if score_of:
            shape_of_score = tuple(next(iter(score_of.values())).shape)
        table = torch.full((self._num_models, self._num_groups, *shape_of_score), torch.nan)
        for (model, group), score in score_of.items():
            table[model, group] = score
        return table


FAILED_IMAGES = "failed_images"
"""Entry of a record of predictions: number of images for which outputs of the model are NaN or infinite."""
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
        self._failed_images = torch.zeros(1, dtype=torch.int64)

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
        failed_images = (~finite_outputs(logits)).sum().view(1)
        self._failed_images = self._failed_images.to(failed_images.device) + failed_images
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
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
        # A confidence of NaN is counted in some bin, and record() then returns no bins.
        bins = (confidence * BINS).long().clamp(0, BINS - 1)
        label_counts = has_label.to(confidence)
        summands = torch.stack([label_counts, right.to(confidence), confidence.nan_to_num() * label_counts])
        self._bins.index_add_(1, bins, summands)

    def record(self, ranks: Ranks) -> dict[str, Any]:
        """Return the counts of all processes, in plain types. A collective: all must call this once, at the end.

        Returns:
            ``calibration`` with ``count``, ``right`` and the mean ``confidence`` of each of the :data:`BINS`; with one
            label per image also ``confusion``, rows of client, class, predicted class and number of images, if above 0.
            Only ``failed_images``, their number, if outputs of the model are NaN or infinite for some images.
        """
        bins = self._bins.double().cpu()
        failed_images = self._failed_images.cpu()
        ranks.sum_([bins, failed_images])
        local_codes = torch.empty(0, dtype=torch.int64)
        if self._codes:
            local_codes = torch.cat(self._codes).cpu()
        all_codes = torch.cat(ranks.gather(local_codes))
        codes, counts = all_codes.unique(return_counts=True)
        # A rank without batches does not know the number of classes.
        classes = max(ranks.gather(self._classes))
        if failed_images.any():
            return {FAILED_IMAGES: int(failed_images)}
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
