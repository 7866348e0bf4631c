# SPDX-License-Identifier: Apache-2.0
"""Frozen convolutions of small maps: torch's own against a matrix product, by shape and precision."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import ratio, take_turns
from perada.engine.frozen_layers import is_small_map, output_size, small_map_matrix

SHAPES = [  # in, out, kernel, stride, side
    (512, 512, 3, 1, 1),
    (256, 256, 1, 1, 1),
    (256, 512, 3, 2, 2),
    (256, 256, 3, 1, 2),
    (512, 512, 3, 1, 2),
    (256, 256, 5, 1, 3),
    (256, 256, 5, 1, 4),
    (256, 256, 3, 1, 3),
    (128, 256, 3, 2, 4),
    (128, 128, 3, 1, 4),
]


def small_maps(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """512 images with channels last, forward and with the backward pass to the input; "taken" is what perada runs."""
    for channels, out, kernel, stride, side in SHAPES[:2] if quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False, device=device, dtype=dtype)
            conv = conv.requires_grad_(False).to(memory_format=torch.channels_last)
            x = torch.randn(8 if quick else 512, channels, side, side, device=device, dtype=dtype)
            x = x.to(memory_format=torch.channels_last).requires_grad_()
            product = _product(conv, x)
            ways = {"conv": partial(conv, x.detach()), "product": partial(product, x.detach())}
            both = {"conv": partial(_back, conv, x), "product": partial(_back, product, x)}
            forward, backward = (take_turns(way, device, repeats, warm_up=2) for way in (ways, both))
            yield {
                "channels": f"{channels} → {out}",
                "kernel": f"{kernel}×{kernel}, stride {stride}",
                "map": f"{side}×{side}",
                "dtype": str(dtype).removeprefix("torch."),
                "work": round(side**2 / kernel**2, 2),
                "convolution, ms": round(1e3 * statistics.median(forward["conv"]), 2),
                "product, ms": round(1e3 * statistics.median(forward["product"]), 2),
                "gain": ratio(forward["conv"], forward["product"]),
                "gain with backward": ratio(backward["conv"], backward["product"]),
                "taken": "product" if is_small_map(conv, x) else "convolution",
            }


def _product(conv: nn.Conv2d, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The convolution of maps of the size of ``x`` as a product, whatever it costs."""
    matrix, _ = small_map_matrix(conv, x.shape[2:], channels_last=True)
    size = (*output_size(conv, x.shape[2:]), conv.out_channels)
    return lambda x: F.linear(x.permute(0, 2, 3, 1).flatten(1), matrix).view(-1, *size).permute(0, 3, 1, 2)


def _back(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    x.grad = None
    layer(x).sum().backward()
