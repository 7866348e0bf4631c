# SPDX-License-Identifier: Apache-2.0
"""The weights under LoRA as a part of states, for algorithms whose server merges into them."""

from typing import Literal

from peft.tuners.lora import LoraLayer
from torch import nn

from perada.core.states import Merged

Trained = bool | Literal["merged"]
"""What of the backbone is in states: what is trained, nothing, or the weights that LoRA adapts."""


def let_merge(model: nn.Module) -> None:
    """Make the weights under PEFT's LoRA layers :class:`~perada.core.states.Merged`, in place.

    Left out are layers whose sum is not that of a weight and a product of matrices: of convolutions with groups, of
    embeddings, of weights that are stored transposed, and with DoRA.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            base = layer.get_base_layer()
            convolves = isinstance(base, nn.modules.conv._ConvNd) and base.groups == 1
            if (convolves or isinstance(base, nn.Linear)) and not getattr(layer, "fan_in_fan_out", False):
                base.weight = Merged(base.get_parameter("weight").data)
