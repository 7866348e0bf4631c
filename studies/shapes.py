# SPDX-License-Identifier: Apache-2.0
"""Labelled grey images of shapes made by formulas, on which small models are pretrained."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perada.core.checks import check_integer
from perada.core.seeding import generator
from perada.data.sets.base import ImageSet

WAVES = 5
"""Waves of a contour."""
SMALLEST_RADIUS = 0.15
"""Smallest radius of a contour, in units of its mean radius."""
NOISE = 0.03
"""Standard deviation of the noise inside a shape; white is 1."""
CHUNK_SIZE = 2000
"""Images that are drawn at once."""


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
        self.count = count
        self.size = size
        self.seed = seed
        self.classes = classes  # type: ignore[assignment]  # the argument; shapes have no names
        self.num_classes = classes
        self._num_shapes = classes

    def _load(self) -> tuple[Tensor, Tensor]:
        classes = draw_classes(self._num_shapes, generator(self.seed, "shape classes"))
        random = generator(self.seed, "shape images", int(self.train))
        num_images = self.count if self.train else self.count // 10
        labels = torch.randint(0, self._num_shapes, (num_images,), generator=random)
        chunks = []
        for chunk_labels in torch.split(labels, CHUNK_SIZE):
            chunks.append(draw_images(classes.of(chunk_labels), self.size, random))
        return torch.cat(chunks), labels


@dataclass(frozen=True)
class ShapeClasses:
    """What the images of each class have in common. Unless stated otherwise a tensor is (C, 1, 1) for C classes.

    Attributes:
        outer: Coefficients of the outer contour (C, 2, waves), cosines before sines.
        inner: Coefficients of the inner contour (C, 2, waves).
        inner_size: Size of the inner contour relative to the outer one.
        tone: Brightness of the inner part relative to the outer one.
        stretch: Width relative to height.
        frequency: Frequency of the stripes.
        direction: Direction of the stripes, in radians.
        depth: Depth of the stripes; 0 without stripes.
    """

    outer: Tensor
    inner: Tensor
    inner_size: Tensor
    tone: Tensor
    stretch: Tensor
    frequency: Tensor
    direction: Tensor
    depth: Tensor

    def of(self, labels: Tensor) -> "ShapeClasses":
        """Return the same for images with these labels (B,), in place of C classes."""
        return ShapeClasses(
            outer=self.outer[labels],
            inner=self.inner[labels],
            inner_size=self.inner_size[labels],
            tone=self.tone[labels],
            stretch=self.stretch[labels],
            frequency=self.frequency[labels],
            direction=self.direction[labels],
            depth=self.depth[labels],
        )


def draw_classes(num_classes: int, random: torch.Generator) -> ShapeClasses:
    """Draw the classes. The order of the draws decides which shapes a seed stands for."""
    spread = 0.35 / torch.arange(1, WAVES + 1).sqrt()
    contours = torch.randn(2, num_classes, 2, WAVES, generator=random) * spread
    inner_size = _uniform(num_classes, 0.25, 0.75, random)
    tone = _uniform(num_classes, -0.6, 0.6, random)
    stretch = _uniform(num_classes, -0.35, 0.35, random).exp()
    frequency = _uniform(num_classes, 2, 12, random)
    direction = _uniform(num_classes, 0, math.pi, random)
    depth = _uniform(num_classes, 0, 0.5, random)
    has_stripes = _uniform(num_classes, 0, 1, random) < 0.7
    return ShapeClasses(
        outer=contours[0],
        inner=contours[1],
        inner_size=inner_size,
        tone=tone,
        stretch=stretch,
        frequency=frequency,
        direction=direction,
        depth=depth * has_stripes,
    )


def draw_images(classes: ShapeClasses, size: int, random: torch.Generator) -> Tensor:
    """Draw an image of each entry of ``classes``.

    Args:
        classes: Classes of the B images.
        size: Height and width of the images, in pixels.
        random: Source of what differs between images of a class. The order of the draws decides the images.

    Returns:
        Images (B, 1, size, size), uint8.
    """
    count = len(classes.tone)

    # Coordinates (B, size, size) in the shape's own frame, in which its mean radius is 1.
    line = torch.linspace(-1, 1, size)
    right = line.view(1, 1, -1) - _uniform(count, -0.2, 0.2, random)
    down = line.view(1, -1, 1) - _uniform(count, -0.2, 0.2, random)
    angle = _uniform(count, -0.35, 0.35, random)
    scale = _uniform(count, 0.45, 0.8, random)
    width = scale * (0.12 * _normal(random, count, 1, 1)).exp() * classes.stretch
    height = scale * (0.12 * _normal(random, count, 1, 1)).exp() * classes.stretch**-1
    mirror = torch.where(_uniform(count, 0, 1, random) < 0.5, -1.0, 1.0)
    x = mirror * (angle.cos() * right + angle.sin() * down) / width
    y = (angle.cos() * down - angle.sin() * right) / height
    distance = (x * x + y * y).sqrt()
    theta = torch.atan2(y, x)

    # Both parts have soft edges of about a pixel.
    outer = contour(classes.outer * (1 + 0.15 * _normal(random, count, 2, WAVES)), theta)
    inner = contour(classes.inner * (1 + 0.15 * _normal(random, count, 2, WAVES)), theta) * classes.inner_size
    sharpness = 0.75 * size * scale
    outer_part = torch.sigmoid((outer - distance) * sharpness)
    inner_part = torch.sigmoid((inner - distance) * sharpness)

    along = x * classes.direction.cos() + y * classes.direction.sin()
    phase = _uniform(count, 0, 2 * math.pi, random)
    stripes = classes.depth * torch.sin(classes.frequency * along + phase)
    brightness = _uniform(count, 0.35, 0.9, random)
    gradient = _uniform(count, -0.2, 0.2, random)
    shade = brightness * (1 + stripes + classes.tone * inner_part) + gradient * y
    values = outer_part * (shade + NOISE * _normal(random, count, size, size))
    return (values.clamp(0, 1) * 255).round().byte().unsqueeze(1)


def _uniform(count: int, low: float, high: float, random: torch.Generator) -> Tensor:
    """Draw numbers (count, 1, 1) between ``low`` and ``high``."""
    return low + (high - low) * torch.rand(count, 1, 1, generator=random)


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


def contour(coefficients: Tensor, theta: Tensor) -> Tensor:
    """Return the radius of B contours: 1 + Σ_k (a_k cos kθ + b_k sin kθ), but at least :data:`SMALLEST_RADIUS`.

    Args:
        coefficients: a and b, (B, 2, waves).
        theta: Angles (B, H, W), in radians.

    >>> contour(torch.tensor([[[0.5, 0.0], [0.0, 0.0]]]), torch.tensor([[[0.0, math.pi]]])).tolist()
    [[[1.5, 0.5]]]
    """
    num_waves = coefficients.shape[-1]
    phases = theta.unsqueeze(-1) * torch.arange(1, num_waves + 1)
    cosines, sines = coefficients.unbind(1)
    even_part = torch.einsum("bhwk,bk->bhw", phases.cos(), cosines)
    odd_part = torch.einsum("bhwk,bk->bhw", phases.sin(), sines)
    return (1 + (even_part + odd_part)).clamp(min=SMALLEST_RADIUS)
