# SPDX-License-Identifier: Apache-2.0
"""Stacked versions of timm, perada and PEFT layers that run C clients at once. Importing this module registers them.

The engine folds clients into the batch: R rows, of which each client has as many, pass through one network, and each
layer with trained parameters is replaced by a stacked one that has those of all clients (see
``perada.engine.fold``).

PEFT keeps the parameters of IA3 and VeRA in dictionaries, which are no layers of their own. In the fold, such a
dictionary becomes a layer that scales, and the layer of PEFT around it one that calls this. DoRA's magnitudes are a
layer already.
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
from perada.engine.fold import FROZEN_SUBSTITUTES, OWNER_TWINS, RANDOM_TWINS, ROW_PARAMETERS, TWINS
from perada.engine.frozen_layers import is_strided_depthwise, strided_depthwise, substitute_dtype
from perada.engine.stacked_layers import (
    FoldContext,
    StackedBatchNorm,
    StackedDropout,
    StackedLayer,
    StackedLinear,
    StackedNorm,
    batched_linear,
)
from perada.engine.substitutes import FrozenSubstitute
from perada.models.char_lstm import Characters
from perada.models.text_head import TextClassifier


class StackedBatchNormAct(StackedBatchNorm):
    """C timm batch normalisations followed by an activation."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, H, W) per client, then drop and activate like the original."""
        original = self.original[0]
        assert isinstance(original, timm.layers.BatchNormAct2d)
        normalised_R = super().forward(x_R)
        out_R: Tensor = original.act(original.drop(normalised_R))
        return out_R


class StackedLayerNorm2d(StackedLayer):
    """C layer normalisations of the channels of an image, as in timm's ConvNeXts."""

    # torch's layer normalisation has the channels last.
    like_torch = False

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, H, W)."""
        norm = self.original[0]
        channels_last_R = x_R.movedim(1, -1)
        normalised_R = F.layer_norm(channels_last_R, norm.normalized_shape, None, None, norm.eps).movedim(-1, 1)
        return self.affine(normalised_R, [1, -1, 1, 1])


class StackedCharacters(StackedLayer):
    """C embeddings of characters: one look-up per client."""

    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Map tokens (R, L) to (R, L, D)."""
        tokens_by_client = x_R.chunk(self.context.num_clients)
        outputs = []
        for tokens, weight in zip(tokens_by_client, self.weight, strict=True):
            outputs.append(F.embedding(tokens, weight))
        return torch.cat(outputs)


class StackedDropPath(StackedDropout):
    """timm's stochastic depth with one random stream per client. It drops the entire branch of a sample."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Drop rows of (R, ...)."""
        original = self.original[0]
        assert isinstance(original, timm.layers.DropPath)
        if not self.training:
            return x_R
        # Zero, or the inverse of the probability to keep, per row.
        mask = self.mask(x_R, 1)
        if not original.scale_by_keep:
            mask = mask.bool()
        return x_R * mask


class FrozenConv2dSame(FrozenSubstitute):
    """A frozen convolution with TensorFlow's padding, as in timm's ``tf_efficientnet`` networks.

    torch takes long for the input gradient of strided depthwise convolutions in bfloat16 on a CPU, so it is computed in
    single precision, as ``perada.engine.frozen_layers.FrozenConv2d`` does.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in, H, W) to (B, out, H', W')."""
        conv: Any = self.original[0]
        output: Tensor
        if substitute_dtype(conv, x) == torch.bfloat16 and is_strided_depthwise(conv, x):
            # timm pads the images before the convolution, whose own padding is 0.
            padded = timm.layers.pad_same(x, conv.kernel_size, conv.stride, conv.dilation)
            output = strided_depthwise(conv, padded)
        else:
            output = conv(x)
        return output


FROZEN_SUBSTITUTES[timm.layers.Conv2dSame] = FrozenConv2dSame
TWINS[timm.layers.BatchNormAct2d] = StackedBatchNormAct
TWINS[timm.layers.GroupNorm] = StackedNorm
TWINS[timm.layers.LayerNorm] = StackedNorm
TWINS[timm.layers.LayerNorm2d] = StackedLayerNorm2d
# The head of MobileNetV3.
TWINS[timm.layers.Linear] = StackedLinear
TWINS[Characters] = StackedCharacters
RANDOM_TWINS[timm.layers.DropPath] = StackedDropPath
ROW_PARAMETERS[VisionTransformer] = frozenset({"cls_token", "pos_embed", "reg_token"})


def register_transformers() -> None:
    """Register the parameters of transformers' ViT that broadcast over the batch, if a ViT was imported.

    To import it for other networks would take seconds.
    """
    vit = sys.modules.get("transformers.models.vit.modeling_vit")
    if vit is not None:
        ROW_PARAMETERS[vit.ViTEmbeddings] = frozenset({"cls_token", "position_embeddings"})


class StackedScale(StackedLayer):
    """C learned scales of the last axis, or of the channels of feature maps.

    The original is timm's LayerScale, or a dictionary of PEFT with one parameter.
    """

    def forward(self, x_R: Tensor) -> Tensor:
        """Scale (R, ..., D), or (R, D, H, W) if the scale has four axes."""
        original = self.original[0]
        # The only parameter.
        name, scale = next(original.named_parameters())
        if scale.dim() == 4:
            shape = [1, -1, 1, 1]
        else:
            shape = [1] * (x_R.dim() - 1) + [-1]
        out_R = self.scaled(x_R, shape, name)
        # Under autocast, PEFT converts the result back to the dtype of the input; timm does not.
        if isinstance(original, LayerScale):
            return out_R
        return out_R.to(x_R.dtype)


TWINS[LayerScale] = StackedScale


class StackedPrompts(StackedLayer):
    """C sets of prompt tokens."""

    like_torch = False
    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Return for each row (R, ...) the tokens of its client: (R, T, D)."""
        rows_per_client = len(x_R) // len(self.weight)
        return self.weight.repeat_interleave(rows_per_client, 0)


TWINS[Prompts] = StackedPrompts


class StackedTextClassifier(StackedLayer):
    """C classifiers from class names, whose zero-shot classifier is the same."""

    like_torch = False

    def forward(self, x_R: Tensor) -> Tensor:
        """Map image features (R, D) to logits (R, K)."""
        zero_shot = self.original[0].zero_shot
        clients = self.context.num_clients
        directions_R = F.normalize(x_R, dim=-1)
        logits_R = F.linear(directions_R, zero_shot.text_features)
        # Dimensions are clients, images and classes or features.
        logits = logits_R.unflatten(0, (clients, -1))
        feature_offset = self.stacked("feature_offset")
        if feature_offset is not None:
            logits = logits + batched_linear(directions_R.unflatten(0, (clients, -1)), feature_offset, None)
        log_scale = zero_shot.logit_scale
        scale_offset = self.stacked("scale_offset")
        if scale_offset is not None:
            log_scale = log_scale + scale_offset.unsqueeze(1)
        logits = logits * log_scale.exp()
        if zero_shot.logit_bias is not None:
            logits = logits + zero_shot.logit_bias
        bias_offset = self.stacked("bias_offset")
        if bias_offset is not None:
            logits = logits + bias_offset.unsqueeze(1)
        out_R: Tensor = logits.flatten(0, 1)
        return out_R


TWINS[TextClassifier] = StackedTextClassifier


class StackedParamDict(nn.Module):
    """Base class of the twins of PEFT layers with parameters in dictionaries.

    Each dictionary is replaced by a :class:`StackedScale`.

    Args:
        original: The layer of PEFT.
        children: Replacements of its children in the folded model, by name.
        context: Facts about the current pass.
    """

    dictionaries: ClassVar[frozenset[str]]
    """Names of the dictionaries."""

    def __init__(self, original: nn.Module, children: dict[str, nn.Module | None], context: FoldContext) -> None:
        super().__init__()
        # In a list, so that it is not registered as a child with parameters.
        self.original: list[Any] = [original]
        self._modules.update(children)
        for name in self.dictionaries:
            setattr(self, name, StackedScale(getattr(original, name), context))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # children are of any class
        """Return a child. Only the annotation differs from nn.Module's, so that children can be called."""
        return super().__getattr__(name)

    @classmethod
    def param_dicts(cls, original: Any) -> frozenset[str]:  # noqa: ANN401  # a layer of PEFT
        """Return the names of the dictionaries to stack.

        All are stacked if they have a single adapter, which is trained; otherwise none is.
        """
        dictionaries = [getattr(original, name) for name in cls.dictionaries]
        if original.merged or original.disable_adapters:
            return frozenset()
        adapter_names = list(original.active_adapters)
        if len(adapter_names) != 1 or any(list(dictionary) != adapter_names for dictionary in dictionaries):
            return frozenset()
        parameters = [parameter for dictionary in dictionaries for parameter in dictionary.values()]
        if not any(parameter.requires_grad for parameter in parameters):
            return frozenset()
        return cls.dictionaries


class StackedIA3(StackedParamDict):
    """IA3 (Liu et al., NeurIPS 2022): a scale of a layer's output, or of the input of a feed-forward layer."""

    dictionaries = frozenset({"ia3_l"})

    def forward(self, x_R: Tensor) -> Tensor:
        """Run the frozen layer on the rows of all clients."""
        if self.original[0].is_feedforward:
            out_R: Tensor = self.base_layer(self.ia3_l(x_R))
        else:
            out_R = self.ia3_l(self.base_layer(x_R))
        return out_R


class StackedVera(StackedParamDict):
    """VeRA (Kopiczko et al., ICLR 2024): frozen random projections A and B, with learned scales after each."""

    dictionaries = frozenset({"vera_lambda_d", "vera_lambda_b"})

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, ..., D_in) to (R, ..., D_out)."""
        layer = self.original[0]
        # The only adapter.
        adapter_name, matrix_A = next(iter(self.vera_A.items()))
        # All layers share A and B, which have the size of the largest layer.
        matrix_A = matrix_A[:, : layer.in_features]
        matrix_B = self.vera_B[adapter_name][: layer.out_features]
        out_R: Tensor = self.base_layer(x_R)
        dropped_R = self.vera_dropout[adapter_name](layer._cast_input_dtype(x_R, matrix_A.dtype))
        hidden_R = self.vera_lambda_d(F.linear(dropped_R, matrix_A))
        added_R: Tensor = self.vera_lambda_b(F.linear(hidden_R, matrix_B))
        return (out_R + added_R).to(out_R.dtype)


class StackedDora(StackedLayer):
    """C vectors of DoRA's magnitudes (Liu et al., ICML 2024), for linear layers and convolutions.

    As in PEFT, no gradient flows through the norm of a client's direction, the frozen weight plus s·B·A.
    """

    weight: Tensor

    def forward(
        self,
        x_R: Tensor,
        *,
        lora_A: Any,  # noqa: ANN401  # stacked linear layers or convolutions
        lora_B: Any,  # noqa: ANN401  # as above
        scaling: float,
        base_layer: Any,  # noqa: ANN401  # the frozen layer
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Return the difference that LoRA and the magnitudes make to the frozen layer's output.

        PEFT calls this with the arguments of its own layer.

        Args:
            x_R: Input (R, ...) of the frozen layer.
            lora_A: Stacked layer with the factors A of all clients.
            lora_B: Stacked layer with the factors B of all clients.
            scaling: Scale s of LoRA.
            base_layer: The frozen layer.
            base_result: Output (R, ...) of the frozen layer; None if dropout has changed ``x_R``.
            adapter_name: PEFT's name for the adapter.
        """
        frozen_weight = base_layer.weight
        is_convolution = isinstance(self.original[0], DoraConv2dLayer)
        if base_result is None:
            if is_convolution:
                base_result = base_layer._conv_forward(x_R, frozen_weight, None)
            else:
                base_result = F.linear(x_R, frozen_weight)
        elif base_layer.bias is not None:
            # The magnitudes scale the weights, but not the bias.
            base_result = base_result - base_layer.bias.view([-1, 1, 1] if is_convolution else [-1])

        norms = []
        for down, up in zip(lora_A.stacked("weight"), lora_B.stacked("weight"), strict=True):
            norms.append(self._direction_norm(frozen_weight, down, up, scaling))
        scale = self.weight.flatten(1) / torch.stack(norms)
        clients = len(scale)
        shape = [1, -1, 1, 1] if is_convolution else [1] * (x_R.dim() - 1) + [-1]
        scale_CB = scale.view(clients, *shape)
        base_CB = base_result.view(clients, -1, *base_result.shape[1:])
        lora_R = lora_B(lora_A(x_R))
        lora_CB = lora_R.view(clients, -1, *lora_R.shape[1:])
        added_CB = (scale_CB - 1) * base_CB + scale_CB * lora_CB * scaling
        added_R: Tensor = added_CB.flatten(0, 1)
        return added_R

    @staticmethod
    @torch.no_grad()
    def _direction_norm(frozen_weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        """Return the norm (D_out,) of the weights of each output for one client.

        Args:
            frozen_weight: Weight (D_out, D_in, ...) of the frozen layer.
            down: Factor A (r, D_in, ...) of the client.
            up: Factor B (D_out, r, ...) of the client.
            scaling: Scale s of LoRA.
        """
        product = up.flatten(1) @ down.flatten(1)
        norm: Tensor = torch.linalg.vector_norm(frozen_weight.flatten(1) + scaling * product, dim=1)
        return norm


TWINS[DoraLinearLayer] = StackedDora
TWINS[DoraConv2dLayer] = StackedDora
OWNER_TWINS[ia3.layer.Linear] = StackedIA3
OWNER_TWINS[ia3.layer.Conv2d] = StackedIA3
OWNER_TWINS[vera.layer.Linear] = StackedVera
