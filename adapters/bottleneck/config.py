# SPDX-License-Identifier: Apache-2.0
"""Configuration of the bottleneck adapter."""

from dataclasses import dataclass
from typing import Literal

from peft import PeftConfig

from ..blocks import check_last_blocks


@dataclass
class BottleneckConfig(PeftConfig):
    """A bottleneck adapter ``x + up(dropout(activation(down(x))))`` on the output ``x`` of a module.

    ``up`` starts at zero, so the adapted network starts as the plain one.

    Source: Houlsby et al. (ICML 2019); placement after Pfeiffer et al. (EACL 2021).

    Args:
        reduction: Features of ``x`` for each feature of the bottleneck.
        bottleneck_dim: Features of the bottleneck; takes the place of ``reduction``.
        activation: Nonlinearity of the bottleneck.
        dropout: Probability of dropout inside the bottleneck.
        placement: ``"pfeiffer"`` adapts the output of each block's MLP, ``"houlsby"`` also that of its attention.
        last_blocks: Adapt only the last so many blocks of the network; by default all. What stands before them never
            changes, and runs once an image.
        target_modules: Modules to adapt instead of those of ``placement``: names (or ends of names), or a regular
            expression of the full name. Each must be, or end in, a linear layer.
        exclude_modules: Modules to leave out of ``target_modules``.
        modules_to_save: Modules trained whole and saved beside the adapters, such as the classification head.
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
        super().__post_init__()  # type: ignore[no-untyped-call]  # a method of an untyped base
        self.peft_type = "PERADA_BOTTLENECK"
        if self.reduction < 1:
            raise ValueError(f"reduction={self.reduction!r} is too small: give 1 or more")
        if self.bottleneck_dim is not None and self.bottleneck_dim < 1:
            raise ValueError(f"bottleneck_dim={self.bottleneck_dim!r} is too small: give 1 or more, or leave it out")
        if self.activation not in ("relu", "gelu", "silu", "tanh"):
            raise ValueError(f"activation={self.activation!r} is unknown: choose 'relu', 'gelu', 'silu' or 'tanh'")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} is not a probability: give a number from 0 to below 1")
        if self.placement not in ("pfeiffer", "houlsby"):
            raise ValueError(f"placement={self.placement!r} is unknown: choose 'pfeiffer' or 'houlsby'")
        check_last_blocks(self.last_blocks)
