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

SPATIAL = re.compile(
    r"(.*\.)?(layer\d+\.\d+\.conv\d+|stages\.\d+\.blocks\.\d+\.conv\d+|s\d+\.b\d+\.conv\d+\.conv"
    r"|denseblock\d+\.denselayer\d+\.conv2)"
)
"""Convolutions of the blocks of ResNets, ResNetV2s, RegNets and DenseNets; those of 3x3 are looked for."""
EFFICIENTNET_BLOCK = re.compile(r"(.*\.)?blocks\.\d+\.\d+\.conv_(exp|pw|pwl)")
CONVNEXT_BLOCK = re.compile(r"(.*\.)?stages\.\d+\.blocks\.\d+\.conv_dw")


def block_convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions that mix channels inside the blocks of a ResNet or an EfficientNet, in order.

    ResNets, ResNetV2s, RegNets and DenseNets of timm, ResNets and DenseNets of torchvision: the 3x3 convolutions, that
    is both of a basic block, the middle one of a bottleneck block, the last one of a dense layer. EfficientNets of timm
    (whose 3x3 convolutions are depthwise): the pointwise and expanding ones. Any other network: none.
    """
    convolutions = [(name, module) for name, module in own_modules(model) if isinstance(module, nn.Conv2d)]
    return [
        name
        for name, conv in convolutions
        if (SPATIAL.fullmatch(name) and conv.kernel_size == (3, 3)) or EFFICIENTNET_BLOCK.fullmatch(name)
    ]


def residual_convolutions(model: nn.Module) -> list[str]:
    """Return those of :func:`block_convolutions` that an adapter, C to C, can follow at little cost, in order.

    In a ResNet these are all. In an EfficientNet it is the last pointwise one of each block: the others are up to six
    times as wide, so that adapters after them, C to C, would be larger than the network. In a ConvNeXt, whose other
    layers are linear, it is the depthwise one.
    """
    names = block_convolutions(model)
    expanding = {
        f"{block}.{name}"
        for block, _, last in (n.rpartition(".") for n in names)
        if last == "conv_pwl"
        for name in ("conv_pw", "conv_exp")
    }
    depthwise = [name for name, module in own_modules(model) if CONVNEXT_BLOCK.fullmatch(name)]
    return [name for name in names if name not in expanding] or depthwise


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
    families = "ResNets, DenseNets, and timm's ResNetV2s, RegNets, EfficientNets and ConvNeXts"
    follows = "nn.Conv2d modules"

    def targets(self, config: ResidualConfig) -> list[str]:
        """Return the convolutions of the blocks."""
        within = reached(self.model, config.last_blocks)
        return [name for name in residual_convolutions(self.model) if name in within]

    def fits(self, target: nn.Module) -> bool:
        """Whether it is a convolution."""
        return isinstance(target, nn.Conv2d)

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
