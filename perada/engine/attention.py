# SPDX-License-Identifier: Apache-2.0
"""Attention in bfloat16 on a processor, in less time than torch's.

torch's fused attention is slow in bfloat16 on CPUs where gradients are needed: its backward pass does not use the
processor's instructions for matrix products. A :class:`FasterAttention` runs attention in another way meanwhile:

- with Intel's AMX, the forward pass is torch's, and the backward pass is made of products of whole matrices, in 0.5 of
  the time of both passes;
- without AMX, attention is computed in single precision, in 0.6 of the time.

Both were measured on one layer of ViT-S/16 at 224×224 with 32 images and two threads of a processor with AMX, which
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` hid from oneDNN in the second case.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from perada.core.states import without_autocast
from perada.engine.frozen_layers import AutogradContext, autocast_dtype

MOST_WEIGHTS = 2**27
"""Attention weights of a call up to which its backward pass multiplies whole matrices, which takes 2 bytes for each."""


class FasterAttention(TorchFunctionMode):
    """Runs the attention of a training pass in bfloat16 on a CPU by the fastest way.

    Calls with masks or dropout, in other precisions, on other devices, or that need no gradient, are torch's.

    Attributes:
        was_called: Whether the network called ``scaled_dot_product_attention``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_called = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run a function of torch that the network calls."""
        options = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **options)
        self.was_called = True
        return _compute_attention(*args, **options)


def can_run_faster(x: Tensor) -> bool:
    """Return whether a :class:`FasterAttention` can speed up a pass of images x in the calling context."""
    is_half = x.device.type == "cpu" and autocast_dtype(x, x) == torch.bfloat16
    return is_half and torch.is_grad_enabled()


def _compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the parameters of :func:`torch.nn.functional.scaled_dot_product_attention`."""
    is_plain = attn_mask is None and not dropout_p and not is_causal and not enable_gqa
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    if not is_plain or not needs_gradient or autocast_dtype(query, key) != torch.bfloat16:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    weights = query.shape[:-1].numel() * key.shape[-2]
    if has_bfloat16_products() and weights <= MOST_WEIGHTS:
        attended: Tensor = _ProductAttention.apply(query.bfloat16(), key.bfloat16(), value.bfloat16(), scale)
        return attended
    with without_autocast(query.device):
        out = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=scale)
    return out.bfloat16()


@cache
def has_bfloat16_products() -> bool:
    """Return whether the processor multiplies matrices in bfloat16 by AMX; False where torch cannot tell."""
    # Some supported versions of torch lack it.
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is None:
        return False
    return bool(get_capabilities().get("amx_bf16", False))


class _ProductAttention(torch.autograd.Function):
    """Attention whose weights are computed again in the backward pass, which saves only what torch's saves."""

    @staticmethod
    def forward(ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend with queries (..., N, D) to keys (..., M, D) and values (..., M, V): (..., N, V)."""
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        query, key, value = inputs
        scale = query.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
        with torch.enable_grad(), without_autocast(query.device):
            scores = (query * scale) @ key.transpose(-2, -1)
            out = scores.softmax(-1) @ value
        gradients = torch.autograd.grad(out, inputs, gradient)
        # There is no gradient of the scale.
        return *gradients, None
