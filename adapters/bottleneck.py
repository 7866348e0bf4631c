# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters in the blocks of a vision transformer."""

from dataclasses import dataclass, field
from typing import Literal, cast

from torch import nn

from .added import AdapterConfig, AddedLayer, AddingModel, check_dropout, check_last_blocks, modules_from_last_blocks


@dataclass
class BottleneckConfig(AdapterConfig):
    """Configuration of bottleneck adapters ``x + up(dropout(activation(down(x))))`` on outputs ``x`` of modules.

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
        last_blocks: As in :class:`~perada.adapters.ResidualConfig`.
        exclude_modules: Linear layers to leave out of ``target_modules``.
        modules_to_save: As in :class:`~perada.adapters.ResidualConfig`.

    >>> BottleneckConfig(reduction=8).reduction
    8
    """

    reduction: int = field(default=16, metadata={"help": "Ratio of the module's output features to the bottleneck's."})
    bottleneck_dim: int | None = field(
        default=None, metadata={"help": "Number of features of the bottleneck; overrides reduction."}
    )
    activation: Literal["relu", "gelu", "silu", "tanh"] = field(
        default="gelu", metadata={"help": "Nonlinearity of the bottleneck: 'relu', 'gelu', 'silu' or 'tanh'."}
    )
    dropout: float = field(default=0.0, metadata={"help": "Probability of dropout inside the bottleneck."})
    placement: Literal["pfeiffer", "houlsby"] = field(
        default="pfeiffer",
        metadata={"help": "'pfeiffer' adapts the output of each block's MLP, 'houlsby' also that of its attention."},
    )
    last_blocks: int | None = field(
        default=None, metadata={"help": "Number of blocks to adapt, counted from the end of the network."}
    )
    target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Names, or a regular expression of the names, of modules to adapt instead of the placement's."
        },
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Linear layers to leave out of target_modules."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the adapters, such as the head."}
    )

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_BOTTLENECK"
        if self.reduction < 1:
            raise ValueError(f"reduction must be an integer >= 1, got {self.reduction!r}")
        if self.bottleneck_dim is not None and self.bottleneck_dim < 1:
            raise ValueError(f"bottleneck_dim must be an integer >= 1 or None, got {self.bottleneck_dim!r}")
        if self.activation not in ("relu", "gelu", "silu", "tanh"):
            raise ValueError(f"activation must be one of 'relu', 'gelu', 'silu', 'tanh', got {self.activation!r}")
        check_dropout(self.dropout)
        if self.placement not in ("pfeiffer", "houlsby"):
            raise ValueError(f"placement must be one of 'pfeiffer', 'houlsby', got {self.placement!r}")
        check_last_blocks(self.last_blocks)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def last_linear(module: nn.Module) -> nn.Linear | None:
    """Return the last linear layer of ``module``, which may be the module itself; None if it has none."""
    last = None
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            last = layer
    return last


class BottleneckLayer(AddedLayer[BottleneckConfig]):
    """A module with output (..., D), followed by one bottleneck adapter per active adapter name.

    D is taken from the module's last linear layer.
    """

    parts = (
        "perada_bottleneck_down",
        "perada_bottleneck_activation",
        "perada_bottleneck_dropout",
        "perada_bottleneck_up",
    )
    # The first ones are trained and saved by PEFT; the others are only moved and deleted with them.
    adapter_layer_names = ("perada_bottleneck_down", "perada_bottleneck_up")
    other_param_names = ("perada_bottleneck_activation", "perada_bottleneck_dropout")

    def build(self, config: BottleneckConfig) -> tuple[nn.Module, ...]:
        """Return the layers of an adapter. ``up`` is zero, so that the adapted network starts as the plain one."""
        linear = cast(nn.Linear, last_linear(self.base_layer))
        features = linear.out_features
        dtype = linear.weight.dtype
        bottleneck = config.bottleneck_dim or max(1, features // config.reduction)
        # nn.Linear draws initial values even for `up`, which is then set to zero: building `down` first would give it
        # different ones.
        up = nn.Linear(bottleneck, features, dtype=dtype)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        down = nn.Linear(features, bottleneck, dtype=dtype)
        activation = ACTIVATIONS[config.activation]()
        return down, activation, nn.Dropout(config.dropout), up


ATTENTION_OUTPUTS = ("attn.proj", "attention.o_proj", "attention.output.dense")
"""The attention's last linear layer, relative to its block: in timm, transformers 5 and transformers 4."""


def block_outputs(model: nn.Module, placement: str) -> list[str]:
    """Return the MLPs of all transformer blocks, with ``placement="houlsby"`` also their attention's output layers."""
    # A wrapped module follows its wrapper, and overwrites it under the same key.
    modules = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()}
    names = []
    for name, module in modules.items():
        if name.split(".")[-1] != "mlp" or last_linear(module) is None:
            continue
        if placement == "houlsby":
            block = name.removesuffix("mlp")
            for output in ATTENTION_OUTPUTS:
                if isinstance(modules.get(block + output), nn.Linear):
                    names.append(block + output)
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
        """Return the modules of the placement."""
        allowed = modules_from_last_blocks(self.model, config.last_blocks)
        return [name for name in block_outputs(self.model, config.placement) if name in allowed]

    def fits(self, target: nn.Module) -> bool:
        """Return whether the target has a linear layer."""
        return last_linear(target) is not None
