# SPDX-License-Identifier: Apache-2.0
"""The mixture of the probabilities that two models predict, without leaving the logarithms."""

import torch
from torch import Tensor


def log_mixture(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Compute log(α p + (1 − α) q) from the logarithms of p and q.

    Args:
        first: log p, of any shape.
        second: log q, of the same shape.
        share: The weights α of p, between 0 and 1, of a shape that broadcasts with it.

    >>> first, second = torch.tensor([0.5, 0.1]).log()
    >>> round(log_mixture(first, second, torch.tensor(0.25)).exp().item(), 6)
    0.2
    """
    return torch.logaddexp(first + share.log(), second + (-share).log1p())
