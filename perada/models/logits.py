# SPDX-License-Identifier: Apache-2.0
"""The logits among what a network returns."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor, nn


def return_logits(model: nn.Module, classes: int) -> None:
    """Let a model that returns a tuple, or an object with its logits, return these alone, so that no name changes."""
    model.register_forward_hook(partial(_logits, classes))


def _logits(classes: int, module: nn.Module, arguments: tuple[object, ...], output: Any) -> Tensor:  # noqa: ANN401
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return cast(Tensor, output["logits"])
    if hasattr(output, "logits"):
        return cast(Tensor, output.logits)
    parts = list(output) if isinstance(output, tuple | list) else []
    fitting = [part for part in parts if isinstance(part, Tensor) and part.ndim == 2 and part.shape[1] == classes]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
    raise TypeError(
        f"backbone {type(module).__name__!r} returns a {type(output).__name__}{f' of {shown}' if shown else ''}, and "
        f"{len(fitting)} of its parts are logits (B, {classes}): return the logits, or an object with .logits"
    )
