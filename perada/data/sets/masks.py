# SPDX-License-Identifier: Apache-2.0
"""Read masks of images, which have the class of each pixel as its value."""

from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perada.core.checks import check_integer, invalid_option
from perada.core.text import abbreviated
from perada.data.batches.transforms import (
    MissingImageError,
    UnreadableImageError,
    load_pixels,
    resize_masks,
    upright,
    upright_size,
)

Pixels = np.ndarray[Any, np.dtype[np.int32]]
UNLISTED = 255
"""Value of pixels that have no class, which may occur in masks whose values are listed too."""
_REMEDY = "save the number of each pixel's class, as a grey image or one with a palette"


def check_mask_values(values: object) -> tuple[int, ...] | None:
    """Return the option ``mask_values`` as a tuple; raise an OptionError unless it lists different integers."""
    if values is None:
        return None
    expected = "a list of different integers, the value of each class in the masks, such as [0, 255]"
    if isinstance(values, str) or not isinstance(values, Sequence) or len(set(values)) < max(2, len(values)):
        raise invalid_option("mask_values", values, expected)
    for value in values:
        check_integer("mask_values", value, 0, hint="it is the value of a class in the masks")
    return tuple(values)


def read_mask(path: str, image_path: str, size: int, values: Sequence[int] | None) -> Tensor:
    """Read the file of a mask; see :func:`decode_mask`.

    Args:
        path: File of the mask.
        image_path: File of its image, which must have the same size.
        size: Height and width to resize the mask to.
        values: Value of each class in the file.

    Raises:
        MissingImageError: If a file does not exist.
        UnreadableImageError: See :func:`decode_mask`.
    """
    try:
        return decode_mask(path, image_path, size, values, path)
    except FileNotFoundError as error:
        raise MissingImageError(f"{error.filename} does not exist", "add it, or remove the other of the pair") from None


def decode_mask(
    mask: str | IO[bytes], image: str | IO[bytes], size: int, values: Sequence[int] | None, name: str
) -> Tensor:
    """Decode a mask of grey values or of a palette, whose numbers are the classes.

    Args:
        mask: Path or content of the mask.
        image: Path or content of its image, which must have the same size.
        size: Height and width to resize the mask to, by nearest neighbour.
        values: Value of each class in the mask; None for its number. 255 stays 255 unless it is listed.
        name: Name of the mask in messages.

    Returns:
        Classes int32 (size, size).

    Raises:
        FileNotFoundError: If a file does not exist.
        UnreadableImageError: If it is not a mask, has another size than the image, or a value that is not listed.
    """
    try:
        with Image.open(mask) as opened_mask:
            load_pixels(opened_mask)
            upright_mask = upright(opened_mask)
            pixels = np.array(upright_mask)
            mask_size = upright_mask.size
        with Image.open(image) as opened_image:
            # Images are rotated according to their metadata, and labelling tools show them so.
            image_size = upright_size(opened_image)
    except FileNotFoundError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableImageError(f"{name} is not a readable mask ({reason})", _REMEDY) from None
    if pixels.ndim != 2 or pixels.dtype.kind == "f":
        raise UnreadableImageError(f"{name} is not a mask: its pixels are {pixels.dtype} {pixels.shape}", _REMEDY)
    if mask_size != image_size:
        raise UnreadableImageError(
            f"{name} has {mask_size[0]} x {mask_size[1]} pixels, but its image has {image_size[0]} x {image_size[1]}",
            "save masks in the size of their images",
        )
    classes = pixels.astype(np.int32)
    if values is not None:
        classes = _number_values(classes, values, name)
    return resize_masks(torch.from_numpy(classes), size)


def _number_values(pixels: Pixels, values: Sequence[int], name: str) -> Pixels:
    """Return the place of each pixel's value in the list; raise an UnreadableImageError for others.

    Args:
        pixels: Values of the pixels.
        values: The value of each class.
        name: Name of the mask in messages.
    """
    unknown = sorted({*np.unique(pixels).tolist()} - {*values, UNLISTED})
    if unknown:
        raise UnreadableImageError(
            f"{name} has the values {abbreviated([str(value) for value in unknown])}, which mask_values does not list",
            "list them, or correct the mask",
        )
    numbers = np.full(pixels.shape, UNLISTED, dtype=np.int32)
    for number, value in enumerate(values):
        numbers[pixels == value] = number
    return numbers


def stack_masks(masks: Sequence[Tensor]) -> Tensor:
    """Stack masks (H, W) to (N, H, W), as uint8 if their values allow it."""
    stacked = torch.stack(list(masks))
    if int(stacked.max()) <= torch.iinfo(torch.uint8).max:
        return stacked.to(torch.uint8)
    return stacked
