# SPDX-License-Identifier: Apache-2.0
"""Two LoRA branches beside a layer, one for what clients share and one for what each keeps."""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from .added import AdapterConfig, AddedLayer, AddingModel


@dataclass
class DualLoraConfig(AdapterConfig):
    """Two LoRA branches on the input ``x`` of a layer: ``layer(x) + s · B_g · A_g · x + s · B_p · A_p · x``.

    s is ``lora_alpha / r``. g is the shared branch, p the private one; an algorithm says what becomes of them. Both B
    start at zero, so the adapted network starts as the plain one. Each A is drawn as PEFT draws it.

    With a ``gate`` the branches are weighted by the two outputs of softmax(G · x) instead of 1. Tokens of a transformer
    and positions of a feature map have weights of their own. G starts at zero, which weights both by 1/2, and belongs
    to the private branch.

    Source: LoRA, Hu et al. (ICLR 2022); two branches, Yang et al. (NeurIPS 2024); the gate, Bian et al. (AAAI 2026).

    Args:
        r: Rank of each branch.
        lora_alpha: Numerator of s.
        gate: Whether the input weights the branches.
        target_modules: Layers to adapt: names (or ends of names), or a regular expression of the full name. Each must
            be a linear layer or a convolution without groups. perada chooses those of LoRA where it is left out.
        exclude_modules: Layers to leave out of ``target_modules``.
        modules_to_save: Modules trained whole and saved beside the adapters, such as the classification head.
    """

    r: int = 8
    lora_alpha: float = 8
    gate: bool = False
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_DUAL_LORA"
        if self.r < 1:
            raise ValueError(f"r={self.r!r} is too small: give 1 or more")
        if not 0 < self.lora_alpha < float("inf"):
            raise ValueError(f"lora_alpha={self.lora_alpha!r} cannot scale the branches: give a number above 0")


class Branches(nn.Module):
    """What is added to a layer's output: the sum of both branches, or their mixture by a gate."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, config: DualLoraConfig) -> None:
        super().__init__()
        self.scale, self.channels = config.lora_alpha / config.r, 1 if isinstance(layer, nn.Conv2d) else -1
        self.shared_A, self.shared_B = _down(layer, config.r), _up(layer, config.r)
        self.private_A, self.private_B = _down(layer, config.r), _up(layer, config.r)
        self.gate = _down(layer, 2) if config.gate else None
        for zero in (self.shared_B, self.private_B, self.gate):
            if zero is not None:
                nn.init.zeros_(zero.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map the layer's input to what is added to its output."""
        shared: Tensor = self.shared_B(self.shared_A(x))
        private: Tensor = self.private_B(self.private_A(x))
        if self.gate is None:
            return self.scale * (shared + private)
        weights = self.gate(x).softmax(self.channels).split(1, self.channels)
        mixture: Tensor = weights[0] * shared + weights[1] * private
        return self.scale * mixture


GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
"""What of a convolution says what it sees."""


def _down(layer: nn.Linear | nn.Conv2d, outputs: int) -> nn.Linear | nn.Conv2d:
    """A layer without bias that sees what ``layer`` sees; its weights are those of any new layer of torch."""
    dtype = layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs, bias=False, dtype=dtype)
    size: dict[str, Any] = {name: getattr(layer, name) for name in GEOMETRY}
    return nn.Conv2d(layer.in_channels, outputs, **size, bias=False, dtype=dtype)


def _up(layer: nn.Linear | nn.Conv2d, rank: int) -> nn.Linear | nn.Conv2d:
    """A layer without bias from a branch's rank to the outputs of ``layer``."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)
    return nn.Conv2d(rank, layer.out_channels, 1, bias=False, dtype=layer.weight.dtype)


class DualLoraLayer(AddedLayer[DualLoraConfig]):
    """A linear layer or a convolution, with two branches beside it for each active PEFT adapter name."""

    parts = ("perada_dual_lora",)
    adapter_layer_names = parts

    def build(self, config: DualLoraConfig) -> tuple[nn.Module, ...]:
        """Return both branches."""
        return (Branches(cast(nn.Linear | nn.Conv2d, self.base_layer), config),)

    def branches(self, name: str) -> Branches:
        """Those of one PEFT adapter name."""
        return cast(Branches, cast(nn.ModuleDict, self.perada_dual_lora)[name])

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with what its branches add."""
        out: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        for name in self.active_adapters:
            if name in cast(nn.ModuleDict, self.perada_dual_lora):
                out = out + self.branches(name)(x)
        return out


class DualLoraModel(AddingModel[DualLoraConfig]):
    """Put two branches beside each targeted layer."""

    prefix = "perada_dual_"
    tuner_layer_cls = DualLoraLayer
    method = "dual_lora"
    families = "networks whose layers are named"
    follows = "nn.Linear layers and nn.Conv2d layers without groups"

    def targets(self, config: DualLoraConfig) -> list[str]:
        """Return none: the layers are named."""
        return []

    def fits(self, target: nn.Module) -> bool:
        """Whether it is linear, or a convolution without groups."""
        return isinstance(target, nn.Linear) or (isinstance(target, nn.Conv2d) and target.groups == 1)
