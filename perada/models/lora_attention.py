# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA in ``nn.MultiheadAttention``, for networks whose tensors differ from pass to pass.

PEFT's own layer merges the product of the factors into the frozen weights before each pass and subtracts it afterwards,
which replaces these weights, changes them by rounding, and has a wrong gradient for the out-projection. The layers here
have the same tensors and outputs, and add the product to the outputs of the projections.
"""

from functools import cache
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import lora
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from perada.engine.multihead_attention import AttentionOptions, run_attention

NOT_IN_ATTENTION = ("use_dora", "velora_config", "kasa_config", "use_bdlora", "lora_bias")
"""Options of LoRA that PEFT does not support in an attention, or silently leaves out there."""
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of an attention that are adapted by adding to the outputs of a projection."""


def _run_adapted(
    layer: Any,  # noqa: ANN401  # one of the classes below
    inputs: tuple[Tensor, Tensor, Tensor],
    attention_options: AttentionOptions,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention inside a layer of LoRA, with what the layer and those in it add to its projections.

    Args:
        layer: The outermost layer.
        inputs: Queries, keys and values.
        attention_options: The other arguments of the attention.
    """
    layer_of_weight: dict[str, Any] = {}
    # PEFT wraps an attention once for each of its adapted weights. get_base_layer() would return the original, which a
    # folded model has not.
    attention = layer
    while isinstance(attention, LoraAttention | LoraProjections):
        layer_of_weight[attention.adapted_weight] = attention
        attention = attention.base_layer

    def added(name: str, x: Tensor) -> Tensor | None:
        return _product_with(layer_of_weight[name], x) if name in layer_of_weight else None

    return run_attention(attention, *inputs, attention_options, added)


def _product_with(layer: Any, x: Tensor) -> Tensor | None:  # noqa: ANN401  # its dictionaries have no types
    """Return s·B·A·x for a layer's factors, summed over its active adapters; None if there are none."""
    if layer.disable_adapters or layer.merged:
        return None
    total: Tensor | None = None
    for adapter_name in layer.active_adapters:
        if adapter_name not in layer.lora_A:
            continue
        down = layer.lora_A[adapter_name]
        up = layer.lora_B[adapter_name]
        dropped = layer.lora_dropout[adapter_name](layer._cast_input_dtype(x, down.weight.dtype))
        product = up(down(dropped)) * layer.scaling[adapter_name]
        total = product if total is None else total + product
    return total


class LoraAttention(lora.layer.MultiheadAttention):
    """PEFT's LoRA in an attention with a packed weight, and in its out-projection.

    PEFT applies no dropout to it; here the input of A is dropped, as in other layers.
    """

    base_layer: Any
    adapted_weight = "in_proj_weight"
    """Name of the weight in the attention that the factors adapt."""

    def forward(  # type: ignore[override]  # PEFT states another result
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the adapted attention; arguments and results are those of ``nn.MultiheadAttention``."""
        options = AttentionOptions(key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return _run_adapted(self, (query, key, value), options)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the products of adapters to the weights of both projections.

        Args:
            safe_merge: Raise a ValueError if a weight is then not finite.
            adapter_names: The adapters; None for those that are active.
        """
        for adapter_name in check_adapters_to_merge(self, adapter_names):
            if adapter_name not in self.lora_A:
                continue
            attention = self.base_layer
            merged_weight = attention.in_proj_weight.data + self.get_delta_weight(adapter_name)
            if safe_merge and not bool(torch.isfinite(merged_weight).all()):
                raise ValueError(f"the weights merged with adapter {adapter_name!r} are not finite")
            attention.in_proj_weight.data = merged_weight
            # A network may be unwrapped from its innermost layers on.
            if isinstance(attention.out_proj, LoraLayer):
                attention.out_proj.merge(safe_merge=safe_merge, adapter_names=[adapter_name])
            self.merged_adapters.append(adapter_name)

    def unmerge(self) -> None:
        """Subtract the products of merged adapters again."""
        while self.merged_adapters:
            adapter_name = self.merged_adapters.pop()
            self.base_layer.in_proj_weight.data -= self.get_delta_weight(adapter_name)
        if self.base_layer.out_proj.merged:
            self.base_layer.out_proj.unmerge()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.MultiheadAttention:
        """Return the attention without LoRA, into whose weights the adapters are merged if ``merge``."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        attention: nn.MultiheadAttention = self.base_layer
        attention.out_proj = self.base_layer.out_proj.get_base_layer()
        return attention

    def _restore_weights(self) -> None:
        """Do nothing: the weights stay parameters."""


class LoraProjections(ParamWrapper):
    """PEFT's LoRA on a single weight of an attention's in-projections, by ``target_parameters``."""

    @property
    def adapted_weight(self) -> str:
        """Name of the weight in the attention that the factors adapt."""
        name: str = self.parameter_name
        return name

    def forward(  # type: ignore[override]  # PEFT's is for layers with one input
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the adapted attention; arguments and results are those of ``nn.MultiheadAttention``."""
        options = AttentionOptions(key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return _run_adapted(self, (query, key, value), options)


def adapts_attention(config: object) -> bool:
    """Return whether a configuration is one of PEFT's LoRA that can adapt an attention with a packed weight."""
    if not isinstance(config, LoraConfig):
        return False
    return not any(getattr(config, name, None) for name in NOT_IN_ATTENTION)


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is torch's attention with one weight for queries, keys and values."""
    return type(module) is nn.MultiheadAttention and module.in_proj_weight is not None


def add_to_projections(model: nn.Module) -> None:
    """Let PEFT's LoRA layers in torch's attention add to its projections instead of merging weights, in place."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) is lora.layer.MultiheadAttention:
            module.__class__ = LoraAttention
            out_projection: Any = module.base_layer.out_proj
            for adapter_name in out_projection.scaling:
                out_projection.scaling[adapter_name] *= products_in_out_projection()
        elif type(module) is ParamWrapper and isinstance(module.get_base_layer(), nn.MultiheadAttention):
            if module.parameter_name in PROJECTIONS:
                module.__class__ = LoraProjections


@cache
def products_in_out_projection() -> int:
    """Return how many times PEFT adds the product of an out-projection's factors to its weight.

    PEFT 0.21.2 adds it twice. Saved adapters have to compute the same with PEFT only, so this is measured.
    """
    with torch.random.fork_rng(devices=[]):
        attention = nn.MultiheadAttention(1, 1, device="cpu", dtype=torch.float64)
        config = LoraConfig(r=1, lora_alpha=1)
        layer = lora.layer.MultiheadAttention(attention, "default", config, r=1, lora_alpha=1)
    out_projection: Any = layer.base_layer.out_proj
    weight = out_projection.get_base_layer().weight
    with torch.no_grad():
        weight.fill_(0.0)
        out_projection.lora_A["default"].weight.fill_(1.0)
        out_projection.lora_B["default"].weight.fill_(1.0)
        layer.merge()
    merged_weight: Tensor = out_projection.get_base_layer().weight
    return round(merged_weight.item())
