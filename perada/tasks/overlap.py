# SPDX-License-Identifier: Apache-2.0
"""Metrics of masks: how far predicted regions and true ones overlap."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from perada.tasks.base import SummedMetric


@dataclass(frozen=True)
class _Overlap(SummedMetric):
    """Base of metrics that compare the region of each class in two masks.

    A class that no mask of the images has gets no score, also if it is predicted somewhere.

    Args:
        num_classes: Number of classes K.
        ignore_index: Class of pixels that do not count.
        first_class: First class of the mean over classes.
        per_class: Whether there is a score for each class, instead of their mean.
    """

    num_classes: int
    ignore_index: int
    first_class: int = 0
    per_class: bool = False

    def summands(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the summands (p, B, 3 K) of each image from predicted classes (p, B, H, W) and masks (B, H, W)."""
        predicted = predicted.flatten(2)
        targets = targets.flatten(1)
        counts = targets != self.ignore_index
        intersections: list[Tensor] = []
        predicted_sizes: list[Tensor] = []
        true_sizes: list[Tensor] = []
        # One class at a time: one-hot masks of all classes would take K times the memory of the predictions.
        for k in range(self.num_classes):
            is_predicted = (predicted == k) & counts
            is_true = targets == k
            intersections.append((is_predicted & is_true).sum(-1))
            predicted_sizes.append(is_predicted.sum(-1))
            true_sizes.append(is_true.sum(-1).expand(len(predicted), -1))
        return self._summands_of_sizes(
            torch.stack(intersections, -1), torch.stack(predicted_sizes, -1), torch.stack(true_sizes, -1)
        )

    @abstractmethod
    def _summands_of_sizes(self, intersections: Tensor, predicted_sizes: Tensor, true_sizes: Tensor) -> Tensor:
        """Return the summands of each image from numbers of pixels (p, B, K)."""

    def score(self, sums: Tensor) -> Tensor:
        """Return scores (..., K) or their means (...), NaN where no class occurs, from sums (..., S)."""
        scores = self._scores_of_classes(sums)
        if self.per_class:
            return scores
        return scores[..., self.first_class :].nanmean(-1)

    @abstractmethod
    def _scores_of_classes(self, sums: Tensor) -> Tensor:
        """Return the score (..., K) of each class, NaN for classes that do not occur."""


class Dice(_Overlap):
    """Dice coefficient 2 |A ∩ B| / (|A| + |B|) of images and classes, averaged over the images that have a class."""

    def _summands_of_sizes(self, intersections: Tensor, predicted_sizes: Tensor, true_sizes: Tensor) -> Tensor:
        occurs = true_sizes > 0
        dice = 2 * intersections / (predicted_sizes + true_sizes).clamp(min=1)
        return torch.cat([dice.where(occurs, 0), occurs.to(dice)], -1)

    def is_possible(self, sums: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether no class is in more images than there are, or overlaps by more than all of it."""
        sums_of_dice = sums[: self.num_classes]
        images = sums[self.num_classes :]
        # All comparisons are false for NaN.
        return bool((0 <= sums_of_dice).all() and (sums_of_dice <= images).all() and (images <= max_images).all())

    def _scores_of_classes(self, sums: Tensor) -> Tensor:
        sums_of_dice = sums[..., : self.num_classes]
        images = sums[..., self.num_classes :]
        # 0 / 0 is NaN.
        return sums_of_dice / images


class IntersectionOverUnion(_Overlap):
    """Intersection over union (Jaccard index) of each class, with sums over the pixels of all images."""

    def _summands_of_sizes(self, intersections: Tensor, predicted_sizes: Tensor, true_sizes: Tensor) -> Tensor:
        return torch.cat([intersections, predicted_sizes, true_sizes], -1)

    def is_possible(self, sums: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether regions overlap by no more than all of them, and fill the same number of pixels."""
        intersections, predicted_sizes, true_sizes = sums.split(self.num_classes)
        smaller_sizes = torch.minimum(predicted_sizes, true_sizes)
        # All comparisons are false for NaN.
        fits_regions = (0 <= intersections).all() and (intersections <= smaller_sizes).all()
        # Each pixel that counts has one true and one predicted class.
        num_pixels = true_sizes.sum()
        return bool(fits_regions and predicted_sizes.sum() == num_pixels and num_pixels <= max_images * max_pixels)

    def _scores_of_classes(self, sums: Tensor) -> Tensor:
        intersections = sums[..., : self.num_classes]
        predicted_sizes = sums[..., self.num_classes : 2 * self.num_classes]
        true_sizes = sums[..., 2 * self.num_classes :]
        scores = intersections / (predicted_sizes + true_sizes - intersections)
        return scores.where(true_sizes > 0, torch.nan)
