# SPDX-License-Identifier: Apache-2.0
"""Stacked twins of timm's layers and of ours, registered when this module is imported; what transformers' ViT needs."""

import sys

import timm.layers
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import LayerScale, VisionTransformer
from torch import Tensor

from perada.engine.fold import RANDOM_TWINS, ROW_PARAMETERS, TWINS
from perada.engine.stacked_layers import (
    StackedBatchNorm,
    StackedDropout,
    StackedGroupNorm,
    StackedLayerNorm,
    StackedLinear,
    Twin,
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


class StackedLayerNorm2d(Twin):
    """C of timm's layer normalisations of the channels of an image, as in ConvNeXts."""

    like_torch = False  # whose channels come last

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, H, W)."""
        norm = self.original[0]
        normal = F.layer_norm(x_R.movedim(1, -1), norm.normalized_shape, None, None, norm.eps).movedim(-1, 1)
        return self.affine(normal, [1, -1, 1, 1])


class StackedLayerScale(Twin):
    """C of timm's learned scales of the last axis."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Scale (R, ..., D)."""
        return self.affine(x_R, [1] * (x_R.dim() - 1) + [-1], ("gamma", ""))


class StackedCharacters(Twin):
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
TWINS[timm.layers.GroupNorm] = StackedGroupNorm
TWINS[timm.layers.LayerNorm] = StackedLayerNorm
TWINS[timm.layers.LayerNorm2d] = StackedLayerNorm2d
TWINS[timm.layers.Linear] = StackedLinear  # of MobileNetV3
TWINS[LayerScale] = StackedLayerScale
TWINS[Characters] = StackedCharacters
RANDOM_TWINS[timm.layers.DropPath] = StackedDropPath
ROW_PARAMETERS[VisionTransformer] = frozenset({"cls_token", "pos_embed", "reg_token"})


def register_transformers() -> None:
    """Register what transformers' ViT needs, if one has been made: importing it for others takes too long."""
    vit = sys.modules.get("transformers.models.vit.modeling_vit")
    if vit is not None:
        ROW_PARAMETERS[vit.ViTEmbeddings] = frozenset({"cls_token", "position_embeddings"})
