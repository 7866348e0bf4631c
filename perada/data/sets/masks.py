# SPDX-License-Identifier: Apache-2.0
"""Read masks of images, which have the class of each pixel as its value."""

from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import torch
from PIL import Image, TiffImagePlugin
from torch import Tensor

from perada.core.checks import check_integer, invalid_option
from perada.core.text import abbreviated
from perada.data.batches.transforms import MissingImageError, UnreadableImageError, load_pixels, size_of_file, upright
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.nifti import decode_label_slice
from perada.data.medical.reading import DEFAULT_READING, MedicalReading, medical_kind, split_number
from perada.data.medical.segmentations import image_reference, read_segmentation
from perada.data.sets.label_types import stack_integers
from perada.tasks.geometry import resize_masks

Pixels = np.ndarray[Any, np.dtype[np.int64]]
UNLISTED = 255
"""Value of pixels that have no class, which may occur in masks whose values are listed too."""
REMEDY = "save the number of each pixel's class, as a grey image or one with a palette"
_LOSSY_FORMATS = {"JPEG": "JPEG", "MPO": "JPEG", "JPEG2000": "JPEG 2000"}
"""Names of Pillow's formats whose compression changes values."""
_SAMPLE_FORMAT = 339
"""TIFF's tag for the type of a sample: 1 for unsigned integers, 2 for signed ones, 3 for floats."""
_UNSIGNED = 1
_SIGNED = 2
_EXACT_IN_FLOAT32 = 2**24
"""Largest integer up to which single precision, in which Pillow stores floats, holds all integers."""


def check_mask_values(values: object) -> tuple[int, ...] | None:
    """Return the option ``mask_values`` as a tuple; raise an OptionError unless it lists different integers."""
    if values is None:
        return None
    expected = "a list of different integers, the value of each class in the masks, such as [0, 255]"
    if isinstance(values, str) or not isinstance(values, Sequence) or len(set(values)) < max(2, len(values)):
        raise invalid_option("mask_values", values, expected)
    for value in values:
        # TIFF files and arrays may have negative values.
        check_integer("mask_values", value, -(2**31), hint="it is the value of a class in the masks")
    return tuple(values)


def read_mask(
    path: str,
    image_path: str,
    size: int,
    mask_values: Sequence[int] | None,
    medical: MedicalReading = DEFAULT_READING,
    class_of_number: Mapping[int, int] | None = None,
) -> Tensor:
    """Read the file of a mask; see :func:`decode_mask`.

    Args:
        path: File of the mask.
        image_path: File of its image, which must have the same size.
        size: Height and width to resize the mask to.
        mask_values: Value of each class in the file.
        medical: How medical images are read.
        class_of_number: See :func:`decode_mask`.

    Raises:
        MissingImageError: If a file does not exist.
        UnreadableImageError: See :func:`decode_mask`.
    """
    try:
        return decode_mask(path, image_path, size, mask_values, path, medical, class_of_number)
    except FileNotFoundError as error:
        raise MissingImageError(f"{error.filename} does not exist", "add it, or remove the other of the pair") from None


def decode_mask(
    mask_source: str | IO[bytes],
    image_source: str | IO[bytes],
    size: int,
    mask_values: Sequence[int] | None,
    name: str,
    medical: MedicalReading = DEFAULT_READING,
    class_of_number: Mapping[int, int] | None = None,
) -> Tensor:
    """Decode a mask of grey values or of a palette, whose numbers are the classes.

    Args:
        mask_source: Path or content of the mask.
        image_source: Path or content of its image, which must have the same size.
        size: Height and width to resize the mask to, by nearest neighbour.
        mask_values: Value of each class in the mask; None for its number. 255 stays 255 unless it is listed.
        name: Name of the mask in messages.
        medical: How medical images are read.
        class_of_number: Class of each number in the mask, if the numbers have names; None for the numbers themselves.

    Returns:
        Classes (size, size), integers of the smallest type that holds them.

    Raises:
        FileNotFoundError: If a file does not exist.
        UnreadableImageError: If it is not a mask, has another size than the image, or a value that is not listed.
    """
    try:
        pixels = _open_mask(mask_source, image_source, name, mask_values, medical)
        # Images are rotated according to their metadata, and labelling tools show them so.
        image_size = size_of_file(image_source, medical)
    except (FileNotFoundError, ModuleNotFoundError, UnreadableImageError):
        raise
    except Exception as error:  # Pillow's decoders raise many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableImageError(f"{name} is not a readable mask ({reason})", REMEDY) from None
    height, width = pixels.shape
    if (width, height) != image_size:
        raise UnreadableImageError(
            f"{name} has {width} x {height} pixels, but its image has {image_size[0]} x {image_size[1]}",
            "save masks in the size of their images",
        )
    if mask_values is not None:
        pixels = _number_values(pixels, mask_values, name)
    elif class_of_number is not None:
        pixels = _number_segments(pixels, class_of_number, name)
    resized = resize_masks(torch.from_numpy(pixels), size)
    # Many masks are in memory together.
    return stack_integers([resized])[0]


def _open_mask(
    source: str | IO[bytes],
    image_source: str | IO[bytes],
    name: str,
    mask_values: Sequence[int] | None,
    medical: MedicalReading,
) -> Pixels:
    """Return the value int64 (H, W) of each pixel of a mask; see :func:`mask_pixels`."""
    kind = medical_kind(source)
    if kind == "DICOM":
        return _segments_of_image(source, image_source, name)
    if kind is None:
        with Image.open(source) as opened:
            return mask_pixels(opened, name, mask_values)
    number = None
    if isinstance(source, str):
        numbered = split_number(source)
        source = numbered.file
        number = numbered.number
    stored = decode_label_slice(source, number, medical.axis)
    if stored.dtype.kind == "f":
        _check_whole_numbers(stored, name)
    return stored.astype(np.int64)


def _segments_of_image(source: str | IO[bytes], image_source: str | IO[bytes], name: str) -> Pixels:
    """Return the number int64 (H, W) of the segment of each pixel of an image, from a DICOM SEG."""
    number = None
    if isinstance(image_source, str):
        numbered = split_number(image_source)
        image_source = numbered.file
        number = numbered.number
    if medical_kind(image_source) != "DICOM":
        raise UnreadableImageError(
            f"{name} is a DICOM file, but its image is none, to which it could refer", "save the mask as PNG or NIfTI"
        )
    try:
        return read_segmentation(source).mask_of(image_reference(image_source, number))
    except MedicalImageError as error:
        raise UnreadableImageError(f"{name} is not a readable mask ({error.reason})", error.remedy or REMEDY) from None


def mask_pixels(opened: Image.Image, name: str, mask_values: Sequence[int] | None = None) -> Pixels:
    """Return the value int64 (H, W) of each pixel of an opened mask, exactly as it is stored.

    Args:
        opened: The mask. Its pixels need not be loaded.
        name: Name of the mask in messages.
        mask_values: All values that the mask may have, if they are known.

    Raises:
        UnreadableImageError: If the file has several pictures or colours, values with a fraction, or was compressed
            with losses. The last is accepted if all its values are known ones.
        Exception: Whatever Pillow raises if the pixels cannot be read.
    """
    num_frames = int(getattr(opened, "n_frames", 1))
    if num_frames > 1:
        raise UnreadableImageError(
            f"{name} has {num_frames} pictures, and a mask is a single one", "save each as a mask of its own image"
        )
    load_pixels(opened)
    stored = np.asarray(upright(opened))
    lossy_format = _lossy_format(opened)
    if lossy_format and (mask_values is None or not np.isin(stored, list({*mask_values, UNLISTED})).all()):
        raise UnreadableImageError(
            f"{name} is a {lossy_format} file, whose compression changes the numbers of classes",
            "save masks without losses, as PNG, from the original annotations",
        )
    if stored.ndim != 2:
        raise UnreadableImageError(f"{name} is not a mask: its pixels are {stored.dtype} {stored.shape}", REMEDY)
    if stored.dtype.kind == "f":
        _check_whole_numbers(stored, name)
    pixels = stored.astype(np.int64)
    if isinstance(opened, TiffImagePlugin.TiffImageFile):
        return _with_sign(pixels, opened)
    return pixels


def _lossy_format(opened: Image.Image) -> str:
    """Return the name of the compression that changed a file's values; an empty string if none did."""
    if isinstance(opened, TiffImagePlugin.TiffImageFile) and "jpeg" in str(opened.info.get("compression")):
        return "TIFF with JPEG compression, a lossy"
    return _LOSSY_FORMATS.get(opened.format or "", "")


def _check_whole_numbers(stored: np.ndarray[Any, Any], name: str) -> None:
    """Raise an UnreadableImageError unless all values are integers that single precision holds exactly."""
    is_whole = (stored == np.floor(stored)) & (np.abs(stored) < _EXACT_IN_FLOAT32)
    if not is_whole.all():
        value = stored[~is_whole][0]
        raise UnreadableImageError(f"{name} has the value {value:g}, which is no number of a class", REMEDY)


def _with_sign(pixels: Pixels, opened: TiffImagePlugin.TiffImageFile) -> Pixels:
    """Return the values of a TIFF file with their own sign.

    Pillow reads signed integers of 8 bits as unsigned, and unsigned ones of 32 bits as signed.
    """
    sample_format = opened.tag_v2.get(_SAMPLE_FORMAT, (_UNSIGNED,))
    kind = sample_format[0] if isinstance(sample_format, tuple) else sample_format
    if kind == _SIGNED and opened.mode == "L":
        return pixels.astype(np.int8).astype(np.int64)
    if kind == _UNSIGNED and opened.mode == "I":
        return pixels.astype(np.uint32).astype(np.int64)
    return pixels


def _number_values(pixels: Pixels, mask_values: Sequence[int], name: str) -> Pixels:
    """Return the place of each pixel's value in the list; raise an UnreadableImageError for others.

    Args:
        pixels: Values of the pixels.
        mask_values: The value of each class.
        name: Name of the mask in messages.
    """
    listed_values = {*mask_values}
    # With more classes, 255 is the number of one of them.
    if len(mask_values) <= UNLISTED:
        listed_values.add(UNLISTED)
    unknown = sorted({*np.unique(pixels).tolist()} - listed_values)
    if unknown:
        raise UnreadableImageError(
            f"{name} has the values {abbreviated([str(value) for value in unknown])}, which mask_values does not list",
            "list them, or correct the mask",
        )
    numbers = np.full(pixels.shape, UNLISTED, dtype=np.int64)
    for number, value in enumerate(mask_values):
        numbers[pixels == value] = number
    return numbers


def _number_segments(pixels: Pixels, class_of_number: Mapping[int, int], name: str) -> Pixels:
    """Return the class of each pixel's segment; raise an UnreadableImageError for numbers without a name.

    Args:
        pixels: Numbers of the segments.
        class_of_number: The class of each number.
        name: Name of the mask in messages.
    """
    classes = np.full(pixels.shape, UNLISTED, dtype=np.int64)
    for number in np.unique(pixels).tolist():
        if number in class_of_number:
            classes[pixels == number] = class_of_number[number]
        elif number != UNLISTED:
            raise UnreadableImageError(f"{name} has the number {number}, which has no name", "name it, or correct it")
    return classes


def stack_masks(masks: Sequence[Tensor], size: int) -> Tensor:
    """Stack masks (size, size) to (N, size, size); there may be none."""
    if not masks:
        # All images of a split may be in the other one, if they are of one patient.
        return torch.empty(0, size, size, dtype=torch.uint8)
    return stack_integers(masks)
