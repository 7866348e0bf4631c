# SPDX-License-Identifier: Apache-2.0
"""Shapes made by formulas: labelled grey images without a photograph, to pretrain small models on."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.checks import check_integer
from perada.core.seeding import generator
from perada.data.sets.base import ImageSet

WAVES = 5  # of a contour
SMALLEST_RADIUS = 0.15  # of a contour, in units of its mean
NOISE = 0.03  # standard deviation inside a shape; white is 1
CHUNK = 2000  # images drawn at once


class Shapes(ImageSet):
    """Grey images of random shapes on black, each class one shape: an outer contour, an inner one, a tone and stripes.

    A contour's radius is 1 + Σ_k (a_k cos kθ + b_k sin kθ), k = 1 … 5, with normal coefficients of standard deviation
    0.35 / √k. Classes differ in them, in proportions, in the tone of the inner part, and in the stripes' frequency,
    direction and depth. Images of one class differ in place, size, proportions, rotation, mirroring, brightness,
    the stripes' phase, and by a tenth or so in their contours' coefficients.

    The idea, to learn features for real images from classes of formulas: Kataoka et al. (ACCV 2020); with contours,
    Kataoka et al. (CVPR 2022).

    Args:
        count: Training images; the test split has a tenth as many.
        classes: Number of shapes.
        size: Height and width, in pixels.
        seed: Another seed, other shapes.
        train: The training split, or else the test split.

    Raises:
        ValueError: If there is nothing to draw.
    """

    def __init__(
        self, count: int = 60_000, classes: int = 200, size: int = 28, seed: int = 0, train: bool = True
    ) -> None:
        super().__init__(train)
        check_integer("count", count, 10, hint="the test split has a tenth as many")
        check_integer("classes", classes)
        check_integer("size", size)
        self.count, self.size, self.seed = count, size, seed
        self.classes = classes  # type: ignore[assignment]  # the argument; shapes have no names
        self.num_classes = self._kinds = classes

    def _load(self) -> tuple[Tensor, Tensor]:
        kinds = draw_kinds(self._kinds, generator(self.seed, "shape classes"))
        random = generator(self.seed, "shape images", int(self.train))
        labels = torch.randint(0, self._kinds, (self.count if self.train else self.count // 10,), generator=random)
        images = [
            draw_shapes({k: v[c] for k, v in kinds.items()}, self.size, random) for c in torch.split(labels, CHUNK)
        ]
        return torch.cat(images), labels


def draw_kinds(classes: int, random: torch.Generator) -> dict[str, Tensor]:
    """Draw what the shapes of one class have in common: numbers (classes, 1, 1) by name, and the contours.

    These, ``outer`` and ``inner``, are coefficients (classes, 2, waves), cosines before sines.
    """
    uniform = _uniform(classes, random)
    spread = 0.35 / torch.arange(1, WAVES + 1).sqrt()
    contours = torch.randn(2, classes, 2, WAVES, generator=random) * spread
    return {
        "outer": contours[0],
        "inner": contours[1],
        "inner_size": uniform(0.25, 0.75),
        "tone": uniform(-0.6, 0.6),
        "stretch": uniform(-0.35, 0.35).exp(),
        "frequency": uniform(2, 12),
        "direction": uniform(0, math.pi),
        "depth": uniform(0, 0.5) * (uniform(0, 1) < 0.7),  # three in ten have no stripes
    }


def draw_shapes(of: dict[str, Tensor], size: int, random: torch.Generator) -> Tensor:
    """Draw images, uint8 (B, 1, size, size), of the entries of :func:`draw_kinds`, B in their first axis."""
    count = len(of["tone"])
    uniform = _uniform(count, random)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=random)

    line = torch.linspace(-1, 1, size)
    right, down = line.view(1, 1, -1) - uniform(-0.2, 0.2), line.view(1, -1, 1) - uniform(-0.2, 0.2)
    angle, scale = uniform(-0.35, 0.35), uniform(0.45, 0.8)
    width, height = (scale * (0.12 * normal(1, 1)).exp() * of["stretch"] ** sign for sign in (1, -1))
    mirror = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    x = mirror * (angle.cos() * right + angle.sin() * down) / width
    y = (angle.cos() * down - angle.sin() * right) / height
    distance, theta = (x * x + y * y).sqrt(), torch.atan2(y, x)

    outer = contour(of["outer"] * (1 + 0.15 * normal(2, WAVES)), theta)
    inner = contour(of["inner"] * (1 + 0.15 * normal(2, WAVES)), theta) * of["inner_size"]
    sharpness = 0.75 * size * scale
    body, core = (torch.sigmoid((radius - distance) * sharpness) for radius in (outer, inner))
    along = x * of["direction"].cos() + y * of["direction"].sin()
    stripes = of["depth"] * torch.sin(of["frequency"] * along + uniform(0, 2 * math.pi))
    shade = uniform(0.35, 0.9) * (1 + stripes + of["tone"] * core) + uniform(-0.2, 0.2) * y
    values = body * (shade + NOISE * normal(size, size))
    return (values.clamp(0, 1) * 255).round().byte().unsqueeze(1)


def _uniform(count: int, random: torch.Generator) -> Callable[[float, float], Tensor]:
    """What draws numbers (count, 1, 1) from a range."""
    return lambda low, high: low + (high - low) * torch.rand(count, 1, 1, generator=random)


def contour(coefficients: Tensor, theta: Tensor) -> Tensor:
    """Radius of B contours at some angles: 1 + Σ_k (a_k cos kθ + b_k sin kθ), but at least ``SMALLEST_RADIUS``.

    The coefficients, a and b, are (B, 2, waves), the angles (B, H, W) in radians.

    >>> contour(torch.tensor([[[0.5, 0.0], [0.0, 0.0]]]), torch.tensor([[[0.0, math.pi]]])).tolist()
    [[[1.5, 0.5]]]
    """
    phases = theta.unsqueeze(-1) * torch.arange(1, coefficients.shape[-1] + 1)
    cosines, sines = coefficients.unbind(1)
    waves = torch.einsum("bhwk,bk->bhw", phases.cos(), cosines) + torch.einsum("bhwk,bk->bhw", phases.sin(), sines)
    return (1 + waves).clamp(min=SMALLEST_RADIUS)
