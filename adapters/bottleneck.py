# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters in the blocks of a vision transformer."""

from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from .added import AdapterConfig, AddedLayer, AddingModel, check_dropout, check_last_blocks, reached


@dataclass
class BottleneckConfig(AdapterConfig):
    """A bottleneck adapter ``x + up(dropout(activation(down(x))))`` on the output ``x`` of a module.

    ``up`` starts at zero, so the adapted network starts as the plain one.

    Source: Houlsby et al. (ICML 2019); placement after Pfeiffer et al. (EACL 2021).

    Args:
        reduction: Features of ``x`` for each feature of the bottleneck.
        bottleneck_dim: Features of the bottleneck; takes the place of ``reduction``.
        activation: Nonlinearity of the bottleneck.
        dropout: Probability of dropout inside the bottleneck.
        placement: ``"pfeiffer"`` adapts the output of each block's MLP, ``"houlsby"`` also that of its attention.
        target_modules: Modules to adapt instead of those of ``placement``: names (or ends of names), or a regular
            expression of the full name. Each must be, or end in, a linear layer.
        last_blocks: As of :class:`~perada.adapters.ResidualConfig`.
        exclude_modules: Linear layers to leave out of ``target_modules``.
        modules_to_save: As of :class:`~perada.adapters.ResidualConfig`.
    """

    reduction: int = 16
    bottleneck_dim: int | None = None
    activation: Literal["relu", "gelu", "silu", "tanh"] = "gelu"
    dropout: float = 0.0
    placement: Literal["pfeiffer", "houlsby"] = "pfeiffer"
    last_blocks: int | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_BOTTLENECK"
        if self.reduction < 1:
            raise ValueError(f"reduction={self.reduction!r} is too small: give 1 or more")
        if self.bottleneck_dim is not None and self.bottleneck_dim < 1:
            raise ValueError(f"bottleneck_dim={self.bottleneck_dim!r} is too small: give 1 or more, or leave it out")
        if self.activation not in ("relu", "gelu", "silu", "tanh"):
            raise ValueError(f"activation={self.activation!r} is unknown: choose 'relu', 'gelu', 'silu' or 'tanh'")
        check_dropout(self.dropout)
        if self.placement not in ("pfeiffer", "houlsby"):
            raise ValueError(f"placement={self.placement!r} is unknown: choose 'pfeiffer' or 'houlsby'")
        check_last_blocks(self.last_blocks)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def last_linear(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of ``module`` (itself, if it is one), or None."""
    return next((layer for layer in [*module.modules()][::-1] if isinstance(layer, nn.Linear)), None)


class BottleneckLayer(AddedLayer[BottleneckConfig]):
    """A module with output (..., D), followed by one bottleneck adapter for each active PEFT adapter name.

    The module's last linear layer gives D.
    """

    parts = tuple(f"perada_bottleneck_{part}" for part in ("down", "activation", "dropout", "up"))
    adapter_layer_names = (parts[0], parts[3])
    other_param_names = parts[1:3]

    def build(self, config: BottleneckConfig) -> tuple[nn.Module, ...]:
        """Return the layers of the bottleneck; ``up`` is zero."""
        linear = cast(nn.Linear, last_linear(self.base_layer))
        features, dtype = linear.out_features, linear.weight.dtype
        bottleneck = config.bottleneck_dim or max(1, features // config.reduction)
        up = nn.Linear(bottleneck, features, dtype=dtype)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        down = nn.Linear(features, bottleneck, dtype=dtype)
        return down, ACTIVATIONS[config.activation](), nn.Dropout(config.dropout), up


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
