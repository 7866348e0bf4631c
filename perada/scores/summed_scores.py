# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions that follow from sums over images, and so can be resampled, pooled and given intervals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.core.states import double
from perada.scores.intervals import ratio
from perada.tasks import Regression, Task
from perada.tasks.base import SummedMetric

NUM_CALIBRATION_BINS = 15
"""Number of bins of the calibration error, as in the metric ``ece``."""


@dataclass(frozen=True)
class SummedScore:
    """A score that is computed from sums over images.

    Attributes:
        name: Name of the score.
        summands: Returns the summands (N, S) of images from predictions in the form that :func:`predictions_for`
            returns, and targets (N, ...).
        score: Computes scores (...) from sums (..., S).
        lower_is_better: Whether a lower score is better.
        is_share: Whether it is a share of successes, whose sums are successes and trials.
        has_recalls: Whether its sums are right predictions and images of each class, as those of balanced accuracy.
        has_counts: Whether its summands are integers.
    """

    name: str
    summands: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor], Tensor]
    lower_is_better: bool = False
    is_share: bool = False
    has_recalls: bool = False
    has_counts: bool = False


DEFAULTS_WITHOUT_CLASSES = ("dice", "miou", "mae", "rmse", "mean_distance", "pck")
"""Scores of masks, numbers and keypoints; a task has those of its kind."""


def summed_scores(task: Task, num_classes: int) -> list[SummedScore]:
    """Return the scores of a task.

    These are accuracy, balanced accuracy, the Brier score and the expected calibration error where images have classes,
    and else means over classes or targets of the task's own metrics.

    Args:
        task: What the models predict.
        num_classes: Number of classes K.
    """
    if task.has_classes and not task.per_pixel:
        scores = [SummedScore("accuracy", _Hits(task), ratio, is_share=True, has_counts=True)]
        if task.exclusive:
            hits_by_class = _HitsByClass(task, num_classes)
            scores.append(
                SummedScore("balanced_accuracy", hits_by_class, _mean_of_ratios, has_recalls=True, has_counts=True)
            )
        brier = SummedScore("brier", _SquaredErrors(task, num_classes), ratio, lower_is_better=True)
        ece = SummedScore("ece", _CalibrationBins(task), _calibration_error, lower_is_better=True)
        return [*scores, brier, ece]
    metrics = task.summed_metrics(num_classes)
    return [_of_metric(name, metrics[name], task) for name in DEFAULTS_WITHOUT_CLASSES if name in metrics]


def predictions_for(task: Task, logits: Tensor) -> Tensor:
    """Return what scores are computed from: probabilities (N, K) of classes, or predictions (N, ...) of other tasks."""
    if task.has_classes and not task.per_pixel:
        return task.predictions(double(logits))
    return task.predicted(logits)


def _of_metric(name: str, metric: SummedMetric, task: Task) -> SummedScore:
    """Return a metric of a task as a score, whose summands are of the order of 1.

    Squares of sums are added up over sites in integers, for which numbers in large units would be too large.
    """
    unit = 1.0
    if isinstance(task, Regression) and isinstance(task.std, Sequence | float | int):
        unit = float(np.max(task.std))

    def summands(predictions: Tensor, targets: Tensor) -> Tensor:
        if unit != 1:
            predictions = predictions / unit
            targets = targets.double() / unit
        of_images = double(metric.summands(predictions.unsqueeze(0), targets)[0])
        if name == "miou":
            # Pixels: as shares of the image they have the same ratios.
            of_images = of_images / targets[0].numel()
        return of_images

    def score(sums: Tensor) -> Tensor:
        return metric.score(metric.from_sums(sums)) * unit

    return SummedScore(name, summands, score, metric.lower_is_better)


def _mean_of_ratios(sums: Tensor) -> Tensor:
    """Return the mean over the classes that occur of K sums divided by K others, which are in sums (..., 2 K)."""
    numerators, denominators = sums.chunk(2, -1)
    return (numerators / denominators).nanmean(-1)


def _calibration_error(sums: Tensor) -> Tensor:
    """Return the expected calibration error from successes, confidences and trials by bin, in sums (..., 3 B)."""
    successes, confidences, trials = sums.chunk(3, -1)
    return (confidences - successes).abs().sum(-1) / trials.sum(-1)


@dataclass(frozen=True)
class _Hits:
    """Summands (N, 2) of accuracy: numbers of right predictions and of known labels."""

    task: Task

    def __call__(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        is_known = self.task.known(targets)
        is_right = (_decide_classes(self.task, probabilities) == targets) & is_known
        counts = [is_right.reshape(len(targets), -1).sum(1), is_known.reshape(len(targets), -1).sum(1)]
        return torch.stack(counts, 1).double()


def _decide_classes(task: Task, probabilities: Tensor) -> Tensor:
    """Return the predicted classes (N,) or labels (N, K) for probabilities (N, K)."""
    return probabilities.argmax(-1) if task.exclusive else (probabilities > 0.5).long()


@dataclass(frozen=True)
class _HitsByClass:
    """Summands (N, 2 K) of balanced accuracy: right predictions and images of each class."""

    task: Task
    num_classes: int

    def __call__(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        has_class = self.task.presence(targets, self.num_classes).double()
        is_right = (_decide_classes(self.task, probabilities) == targets).unsqueeze(1)
        return torch.cat([has_class * is_right, has_class], 1)


@dataclass(frozen=True)
class _SquaredErrors:
    """Summands (N, 2) of the Brier score, and their number.

    The score of an image is the sum over classes of squared errors, from 0 to 2 (Brier, 1950), and half of that with
    two classes. With several labels each known one is scored by itself.
    """

    task: Task
    num_classes: int

    def __call__(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        if self.task.exclusive:
            truth = self.task.presence(targets, self.num_classes).double()
            squared_errors = (probabilities - truth).square().sum(1)
            if self.num_classes == 2:
                squared_errors = squared_errors / 2
            return torch.stack([squared_errors, torch.ones_like(squared_errors)], 1)
        is_known = self.task.known(targets)
        squared_errors = (probabilities - targets).square().where(is_known, 0)
        return torch.stack([squared_errors.sum(1), is_known.sum(1).double()], 1).double()


@dataclass(frozen=True)
class _CalibrationBins:
    """Summands (N, 3 B) of the calibration error: successes, confidences and trials in each bin of confidence.

    The confidence is that of the predicted class, and with several labels the probability of each known label, as in
    torchmetrics' multiclass and binary calibration errors.
    """

    task: Task

    def __call__(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        if self.task.exclusive:
            confidences, predicted = probabilities.max(1, keepdim=True)
            successes = (predicted == targets.unsqueeze(1)).double()
            is_known = torch.ones_like(predicted, dtype=torch.bool)
        else:
            confidences = probabilities
            is_known = self.task.known(targets)
            successes = targets.where(is_known, 0).double()
        bins = (confidences * NUM_CALIBRATION_BINS).long().clamp(max=NUM_CALIBRATION_BINS - 1)
        parts: list[Any] = []
        for values in (successes, confidences.double(), torch.ones_like(confidences, dtype=torch.float64)):
            in_bins = torch.zeros(len(targets), NUM_CALIBRATION_BINS, dtype=torch.float64)
            parts.append(in_bins.scatter_add_(1, bins, values.where(is_known, 0)))
        return torch.cat(parts, 1)
