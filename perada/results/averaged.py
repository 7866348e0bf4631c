# SPDX-License-Identifier: Apache-2.0
"""The model of a run with several global models."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from perada.engine.ensembles import ensemble

Average = Literal["logits", "probabilities"]


class Ensemble(nn.Module):
    """Several networks whose ``logits`` or ``probabilities`` are averaged; the outcome are logits either way."""

    def __init__(self, members: Sequence[nn.Module], average: Average, multilabel: bool) -> None:
        super().__init__()
        self.members, self.average, self.multilabel = nn.ModuleList(members), average, multilabel

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, ...) to logits (B, K)."""
        return ensemble(torch.stack([member(x) for member in self.members]), self.average, self.multilabel)
