# SPDX-License-Identifier: Apache-2.0
"""Stacked versions of torch's layers, for the trained layers of a folded model.

A *twin* has the same parameter names as its original, each tensor with a leading axis C, and a forward that splits the
batch by client. Outputs and gradients are those of C separate layers.

Shape suffixes: R = C·B rows, C clients, B images a client, D features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.core.seeding import Streams
from perada.core.states import Merged
from perada.engine.frozen_layers import autocast_dtype, is_small_map, pixel_tap


@dataclass
class FoldContext:
    """Facts about the current forward pass, which the engine sets and the stacked layers read.

    The layers of a model are called by its own ``forward``, so the engine cannot pass these as arguments.

    Attributes:
        clients: C.
        counts: Number of real rows of each client, the others being padding; ``None`` if every row is real.
        streams: The clients' random streams.
        draws: Number of layers that have drawn from the streams in this pass.
        together: Normalise the full batches of all clients by one call. It copies twice, but does not launch a kernel
            for each client, for which a GPU would wait.
    """

    clients: int = 1
    counts: tuple[int, ...] | None = None
    streams: Streams | None = None
    draws: int = 0
    together: bool = False

    def begin(
        self, clients: int, counts: tuple[int, ...] | None, streams: Streams | None, *, together: bool = False
    ) -> None:
        """Start a pass."""
        self.clients = clients
        self.counts = counts
        self.streams = streams
        self.together = together
        self.draws = 0

    def next_streams(self) -> Streams:
        """Return the streams of the next layer that draws.

        Raises:
            RuntimeError: If the pass has no streams.
        """
        if self.streams is None:
            raise RuntimeError("the model uses random dropout in training, but no random streams were passed")
        self.draws += 1
        return self.streams.fork("layer", self.draws)


def _split_clients(x_R: Tensor, clients: int) -> Tensor:
    """View (R, ...) as (C, B, ...)."""
    return x_R.view(clients, -1, *x_R.shape[1:])


class StackedLayer(nn.Module):
    """Base class of the stacked layers.

    A twin registers the original's tensors under their names. For each forward pass ``torch.func.functional_call``
    replaces them by stacked ones. A parameter that is not trained stays as it is, without a client axis.
    """

    like_torch: ClassVar[bool] = True
    """Return whether the original computes the same as the torch layer from which it is derived."""

    def __init__(self, original: nn.Module, context: FoldContext) -> None:
        super().__init__()
        # In a list, so that it is no child: the names of tensors stay those of the single model.
        self.original: list[Any] = [original]
        self.context = context
        parameters = dict(original.named_parameters(recurse=False))
        self.frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        self.merged = {name for name, parameter in parameters.items() if isinstance(parameter, Merged)}
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        # Not named_buffers(), which leaves out those that are None.
        for name, buffer in original._buffers.items():
            self.register_buffer(name, buffer)

    def stacked(self, name: str) -> Tensor | None:
        """Return the tensor called ``name`` with its client axis, (C, ...); a frozen one is expanded."""
        value: Tensor | None = getattr(self, name, None)
        if value is not None and name in self.frozen:
            return value.unsqueeze(0).expand(self.context.clients, *value.shape)
        return value

    def common(self, name: str) -> Tensor | None:
        """Return the tensor called ``name`` without a client axis, or None unless it is the same for all clients."""
        value: Tensor = getattr(self, name)
        if name in self.frozen:
            return value
        # A merged weight is not trained. It is the same for all clients if its client axis was expanded (stride 0).
        if name in self.merged and (len(value) == 1 or value.stride(0) == 0):
            return value[0]
        return None

    def affine(self, x_R: Tensor, shape: list[int], names: tuple[str, str] = ("weight", "bias")) -> Tensor:
        """Scale and shift each client's rows of (R, ...) by its own weight and bias, reshaped to (C, *shape)."""
        x_CB = _split_clients(x_R, self.context.clients)
        weight = self.stacked(names[0])
        bias = self.stacked(names[1])
        if weight is not None:
            x_CB = x_CB * weight.reshape(len(weight), *shape)
        if bias is not None:
            x_CB = x_CB + bias.reshape(len(bias), *shape)
        return x_CB.flatten(0, 1)


class StackedLinear(StackedLayer):
    """C linear layers on one batch: a batched matrix product."""

    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, ..., D_in) to (R, ..., D_out)."""
        bias = self.stacked("bias")
        common_weight = self.common("weight")
        if common_weight is not None:
            out = F.linear(x_R, common_weight)
            if bias is None:
                return out
            leading_axes = out.dim() - 1
            shape = [1] * leading_axes + [-1]
            return self.affine(out, shape, ("", "bias"))
        x_CND = x_R.reshape(self.context.clients, -1, x_R.shape[-1])
        out = _batched_linear(x_CND, self.weight, bias)
        return out.reshape(*x_R.shape[:-1], out.shape[-1])


class StackedConv2d(StackedLayer):
    """C convolutions on one batch: a batched matrix product for 1×1 kernels and maps, or one native call per client."""

    weight: Tensor

    def forward(self, x_R: Tensor) -> Tensor:
        """Map (R, in, H, W) to (R, out, H', W')."""
        conv = self.original[0]
        bias = self.stacked("bias")
        common_weight = self.common("weight")
        if common_weight is not None:
            out: Tensor = conv._conv_forward(x_R, common_weight, None)
            if bias is None:
                return out
            return self.affine(out, [1, -1, 1, 1], ("", "bias"))
        x_CB = _split_clients(x_R, self.context.clients)
        if conv.kernel_size != (1, 1) and x_R.shape[2:] == (1, 1) and is_small_map(conv, x_R):
            tap = pixel_tap(conv)
            if tap is not None:
                # A linear map of the only pixel: all other taps fall on padding.
                row, column = tap
                out = _batched_linear(x_CB.flatten(2), self.weight[..., row, column], bias)
                return out.flatten(0, 1)[..., None, None]
        is_pointwise = (conv.kernel_size, conv.stride, conv.groups) == ((1, 1), (1, 1), 1)
        if is_pointwise and conv.padding in ((0, 0), "valid"):
            # A linear map of the pixels.
            pixels = x_CB.permute(0, 1, 3, 4, 2)
            out = _batched_linear(pixels.flatten(1, 3), self.weight.flatten(2), bias)
            return out.view(*pixels.shape[:-1], -1).flatten(0, 1).permute(0, 3, 1, 2)
        biases = _unbound(bias, len(x_CB))
        outputs = []
        for x, client_weight, client_bias in zip(x_CB, self.weight.unbind(), biases, strict=True):
            outputs.append(conv._conv_forward(x, client_weight, client_bias))
        return _joined(outputs)


def _joined(outputs: list[Tensor]) -> Tensor:
    """Join the clients' outputs (B, ...) to one batch (R, ...); that of a single client is not copied."""
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _batched_linear(x_CND: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(C, N, D_in), (C, D_out, D_in), (C, D_out) to (C, N, D_out)."""
    if bias is not None:
        return torch.baddbmm(bias.unsqueeze(1), x_CND, weight.transpose(1, 2))
    # Autocast does not cast the inputs of a custom autograd function, as it would those of torch's product.
    dtype = autocast_dtype(x_CND, weight)
    if dtype is not None:
        x_CND = x_CND.to(dtype)
        weight = weight.to(dtype)
    out: Tensor = _BatchedProduct.apply(x_CND, weight)
    return out


class _BatchedProduct(torch.autograd.Function):
    """The product of (C, N, D_in) and (C, D_out, D_in), as (C, N, D_out).

    The gradient of the weights has their memory layout. That of torch's own product is transposed, and would be copied
    for each optimiser.
    """

    @staticmethod
    def forward(ctx: Any, x_CND: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401  # torch gives it no type
        ctx.save_for_backward(x_CND, weight)
        return torch.bmm(x_CND, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # as above
        x_CND, weight = ctx.saved_tensors
        needs_x_gradient, needs_weight_gradient = ctx.needs_input_grad
        x_gradient = torch.bmm(gradient, weight) if needs_x_gradient else None
        weight_gradient = torch.bmm(gradient.transpose(1, 2), x_CND) if needs_weight_gradient else None
        return x_gradient, weight_gradient


class StackedBatchNorm(StackedLayer):
    """C batch normalisations on one batch, each with its own statistics over its own real rows."""

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
            # Without a momentum running statistics are cumulative means, which batch_norm does not support. With a
            # momentum of 1 it writes the statistics of the batch.
            batch_means = torch.zeros_like(means)
            batch_variances = torch.zeros_like(variances)
            out = self._normalise(x_R, batch_means, batch_variances, momentum=1.0)
            assert self.num_batches_tracked is not None
            count = self.num_batches_tracked.view(-1, 1).to(torch.promote_types(means.dtype, torch.float32))
            means.lerp_(batch_means, count.reciprocal().to(means.dtype))
            variances.lerp_(batch_variances, count.reciprocal().to(variances.dtype))
            return out
        return self._normalise(x_R, means, variances, 0.0 if momentum is None else momentum)

    def _normalise(self, x_R: Tensor, means: Tensor | None, variances: Tensor | None, momentum: float) -> Tensor:
        """Normalise with running statistics (C, D), which training mode updates."""
        norm = self.original[0]
        weights = self.stacked("weight")
        biases = self.stacked("bias")
        use_batch = self.training or means is None
        clients = self.context.clients
        counts = self.context.counts
        if self.context.together and counts is None and clients > 1:
            # One normalisation of C·D channels: last in memory, so that those of all clients can lie side by side.
            x_RSD = x_R.movedim(1, -1)
            x_BSCD = _split_clients(x_RSD, clients).movedim(0, -2)
            flat_means = _flat(means, view=use_batch)
            flat_variances = _flat(variances, view=use_batch)
            x = x_BSCD.flatten(-2).movedim(-1, 1)
            out = F.batch_norm(
                x, flat_means, flat_variances, _flat(weights), _flat(biases), use_batch, momentum, norm.eps
            )
            out_BSCD = out.movedim(1, -1).reshape(x_BSCD.shape)
            return out_BSCD.movedim(-2, 0).reshape(x_RSD.shape).movedim(-1, 1)
        outputs = []
        parts = x_R.chunk(clients) if clients > 1 else (x_R,)
        tensors = zip(
            _unbound(means, clients),
            _unbound(variances, clients),
            _unbound(weights, clients),
            _unbound(biases, clients),
            strict=True,
        )
        for client, (x, (mean, variance, weight, bias)) in enumerate(zip(parts, tensors, strict=True)):
            real = x if counts is None else x[: counts[client]]
            out = F.batch_norm(real, mean, variance, weight, bias, use_batch, momentum, norm.eps)
            if out.shape != x.shape:
                # Rows of padding become zeros.
                out = torch.cat([out, x.new_zeros(x[len(out) :].shape)])
            outputs.append(out)
        return _joined(outputs)


def _unbound(stack: Tensor | None, clients: int) -> Sequence[Tensor | None]:
    """Split a stack (C, ...) by client.

    As views of one operation: the gradient of ``stack[client]`` would have the size of the stack for each client.
    """
    return [None] * clients if stack is None else stack.unbind()


def _flat(stack: Tensor | None, view: bool = False) -> Tensor | None:
    """Flatten a stack (C, D); as a ``view`` where what is written to it must reach the stack."""
    if stack is None:
        return None
    return stack.view(-1) if view else stack.flatten()


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


class StackedDropout(StackedLayer):
    """Dropout with one random stream per client, so that a client's masks do not depend on the others.

    Four keep-or-drop decisions are cut from each 64-bit draw; the drop rate is thereby rounded to a multiple of 2**-16.
    """

    def forward(self, x_R: Tensor) -> Tensor:
        """Drop single elements of (R, ...)."""
        if not self.training:
            return x_R
        return x_R * self.mask(x_R, x_R.dim())

    def mask(self, x_R: Tensor, dims: int) -> Tensor:
        """Draw a mask of 0 or 1/(1-p) along the first ``dims`` axes.

        Returns:
            The mask (R, ...), of size 1 along the other axes, which are kept or dropped as one.
        """
        trailing_axes = x_R.dim() - dims
        shape = [*x_R.shape[:dims]] + [1] * trailing_axes
        rate = drop_rate(self.original[0])
        threshold = round(rate * 2**16) - 2**15
        if threshold >= 2**15:
            return x_R.new_zeros(shape)
        keep = self.context.next_streams().bits(math.prod(shape) // self.context.clients) >= threshold
        mask = torch.empty_like(x_R) if dims == x_R.dim() else x_R.new_empty(shape)
        return mask.copy_(keep.view(shape)).mul_(1 / (1 - rate))


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
