# SPDX-License-Identifier: Apache-2.0
"""Frozen layers that take less time or memory than torch's; :mod:`~perada.engine.fold` inserts them.

Each computes the same as the original layer, which keeps its tensors: files and exports are not affected, and the model
can be moved, or weights loaded into it, as usual.

**Convolutions of small maps** are matrix products (:mod:`perada.engine.small_maps`), and the matrix is cached.

**Strided depthwise convolutions in bfloat16.** On a CPU, torch has no fast implementation of their input gradient,
which is computed in single precision here. :mod:`perada.models.twins` does the same for timm's padding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from perada.engine.small_maps import LinearMap, is_small_map, output_size, small_map_matrix
from perada.engine.substitutes import FrozenSubstitute

CACHED_MATRICES = 2
"""Number of matrices that a layer caches: a run alternates between at most two sizes, dtypes or memory formats."""


class FrozenConv2d(FrozenSubstitute):
    """A frozen convolution, which on a CPU is computed as a matrix product if the map is small.

    Matrices are cached by size of the map, dtype and memory format. They are computed again after the weights have
    changed, except by ``weight.data.copy_()`` and similar, which torch does not count as a new version.

    Compiled passes run the plain layer, since a compiler rearranges the weights by itself, and so do layers with hooks.
    """

    def __init__(self, original: nn.Conv2d) -> None:
        super().__init__(original)
        self._cache: dict[tuple[object, ...], LinearMap] = {}
        self._cached_weights: tuple[object, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in, H, W) to (B, out, H', W')."""
        conv: nn.Conv2d = self.original[0]
        dtype = substitute_dtype(conv, x)
        output: Tensor
        if dtype is None:
            output = conv(x)
        elif dtype == torch.bfloat16 and is_strided_depthwise(conv, x):
            output = strided_depthwise(conv, x)
        elif is_small_map(conv, x):
            output = self._matrix_product(conv, x, dtype)
        else:
            output = conv(x)
        return output

    def _matrix_product(self, conv: nn.Conv2d, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the convolution of x (B, in, H, W) as a matrix product; the output has the input's memory format."""
        size = x.shape[2:]
        output_map = output_size(conv, size)
        channels_last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        linear_map = self._linear_map(conv, size, dtype, channels_last)
        if channels_last:
            # This is the order of the pixels in memory, so flatten() does not copy.
            x = x.permute(0, 2, 3, 1)
        flat_images = x.flatten(1).to(dtype)
        flat_output = F.linear(flat_images, linear_map.matrix, linear_map.bias)
        if not channels_last:
            return flat_output.view(-1, conv.out_channels, output_map.height, output_map.width)
        output = flat_output.view(-1, output_map.height, output_map.width, conv.out_channels)
        return output.permute(0, 3, 1, 2)

    def _linear_map(self, conv: nn.Conv2d, size: torch.Size, dtype: torch.dtype, channels_last: bool) -> LinearMap:
        """Return the convolution as a linear map, from the cache if possible."""
        weights = _version_of_tensor(conv.weight)
        if conv.bias is not None:
            weights += _version_of_tensor(conv.bias)
        if weights != self._cached_weights:
            self._cache.clear()
            self._cached_weights = weights
        key = (size, dtype, channels_last)
        if key not in self._cache:
            # Tensors created in inference mode could not be used in a later training step.
            with torch.inference_mode(False), torch.no_grad():
                linear_map = small_map_matrix(conv, size, channels_last)
                self._cache[key] = linear_map.to(dtype)
            for oldest in list(self._cache)[:-CACHED_MATRICES]:
                del self._cache[oldest]
        return self._cache[key]


def _version_of_tensor(tensor: Tensor) -> tuple[int, ...]:
    """Return numbers that change with a tensor or its values, as far as torch counts in-place changes."""
    # Neither id nor address is enough: a new tensor may have those of one that was deleted.
    return id(tensor), tensor.data_ptr(), tensor._version


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes a product of two tensors; None if it leaves them unchanged."""
    device_type = x.device.type
    # The device "meta" has no autocast, and raises an error if it is queried.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    # Autocast does not change double precision.
    if torch.float64 in (x.dtype, weight.dtype):
        return None
    return torch.get_autocast_dtype(device_type)


def substitute_dtype(conv: nn.Conv2d, x: Tensor) -> torch.dtype | None:
    """Return the dtype in which a substitute of a convolution computes; None if the plain layer has to run."""
    cast_dtype = autocast_dtype(x, conv.weight)
    # Without autocast, different dtypes of weights and images are an error, which the plain layer raises.
    mismatched = cast_dtype is None and conv.weight.dtype != x.dtype
    if mismatched or torch.compiler.is_compiling() or is_hooked(conv):
        return None
    return cast_dtype or x.dtype


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which may recompute its weights before a pass."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_strided_depthwise(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a convolution is strided and depthwise, whose input gradient in bfloat16 is slow on a CPU."""
    is_strided = conv.stride != (1, 1)
    is_depthwise = 1 < conv.groups == conv.in_channels
    return is_strided and is_depthwise and x.device.type == "cpu" and conv.padding_mode == "zeros"


AutogradContext = Any  # torch has no type for the context of an autograd function


def strided_depthwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Run a strided depthwise convolution without hooks, whose input gradient is computed in single precision.

    Args:
        conv: The convolution. Its own ``forward`` is not called, so that x is padded by ``conv.padding`` only.
        x: Images (B, in, H, W).
    """
    output: Tensor = _StridedDepthwise.apply(x, conv)
    return output


class _StridedDepthwise(torch.autograd.Function):
    """A frozen convolution like torch's, whose input gradient is computed in single precision."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, conv: nn.Conv2d) -> Tensor:
        """Run the convolution on x (B, in, H, W)."""
        ctx.conv = conv
        ctx.size = x.shape
        ctx.dtype = x.dtype
        out: Tensor = conv._conv_forward(x, conv.weight, conv.bias)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input, computed in float32."""
        conv: nn.Conv2d = ctx.conv
        image_gradient = conv2d_input(
            ctx.size,
            conv.weight.float(),
            gradient.float(),
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            groups=conv.groups,
        )
        # One entry for each argument of forward(); there is no gradient of a module.
        return image_gradient.to(ctx.dtype), None


class FrozenBatchNorm(FrozenSubstitute):
    """A frozen BatchNorm with running statistics, in evaluation mode: a scale and a shift for each channel.

    torch's BatchNorm saves its input for the backward pass, although only the gradient of a trained weight needs it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, D, ...)."""
        norm = self.original[0]
        normalised: Tensor = _Normalise.apply(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        return normalised


class _Normalise(torch.autograd.Function):
    """Batch normalisation by running statistics, with a gradient only for its input."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
    ) -> Tensor:
        """Normalise x (B, D, ...), without saving it for the backward pass."""
        ctx.save_for_backward(weight, mean, var)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, training=False, momentum=0.0, eps=eps)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input."""
        weight, mean, var = ctx.saved_tensors
        if gradient.device.type == "cpu":
            x_gradient, _, _ = torch.ops.aten.native_batch_norm_backward(
                grad_out=gradient,
                # Without a gradient of the weight only the input's shape is used, which is that of the gradient.
                input=gradient,
                weight=weight,
                running_mean=mean,
                running_var=var,
                save_mean=None,
                save_invstd=None,
                train=False,
                eps=ctx.eps,
                # Which gradients to compute: those of input, weight and bias.
                output_mask=[True, False, False],
            )
        else:
            # The GPU's kernel requires the statistics of a batch, which evaluation mode does not compute.
            x_gradient = input_gradient(gradient, weight, var, ctx.eps)
        # One entry for each argument of forward(); only the input has a gradient.
        return x_gradient, None, None, None, None, None


def input_gradient(gradient: Tensor, weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """Compute the gradient of a BatchNorm's input in evaluation mode from that of its output.

    It is weight / √(var + eps) times the gradient of the output: the same BatchNorm without mean and bias.

    Args:
        gradient: Gradient (B, D, ...) of the output.
        weight: Weight (D,); None for 1.
        var: Running variance (D,).
        eps: Constant that is added to the variance.
    """
    zeros = torch.zeros_like(var)
    # A norm without a weight has no bias either.
    bias = None
    if weight is not None:
        bias = zeros
    return F.batch_norm(gradient, zeros, var, weight, bias, training=False, momentum=0.0, eps=eps)
