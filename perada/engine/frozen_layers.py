# SPDX-License-Identifier: Apache-2.0
"""Frozen layers that take less time or memory than torch's; :mod:`~perada.engine.fold` inserts them.

Each computes the same as the original layer, which keeps its tensors: files and exports are not affected, and the model
can be moved, or weights loaded into it, as usual.

**Convolutions of small maps.** For images of 32×32, the last stages of a ResNet convolve maps of 2×2 and of a single
pixel, where most taps of a kernel fall on padding. Such a convolution is a linear map of the flattened image: its
matrix has, for each output and input position, the tap that joins them, or zero. One matrix product takes between a
quarter and two thirds of the time (``python -m benchmarks small_maps``).

**Strided depthwise convolutions in bfloat16.** On a CPU, torch has no fast implementation of their input gradient,
which is computed in single precision here. :mod:`perada.models.twins` does the same for timm's padding.
"""

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from perada.engine.substitutes import FrozenSubstitute

LARGEST_WORK = 0.5
"""Largest number of multiplications of the matrix product, as a share of the convolution's nominal number.

At 0.44 (3×3 kernel, 2×2 map) the product is 1.5 to 3.4 times as fast as the convolution; at 0.64 (5×5 kernel, 4×4 map)
it is slower. Maps of one pixel always use the product, which is 2.2 to 4 times as fast. Grouped convolutions never do,
since their products are too small.
"""
LARGEST_MATRIX = 4
"""Largest number of elements of the matrix, as a multiple of the number of the convolution's weights."""
CACHED_MATRICES = 2
"""Number of matrices that a layer caches: a run alternates between at most two sizes, dtypes or memory formats."""


class LinearMap(NamedTuple):
    """A convolution of small maps as an affine map of flattened images.

    Attributes:
        matrix: Shape (H'·W'·out, H·W·in).
        bias: Shape (H'·W'·out,).
    """

    matrix: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> "LinearMap":
        """Convert both tensors to a dtype."""
        matrix = self.matrix.to(dtype)
        if self.bias is None:
            return LinearMap(matrix, None)
        return LinearMap(matrix, self.bias.to(dtype))


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
        weights = _version(conv.weight)
        if conv.bias is not None:
            weights += _version(conv.bias)
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


def _version(tensor: Tensor) -> tuple[int, ...]:
    """Return numbers that change with a tensor or its values, as far as torch counts in-place changes."""
    # Neither id nor address is enough: a new tensor may have those of one that was deleted.
    return id(tensor), tensor.data_ptr(), tensor._version


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes a product of two tensors; None if it leaves them unchanged."""
    device_type = x.device.type
    # The device "meta" has no autocast, and raises an error if it is queried.
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    # Autocast leaves double precision as it is.
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


def is_small_map(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a convolution of maps (B, in, H, W) is faster as a matrix product; measured on CPUs only."""
    if x.dim() != 4 or x.device.type != "cpu" or conv.groups != 1 or conv.padding_mode != "zeros":
        return False
    _, channels, in_height, in_width = x.shape
    output_map = output_size(conv, x.shape[2:])
    # Impossible sizes are an error, which the plain layer raises.
    if channels != conv.in_channels or min(in_height, in_width, output_map.height, output_map.width) < 1:
        return False
    # For each output pixel the product multiplies all pixels of the map, and the convolution all taps of the kernel.
    in_pixels = in_height * in_width
    out_pixels = output_map.height * output_map.width
    taps = conv.kernel_size[0] * conv.kernel_size[1]
    needs_less_work = in_pixels <= max(1, LARGEST_WORK * taps)
    has_small_matrix = in_pixels * out_pixels <= LARGEST_MATRIX * taps
    return needs_less_work and has_small_matrix


def is_strided_depthwise(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a convolution is strided and depthwise, whose input gradient in bfloat16 is slow on a CPU."""
    is_strided = conv.stride != (1, 1)
    is_depthwise = 1 < conv.groups == conv.in_channels
    return is_strided and is_depthwise and x.device.type == "cpu" and conv.padding_mode == "zeros"


class MapSize(NamedTuple):
    """Height and width of a map, in pixels."""

    height: int
    width: int


def output_size(conv: nn.Conv2d, size: torch.Size) -> MapSize:
    """Compute the size of a convolution's output.

    Args:
        conv: The convolution.
        size: Height and width of its input.
    """
    # Not conv.padding, which may be a word such as "same".
    pad_left, pad_right, pad_top, pad_bottom = conv._reversed_padding_repeated_twice
    padded_height = size[0] + pad_top + pad_bottom
    padded_width = size[1] + pad_left + pad_right
    # With dilation the kernel spans more rows and columns than it has taps.
    kernel_height = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    kernel_width = conv.dilation[1] * (conv.kernel_size[1] - 1) + 1
    height = (padded_height - kernel_height) // conv.stride[0] + 1
    width = (padded_width - kernel_width) // conv.stride[1] + 1
    return MapSize(height, width)


def pixel_tap(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Find the tap of a kernel that falls on the only pixel of a map.

    Returns:
        Row and column of the tap; None if the output has more than one pixel, or no tap falls on the pixel.
    """
    if output_size(conv, torch.Size((1, 1))) != (1, 1):
        return None
    pad_left, _, pad_top, _ = conv._reversed_padding_repeated_twice
    # In the only output pixel, the first tap is at the corner of the padding, and the pixel comes after the padding.
    row_dilation = conv.dilation[0]
    column_dilation = conv.dilation[1]
    if pad_top % row_dilation or pad_left % column_dilation:
        return None
    row = pad_top // row_dilation
    column = pad_left // column_dilation
    if row >= conv.kernel_size[0] or column >= conv.kernel_size[1]:
        return None
    return row, column


def joining_taps(conv: nn.Conv2d, size: torch.Size) -> Tensor:
    """Return which tap of the kernel joins each pair of an output and an input position.

    Args:
        conv: The convolution.
        size: Height H and width W of its input.

    Returns:
        Number (H', W', H, W) of the tap, counted row by row; -1 if no tap joins the two.
    """
    height, width = size
    output_map = output_size(conv, size)
    kernel_height, kernel_width = conv.kernel_size
    pad_left, _, pad_top, _ = conv._reversed_padding_repeated_twice
    taps = torch.full((output_map.height, output_map.width, height, width), -1)
    positions = itertools.product(
        range(output_map.height), range(output_map.width), range(kernel_height), range(kernel_width)
    )
    for out_row, out_column, tap_row, tap_column in positions:
        row = out_row * conv.stride[0] - pad_top + tap_row * conv.dilation[0]
        column = out_column * conv.stride[1] - pad_left + tap_column * conv.dilation[1]
        is_in_image = 0 <= row < height and 0 <= column < width
        if is_in_image:
            taps[out_row, out_column, row, column] = tap_row * kernel_width + tap_column
    return taps


def small_map_matrix(conv: nn.Conv2d, size: torch.Size, channels_last: bool) -> LinearMap:
    """Return a convolution of small maps as a matrix and a bias.

    Args:
        conv: The convolution.
        size: Height H and width W of its input.
        channels_last: Whether maps are flattened in the order (H, W, C) instead of (C, H, W).
    """
    output_map = output_size(conv, size)
    taps = joining_taps(conv, size)
    # Index -1, for positions that no tap joins, selects the zero that is appended to the weights here.
    weights = F.pad(conv.weight.flatten(2), (0, 1))
    matrix = weights[:, :, taps]  # (out, in, H', W', H, W)
    if channels_last:
        matrix = matrix.permute(2, 3, 0, 4, 5, 1)  # (H', W', out, H, W, in)
    else:
        matrix = matrix.permute(0, 2, 3, 1, 4, 5)  # (out, H', W', in, H, W)
    matrix = matrix.reshape(output_map.height * output_map.width * conv.out_channels, -1)
    if conv.bias is None:
        return LinearMap(matrix, None)
    bias = conv.bias.expand(output_map.height, output_map.width, -1)
    if not channels_last:
        bias = bias.permute(2, 0, 1)
    return LinearMap(matrix, bias.reshape(-1))


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
