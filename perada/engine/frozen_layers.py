# SPDX-License-Identifier: Apache-2.0
"""Frozen layers, computed in less time or memory than torch's own; :mod:`~perada.engine.fold` puts them in place.

Each computes what its original does, whose tensors stay where they are: nothing that is saved or exported knows of it,
and a model that is moved or loaded anew takes it along.

**Convolutions of small maps.** At 32×32, the last stages of a ResNet convolve maps of 2×2 and of a single pixel, where
most taps of a kernel fall on padding. Such a convolution is a linear map of the whole image: for each output and input
position the tap that joins them, or zero. As one matrix product it takes between a quarter and two thirds of the time
(``python -m benchmarks small_maps``).

**Strided depthwise convolutions in bfloat16.** On a CPU, torch has no fast gradient of their images, which is computed
in single precision here.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

LARGEST_WORK = 0.5
"""Multiplications of the matrix product, as a share of the convolution's nominal ones, up to which it is taken.

At 0.44 (3×3 on 2×2) it is faster by 1.5 to 3.4, at 0.64 (5×5 on 4×4) the convolution is. A map of one pixel is always a
product, which is faster by 2.2 to 4. Grouped convolutions stay, since their products are too small.
"""
LARGEST_MATRIX = 4
"""Numbers of the matrix, as a multiple of the convolution's weights, up to which it is made."""


class Frozen(nn.Module):
    """Base of the layers that stand for one of which nothing is trained.

    Whatever else is asked of it, such as its weight by the adapter around it, is the original's.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original: list[Any] = [original]  # in a list: not a child, so that names stay those of the single model

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever it is there
        """An attribute of the original."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"][0], name)


class FrozenConv2d(Frozen):
    """A frozen convolution, which on a CPU is a matrix product where the map is small.

    The matrix is made once for each size of map, dtype and memory format, of which the last two are kept. It is made
    anew when the weights have changed, but for changes by ``weight.data.copy_()`` and its like, of which torch tells
    nothing. Compiled passes run the plain layer, whose weights a compiler rearranges by itself, and so does a layer
    with hooks.
    """

    def __init__(self, original: nn.Conv2d) -> None:
        super().__init__(original)
        self._kept: dict[tuple[object, ...], tuple[Tensor, Tensor | None]] = {}
        self._weights: tuple[object, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in, H, W) to (B, out, H', W')."""
        conv: nn.Conv2d = self.original[0]
        cast_dtype = autocast_dtype(x, conv.weight)
        dtype = cast_dtype or x.dtype
        mismatched = cast_dtype is None and conv.weight.dtype != dtype  # an error, which is torch's to raise
        if mismatched or torch.compiler.is_compiling() or is_hooked(conv):
            return conv(x)  # type: ignore[no-any-return]  # a tensor
        if dtype == torch.bfloat16 and is_strided_depthwise(conv, x):
            return _StridedDepthwise.apply(x, conv)  # type: ignore[no-any-return]  # a tensor
        if not is_small_map(conv, x):
            return conv(x)  # type: ignore[no-any-return]  # a tensor
        channels_last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        matrix, bias = self._matrix(conv, x.shape[2:], dtype, channels_last)
        height, width = output_size(conv, x.shape[2:])
        if channels_last:
            out = F.linear(x.permute(0, 2, 3, 1).flatten(1).to(dtype), matrix, bias)
            return out.view(-1, height, width, conv.out_channels).permute(0, 3, 1, 2)
        out = F.linear(x.flatten(1).to(dtype), matrix, bias)
        return out.view(-1, conv.out_channels, height, width)

    def _matrix(
        self, conv: nn.Conv2d, size: torch.Size, dtype: torch.dtype, channels_last: bool
    ) -> tuple[Tensor, Tensor | None]:
        tensors = [value for value in (conv.weight, conv.bias) if value is not None]
        weights = tuple((id(value), value.data_ptr(), value._version) for value in tensors)
        if weights != self._weights:  # a later tensor may have the address of an earlier one
            self._kept.clear()
            self._weights = weights
        key = (size, dtype, channels_last)
        if key not in self._kept:
            # Not in inference mode, whose tensors cannot be part of a later training step.
            with torch.inference_mode(False), torch.no_grad():
                matrix, bias = small_map_matrix(conv, size, channels_last)
                self._kept[key] = matrix.to(dtype), None if bias is None else bias.to(dtype)
            for old in list(self._kept)[:-2]:
                del self._kept[old]
        return self._kept[key]


def autocast_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes a product of the two; None where it leaves them as they are."""
    # Autocast leaves double precision alone.
    if not torch.is_autocast_enabled(x.device.type) or torch.float64 in (x.dtype, weight.dtype):
        return None
    return torch.get_autocast_dtype(x.device.type)


def is_hooked(module: nn.Module) -> bool:
    """Whether something is done before or after a module's own pass, such as weights that are made anew."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_small_map(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether a convolution of images (B, in, H, W) is faster as a matrix product. Nothing but CPUs was measured."""
    if x.dim() != 4 or x.device.type != "cpu" or conv.groups != 1 or conv.padding_mode != "zeros":
        return False
    height, width = output_size(conv, x.shape[2:])
    if x.shape[1] != conv.in_channels or min(height, width, *x.shape[2:]) < 1:
        return False
    pixels = x.shape[2] * x.shape[3]
    taps = conv.kernel_size[0] * conv.kernel_size[1]
    return pixels <= max(1, LARGEST_WORK * taps) and pixels * height * width <= LARGEST_MATRIX * taps


def is_strided_depthwise(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether a CPU is slow at the gradient of such a convolution's images in bfloat16."""
    strided = conv.stride != (1, 1) and 1 < conv.groups == conv.in_channels
    return strided and x.device.type == "cpu" and conv.padding_mode == "zeros"


def output_size(conv: nn.Conv2d, size: torch.Size) -> tuple[int, int]:
    """Compute height and width of what a convolution makes of a map of this ``size``."""
    left, right, top, bottom = conv._reversed_padding_repeated_twice
    kernel_height = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    kernel_width = conv.dilation[1] * (conv.kernel_size[1] - 1) + 1
    height = (size[0] + top + bottom - kernel_height) // conv.stride[0] + 1
    width = (size[1] + left + right - kernel_width) // conv.stride[1] + 1
    return height, width


def pixel_tap(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Find the tap (row, column) that falls on the only pixel of a map.

    Returns:
        None where the output has more than one pixel, or no tap falls on the pixel.
    """
    if output_size(conv, torch.Size((1, 1))) != (1, 1):
        return None
    left, _, top, _ = conv._reversed_padding_repeated_twice
    row, between_rows = divmod(top, conv.dilation[0])
    column, between_columns = divmod(left, conv.dilation[1])
    if between_rows or between_columns or row >= conv.kernel_size[0] or column >= conv.kernel_size[1]:
        return None
    return row, column


def joining_taps(conv: nn.Conv2d, size: torch.Size) -> Tensor:
    """Which tap of the kernel, in order of its rows, joins output and input positions (H', W', H, W); -1 for none."""
    height, width = output_size(conv, size)
    left, _, top, _ = conv._reversed_padding_repeated_twice
    taps = torch.full((height, width, *size), -1)
    for row, column, down, right in itertools.product(range(height), range(width), *map(range, conv.kernel_size)):
        y = row * conv.stride[0] - top + down * conv.dilation[0]
        x = column * conv.stride[1] - left + right * conv.dilation[1]
        if 0 <= y < size[0] and 0 <= x < size[1]:
            taps[row, column, y, x] = down * conv.kernel_size[1] + right
    return taps


def small_map_matrix(conv: nn.Conv2d, size: torch.Size, channels_last: bool) -> tuple[Tensor, Tensor | None]:
    """A convolution of maps (H, W) as a matrix (H'·W'·out, H·W·in) and a bias (H'·W'·out).

    Rows and columns are in the order of the memory of a map: of (C, H, W), or of (H, W, C) if ``channels_last``.
    """
    height, width = output_size(conv, size)
    matrix = F.pad(conv.weight.flatten(2), (0, 1))[:, :, joining_taps(conv, size)]  # (out, in, H', W', H, W)
    bias = None if conv.bias is None else conv.bias.expand(height, width, -1)
    if channels_last:
        matrix = matrix.permute(2, 3, 0, 4, 5, 1)
    else:
        matrix = matrix.permute(0, 2, 3, 1, 4, 5)
        bias = None if bias is None else bias.permute(2, 0, 1)
    return matrix.reshape(height * width * conv.out_channels, -1), None if bias is None else bias.reshape(-1)


_Context = Any  # torch gives it no type


class _StridedDepthwise(torch.autograd.Function):
    """A frozen convolution as torch's own, with a gradient for its images that is computed in single precision."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, conv: nn.Conv2d) -> Tensor:
        ctx.conv = conv
        ctx.size = x.shape
        ctx.dtype = x.dtype
        out: Tensor = conv(x)
        return out

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        conv: nn.Conv2d = ctx.conv
        input_gradient = conv2d_input(
            ctx.size, conv.weight.float(), gradient.float(), conv.stride, conv.padding, conv.dilation, conv.groups
        )
        return input_gradient.to(ctx.dtype), None


class FrozenBatchNorm(Frozen):
    """A BatchNorm of which nothing is trained, in evaluation mode: a scale and a shift for each channel.

    Autograd keeps a BatchNorm's input, though only the gradient of a weight needs it. The original has running
    statistics.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, D, ...)."""
        norm = self.original[0]
        normalised: Tensor = _Normalise.apply(x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        return normalised


class _Normalise(torch.autograd.Function):
    """Batch normalisation by running statistics, with a gradient for its input alone."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(weight, mean, var)
        ctx.eps = eps
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, mean, var = ctx.saved_tensors
        if gradient.device.type == "cpu":
            inputs, *_ = torch.ops.aten.native_batch_norm_backward(
                gradient, gradient, weight, mean, var, None, None, False, ctx.eps, [True, False, False]
            )  # in the place of the input the gradient, for its shape: values are not looked at
        else:  # a GPU's also asks for a batch's statistics: the derivative of a scale and a shift is the scale
            inputs = input_gradient(gradient, weight, var, ctx.eps)
        return inputs, None, None, None, None, None


def input_gradient(gradient: Tensor, weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """The gradient of a BatchNorm's input in evaluation mode, (B, D, ...), from that of its output.

    It is weight / √(var + eps) times that, with weight and var (D,): the same BatchNorm without mean and bias.
    """
    zeros = torch.zeros_like(var)
    return F.batch_norm(gradient, zeros, var, weight, None if weight is None else zeros, False, 0.0, eps)
