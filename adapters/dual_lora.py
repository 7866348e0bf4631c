# SPDX-License-Identifier: Apache-2.0
"""Two LoRA branches in parallel to a layer: one that clients share, and one that each client keeps."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from .added import AdapterConfig, AddedLayer, AddingModel
from .traits import AdapterTraits


@dataclass
class DualLoraConfig(AdapterConfig):
    """Configuration of two LoRA branches in parallel to a layer: ``layer(x) + s · B_g · A_g · x + s · B_p · A_p · x``.

    s is ``lora_alpha / r``. The index g marks the shared branch and p the private one; the algorithm decides which of
    them is sent. Both B start at zero, so the adapted network initially computes the same as the plain one. Each A is
    initialised as in PEFT's LoRA.

    With a ``gate`` the branches are weighted by the two outputs of softmax(G · x) instead of 1. Each token of a
    transformer and each position of a feature map has its own weights. G starts at zero, which weights both by 1/2, and
    belongs to the private branch.

    Source: LoRA, Hu et al. (ICLR 2022); two branches, Yang et al. (NeurIPS 2024); the gate, Bian et al. (AAAI 2026).

    Args:
        r: Rank of each branch.
        lora_alpha: Numerator of s.
        gate: Whether the input weights the branches.
        target_modules: Layers to adapt: names (or ends of names), or a regular expression of the full name. Each must
            be a linear layer or a convolution without groups. By default, perada chooses the layers that LoRA adapts.
        exclude_modules: Layers to leave out of ``target_modules``.
        modules_to_save: Modules trained in full and saved with the adapters, such as the classification head.

    >>> DualLoraConfig(r=4).r
    4
    """

    # It takes the layers of LoRA.
    traits: ClassVar[AdapterTraits] = AdapterTraits(adapts_convolutions=True)

    r: int = field(default=8, metadata={"help": "Rank of each branch."})
    lora_alpha: float = field(default=8, metadata={"help": "Scale of the branches, times their rank."})
    gate: bool = field(default=False, metadata={"help": "Whether the input weights the branches."})
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names, or a regular expression of the names, of the layers to adapt."}
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Layers to leave out of target_modules."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the adapters, such as the head."}
    )

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_DUAL_LORA"
        if self.r < 1:
            raise ValueError(f"r must be an integer >= 1, got {self.r!r}")
        if not 0 < self.lora_alpha < float("inf"):
            raise ValueError(f"lora_alpha must be a finite number > 0, got {self.lora_alpha!r}")


class Branches(nn.Module):
    """Both branches of a layer, which map its input to their sum or, with a gate, to their mixture.

    Args:
        layer: The adapted layer, for the numbers of its inputs and outputs.
        config: Configuration of the method.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, config: DualLoraConfig) -> None:
        super().__init__()
        self.scale = config.lora_alpha / config.r
        # Feature maps are (B, channels, H, W), tokens are (B, N, features).
        self.channel_dim = 1 if isinstance(layer, nn.Conv2d) else -1
        # All layers draw initial values from one random stream, so their order must not change: B and the gate too,
        # even though they are then set to zero.
        self.shared_A = _projection_down(layer, config.r)
        self.shared_B = _projection_up(layer, config.r)
        self.private_A = _projection_down(layer, config.r)
        self.private_B = _projection_up(layer, config.r)
        self.gate = _projection_down(layer, 2) if config.gate else None
        nn.init.zeros_(self.shared_B.weight)
        nn.init.zeros_(self.private_B.weight)
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum or the mixture of the branches' outputs, which is added to that of the layer.

        Args:
            x: Input of the layer, (B, ..., in) or (B, in, H, W).
        """
        shared: Tensor = self.shared_B(self.shared_A(x))
        private: Tensor = self.private_B(self.private_A(x))
        if self.gate is None:
            return self.scale * (shared + private)
        # Two weights for each token or position, which sum to one.
        weights = self.gate(x).softmax(self.channel_dim)
        shared_weight, private_weight = weights.split(1, self.channel_dim)
        mixture: Tensor = shared_weight * shared + private_weight * private
        return self.scale * mixture


RECEPTIVE_FIELD = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
"""Options that a branch copies from the convolution it is parallel to, so that their outputs have the same size."""


def _projection_down(layer: nn.Linear | nn.Conv2d, out_features: int) -> nn.Linear | nn.Conv2d:
    """Return a layer without bias that maps the input of ``layer`` to ``out_features``; weights start as torch's do."""
    dtype = layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, out_features, bias=False, dtype=dtype)
    options: dict[str, Any] = {name: getattr(layer, name) for name in RECEPTIVE_FIELD}
    return nn.Conv2d(layer.in_channels, out_features, **options, bias=False, dtype=dtype)


def _projection_up(layer: nn.Linear | nn.Conv2d, rank: int) -> nn.Linear | nn.Conv2d:
    """Return a layer without bias that maps the ``rank`` features of a branch to the outputs of ``layer``."""
    dtype = layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(rank, layer.out_features, bias=False, dtype=dtype)
    return nn.Conv2d(rank, layer.out_channels, kernel_size=1, bias=False, dtype=dtype)


class DualLoraLayer(AddedLayer[DualLoraConfig]):
    """A linear layer or a convolution, with two parallel branches per active adapter name."""

    parts = ("perada_dual_lora",)
    adapter_layer_names = ("perada_dual_lora",)

    def build(self, config: DualLoraConfig) -> tuple[nn.Module, ...]:
        """Return both branches as one module."""
        layer = cast(nn.Linear | nn.Conv2d, self.base_layer)
        return (Branches(layer, config),)

    def branches(self, adapter_name: str) -> Branches:
        """Return the branches of one adapter."""
        return cast(Branches, cast(nn.ModuleDict, self.perada_dual_lora)[adapter_name])

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output plus that of its branches.

        Unlike other added layers, the branches see the layer's input instead of its output.
        """
        out: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        for adapter_name in self.active_adapters:
            if adapter_name in cast(nn.ModuleDict, self.perada_dual_lora):
                out = out + self.branches(adapter_name)(x)
        return out


class DualLoraModel(AddingModel[DualLoraConfig]):
    """Put two branches in parallel to each targeted layer."""

    prefix = "perada_dual_"
    tuner_layer_cls = DualLoraLayer
    method = "dual_lora"
    families = "networks whose layers are named"
    follows = "nn.Linear layers and nn.Conv2d layers without groups"

    def targets(self, config: DualLoraConfig) -> list[str]:
        """Return none: perada sets ``target_modules`` to the layers that LoRA would adapt."""
        return []

    def fits(self, target: nn.Module) -> bool:
        """Return whether the target is linear, or a convolution without groups."""
        return isinstance(target, nn.Linear) or (isinstance(target, nn.Conv2d) and target.groups == 1)
