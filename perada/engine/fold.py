# SPDX-License-Identifier: Apache-2.0
"""The stacked model: the single model with its trained leaf layers replaced by stacked versions.

The stacked model runs C clients as one ordinary forward pass on C·B images, client after client along the batch axis.
Modules without trained parameters are shared with the single model; some frozen layers have a substitute that takes
less time or memory (:mod:`~perada.engine.frozen_layers`). A leaf module with trained parameters is replaced by its twin
(:mod:`~perada.engine.stacked_layers`). Outputs and gradients are those of C separate models.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from perada.engine.frozen_layers import FrozenBatchNorm, FrozenConv2d
from perada.engine.multihead_attention import StackedAttention
from perada.engine.stacked_layers import (
    FoldContext,
    StackedBatchNorm,
    StackedChannelDropout,
    StackedConv2d,
    StackedConvTranspose2d,
    StackedDropout,
    StackedInstanceNorm,
    StackedLinear,
    StackedNorm,
    StackedPReLU,
    drop_rate,
)
from perada.engine.substitutes import FrozenSubstitute

Wrap = Callable[[nn.Module, str], nn.Module]
"""Function of a module and its path that returns the module to use there."""
TwinFactory = Callable[[nn.Module, FoldContext], nn.Module]
"""Function of a layer and the context of the passes that returns the layer's twin."""
TWINS: dict[type[nn.Module], TwinFactory] = {
    nn.Linear: StackedLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: StackedLinear,  # the out-projection of torch's attention
    nn.Conv2d: StackedConv2d,
    nn.ConvTranspose2d: StackedConvTranspose2d,
    nn.PReLU: StackedPReLU,
    nn.BatchNorm1d: StackedBatchNorm,
    nn.BatchNorm2d: StackedBatchNorm,
    nn.LayerNorm: StackedNorm,
    nn.GroupNorm: StackedNorm,
    nn.InstanceNorm1d: StackedInstanceNorm,
    nn.InstanceNorm2d: StackedInstanceNorm,
}
RANDOM_TWINS: dict[type[nn.Module], TwinFactory] = {
    nn.Dropout: StackedDropout,
    nn.Dropout1d: StackedChannelDropout,
    nn.Dropout2d: StackedChannelDropout,
    nn.Dropout3d: StackedChannelDropout,
}
"""Twins of layers that draw random numbers, which are replaced if their drop rate is positive, trained or not."""
OWNER_TWINS: dict[type[nn.Module], Any] = {}
"""Layers whose trained parameters are in dictionaries, each with its ``StackedParamDict`` of `perada.models.twins`."""
FROZEN_SUBSTITUTES: dict[type[nn.Module], type[FrozenSubstitute]] = {nn.Conv2d: FrozenConv2d}
"""Substitutes of layers without trained parameters, which compute the same in less time."""
ROW_PARAMETERS: dict[type[nn.Module], frozenset[str]] = {}
"""Non-leaf modules whose named parameters have a leading axis of size 1 that broadcasts over the batch."""


@dataclass
class Fold:
    """A folded model, which shares every frozen module with the single one.

    Attributes:
        model: The stacked model.
        context: Facts about the current pass, which the engine sets before each one.
        row_keys: Names of the parameters that must be repeated for each row of a client.
        missing: Modules with trained parameters but no twin, ``{path: class name}``. If there are any, the model cannot
            be run stacked.
    """

    model: nn.Module
    context: FoldContext
    row_keys: frozenset[str]
    missing: dict[str, str]


def fold(
    model: nn.Module, *, random_only: bool = False, wrap: Wrap | None = None, context: FoldContext | None = None
) -> Fold:
    """Build the stacked version of a model, sharing all its frozen modules.

    Args:
        model: The single model; its trained parameters have ``requires_grad``.
        random_only: Replace only the layers that draw random numbers. This is for the loop over clients, which runs the
            single model but must draw from the same streams.
        wrap: Wraps each module after its replacement; None not to wrap.
        context: Facts about the current pass; None for new ones.
    """
    folding = _ModelFolding(random_only=random_only, wrap=wrap, context=context or FoldContext())
    stacked = folding.replace(model, module_path="")
    return Fold(
        model=stacked,
        context=folding.context,
        row_keys=frozenset(folding.row_keys),
        missing=folding.missing,
    )


class _ModelFolding:
    """Replaces the modules of a model by their stacked versions."""

    def __init__(self, random_only: bool, wrap: Wrap | None, context: FoldContext) -> None:
        self.context = context
        self.row_keys: set[str] = set()
        self.missing: dict[str, str] = {}
        self._random_only = random_only
        self._wrap = wrap
        # Keys are the ids of modules: if a module occurs in several places, so must its twin.
        self._replacements: dict[int, nn.Module] = {}

    def replace(self, module: nn.Module, module_path: str) -> nn.Module:
        """Return the replacement of a module in the folded model."""
        if id(module) not in self._replacements:
            replacement = self._find_replacement(module, module_path)
            if self._wrap is not None:
                replacement = self._wrap(replacement, module_path)
            self._replacements[id(module)] = replacement
        return self._replacements[id(module)]

    def _find_replacement(self, module: nn.Module, module_path: str) -> nn.Module:
        """Return the replacement of a module before it is wrapped; the module itself if nothing in it changes."""
        kind = type(module)
        if draws(module):
            return RANDOM_TWINS[kind](module, self.context)
        if kind is nn.MultiheadAttention and (_drops_weights(module) or self._is_stacked(module)):
            children = self._replace_children(module, module_path)
            return StackedAttention(module, children, self.context, has_clients=not self._random_only)
        trained = {name for name, value in module.named_parameters(recurse=False) if value.requires_grad}
        if not trained:
            substitute = _frozen_substitute(module)
            if substitute is not None:
                return substitute
        elif not self._random_only:
            trained_inside = {name for name, value in module.named_parameters() if value.requires_grad}
            # A twin stacks a module's own parameters, and not those of modules in it.
            if _has_twin(module) and trained == trained_inside:
                return TWINS[kind](module, self.context)
            if trained <= ROW_PARAMETERS.get(kind, frozenset()):
                for name in trained:
                    self.row_keys.add(f"{module_path}.{name}".lstrip("."))
            else:
                self.missing[module_path or "the model itself"] = kind.__name__
        return self._copy_container(module, module_path)

    def _is_stacked(self, module: nn.Module) -> bool:
        """Return whether a module has trained parameters that get a client axis."""
        return not self._random_only and any(parameter.requires_grad for parameter in module.parameters())

    def _replace_children(self, module: nn.Module, module_path: str) -> dict[str, nn.Module | None]:
        """Return the replacements of all children of a module, by name."""
        children: dict[str, nn.Module | None] = {}
        for name, child in module._modules.items():
            children[name] = None if child is None else self.replace(child, f"{module_path}.{name}".lstrip("."))
        return children

    def _copy_container(self, module: nn.Module, module_path: str) -> nn.Module:
        """Return a copy of a container with replaced children, or the container itself if no child is replaced."""
        owner: Any = None
        param_dicts: frozenset[str] = frozenset()
        if not self._random_only:
            owner = OWNER_TWINS.get(type(module))
        if owner is not None:
            param_dicts = owner.param_dicts(module)

        children: dict[str, nn.Module | None] = {}
        any_replaced = False
        for name, child in module._modules.items():
            children[name] = child
            if child is not None and name not in param_dicts:
                replacement = self.replace(child, f"{module_path}.{name}".lstrip("."))
                children[name] = replacement
                any_replaced |= replacement is not child

        if owner is not None and param_dicts:
            twin: nn.Module = owner(module, children, self.context)
            return twin
        if not any_replaced:
            return module
        return shell(module, children)


def _has_twin(module: nn.Module) -> bool:
    """Return whether a layer with trained parameters has a stacked version."""
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d) and module.track_running_stats:
        # Its running statistics would have to be those of each client's real rows.
        return False
    return type(module) in TWINS


def _frozen_substitute(module: nn.Module) -> nn.Module | None:
    """Return a layer that computes the same as a frozen one in less time or memory; None if there is none."""
    # timm's norms are subclasses of torch's. Those with the twin of torch's BatchNorm compute the same.
    if TWINS.get(type(module)) is StackedBatchNorm and module._buffers["running_var"] is not None:
        return FrozenBatchNorm(module)
    substitute = FROZEN_SUBSTITUTES.get(type(module))
    if substitute is None:
        return None
    return substitute(module)


def draws(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in training."""
    return type(module) in RANDOM_TWINS and drop_rate(module) > 0


def _drops_weights(module: nn.Module) -> bool:
    """Return whether a module is torch's attention with a positive drop rate of its weights."""
    return isinstance(module, nn.MultiheadAttention) and module.dropout > 0


def without_dropout(model: nn.Module) -> nn.Module:
    """Set the rate of every layer that draws random numbers to 0, in place, and return the model."""
    for module in model.modules():
        if draws(module):
            # torch's layers call their rate "p", timm's "drop_prob".
            is_torch = drop_rate(module) == getattr(module, "p", None)
            setattr(module, "p" if is_torch else "drop_prob", 0.0)
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def shell(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """Copy a container, sharing everything except its children."""
    shell = copy.copy(module)
    shell._parameters = dict(module._parameters)
    # The same dictionary, not a copy: a model that is moved to another device puts new tensors into it.
    shell._buffers = module._buffers
    shell._modules = children
    return shell
