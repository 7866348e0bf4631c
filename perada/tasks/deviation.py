# SPDX-License-Identifier: Apache-2.0
"""Metrics of numbers: how far predictions deviate from targets."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perada.tasks.base import SummedMetric


@dataclass(frozen=True)
class _Deviation(SummedMetric):
    """Base of metrics that are computed for each target from sums over images.

    Args:
        targets: Number D of targets.
        center: D numbers near the means of the targets. They are subtracted from predictions and targets, which changes
            no score, so that variances are not small differences of large sums.
        per_target: Whether there is a score for each target, instead of their mean.
    """

    targets: int
    center: tuple[float, ...]
    per_target: bool = False

    def summands(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the summands (p, N, S D) of each image from predictions (p, N, D) and targets (N,) or (N, D)."""
        center = torch.tensor(self.center, dtype=predicted.dtype, device=predicted.device)
        y = targets.view(len(targets), self.targets).to(predicted.dtype) - center
        terms = self._terms(predicted - center, y.expand_as(predicted))
        return torch.cat(terms, -1)

    def score(self, sums: Tensor) -> Tensor:
        """Return scores (..., D) of the targets or their means (...), from sums (..., S D)."""
        scores = self._scores(*sums.split(self.targets, -1))
        if self.per_target:
            return scores
        return scores.nanmean(-1)

    def is_possible(self, sums: Tensor, max_images: float, max_pixels: float) -> bool:
        """Return whether the sums are finite, and of no more images than there are."""
        images = sums[-self.targets :]
        return bool(sums.isfinite().all() and (0 <= images).all() and (images <= max_images).all())

    @abstractmethod
    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return what is summed, each (p, N, D), of centred predictions x and targets y (p, N, D)."""

    @abstractmethod
    def _scores(self, *sums: Tensor) -> Tensor:
        """Return the scores (..., D) from the sums (..., D) of the terms."""


class MeanAbsoluteError(_Deviation):
    """Mean of |x − y|."""

    lower_is_better: ClassVar[bool] = True

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).abs(), torch.ones_like(x)]

    def _scores(self, *sums: Tensor) -> Tensor:
        deviations, images = sums
        # 0 / 0 is NaN.
        return deviations / images


class MeanSquaredError(_Deviation):
    """Mean of (x − y)²."""

    lower_is_better: ClassVar[bool] = True

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).square(), torch.ones_like(x)]

    def _scores(self, *sums: Tensor) -> Tensor:
        squares, images = sums
        return squares / images


class RootMeanSquaredError(MeanSquaredError):
    """Root of the mean squared error of each target."""

    def _scores(self, *sums: Tensor) -> Tensor:
        return super()._scores(*sums).sqrt()


class Determination(_Deviation):
    """Coefficient of determination R² = 1 − Σ (x − y)² / Σ (y − mean y)², NaN if all targets are equal."""

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [(x - y).square(), y, y.square(), torch.ones_like(x)]

    def _scores(self, *sums: Tensor) -> Tensor:
        squared_errors, sum_y, sum_yy, images = sums
        variations = _variations(sum_y, sum_y, sum_yy, images)
        return (1 - squared_errors / variations).where(variations > 0, torch.nan)


class PearsonCorrelation(_Deviation):
    """Pearson's correlation of predictions and targets, NaN if all of one of them are equal."""

    def _terms(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x, y, x.square(), y.square(), x * y, torch.ones_like(x)]

    def _scores(self, *sums: Tensor) -> Tensor:
        sum_x, sum_y, sum_xx, sum_yy, sum_xy, images = sums
        variations_x = _variations(sum_x, sum_x, sum_xx, images)
        variations_y = _variations(sum_y, sum_y, sum_yy, images)
        correlations = _variations(sum_x, sum_y, sum_xy, images) / (variations_x * variations_y).sqrt()
        return correlations.where((variations_x > 0) & (variations_y > 0), torch.nan)


def _variations(sum_a: Tensor, sum_b: Tensor, sum_of_products: Tensor, images: Tensor) -> Tensor:
    """Return Σ (a − mean a) (b − mean b), 0 where rounding alone could have caused the difference."""
    products_of_means = sum_a * sum_b / images
    variations = sum_of_products - products_of_means
    is_rounding = variations.abs() <= 1e-7 * sum_of_products.abs()
    return variations.where(~is_rounding, 0)
