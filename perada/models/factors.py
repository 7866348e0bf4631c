# SPDX-License-Identifier: Apache-2.0
"""Where a network has LoRA's factors, and the branches that they belong to."""

from collections.abc import Iterator

from peft.tuners.lora import LoraLayer
from torch import nn

from perada.adapters.dual_lora import DualLoraLayer
from perada.core.states import Factors


def lora_factors(model: nn.Module) -> tuple[Factors, ...]:
    """The factors of PEFT's LoRA layers, but for those of DoRA, whose magnitudes scale the sum, and of branches.

    The gate of branches is not in their scale.
    """
    plain = (
        Factors(f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight", float(layer.scaling[name]))
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
        for name in layer.active_adapters
        if name in layer.lora_A and name not in layer.lora_magnitude_vector
    )
    dual = (
        Factors(f"{path}.{branch}_A.weight", f"{path}.{branch}_B.weight", scale)
        for path, scale in _dual(model)
        for branch in ("shared", "private")
    )
    return (*plain, *dual)


def branches(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How the names of shared branches begin, and those of private ones with their gates."""
    paths = [path for path, _ in _dual(model)]
    return tuple(f"{path}.shared_" for path in paths), tuple(
        f"{path}.{own}" for path in paths for own in ("private_", "gate.")
    )


def _dual(model: nn.Module) -> Iterator[tuple[str, float]]:
    """The paths of all that holds two branches of LoRA, and their scale."""
    for path, layer in model.named_modules():
        if isinstance(layer, DualLoraLayer):
            for name in layer.active_adapters:
                yield f"{path}.{layer.parts[0]}.{name}", layer.branches(name).scale
