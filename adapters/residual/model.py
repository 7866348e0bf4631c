# SPDX-License-Identifier: Apache-2.0
"""Where residual adapters go in a network."""

import re
from collections.abc import Iterator
from typing import Any, cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from .config import ResidualConfig
from .layer import ResidualLayer

RESNET_BLOCK = re.compile(r"(.*\.)?layer\d+\.\d+\.conv\d+")
EFFICIENTNET_BLOCK = re.compile(r"(.*\.)?blocks\.\d+\.\d+\.conv_(exp|pw|pwl)")


def _own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the network's modules under the names they have without adapters, whether or not it holds some already."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if "modules_to_save" not in parts and not any(part.startswith("perada_residual_") for part in parts):
            yield ".".join(part for part in parts if part not in ("base_layer", "original_module")), module


def block_convolutions(model: nn.Module) -> list[str]:
    """Return the convolutions that mix channels inside the blocks of a ResNet or an EfficientNet, in order.

    ResNets of timm and torchvision: the 3x3 convolutions, that is both of a basic block, the middle one of a bottleneck
    block. EfficientNets of timm (whose 3x3 convolutions are depthwise): the pointwise and expanding ones. Any other
    network: none.
    """
    names = []
    for name, module in _own_modules(model):
        if isinstance(module, nn.Conv2d) and (
            (RESNET_BLOCK.fullmatch(name) and module.kernel_size == (3, 3)) or EFFICIENTNET_BLOCK.fullmatch(name)
        ):
            names.append(name)
    return names


def main_norms(model: nn.Module) -> list[str]:
    """Return the trainable normalisation layers of ``model`` outside shortcut branches, in order."""
    return [
        name
        for name, module in _own_modules(model)
        if "Norm" in type(module).__name__
        and any(True for _ in module.parameters(recurse=False))
        and not {"downsample", "shortcut"} & set(name.split("."))
    ]


class ResidualModel(BaseTuner):
    """Put a residual adapter after each targeted convolution."""

    prefix = "perada_residual_"
    tuner_layer_cls = ResidualLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 (PEFT's base class declares it so)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the convolutions and the network's own norms."""
        config = cast(ResidualConfig, peft_config)
        if config.target_modules is None:
            config.target_modules = block_convolutions(self.model)
            if not config.target_modules:
                raise ValueError(
                    f"the residual adapter fits ResNets (timm, torchvision) and EfficientNets (timm), not "
                    f"{type(self.model).__name__}: choose another adapter, or name its convolutions in target_modules"
                )
        if config.train_norms:
            saved = config.modules_to_save or []
            config.modules_to_save = saved + [name for name in main_norms(self.model) if name not in saved]
        return config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        """Wrap one convolution, or add a second adapter to a wrapped one."""
        config = cast(ResidualConfig, peft_config)
        if isinstance(target, ResidualLayer):
            target.update_layer(adapter_name, config)
            return
        if not isinstance(target, nn.Conv2d):
            raise ValueError(
                f"the residual adapter cannot follow {current_key!r}, a {type(target).__name__}: "
                "let target_modules name nn.Conv2d modules only"
            )
        layer = ResidualLayer(target, adapter_name, config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)
