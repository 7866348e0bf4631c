# SPDX-License-Identifier: Apache-2.0
"""Residual adapters after the convolutions of a network."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from peft import PeftConfig
from torch import nn

from .added import (
    AdapterConfig,
    AddedLayer,
    AddingModel,
    backbone_modules,
    check_dropout,
    check_last_blocks,
    is_norm,
    modules_from_last_blocks,
)


@dataclass
class ResidualConfig(AdapterConfig):
    """Configuration of residual adapters ``x + conv1x1(dropout(norm(x)))`` on the outputs ``x`` of convolutions.

    Source: the adapter of PerAda (Xie et al., CVPR 2024), after Rebuffi et al. (NeurIPS 2017).

    Args:
        dropout: Probability of the dropout between normalisation and 1x1 convolution.
        norm: Normalisation of the adapter's input. ``"batch"`` is the paper's; ``"group"`` and ``"none"`` have no
            statistics over the batch, as differential privacy demands.
        init_std: Standard deviation of the initial 1x1 weights. The paper's N(0, 1e-4) is read as mean and variance,
            hence 0.01. Zero starts as the identity.
        train_norms: Also train the network's own normalisation layers, except those of shortcuts, as the paper does.
            They are added to ``modules_to_save``.
        last_blocks: Number of blocks to adapt (and, with ``train_norms``, to train norms in), counted from the end of
            the network, together with the layers after them; by default all. The layers before are frozen, and run
            once per image. A norm after the blocks stays frozen if PEFT cannot distinguish its name from that of one
            before them (``bn2`` of EfficientNets).
        target_modules: Convolutions to adapt: names (or ends of names), or a regular expression of the full name. By
            default every 3x3 convolution of the blocks of a ResNet, ResNetV2, RegNet or DenseNet, the last pointwise
            convolution of each block of an EfficientNet, the depthwise one of a ConvNeXt.
        exclude_modules: Convolutions to leave out of ``target_modules``.
        modules_to_save: Modules trained in full and saved with the adapters, such as the classification head.

    >>> ResidualConfig(last_blocks=2).last_blocks
    2
    """

    dropout: float = field(
        default=0.3, metadata={"help": "Probability of the dropout between normalisation and 1x1 convolution."}
    )
    norm: Literal["batch", "group", "none"] = field(
        default="batch", metadata={"help": "Normalisation of the adapter's input: 'batch', 'group' or 'none'."}
    )
    init_std: float = field(default=0.01, metadata={"help": "Standard deviation of the initial 1x1 weights."})
    train_norms: bool = field(
        default=True,
        metadata={"help": "Also train the network's own normalisation layers, except those of shortcuts."},
    )
    last_blocks: int | None = field(
        default=None, metadata={"help": "Number of blocks to adapt, counted from the end of the network."}
    )
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names, or a regular expression of the names, of the convolutions to adapt."}
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Convolutions to leave out of target_modules."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the adapters, such as the head."}
    )

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_RESIDUAL"
        check_dropout(self.dropout)
        if self.norm not in ("batch", "group", "none"):
            raise ValueError(f"norm must be one of 'batch', 'group', 'none', got {self.norm!r}")
        if self.init_std < 0:
            raise ValueError(f"init_std must be a number >= 0, got {self.init_std!r}; 0 starts as the identity")
        check_last_blocks(self.last_blocks)


class ResidualLayer(AddedLayer[ResidualConfig]):
    """A convolution with output (B, C, H, W), followed by one residual adapter per active adapter name."""

    parts = ("perada_residual_normalise", "perada_residual_dropout", "perada_residual_project")
    # What PEFT saves and trains, and what it only moves and deletes along with it.
    adapter_layer_names = ("perada_residual_normalise", "perada_residual_project")
    other_param_names = ("perada_residual_dropout",)

    def build(self, config: ResidualConfig) -> tuple[nn.Module, ...]:
        """Return the layers of an adapter.

        Group normalisation has gcd(32, C) groups, since their number must divide that of the channels.
        """
        channels = cast(nn.Conv2d, self.base_layer).out_channels
        projection = nn.Conv2d(channels, channels, kernel_size=1, bias=False)
        nn.init.normal_(projection.weight, std=config.init_std)
        norm: nn.Module = nn.Identity()
        if config.norm == "batch":
            norm = nn.BatchNorm2d(channels)
        elif config.norm == "group":
            norm = nn.GroupNorm(math.gcd(32, channels), channels)
        return norm, nn.Dropout(config.dropout), projection


BLOCK_CONVOLUTION = re.compile(
    r"(.*\.)?(layer\d+\.\d+\.conv\d+|stages\.\d+\.blocks\.\d+\.conv\d+|s\d+\.b\d+\.conv\d+\.conv"
    r"|denseblock\d+\.denselayer\d+\.conv2)"
)
"""Convolutions of any size in the blocks of ResNets, ResNetV2s, RegNets and DenseNets."""
EFFICIENTNET_POINTWISE = re.compile(r"(.*\.)?blocks\.\d+\.\d+\.conv_(exp|pw|pwl)")
CONVNEXT_DEPTHWISE = re.compile(r"(.*\.)?stages\.\d+\.blocks\.\d+\.conv_dw")


def block_convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions that mix channels inside the blocks of a ResNet or an EfficientNet, in order.

    ResNets, ResNetV2s, RegNets and DenseNets of timm, ResNets and DenseNets of torchvision: the 3x3 convolutions, that
    is both of a basic block, the middle one of a bottleneck block, the last one of a dense layer. EfficientNets of timm
    (whose 3x3 convolutions are depthwise): the pointwise and expanding ones. Any other network: none.
    """
    names = []
    for name, module in backbone_modules(model):
        if not isinstance(module, nn.Conv2d):
            continue
        is_spatial = BLOCK_CONVOLUTION.fullmatch(name) and module.kernel_size == (3, 3)
        if is_spatial or EFFICIENTNET_POINTWISE.fullmatch(name):
            names.append(name)
    return names


def residual_convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions that an adapter from C to C channels can follow at little cost, in order.

    In a ResNet these are all :func:`block_convolutions`. In an EfficientNet it is the last pointwise one of each block:
    the others are up to six times as wide, so that adapters after them would be larger than the network. In a ConvNeXt,
    whose other layers are linear, it is the depthwise one.
    """
    names = block_convolutions(model)
    expanding: set[str] = set()
    for name in names:
        block, _, convolution = name.rpartition(".")
        if convolution == "conv_pwl":
            expanding.update((f"{block}.conv_pw", f"{block}.conv_exp"))
    # conv_pw of a block without conv_pwl does not expand, but is the last one.
    narrow = [name for name in names if name not in expanding]
    if narrow:
        return narrow
    return [name for name, _ in backbone_modules(model) if CONVNEXT_DEPTHWISE.fullmatch(name)]


class ResidualModel(AddingModel[ResidualConfig]):
    """Put a residual adapter after each targeted convolution."""

    prefix = "perada_residual_"
    tuner_layer_cls = ResidualLayer
    method = "residual"
    families = "ResNets, DenseNets, and timm's ResNetV2s, RegNets, EfficientNets and ConvNeXts"
    follows = "nn.Conv2d modules"

    def targets(self, config: ResidualConfig) -> list[str]:
        """Return the convolutions of the blocks."""
        allowed = modules_from_last_blocks(self.model, config.last_blocks)
        return [name for name in residual_convolutions(self.model) if name in allowed]

    def fits(self, target: nn.Module) -> bool:
        """Return whether the target is a convolution, with or without an adapter."""
        return isinstance(getattr(target, "base_layer", target), nn.Conv2d)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the convolutions, and the network's own norms, which PEFT trains and saves as modules to save."""
        config = cast(ResidualConfig, super()._prepare_adapter_config(peft_config, model_config))
        if config.train_norms:
            modules_to_save = list(config.modules_to_save or [])
            for name in self._trained_norms(config.last_blocks):
                # The norms of a decoder that is trained in full are trained already.
                if not any(name.startswith(f"{module}.") for module in modules_to_save):
                    modules_to_save.append(name)
            config.modules_to_save = list(dict.fromkeys(modules_to_save))
        return config

    def _trained_norms(self, last_blocks: int | None) -> list[str]:
        """Return the norms to train. Those of shortcuts are not, as in the paper."""
        allowed = modules_from_last_blocks(self.model, last_blocks)
        trained = []
        frozen = []
        for name, module in backbone_modules(self.model):
            if not is_norm(module) or not {"downsample", "shortcut"}.isdisjoint(name.split(".")):
                continue
            if name in allowed:
                trained.append(name)
            else:
                frozen.append(name)
        # PEFT compares the ends of names: "bn2" would unfreeze a frozen "blocks.0.0.bn2" too.
        return [name for name in trained if not any(other.endswith(name) for other in frozen)]
