# SPDX-License-Identifier: Apache-2.0
"""Convolutions of small maps: torch's own against a matrix product, by shape and precision."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import ratio, take_turns
from perada.engine.small_maps import (
    is_small_map,
    joining_taps,
    output_size,
    pays_with_trained_weights,
    small_map_matrix,
    stacked_matrices,
)


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


CLIENTS = 2
"""Clients whose trained convolutions are timed."""
ROWS = (4, 16, 64)
"""Images of each of them."""


def small_maps(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Time the forward pass with channels last, and with it the backward pass, of frozen and of trained weights.

    Frozen weights convolve 512 images, and the backward pass has the gradient of the images only. Trained weights are
    those of 2 clients with 4, 16 or 64 images each. The column "taken" is what perada runs.
    """
    # The third one is the first that has a matrix of trained weights.
    shapes = SHAPES[:3] if quick else SHAPES
    num_images = 8 if quick else 512
    rows_of_clients = ROWS[:1] if quick else ROWS
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            yield _time_frozen(shape, num_images, dtype, device, repeats)
    for shape in shapes:
        conv = _layer_of(shape, device)
        needs_no_matrix = shape.side == 1
        if needs_no_matrix or not is_small_map(conv, _images_of(shape, 1, device)):
            continue
        for rows in rows_of_clients:
            for dtype in (torch.float32, torch.bfloat16):
                yield _time_trained(shape, rows, dtype, device, repeats)


def _layer_of(shape: Shape, device: torch.device) -> nn.Conv2d:
    """Return a convolution of a shape."""
    conv = nn.Conv2d(
        shape.in_channels,
        shape.out_channels,
        shape.kernel,
        shape.stride,
        padding=shape.kernel // 2,
        bias=False,
        device=device,
    )
    return conv.to(memory_format=torch.channels_last)


def _images_of(shape: Shape, count: int, device: torch.device) -> Tensor:
    """Return random images with channels last."""
    x = torch.randn(count, shape.in_channels, shape.side, shape.side, device=device)
    return x.to(memory_format=torch.channels_last)


def _time_frozen(
    shape: Shape, num_images: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time a frozen convolution as torch computes it and as a matrix product."""
    conv = _layer_of(shape, device).to(dtype).requires_grad_(False)
    x = _images_of(shape, num_images, device).to(dtype).requires_grad_()
    product = _as_product(conv, x)
    forward_ways = {"conv": partial(conv, x.detach()), "product": partial(product, x.detach())}
    backward_ways = {"conv": partial(_forward_and_backward, conv, x)}
    backward_ways["product"] = partial(_forward_and_backward, product, x)
    forward = take_turns(forward_ways, device, repeats, warm_up=2)
    backward = take_turns(backward_ways, device, repeats, warm_up=2)
    return _row(shape, "frozen", num_images, dtype, is_small_map(conv, x), forward, backward)


def _time_trained(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time the convolutions of some clients with trained weights as torch computes them and as matrix products."""
    conv = _layer_of(shape, device)
    x_R = _images_of(shape, CLIENTS * rows, device).to(dtype).requires_grad_()
    weights = torch.randn(CLIENTS, *conv.weight.shape, device=device, requires_grad=True)
    output_shape = (*output_size(conv, x_R.shape[2:]), conv.out_channels)
    taps = joining_taps(conv, x_R.shape[2:])

    def convolve(x_R: Tensor) -> Tensor:
        outputs = []
        for x, weight in zip(x_R.chunk(CLIENTS), weights.to(dtype).unbind(), strict=True):
            outputs.append(F.conv2d(x, weight, stride=conv.stride, padding=conv.padding))
        return torch.cat(outputs)

    def multiply(x_R: Tensor) -> Tensor:
        matrices = stacked_matrices(weights.to(dtype), taps)
        flat_maps = x_R.permute(0, 2, 3, 1).reshape(CLIENTS, rows, -1)
        products = torch.bmm(flat_maps, matrices.transpose(1, 2))
        return products.view(-1, *output_shape).permute(0, 3, 1, 2)

    forward_ways = {"conv": partial(_forward_only, convolve, x_R), "product": partial(_forward_only, multiply, x_R)}
    backward_ways = {
        "conv": partial(_forward_and_backward, convolve, x_R, weights),
        "product": partial(_forward_and_backward, multiply, x_R, weights),
    }
    forward = take_turns(forward_ways, device, repeats, warm_up=2)
    backward = take_turns(backward_ways, device, repeats, warm_up=2)
    is_product = is_small_map(conv, x_R) and pays_with_trained_weights(conv, x_R[:rows])
    return _row(shape, "trained", rows, dtype, is_product, forward, backward)


def _row(
    shape: Shape,
    weights: str,
    images: int,
    dtype: torch.dtype,
    is_product: bool,
    forward: dict[str, list[float]],
    backward: dict[str, list[float]],
) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "channels": f"{shape.in_channels} → {shape.out_channels}",
        "kernel": f"{shape.kernel}×{shape.kernel}, stride {shape.stride}",
        "map": f"{shape.side}×{shape.side}",
        "weights": weights,
        "images": images,
        "dtype": str(dtype).removeprefix("torch."),
        "work": round(shape.side**2 / shape.kernel**2, 2),
        "convolution, ms": round(1e3 * statistics.median(forward["conv"]), 2),
        "product, ms": round(1e3 * statistics.median(forward["product"]), 2),
        "gain": ratio(forward["conv"], forward["product"]),
        "gain with backward": ratio(backward["conv"], backward["product"]),
        "taken": "product" if is_product else "convolution",
    }


def _as_product(conv: nn.Conv2d, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the convolution of maps of the size of ``x`` as a matrix product, even where that takes longer."""
    matrix, _ = small_map_matrix(conv, x.shape[2:], channels_last=True)
    output_shape = (*output_size(conv, x.shape[2:]), conv.out_channels)

    def product(x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).flatten(1)
        return F.linear(rows, matrix).view(-1, *output_shape).permute(0, 3, 1, 2)

    return product


def _forward_only(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def _forward_and_backward(layer: Callable[[Tensor], Tensor], *inputs: Tensor) -> None:
    """Run a layer on the first input, and compute the gradients of all inputs."""
    torch.autograd.grad(layer(inputs[0]).sum(), inputs)
