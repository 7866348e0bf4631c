# SPDX-License-Identifier: Apache-2.0
"""Frozen convolutions of small maps: torch's own against a matrix product, by shape and precision."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import ratio, take_turns
from perada.engine.frozen_layers import is_small_map, output_size, small_map_matrix


@dataclass(frozen=True)
class Shape:
    """A convolution and the side of its input in pixels."""

    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    side: int


SHAPES = (
    Shape(512, 512, kernel=3, stride=1, side=1),
    Shape(256, 256, kernel=1, stride=1, side=1),
    Shape(256, 512, kernel=3, stride=2, side=2),
    Shape(256, 256, kernel=3, stride=1, side=2),
    Shape(512, 512, kernel=3, stride=1, side=2),
    Shape(256, 256, kernel=5, stride=1, side=3),
    Shape(256, 256, kernel=5, stride=1, side=4),
    Shape(256, 256, kernel=3, stride=1, side=3),
    Shape(128, 256, kernel=3, stride=2, side=4),
    Shape(128, 128, kernel=3, stride=1, side=4),
)


def small_maps(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Time the forward pass of 512 images with channels last, and with it the backward pass to the input.

    The column "taken" is what perada runs.
    """
    shapes = SHAPES[:2] if quick else SHAPES
    num_images = 8 if quick else 512
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            yield _time_shape(shape, num_images, dtype, device, repeats)


def _time_shape(
    shape: Shape, num_images: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time a convolution as torch computes it and as a matrix product."""
    conv = nn.Conv2d(
        shape.in_channels,
        shape.out_channels,
        shape.kernel,
        shape.stride,
        padding=shape.kernel // 2,
        bias=False,
        device=device,
        dtype=dtype,
    )
    conv = conv.requires_grad_(False).to(memory_format=torch.channels_last)
    x = torch.randn(num_images, shape.in_channels, shape.side, shape.side, device=device, dtype=dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    product = _as_product(conv, x)
    forward_ways = {"conv": partial(conv, x.detach()), "product": partial(product, x.detach())}
    backward_ways = {"conv": partial(_forward_and_backward, conv, x)}
    backward_ways["product"] = partial(_forward_and_backward, product, x)
    forward = take_turns(forward_ways, device, repeats, warm_up=2)
    backward = take_turns(backward_ways, device, repeats, warm_up=2)
    return {
        "channels": f"{shape.in_channels} → {shape.out_channels}",
        "kernel": f"{shape.kernel}×{shape.kernel}, stride {shape.stride}",
        "map": f"{shape.side}×{shape.side}",
        "dtype": str(dtype).removeprefix("torch."),
        "work": round(shape.side**2 / shape.kernel**2, 2),
        "convolution, ms": round(1e3 * statistics.median(forward["conv"]), 2),
        "product, ms": round(1e3 * statistics.median(forward["product"]), 2),
        "gain": ratio(forward["conv"], forward["product"]),
        "gain with backward": ratio(backward["conv"], backward["product"]),
        "taken": "product" if is_small_map(conv, x) else "convolution",
    }


def _as_product(conv: nn.Conv2d, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the convolution of maps of the size of ``x`` as a matrix product, even where that takes longer."""
    matrix, _ = small_map_matrix(conv, x.shape[2:], channels_last=True)
    output_shape = (*output_size(conv, x.shape[2:]), conv.out_channels)

    def product(x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).flatten(1)
        return F.linear(rows, matrix).view(-1, *output_shape).permute(0, 3, 1, 2)

    return product


def _forward_and_backward(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.grad = None
    layer(x).sum().backward()
