# SPDX-License-Identifier: Apache-2.0
"""Configuration of the residual adapter."""

from dataclasses import dataclass, field
from typing import Literal

from peft import PeftConfig


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
        target_modules: Convolutions to adapt: names (or ends of names), or a regular expression of the full name. Left
            out: every 3x3 convolution of the blocks of a ResNet, every pointwise or expanding convolution of the blocks
            of an EfficientNet.
        exclude_modules: Convolutions to leave out of ``target_modules``.
        modules_to_save: Modules trained whole and saved beside the adapters, such as the classification head.
    """

    dropout: float = field(default=0.3, metadata={"help": "dropout probability"})
    norm: Literal["batch", "group", "none"] = field(default="batch", metadata={"help": "batch, group or none"})
    init_std: float = field(default=0.01, metadata={"help": "standard deviation of the initial weights"})
    train_norms: bool = field(default=True, metadata={"help": "train the network's own norms too"})
    target_modules: list[str] | str | None = field(default=None, metadata={"help": "convolutions to adapt"})
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "convolutions to leave out"})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "modules trained and saved whole"})

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: If a value is out of range.
        """
        super().__post_init__()  # type: ignore[no-untyped-call]  # peft has no types there
        self.peft_type = "PERADA_RESIDUAL"
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} is no probability: give a number from 0 up to, not with, 1")
        if self.norm not in ("batch", "group", "none"):
            raise ValueError(f"norm={self.norm!r} is unknown: choose 'batch', 'group' or 'none'")
        if self.init_std < 0:
            raise ValueError(f"init_std={self.init_std!r} is negative: give 0 (start as the identity) or more")
