# SPDX-License-Identifier: Apache-2.0
"""Passes through a model on torch's meta device, whose tensors have shapes but no numbers: nothing is computed."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from perada.core.states import copy_module


def meta_copy(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model whose parameters and buffers have no numbers.

    Returns:
        The copy; None if the model cannot be copied.
    """
    try:
        return copy_module(model, _without_numbers)
    except Exception:  # a network of the caller's own may hold objects that cannot be copied
        return None


def _without_numbers(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer on the meta device."""
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def share_before_trained(model: nn.Module, image: Tensor) -> float | None:
    """Return the share of a forward pass until the last module whose output depends on no trained tensor has run.

    Features of frozen layers can save at most this share. The pass is in evaluation mode.

    Args:
        model: The model of a single client, in which trained tensors require gradients.
        image: A prepared image (channels, height, width), or the tokens of a text.

    Returns:
        The share of the floating-point operations, 0 if all outputs depend on trained tensors; None if the model cannot
        run without numbers, for example because it reads some. Attention is counted, unlike in passes on a CPU.
    """
    copied = meta_copy(model)
    if copied is None:
        return None
    counter = FlopCounterMode(display=False)
    flops_before_trained = 0

    def count(module: nn.Module, inputs: object, out: object) -> None:
        nonlocal flops_before_trained
        if not isinstance(out, Tensor) or isinstance(module, nn.Identity):
            return
        if not out.requires_grad:
            flops_before_trained = counter.get_total_flops()

    copied.eval()
    for module in copied.modules():
        module.register_forward_hook(count)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), counter:
            copied(image.new_empty(1, *image.shape, device="meta"))
    except Exception:  # a network of the caller's own may do anything with its numbers
        return None
    return flops_before_trained / max(1, counter.get_total_flops())
