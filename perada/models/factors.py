# SPDX-License-Identifier: Apache-2.0
"""Names of LoRA factors in a network, and of the branches that they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass

from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn

from perada.adapters.dual_lora import DualLoraLayer
from perada.core.checks import OptionError
from perada.core.states import Factors
from perada.models.lora_attention import LoraAttention

RANDOM_INITIALISATIONS = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` with which the factors are drawn at random, independently of anything else."""


def check_lora(config: PeftConfig) -> None:
    """Raise a ValueError for options of PEFT's LoRA with which backbone and state do not determine a client's network.

    Configurations of other methods are accepted.
    """
    if not isinstance(config, LoraConfig):
        return
    initialisation = config.init_lora_weights
    if initialisation not in RANDOM_INITIALISATIONS:
        raise OptionError(
            f"init_lora_weights={initialisation!r} is not supported: it derives the factors from the backbone's "
            "weights or from data, and changes or freezes tensors that saved adapters do not hold; choose True, "
            "'gaussian' or 'orthogonal'",
            name="init_lora_weights",
            value=initialisation,
        )
    if config.megatron_config is not None:
        # The configuration may come from a folder that somebody else wrote, and PEFT would import the module.
        raise OptionError(
            f"megatron_config={config.megatron_config!r} is not supported: PEFT would import the module "
            f"{config.megatron_core!r} that it names; leave megatron_config out",
            name="megatron_config",
            value=config.megatron_config,
        )
    for name in ("velora_config", "monteclora_config"):
        value = getattr(config, name)
        if value is not None:
            raise OptionError(
                f"{name}={value!r} is not supported: a step would depend on earlier steps and on random draws that no "
                f"state holds; leave {name} out",
                name=name,
                value=value,
            )


def lora_factors(model: nn.Module) -> tuple[Factors, ...]:
    """Return the names of the factors of PEFT's LoRA layers, and of the branches of ``dual_lora``.

    LoRA's factors are left out if any of its layers adds anything but s·B·A. This is so with DoRA, whose magnitudes
    scale the sum, with other variants, in embeddings, and for parameters that are not in a layer. The scale of a branch
    does not include its gate.
    """
    layers: list[tuple[str, LoraLayer, str]] = []
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter_name in layer.active_adapters:
                if adapter_name in layer.scaling:
                    layers.append((path, layer, adapter_name))

    factors = []
    if all(_is_plain(layer, adapter_name) for _, layer, adapter_name in layers):
        for path, layer, adapter_name in layers:
            down = f"{path}.lora_A.{adapter_name}.weight"
            up = f"{path}.lora_B.{adapter_name}.weight"
            factors.append(Factors(down, up, float(layer.scaling[adapter_name]), adapted_weight(layer)))
    for path, scale in _dual_branches(model):
        for branch in ("shared", "private"):
            factors.append(Factors(f"{path}.{branch}_A.weight", f"{path}.{branch}_B.weight", scale))
    return tuple(factors)


def adapted_weight(layer: LoraLayer) -> str:
    """Return the name of the weight that a layer of LoRA adapts, in the layer that it wraps."""
    return "in_proj_weight" if isinstance(layer, LoraAttention) else "weight"


def _is_plain(layer: LoraLayer, adapter_name: str) -> bool:
    """Return whether a layer of LoRA adds s·B·A and nothing else."""
    # Embeddings have lora_embedding_A instead of lora_A.
    has_matrices = adapter_name in layer.lora_A
    return has_matrices and adapter_name not in layer.lora_variant and not isinstance(layer, ParamWrapper)


@dataclass(frozen=True)
class BranchPrefixes:
    """Prefixes of the names of the branches' tensors.

    Attributes:
        shared: Names of the shared branches' tensors.
        private: Names of the tensors of the private branches and of their gates.
    """

    shared: tuple[str, ...]
    private: tuple[str, ...]


def branch_prefixes(model: nn.Module) -> BranchPrefixes:
    """Return the prefixes of the names of the branches' tensors in a network with ``dual_lora``."""
    shared = []
    private = []
    for path, _ in _dual_branches(model):
        shared.append(f"{path}.shared_")
        private += [f"{path}.private_", f"{path}.gate."]
    return BranchPrefixes(tuple(shared), tuple(private))


def _dual_branches(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the name and the scale of each pair of branches."""
    for path, layer in model.named_modules():
        if isinstance(layer, DualLoraLayer):
            dictionary_name = layer.parts[0]
            for adapter_name in layer.active_adapters:
                yield f"{path}.{dictionary_name}.{adapter_name}", layer.branches(adapter_name).scale
