# SPDX-License-Identifier: Apache-2.0
"""Images to tensors, one at a time; normalisation and augmentation, a whole batch at a time on its device."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as vision

from perada.core.images import ImageConfig
from perada.core.states import send
from perada.data.batches.decoding import decode


def to_image(image: Any) -> Tensor:  # noqa: ANN401 - whatever a dataset gives
    """Turn one item of a dataset into a tensor: uint8 (Ch, H, W), or floating point, or int64 tokens (L,) as they are.

    PIL images become one channel if they are grey, or else three (:func:`.decode`). NumPy arrays of uint8 are (H, W)
    or (H, W, Ch).

    Raises:
        TypeError: If it is none of these.
        ValueError: If a PIL image has values that cannot be scaled.

    >>> to_image(np.zeros((4, 5, 3), dtype=np.uint8)).shape
    torch.Size([3, 4, 5])
    """
    if isinstance(image, Image.Image):
        return decode(image)
    if isinstance(image, np.ndarray):
        channels_last = image.dtype == np.uint8 and image.ndim == 3
        image = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1) if channels_last else image))
    if not isinstance(image, Tensor):
        raise TypeError(f"an image is of type {type(image).__name__}: give a tensor, an array or a PIL image")
    check_dtype(image.unsqueeze(0))
    return image.unsqueeze(0) if image.dtype == torch.uint8 and image.ndim == 2 else image


def is_tokens(images: Tensor) -> bool:
    """Whether samples are texts, and no images: sequences of whole numbers, int64."""
    return images.dtype == torch.int64


def check_dtype(images: Tensor) -> None:
    """Refuse samples (N, ...) that are neither uint8 or floating-point images, nor texts (N, L) of int64 tokens."""
    if images.dtype == torch.uint8 or images.is_floating_point() or (is_tokens(images) and images.ndim == 2):
        return
    raise TypeError(
        f"images are {images.dtype}: give uint8, or floating point that is ready for the model; only texts are int64, "
        f"tokens (L,), and these have shape {tuple(images.shape[1:])}"
    )


def resize_uint8(image: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize one uint8 image (Ch, H, W) to a square or to (height, width), bilinear with antialiasing."""
    resized: Tensor = vision.resize(image, [size, size] if isinstance(size, int) else list(size), antialias=True)
    return resized


def prepare_images(images: Tensor, image: ImageConfig | None = None, size: int | None = None) -> Tensor:
    """Make uint8 images (..., Ch, H, W) ready for the model; what is not uint8 is ready and comes back untouched.

    In this order: to [0, 1], resized to ``size`` pixels (bilinear, antialiased) unless it is None, normalised, one
    channel repeated if the model takes three: float32 (..., Ch', H', W'). ``image`` is what the backbone asks for;
    None: no change of channels, mean and standard deviation 0.5.

    >>> prepare_images(torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), size=8).unique().tolist()
    [1.0]
    """
    if images.dtype != torch.uint8:
        return images
    lead = images.shape[:-3]
    x = images.reshape(-1, *images.shape[-3:]).float().div_(255)
    if size is not None and tuple(x.shape[-2:]) != (size, size):
        x = functional.interpolate(x, (size, size), mode="bilinear", antialias=True)
    channels = x.shape[1] if image is None else image.input_size[0]
    if image is None:
        x = (x - 0.5) / 0.5
    else:
        constants = send(torch.tensor([image.mean, image.std], dtype=torch.float32), x.device)
        if channels == 1:  # a one-channel model takes the average of an RGB model's
            constants = constants.mean(1, keepdim=True)
        mean, std = constants.view(2, -1, 1, 1)
        x = (x - mean) / std
    return x.view(*lead, *x.shape[1:])


def draw_crops(count: int, flip: bool, padding: int, generator: torch.Generator) -> Tensor:
    """Draw (top, left, mirrored), integers (count, 3); the offsets count from the edge of the padded image."""
    offsets = torch.randint(0, 2 * padding + 1, (count, 2), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([offsets, mirrored * flip], dim=1)


def augment(images: Tensor, crops: Tensor, padding: int) -> Tensor:
    """Shift images (N, Ch, H, W) within a border of zeros, ``padding`` pixels wide, and mirror some, in one gather.

    ``crops`` (N, 3) are of :func:`draw_crops`.

    >>> image = torch.arange(4).view(1, 1, 2, 2)
    >>> augment(image, torch.tensor([[1, 1, 1]]), 1).tolist()  # in place, mirrored
    [[[[1, 0], [3, 2]]]]
    """
    number, channels, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4)
    crops = send(crops, images.device)
    rows = crops[:, 0, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(number, width)
    columns = crops[:, 1, None] + torch.where(crops[:, 2, None] > 0, width - 1 - columns, columns)
    which = torch.arange(number, device=images.device)[:, None, None, None]
    plane = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[which, plane, rows[:, None, :, None], columns[:, None, None, :]]
