# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into the weights that they adapt, by PEFT, or by a server into the weights under LoRA."""

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

Trained = bool | Literal["merged"]
"""What of the backbone is in states: what is trained, nothing, or the weights that LoRA adapts."""


def let_merge(model: nn.Module) -> None:
    """Make the weights under PEFT's LoRA layers :class:`~perada.core.states.Merged`, in place.

    Left out are layers whose sum is not that of a weight and a product of matrices: of convolutions with groups, of
    embeddings, of weights that are stored transposed, and with DoRA.
    """
    untie_base_layers(model)
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            base = layer.get_base_layer()
            convolves = isinstance(base, nn.modules.conv._ConvNd) and base.groups == 1
            if (convolves or isinstance(base, nn.Linear)) and not getattr(layer, "fan_in_fan_out", False):
                base.weight = Merged(base.get_parameter("weight").data)


def untie_base_layers(model: nn.Module) -> None:
    """Give each adapted layer weights that nothing else in ``model`` uses, in place.

    A network may use one layer, or one weight, in several places, and an adapter stands in one of them. Merging it
    changes the weight, which must stay as it is in the other places.
    """
    for layer in list(model.modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.base_layer = copy.deepcopy(layer.base_layer)


class WrongMergeError(NotImplementedError):
    """A merged network that computes something else than the network with its adapter."""


def merge_adapter(peft_model: PeftModel, state: State) -> nn.Module:
    """Return the network in ``state`` with the adapter merged into the weights, without PEFT's layers.

    The model is used up by it: give a copy. :func:`check_merged` compares what comes out.

    Raises:
        NotImplementedError: If PEFT cannot merge the adapter.
    """
    set_state(peft_model.get_base_model(), state)
    untie_base_layers(peft_model)
    try:
        merged: nn.Module = peft_model.merge_and_unload(safe_merge=True)
    except Exception as error:  # every method of PEFT refuses in its own way
        reason = " ".join(str(error).split()) or "the method has no merged form"
        raise NotImplementedError(_not_merged(peft_model, reason)) from error
    return merged.eval()


def check_merged(peft_model: PeftModel, merged: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Refuse, by a WrongMergeError, a merged network whose logits of ``x`` (B, ...) are not those of ``model``.

    Both are in evaluation mode, and the latter has the adapter, of ``peft_model``, beside its weights.
    """
    try:
        difference = compare_logits(model, merged, x, 1e-3)
    except Exception:  # whatever a network does with images that it does not take
        return
    if difference is not None and x.device.type != "mps":  # which has no double precision, the judge of rounding
        exact_model = copy.deepcopy(model).double()
        exact_merged = copy.deepcopy(merged).double()
        # A network may name a number format; what was seen in single precision then stands.
        with suppress(Exception):
            exact_x = x.double() if x.is_floating_point() else x
            difference = compare_logits(exact_model, exact_merged, exact_x, 1e-6)
    if difference is not None:
        reason = (
            f"merged, it computes something else ({difference}), since PEFT merges this kind of layer wrongly, or the "
            "network reads the layer's weights besides calling it"
        )
        raise WrongMergeError(_not_merged(peft_model, reason))


def _not_merged(peft_model: PeftModel, reason: str) -> str:
    method = type(peft_model.peft_config["default"]).__name__
    return (
        f"the adapter ({method}) cannot be merged into the weights: {reason}; use personal(client) or global_model(), "
        "which keep the adapter beside the weights"
    )


def compare_logits(model: nn.Module, other: nn.Module, x: Tensor, tolerance: float) -> str | None:
    """Describe how the logits of two networks differ by more than a ``tolerance`` relative to the largest.

    ``None`` if they agree, or if the first does not give the same twice. What a network raises on ``x`` is raised.
    """
    with torch.no_grad():
        with seeded(0, "merging"):
            expected = model(x)
        with seeded(1, "merging"):
            repeats = torch.equal(expected, model(x))
        with seeded(0, "merging"):
            logits = other(x)
    scale, moved = float(expected.abs().max()), float((logits - expected).abs().max())
    if not repeats or moved <= tolerance * max(scale, 1e-6):
        return None
    return f"logits of up to {scale:.2g} change by {moved:.2g}"
