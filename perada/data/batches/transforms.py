# SPDX-License-Identifier: Apache-2.0
"""Decode images of any mode to tensors, and prepare batches of them for a model."""

import io
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as vision

from perada.core.checks import OptionError, check_number, use_plain_numbers
from perada.core.rounds import CohortBatch, EvalBatch, ImageConfig
from perada.core.seeding import generator
from perada.core.states import to_device_async
from perada.core.text import dtype_name, value_text
from perada.data.batches.mixing import Mixing
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.reading import (
    DEFAULT_READING,
    MedicalReading,
    decode_medical,
    medical_kind,
    size_of_medical,
)
from perada.engine.engine import real_rows
from perada.tasks import Classification, Task
from perada.tasks.geometry import ImageMoves, Size

BatchT = TypeVar("BatchT", CohortBatch, dict[str, CohortBatch], EvalBatch, Tensor)
WHOLE_SCALE = 65535
"""The default value of white in grey images with integers of more than 8 bits: the largest of 16 bits."""
_DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of more than 8 bits
_TRANSPOSE_BY_ORIENTATION = {  # values of EXIF's orientation; 1 is upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def check_full_scale(full_scale: float | None) -> None:
    """Raise an OptionError unless the value is a number above zero, or None."""
    check_number(
        "full_scale", full_scale, gt=0, optional=True, hint="it is the value of white, such as 4095 for 12 bits"
    )


def decode(pil_image: Image.Image, mode: str | None = None, full_scale: float | None = None) -> Tensor:
    """Convert a PIL image to uint8 (Ch, H, W), with one channel if it is grey and three otherwise.

    Images are rotated according to their EXIF or XMP metadata. Grey images of 16 or 32 bits and of floating point are
    scaled so that 0 stays 0 and ``full_scale`` becomes 255. If 0 is white in a TIFF, by its PhotometricInterpretation,
    0 becomes 255 and ``full_scale`` becomes 0. Transparent pixels are composited onto white. Palettes and
    other modes are converted to RGB. The current frame is used, which is the first of an image that was just opened.

    Args:
        pil_image: The image. Its pixels need not be loaded.
        mode: ``L`` or ``RGB`` to force one or three channels.
        full_scale: The value of white in grey images of more than 8 bits; by default 65535, or 1 for floating point.

    Raises:
        ValueError: If a value is below 0 or above ``full_scale``, or NaN.

    >>> decode(Image.fromarray(np.array([[0, 4095]], dtype=np.uint16)), full_scale=4095).tolist()
    [[[0, 255]]]
    """
    load_pixels(pil_image)
    # Rotation returns an image without the tags of its file.
    white_is_zero = _is_white_zero(pil_image)
    _check_not_negative(pil_image)
    pil_image = upright(pil_image)
    if pil_image.mode in _DEEP_MODES:
        pil_image = _scale_to_8_bits(pil_image, full_scale, white_is_zero)
    elif pil_image.has_transparency_data:
        pil_image = _composite_on_white(pil_image)
    elif pil_image.mode == "LAB":
        pil_image = pil_image.convert("RGB")  # Pillow has no direct conversion to L
    if mode is None:
        mode = "L" if pil_image.mode in ("1", "L") else "RGB"
    if pil_image.mode != mode:
        pil_image = pil_image.convert(mode)
    pixels: Tensor = vision.pil_to_tensor(pil_image)
    return pixels


def load_pixels(pil_image: Image.Image) -> None:
    """Load the pixels of an opened image, even if its metadata is damaged.

    Raises:
        Exception: Whatever Pillow raises if the pixels themselves cannot be read.
    """
    if not isinstance(pil_image, TiffImagePlugin.TiffImageFile):
        pil_image.load()
        return
    # Pillow 13 maps an uncompressed TIFF into memory with the size that it has after its rotation, which garbles one
    # that is rotated by 90 degrees. It maps no image without a file name.
    filename = pil_image.filename
    pil_image.filename = ""
    try:
        pil_image.load()
    except OSError:
        raise
    except Exception:
        # Pillow parses the EXIF data of a TIFF at the end of load(), when the pixels are complete and no tile is left.
        # A value of the wrong type there does not affect the pixels.
        if pil_image.tile:
            raise
    finally:
        pil_image.filename = filename


def upright(pil_image: Image.Image) -> Image.Image:
    """Rotate or mirror a loaded image according to its metadata.

    ``ImageOps.exif_transpose`` is not used: it rewrites the metadata, which fails if any field has a value of the wrong
    type, such as a text in a numeric field.
    """
    transpose = _TRANSPOSE_BY_ORIENTATION.get(_read_orientation(pil_image) or 1)
    return pil_image if transpose is None else pil_image.transpose(transpose)


def upright_size(pil_image: Image.Image) -> tuple[int, int]:
    """Return width and height of an opened image after :func:`upright`. Only the pixels of a TIFF are loaded for it."""
    if isinstance(pil_image, TiffImagePlugin.TiffImageFile):
        # Pillow rotates some of them itself, at the end of load().
        load_pixels(pil_image)
    width, height = pil_image.size
    is_turned_by_90_degrees = (_read_orientation(pil_image) or 1) >= 5
    return (height, width) if is_turned_by_90_degrees else (width, height)


def size_of_file(file: str | Path | IO[bytes], medical: MedicalReading = DEFAULT_READING) -> tuple[int, int]:
    """Return width and height of an image file after the rotation in its metadata."""
    kind = medical_kind(file)
    if kind is not None:
        return size_of_medical(file, kind, medical)
    with Image.open(file) as image:
        return upright_size(image)


def _read_orientation(pil_image: Image.Image) -> int | None:
    """Return the orientation in the EXIF or XMP metadata; None if there is none or it is no integer."""
    # A damaged field makes the first call fail with one of many errors. The second returns the fields before it.
    for _ in range(2):
        with suppress(Exception):
            orientation = pil_image.getexif().get(ExifTags.Base.Orientation)
            return orientation if isinstance(orientation, int) else None
    return None


def _composite_on_white(pil_image: Image.Image) -> Image.Image:
    """Composite an image with an alpha channel, or with transparent colours, onto white."""
    if pil_image.mode == "La":
        pil_image = pil_image.convert("LA")  # the only mode that Pillow can convert La to
    layer = pil_image.convert("RGBA")
    white = Image.new("RGBA", pil_image.size, "white")
    return Image.alpha_composite(white, layer).convert("RGB")


def _is_white_zero(pil_image: Image.Image) -> bool:
    """Return whether an image is from a TIFF file whose tags say that 0 is white."""
    if not isinstance(pil_image, TiffImagePlugin.TiffImageFile):
        return False
    return bool(pil_image.tag_v2.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0)


def _check_not_negative(pil_image: Image.Image) -> None:
    """Raise a ValueError for negative values in a TIFF of signed 8 bits, which Pillow reads as unsigned."""
    if pil_image.mode != "L" or not isinstance(pil_image, TiffImagePlugin.TiffImageFile):
        return
    formats = pil_image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, ())
    if 2 not in formats:
        return
    values = np.asarray(pil_image).view(np.int8)
    if values.min() < 0:
        raise ValueError(
            f"its values are from {values.min()} to {values.max()}, but must be from 0 to 127: rescale the file"
        )


def _scale_to_8_bits(pil_image: Image.Image, full_scale: float | None, white_is_zero: bool) -> Image.Image:
    """Scale a grey image of more than 8 bits so that white becomes 255 and black 0, and transparent pixels white.

    Args:
        pil_image: The image.
        full_scale: The largest possible value; None for the default of the image's mode.
        white_is_zero: Whether white is 0 and black ``full_scale``, instead of the reverse.
    """
    values = np.asarray(pil_image).astype(np.float64)
    white = float(WHOLE_SCALE)
    if full_scale:
        white = full_scale
    elif pil_image.mode == "F":
        white = 1.0
    transparent = pil_image.info.get("transparency")
    if isinstance(transparent, int):
        # Pillow's own conversion clips 16 bits to 255 before it compares.
        values[values == transparent] = white
    low = float(values.min())
    high = float(values.max())
    in_range = low >= 0 and high <= white  # False for NaN, too
    if not in_range:
        raise ValueError(
            f"its values are from {low:g} to {high:g}, but must be from 0 to {white:g}: set full_scale to the value of "
            "white, or rescale the file"
        )
    if white_is_zero:
        # Pillow inverts such images of up to 8 bits itself, but not those of more bits.
        values = white - values
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))


def read_image(
    path: str | Path | IO[bytes],
    remedy: str,
    mode: str | None = None,
    full_scale: float | None = None,
    name: str | None = None,
    medical: MedicalReading = DEFAULT_READING,
) -> Tensor:
    """Read and decode an image file.

    Args:
        path: The file.
        remedy: What to do, for the end of messages.
        mode: See :func:`decode`.
        full_scale: See :func:`decode`.
        name: Name of the file in messages; its path by default.
        medical: How a DICOM file or a NIfTI volume is decoded.

    Raises:
        ModuleNotFoundError: If the file needs an extra that is not installed.
        MissingImageError: If the file does not exist.
        UnreachableImageError: If the disk or the memory fails, so that the file itself may be intact.
        UnreadableImageError: If the file is not an image, is truncated, or has values that cannot be scaled.
    """
    name = name or str(path)
    try:
        return _decode_file(path, mode, full_scale, medical)
    except FileNotFoundError:
        raise MissingImageError(f"{name} does not exist", remedy) from None
    except ModuleNotFoundError:
        raise
    except MedicalImageError as error:
        raise _make_unreadable_error(error, name, error.remedy or remedy) from None
    except Exception as error:  # Pillow's decoders raise many types
        problem = error
    if isinstance(path, str | Path):
        # Some decoders report a disk error as a damaged file. Reading the bytes first distinguishes the two.
        try:
            return _decode_file(io.BytesIO(Path(path).read_bytes()), mode, full_scale, medical)
        except Exception as error:
            problem = error
    raise _make_unreadable_error(problem, name, remedy) from None


def _decode_file(
    file: str | Path | IO[bytes], mode: str | None, full_scale: float | None, medical: MedicalReading
) -> Tensor:
    kind = medical_kind(file)
    if kind is not None:
        return decode(Image.fromarray(decode_medical(file, kind, medical)), mode)
    with Image.open(file) as image:
        return decode(image, mode, full_scale)


def decode_opened(pil_image: Image.Image, mode: str | None = None, full_scale: float | None = None) -> Tensor:
    """Decode an image that the caller opened or made. An error names its file, if it has one.

    Raises:
        UnreachableImageError: If the disk or the memory fails.
        UnreadableImageError: If its pixels cannot be read or scaled.
    """
    try:
        return decode(pil_image, mode, full_scale)
    except Exception as error:  # Pillow's decoders raise many types
        name = getattr(pil_image, "filename", "") or f"an image of mode {pil_image.mode} and size {pil_image.size}"
        raise _make_unreadable_error(error, str(name), "fix it, or leave it out") from None


def _make_unreadable_error(error: Exception, name: str, remedy: str) -> "UnreadableImageError":
    """Return the error for an image for which Pillow raised ``error``."""
    # Pillow's own OSErrors have no number. One with a number comes from the operating system.
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        reason = getattr(error, "strerror", None) or type(error).__name__
        return UnreachableImageError(
            f"{name} could not be read ({reason})", "check the disk and the file's permissions, and try again"
        )
    if isinstance(error, UnidentifiedImageError):
        reason = "no known image format, or a variant of one that Pillow does not read"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
    return UnreadableImageError(f"{name} is not a readable image ({reason})", remedy)


class _OneLineError(Exception):
    """An error whose message is a single line, even if it comes from a data loader's worker.

    torch recreates a worker's error in the main process with the worker's traceback as message. Its last line has the
    original message.

    Args:
        problem: What is wrong.
        remedy: What to do, which follows the problem after a colon.
        owner: Whose image it is, which precedes the problem.

    Attributes:
        problem: What is wrong, for lists of problems with one remedy for all. In the process that raised the error it
            is the argument; in another one it is the whole message.
    """

    def __init__(self, problem: str, remedy: str = "", owner: str = "") -> None:
        if "Original Traceback" in problem:
            problem = problem.strip().rpartition("\n")[2].partition(": ")[2]
        self.problem = problem
        message = f"{owner}, {problem}" if owner else problem
        if remedy:
            message = f"{message}: {remedy}"
        super().__init__(message)


class UnreadableImageError(_OneLineError, ValueError):
    """Raised if a file is not an image, a dataset cannot return a sample, or an image has NaN."""


class UnreachableImageError(UnreadableImageError):
    """Raised if the disk or the memory failed while a file was read, which may be intact."""


class MissingImageError(_OneLineError, FileNotFoundError):
    """Raised if a file does not exist."""


def to_image(value: object) -> Tensor:
    """Convert the image of a dataset's item to a tensor.

    Args:
        value: A PIL image (see :func:`.decode`), a NumPy array of uint8, (H, W) or (H, W, Ch), or a tensor.

    Returns:
        uint8 (Ch, H, W), or floating-point values or int64 tokens (L,) unchanged.

    Raises:
        TypeError: If the image is none of these.
        UnreadableImageError: If the pixels of a PIL image cannot be read, or have values that cannot be scaled.

    >>> to_image(np.zeros((4, 5, 3), dtype=np.uint8)).shape
    torch.Size([3, 4, 5])
    """
    if isinstance(value, Image.Image):
        return decode_opened(value)
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 3:
            value = value.transpose(2, 0, 1)
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        remedy = ""
        if isinstance(value, Mapping | tuple | list | Dataset):
            remedy = "; pass the images without labels, such as [image for image, _ in dataset]"
        raise TypeError(f"an image must be a tensor, an array or a PIL image, got {value_text(value)}{remedy}")
    check_dtype(value.unsqueeze(0))
    if value.dtype == torch.uint8 and value.ndim == 2:
        return value.unsqueeze(0)
    return value


def is_tokens(samples: Tensor) -> bool:
    """Return whether samples are texts, sequences of int64 tokens, instead of images."""
    return samples.dtype == torch.int64


def check_dtype(images: Tensor) -> None:
    """Check that samples (N, ...) are uint8 or floating-point images, or texts (N, L) of int64 tokens.

    Raises:
        TypeError: If they have another dtype, or tokens another shape.
    """
    if images.dtype == torch.uint8 or images.is_floating_point():
        return
    if is_tokens(images) and images.ndim == 2:
        return
    raise TypeError(
        f"images are {dtype_name(images.dtype)}: use uint8, or floating-point values prepared for the model; only "
        f"texts are int64 tokens (L,), got shape {tuple(images.shape[1:])}"
    )


def resize_uint8(image: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize one uint8 image (Ch, H, W) to a square or to (height, width), bilinear with antialiasing."""
    height_and_width = [size, size] if isinstance(size, int) else list(size)
    resized: Tensor = vision.resize(image, height_and_width, antialias=True)
    return resized


def prepare_images(images: Tensor, image_config: ImageConfig | None = None, size: int | None = None) -> Tensor:
    """Prepare uint8 images for the model: scale to [0, 1], resize, normalise, and repeat one channel if it takes three.

    Args:
        images: Images (..., Ch, H, W). If they are not uint8, they are assumed to be prepared and returned unchanged.
        image_config: Channels and normalisation of the backbone; None keeps the channels, with mean and standard
            deviation 0.5.
        size: Height and width to resize to (bilinear, antialiased); None keeps them.

    Returns:
        float32 (..., Ch', H', W').

    >>> prepare_images(torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), size=8).unique().tolist()
    [1.0]
    """
    if images.dtype != torch.uint8:
        return images
    leading_shape = images.shape[:-3]
    x = images.reshape(-1, *images.shape[-3:]).float().div_(255)
    if size is not None and tuple(x.shape[-2:]) != (size, size):
        x = functional.interpolate(x, (size, size), mode="bilinear", antialias=True)
    if image_config is None:
        x = (x - 0.5) / 0.5
    else:
        constants = to_device_async(torch.tensor([image_config.mean, image_config.std], dtype=torch.float32), x.device)
        if image_config.input_size[0] == 1:  # a one-channel model takes the average of an RGB model's
            constants = constants.mean(1, keepdim=True)
        mean, std = constants.view(2, -1, 1, 1)
        # Broadcasting repeats a single channel.
        x = (x - mean) / std
    return x.view(*leading_shape, *x.shape[1:])


def draw_crops(count: int, flip: bool, padding: int, generator: torch.Generator) -> Tensor:
    """Draw integers (count, 3): top and left offset from the edge of the padded image, and 1 to mirror it or 0."""
    offsets = torch.randint(0, 2 * padding + 1, (count, 2), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator)
    return torch.cat([offsets, mirrored * flip], dim=1)


def pad(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Stack the clients' rows to (C, B, ...), with zeros after the rows of clients with fewer than B.

    Args:
        rows: The rows of all clients (sum of the counts, ...).
        counts: Number of rows of each client. The largest is B, which is at least 1.

    >>> pad(torch.tensor([1, 2, 3]), (2, 1)).tolist()
    [[1, 2], [3, 0]]
    """
    longest = max(1, *counts)
    if min(counts) == longest:
        return rows.view(len(counts), longest, *rows.shape[1:])
    padded = rows.new_zeros(len(counts), longest, *rows.shape[1:])
    destinations = torch.cat([torch.arange(count) + client * longest for client, count in enumerate(counts)])
    padded.flatten(0, 1).index_copy_(0, to_device_async(destinations, rows.device), rows)
    return padded


@dataclass(frozen=True)
class Preparation:
    """Prepares a batch for the model, on the batch's device.

    Cohort batches are augmented first, if configured, with draws that depend only on the seed, the round, the client,
    the phase and the step in it; in private training also on the stream. Then uint8 images go through
    :func:`prepare_images`. Padding stays zero.

    Args:
        image_config: Channels and normalisation of the backbone.
        image_size: See :class:`.FederatedDataModule`.
        crop_padding: See :class:`.FederatedDataModule`.
        flip: See :class:`.FederatedDataModule`.
        seed: The run's seed.
        secure: Augment the images of private training by draws of the operating system's generator. Draws are assigned
            by an image's position in the batch: if they were known, those of the other images would reveal whether an
            image is in the batch.
        augment_public: Augment the public images of distillation, too; see
            :func:`perada.data.batches.public.augment_public_images`.
        mixing: Mixes the training images of a client after they were prepared.
        task: Mixes the targets.
        num_classes: Number of classes K.
        prepared_size: Height and width of the prepared images, to which targets with positions are scaled. It is not
            always ``image_size``: only uint8 images are resized. None keeps the targets.
        dtype: Type that floating-point images are converted to; None keeps theirs.
    """

    image_config: ImageConfig | None = None
    image_size: int | None = None
    crop_padding: int = 0
    flip: bool = False
    seed: int = 0
    secure: bool = False
    augment_public: bool = False
    mixing: Mixing = field(default_factory=Mixing)
    task: Task = field(default_factory=Classification)
    num_classes: int = 0
    prepared_size: Size | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        if self.augment_public and not self.augments:
            raise OptionError(
                "augment_public=True has no effect without flip or crop_padding: set at least one of them, or set "
                "augment_public to False",
                name="augment_public",
                value=True,
            )

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        return self.flip or self.crop_padding > 0

    @property
    def augmentations(self) -> list[str]:
        """Names of the options that change training images at random, of those that are set."""
        names = []
        if self.flip:
            names.append("flip")
        if self.crop_padding > 0:
            names.append("crop_padding")
        return names

    def without_mixing(self) -> "Preparation":
        """Return the preparation of images that are compared or scored, and not trained on."""
        return replace(self, mixing=Mixing())

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise a ValueError if samples that are not images are to be augmented."""
        if (self.augments or self.mixing.mixes) and len(shape) != 3:
            raise ValueError(
                f"images have shape {shape}, but crop_padding, flip, mixup and cutmix need (channels, height, width); "
                "leave them out"
            )

    def __call__(self, batch: BatchT) -> BatchT:
        """Prepare a cohort batch, a dict with one for each stream, a batch of test data, or images (B, ...)."""
        if isinstance(batch, Tensor):
            return self._prepare_images(batch)
        if isinstance(batch, EvalBatch):
            x = self._prepare_images(batch.x)
            return batch._replace(x=x, y=self.prepare_targets(batch.y, batch.x))
        if isinstance(batch, CohortBatch):
            return self._prepare_cohort(batch)
        return {stream: self._prepare_cohort(stream_batch, stream) for stream, stream_batch in batch.items()}

    def _prepare_images(self, images: Tensor) -> Tensor:
        """Return images (..., Ch, H, W), or texts, as the model takes them."""
        x = prepare_images(images, self.image_config, self.image_size)
        return x if self.dtype is None or not x.is_floating_point() else x.to(self.dtype)

    def _prepare_cohort(self, batch: CohortBatch, stream: str | None = None) -> CohortBatch:
        """Augment and normalise the images of a batch; rows of padding stay zero."""
        if not batch.clients:
            return batch
        batch = self._augment_batch(batch, stream)
        x = self._prepare_images(batch.x)
        y = self.prepare_targets(batch.y, batch.x)
        width = x.shape[1]
        if min(batch.counts) < width:
            # Normalisation changed the zeros of the padding.
            is_real = real_rows(batch.counts, width, x.device)
            x = x * is_real.view(*is_real.shape, *[1] * (x.ndim - 2))
        batch = batch._replace(x=x, y=y)
        if self.mixing.mixes:
            return self.mixing(batch, self.seed, self.task, self.num_classes)
        return batch

    def prepare_targets(self, targets: Tensor, images: Tensor) -> Tensor:
        """Scale targets with positions, such as masks, with their images, and return other targets as they are.

        Args:
            targets: Targets (..., *T) with the leading axes of the images.
            images: The images (..., Ch, H, W) before they are prepared. Features in their place have no size, and their
                targets were scaled with the images from which they were computed.
        """
        has_size = images.ndim >= 4
        if self.prepared_size is None or not self.task.has_positions or not has_size:
            return targets
        height, width = images.shape[-2:]
        return self.task.resized(targets, (height, width), self.prepared_size)

    def _augment_batch(self, batch: CohortBatch, stream: str | None) -> CohortBatch:
        """Shift and mirror the images (C, B, Ch, H, W) at random, if configured, and targets that move with them."""
        if not self.augments:
            return batch
        purpose = "augment"
        seed = self.seed
        if stream is not None:  # private training
            purpose = f"augment/{stream}"
            if self.secure:
                seed = secrets.randbits(256)
        crops_of_clients = []
        for client, count in zip(batch.clients, batch.counts, strict=True):
            # Draws for real rows only: the width of the batch depends on the other clients.
            source = generator(seed, purpose, batch.round, client, *batch.step_ids)
            crops_of_clients.append(draw_crops(count, self.flip, self.crop_padding, source))
        crops = pad(torch.cat(crops_of_clients), batch.counts).flatten(0, 1)
        height, width = batch.x.shape[-2:]
        moves = ImageMoves(crops, self.crop_padding, (height, width))
        x = moves.move_images(batch.x.flatten(0, 1)).view_as(batch.x)
        y = self.task.moved(batch.y.flatten(0, 1), moves).view(batch.y.shape)
        return batch._replace(x=x, y=y)
