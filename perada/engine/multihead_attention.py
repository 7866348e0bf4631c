# SPDX-License-Identifier: Apache-2.0
"""torch's ``nn.MultiheadAttention`` with in-projections that adapters can change, and its stacked version.

torch's layer reads the weights of its projections, so what wraps them is not called. :func:`run_attention` computes the
same and calls the out-projection. Both the layer of a single model and its twin run through it.

Suffixes of names give shapes: R rows, L queries, S keys, E features, H heads, D = E/H features of a head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.engine.stacked_layers import FoldContext, StackedDropout, StackedLayer, batched_linear

Added = Callable[[str, Tensor], Tensor | None]
"""Function of the name of an in-projection's weight and of its input that returns what is added to its output."""
OPTIONS = (
    "embed_dim",
    "kdim",
    "vdim",
    "num_heads",
    "head_dim",
    "dropout",
    "batch_first",
    "add_zero_attn",
    "_qkv_same_embed_dim",
)
"""Attributes of an attention, which torch's encoders read, too."""
PARTS = ("q", "k", "v")
"""Queries, keys and values, in the order of the packed weight."""


@dataclass(frozen=True)
class AttentionOptions:
    """Optional arguments of the forward pass of ``nn.MultiheadAttention``, in its order."""

    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def run_attention(
    attention: Any,  # noqa: ANN401  # nn.MultiheadAttention or its twin
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_options: AttentionOptions,
    added: Added | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a layer; arguments and results are those of ``nn.MultiheadAttention``.

    Args:
        attention: The layer, or its twin.
        query: Queries, in the layout that the layer's ``batch_first`` gives.
        key: Keys.
        value: Values.
        attention_options: The other arguments.
        added: What an adapter adds to the outputs of the in-projections; None without an adapter.

    Returns:
        The output, and the attention weights if they are needed.
    """
    if attention_options.is_causal and attention_options.attn_mask is None:
        raise RuntimeError("is_causal=True is a hint about attn_mask, which is missing; pass the mask as well")
    is_batched = query.dim() == 3
    to_rows = _rows_first(is_batched, attention.batch_first)
    rows_of = {id(tensor): to_rows(tensor) for tensor in (query, key, value)}
    # One tensor for each argument, so that one that is passed three times is projected once.
    inputs = [rows_of[id(tensor)] for tensor in (query, key, value)]
    queries, keys, values = _project_inputs(attention, inputs, added)

    if attention.bias_k is not None:
        keys = torch.cat([keys, _token_of_rows(attention, "bias_k", len(keys))], 1)
        values = torch.cat([values, _token_of_rows(attention, "bias_v", len(values))], 1)
    if attention.add_zero_attn:
        keys = F.pad(keys, (0, 0, 0, 1))
        values = F.pad(values, (0, 0, 0, 1))
    mask = _merged_mask(attention_options, queries, num_keys=keys.shape[1], num_heads=attention.num_heads)
    heads, weights = _weigh_values(
        attention,
        _split_heads(queries, attention.num_heads),
        _split_heads(keys, attention.num_heads),
        _split_heads(values, attention.num_heads),
        mask,
        attention_options.need_weights,
    )
    out: Tensor = attention.out_proj(heads.transpose(1, 2).flatten(2))

    if weights is not None and attention_options.average_attn_weights:
        weights = weights.mean(1)
    if not is_batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    if not attention.batch_first:
        out = out.transpose(0, 1)
    return out, weights


def _rows_first(is_batched: bool, batch_first: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that brings an input into the layout (R, L, E)."""
    if not is_batched:
        return lambda tensor: tensor.unsqueeze(0)
    if not batch_first:
        return lambda tensor: tensor.transpose(0, 1)
    return lambda tensor: tensor


def _project_inputs(
    attention: Any,  # noqa: ANN401  # nn.MultiheadAttention or its twin
    inputs: list[Tensor],
    added: Added | None,
) -> list[Tensor]:
    """Return queries (R, L, E), keys and values (R, S, E) of three inputs."""
    is_packed = attention.in_proj_weight is not None
    size = attention.embed_dim
    everything = slice(0, 3 * size)
    if is_packed and inputs[0] is inputs[1] and inputs[1] is inputs[2]:
        out = _in_projection(attention, "in_proj_weight", inputs[0], everything, everything, added)
        return list(out.chunk(3, -1))
    projected = []
    for number, (part, x) in enumerate(zip(PARTS, inputs, strict=True)):
        bias_rows = slice(number * size, (number + 1) * size)
        if is_packed:
            projected.append(_in_projection(attention, "in_proj_weight", x, bias_rows, bias_rows, added))
        else:
            weight_rows = slice(0, size)
            projected.append(_in_projection(attention, f"{part}_proj_weight", x, weight_rows, bias_rows, added))
    return projected


def _in_projection(
    attention: Any,  # noqa: ANN401  # nn.MultiheadAttention or its twin
    name: str,
    x: Tensor,
    weight_rows: slice,
    bias_rows: slice,
    added: Added | None,
) -> Tensor:
    """Map x (R, L, in) by rows of a weight and of the common bias, and add what an adapter adds to these outputs."""
    if isinstance(attention, StackedAttention):
        out = attention.in_projection(name, x, weight_rows, bias_rows)
    else:
        bias = attention.in_proj_bias
        out = F.linear(x, getattr(attention, name)[weight_rows], None if bias is None else bias[bias_rows])
    change = None if added is None else added(name, x)
    if change is None:
        return out
    return out + change[..., weight_rows].to(out.dtype)


def _token_of_rows(attention: Any, name: str, num_rows: int) -> Tensor:  # noqa: ANN401  # as above
    """Return an additional key or value (R, 1, E) for each row."""
    token: Tensor
    if isinstance(attention, StackedAttention):
        stacked = attention.stacked(name)
        assert stacked is not None
        token = stacked.view(len(stacked), 1, -1).repeat_interleave(num_rows // len(stacked), 0)
    else:
        token = getattr(attention, name).expand(num_rows, 1, -1)
    return token


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View features (R, L, E) as (R, H, L, D)."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1))
    return heads.transpose(1, 2)


def _merged_mask(attention_options: AttentionOptions, like: Tensor, num_keys: int, num_heads: int) -> Tensor | None:
    """Return the sum of both masks, which is added to the scores (R, H, L, S); None without masks.

    Args:
        attention_options: Arguments with the masks, whose true elements are left out.
        like: Tensor with the dtype of the scores and with R rows.
        num_keys: Number S of keys, of which those behind the end of a mask are never left out.
        num_heads: Number H of heads.
    """
    if (
        attention_options.is_causal
        and attention_options.key_padding_mask is None
        and not attention_options.need_weights
    ):
        # torch takes the hint instead of the mask, which leaves out all keys that were added behind the last one.
        allowed = torch.ones(like.shape[1], num_keys, dtype=torch.bool, device=like.device).tril()
        return torch.zeros_like(allowed, dtype=like.dtype).masked_fill_(~allowed, -math.inf)
    merged: Tensor | None = None
    for mask, is_of_keys in ((attention_options.attn_mask, False), (attention_options.key_padding_mask, True)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
        mask = F.pad(mask.to(like.dtype), (0, num_keys - mask.shape[-1]))
        if is_of_keys:
            mask = mask.view(-1, 1, 1, num_keys)
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (len(like), num_heads))
        merged = mask if merged is None else merged + mask
    return merged


def _weigh_values(
    attention: Any,  # noqa: ANN401  # nn.MultiheadAttention or its twin
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return weighted values (R, H, L, D), and the weights (R, H, L, S) if they are needed."""
    dropout_rate = attention.dropout if attention.training else 0.0
    # The clients' own streams can drop only weights that are computed.
    has_streams = isinstance(attention, StackedAttention) and dropout_rate > 0
    if not need_weights and not has_streams:
        return F.scaled_dot_product_attention(queries, keys, values, mask, dropout_rate), None
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    if has_streams:
        weights = attention.weight_dropout(weights)
    else:
        weights = F.dropout(weights, dropout_rate)
    return weights @ values, weights if need_weights else None


class StackedAttention(StackedLayer):
    """C attentions on one batch, or a single one that drops weights by the streams of its client.

    Args:
        original: The layer of the single model, an ``nn.MultiheadAttention``.
        children: Replacements of its children in the folded model, by name.
        context: Facts about the current pass.
        has_clients: Whether trained tensors have a client axis.
    """

    def __init__(
        self,
        original: nn.Module,
        children: dict[str, nn.Module | None],
        context: FoldContext,
        *,
        has_clients: bool,
    ) -> None:
        super().__init__(original, context)
        if not has_clients:
            # A tensor without a client axis is treated like a frozen one.
            self.frozen = set(self._parameters)
            self.merged = set()
        # torch's layer has None in the place of tensors that it lacks.
        for name in ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"):
            if name not in self._parameters:
                self.register_parameter(name, None)
        self._modules.update(children)
        for name in OPTIONS:
            setattr(self, name, getattr(original, name))
        self.weight_dropout = StackedDropout(nn.Dropout(self.original[0].dropout), context)

    def in_projection(self, name: str, x_R: Tensor, weight_rows: slice, bias_rows: slice) -> Tensor:
        """Map (R, L, in) by rows of each client's weight, and add elements of its bias."""
        bias = None
        if self.in_proj_bias is not None:
            bias = self.stacked("in_proj_bias")
        common_weight = self.common(name)
        if common_weight is None:
            weight = getattr(self, name)[:, weight_rows]
            x_CND = x_R.reshape(self.context.num_clients, -1, x_R.shape[-1])
            out = batched_linear(x_CND, weight, None if bias is None else bias[:, bias_rows])
            return out.view(*x_R.shape[:-1], -1)
        out = F.linear(x_R, common_weight[weight_rows])
        if bias is None:
            return out
        out_CB: Tensor = out.unflatten(0, (self.context.num_clients, -1))
        return (out_CB + bias[:, None, None, bias_rows]).flatten(0, 1)

    def forward(
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
        """Compute the attention of all clients' rows; arguments and results are those of ``nn.MultiheadAttention``."""
        options = AttentionOptions(key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        return run_attention(self, query, key, value, options)
