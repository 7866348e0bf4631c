# SPDX-License-Identifier: Apache-2.0
"""The blocks of a network, in order, and what stands in or behind the last of them."""

import re
from collections.abc import Iterator

from torch import nn

BLOCK = re.compile(r"(.*\.)?(layer\d+\.\d+|blocks\.\d+(\.\d+)?|layers?\.\d+|s\d+\.b\d+|denseblock\d+\.denselayer\d+)")
"""ResNets of timm and torchvision, EfficientNets, ConvNeXts and ViTs of timm, networks of transformers 5 and 4, RegNets
and DenseNets."""
PART = re.compile(r".*layers\.\d+\.layer\.\d+")
"""What a block of a ResNet of transformers consists of."""


def plain_name(name: str) -> str:
    """The name that a module, or a tensor, of the network has without adapters."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the network's modules under the names they have without adapters, whether or not it holds some already."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if "modules_to_save" not in parts and not any(part.startswith("perada_") for part in parts):
            yield plain_name(name), module


def check_last_blocks(count: int | None) -> None:
    """Refuse, by a ValueError, a number of blocks that is none."""
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(f"last_blocks={count!r} is not a number of blocks: give 1 or more, or null for all")


def reached(model: nn.Module, last_blocks: int | None) -> frozenset[str]:
    """Names of the modules in the last so many blocks and of those behind them; of all modules for None.

    Modules are taken to run in the order in which the network defines them, as they do in the families of ``BLOCK``.

    Raises:
        ValueError: If the network has fewer blocks, or none that are known.
    """
    names = list(dict.fromkeys(name for name, _ in own_modules(model)))
    if last_blocks is None:
        return frozenset(names)
    candidates = [name for name in names if BLOCK.fullmatch(name) and not PART.fullmatch(name)]
    blocks = [name for name in candidates if not any(other.startswith(f"{name}.") for other in candidates)]
    if last_blocks > len(blocks):
        has = f"has {len(blocks)}" if blocks else "is of no family whose blocks are known"
        raise ValueError(
            f"last_blocks={last_blocks}, but {type(model).__name__} {has}: "
            + ("give fewer" if blocks else "leave it out, and name layers in target_modules where the adapter has that")
        )
    start = names.index(blocks[-last_blocks])
    outer = {name for name in names if blocks[-last_blocks].startswith(f"{name}.")}
    return frozenset(names[start:]) - outer
