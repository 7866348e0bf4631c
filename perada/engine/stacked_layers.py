# SPDX-License-Identifier: Apache-2.0
"""Stacked versions of torch's layers, for the trained layers of a folded model.

A *twin* has the parameter names of its original, each tensor with a leading axis C, and a forward that splits the
batch by client. Outputs and gradients are those of C separate layers.

Suffixes of names give shapes: R = C·B rows, C clients, B images per client, D features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.core.seeding import Streams
from perada.core.states import Merged
from perada.engine.frozen_layers import AutogradContext, autocast_dtype
from perada.engine.small_maps import (
    is_small_map,
    joining_taps,
    output_size,
    pays_with_trained_weights,
    pixel_tap,
    stacked_matrices,
)


@dataclass
class FoldContext:
    """Facts about the current forward pass, which the engine sets and the stacked layers read.

    The layers of a model are called by its own ``forward``, so the engine cannot pass these as arguments.

    Attributes:
        num_clients: Number C of clients.
        counts: Number of real rows of each client, whose other rows are padding; ``None`` if all are real.
        streams: Random streams of the clients; ``None`` if the pass draws nothing.
        draws: Number of layers that have drawn from the streams in this pass.
        together: Normalise the full batches of all clients by one call. This copies the batch twice, but is faster on a
            GPU than a kernel for each client.
        faster_attention: Whether the pass runs under :class:`~perada.engine.attention.FasterAttention`.
    """

    num_clients: int = 1
    counts: tuple[int, ...] | None = None
    streams: Streams | None = None
    draws: int = 0
    together: bool = False
    faster_attention: bool = False

    def begin(
        self,
        num_clients: int,
        counts: tuple[int, ...] | None,
        streams: Streams | None,
        *,
        together: bool = False,
    ) -> None:
        """Start a pass; the arguments are the attributes of the same names."""
        self.num_clients = num_clients
        self.counts = counts
        self.streams = streams
        self.together = together
        self.draws = 0

    def restore(self, facts: "FoldContext") -> None:
        """Set all attributes to those of ``facts``."""
        for field in fields(self):
            setattr(self, field.name, getattr(facts, field.name))

    def next_streams(self) -> Streams:
        """Return the streams of the next layer that draws.

        Raises:
            RuntimeError: If the pass has no streams.
        """
        if self.streams is None:
            raise RuntimeError("the model uses random dropout in training, but no random streams were passed")
        self.draws += 1
        return self.streams.fork("layer", self.draws)


def _split_clients(x_R: Tensor, num_clients: int) -> Tensor:
    """View rows (R, ...) as (C, B, ...)."""
    return x_R.view(num_clients, -1, *x_R.shape[1:])


class StackedLayer(nn.Module):
    """Base class of the stacked layers.

    A twin registers the tensors of the original under their names. In each forward pass,
    ``torch.func.functional_call`` replaces them by stacked ones. A parameter that is not trained is not replaced and
    has no client axis.

    Args:
        original: The layer of the single model.
        context: Facts about the current pass.
    """

    like_torch: ClassVar[bool] = True
    """Whether the original computes the same as the torch layer that it is derived from."""

    def __init__(self, original: nn.Module, context: FoldContext) -> None:
        super().__init__()
        # In a list, so that it is not registered as a child: names of tensors must stay those of the single model.
        self.original: list[Any] = [original]
        self.context = context
        parameters = dict(original.named_parameters(recurse=False))
        self.frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        self.merged = {name for name, parameter in parameters.items() if isinstance(parameter, Merged)}
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        # named_buffers() would leave out buffers that are None.
        for name, buffer in original._buffers.items():
            self.register_buffer(name, buffer)

    def stacked(self, name: str) -> Tensor | None:
        """Return a tensor with its client axis, (C, ...); a frozen one is expanded. None if the layer lacks it."""
        value: Tensor | None = getattr(self, name, None)
        if value is not None and name in self.frozen:
            return value.unsqueeze(0).expand(self.context.num_clients, *value.shape)
        return value

    def common(self, name: str) -> Tensor | None:
        """Return a tensor without a client axis if it is the same for all clients; None if it is not."""
        value: Tensor = getattr(self, name)
        if name in self.frozen:
            return value
        # A merged weight is not trained. It is the same for all clients if its client axis was expanded (stride 0).
        if name in self.merged and (len(value) == 1 or value.stride(0) == 0):
            return value[0]
        return None

    def scaled(self, x_R: Tensor, shape: list[int], name: str = "weight") -> Tensor:
        """Multiply the rows of each client by one of its tensors, or return them as they are if the layer lacks it.

        Args:
            x_R: Rows (R, ...).
            shape: Shape in which one client's tensor broadcasts over its rows (B, ...).
            name: Name of the tensor.
        """
        factors = self.stacked(name)
        if factors is None:
            return x_R
        x_CB = _split_clients(x_R, self.context.num_clients)
        product_CB = x_CB * factors.reshape(len(factors), *shape)
        return product_CB.flatten(0, 1)

    def shifted(self, x_R: Tensor, shape: list[int]) -> Tensor:
        """Add each client's bias to its rows (R, ...), reshaped like the tensor of :meth:`scaled`."""
        bias = self.stacked("bias")
        if bias is None:
            return x_R
        x_CB = _split_clients(x_R, self.context.num_clients)
        sum_CB = x_CB + bias.reshape(len(bias), *shape)
        return sum_CB.flatten(0, 1)

    def affine(self, x_R: Tensor, shape: list[int]) -> Tensor:
        """Multiply the rows (R, ...) of each client by its weight and add its bias; see :meth:`scaled`."""
        return self.shifted(self.scaled(x_R, shape), shape)


class StackedLinear(StackedLayer):
    """C linear layers on one batch: a batched matrix product."""

    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, ..., D_in) to (R, ..., D_out)."""
        common_weight = self.common("weight")
        if common_weight is not None:
            # One product for the rows of all clients, which can differ only in their biases.
            out = F.linear(x_R, common_weight)
            leading_axes = out.dim() - 1
            shape = [1] * leading_axes + [-1]
            return self.shifted(out, shape)
        x_CND = x_R.reshape(self.context.num_clients, -1, x_R.shape[-1])
        out = batched_linear(x_CND, self.weight, self.stacked("bias"))
        return out.reshape(*x_R.shape[:-1], out.shape[-1])


class StackedConv2d(StackedLayer):
    """C convolutions on one batch: a batched product for 1×1 kernels and small maps, or one native call per client."""

    weight: Tensor

    def __init__(self, original: nn.Module, context: FoldContext) -> None:
        super().__init__(original, context)
        self._taps: dict[torch.Size, Tensor] = {}

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, in, H, W) to (R, out, H', W')."""
        conv: nn.Conv2d = self.original[0]
        common_weight = self.common("weight")
        if common_weight is not None:
            # One convolution for the rows of all clients, which can differ only in their biases.
            out = conv._conv_forward(x_R, common_weight, None)
            return self.shifted(out, [1, -1, 1, 1])
        x_CB = _split_clients(x_R, self.context.num_clients)
        bias = self.stacked("bias")

        tap = _only_tap(conv, x_R)
        if tap is not None:
            # All other taps fall on padding, so this is a linear map of the only pixel.
            out = batched_linear(x_CB.flatten(2), self.weight.flatten(3)[..., tap], bias)
            return out.flatten(0, 1)[..., None, None]

        if _is_pointwise(conv):
            # A linear map of each pixel that the stride does not skip. Slices have a gradient even if they skip none.
            if conv.stride != (1, 1):
                row_step, column_step = conv.stride
                x_CB = x_CB[..., ::row_step, ::column_step]
            pixels = x_CB.permute(0, 1, 3, 4, 2)  # (C, B, H', W', in)
            out = batched_linear(pixels.flatten(1, 3), self.weight.flatten(2), bias)
            out = out.view(*pixels.shape[:-1], -1)  # (C, B, H', W', out)
            return out.flatten(0, 1).permute(0, 3, 1, 2)

        if _is_small_map_of_clients(conv, x_R, len(x_CB)):
            return self._multiply_maps(x_R, bias)

        weights = self.weight.unbind()
        biases = _split_by_client(bias, len(x_CB))
        outputs = []
        # Chunks keep the strides of images of one channel, unlike x_CB.
        for x, client_weight, client_bias in zip(x_R.chunk(len(x_CB)), weights, biases, strict=True):
            outputs.append(conv._conv_forward(x, client_weight, client_bias))
        return _join_clients(outputs)

    def _multiply_maps(self, x_R: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve small maps (R, in, H, W) by a matrix product for each client, with biases (C, out)."""
        conv: nn.Conv2d = self.original[0]
        size = x_R.shape[2:]
        if size not in self._taps:
            self._taps[size] = joining_taps(conv, size)
        # Before the matrices are built, which are larger than the weights.
        weight = self.weight
        dtype = autocast_dtype(x_R, weight)
        if dtype is not None:
            weight = weight.to(dtype)
        matrices = stacked_matrices(weight, self._taps[size])
        output_map = output_size(conv, size)
        if bias is not None:
            bias = bias.repeat(1, output_map.height * output_map.width)
        flat_maps = x_R.permute(0, 2, 3, 1).flatten(1)
        out = batched_linear(_split_clients(flat_maps, len(weight)), matrices, bias)
        out_R = out.view(-1, output_map.height, output_map.width, conv.out_channels)
        return out_R.permute(0, 3, 1, 2)


class StackedConvTranspose2d(StackedLayer):
    """C transposed convolutions on one batch: one native call per client."""

    weight: Tensor

    def forward(self, x_R: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (R, in, H, W) to (R, out, H', W'); ``output_size`` is (H', W'), as in torch's layer."""
        conv: nn.ConvTranspose2d = self.original[0]
        padding = conv.padding
        # Only other convolutions accept a string.
        assert isinstance(padding, tuple)
        image_axes = 2
        output_padding = conv._output_padding(
            x_R,
            output_size,
            list(conv.stride),
            list(padding),
            list(conv.kernel_size),
            image_axes,
            list(conv.dilation),
        )

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.conv_transpose2d(x, weight, bias, conv.stride, padding, output_padding, conv.groups, conv.dilation)

        common_weight = self.common("weight")
        if common_weight is not None:
            # One convolution for the rows of all clients, which can differ only in their biases.
            out = convolve(x_R, common_weight, None)
            return self.shifted(out, [1, -1, 1, 1])
        x_CB = _split_clients(x_R, self.context.num_clients)
        weights = self.weight.unbind()
        biases = _split_by_client(self.stacked("bias"), len(x_CB))
        outputs = []
        for x, client_weight, client_bias in zip(x_CB, weights, biases, strict=True):
            outputs.append(convolve(x, client_weight, client_bias))
        return _join_clients(outputs)


def _only_tap(conv: nn.Conv2d, x_R: Tensor) -> int | None:
    """Return the tap of a larger kernel that falls on the only pixel of maps (R, in, 1, 1), counted row by row.

    Returns None for other maps, and where the convolution itself is faster.
    """
    if conv.kernel_size == (1, 1) or x_R.shape[2:] != (1, 1) or not is_small_map(conv, x_R):
        return None
    return pixel_tap(conv)


def _is_small_map_of_clients(conv: nn.Conv2d, x_R: Tensor, num_clients: int) -> bool:
    """Return whether convolutions of maps (R, in, H, W) with trained weights are faster as matrix products."""
    # A compiler rearranges the weights by itself.
    if torch.compiler.is_compiling() or not is_small_map(conv, x_R):
        return False
    images_of_a_client = x_R[: len(x_R) // num_clients]
    return pays_with_trained_weights(conv, images_of_a_client)


def _is_pointwise(conv: nn.Conv2d) -> bool:
    """Return whether each output pixel is a linear map of one input pixel."""
    is_unpadded = conv.padding in ((0, 0), "valid")
    return conv.kernel_size == (1, 1) and conv.groups == 1 and is_unpadded


def _join_clients(outputs: list[Tensor]) -> Tensor:
    """Concatenate the outputs (B, ...) of the clients to (R, ...), without a copy for a single client."""
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def batched_linear(x_CND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Map inputs (C, N, D_in) to (C, N, D_out) by each client's weight (C, D_out, D_in) and bias (C, D_out)."""
    # Autocast casts the inputs of torch's own product, but not those of a custom autograd function.
    dtype = autocast_dtype(x_CND, weight)
    if dtype is not None:
        x_CND = x_CND.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    out: Tensor = _BatchedLinear.apply(x_CND, weight, bias)
    return out


class _BatchedLinear(torch.autograd.Function):
    """Product of inputs (C, N, D_in) and weights (C, D_out, D_in), plus biases (C, D_out) or None: (C, N, D_out).

    The gradient of the weights has the weights' memory layout. That of torch.bmm would be transposed, and optimisers
    would copy it.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        x_CND: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the product, plus the biases (C, N, D_out)."""
        ctx.save_for_backward(x_CND, weight)
        if bias is None:
            return torch.bmm(x_CND, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x_CND, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs, weights and biases, as far as they are needed."""
        x_CND, weight = ctx.saved_tensors
        needs_x_gradient, needs_weight_gradient, needs_bias_gradient = ctx.needs_input_grad
        x_gradient: Tensor | None = None
        weight_gradient: Tensor | None = None
        bias_gradient: Tensor | None = None
        if needs_x_gradient:
            x_gradient = torch.bmm(gradient, weight)
        if needs_weight_gradient:
            weight_gradient = torch.bmm(gradient.transpose(1, 2), x_CND)
        if needs_bias_gradient:
            bias_gradient = gradient.sum(1)
        return x_gradient, weight_gradient, bias_gradient


class StackedBatchNorm(StackedLayer):
    """C batch normalisations on one batch, each with the statistics of its client's real rows."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, ...) per client; in training mode the running statistics are updated in place."""
        norm = self.original[0]
        momentum = norm.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        means = self.running_mean
        variances = self.running_var
        if momentum is None and self.training and means is not None and variances is not None:
            # Without a momentum, running statistics are cumulative means, which F.batch_norm does not support. With a
            # momentum of 1 it returns the statistics of the batch, from which the means are updated here.
            batch_means = torch.zeros_like(means)
            batch_variances = torch.zeros_like(variances)
            out = self._normalise_rows(x_R, batch_means, batch_variances, momentum=1.0)
            assert self.num_batches_tracked is not None
            # The n-th batch has the share 1/n in the mean. In single precision at least: float16 and bfloat16 cannot
            # count many batches.
            num_batches = self.num_batches_tracked.view(-1, 1)
            share = num_batches.to(torch.promote_types(means.dtype, torch.float32)).reciprocal()
            means.lerp_(batch_means, share.to(means.dtype))
            variances.lerp_(batch_variances, share.to(variances.dtype))
            return out
        return self._normalise_rows(x_R, means, variances, 0.0 if momentum is None else momentum)

    def _normalise_rows(self, x_R: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float) -> Tensor:
        """Normalise rows (R, D, ...) by the faster way.

        Args:
            x_R: Rows (R, D, ...).
            means: Running means (C, D), which training mode updates in place; None if there are none.
            variances: Running variances (C, D), likewise.
            momentum: Weight of the batch's statistics in the update.
        """
        has_padding = self.context.counts is not None
        if self.context.together and not has_padding and self.context.num_clients > 1:
            return self._normalise_together(x_R, means, variances, momentum)
        return self._normalise_by_client(x_R, means, variances, momentum)

    def _normalise_together(
        self,
        x_R: Tensor,
        means: Tensor | None,
        variances: Tensor | None,
        momentum: float,
    ) -> Tensor:
        """Normalise the clients' full batches by one call, as one batch of B images with C·D channels."""
        norm = self.original[0]
        clients = self.context.num_clients
        use_batch = self.training or means is None
        # Channels become the last axis, next to which the client axis is put. S stands for the axes of an image.
        x_RSD = x_R.movedim(1, -1)
        x_BSCD = _split_clients(x_RSD, clients).movedim(0, -2)
        x = x_BSCD.flatten(-2).movedim(-1, 1)  # (B, C·D, S)
        out = F.batch_norm(
            x,
            # batch_norm updates the statistics in place, so these are views.
            running_mean=_flatten_stack(means, view=use_batch),
            running_var=_flatten_stack(variances, view=use_batch),
            weight=_flatten_stack(self.stacked("weight")),
            bias=_flatten_stack(self.stacked("bias")),
            training=use_batch,
            momentum=momentum,
            eps=norm.eps,
        )
        out_BSCD = out.movedim(1, -1).reshape(x_BSCD.shape)
        out_RSD = out_BSCD.movedim(-2, 0).reshape(x_RSD.shape)
        return out_RSD.movedim(-1, 1)

    def _normalise_by_client(
        self,
        x_R: Tensor,
        means: Tensor | None,
        variances: Tensor | None,
        momentum: float,
    ) -> Tensor:
        """Normalise the real rows of one client after the other; rows of padding become zeros."""
        norm = self.original[0]
        clients = self.context.num_clients
        counts = self.context.counts
        use_batch = self.training or means is None
        means_by_client = _split_by_client(means, clients)
        variances_by_client = _split_by_client(variances, clients)
        weights = _split_by_client(self.stacked("weight"), clients)
        biases = _split_by_client(self.stacked("bias"), clients)
        # The rows of a single client are used as they are, without a view.
        rows_by_client = x_R.chunk(clients) if clients > 1 else (x_R,)
        outputs = []
        for client, rows in enumerate(rows_by_client):
            real_rows = rows
            if counts is not None:
                real_rows = rows[: counts[client]]
            out = F.batch_norm(
                real_rows,
                running_mean=means_by_client[client],
                running_var=variances_by_client[client],
                weight=weights[client],
                bias=biases[client],
                training=use_batch,
                momentum=momentum,
                eps=norm.eps,
            )
            if len(out) < len(rows):
                padding = rows.new_zeros(rows[len(out) :].shape)
                out = torch.cat([out, padding])
            outputs.append(out)
        return _join_clients(outputs)


def _split_by_client(stack: Tensor | None, num_clients: int) -> Sequence[Tensor | None]:
    """Split a stack (C, ...) by client; None stands for None for each client.

    unbind() is a single operation with one gradient; that of each ``stack[client]`` would have the size of the stack.
    """
    if stack is None:
        return [None] * num_clients
    return stack.unbind()


def _flatten_stack(stack: Tensor | None, view: bool = False) -> Tensor | None:
    """Flatten a stack (C, D) to (C·D,).

    Args:
        stack: The stack; None stays None.
        view: Return a view, so that in-place changes reach the stack. Otherwise a copy is made if strides require it.
    """
    if stack is None:
        return None
    if view:
        return stack.view(-1)
    return stack.flatten()


class StackedNorm(StackedLayer):
    """C layer or group normalisations: one normalisation of all rows, then each client's scale and shift."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, ..., D) by layers, or (R, D, ...) by groups."""
        norm = self.original[0]
        if isinstance(norm, nn.GroupNorm):
            image_axes = x_R.dim() - 2
            shape = [1, norm.num_channels] + [1] * image_axes
            normalised = F.group_norm(x_R, norm.num_groups, None, None, norm.eps)
            return self.affine(normalised, shape)
        leading_axes = x_R.dim() - len(norm.normalized_shape)
        shape = [1] * leading_axes + list(norm.normalized_shape)
        normalised = F.layer_norm(x_R, norm.normalized_shape, None, None, norm.eps)
        return self.affine(normalised, shape)


class StackedInstanceNorm(StackedLayer):
    """C instance normalisations without running statistics, which normalise each image by itself."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Normalise (R, D, ...)."""
        norm = self.original[0]
        normalised = F.instance_norm(x_R, eps=norm.eps)
        image_axes = x_R.dim() - 2
        return self.affine(normalised, [1, -1] + [1] * image_axes)


class StackedPReLU(StackedLayer):
    """C activations with learned slopes of negative values, one for all channels or one for each."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Activate (R, D, ...)."""
        image_axes = x_R.dim() - 2
        negative = self.scaled(x_R, [1, -1] + [1] * image_axes)
        # clamp() would have a gradient of 1 at 0, where torch's layer has the slope.
        return torch.where(x_R > 0, x_R, negative)


class StackedDropout(StackedLayer):
    """Dropout with one random stream per client, so that a client's masks do not depend on the others.

    Each 64-bit draw gives four decisions of 16 bits, which round the drop rate to a multiple of 2**-16.
    """

    def forward(self, x_R: Tensor) -> Tensor:
        """Drop single elements of (R, ...)."""
        if not self.training:
            return x_R
        return x_R * self.mask(x_R, x_R.dim())

    def mask(self, x_R: Tensor, dims: int) -> Tensor:
        """Draw a mask of 0 (dropped) and 1/(1-p), p being the drop rate.

        Args:
            x_R: Rows (R, ...).
            dims: Number of leading axes with independent decisions. Along the others, all elements share one.

        Returns:
            The mask, with size 1 along the axes after the first ``dims``.
        """
        trailing_axes = x_R.dim() - dims
        shape = [*x_R.shape[:dims]] + [1] * trailing_axes
        rate = drop_rate(self.original[0])
        # Draws are uniform over the integers from -2**15 to 2**15 - 1. Elements below the threshold are dropped.
        threshold = round(rate * 2**16) - 2**15
        if threshold >= 2**15:
            # Everything is dropped, and 1/(1-p) may be infinite.
            return x_R.new_zeros(shape)
        draws_per_client = math.prod(shape) // self.context.num_clients
        keep = self.context.next_streams().bits(draws_per_client) >= threshold
        if dims == x_R.dim():
            # The mask has the memory format of the input.
            mask = torch.empty_like(x_R)
        else:
            mask = x_R.new_empty(shape)
        mask.copy_(keep.view(shape))
        return mask.mul_(1 / (1 - rate))


class StackedChannelDropout(StackedDropout):
    """Dropout of whole channels with one random stream per client."""

    def forward(self, x_R: Tensor) -> Tensor:
        """Drop channels of (R, D, ...)."""
        if not self.training:
            return x_R
        return x_R * self.mask(x_R, 2)


def drop_rate(module: nn.Module) -> float:
    """Return a layer's probability of dropping: ``p`` of torch's layers, ``drop_prob`` of timm's."""
    rate = getattr(module, "p", None)
    if rate is None:
        rate = getattr(module, "drop_prob", None)
    return float(rate or 0.0)
