# SPDX-License-Identifier: Apache-2.0
"""Changes of images that move or scale their content, for the images themselves and for targets with positions.

A point is (x, y) in pixels. The centre of the top left pixel is (0, 0), so that the number of a pixel's column and row
is its centre, and an image of W columns extends from x = −0.5 to W − 0.5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from perada.core.states import holds, to_device_async

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class ImageMoves:
    """How each of N images is shifted and mirrored: it is cut from the padded image, and then mirrored.

    Attributes:
        crops: Integers (N, 3) for each image: top and left offset from the edge of the padded image, and 1 to mirror it
            or 0.
        padding: Width in pixels of the border around an image, within which it is shifted.
        size: Height and width of the images.
    """

    crops: Tensor
    padding: int
    size: Size

    def is_mirrored(self, device: torch.device) -> Tensor:
        """Return a mask (N,) of the images that are mirrored."""
        return to_device_async(self.crops[:, 2] > 0, device)

    def move_images(self, images: Tensor, border: int = 0) -> Tensor:
        """Move images (N, Ch, H, W), with the value ``border`` where a pixel comes from outside of the image."""
        return augment(images, self.crops, self.padding, border)

    def move_masks(self, masks: Tensor, border: int) -> Tensor:
        """Move masks (N, H, W) of integers like their images.

        Args:
            masks: The masks. Their type is widened if it does not hold the border's value.
            border: Value of the pixels that come from outside of the image.
        """
        if not holds(masks.dtype, border):
            masks = masks.long()
        return self.move_images(masks.unsqueeze(1), border).squeeze(1)

    def move_points(self, points: Tensor) -> Tensor:
        """Move points (N, P, 2) with the content of their images. They may leave the image.

        >>> moves = ImageMoves(torch.tensor([[1, 0, 1]]), padding=1, size=(4, 4))  # one pixel to the right, mirrored
        >>> moves.move_points(torch.tensor([[[0.0, 2.0]]])).tolist()
        [[[2.0, 2.0]]]
        """
        _, width = self.size
        crops = to_device_async(self.crops, points.device)
        top = crops[:, 0, None]
        left = crops[:, 1, None]
        is_mirrored = self.is_mirrored(points.device).unsqueeze(1)
        x = points[..., 0] + self.padding - left
        x = torch.where(is_mirrored, width - 1 - x, x)
        y = points[..., 1] + self.padding - top
        return torch.stack([x, y], -1)


def augment(images: Tensor, crops: Tensor, padding: int, border: int = 0) -> Tensor:
    """Shift and mirror images (N, Ch, H, W) in one gather.

    Args:
        images: The images.
        crops: See :class:`ImageMoves`.
        padding: Width in pixels of the border around an image, within which it is shifted.
        border: Value of the border.

    >>> image = torch.arange(4).view(1, 1, 2, 2)
    >>> augment(image, torch.tensor([[1, 1, 1]]), 1).tolist()  # in place, mirrored
    [[[[1, 0], [3, 2]]]]
    """
    num_images, channels, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4, value=border)
    crops = to_device_async(crops, images.device)
    top = crops[:, 0, None]
    left = crops[:, 1, None]
    mirrored = crops[:, 2, None] > 0
    rows = top + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(num_images, width)
    columns = left + torch.where(mirrored, width - 1 - columns, columns)
    # All indices broadcast to (N, Ch, H, W).
    image_index = torch.arange(num_images, device=images.device)[:, None, None, None]
    channel_index = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[image_index, channel_index, rows[:, None, :, None], columns[:, None, None, :]]


def resize_masks(masks: Tensor, size: int | Size) -> Tensor:
    """Resize masks (..., H, W) of classes by nearest neighbour, to a square or to (height, width).

    >>> resize_masks(torch.tensor([[0, 1], [2, 3]]), (2, 4)).tolist()
    [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    height_and_width = (size, size) if isinstance(size, int) else size
    if tuple(masks.shape[-2:]) == height_and_width:
        return masks
    rows = _nearest_places(masks.shape[-2], height_and_width[0], masks.device)
    columns = _nearest_places(masks.shape[-1], height_and_width[1], masks.device)
    return masks.index_select(-2, rows).index_select(-1, columns)


def _nearest_places(length: int, new_length: int, device: torch.device) -> Tensor:
    """Return the pixel (new_length,) of an axis that is closest to each pixel of the resized axis.

    The centres of pixels are where the bilinear resizing of images has them. Integers are exact for every value of a
    mask, which single precision is not.
    """
    twice_the_centres = 2 * torch.arange(new_length, device=device) + 1
    return twice_the_centres * length // (2 * new_length)


def resize_points(points: Tensor, size: Size, new_size: Size) -> Tensor:
    """Scale points (..., 2) with images of ``size`` that are resized to ``new_size``, both (height, width).

    >>> resize_points(torch.tensor([0.5, 0.5]), (2, 2), (4, 8)).tolist()  # the centre stays the centre
    [3.5, 1.5]
    """
    if size == new_size:
        return points
    height, width = size
    new_height, new_width = new_size
    x = (points[..., 0] + 0.5) * (new_width / width) - 0.5
    y = (points[..., 1] + 0.5) * (new_height / height) - 0.5
    return torch.stack([x, y], -1)
