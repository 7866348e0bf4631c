# SPDX-License-Identifier: Apache-2.0
"""The stacked model: the single one with the leaf layers that hold trained parameters replaced by stacked twins.

The stacked model runs C clients as one ordinary forward pass on C·B images, client after client along the batch axis.
Modules without trained parameters are the very modules of the single model; a frozen BatchNorm has a twin that keeps
less for the backward pass. A leaf module that holds trained parameters is replaced by its twin
(:mod:`~perada.engine.stacked_layers`). Outputs and gradients are those of C separate models.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from perada.engine.frozen_layers import FrozenBatchNorm, FrozenConv2d
from perada.engine.stacked_layers import (
    FoldContext,
    StackedBatchNorm,
    StackedChannelDropout,
    StackedConv2d,
    StackedDropout,
    StackedLinear,
    StackedNorm,
    drop_rate,
)

Wrap = Callable[[nn.Module, str], nn.Module]
TwinFactory = Callable[[nn.Module, FoldContext], nn.Module]
TWINS: dict[type[nn.Module], TwinFactory] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.BatchNorm1d: StackedBatchNorm,
    nn.BatchNorm2d: StackedBatchNorm,
    nn.LayerNorm: StackedNorm,
    nn.GroupNorm: StackedNorm,
}
RANDOM_TWINS: dict[type[nn.Module], TwinFactory] = {
    nn.Dropout: StackedDropout,
    nn.Dropout1d: StackedChannelDropout,
    nn.Dropout2d: StackedChannelDropout,
    nn.Dropout3d: StackedChannelDropout,
}
"""Layers that draw random numbers: replaced whenever their drop rate is positive, trained or not."""
OWNER_TWINS: dict[type[nn.Module], Any] = {}
"""Layers whose trained parameters are in dictionaries, each with its ``StackedParamDict`` of `perada.models.twins`."""
ROW_PARAMETERS: dict[type[nn.Module], frozenset[str]] = {}
"""Non-leaf modules whose named parameters have a leading axis of size 1 that broadcasts over the batch."""


@dataclass
class Fold:
    """A folded model, which shares every frozen module with the single one; its ``context`` is set before each pass.

    Parameters whose state names are in ``row_keys`` are repeated over each client's rows. ``missing`` are modules with
    trained parameters and no twin, ``{module path: class name}``: with any, the model cannot be run stacked.
    """

    model: nn.Module
    context: FoldContext
    row_keys: frozenset[str]
    missing: dict[str, str]


def fold(model: nn.Module, *, random_only: bool = False, wrap: Wrap | None = None) -> Fold:
    """Build the stacked twin of ``model``, sharing all its frozen modules; ``requires_grad`` tells what is trained.

    With ``random_only`` just the layers that draw random numbers are replaced, for the loop over clients: it runs the
    single model, but must draw from the same streams. ``wrap`` puts something around what stands at a path.
    """
    context = FoldContext()
    rows: set[str] = set()
    missing: dict[str, str] = {}
    seen: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        if id(module) not in seen:
            made = replace(module, path)
            seen[id(module)] = made if wrap is None else wrap(made, path)
        return seen[id(module)]

    def replace(module: nn.Module, path: str) -> nn.Module:
        kind = type(module)
        if draws(module):
            return RANDOM_TWINS[kind](module, context)
        trained = {name for name, value in module.named_parameters(recurse=False) if value.requires_grad}
        if TWINS.get(kind) is StackedBatchNorm and not trained and module._buffers["running_var"] is not None:
            return FrozenBatchNorm(module)
        if type(module) is nn.Conv2d and not trained:
            return FrozenConv2d(module)
        if random_only or not trained:
            trained = set()
        elif kind in TWINS and trained == {n for n, p in module.named_parameters() if p.requires_grad}:
            return TWINS[kind](module, context)
        elif trained <= ROW_PARAMETERS.get(kind, frozenset()):
            rows.update(f"{path}.{name}".lstrip(".") for name in trained)
        else:
            missing[path or "the model itself"] = kind.__name__
        owner = None if random_only else OWNER_TWINS.get(kind)
        param_dicts = owner.param_dicts(module) if owner else frozenset()
        children = {
            name: child if name in param_dicts else child and visit(child, f"{path}.{name}".lstrip("."))
            for name, child in module._modules.items()
        }
        if owner and param_dicts:
            twin: nn.Module = owner(module, children, context)
            return twin
        same = all(children[name] is child for name, child in module._modules.items())
        return module if same else shell(module, children)

    return Fold(visit(model, ""), context, frozenset(rows), missing)


def draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers in training."""
    return type(module) in RANDOM_TWINS and drop_rate(module) > 0


def without_dropout(model: nn.Module) -> nn.Module:
    """Set the rate of every layer that draws random numbers to 0, in place, and return the model."""
    for module in model.modules():
        if draws(module):
            setattr(module, "p" if drop_rate(module) == getattr(module, "p", None) else "drop_prob", 0.0)
    return model


def shell(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """Copy a container, sharing everything it holds but its children."""
    shell = copy.copy(module)
    shell._parameters = dict(module._parameters)
    shell._buffers = module._buffers  # the very dictionary: a model that is moved puts new tensors into it
    shell._modules = children
    return shell
