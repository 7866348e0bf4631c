# SPDX-License-Identifier: Apache-2.0
"""Points in an image, such as landmarks of a face or of a bone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number, invalid_option, use_plain_numbers
from perada.core.states import double, to_device_async
from perada.tasks.base import SummedMetric
from perada.tasks.distance import CorrectKeypoints, MeanDistance, distances_and_known
from perada.tasks.geometry import ImageMoves, Size, resize_points
from perada.tasks.number_task import NumberTask

KeypointLoss = Literal["squared", "absolute"]
"""How the loss of an image follows from the deviations of coordinates."""
_OUTSIDE = 1.0
"""Pixels by which a coordinate may be beyond the centres of the outermost pixels, as where edges are whole numbers."""


@dataclass(frozen=True, repr=False)
class Keypoints(NumberTask):
    """P points per image, by the coordinates (x, y) of each.

    Targets are floats (N, 2 P): x and y of the first point, then those of the second, and so on. They are in pixels of
    the image as it is stored. The centre of the top left pixel is (0, 0). NaN marks a point that is unknown, for
    example hidden: losses and scores leave it out.

    The network has 2 P outputs z. In an image of W columns, x = (W − 1) / 2 + z W / 2, and y likewise, so that outputs
    between −1 and 1 are points inside the image. The loss is the mean over the known coordinates of the deviations of
    z, ``squared`` or ``absolute``. An image without a known point has a loss of 0.

    Points move with their image: ``flip`` mirrors them, ``crop_padding`` shifts them, and ``image_size`` scales them.
    A point that is shifted out of its image becomes unknown.

    Args:
        image_size: Height and width of the images that the network gets: a number for squares, or both.
        loss_function: Loss of a deviation.
        mirrored: Number of the point that each point becomes in a mirrored image, such as [1, 0, 2] for the left eye,
            the right eye and the nose. Needed for ``flip``.
        pck_threshold: Largest distance, in pixels of the images that the network gets, at which a point counts as
            correct in the metric ``pck``.

    Raises:
        OptionError: If an option is out of range.

    >>> Keypoints(image_size=65).predicted(torch.tensor([[0.0, 0.0, 0.5, -0.5]]))
    tensor([[32.0000, 32.0000, 48.2500, 15.7500]], dtype=torch.float64)
    """

    has_positions: ClassVar[bool] = True
    default_metric: ClassVar[str] = "mean_distance"
    labels_per_image: ClassVar[str] = "coordinates (x, y, x, y, ...) of keypoints"

    image_size: int | Sequence[int]
    loss_function: KeypointLoss = "squared"
    mirrored: Sequence[int] | None = None
    pck_threshold: float = 5.0

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        # Tuples, since tasks with the same options must be equal.
        object.__setattr__(self, "image_size", _checked_size(self.image_size))
        object.__setattr__(self, "mirrored", _checked_order(self.mirrored))
        check_choice("loss_function", self.loss_function, get_args(KeypointLoss))
        check_number("pck_threshold", self.pck_threshold, gt=0)

    @property
    def _network_image_size(self) -> Size:
        """Height and width of the images that the network gets."""
        if isinstance(self.image_size, int):
            return self.image_size, self.image_size
        height, width = self.image_size
        return height, width

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if the outputs are not pairs, or ``mirrored`` does not match the number of points."""
        if num_classes % 2:
            raise OptionError(
                f"num_classes is {num_classes}, but keypoints have two coordinates each; give twice the number of "
                "points",
                name="num_classes",
                value=num_classes,
            )
        if self.mirrored is not None and len(self.mirrored) != num_classes // 2:
            raise invalid_option("mirrored", self.mirrored, f"a list of {num_classes // 2} numbers, one for each point")

    def check_augmentation(self, options: Sequence[str]) -> None:
        """Raise an OptionError if images are mirrored, and it is unknown which point becomes which."""
        if "flip" in options and self.mirrored is None:
            raise OptionError(
                "flip=True mirrors images, in which a left eye becomes a right one: set mirrored of the task Keypoints "
                "to the number that each point has then, such as [0, 1, 2] if none changes, or leave flip out",
                name="flip",
                value=True,
            )

    def moved(self, targets: Tensor, moves: ImageMoves) -> Tensor:
        """Move points (N, 2 P) with their images; those that leave the image are unknown."""
        points = moves.move_points(_points_of(targets))
        if self.mirrored is not None:
            is_mirrored = moves.is_mirrored(targets.device)
            order = to_device_async(torch.tensor(self.mirrored), targets.device)
            points = torch.where(is_mirrored[:, None, None], points[:, order], points)
        height, width = moves.size
        x = points[..., 0]
        y = points[..., 1]
        is_inside = (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)
        return points.where(is_inside.unsqueeze(-1), torch.nan).flatten(-2)

    def resized(self, targets: Tensor, size: Size, new_size: Size) -> Tensor:
        """Scale points (..., 2 P) with their images."""
        return resize_points(_points_of(targets), size, new_size).flatten(-2)

    def in_own_pixels(self, predictions: Tensor, prepared_size: Size, own_sizes: Sequence[Size]) -> Tensor:
        """Scale predicted points (N, 2 P) to the sizes of the images that were passed."""
        rows = [self.resized(row, prepared_size, size) for row, size in zip(predictions, own_sizes, strict=True)]
        return torch.stack(rows)

    def check_positions(self, targets: Tensor, size: Size) -> None:
        """Raise a ValueError if a known point (N, 2 P) is outside of its image."""
        height, width = size
        points = _points_of(targets)
        limits = torch.tensor([width, height], device=targets.device) - 1 + _OUTSIDE
        # Comparisons with NaN are false.
        is_outside = ((points < -_OUTSIDE) | (points > limits)).any(-1)
        if is_outside.any():
            x, y = points[is_outside][0].tolist()
            raise ValueError(
                f"the keypoint ({x:g}, {y:g}) is outside of its image of {height} × {width} pixels; give coordinates "
                "(x, y) in pixels of the image, and NaN for points that are not in it"
            )

    def check_prepared_size(self, size: Size) -> None:
        """Raise an OptionError if ``image_size`` is not the size of the images that the network gets."""
        if size != self._network_image_size:
            height, width = size
            needed = height if height == width else [height, width]
            raise OptionError(
                f"image_size={self.image_size} of the task Keypoints is not the size of the images, which are "
                f"{height} × {width} pixels when the network gets them; set image_size={needed} of the task, or resize "
                "the images with image_size of the data",
                name="image_size",
                value=self.image_size,
            )

    def known(self, targets: Tensor) -> Tensor:
        """Return a mask (N, 2 P) that is false for both coordinates of an unknown point.

        >>> Keypoints(8).known(torch.tensor([[1.0, torch.nan, 2.0, 3.0]])).tolist()
        [[False, False, True, True]]
        """
        is_known = _points_of(targets).isfinite().all(-1)
        return is_known.repeat_interleave(2, -1)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss (N,) of each image from outputs (N, 2 P).

        >>> Keypoints(8).loss(torch.tensor([[0.0, 0.5]]), torch.tensor([[3.5, 3.5]])).tolist()
        [0.125]
        """
        is_known = self.known(targets)
        deviations = self._compute_deviations(logits, targets)
        losses = deviations.square() if self.loss_function == "squared" else deviations.abs()
        return losses.sum(-1) / is_known.sum(-1).clamp(min=1)

    def _compute_deviations(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return outputs − standardised targets (N, 2 P), 0 where a point is unknown."""
        is_known = self.known(targets)
        center, half = self._center_and_half(logits, targets.shape[-1] // 2)
        standardized = (targets.where(is_known, 0).to(logits.dtype) - center) / half
        return (logits - standardized).where(is_known, 0)

    def _center_and_half(self, values: Tensor, keypoints: int) -> tuple[Tensor, Tensor]:
        """Return the centre of an image, and half its size, for each coordinate (2 P,), as values are."""
        height, width = self._network_image_size
        center = torch.tensor([(width - 1) / 2, (height - 1) / 2], dtype=values.dtype)
        half = torch.tensor([width / 2, height / 2], dtype=values.dtype)
        return (
            to_device_async(center.repeat(keypoints), values.device),
            to_device_async(half.repeat(keypoints), values.device),
        )

    def predictions(self, logits: Tensor) -> Tensor:
        """Return coordinates (..., 2 P) in pixels of the images that the network gets."""
        center, half = self._center_and_half(logits, logits.shape[-1] // 2)
        return center + half * logits

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the predictions (..., 2 P), in double precision where the device supports it."""
        return self.predictions(double(logits))

    def error_rates(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean distance (N,) of the known points, in half the longer side of the image and at most 1."""
        distances, is_known = distances_and_known(self.predictions(logits), targets)
        mean_distances = distances.sum(-1) / is_known.sum(-1).clamp(min=1)
        return (2 * mean_distances / max(self._network_image_size)).clamp(max=1)

    def out_of_range(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return the coordinates that are infinite; NaN marks a point that is unknown."""
        return targets[targets.isinf()]

    def describe_range(self, num_classes: int) -> str:
        """Describe which numbers are valid."""
        return "finite numbers and NaN"

    def count_classes(self, targets: Tensor) -> int:
        """Return the number 2 P of coordinates per image."""
        return targets.shape[1]

    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether there is a vector of 2 P coordinates per image."""
        if targets.ndim != 2 or targets.shape[1] % 2 or not targets.is_floating_point():
            return False
        return num_classes in (None, targets.shape[1])

    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets."""
        return f"vectors of {num_classes} numbers, x and y of {num_classes // 2} points"

    def summed_metrics(self, num_classes: int) -> Mapping[str, SummedMetric]:
        """Return the mean distance and the share of correct keypoints, as means over keypoints and by keypoint."""
        num_keypoints = num_classes // 2
        return {
            "mean_distance": MeanDistance(num_keypoints),
            "mean_distance_per_keypoint": MeanDistance(num_keypoints, per_keypoint=True),
            "pck": CorrectKeypoints(num_keypoints, threshold=self.pck_threshold),
            "pck_per_keypoint": CorrectKeypoints(num_keypoints, per_keypoint=True, threshold=self.pck_threshold),
        }


def _points_of(targets: Tensor) -> Tensor:
    """Return coordinates (..., 2 P) as points (..., P, 2)."""
    return targets.reshape(*targets.shape[:-1], -1, 2)


def _checked_size(size: object) -> int | tuple[int, int]:
    """Return the value of ``image_size`` as a number or two; raise an OptionError otherwise."""
    if isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2:
        height, width = size
        check_integer("image_size", height)
        check_integer("image_size", width)
        return int(height), int(width)
    check_integer("image_size", size, hint="it is a side of squares, or a list of height and width")
    assert isinstance(size, int)
    return size


def _checked_order(order: object) -> tuple[int, ...] | None:
    """Return the value of ``mirrored`` as a tuple or None; raise an OptionError unless it is its own inverse."""
    if order is None:
        return None
    valid = "the number of the point that each point becomes, such as [1, 0, 2]"
    if isinstance(order, str) or not isinstance(order, Sequence):
        raise invalid_option("mirrored", order, valid)
    for number in order:
        check_integer("mirrored", number, 0, le=len(order) - 1, hint="points are numbered from 0")
    numbers = tuple(int(number) for number in order)
    for point, partner in enumerate(numbers):
        if numbers[partner] != point:
            raise invalid_option(
                "mirrored",
                order,
                valid,
                hint=f"point {point} becomes point {partner}, but point {partner} becomes point {numbers[partner]}",
            )
    return numbers
