# SPDX-License-Identifier: Apache-2.0
"""Stacked twins of timm's layers, of ours, and of what PEFT trains in its own; registered when this is imported.

PEFT keeps the parameters of IA3 and VeRA in dictionaries that are not layers. In the fold, a dictionary becomes a layer
that scales, and the PEFT layer around it one that calls this. DoRA's magnitudes are a layer already.
"""

import sys
from typing import Any, ClassVar

import timm.layers
import torch
import torch.nn.functional as F
from peft.tuners import ia3, vera
from peft.tuners.lora.dora import DoraConv2dLayer, DoraLinearLayer
from timm.models.vision_transformer import LayerScale, VisionTransformer
from torch import Tensor, nn

from perada.adapters.prompt import Prompts
from perada.engine.fold import OWNER_TWINS, RANDOM_TWINS, ROW_PARAMETERS, TWINS
from perada.engine.stacked_layers import (
    FoldContext,
    StackedBatchNorm,
    StackedDropout,
    StackedLayer,
    StackedLinear,
    StackedNorm,
)
from perada.models.char_lstm import Characters


class StackedBatchNormAct(StackedBatchNorm):
    """C of timm's batch normalisations with an activation behind it."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, H, W) per client, then drop and activate as the original does."""
        original = self.original[0]
        assert isinstance(original, timm.layers.BatchNormAct2d)
        out: Tensor = original.act(original.drop(super().forward(x_R)))
        return out


class StackedLayerNorm2d(StackedLayer):
    """C of timm's layer normalisations of the channels of an image, as in ConvNeXts."""

    like_torch = False  # whose channels come last

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, H, W)."""
        norm = self.original[0]
        normal = F.layer_norm(x_R.movedim(1, -1), norm.normalized_shape, None, None, norm.eps).movedim(-1, 1)
        return self.affine(normal, [1, -1, 1, 1])


class StackedCharacters(StackedLayer):
    """C embeddings on one batch: one look-up per client."""

    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Map tokens (R, L) to (R, L, D)."""
        tokens = x_R.chunk(self.context.clients)
        return torch.cat([F.embedding(own, weight) for own, weight in zip(tokens, self.weight, strict=True)])


class StackedDropPath(StackedDropout):
    """timm's stochastic depth with one random stream per client: a sample's whole branch is dropped."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Drop rows of (R, ...)."""
        original = self.original[0]
        assert isinstance(original, timm.layers.DropPath)
        if not self.training:
            return x_R
        mask = self.mask(x_R, 1)
        return x_R * (mask if original.scale_by_keep else mask.bool())


TWINS[timm.layers.BatchNormAct2d] = StackedBatchNormAct
TWINS[timm.layers.GroupNorm] = StackedNorm
TWINS[timm.layers.LayerNorm] = StackedNorm
TWINS[timm.layers.LayerNorm2d] = StackedLayerNorm2d
TWINS[timm.layers.Linear] = StackedLinear  # of MobileNetV3
TWINS[Characters] = StackedCharacters
RANDOM_TWINS[timm.layers.DropPath] = StackedDropPath
ROW_PARAMETERS[VisionTransformer] = frozenset({"cls_token", "pos_embed", "reg_token"})


def register_transformers() -> None:
    """Register what transformers' ViT needs, if one has been made: importing it for others takes too long."""
    vit = sys.modules.get("transformers.models.vit.modeling_vit")
    if vit is not None:
        ROW_PARAMETERS[vit.ViTEmbeddings] = frozenset({"cls_token", "position_embeddings"})


class StackedScale(StackedLayer):
    """C learned scales of the last axis, or of an image's channels: timm's, or a dictionary of one tensor of PEFT's."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Scale (R, ..., D), or (R, D, H, W) where the tensor has four axes."""
        original = self.original[0]
        ((name, scale),) = original.named_parameters()
        shape = [1, -1, 1, 1] if scale.dim() == 4 else [1] * (x_R.dim() - 1) + [-1]
        out = self.affine(x_R, shape, (name, ""))
        return out if isinstance(original, LayerScale) else out.to(x_R.dtype)


TWINS[LayerScale] = StackedScale


class StackedPrompts(StackedLayer):
    """C sets of prompt tokens."""

    like_torch = False
    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Each client's tokens for its rows of (R, ...): (R, T, D)."""
        return self.weight.repeat_interleave(len(x_R) // len(self.weight), 0)


TWINS[Prompts] = StackedPrompts


class StackedParamDict(nn.Module):
    """A layer of PEFT, with a :class:`StackedScale` for each dictionary of parameters.

    ``children`` are what the fold has made of the original's; the ``param_dicts`` are as they were.
    """

    dictionaries: ClassVar[frozenset[str]]

    def __init__(self, original: nn.Module, children: dict[str, nn.Module | None], context: FoldContext) -> None:
        super().__init__()
        self.original: list[Any] = [original]  # in a list: not a child
        self._modules.update(children)
        for name in self.dictionaries:
            setattr(self, name, StackedScale(getattr(original, name), context))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a child, of whatever class it is
        return super().__getattr__(name)

    @classmethod
    def param_dicts(cls, original: Any) -> frozenset[str]:  # noqa: ANN401  # a layer of PEFT
        """The dictionaries, where one adapter is in them and at work."""
        dictionaries = [getattr(original, name) for name in cls.dictionaries]
        trained = any(parameter.requires_grad for one in dictionaries for parameter in one.values())
        alone = all(list(one) == list(original.active_adapters) for one in dictionaries) and len(dictionaries[0]) == 1
        plain = not (original.merged or original.disable_adapters)
        return cls.dictionaries if trained and alone and plain else frozenset()


class StackedIA3(StackedParamDict):
    """IA3 (Liu et al., NeurIPS 2022): a scale of a layer's output, or of the input of a feed-forward layer."""

    dictionaries = frozenset({"ia3_l"})

    def forward(self, x_R: Tensor) -> Tensor:
        """Run the frozen layer on the rows of all clients."""
        if self.original[0].is_feedforward:
            scaled: Tensor = self.base_layer(self.ia3_l(x_R))
        else:
            scaled = self.ia3_l(self.base_layer(x_R))
        return scaled


class StackedVera(StackedParamDict):
    """VeRA (Kopiczko et al., ICLR 2024): frozen random projections A and B, with learned scales behind each."""

    dictionaries = frozenset({"vera_lambda_d", "vera_lambda_b"})

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, ..., D_in) to (R, ..., D_out)."""
        layer = self.original[0]
        ((name, down),) = self.vera_A.items()
        out: Tensor = self.base_layer(x_R)
        hidden = self.vera_dropout[name](layer._cast_input_dtype(x_R, down.dtype))
        hidden = self.vera_lambda_d(F.linear(hidden, down[:, : layer.in_features]))
        added: Tensor = self.vera_lambda_b(F.linear(hidden, self.vera_B[name][: layer.out_features]))
        return (out + added).to(out.dtype)


class StackedDora(StackedLayer):
    """C vectors of DoRA's magnitudes (Liu et al., ICML 2024), for linear layers and convolutions.

    The norm of a client's directions, base weight plus LoRA's, carries no gradient, as in PEFT.
    """

    weight: Tensor

    def forward(
        self,
        x_R: Tensor,
        *,
        lora_A: Any,  # noqa: ANN401  # twins of linear layers or convolutions
        lora_B: Any,  # noqa: ANN401  # likewise
        scaling: float,
        base_layer: Any,  # noqa: ANN401  # the frozen layer
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What LoRA and the magnitudes add to the frozen layer's output (R, ...)."""
        frozen, convolves = base_layer.weight, isinstance(self.original[0], DoraConv2dLayer)
        if base_result is None:
            base_result = base_layer._conv_forward(x_R, frozen, None) if convolves else F.linear(x_R, frozen)
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias.view([-1, 1, 1] if convolves else [-1])
        pairs = zip(lora_A.stacked("weight"), lora_B.stacked("weight"), strict=True)
        norms = torch.stack([self._norm(frozen, down, up, scaling) for down, up in pairs])
        scale = self.weight.flatten(1) / norms
        shape = [1, -1, 1, 1] if convolves else [1] * (x_R.dim() - 1) + [-1]
        scale_CB = scale.view(len(scale), *shape)
        base, lora = (value.view(len(scale), -1, *value.shape[1:]) for value in (base_result, lora_B(lora_A(x_R))))
        return ((scale_CB - 1) * base + scale_CB * lora * scaling).flatten(0, 1)

    @staticmethod
    @torch.no_grad()
    def _norm(frozen: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        """Norm (D_out,) of each output's weights."""
        product = up.flatten(1) @ down.flatten(1)
        norm: Tensor = torch.linalg.vector_norm(frozen.flatten(1) + scaling * product, dim=1)
        return norm


TWINS[DoraLinearLayer] = StackedDora
TWINS[DoraConv2dLayer] = StackedDora
OWNER_TWINS[ia3.layer.Linear] = StackedIA3
OWNER_TWINS[ia3.layer.Conv2d] = StackedIA3
OWNER_TWINS[vera.layer.Linear] = StackedVera
