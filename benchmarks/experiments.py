# SPDX-License-Identifier: Apache-2.0
"""What comparisons of methods share: their seeds, labelled images, and scores over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from torch import Tensor
from torch.utils.data import TensorDataset

SEEDS = (0, 1, 2)
"""Of the runs that are reported."""
CHOICE_SEED = 100
"""Of the runs on which settings are chosen."""


@dataclass(frozen=True)
class Images:
    """Images (N, Ch, S, S) and their targets: classes or numbers (N,), labels (N, K) or masks (N, S, S)."""

    images: Tensor
    targets: Tensor

    def rows(self, rows: Tensor | slice) -> "Images":
        """Return some of the images, with their targets."""
        return Images(self.images[rows], self.targets[rows])

    @property
    def dataset(self) -> TensorDataset:
        """The images as a dataset of pairs."""
        return TensorDataset(self.images, self.targets)


def mean_and_spread(scores: Sequence[float]) -> str:
    """Return the mean ± standard deviation over seeds with one decimal; of a single score the score itself.

    >>> mean_and_spread([70.0, 72.0, 74.0]), mean_and_spread([70.0])
    ('72.0 ± 2.0', '70.0')
    """
    mean = f"{fmean(scores):.1f}"
    return f"{mean} ± {stdev(scores):.1f}" if len(scores) > 1 else mean
