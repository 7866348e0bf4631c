# SPDX-License-Identifier: Apache-2.0
"""Convolutions of small maps as matrix products, which take less time on a CPU.

For images of 32×32, the last stages of a ResNet convolve maps of 2×2 and of a single pixel, where most taps of a kernel
fall on padding. Such a convolution is a linear map of the flattened image: its matrix has, for each output and input
position, the tap that joins them, or zero. One matrix product takes between a quarter and two thirds of the time of the
convolution. For trained weights the matrix is built again in each pass, which pays if a client has enough images
(``python -m benchmarks small_maps``).
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

LARGEST_WORK = 0.5
"""Largest number of multiplications of the matrix product, as a share of the convolution's nominal number.

At 0.44 (3×3 kernel, 2×2 map) the product is 1.5 to 3.4 times as fast as the convolution; at 0.64 (5×5 kernel, 4×4 map)
it is slower. Maps of one pixel always use the product, which is 2.2 to 4 times as fast. Grouped convolutions never do,
since their products are too small.
"""
LARGEST_MATRIX = 4
"""Largest number of elements of the matrix, as a multiple of the number of the convolution's weights."""
FEWEST_ROWS = 16
"""Fewest images of a client for which trained weights are copied to a matrix in each pass, if the matrix has as many
elements as the weights; for larger matrices proportionally more.

With a 3×3 kernel on a 2×2 map (1.8 times as many elements) and 256 or 512 channels, a forward and backward pass is 1.6
to 2.3 times as fast as a product with 64 images, and 0.5 to 1.2 times with 16.
"""


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
    taps = conv.kernel_size[0] * conv.kernel_size[1]
    needs_less_work = in_height * in_width <= max(1, LARGEST_WORK * taps)
    return needs_less_work and _matrix_growth(conv, x) <= LARGEST_MATRIX


def pays_with_trained_weights(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether the product is faster although its matrix is built in each pass.

    Args:
        conv: The convolution, for which :func:`is_small_map` is true.
        x: The images (B, in, H, W) of a client.
    """
    return len(x) >= FEWEST_ROWS * _matrix_growth(conv, x)


def _matrix_growth(conv: nn.Conv2d, x: Tensor) -> float:
    """Return the number of elements of the matrix for maps (B, in, H, W), as a multiple of that of the weights."""
    output_map = output_size(conv, x.shape[2:])
    in_pixels = x.shape[2] * x.shape[3]
    out_pixels = output_map.height * output_map.width
    taps = conv.kernel_size[0] * conv.kernel_size[1]
    return in_pixels * out_pixels / taps


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
    # conv.padding would not do: it may be a word such as "same".
    pad_left, pad_right, pad_top, pad_bottom = conv._reversed_padding_repeated_twice
    padded_height = size[0] + pad_top + pad_bottom
    padded_width = size[1] + pad_left + pad_right
    # With dilation the kernel spans more rows and columns than it has taps.
    kernel_height = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
    kernel_width = conv.dilation[1] * (conv.kernel_size[1] - 1) + 1
    height = (padded_height - kernel_height) // conv.stride[0] + 1
    width = (padded_width - kernel_width) // conv.stride[1] + 1
    return MapSize(height, width)


def pixel_tap(conv: nn.Conv2d) -> int | None:
    """Find the tap of a kernel that falls on the only pixel of a map.

    Returns:
        Number of the tap, counted row by row; None if the output has more than one pixel, or no tap falls on the pixel.
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
    return row * conv.kernel_size[1] + column


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


def stacked_matrices(weights: Tensor, taps: Tensor) -> Tensor:
    """Return the convolutions of C clients as matrices that multiply images flattened in the order (H, W, in).

    The gradient of the weights is the sum of those of the places in the matrix where a tap occurs.

    Args:
        weights: Weights (C, out, in, kernel height, kernel width).
        taps: The result of :func:`joining_taps`.

    Returns:
        Matrices (C, H'·W'·out, H·W·in).
    """
    clients, out_channels, in_channels = weights.shape[:3]
    out_pixels = taps.shape[0] * taps.shape[1]
    in_pixels = taps.shape[2] * taps.shape[3]
    # The taps become the first axis, so that blocks (C, out, in) are copied.
    blocks = weights.flatten(3).permute(3, 0, 1, 2)
    if bool((taps < 0).any()):
        # A block of zeros, for pairs of positions that no tap joins.
        zeros = blocks.new_zeros(1, clients, out_channels, in_channels)
        blocks = torch.cat([blocks, zeros])
    # The number -1 stands for the last block.
    places = taps.flatten() % len(blocks)
    pairs = blocks.index_select(0, places).view(out_pixels, in_pixels, clients, out_channels, in_channels)
    matrices = pairs.permute(2, 0, 3, 1, 4)  # (C, H'·W', out, H·W, in)
    return matrices.reshape(clients, out_pixels * out_channels, in_pixels * in_channels)


def small_map_matrix(conv: nn.Conv2d, size: torch.Size, channels_last: bool) -> LinearMap:
    """Return a convolution of small maps as a matrix and a bias.

    Args:
        conv: The convolution.
        size: Height H and width W of its input.
        channels_last: Whether maps are flattened in the order (H, W, C) instead of (C, H, W).
    """
    output_map = output_size(conv, size)
    out_pixels = output_map.height * output_map.width
    matrix = stacked_matrices(conv.weight.unsqueeze(0), joining_taps(conv, size))[0]
    if not channels_last:
        blocks = matrix.view(out_pixels, conv.out_channels, -1, conv.in_channels)
        matrix = blocks.permute(1, 0, 3, 2).reshape(matrix.shape)  # (out·H'·W', in·H·W)
    if conv.bias is None:
        return LinearMap(matrix, None)
    bias = conv.bias.expand(out_pixels, -1)
    if not channels_last:
        bias = bias.T
    return LinearMap(matrix, bias.reshape(-1))
