# SPDX-License-Identifier: Apache-2.0
"""The arithmetics that rounds are timed in: single precision, TF32 and bfloat16. Operations of attention on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True)
class Arithmetic:
    """How products and convolutions are computed.

    Attributes:
        name: What tables call it.
        precision: Lightning's option.
        dtype: Of the operands of a plain product.
        tf32: Whether CUDA may round float32 operands of products and convolutions to 10 bits of significand.
    """

    name: str
    precision: Precision
    dtype: torch.dtype
    tf32: bool = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set torch's process-wide switches for TF32, and set them back at the end.

        torch leaves TF32 on for cuDNN's convolutions and off for products, so that both have to be set.
        """
        matmul_before = torch.get_float32_matmul_precision()
        cudnn_before = torch.backends.cudnn.allow_tf32
        try:
            # Lightning reads the first through this function, which fails once the newer fp32_precision was used too.
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.tf32
            yield
        finally:
            torch.set_float32_matmul_precision(matmul_before)
            torch.backends.cudnn.allow_tf32 = cudnn_before


FP32 = Arithmetic("fp32", "32-true", torch.float32)
TF32 = Arithmetic("tf32", "32-true", torch.float32, tf32=True)
BF16 = Arithmetic("bf16", "bf16-mixed", torch.bfloat16)


def arithmetics(device: torch.device, quick: bool) -> tuple[Arithmetic, ...]:
    """Return those to time on a device; TF32 only exists on CUDA, but a quick run tries its code everywhere."""
    if device.type == "cuda" or quick:
        return (FP32, TF32, BF16)
    return (FP32, BF16)


# torch's counter knows the attention of GPUs, but counts nothing for that of CPUs (torch 2.14).
@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """Return the operations of a forward pass of attention; the arguments are shapes."""
    flops: int = sdpa_flop_count(query, key, value)
    return flops


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward_flops(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    """Return the operations of a backward pass of attention; the arguments are shapes."""
    flops: int = sdpa_backward_flop_count(gradient, query, key, value)
    return flops
