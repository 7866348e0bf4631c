# SPDX-License-Identifier: Apache-2.0
"""The repeated blocks of a network, which gradient checkpointing runs again in the backward pass."""

from collections import Counter
from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from perada.core.checks import OptionError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Classes that list the blocks of a network."""
FEWEST_LAYERS = 2
"""Smallest number of layers with weights in a block: to recompute a single layer saves little but its input."""


def repeated_blocks(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return the paths of the blocks of a network, such as those of a ResNet or of a vision transformer.

    A block is a module in a list of modules (``nn.Sequential``, ``nn.ModuleList`` or ``nn.ModuleDict``) that has
    several layers with weights, and of whose class there are several. In networks without such lists it may be a child
    of any module. Of blocks in one another, the inner ones are returned if they have more than half of the outer one's
    layers, as those of a stage have.

    Args:
        model: The network, with or without adapters.
        name: Name of the network for messages.

    Raises:
        OptionError: If the network has no such blocks.
    """
    paths: list[str] = []
    for parents in (CONTAINERS, (nn.Module,)):
        num_blocks_of = Counter(type(_without_adapter(block)) for block in _find_candidates(model, parents))
        repeated = {kind for kind, count in num_blocks_of.items() if count > 1}
        paths = paths or _find_blocks(model, "", parents, repeated)
    if not paths:
        raise OptionError(
            f"checkpointing=True recomputes the repeated blocks of a network, but backbone {name!r} has none: "
            f"there are not two modules of one class that have at least {FEWEST_LAYERS} layers with weights each; set "
            "training.checkpointing to false, and lower clients_per_chunk or batch_size",
            name="checkpointing",
            value=True,
        )
    return tuple(paths)


def _without_adapter(module: nn.Module) -> nn.Module:
    """Return the module of the network that adapters wrap."""
    while isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    return module


def _children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module of the network with their paths in it, without those of adapters."""
    path = ""
    while isinstance(module, BaseTunerLayer):
        # PEFT's method get_base_layer() removes all wrappers at once, which leaves their number open.
        wrapped = module.base_layer
        assert isinstance(wrapped, nn.Module)
        module = wrapped
        path = f"{path}base_layer."
    for name, child in module.named_children():
        yield f"{path}{name}", child


def _find_candidates(module: nn.Module, parents: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """Yield the modules with enough layers that are children of one of the classes ``parents``."""
    for _, child in _children_of(module):
        if isinstance(_without_adapter(module), parents) and _may_be_block(child):
            yield child
        yield from _find_candidates(child, parents)


def _may_be_block(module: nn.Module) -> bool:
    """Return whether a module is no list of modules itself, and has enough layers to be a block."""
    return not isinstance(_without_adapter(module), CONTAINERS) and _count_layers(module) >= FEWEST_LAYERS


def _count_layers(module: nn.Module) -> int:
    """Return the number of layers of the network with a matrix of weights in a module, without those of adapters."""
    parameters = _without_adapter(module).parameters(recurse=False)
    has_matrix = any(parameter.dim() > 1 for parameter in parameters)
    return has_matrix + sum(_count_layers(child) for _, child in _children_of(module))


def _find_blocks(
    module: nn.Module, path: str, parents: tuple[type[nn.Module], ...], repeated: set[type[nn.Module]]
) -> list[str]:
    """Return the paths of the blocks in a module, in the order of the network.

    Args:
        module: The module.
        path: Its path in the network.
        parents: Classes of modules whose children may be blocks.
        repeated: Classes of blocks.
    """
    blocks: list[str] = []
    for name, child in _children_of(module):
        child_path = f"{path}.{name}".lstrip(".")
        inner = _find_blocks(child, child_path, parents, repeated)
        is_block = isinstance(_without_adapter(module), parents) and type(_without_adapter(child)) in repeated
        if is_block and _may_be_block(child):
            layers_of_inner = 0
            for block in inner:
                layers_of_inner += _count_layers(child.get_submodule(block.removeprefix(f"{child_path}.")))
            if 2 * layers_of_inner <= _count_layers(child):
                inner = [child_path]
        blocks += inner
    return blocks
