# SPDX-License-Identifier: Apache-2.0
"""Metrics of keypoints: how far predicted points are from the true ones."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perada.core.states import double
from perada.tasks.base import SummedMetric


def distances_and_known(predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of each point to its target, 0 where that is unknown, and which targets are known.

    Args:
        predicted: Coordinates (..., 2 P) of P points, (x, y) after (x, y).
        targets: True coordinates (..., 2 P), with NaN where a point is unknown.

    Returns:
        Distances and a mask, both (..., P), in the dtype of the predictions.
    """
    differences = (predicted - targets.to(predicted.dtype)).unflatten(-1, (-1, 2))
    is_known = targets.isfinite().unflatten(-1, (-1, 2)).all(-1)
    distances = differences.where(is_known.unsqueeze(-1), 0).square().sum(-1).sqrt()
    return distances, is_known.expand_as(distances)


@dataclass(frozen=True)
class _KeypointMetric(SummedMetric):
    """Base of metrics that are a mean over the images in which a keypoint is known.

    Args:
        keypoints: Number P of keypoints.
        per_keypoint: Whether there is a score for each keypoint, instead of their mean.
    """

    keypoints: int
    per_keypoint: bool = False

    def summands(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return summands (p, N, 2 P) of each image from predictions (p, N, 2 P) and targets (N, 2 P)."""
        distances, is_known = distances_and_known(double(predicted), double(targets).expand_as(predicted))
        values = self._averaged_values(distances).where(is_known, 0)
        return torch.cat([values, is_known.to(values)], -1)

    def score(self, statistics: Tensor) -> Tensor:
        """Return scores (..., P), NaN where a keypoint is unknown in all images, or their means (...)."""
        sums = statistics[..., : self.keypoints]
        images = statistics[..., self.keypoints :]
        # 0 / 0 is NaN.
        scores = sums / images
        return scores if self.per_keypoint else scores.nanmean(-1)

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether sums are finite and not negative, and of no more images than there are."""
        images = statistics[self.keypoints :]
        # All comparisons are false for NaN.
        return bool(statistics.isfinite().all() and (statistics >= 0).all() and (images <= max_images).all())

    @abstractmethod
    def _averaged_values(self, distances: Tensor) -> Tensor:
        """Return what is averaged, from distances (p, N, P) in pixels."""


class MeanDistance(_KeypointMetric):
    """Mean distance of predicted to true keypoints, in pixels."""

    lower_is_better: ClassVar[bool] = True

    def _averaged_values(self, distances: Tensor) -> Tensor:
        return distances


@dataclass(frozen=True)
class CorrectKeypoints(_KeypointMetric):
    """Share of keypoints that are predicted at most a distance from the true ones, PCK (Yang and Ramanan, 2013).

    Args:
        threshold: The distance in pixels.
    """

    threshold: float = 0.0

    def _averaged_values(self, distances: Tensor) -> Tensor:
        return (distances <= self.threshold).to(distances)

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether no keypoint is correct in more images than it is known in."""
        correct = statistics[: self.keypoints]
        images = statistics[self.keypoints :]
        return bool((correct <= images).all()) and super().is_possible(statistics, max_images, max_pixels)
