# SPDX-License-Identifier: Apache-2.0
"""Networks of any make as maps from images to logits."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from perada.adapters.added import AddedLayer

IMAGE = "perada_image"
"""Attribute of a run's network: what its images must look like."""


class Followed(nn.Module):
    """A module and what an adapter had added behind it: ``x + added(x)``, x being the module's output."""

    def __init__(self, base: nn.Module, added: nn.Sequential) -> None:
        super().__init__()
        self.base_layer, self.perada_added = base, added
        if isinstance(base, nn.Conv2d):
            self.out_channels = base.out_channels  # for adapters that follow this

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output with what was added to it."""
        x = self.base_layer(x)
        added: Tensor = self.perada_added(x)
        return x + added


def unwrapped(network: nn.Module) -> nn.Module:
    """A copy of a network without PEFT's layers, which computes the same.

    What PEFT can merge is merged into the weights; layers behind modules become plain ones; a trained head takes the
    place of the original.
    """
    model = copy.deepcopy(network)
    for name in ("peft_config", "_hf_peft_config_loaded"):
        if name in vars(model):  # transformers has the second as an attribute of the class too
            delattr(model, name)
    for path, module in reversed(list(model.named_modules())):  # what is inside first
        plain = _plain(module)
        if plain is not module and path:
            model.set_submodule(path, plain)
    return model


def _plain(module: nn.Module) -> nn.Module:
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[module.active_adapters[0]]
    if isinstance(module, AddedLayer):
        name = module.active_adapters[0]
        return Followed(module.base_layer, nn.Sequential(*(getattr(module, part)[name] for part in module.parts)))
    if isinstance(module, BaseTunerLayer):
        module.merge(safe_merge=True)
        base: nn.Module = module.get_base_layer()
        return base
    return module


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
