# SPDX-License-Identifier: Apache-2.0
"""Configuration of the residual adapter."""

from dataclasses import dataclass
from typing import Literal

from peft import PeftConfig

from ..blocks import check_last_blocks


@dataclass
class ResidualConfig(PeftConfig):
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
        super().__post_init__()  # type: ignore[no-untyped-call]  # a method of an untyped base
        self.peft_type = "PERADA_RESIDUAL"
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} is not a probability: give a number from 0 to below 1")
        if self.norm not in ("batch", "group", "none"):
            raise ValueError(f"norm={self.norm!r} is unknown: choose 'batch', 'group' or 'none'")
        if self.init_std < 0:
            raise ValueError(f"init_std={self.init_std!r} is negative: give 0 (start as the identity) or more")
        check_last_blocks(self.last_blocks)
