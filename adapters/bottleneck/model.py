# SPDX-License-Identifier: Apache-2.0
"""Where bottleneck adapters go in a network."""

from typing import Any, cast

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from .config import BottleneckConfig
from .layer import BottleneckLayer, last_linear

ATTENTION_OUTPUTS = ("attn.proj", "attention.o_proj", "attention.output.dense")
"""The attention's last linear layer, seen from its block: timm, transformers 5, transformers 4."""


def block_outputs(model: nn.Module, placement: str) -> list[str]:
    """Return the MLP of every transformer block, with ``placement="houlsby"`` also its attention's output layer."""
    # Where there is an adapter already, the module it wraps counts under its former name.
    modules = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()}
    names = []
    for name, module in modules.items():
        if name.split(".")[-1] == "mlp" and last_linear(module) is not None:
            if placement == "houlsby":
                outputs = [name.removesuffix("mlp") + part for part in ATTENTION_OUTPUTS]
                names += [output for output in outputs if isinstance(modules.get(output), nn.Linear)]
            names.append(name)
    return names


class BottleneckModel(BaseTuner):
    """Put a bottleneck adapter after each targeted module."""

    prefix = "perada_bottleneck_"
    tuner_layer_cls = BottleneckLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012 (PEFT's base class declares it so)

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the modules that the placement asks for."""
        config = cast(BottleneckConfig, peft_config)
        if config.target_modules is None:
            config.target_modules = block_outputs(self.model, config.placement)
            if not config.target_modules:
                raise ValueError(
                    f"the bottleneck adapter fits transformers whose blocks have an 'mlp', not "
                    f"{type(self.model).__name__}: choose another adapter, or name the modules in target_modules"
                )
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
        """Wrap one module, or add a second adapter to a wrapped one."""
        config = cast(BottleneckConfig, peft_config)
        if isinstance(target, BottleneckLayer):
            target.update_layer(adapter_name, config)
            return
        if last_linear(target) is None:
            raise ValueError(
                f"the bottleneck adapter cannot follow {current_key!r}, a {type(target).__name__} without a linear "
                "layer: let target_modules name modules that are, or end in, an nn.Linear"
            )
        layer = BottleneckLayer(target, adapter_name, config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)
