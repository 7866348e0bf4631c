# SPDX-License-Identifier: Apache-2.0
"""Metrics of numbers: how far predictions deviate from targets."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perada.core.states import double
from perada.tasks.base import SummedMetric, sum_by_group


@dataclass(frozen=True)
class _Deviation(SummedMetric):
    """Base of metrics that are computed for each target from statistics of images.

    Args:
        targets: Number D of targets.
        center: D numbers near the means of the targets, which sums of squares are relative to. They change no score.
        per_target: Whether there is a score for each target, instead of their mean.
    """

    targets: int
    center: tuple[float, ...]
    per_target: bool = False

    def summands(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the summands (p, N, S D) of each image from predictions (p, N, D) and targets (N,) or (N, D)."""
        x, y = self._numbers(predicted, targets)
        center = torch.tensor(self.center, dtype=x.dtype, device=x.device)
        return torch.cat(self._terms(x - center, y - center), -1)

    def score(self, statistics: Tensor) -> Tensor:
        """Return scores (..., D) of the targets or their means (...), from statistics (..., S D)."""
        scores = self._scores(*statistics.split(self.targets, -1))
        if self.per_target:
            return scores
        return scores.nanmean(-1)

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether the statistics are finite, and of no more images than there are."""
        images = statistics[-self.targets :]
        return bool(statistics.isfinite().all() and (0 <= images).all() and (images <= max_images).all())

    def _numbers(self, predicted: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return predictions and targets, both (p, N, D), in double precision where the device supports it."""
        x = double(predicted)
        y = double(targets).view(len(targets), self.targets)
        return x, y.expand_as(x)

    @abstractmethod
    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return what is summed, each (p, N, D), of predictions x and targets y (p, N, D) relative to the center."""

    @abstractmethod
    def _scores(self, *statistics: Tensor) -> Tensor:
        """Return the scores (..., D) from statistics (..., D)."""


class MeanAbsoluteError(_Deviation):
    """Mean of |x − y|."""

    lower_is_better: ClassVar[bool] = True

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).abs(), torch.ones_like(x)]

    def _scores(self, *statistics: Tensor) -> Tensor:
        deviations, images = statistics
        # 0 / 0 is NaN.
        return deviations / images


class MeanSquaredError(_Deviation):
    """Mean of (x − y)²."""

    lower_is_better: ClassVar[bool] = True

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).square(), torch.ones_like(x)]

    def _scores(self, *statistics: Tensor) -> Tensor:
        squares, images = statistics
        return squares / images


class RootMeanSquaredError(MeanSquaredError):
    """Root of the mean squared error of each target."""

    def _scores(self, *statistics: Tensor) -> Tensor:
        return super()._scores(*statistics).sqrt()


class _Variation(_Deviation):
    """Base of metrics that compare variations: how far predictions x and targets y are from their own means.

    The statistics of each target are mean x, mean y, Σ (x − mean x)², Σ (y − mean y)², Σ (x − mean x)(y − mean y), and
    the number of images. Sums of squares around any fixed number would be small differences of large numbers where a
    mean is large compared to the standard deviation. Batches, processes and sites are combined by the update of Chan,
    Golub and LeVeque (1979).
    """

    def statistics(
        self, predicted: Tensor, targets: Tensor, groups: Tensor, num_groups: int, counted: Tensor | None = None
    ) -> Tensor:
        """Return means and centred sums (p, G, 6 D) of a batch."""
        x, y = self._numbers(predicted, targets)
        weights = torch.ones_like(x)
        if counted is not None:
            # Not only a weight of 0, since what does not count may be NaN.
            x = x.where(counted.unsqueeze(-1), 0)
            y = y.where(counted.unsqueeze(-1), 0)
            weights = weights * counted.unsqueeze(-1)
        images = sum_by_group(weights, groups, num_groups)
        at_least_one = images.clamp(min=1)
        mean_x = sum_by_group(x * weights, groups, num_groups) / at_least_one
        mean_y = sum_by_group(y * weights, groups, num_groups) / at_least_one
        # Relative to the mean of the image's group.
        deviation_x = (x - mean_x[:, groups]) * weights
        deviation_y = (y - mean_y[:, groups]) * weights
        products = [deviation_x.square(), deviation_y.square(), deviation_x * deviation_y]
        variations = [sum_by_group(product, groups, num_groups) for product in products]
        return torch.cat([mean_x, mean_y, *variations, images], -1)

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Return means and centred sums (..., 6 D) of the images of both arguments together."""
        mean_x, mean_y, variation_x, variation_y, covariation, images = first.split(self.targets, -1)
        other_mean_x, other_mean_y, other_variation_x, other_variation_y, other_covariation, other_images = (
            second.split(self.targets, -1)
        )
        total = images + other_images
        share = other_images / total.clamp(min=1)
        step_x = other_mean_x - mean_x
        step_y = other_mean_y - mean_y
        # n₁ n₂ / (n₁ + n₂)
        weight = images * share
        return torch.cat(
            [
                mean_x + share * step_x,
                mean_y + share * step_y,
                variation_x + other_variation_x + weight * step_x.square(),
                variation_y + other_variation_y + weight * step_y.square(),
                covariation + other_covariation + weight * step_x * step_y,
                total,
            ],
            -1,
        )

    def to_sums(self, statistics: Tensor) -> Tensor:
        """Return sums (..., 6 D) of x, y, x², y², x y and 1, relative to the center."""
        mean_x, mean_y, variation_x, variation_y, covariation, images = statistics.split(self.targets, -1)
        center = torch.tensor(self.center, dtype=statistics.dtype, device=statistics.device)
        distance_x = mean_x - center
        distance_y = mean_y - center
        return torch.cat(
            [
                images * distance_x,
                images * distance_y,
                variation_x + images * distance_x.square(),
                variation_y + images * distance_y.square(),
                covariation + images * distance_x * distance_y,
                images,
            ],
            -1,
        )

    def from_sums(self, sums: Tensor) -> Tensor:
        """Return means and centred sums (..., 6 D); a centred sum is NaN where rounding has left no digit of it."""
        sum_x, sum_y, sum_xx, sum_yy, sum_xy, images = sums.split(self.targets, -1)
        center = torch.tensor(self.center, dtype=sums.dtype, device=sums.device)
        at_least_one = images.clamp(min=1)
        distance_x = sum_x / at_least_one
        distance_y = sum_y / at_least_one
        return torch.cat(
            [
                center + distance_x,
                center + distance_y,
                _resolved(sum_xx - sum_x * distance_x, sum_xx),
                _resolved(sum_yy - sum_y * distance_y, sum_yy),
                sum_xy - sum_x * distance_y,
                images,
            ],
            -1,
        )

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether the numbers are finite, and centred sums of squares are not negative."""
        _, _, variation_x, variation_y, _, _ = statistics.split(self.targets, -1)
        are_sums_of_squares = bool((variation_x >= 0).all() and (variation_y >= 0).all())
        return are_sums_of_squares and super().is_possible(statistics, max_images, max_pixels)

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x, y, x.square(), y.square(), x * y, torch.ones_like(x)]


class Determination(_Variation):
    """Coefficient of determination R² = 1 − Σ (x − y)² / Σ (y − mean y)², NaN if all targets are equal."""

    def _scores(self, *statistics: Tensor) -> Tensor:
        mean_x, mean_y, variation_x, variation_y, covariation, images = statistics
        # Σ (x − y)² is the sum of the squares of the deviations' differences, and of the difference of the means.
        squared_errors = variation_x + variation_y - 2 * covariation + images * (mean_x - mean_y).square()
        squared_errors = squared_errors.clamp(min=0)
        varies = _varies(variation_y, mean_y, images)
        return (1 - squared_errors / variation_y).where(varies, torch.nan)


class PearsonCorrelation(_Variation):
    """Pearson's correlation of predictions and targets, NaN if all of one of them are equal."""

    def _scores(self, *statistics: Tensor) -> Tensor:
        mean_x, mean_y, variation_x, variation_y, covariation, images = statistics
        # Two roots: the product of two variations may be too large for a number.
        correlations = covariation / variation_x.sqrt() / variation_y.sqrt()
        varies = _varies(variation_x, mean_x, images) & _varies(variation_y, mean_y, images)
        # Rounding may lead beyond a perfect correlation.
        return correlations.clamp(-1, 1).where(varies, torch.nan)


def _varies(variations: Tensor, means: Tensor, images: Tensor) -> Tensor:
    """Return where centred sums of squares (...) of numbers are more than the rounding of their mean could cause."""
    rounding = 16 * torch.finfo(variations.dtype).eps * means
    return variations > images * rounding.square()


def _resolved(variations: Tensor, sums_of_squares: Tensor) -> Tensor:
    """Replace differences of sums of squares that consist of rounding errors only by NaN, or by 0 if there are none."""
    rounding = 64 * torch.finfo(variations.dtype).eps * sums_of_squares
    return variations.where((variations > rounding) | (sums_of_squares == 0), torch.nan)
