# SPDX-License-Identifier: Apache-2.0
"""Benchmark of this processor's matrix multiplication."""

import timeit

import torch


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of a 1024×1024 matrix product, the fastest of five."""
    matrix = torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
