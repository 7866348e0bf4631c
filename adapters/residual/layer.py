# SPDX-License-Identifier: Apache-2.0
"""The residual adapter around one convolution."""

import math
from typing import cast

from torch import nn

from ..added import AddedLayer
from .config import ResidualConfig


class ResidualLayer(AddedLayer[ResidualConfig]):
    """A convolution with output (B, C, H, W), followed by one residual adapter for each active PEFT adapter name."""

    parts = ("perada_residual_normalise", "perada_residual_dropout", "perada_residual_project")
    adapter_layer_names = (parts[0], parts[2])
    other_param_names = (parts[1],)

    def build(self, config: ResidualConfig) -> tuple[nn.Module, ...]:
        """Return normalisation (with as many groups as divide the channels, 32 at most), dropout and 1x1 weights."""
        channels = cast(nn.Conv2d, self.base_layer).out_channels
        projection = nn.Conv2d(channels, channels, kernel_size=1, bias=False)
        nn.init.normal_(projection.weight, std=config.init_std)
        norm: nn.Module = nn.Identity()
        if config.norm == "batch":
            norm = nn.BatchNorm2d(channels)
        elif config.norm == "group":
            norm = nn.GroupNorm(math.gcd(32, channels), channels)
        return norm, nn.Dropout(config.dropout), projection
