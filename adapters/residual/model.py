# SPDX-License-Identifier: Apache-2.0
"""Where residual adapters go in a network."""

import re
from typing import Any, cast

from peft import PeftConfig
from torch import nn

from ..added import AddingModel
from ..blocks import own_modules, reached
from .config import ResidualConfig
from .layer import ResidualLayer

RESNET_BLOCK = re.compile(r"(.*\.)?layer\d+\.\d+\.conv\d+")
EFFICIENTNET_BLOCK = re.compile(r"(.*\.)?blocks\.\d+\.\d+\.conv_(exp|pw|pwl)")


def block_convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions that mix channels inside the blocks of a ResNet or an EfficientNet, in order.

    ResNets of timm and torchvision: the 3x3 convolutions, that is both of a basic block, the middle one of a bottleneck
    block. EfficientNets of timm (whose 3x3 convolutions are depthwise): the pointwise and expanding ones. Any other
    network: none.
    """
    convolutions = [(name, module) for name, module in own_modules(model) if isinstance(module, nn.Conv2d)]
    return [
        name
        for name, conv in convolutions
        if (RESNET_BLOCK.fullmatch(name) and conv.kernel_size == (3, 3)) or EFFICIENTNET_BLOCK.fullmatch(name)
    ]


def residual_convolutions(model: nn.Module) -> list[str]:
    """Return those of :func:`block_convolutions` that are as wide as the block's output, in order.

    In a ResNet these are all. In an EfficientNet it is the last pointwise one of each block: the others are up to six
    times as wide, so that adapters after them, C to C, would be larger than the network.
    """
    names = block_convolutions(model)
    expanding = {
        f"{block}.{name}"
        for block, _, last in (n.rpartition(".") for n in names)
        if last == "conv_pwl"
        for name in ("conv_pw", "conv_exp")
    }
    return [name for name in names if name not in expanding]


def main_norms(model: nn.Module) -> list[str]:
    """Return the trainable normalisation layers of ``model`` outside shortcut branches, in order."""
    return [
        name
        for name, module in own_modules(model)
        if "Norm" in type(module).__name__
        and any(True for _ in module.parameters(recurse=False))
        and not {"downsample", "shortcut"} & set(name.split("."))
    ]


class ResidualModel(AddingModel[ResidualConfig]):
    """Put a residual adapter after each targeted convolution."""

    prefix = "perada_residual_"
    tuner_layer_cls = ResidualLayer
    method = "residual"
    families = "ResNets (timm, torchvision) and EfficientNets (timm)"
    follows = "nn.Conv2d modules"

    def targets(self, config: ResidualConfig) -> list[str]:
        """Return the convolutions of the blocks."""
        within = reached(self.model, config.last_blocks)
        return [name for name in residual_convolutions(self.model) if name in within]

    def fits(self, target: nn.Module) -> bool:
        """Whether it is a convolution, or one that something follows already."""
        return isinstance(getattr(target, "base_layer", target), nn.Conv2d)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the convolutions and the network's own norms."""
        config = cast(ResidualConfig, super()._prepare_adapter_config(peft_config, model_config))
        if config.train_norms:
            within, norms = reached(self.model, config.last_blocks), main_norms(self.model)
            frozen = tuple(name for name in norms if name not in within)
            # PEFT compares the ends of names: one that is the end of a frozen norm's would unfreeze that too.
            norms = [name for name in norms if name in within and not any(other.endswith(name) for other in frozen)]
            config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or []), *norms]))
        return config
