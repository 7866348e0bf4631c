# SPDX-License-Identifier: Apache-2.0
"""Frozen layers that keep less for the backward pass than torch's own, with the same outputs and gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Context = Any  # torch gives it no type


class FrozenBatchNorm(nn.Module):
    """A BatchNorm of which nothing is trained, in evaluation mode: a scale and a shift for each channel.

    Autograd keeps a BatchNorm's input, though only the gradient of a weight needs it. The original has running
    statistics. Its tensors stay its own, so that it can be moved and loaded.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original: list[Any] = [original]  # in a list: not a child, so that names stay those of the single model

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, D, ...)."""
        norm = self.original[0]
        tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
        normalised: Tensor = _Normalise.apply(x, *tensors, norm.eps)
        return normalised


class _Normalise(torch.autograd.Function):
    """Batch normalisation by running statistics, with a gradient for its input alone."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(weight, mean, var)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, var = ctx.saved_tensors
        inputs, *_ = torch.ops.aten.native_batch_norm_backward(
            gradient, gradient, weight, mean, var, None, None, False, ctx.eps, [True, False, False]
        )  # in the place of the input the gradient, for its shape: values are not looked at
        return inputs, None, None, None, None, None
