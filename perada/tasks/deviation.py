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
        x = double(predicted)
        y = self._targets_like(x, targets)
        center = torch.tensor(self.center, dtype=x.dtype, device=x.device)
        return torch.cat(self._summed_terms(x - center, y - center), -1)

    def score(self, statistics: Tensor) -> Tensor:
        """Return scores (..., D) of the targets or their means (...), from statistics (..., S D)."""
        scores = self._scores_of_targets(statistics)
        if self.per_target:
            return scores
        return scores.nanmean(-1)

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether the statistics are finite, and of no more images than there are."""
        images = statistics[-self.targets :]
        return bool(statistics.isfinite().all() and (0 <= images).all() and (images <= max_images).all())

    def _targets_like(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return targets in the shape of predictions (p, N, D), in double precision where the device supports it."""
        return double(targets).view(len(targets), self.targets).expand_as(predicted)

    def _statistic_at(self, statistics: Tensor, index: int) -> Tensor:
        """Return the statistic (..., D) of each target that is in this place of statistics (..., S D)."""
        start = index * self.targets
        return statistics[..., start : start + self.targets]

    @abstractmethod
    def _summed_terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return what is summed, each (p, N, D), of predictions x and targets y (p, N, D) relative to the center."""

    @abstractmethod
    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        """Return the scores (..., D) of the targets from statistics (..., S D)."""


class MeanAbsoluteError(_Deviation):
    """Mean of |x − y|."""

    lower_is_better: ClassVar[bool] = True

    def _summed_terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).abs(), torch.ones_like(x)]

    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        sum_of_deviations = self._statistic_at(statistics, 0)
        images = self._statistic_at(statistics, 1)
        # 0 / 0 is NaN.
        return sum_of_deviations / images


class MeanSquaredError(_Deviation):
    """Mean of (x − y)²."""

    lower_is_better: ClassVar[bool] = True

    def _summed_terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).square(), torch.ones_like(x)]

    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        sum_of_squares = self._statistic_at(statistics, 0)
        images = self._statistic_at(statistics, 1)
        return sum_of_squares / images


class RootMeanSquaredError(MeanSquaredError):
    """Root of the mean squared error of each target."""

    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        return super()._scores_of_targets(statistics).sqrt()


@dataclass(frozen=True)
class _Moments:
    """Means and centred sums of predictions x and targets y, each (..., D).

    Attributes:
        mean_x: Mean of x.
        mean_y: Mean of y.
        variation_x: Σ (x − mean x)².
        variation_y: Σ (y − mean y)².
        covariation: Σ (x − mean x)(y − mean y).
        images: Number of images.
    """

    mean_x: Tensor
    mean_y: Tensor
    variation_x: Tensor
    variation_y: Tensor
    covariation: Tensor
    images: Tensor

    def packed(self) -> Tensor:
        """Return all of them side by side (..., 6 D), in the order of the attributes."""
        parts = [self.mean_x, self.mean_y, self.variation_x, self.variation_y, self.covariation, self.images]
        return torch.cat(parts, -1)


class _Variation(_Deviation):
    """Base of metrics that compare variations: how far predictions x and targets y are from their own means.

    The statistics are those of :class:`_Moments`. Sums of squares around any fixed number would be small differences of
    large numbers where a mean is large compared to the standard deviation. Batches, processes and sites are combined by
    the update of Chan, Golub and LeVeque (1979).
    """

    def _parse_moments(self, statistics: Tensor) -> _Moments:
        """Return the moments that statistics (..., 6 D) consist of."""
        return _Moments(
            mean_x=self._statistic_at(statistics, 0),
            mean_y=self._statistic_at(statistics, 1),
            variation_x=self._statistic_at(statistics, 2),
            variation_y=self._statistic_at(statistics, 3),
            covariation=self._statistic_at(statistics, 4),
            images=self._statistic_at(statistics, 5),
        )

    def statistics(
        self, predicted: Tensor, targets: Tensor, groups: Tensor, num_groups: int, counted: Tensor | None = None
    ) -> Tensor:
        """Return means and centred sums (p, G, 6 D) of a batch."""
        x = double(predicted)
        y = self._targets_like(x, targets)
        weights = torch.ones_like(x)
        if counted is not None:
            # A weight of 0 alone would keep the NaN of images that do not count.
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
        moments = _Moments(
            mean_x=mean_x,
            mean_y=mean_y,
            variation_x=sum_by_group(deviation_x.square(), groups, num_groups),
            variation_y=sum_by_group(deviation_y.square(), groups, num_groups),
            covariation=sum_by_group(deviation_x * deviation_y, groups, num_groups),
            images=images,
        )
        return moments.packed()

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Return means and centred sums (..., 6 D) of the images of both arguments together."""
        moments = self._parse_moments(first)
        other_moments = self._parse_moments(second)
        images = moments.images + other_moments.images
        share = other_moments.images / images.clamp(min=1)
        step_x = other_moments.mean_x - moments.mean_x
        step_y = other_moments.mean_y - moments.mean_y
        # n₁ n₂ / (n₁ + n₂)
        weight = moments.images * share
        combined = _Moments(
            mean_x=moments.mean_x + share * step_x,
            mean_y=moments.mean_y + share * step_y,
            variation_x=moments.variation_x + other_moments.variation_x + weight * step_x.square(),
            variation_y=moments.variation_y + other_moments.variation_y + weight * step_y.square(),
            covariation=moments.covariation + other_moments.covariation + weight * step_x * step_y,
            images=images,
        )
        return combined.packed()

    def to_sums(self, statistics: Tensor) -> Tensor:
        """Return sums (..., 6 D) of x, y, x², y², x y and 1, relative to the center."""
        moments = self._parse_moments(statistics)
        center = torch.tensor(self.center, dtype=statistics.dtype, device=statistics.device)
        distance_x = moments.mean_x - center
        distance_y = moments.mean_y - center
        images = moments.images
        sums = [
            images * distance_x,
            images * distance_y,
            moments.variation_x + images * distance_x.square(),
            moments.variation_y + images * distance_y.square(),
            moments.covariation + images * distance_x * distance_y,
            images,
        ]
        return torch.cat(sums, -1)

    def from_sums(self, sums: Tensor) -> Tensor:
        """Return means and centred sums (..., 6 D); a centred sum is NaN where rounding has left no digit of it."""
        sum_x = self._statistic_at(sums, 0)
        sum_y = self._statistic_at(sums, 1)
        sum_xx = self._statistic_at(sums, 2)
        sum_yy = self._statistic_at(sums, 3)
        sum_xy = self._statistic_at(sums, 4)
        images = self._statistic_at(sums, 5)
        center = torch.tensor(self.center, dtype=sums.dtype, device=sums.device)
        at_least_one = images.clamp(min=1)
        distance_x = sum_x / at_least_one
        distance_y = sum_y / at_least_one
        moments = _Moments(
            mean_x=center + distance_x,
            mean_y=center + distance_y,
            variation_x=_drop_rounding_errors(sum_xx - sum_x * distance_x, sum_xx),
            variation_y=_drop_rounding_errors(sum_yy - sum_y * distance_y, sum_yy),
            covariation=sum_xy - sum_x * distance_y,
            images=images,
        )
        return moments.packed()

    def is_possible(self, statistics: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether the numbers are finite, and centred sums of squares are not negative."""
        moments = self._parse_moments(statistics)
        are_sums_of_squares = bool((moments.variation_x >= 0).all() and (moments.variation_y >= 0).all())
        return are_sums_of_squares and super().is_possible(statistics, max_images, max_pixels)

    def _summed_terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x, y, x.square(), y.square(), x * y, torch.ones_like(x)]


class Determination(_Variation):
    """Coefficient of determination R² = 1 − Σ (x − y)² / Σ (y − mean y)², NaN if all targets are equal."""

    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        moments = self._parse_moments(statistics)
        # Σ (x − y)² is the sum of the squares of the deviations' differences, and of the difference of the means.
        squared_differences = moments.variation_x + moments.variation_y - 2 * moments.covariation
        squared_errors = squared_differences + moments.images * (moments.mean_x - moments.mean_y).square()
        squared_errors = squared_errors.clamp(min=0)
        varies = _is_varying(moments.variation_y, moments.mean_y, moments.images)
        return (1 - squared_errors / moments.variation_y).where(varies, torch.nan)


class PearsonCorrelation(_Variation):
    """Pearson's correlation of predictions and targets, NaN if all of one of them are equal."""

    def _scores_of_targets(self, statistics: Tensor) -> Tensor:
        moments = self._parse_moments(statistics)
        # Two roots: the product of two variations may be too large for a number.
        correlations = moments.covariation / moments.variation_x.sqrt() / moments.variation_y.sqrt()
        predictions_vary = _is_varying(moments.variation_x, moments.mean_x, moments.images)
        targets_vary = _is_varying(moments.variation_y, moments.mean_y, moments.images)
        # Rounding may lead beyond a perfect correlation.
        return correlations.clamp(-1, 1).where(predictions_vary & targets_vary, torch.nan)


def _is_varying(variations: Tensor, means: Tensor, images: Tensor) -> Tensor:
    """Return where centred sums of squares (...) of numbers are more than the rounding of their mean could cause."""
    rounding = 16 * torch.finfo(variations.dtype).eps * means
    return variations > images * rounding.square()


def _drop_rounding_errors(variations: Tensor, sums_of_squares: Tensor) -> Tensor:
    """Replace differences of sums of squares that consist of rounding errors only by NaN, or by 0 if there are none."""
    rounding = 64 * torch.finfo(variations.dtype).eps * sums_of_squares
    return variations.where((variations > rounding) | (sums_of_squares == 0), torch.nan)
