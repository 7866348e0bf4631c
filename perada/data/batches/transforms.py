# SPDX-License-Identifier: Apache-2.0
"""Images as tensors, decoded from files of any mode, and batches of them made ready for a model."""

import io
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as vision

from perada.core.checks import OptionError, check_number
from perada.core.rounds import CohortBatch, EvalBatch, ImageConfig
from perada.core.seeding import generator
from perada.core.states import to_device_async
from perada.engine.engine import real_rows

BatchT = TypeVar("BatchT", CohortBatch, dict[str, CohortBatch], EvalBatch, Tensor)
WHOLE_SCALE = 65535  # what 16 bits hold
_DEEP = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")
_TURNS = {  # by the value of EXIF's orientation; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def check_full_scale(full_scale: float | None) -> None:
    """Refuse what is not a number above zero."""
    check_number("full_scale", full_scale, gt=0, optional=True, hint="the value of white, such as 4095 of 12 bits")


def decode(image: Image.Image, mode: str | None = None, full_scale: float | None = None) -> Tensor:
    """Turn a PIL image into uint8 (Ch, H, W): one channel if it is grey, or else three.

    The image is turned upright as its EXIF or XMP metadata ask for. Grey images of 16 or 32 bits and of floating point
    are scaled so that 0 stays 0 and ``full_scale`` becomes 255. Transparent pixels are laid over white. Palettes and
    other modes become RGB. Of an image with several frames, the current one is used: the first, once it is opened.

    Args:
        image: The image, which may be opened without being loaded.
        mode: ``L`` or ``RGB`` for one or three channels, whatever the image has.
        full_scale: The value of white in grey images of more than 8 bits; by default 65535, or 1 of floating point.

    Raises:
        ValueError: If a value lies below 0 or above ``full_scale``, or is not a number.

    >>> decode(Image.fromarray(np.array([[0, 4095]], dtype=np.uint16)), full_scale=4095).tolist()
    [[[0, 255]]]
    """
    load_pixels(image)
    image = _upright(image)
    if image.mode in _DEEP:
        image = _scaled_to_8_bits(image, full_scale)
    elif image.has_transparency_data:
        image = _over_white(image)
    elif image.mode == "LAB":
        image = image.convert("RGB")  # Pillow has no direct conversion to L
    if mode is None:
        mode = "L" if image.mode in ("1", "L") else "RGB"
    pixels: Tensor = vision.pil_to_tensor(image if image.mode == mode else image.convert(mode))
    return pixels


def load_pixels(image: Image.Image) -> None:
    """Load the pixels of an opened image, even if its metadata are damaged.

    Raises:
        Exception: Whatever Pillow raises if the pixels themselves cannot be read.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        image.load()
        return
    # Pillow 13 maps an uncompressed TIFF into memory with the size that it has once it is turned, which garbles one
    # that is turned by 90 degrees. It maps no image without a file name.
    filename, image.filename = image.filename, ""
    try:
        image.load()
    except OSError:
        raise
    except Exception:
        # Pillow parses the EXIF data of a TIFF at the end of load(), when the pixels are complete and no tile is left.
        # A value of the wrong type there says nothing about the pixels.
        if image.tile:
            raise
    finally:
        image.filename = filename


def _upright(image: Image.Image) -> Image.Image:
    """Turn a loaded image as its metadata say.

    ``ImageOps.exif_transpose`` is not used: it writes the metadata anew, which fails if any field has a value of the
    wrong type, such as a text in a numeric field.
    """
    turn = _TURNS.get(_orientation(image) or 1)
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int | None:
    """The orientation that EXIF or XMP metadata give; None without one, or where it is no number."""
    # A damaged field ends the first call with one of many errors. The second returns the fields before it.
    for _ in range(2):
        with suppress(Exception):
            orientation = image.getexif().get(ExifTags.Base.Orientation)
            return orientation if isinstance(orientation, int) else None
    return None


def _over_white(image: Image.Image) -> Image.Image:
    """Lay an image with an alpha channel, or with transparent colours, over white."""
    if image.mode == "La":
        image = image.convert("LA")  # the only mode that Pillow converts it to
    layer = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def _scaled_to_8_bits(image: Image.Image, full_scale: float | None) -> Image.Image:
    """Scale a grey image of more than 8 bits, so that ``full_scale`` becomes 255; its transparent value is white."""
    values = np.asarray(image).astype(np.float64)
    white = full_scale or (1.0 if image.mode == "F" else float(WHOLE_SCALE))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        # Pillow's own conversion cuts 16 bits off at 255 before it compares.
        values[values == transparent] = white
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= white):  # NaN too
        raise ValueError(
            f"its values are from {low:g} to {high:g}, and 0 to {white:g} is expected: set full_scale to the value of "
            "white, or rescale the file"
        )
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def read_image(
    path: str | Path | IO[bytes],
    remedy: str,
    mode: str | None = None,
    full_scale: float | None = None,
    name: str | None = None,
) -> Tensor:
    """Read a picture file as :func:`decode` does.

    Messages name the file by ``name``, by default its path, and end in ``remedy``.

    Raises:
        MissingImageError: If it does not exist.
        UnreachableImageError: If the disk or the memory fails, which says nothing about the file.
        UnreadableImageError: If it is not an image, is cut short, or has values that cannot be scaled.
    """
    name = name or str(path)
    try:
        return _decode_file(path, mode, full_scale)
    except FileNotFoundError:
        raise MissingImageError(f"{name} does not exist: {remedy}") from None
    except Exception as error:  # Pillow's decoders raise many types
        problem = error
    if isinstance(path, str | Path):
        # Some decoders report an error of the disk as a damaged file. Bytes in memory tell one from the other.
        try:
            return _decode_file(io.BytesIO(Path(path).read_bytes()), mode, full_scale)
        except Exception as error:
            problem = error
    raise _unreadable(problem, name, remedy) from None


def _decode_file(file: str | Path | IO[bytes], mode: str | None, full_scale: float | None) -> Tensor:
    with Image.open(file) as image:
        return decode(image, mode, full_scale)


def decode_opened(image: Image.Image, mode: str | None = None, full_scale: float | None = None) -> Tensor:
    """Decode an image that the caller opened or made; an error names its file, if it has one.

    Raises:
        UnreachableImageError: If the disk or the memory fails.
        UnreadableImageError: If its pixels cannot be read or scaled.
    """
    try:
        return decode(image, mode, full_scale)
    except Exception as error:  # Pillow's decoders raise many types
        name = getattr(image, "filename", "") or f"an image of mode {image.mode} and size {image.size}"
        raise _unreadable(error, str(name), "fix it, or leave it out") from None


def _unreadable(error: Exception, name: str, remedy: str) -> "UnreadableImageError":
    """The error for an image that Pillow could not read, by what it raised."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        # Pillow's own OSErrors have no number; one with a number comes from the operating system.
        reason = getattr(error, "strerror", None) or type(error).__name__
        return UnreachableImageError(
            f"{name} could not be read ({reason}): check the disk and the file's permissions, and try again"
        )
    if isinstance(error, UnidentifiedImageError):
        reason = "no known image format"  # Pillow's text repeats the path, or names an object in memory
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
    return UnreadableImageError(f"{name} is not a readable image ({reason}): {remedy}")


class _OneLineError(Exception):
    """Torch makes a worker's error anew in the main process, from its traceback; its last line is the message."""

    def __init__(self, message: str) -> None:
        if "Original Traceback" in message:
            message = message.strip().rpartition("\n")[2].partition(": ")[2]
        super().__init__(message)


class UnreadableImageError(_OneLineError, ValueError):
    """A file that is not an image, or a sample that a dataset does not give, or one that is NaN."""


class UnreachableImageError(UnreadableImageError):
    """A file that the disk or the memory did not give this time, and that may be whole."""


class MissingImageError(_OneLineError, FileNotFoundError):
    """A file that is not there."""


def to_image(image: Any) -> Tensor:  # noqa: ANN401 - whatever a dataset gives
    """Turn one item of a dataset into a tensor: uint8 (Ch, H, W), or floating point, or int64 tokens (L,) as they are.

    PIL images become one channel if they are grey, or else three (:func:`.decode`). NumPy arrays of uint8 are (H, W)
    or (H, W, Ch).

    Raises:
        TypeError: If it is none of these.
        UnreadableImageError: If the pixels of a PIL image cannot be read, or have values that cannot be scaled.

    >>> to_image(np.zeros((4, 5, 3), dtype=np.uint8)).shape
    torch.Size([3, 4, 5])
    """
    if isinstance(image, Image.Image):
        return decode_opened(image)
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
        constants = to_device_async(torch.tensor([image.mean, image.std], dtype=torch.float32), x.device)
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
    crops = to_device_async(crops, images.device)
    rows = crops[:, 0, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(number, width)
    columns = crops[:, 1, None] + torch.where(crops[:, 2, None] > 0, width - 1 - columns, columns)
    which = torch.arange(number, device=images.device)[:, None, None, None]
    plane = torch.arange(channels, device=images.device)[None, :, None, None]
    return padded[which, plane, rows[:, None, :, None], columns[:, None, None, :]]


def pad(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Lay out the clients' rows as (C, B, ...), zeros at the end of the shorter ones; B is at least 1.

    >>> pad(torch.tensor([1, 2, 3]), (2, 1)).tolist()
    [[1, 2], [3, 0]]
    """
    longest = max(1, *counts)
    if min(counts) == longest:
        return rows.view(len(counts), longest, *rows.shape[1:])
    padded = rows.new_zeros(len(counts), longest, *rows.shape[1:])
    places = torch.cat([torch.arange(count) + client * longest for client, count in enumerate(counts)])
    padded.flatten(0, 1).index_copy_(0, to_device_async(places, rows.device), rows)
    return padded


@dataclass(frozen=True)
class Preparation:
    """Makes a batch ready for the model, on the device it is on.

    uint8 images are as :func:`prepare_images` makes them. Before that, cohort batches are augmented if asked for, with
    draws that depend on the seed, the round, the client, the phase and the step in it only; for private training also
    on the stream.
    Padding stays zero.

    The backbone asks for ``image``; the other options are the data module's, and the run's seed. With ``secure`` the
    images of private training are augmented by the operating system's generator instead: the draws go by an image's
    place in the batch, and whoever knew them could tell from the others whether an image is there. With
    ``augment_public`` the public images of distillation are augmented too
    (:func:`perada.data.batches.public.augment_public_images`).
    """

    image: ImageConfig | None = None
    image_size: int | None = None
    crop_padding: int = 0
    flip: bool = False
    seed: int = 0
    secure: bool = False
    augment_public: bool = False

    def __post_init__(self) -> None:
        if self.augment_public and not self.augments:
            raise OptionError(
                "augment_public=True changes nothing without flip or crop_padding: give at least one of them, or set "
                "augment_public to False",
                name="augment_public",
                value=True,
            )

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        return self.flip or self.crop_padding > 0

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse to augment what is not an image."""
        if self.augments and len(shape) != 3:
            raise ValueError(
                f"images have shape {shape}, but crop_padding and flip need (channels, height, width); leave both out"
            )

    def __call__(self, batch: BatchT) -> BatchT:
        """Prepare a cohort batch, one for each stream by name, a batch of test data, or images (B, ...)."""
        if isinstance(batch, Tensor):
            return prepare_images(batch, self.image, self.image_size)
        if isinstance(batch, EvalBatch):
            return batch._replace(x=prepare_images(batch.x, self.image, self.image_size))
        if isinstance(batch, CohortBatch):
            return self._cohort(batch)
        return {name: self._cohort(own, name) for name, own in batch.items()}

    def _cohort(self, batch: CohortBatch, stream: str | None = None) -> CohortBatch:
        if not batch.clients:
            return batch
        x = prepare_images(self._augment(batch, stream), self.image, self.image_size)
        if min(batch.counts) < x.shape[1]:
            real = real_rows(batch.counts, x.shape[1], x.device)
            x = x * real.view(*real.shape, *[1] * (x.ndim - 2))
        return batch._replace(x=x)

    def _augment(self, batch: CohortBatch, stream: str | None) -> Tensor:
        """Shift and mirror the images (C, B, Ch, H, W), as asked for.

        A client draws for its own rows alone, since the width depends on others' batches.
        """
        if not self.augments:
            return batch.x
        purpose = "augment" if stream is None else f"augment/{stream}"
        seed = secrets.randbits(256) if self.secure and stream is not None else self.seed
        sources = [generator(seed, purpose, batch.round, client, *batch.step_ids) for client in batch.clients]
        drawn = zip(batch.counts, sources, strict=True)
        own = [draw_crops(rows, self.flip, self.crop_padding, source) for rows, source in drawn]
        crops = pad(torch.cat(own), batch.counts).flatten(0, 1)
        return augment(batch.x.flatten(0, 1), crops, self.crop_padding).view_as(batch.x)
