# SPDX-License-Identifier: Apache-2.0
"""Facts about one image of a survey, each the name of a count in a block of the layout."""

import hashlib
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from perada.data.batches.transforms import MissingImageError, load_pixels, size_of_file
from perada.data.medical.dicom import DicomFrame, open_frame, stored_values, windows_in_file
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import MONOCHROME, numbers, open_source, read_dataset, text
from perada.data.medical.nifti import read_volume, slice_size
from perada.data.medical.reading import medical_kind, split_number
from perada.data.sets.manifest import ImageFiles
from perada.data.sets.masks import mask_pixels, read_mask
from perada.survey.images import SurveyedImage
from perada.survey.layout import FOREGROUND, GREYS, MISSING, NONE, OTHER, SPACINGS, WINDOWS, Layout

_NOT_MEDICAL = dict.fromkeys(("modality", "manufacturer", "spacing in mm", "window"), NONE)
"""Facts of images that have no header of a scanner."""
BITS_OF_MODES = {"1": 1, "I;16": 16, "I;16B": 16, "I;16L": 16, "I": 32}
"""Bits of Pillow's modes that have not 8."""
_DARK, _BRIGHT = 1, 99
"""Percentiles that stand for the darkest and the brightest grey of an image."""
_REASON_IN_BRACKETS = re.compile(r" (?:image|read|mask) \((.*)\)")
_WORDS_OF_REASONS = {
    "encrypted or another format": ("encrypted",),
    "no pixel data": ("no pixel data", "no image", "dicomdir"),
    "damaged or truncated": ("truncated", "damaged", "broken", "declares", "incomplete", "corrupt"),
    "mask with colours or losses": ("not a mask", "compression changes"),
    "values out of range": ("values", "scale", "nan"),
    "no image": ("identify", "not an image", "no dicom", "format"),
}
"""Words in messages of errors that tell why a file cannot be read, in the order in which they are tried."""


@dataclass(frozen=True)
class MaskFacts:
    """What is counted of a mask.

    Attributes:
        values: Values that occur in it, as they are stored.
        foreground: Share of its pixels that are not 0.
        fits: Whether it has the size of its image.
    """

    values: frozenset[int]
    foreground: float
    fits: bool = True


@dataclass(frozen=True)
class ImageFacts:
    """What is counted of an image.

    Attributes:
        names: Name of the image's count in each block that has one.
        problem: Why the image or its mask cannot be read, one of the layout's ``REASONS``; empty if it can.
        digest: Hash of its pixels as training reads them.
        is_blank: Whether it has a single grey level.
        mask: What is counted of its mask; None without one.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    digest: bytes = b""
    is_blank: bool = False
    mask: MaskFacts | None = None


def read_facts(image: SurveyedImage, layout: Layout) -> ImageFacts:
    """Read an image, and its mask if it has one."""
    try:
        prepared = image.prepare().numpy()
        is_file = bool(image.path) and isinstance(image.image_set, ImageFiles)
        names = _stored_facts(image, layout) if is_file else _facts_of_pixels(prepared, layout)
        mask = _read_mask(image)
    except (ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise many types
        return ImageFacts(problem=reason_of(error))
    grey_bins = layout.options.grey_bins
    mean = _bin_of(float(prepared.mean()) / 255, grey_bins)
    names |= {GREYS[-1]: layout.blocks[GREYS[-1]][mean]}
    if mask is not None and layout.has_masks:
        names |= {FOREGROUND: layout.blocks[FOREGROUND][_bin_of(mask.foreground, grey_bins)]}
    return ImageFacts(
        names=names,
        digest=hashlib.sha256(f"{prepared.shape} ".encode() + np.ascontiguousarray(prepared).tobytes()).digest(),
        is_blank=bool(prepared.min() == prepared.max()),
        mask=mask,
    )


def reason_of(error: Exception) -> str:
    """Return which of the layout's ``REASONS`` an error is, by its type and the words of its message.

    >>> reason_of(ValueError("damaged.png is not a readable image (image file is truncated); fix it"))
    'damaged or truncated'
    """
    if isinstance(error, MissingImageError | FileNotFoundError):
        return MISSING
    # The message begins with the file's name, and ends with a remedy, which may have any words.
    in_brackets = _REASON_IN_BRACKETS.search(str(error))
    reason = str(error) if in_brackets is None else in_brackets[1]
    reason = reason.lower()
    for name, words in _WORDS_OF_REASONS.items():
        if any(word in reason for word in words):
            return name
    return OTHER


def _stored_facts(image: SurveyedImage, layout: Layout) -> dict[str, str]:
    """Return the facts of an image's file as it is stored."""
    assert isinstance(image.image_set, ImageFiles)
    source = split_number(image.path)
    kind = medical_kind(source.file)
    if kind == "DICOM":
        return _facts_of_dicom(source.file, source.number, layout)
    if kind == "NIfTI":
        volume = read_volume(source.file)
        width, height = slice_size(volume.shape, image.image_set.medical.axis)
        facts = _size_bins(width, height, layout)
        # The range of a volume's values is not fixed by its type, so its greys are counted after preprocessing only.
        return facts | {
            "bits": _name_of_bits(volume.values.dtype),
            "modality": OTHER,
            "manufacturer": NONE,
            "spacing in mm": _name_of_spacing(min(volume.spacing)),
            "window": WINDOWS[volume.limits is None],
        }
    with Image.open(io.BytesIO(image.image_set.content(image.path))) as picture:
        load_pixels(picture)
        return _facts_of_picture(picture, image.image_set, layout)


def _facts_of_dicom(path: str, number: int | None, layout: Layout) -> dict[str, str]:
    """Return the facts of a frame of a DICOM file."""
    with open_source(path) as file:
        frame = open_frame(read_dataset(file, with_pixels=True), number)
    stored_as = frame.format
    modality = text(frame.dataset, "Modality") or NONE
    colours = stored_as.photometric
    if colours not in MONOCHROME:
        colours = "palette" if colours == "PALETTE COLOR" else "colour"
    values = stored_values(frame).astype(np.float64)
    lowest = -(2.0 ** (stored_as.bits_stored - 1)) if stored_as.is_signed else 0.0
    greys = (values - lowest) / (2.0**stored_as.bits_stored - 1)
    return {
        **_size_bins(stored_as.columns, stored_as.rows, layout),
        **_grey_bins(greys, layout),
        "bits": _name_of_bits(stored_as.bits_stored),
        "colours": colours,
        "modality": modality if modality in layout.blocks["modality"] else OTHER,
        "manufacturer": _name_of_manufacturer(text(frame.dataset, "Manufacturer"), layout),
        "spacing in mm": _spacing_of_frame(frame),
        "window": _window_of_frame(frame),
    }


def _facts_of_picture(picture: Image.Image, image_set: ImageFiles, layout: Layout) -> dict[str, str]:
    """Return the facts of a loaded picture that is no medical image."""
    values = np.asarray(picture.convert("RGB") if picture.mode not in (*BITS_OF_MODES, "L", "F") else picture)
    bits = BITS_OF_MODES.get(picture.mode, 8)
    white = float(2 ** min(bits, 16) - 1)
    if picture.mode == "F":
        white = 1.0
    if image_set.full_scale and bits > 8:
        white = float(image_set.full_scale)
    colours = "grey" if values.ndim == 2 else "colour"
    if picture.mode in ("P", "PA"):
        colours = "palette"
    elif picture.has_transparency_data:
        colours = "transparent"
    return {
        **_size_bins(*picture.size, layout),
        **_grey_bins(values / white, layout),
        "bits": "floating point" if picture.mode == "F" else _name_of_bits(bits),
        "colours": colours,
        **_NOT_MEDICAL,
    }


def _facts_of_pixels(pixels: NDArray[np.uint8], layout: Layout) -> dict[str, str]:
    """Return the facts of an image (Ch, H, W) that is no file."""
    channels, height, width = pixels.shape
    return {
        **_size_bins(width, height, layout),
        **_grey_bins(pixels / 255, layout),
        "bits": "8",
        "colours": "grey" if channels == 1 else "colour",
        **_NOT_MEDICAL,
    }


def _size_bins(width: int, height: int, layout: Layout) -> dict[str, str]:
    """Return the bins of a width and a height."""
    facts = {}
    for block, size in (("width", width), ("height", height)):
        place = int(np.searchsorted(layout.options.sizes, size, side="right"))
        facts[block] = layout.blocks[block][place]
    return facts


def _grey_bins(shares: NDArray[np.float64], layout: Layout) -> dict[str, str]:
    """Return the bins of the darkest, the median and the brightest grey, given as shares of the range."""
    percentiles = np.percentile(shares, [_DARK, 50, _BRIGHT])
    facts = {}
    for block, share in zip(GREYS, percentiles, strict=False):
        facts[block] = layout.blocks[block][_bin_of(float(share), layout.options.grey_bins)]
    return facts


def _bin_of(share: float, num_bins: int) -> int:
    """Return the number of the bin of a share; those outside 0 to 1 are in the first and the last one."""
    if not share > 0:  # NaN, too
        return 0
    return min(num_bins - 1, int(min(share, 1.0) * num_bins))


def _name_of_bits(bits: int | np.dtype[Any]) -> str:
    """Return the name of the count of a number of bits, or of a type of numbers."""
    if isinstance(bits, np.dtype):
        if bits.kind == "f":
            return "floating point"
        bits = 8 * bits.itemsize
    for name, limits in {"1": (1, 1), "8": (2, 8), "9 to 11": (9, 11), "12": (12, 12), "13 to 15": (13, 15)}.items():
        if limits[0] <= bits <= limits[1]:
            return name
    return "16" if bits == 16 else "more than 16"


def _spacing_of_frame(frame: DicomFrame) -> str:
    """Return the bin of the distance between the rows of a frame; none if its header has no valid one."""
    spacing: list[float] = []
    with suppress(MedicalImageError):
        spacing = numbers(frame.of_frame("PixelMeasuresSequence", "PixelSpacing"), "PixelSpacing")
        spacing = spacing or numbers(frame.dataset, "ImagerPixelSpacing")
    return _name_of_spacing(spacing[0]) if spacing else NONE


def _window_of_frame(frame: DicomFrame) -> str:
    """Return whether the header of a frame has a valid window, one of :data:`.WINDOWS`."""
    with suppress(MedicalImageError):
        return WINDOWS[not windows_in_file(frame)]
    return NONE


def _name_of_spacing(millimetres: float) -> str:
    """Return the bin of a distance."""
    return SPACINGS[1 + int(np.searchsorted([0.1, 0.25, 0.5, 1.0], millimetres, side="right"))]


def _name_of_manufacturer(manufacturer: str, layout: Layout) -> str:
    """Return the first listed name that is a word, or the beginning of one, in that of a manufacturer."""
    if not manufacturer:
        return NONE
    words = f" {manufacturer.lower()}"
    for name in layout.options.manufacturers:
        if re.search(rf"\b{re.escape(name.lower())}\b" if len(name) < 4 else re.escape(name.lower()), words):
            return name
    return OTHER


def _read_mask(image: SurveyedImage) -> MaskFacts | None:
    """Return what is counted of the mask of an image; None if it has none.

    Raises:
        Exception: Whatever is raised if the mask cannot be read.
    """
    if image.mask is None:
        return None
    assert isinstance(image.image_set, ImageFiles)
    medical = image.image_set.medical
    if medical_kind(split_number(image.mask).file) is not None:
        mask = read_mask(image.mask, image.path, image.image_set.size, None, medical)
        return MaskFacts(frozenset(mask.unique().tolist()), float((mask != 0).float().mean()))
    with Image.open(image.mask) as opened:
        pixels = mask_pixels(opened, image.mask)
    width, height = size_of_file(split_number(image.path).file, medical)
    return MaskFacts(
        values=frozenset(np.unique(pixels).tolist()),
        foreground=float((pixels != 0).mean()),
        fits=pixels.shape == (height, width),
    )
