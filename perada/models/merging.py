# SPDX-License-Identifier: Apache-2.0
"""Merge adapters into the weights that they adapt: for export with PEFT, or at the server in every round."""

import copy
from contextlib import suppress
from typing import Literal

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from perada.core.seeding import seeded
from perada.core.states import Merged, State, set_state
from perada.engine.precision import tolerance_of
from perada.models.factors import adapted_weight
from perada.models.lora_attention import LoraAttention

TrainBackbone = bool | Literal["merged"]
"""Which tensors of the backbone are in states: all (trained), none, or with ``"merged"`` the weights LoRA adapts."""


TOLERANCE = 1e-3
"""Largest difference of logits of a merged network in single precision, relative to the largest logit."""
TOLERANCE_DOUBLE = 1e-6
"""The same in double precision."""


def make_mergeable(model: nn.Module) -> None:
    """Turn the weights that PEFT's LoRA adapts into :class:`~perada.core.states.Merged` parameters, in place.

    Layers are left out if they do not compute with the sum of a weight and a matrix product: convolutions with groups,
    embeddings, layers whose weights are stored transposed, and layers with DoRA.
    """
    untie_base_layers(model)
    for layer in model.modules():
        # A layer with a variant such as DoRA scales the sum.
        if not isinstance(layer, LoraLayer) or layer.lora_variant:
            continue
        base = layer.get_base_layer()
        is_convolution = isinstance(base, nn.modules.conv._ConvNd) and base.groups == 1
        is_transposed = getattr(layer, "fan_in_fan_out", False)
        is_attention = isinstance(layer, LoraAttention)
        if (is_convolution or is_attention or isinstance(base, nn.Linear)) and not is_transposed:
            name = adapted_weight(layer)
            setattr(base, name, Merged(base.get_parameter(name).data))


def untie_base_layers(model: nn.Module) -> None:
    """Give each adapted layer its own copy of weights that it shares with other layers, in place.

    A network may use one layer, or one weight, in several places of which one is adapted. Merging changes the weight
    there, but it must stay as it is in the other places.
    """
    for layer in list(model.modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.base_layer = copy.deepcopy(layer.base_layer)


class WrongMergeError(NotImplementedError):
    """Raised if a merged network computes different outputs than the network with its adapter."""


def merge_adapter(peft_model: PeftModel, state: State) -> nn.Module:
    """Return a network with the adapter merged into the weights, without PEFT's layers, in evaluation mode.

    :func:`check_merged` tests whether it computes the same.

    Args:
        peft_model: The network with its adapter. It is changed and cannot be used afterwards: pass a copy.
        state: Trained tensors by name, which are loaded first.

    Raises:
        NotImplementedError: If PEFT cannot merge the adapter.
    """
    set_state(peft_model.get_base_model(), state)
    untie_base_layers(peft_model)
    try:
        merged: nn.Module = peft_model.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT's methods raise errors of any kind
        reason = " ".join(str(error).split()) or "the method has no merged form"
        raise NotImplementedError(_not_merged(peft_model, reason)) from error
    return merged.eval()


def check_merged(peft_model: PeftModel, merged: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Raise a WrongMergeError if a merged network computes different logits than the network with its adapter.

    Args:
        peft_model: PEFT's wrapper, whose configuration the error names.
        merged: The merged network, in evaluation mode.
        model: The network with its adapter, in evaluation mode.
        x: Images (B, ...) or texts.
    """
    try:
        difference = describe_difference(model, merged, x, tolerance_of(model, TOLERANCE))
    except Exception:  # networks raise errors of any kind for images of an unsupported size
        return
    # Double precision distinguishes rounding from real differences; mps lacks it.
    if difference is not None and x.device.type != "mps":
        exact_model = copy.deepcopy(model).double()
        exact_merged = copy.deepcopy(merged).double()
        # A network with a fixed dtype may fail, and the difference in single precision then decides.
        with suppress(Exception):
            exact_x = x.double() if x.is_floating_point() else x
            difference = describe_difference(exact_model, exact_merged, exact_x, TOLERANCE_DOUBLE)
    if difference is not None:
        reason = (
            f"the merged network computes different outputs ({difference}), since PEFT merges this kind of layer "
            "incorrectly, or the network reads the layer's weights in addition to calling it"
        )
        raise WrongMergeError(_not_merged(peft_model, reason))


def _not_merged(peft_model: PeftModel, reason: str) -> str:
    """Return the text of the error for an adapter that cannot be merged."""
    method = type(peft_model.peft_config["default"]).__name__
    return (
        f"the adapter ({method}) cannot be merged into the weights: {reason}; use personal(client) or global_model(), "
        "which keep the adapter separate from the weights"
    )


def describe_difference(model: nn.Module, other: nn.Module, x: Tensor, tolerance: float) -> str | None:
    """Describe by how much the logits of two networks differ.

    Args:
        model: The first network. Its errors are not caught.
        other: The second network.
        x: Images (B, ...) or texts.
        tolerance: Largest difference that is ignored, relative to the largest logit.

    Returns:
        The description; None if the logits agree, or if the first network does not compute the same twice.
    """
    with torch.no_grad():
        with seeded(0, "merging"):
            expected = model(x)
        with seeded(0, "merging"):
            logits = other(x)
    largest = float(expected.abs().max())
    change = float((logits - expected).abs().max())
    if change <= tolerance * max(largest, 1e-6):
        return None
    with torch.no_grad(), seeded(1, "merging"):
        is_deterministic = torch.equal(expected, model(x))
    if not is_deterministic:
        # The network draws random numbers, so no two passes agree.
        return None
    return f"logits of up to {largest:.2g} change by {change:.2g}"
