# SPDX-License-Identifier: Apache-2.0
"""How fast this processor multiplies matrices."""

import timeit

import torch


def product_seconds(dtype: torch.dtype) -> float:
    """Seconds of a product of matrices of 1024×1024, the shortest of five."""
    matrix = torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
