# SPDX-License-Identifier: Apache-2.0
"""PIL images of any mode as uint8 of one or three channels: scaled, never cut off."""

from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from perada.core.checks import check_number

WHOLE_SCALE = 65535  # what 16 bits hold
_DEEP = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")


def check_full_scale(full_scale: float | None) -> None:
    """Refuse what is no number above zero."""
    check_number("full_scale", full_scale, above=0, optional=True, hint="the value of white, such as 4095 of 12 bits")


def decode(image: Image.Image, mode: str | None = None, full_scale: float | None = None) -> Tensor:
    """Turn a PIL image into uint8 (Ch, H, W): one channel if it is grey, or else three.

    Grey images of 16 or 32 bits and of floating point are scaled so that 0 stays 0 and ``full_scale`` becomes 255.
    What is transparent is laid over white. Palettes and other modes become RGB.

    Args:
        image: The image.
        mode: ``L`` or ``RGB`` for one or three channels, whatever the image has.
        full_scale: The value of white in grey images of more than 8 bits; by default 65535, or 1 of floating point.

    Raises:
        ValueError: If a value lies below 0 or above ``full_scale``, or is not a number.

    >>> decode(Image.fromarray(np.array([[0, 4095]], dtype=np.uint16)), full_scale=4095).tolist()
    [[[0, 255]]]
    """
    if image.mode in _DEEP:
        image = Image.fromarray(_scaled(np.asarray(image), image.mode, full_scale))
    elif image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), over).convert("RGB")
    mode = mode or ("L" if image.mode in ("1", "L") else "RGB")
    pixels: Tensor = vision.pil_to_tensor(image if image.mode == mode else image.convert(mode))
    return pixels


def read_image(
    path: str | Path | IO[bytes],
    remedy: str,
    mode: str | None = None,
    full_scale: float | None = None,
    name: str | None = None,
) -> Tensor:
    """Read a picture file as :func:`decode` does, turned as its EXIF data say.

    Messages name the file by ``name``, by default its path, and end in ``remedy``.

    Raises:
        MissingImageError: If it does not exist.
        UnreadableImageError: If it is no image, is cut short, or has values that cannot be scaled.
    """
    try:
        with Image.open(path) as image:
            return decode(ImageOps.exif_transpose(image), mode, full_scale)
    except FileNotFoundError:
        raise MissingImageError(f"{name or path} does not exist: {remedy}") from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises depends on the format
        reason = " ".join(str(error).split())
        raise UnreadableImageError(f"{name or path} is no image that can be read ({reason}): {remedy}") from None


def _scaled(values: np.ndarray[Any, Any], mode: str, full_scale: float | None) -> np.ndarray[Any, Any]:
    """Values from 0 to ``full_scale`` as uint8, rounded."""
    top = full_scale or (1.0 if mode == "F" else float(WHOLE_SCALE))
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= top):  # NaN too
        raise ValueError(
            f"its values are from {low:g} to {high:g}, and 0 to {top:g} is expected: set full_scale to the value of "
            "white, or rescale the file"
        )
    return np.rint(values.astype(np.float64) * (255 / top)).astype(np.uint8)


class UnreadableImageError(ValueError):
    """A file that is no image, or a broken one; the message is one line, from a worker process too."""

    def __init__(self, message: str) -> None:
        super().__init__(_without_traceback(message))


class UnreadableSampleError(ValueError):
    """A sample that a dataset does not give, or that is NaN; the message is one line, from a worker process too."""

    def __init__(self, message: str) -> None:
        super().__init__(_without_traceback(message))


class MissingImageError(FileNotFoundError):
    """A file that is not there; the message is one line, from a worker process too."""

    def __init__(self, message: str) -> None:
        super().__init__(_without_traceback(message))


def _without_traceback(message: str) -> str:
    """Torch makes a worker's error anew in the main process, from its traceback; the last line is the message."""
    return message.strip().rpartition("\n")[2].partition(": ")[2] if "Original Traceback" in message else message
