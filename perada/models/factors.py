# SPDX-License-Identifier: Apache-2.0
"""Where a network has LoRA's factors, and the branches that they belong to."""

from collections.abc import Iterator

from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn

from perada.adapters.dual_lora import DualLoraLayer
from perada.core.checks import OptionError
from perada.core.states import Factors

DRAWN = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that draw the factors, and look at nothing else."""


def check_lora(config: PeftConfig) -> None:
    """Refuse, by a ValueError, options of PEFT's LoRA by which a client's network is not the backbone and a state."""
    if not isinstance(config, LoraConfig):
        return
    if (start := config.init_lora_weights) not in DRAWN:
        raise OptionError(
            f"init_lora_weights={start!r} cannot be used: it takes the factors from the backbone's weights or from "
            "data, and moves or freezes what saved adapters do not hold; choose True, 'gaussian' or 'orthogonal'",
            name="init_lora_weights",
            value=start,
        )
    for name in ("velora_config", "monteclora_config"):
        if getattr(config, name) is not None:
            raise OptionError(
                f"{name}={getattr(config, name)!r} cannot be used: a step then depends on earlier ones and on draws "
                "that no state holds; leave it out",
                name=name,
                value=getattr(config, name),
            )


def lora_factors(model: nn.Module) -> tuple[Factors, ...]:
    """The factors of PEFT's LoRA layers, or none where one of these adds anything but s·B·A; and those of branches.

    Others are DoRA, whose magnitudes scale the sum, and further variants, embeddings, and parameters that no layer has.
    The gate of branches is not in their scale.
    """
    layers = [
        (path, layer, name)
        for path, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
        for name in layer.active_adapters
        if name in layer.scaling
    ]
    plain = (
        Factors(f"{path}.lora_A.{name}.weight", f"{path}.lora_B.{name}.weight", float(layer.scaling[name]))
        for path, layer, name in layers
        if all(_is_plain(other, own) for _, other, own in layers)
    )
    dual = (
        Factors(f"{path}.{branch}_A.weight", f"{path}.{branch}_B.weight", scale)
        for path, scale in _dual(model)
        for branch in ("shared", "private")
    )
    return (*plain, *dual)


def _is_plain(layer: LoraLayer, name: str) -> bool:
    return name in layer.lora_A and name not in layer.lora_variant and not isinstance(layer, ParamWrapper)


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
