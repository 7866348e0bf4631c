# SPDX-License-Identifier: Apache-2.0
"""The residual adapter around one convolution."""

import math

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .config import ResidualConfig


class ResidualLayer(nn.Module, BaseTunerLayer):
    """A convolution followed by one residual adapter for each active PEFT adapter name.

    Each part is a dictionary of its own, keyed by adapter name: PEFT can then strip the name from the keys it saves.
    PEFT finds ``modules_to_save`` by the ends of names, so no dictionary's name ends as a module's may (``norm``).

    Args:
        base_layer: The convolution, with C output channels; it stays as it is.
        adapter_name: PEFT's name of the adapter.
        config: What to build.
    """

    adapter_layer_names = ("perada_residual_normalise", "perada_residual_project")
    other_param_names = ("perada_residual_dropout",)

    def __init__(self, base_layer: nn.Conv2d, adapter_name: str, config: ResidualConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.perada_residual_normalise = nn.ModuleDict()
        self.perada_residual_dropout = nn.ModuleDict()
        self.perada_residual_project = nn.ModuleDict()
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.merged_adapters = []
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: ResidualConfig) -> None:
        """Add an adapter, freshly initialised from the global random stream."""
        channels = self.base_layer.out_channels
        projection = nn.Conv2d(channels, channels, kernel_size=1, bias=False)
        nn.init.normal_(projection.weight, std=config.init_std)
        self.perada_residual_normalise[adapter_name] = _norm(config.norm, channels)
        self.perada_residual_dropout[adapter_name] = nn.Dropout(config.dropout)
        self.perada_residual_project[adapter_name] = projection
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the convolution, shape (B, C, H, W)."""
        x = self.base_layer(x)
        if self.disable_adapters:
            return x
        for name in self.active_adapters:
            if name in self.perada_residual_project:
                hidden = self.perada_residual_dropout[name](self.perada_residual_normalise[name](x))
                x = x + self.perada_residual_project[name](hidden)
        return x


def _norm(kind: str, channels: int) -> nn.Module:
    """Return the normalisation of ``channels`` channels; groups are as many as divide them, 32 at most."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(32, channels), channels) if kind == "group" else nn.Identity()
