# SPDX-License-Identifier: Apache-2.0
"""Decoding of image files."""

from PIL import Image, ImageOps


def to_8_bits(image: Image.Image, mode: str) -> Image.Image:
    """Rotate an image according to its EXIF data, and convert it to grey (``L``) or colour (``RGB``).

    Raises:
        ValueError: If its values are not 8 bits, or it is transparent: the bundle does not know what becomes of these.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        raise ValueError(f"an image of mode {image.mode} has more than 8 bits; convert it to 8 bits first")
    if image.has_transparency_data:
        raise ValueError(f"an image of mode {image.mode} is transparent; remove its transparency first")
    return ImageOps.exif_transpose(image).convert(mode)
