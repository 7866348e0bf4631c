# SPDX-License-Identifier: Apache-2.0
"""Configuration of selective training."""

from dataclasses import dataclass, field

from peft import PeftConfig

from ..blocks import check_last_blocks


@dataclass
class SelectiveConfig(PeftConfig):
    """Train, save and load a selection of the network's own parameters, in place and under their own names.

    The buffers of a module that owns a selected parameter (the running statistics of a BatchNorm) are saved with it.

    Args:
        select: Any of ``"all"`` (every parameter), ``"bias"`` (every bias) and ``"norm"`` (every parameter of every
            normalisation layer).
        modules: Full names of modules whose parameters are all selected, such as the classification head.
        last_blocks: Select by ``select`` only in the last so many blocks of the network and in what follows them; by
            default everywhere.
    """

    select: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    last_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError for an unknown word, or if nothing is selected."""
        super().__post_init__()  # type: ignore[no-untyped-call]  # a method of an untyped base
        self.peft_type = "PERADA_SELECTIVE"
        unknown = sorted(set(self.select) - {"all", "bias", "norm"})
        if unknown:
            raise ValueError(f"select={unknown!r} is unknown: choose from 'all', 'bias' and 'norm'")
        if not self.select and not self.modules:
            raise ValueError("select and modules are both empty, so nothing would be trained: fill in one of them")
        check_last_blocks(self.last_blocks)
