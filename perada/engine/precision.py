# SPDX-License-Identifier: Apache-2.0
"""How precisely a model computes, by which checks tell rounding from wrong results."""

import torch
from torch import nn

from perada.engine.frozen_layers import autocast_dtype

ROUNDOFFS = 16
"""Number of unit roundoffs by which logits of two passes may differ: rounding errors of some layers add up."""


def coarsest_dtype(model: nn.Module) -> torch.dtype:
    """Return the least precise dtype that a pass of a model computes in: that of a weight, or of autocast.

    Args:
        model: The model, which the current autocast context applies to.

    Returns:
        The dtype; torch's default for a model without floating-point parameters.
    """
    dtypes = set()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            dtypes.add(autocast_dtype(parameter, parameter) or parameter.dtype)
    return max(dtypes, key=unit_roundoff, default=torch.get_default_dtype())


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error u of rounding a number to a floating-point dtype.

    >>> unit_roundoff(torch.bfloat16), unit_roundoff(torch.float32) == 2**-24
    (0.00390625, True)
    """
    return torch.finfo(dtype).eps / 2


def tolerance_of(model: nn.Module, least: float) -> float:
    """Return the largest difference of two passes of a model that rounding explains, relative to the largest logit.

    Args:
        model: The model.
        least: Tolerance in single precision, which half precision exceeds.
    """
    return max(least, ROUNDOFFS * unit_roundoff(coarsest_dtype(model)))


def is_half(dtype: torch.dtype) -> bool:
    """Return whether a dtype is less precise than float32."""
    return unit_roundoff(dtype) > unit_roundoff(torch.float32)
