# SPDX-License-Identifier: Apache-2.0
"""Counts of predicted numbers by their true values, and of their residuals."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.scores.accumulation import FAILED_IMAGES, finite_outputs
from perada.tasks import Task

BINS = 20
"""Number of bins of equal width, of true values, of predictions and of residuals."""
_MARGIN = 0.1
"""Share of the range of true values by which the bins extend beyond it on both sides."""
_RESIDUAL_QUANTILE = 0.99
"""Share of the residuals that the bins of residuals cover."""


class NumberCounts:
    """Counts one model's predicted numbers, for all clients together. Predictions of another form are not counted.

    The counts are those of a figure: no number of a single image is in the record, except for the smallest and the
    largest true value, from which the edges of the bins follow.

    Args:
        task: What the model predicts.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._predicted: list[Tensor] = []
        self._targets: list[Tensor] = []

    def update(self, logits: Tensor, y: Tensor, owner: Tensor, counted: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            logits: Outputs (B, D) of the model.
            y: Targets (B,) or (B, D).
            owner: Client (B,) that owns each image, which makes no difference.
            counted: Mask (B,) of the images to include; by default all.
        """
        if counted is not None:
            logits = logits[counted]
            y = y[counted]
        predicted = self.task.predicted(logits)
        if predicted.ndim != 2:
            # Such as the boxes of a custom task, which no figure shows.
            return
        self._predicted.append(predicted)
        self._targets.append(y.view_as(predicted))

    def record(self, ranks: Ranks) -> dict[str, Any]:
        """Return the counts of all processes, in plain types. A collective: all must call this once, at the end.

        Returns:
            ``numbers``, for each target: ``edges`` of the bins of true values and of predictions, and ``counts`` of
            images with a row for each bin of true values and a column for each bin of predictions; ``residual_edges``
            and ``residual_counts`` of the residuals, prediction − true value, with their ``residual_mean`` and
            ``residual_std``. What lies outside of the edges is counted in the first or the last bin. Images whose true
            value is unknown (NaN) are left out; if these are all, counts, mean and deviation are 0. The list is empty
            without predictions. Only ``failed_images``, their number, if outputs of the model are NaN or infinite for
            some images.
        """
        local_batches = [
            (predicted.cpu(), y.cpu()) for predicted, y in zip(self._predicted, self._targets, strict=True)
        ]
        predicted_batches: list[Tensor] = []
        target_batches: list[Tensor] = []
        for batches in ranks.gather(local_batches):
            for predicted, targets in batches:
                predicted_batches.append(predicted)
                target_batches.append(targets)
        numbers = []
        if predicted_batches:
            predicted_numbers = torch.cat(predicted_batches).double()
            true_numbers = torch.cat(target_batches).double()
            failed_images = int((~finite_outputs(predicted_numbers)).sum())
            if failed_images:
                return {FAILED_IMAGES: failed_images}
            for x, y in zip(predicted_numbers.T, true_numbers.T, strict=True):
                is_known = ~y.isnan()
                numbers.append(_counts_of_target(y[is_known], x[is_known]))
        return {"numbers": numbers}


def _counts_of_target(targets: Tensor, predicted: Tensor) -> dict[str, Any]:
    """Return the entry of one target in :meth:`NumberCounts.record`, from its true values and predictions (N,)."""
    if not len(targets):
        return _no_counts()
    low = float(targets.min())
    high = float(targets.max())
    # Equal targets have no range.
    margin = _MARGIN * (high - low) or 1.0
    edges = np.linspace(low - margin, high + margin, BINS + 1)
    rows = _bin_of(targets, edges)
    columns = _bin_of(predicted, edges)
    counts = torch.bincount(rows * BINS + columns, minlength=BINS * BINS).view(BINS, BINS)

    residuals = predicted - targets
    limit = float(np.quantile(residuals.abs().numpy(), _RESIDUAL_QUANTILE)) or 1.0
    residual_edges = np.linspace(-limit, limit, BINS + 1)
    residual_counts = torch.bincount(_bin_of(residuals, residual_edges), minlength=BINS)
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "residual_edges": residual_edges.tolist(),
        "residual_counts": residual_counts.tolist(),
        "residual_mean": float(residuals.mean()),
        "residual_std": float(residuals.std(correction=0)),
    }


def _no_counts() -> dict[str, Any]:
    """Return the entry of a target that no image has."""
    edges = np.linspace(-1, 1, BINS + 1).tolist()
    return {
        "edges": edges,
        "counts": [[0] * BINS] * BINS,
        "residual_edges": edges,
        "residual_counts": [0] * BINS,
        "residual_mean": 0.0,
        "residual_std": 0.0,
    }


def _bin_of(values: Tensor, edges: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor:
    """Return the bin (N,) of each value, the first or the last for values outside of the edges."""
    first_edge = float(edges[0])
    width = (float(edges[-1]) - first_edge) / BINS
    return ((values - first_edge) / width).floor().clamp(0, BINS - 1).long()
