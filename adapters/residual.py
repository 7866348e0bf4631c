# SPDX-License-Identifier: Apache-2.0
"""Residual adapters after the convolutions of a network."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from peft import PeftConfig
from torch import nn

from .added import (
    AdapterConfig,
    AddedLayer,
    AddingModel,
    check_dropout,
    check_last_blocks,
    is_norm,
    own_modules,
    reached,
)


@dataclass
class ResidualConfig(AdapterConfig):
    """A residual adapter ``x + conv1x1(dropout(norm(x)))`` on the output ``x`` of a convolution.

    Source: the adapter of PerAda (Xie et al., CVPR 2024), after Rebuffi et al. (NeurIPS 2017).

    Args:
        dropout: Probability of the dropout between normalisation and 1x1 convolution.
        norm: Normalisation of the adapter's input. ``"batch"`` is the paper's; ``"group"`` and ``"none"`` have no
            statistics over the batch, as differential privacy demands.
        init_std: Standard deviation of the initial 1x1 weights. The paper's N(0, 1e-4) is read as mean and variance,
            hence 0.01. Zero starts as the identity.
        train_norms: Also train the network's own normalisation layers, except those of shortcuts, as the paper does.
            They are added to ``modules_to_save``.
        last_blocks: Adapt, and with ``train_norms`` train, only the last so many blocks of the network and what follows
            them; by default all. What stands before them never changes, and runs once an image. A norm behind the
            blocks stays frozen where PEFT cannot tell its name from one before them (``bn2`` of EfficientNets).
        target_modules: Convolutions to adapt: names (or ends of names), or a regular expression of the full name. Left
            out: every 3x3 convolution of the blocks of a ResNet, ResNetV2, RegNet or DenseNet, the last pointwise
            convolution of each block of an EfficientNet, the depthwise one of a ConvNeXt.
        exclude_modules: Convolutions to leave out of ``target_modules``.
        modules_to_save: Modules trained whole and saved beside the adapters, such as the classification head.
    """

    dropout: float = 0.3
    norm: Literal["batch", "group", "none"] = "batch"
    init_std: float = 0.01
    train_norms: bool = True
    last_blocks: int | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_RESIDUAL"
        check_dropout(self.dropout)
        if self.norm not in ("batch", "group", "none"):
            raise ValueError(f"norm={self.norm!r} is unknown: choose 'batch', 'group' or 'none'")
        if self.init_std < 0:
            raise ValueError(f"init_std={self.init_std!r} is negative: give 0 (start as the identity) or more")
        check_last_blocks(self.last_blocks)


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
        """Whether it is a convolution, or one that something follows already."""
        return isinstance(getattr(target, "base_layer", target), nn.Conv2d)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the convolutions and the network's own norms."""
        config = cast(ResidualConfig, super()._prepare_adapter_config(peft_config, model_config))
        if config.train_norms:
            within = reached(self.model, config.last_blocks)
            norms = [name for name, module in own_modules(self.model) if is_norm(module)]
            norms = [name for name in norms if not {"downsample", "shortcut"} & set(name.split("."))]
            frozen = tuple(name for name in norms if name not in within)
            # PEFT compares the ends of names: one that is the end of a frozen norm's would unfreeze that too.
            norms = [name for name in norms if name in within and not any(other.endswith(name) for other in frozen)]
            config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or []), *norms]))
        return config
