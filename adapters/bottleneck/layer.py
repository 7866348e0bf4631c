# SPDX-License-Identifier: Apache-2.0
"""The bottleneck adapter around one module."""

from typing import cast

from torch import nn

from ..added import AddedLayer
from .config import BottleneckConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def last_linear(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of ``module`` (itself, if it is one), or None."""
    return next((layer for layer in [*module.modules()][::-1] if isinstance(layer, nn.Linear)), None)


class BottleneckLayer(AddedLayer[BottleneckConfig]):
    """A module with output (..., D), followed by one bottleneck adapter for each active PEFT adapter name.

    The module's last linear layer gives D.
    """

    parts = tuple(f"perada_bottleneck_{part}" for part in ("down", "activation", "dropout", "up"))
    adapter_layer_names = (parts[0], parts[3])
    other_param_names = parts[1:3]

    def build(self, config: BottleneckConfig) -> tuple[nn.Module, ...]:
        """Return the layers of the bottleneck; ``up`` is zero."""
        linear = cast(nn.Linear, last_linear(self.base_layer))
        features, dtype = linear.out_features, linear.weight.dtype
        bottleneck = config.bottleneck_dim or max(1, features // config.reduction)
        up = nn.Linear(bottleneck, features, dtype=dtype)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        down = nn.Linear(features, bottleneck, dtype=dtype)
        return down, ACTIVATIONS[config.activation](), nn.Dropout(config.dropout), up
