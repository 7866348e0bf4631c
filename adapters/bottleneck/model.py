# SPDX-License-Identifier: Apache-2.0
"""Where bottleneck adapters go in a network."""

from torch import nn

from ..added import AddingModel
from ..blocks import reached
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


class BottleneckModel(AddingModel[BottleneckConfig]):
    """Put a bottleneck adapter after each targeted module."""

    prefix = "perada_bottleneck_"
    tuner_layer_cls = BottleneckLayer
    method = "bottleneck"
    families = "transformers whose blocks have an 'mlp'"
    follows = "modules that are, or end in, an nn.Linear,"

    def targets(self, config: BottleneckConfig) -> list[str]:
        """Return what the placement asks for."""
        within = reached(self.model, config.last_blocks)
        return [name for name in block_outputs(self.model, config.placement) if name in within]

    def fits(self, target: nn.Module) -> bool:
        """Whether there is a linear layer in it."""
        return last_linear(target) is not None
