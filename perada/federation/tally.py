# SPDX-License-Identifier: Apache-2.0
"""What models predict on their clients' test images, in counts: classes taken for one another, and calibration."""

from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.server.aggregate import double

BINS = 15
"""Bins of equal width between confidence 0 and 1, as in Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599."""


class Tally:
    """Counts predictions of one model for each client; nothing is copied from the device before the end.

    Of each image the tally keeps one number at most: client, class and predicted class. With several labels an image,
    each label is a prediction of its own, and only calibration is counted.

    Args:
        multilabel: Whether labels are 0/1 per class.
    """

    def __init__(self, multilabel: bool) -> None:
        self.multilabel, self._classes = multilabel, 0
        self._codes: list[Tensor] = []
        self._bins = torch.zeros(3, BINS, dtype=torch.float64)  # predictions, right ones, sum of confidences

    def update(self, logits: Tensor, y: Tensor, owner: Tensor, counted: Tensor | None = None) -> None:
        """Add logits (B, K) of images of the clients ``owner`` (B,), with classes (B,) or labels (B, K).

        ``counted`` (B,) tells which images count, by default all.
        """
        if counted is not None:
            logits, y, owner = logits[counted], y[counted], owner[counted]
        if self.multilabel:
            likely = logits.float().sigmoid()
            predicted = (likely > 0.5).long()
            confidence, right = torch.maximum(likely, 1 - likely).flatten(), (predicted == y.long()).flatten()
        else:
            confidence, predicted = logits.float().softmax(-1).max(-1)
            right, self._classes = predicted == y, logits.shape[-1]
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
        own = torch.cat(self._codes).cpu() if self._codes else torch.empty(0, dtype=torch.int64)
        codes, counts = torch.cat(ranks.gather(own)).unique(return_counts=True)
        classes = max(ranks.gather(self._classes))
        found: dict[str, Any] = {
            "calibration": {
                "count": bins[0].long().tolist(),
                "right": bins[1].long().tolist(),
                "confidence": [round(value, 6) for value in (bins[2] / bins[0].clamp(min=1)).tolist()],
            }
        }
        if not self.multilabel:
            found["confusion"] = [
                [code // classes**2, code // classes % classes, code % classes, count]
                for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
            ]
        return found
