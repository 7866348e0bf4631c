# SPDX-License-Identifier: Apache-2.0
"""Types of integers that labels may be stored as, and those that torch can compute with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from perada.core.states import holds

_WIDER_SIGNED_TYPE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Signed types that hold the values of unsigned types for which torch has almost no operations."""
_LARGEST = torch.iinfo(torch.int64).max


def computable(labels: Tensor) -> Tensor:
    """Return integers with the same values in a type that torch can compute with.

    torch stores unsigned integers of 16, 32 and 64 bits, but has no maximum, comparison or index of them.

    Raises:
        ValueError: If a value of 64 bits has no signed counterpart.

    >>> computable(torch.tensor([0, 65535], dtype=torch.uint16))
    tensor([    0, 65535], dtype=torch.int32)
    """
    wider_type = _WIDER_SIGNED_TYPE.get(labels.dtype)
    if wider_type is None:
        return labels
    if labels.dtype == torch.uint64 and labels.numel():
        largest = int(labels.cpu().numpy().max())
        if largest > _LARGEST:
            raise ValueError(f"a label is {largest}, which is too large for a class: number the classes from 0")
    return labels.to(wider_type)


def stack_integers(masks: Sequence[Tensor]) -> Tensor:
    """Stack at least one mask (H, W) to (N, H, W), as integers of the smallest signed type, or uint8, that holds all.

    >>> stack_integers([torch.tensor([[0, 255]]), torch.tensor([[1, 1]])]).dtype
    torch.uint8
    >>> stack_integers([torch.tensor([[0, -1]]), torch.tensor([[1, 1]])]).tolist()
    [[[0, -1]], [[1, 1]]]
    """
    stacked = torch.stack(list(masks))
    smallest, largest = stacked.aminmax()
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if holds(dtype, int(smallest)) and holds(dtype, int(largest)):
            return stacked.to(dtype)
    return stacked
