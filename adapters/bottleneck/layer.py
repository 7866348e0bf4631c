# SPDX-License-Identifier: Apache-2.0
"""The bottleneck adapter around one module."""

from typing import cast

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .config import BottleneckConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def last_linear(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of ``module`` (itself, if it is one), or None."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return layers[-1] if layers else None


class BottleneckLayer(nn.Module, BaseTunerLayer):
    """A module with D output features, followed by one bottleneck adapter for each active PEFT adapter name.

    Each part is a dictionary of its own, keyed by adapter name: PEFT can then strip the name from the keys it saves.

    Args:
        base_layer: The module; it stays as it is. Its last linear layer gives D.
        adapter_name: PEFT's name of the adapter.
        config: What to build.
    """

    adapter_layer_names = ("perada_bottleneck_down", "perada_bottleneck_up")
    other_param_names = ("perada_bottleneck_activation", "perada_bottleneck_dropout")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: BottleneckConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.perada_bottleneck_down = nn.ModuleDict()
        self.perada_bottleneck_activation = nn.ModuleDict()
        self.perada_bottleneck_dropout = nn.ModuleDict()
        self.perada_bottleneck_up = nn.ModuleDict()
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.merged_adapters = []
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BottleneckConfig) -> None:
        """Add an adapter; ``down`` is freshly initialised from the global random stream, ``up`` is zero."""
        linear = cast(nn.Linear, last_linear(self.base_layer))
        features = linear.out_features
        bottleneck = config.bottleneck_dim or max(1, features // config.reduction)
        up = nn.Linear(bottleneck, features, dtype=linear.weight.dtype)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        self.perada_bottleneck_down[adapter_name] = nn.Linear(features, bottleneck, dtype=linear.weight.dtype)
        self.perada_bottleneck_activation[adapter_name] = ACTIVATIONS[config.activation]()
        self.perada_bottleneck_dropout[adapter_name] = nn.Dropout(config.dropout)
        self.perada_bottleneck_up[adapter_name] = up
        self._move_adapter_to_device_of_base_layer(adapter_name, device=linear.weight.device)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the module, shape (..., D)."""
        x = self.base_layer(x)
        if self.disable_adapters:
            return x
        for name in self.active_adapters:
            if name in self.perada_bottleneck_up:
                hidden = self.perada_bottleneck_activation[name](self.perada_bottleneck_down[name](x))
                x = x + self.perada_bottleneck_up[name](self.perada_bottleneck_dropout[name](hidden))
        return x
