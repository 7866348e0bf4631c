# SPDX-License-Identifier: Apache-2.0
"""Decode frames of DICOM files to grey levels or colours of 8 bits, in the order of PS3.3 and PS3.4, N.2.

Stored values → modality LUT or rescale → VOI LUT or window → inversion of MONOCHROME1.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast, get_args

import numpy as np

from perada.data.medical.codestreams import check_declared_size
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import (
    BIG_ENDIAN,
    MONOCHROME,
    PIXEL_KEYWORDS,
    PixelFormat,
    integer,
    numbers,
    open_source,
    pixel_format,
    read_dataset,
    read_stored_frame,
    text,
    transfer_syntax,
)
from perada.data.medical.isolation import DECODER, DecodedFrame
from perada.data.medical.segmented_tables import expand_segments
from perada.data.medical.windows import (
    AUTO,
    AUTO_PERCENTILES,
    PRESETS,
    FloatArray,
    Function,
    GreyWindow,
    Window,
    place_in_file,
    range_window,
)

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

Values = np.ndarray[Any, np.dtype[Any]]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
_MODALITY = re.compile(r"[A-Z]{2,8}")
LARGEST_TABLE = 2**17
"""Number of different integers up to which grey levels are looked up in a table."""
_DECOMPRESS = "decompress it, for example with dcmdjpeg, dcmdjpls or gdcmconv --raw"
_PLUGINS = {
    "1.2.840.10008.1.2.5": ["pydicom"],  # RLE
    "1.2.840.10008.1.2.4.50": ["pillow"],  # JPEG baseline
    "1.2.840.10008.1.2.4.51": ["pylibjpeg", "pillow"],  # JPEG extended; only pylibjpeg-libjpeg (GPL) knows 12 bits
    "1.2.840.10008.1.2.4.57": ["gdcm"],  # JPEG lossless
    "1.2.840.10008.1.2.4.70": ["gdcm"],
    "1.2.840.10008.1.2.4.80": ["pyjpegls"],  # JPEG-LS
    "1.2.840.10008.1.2.4.81": ["pyjpegls"],
    "1.2.840.10008.1.2.4.90": ["pylibjpeg"],  # JPEG 2000
    "1.2.840.10008.1.2.4.91": ["pylibjpeg"],
    "1.2.840.10008.1.2.4.201": ["pylibjpeg"],  # HTJ2K
    "1.2.840.10008.1.2.4.202": ["pylibjpeg"],
    "1.2.840.10008.1.2.4.203": ["pylibjpeg"],
}
"""pydicom's plugins by transfer syntax. Of several that decode one, that with the fewest limits was chosen."""
_PIXELS_PER_BYTE = {"1.2.840.10008.1.2.5": 64, "1.2.840.10008.1.2.4.50": 1024}
"""Most pixels of a byte, by transfer syntax, of the decoders that withstand damaged frames: pydicom's own, and Pillow.

Two bytes of RLE are up to 128 bytes of an image, and a block of 64 pixels takes two bits of JPEG or more.
"""


@dataclass(frozen=True)
class DicomFrame:
    """A frame of a DICOM file, or its header.

    Attributes:
        dataset: The elements of the file.
        format: How its pixels are stored.
        index: Place of the frame, from 0.
    """

    dataset: "Dataset"
    format: PixelFormat
    index: int

    def of_frame(self, macro: str, keyword: str) -> "Dataset":
        """Return the dataset that has an element of the frame: the frame's own, that of all frames, or the file's.

        Args:
            macro: Sequence of the functional groups that has the element in files with several frames.
            keyword: The element.
        """
        try:
            candidates = list(self._functional_groups(macro))
            for candidate in candidates:
                if keyword in candidate:
                    return candidate
        except Exception:  # pydicom parses a sequence when it is first used
            raise MedicalImageError(f"{macro} of its header is damaged") from None
        return self.dataset

    def _functional_groups(self, macro: str) -> Iterator[Any]:
        per_frame = self.dataset.get("PerFrameFunctionalGroupsSequence") or []
        shared = self.dataset.get("SharedFunctionalGroupsSequence") or []
        groups = [*per_frame[self.index : self.index + 1], *shared[:1]]
        for group in groups:
            yield from (group.get(macro) or [])[:1]


def decode_dicom(source: str | Path | IO[bytes], frame: int | None, window: Window) -> Pixels:
    """Decode a frame of a DICOM file.

    Args:
        source: The file, or an opened one.
        frame: Number of the frame, from 1; None for the one in the middle.
        window: See :class:`.MedicalReading`.

    Returns:
        Grey levels (H, W) or colours (H, W, 3).

    Raises:
        MedicalImageError: If the file cannot be decoded.
    """
    with open_source(source) as file:
        opened, part = _read_frame(file, frame)
    if part is None:
        decoded = _decode_stored(opened)
    else:
        decoded = _decode_part(opened, part)
    if decoded.photometric in MONOCHROME:
        return _grey_levels(opened, decoded.values, window)
    if decoded.photometric == "PALETTE COLOR":
        return _palette_colours(opened, decoded.values)
    if decoded.photometric != "RGB":
        raise MedicalImageError(f"its colours are {decoded.photometric}, which was not converted", _DECOMPRESS)
    shift = opened.format.bits_stored - 8
    colours = decoded.values >> shift if shift > 0 else decoded.values
    return cast(Pixels, colours.astype(np.uint8))


def _read_frame(file: IO[bytes], frame: int | None) -> tuple[DicomFrame, bytes | None]:
    """Return a frame of a file, and its bytes if they can be read without those of the others."""
    dataset = read_dataset(file, with_pixels=False)
    # Anything that is wrong is named when the whole file is read.
    with suppress(MedicalImageError):
        stored_as = pixel_format(dataset)
        number = stored_as.num_frames // 2 + 1 if frame is None else frame
        if 1 <= number <= stored_as.num_frames:
            part = read_stored_frame(file, stored_as, number - 1)
            if part is not None:
                return DicomFrame(dataset, stored_as, number - 1), part
    file.seek(0)
    return open_frame(read_dataset(file, with_pixels=True), frame), None


def open_frame(dataset: "Dataset", frame: int | None) -> DicomFrame:
    """Return a frame of a file, by its number from 1; None for the one in the middle.

    Raises:
        MedicalImageError: If there are no pixels, or no such frame.
    """
    keywords = [keyword for keyword in PIXEL_KEYWORDS if keyword in dataset]
    if not keywords:
        raise _no_pixels_error(dataset)
    stored_as = pixel_format(dataset, keywords[0])
    number = stored_as.num_frames // 2 + 1 if frame is None else frame
    if not 1 <= number <= stored_as.num_frames:
        raise MedicalImageError(f"it has {stored_as.num_frames} frames, and none of number {number}")
    return DicomFrame(dataset, stored_as, number - 1)


def _no_pixels_error(dataset: "Dataset") -> MedicalImageError:
    """Return the error for a file without pixels, with its kind."""
    from pydicom.uid import UID_dictionary

    if "EncryptedAttributesSequence" in dataset:
        return MedicalImageError(
            "it has no pixel data, and its attributes are encrypted", "decrypt it, or leave it out"
        )
    entry = UID_dictionary.get(text(dataset, "SOPClassUID"))
    kind = f" ({entry[0]})" if entry else ""
    return MedicalImageError(f"it has no pixel data{kind}", "leave it out: it is no image")


def stored_values(frame: DicomFrame) -> Values:
    """Return the values of a frame (H, W) or (H, W, 3) as they are stored.

    Raises:
        MedicalImageError: If they are damaged.
    """
    return _decode_stored(frame).values


def _decode_stored(frame: DicomFrame) -> DecodedFrame:
    """Decode a frame as it is stored."""
    if frame.format.is_encapsulated:
        return _decompress_frame(frame)
    return _native_values(frame)


def _decode_options(frame: DicomFrame) -> dict[str, Any]:
    """Return the options of pydicom's decoders for a single frame."""
    stored_as = frame.format
    options = {
        "rows": stored_as.rows,
        "columns": stored_as.columns,
        "number_of_frames": 1,
        "samples_per_pixel": stored_as.samples,
        "bits_allocated": stored_as.bits_allocated,
        "bits_stored": stored_as.bits_stored,
        "pixel_representation": int(stored_as.is_signed),
        "photometric_interpretation": stored_as.photometric,
        "pixel_keyword": stored_as.keyword,
    }
    if stored_as.samples > 1:
        options["planar_configuration"] = int(stored_as.is_planar)
    return options


def _native_values(frame: DicomFrame) -> DecodedFrame:
    """Return the values of a frame that is not compressed."""
    stored_as = frame.format
    element = frame.dataset[stored_as.keyword]
    content = element.value
    num_bytes = (stored_as.num_frames * stored_as.frame_bits + 7) // 8
    if not isinstance(content, bytes) or len(content) < num_bytes:
        size = len(content) if isinstance(content, bytes) else 0
        raise MedicalImageError(
            f"its header declares {num_bytes} bytes of pixel data, but it has {size}; it is probably truncated",
            "fetch it again",
        )
    start = frame.index * stored_as.frame_bits
    if stored_as.bits_allocated == 1:
        bits = np.frombuffer(content, np.uint8, (start % 8 + stored_as.frame_bits + 7) // 8, start // 8)
        values = np.unpackbits(bits, bitorder="little")[start % 8 :][: stored_as.frame_bits]
        return DecodedFrame(values.reshape(stored_as.rows, stored_as.columns), stored_as.photometric)
    if stored_as.syntax == BIG_ENDIAN and stored_as.bits_allocated == 8 and element.VR == "OW":
        # Bytes are in words, whose order was swapped; frames of an odd length begin in the middle of one.
        even = content[: len(content) // 2 * 2]
        content = np.frombuffer(even, np.uint16).byteswap().tobytes()
    return _decode_part(frame, content[start // 8 : (start + stored_as.frame_bits) // 8])


def _decode_part(frame: DicomFrame, part: bytes) -> DecodedFrame:
    """Return the values of a frame that is not compressed, from its bytes."""
    from pydicom.pixels import get_decoder

    stored_as = frame.format
    # pydicom expects frames of an odd length to be padded.
    part += b"\0" * (len(part) % 2)
    options = _decode_options(frame) | {"bits_stored": stored_as.bits_allocated, "pixel_vr": "OB"}
    try:
        values, properties = get_decoder(stored_as.syntax).as_array(part, index=0, **options)
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises many types
        raise MedicalImageError(f"its pixel data do not fit its header ({type(error).__name__})") from None
    if stored_as.keyword == "PixelData":
        values = _used_bits(values, stored_as)
    return DecodedFrame(values, str(properties["photometric_interpretation"]))


def _used_bits(values: Values, stored_as: PixelFormat) -> Values:
    """Return values without the bits of their samples that are not used, which may hold overlays."""
    num_bits = 8 * values.dtype.itemsize
    below = stored_as.high_bit + 1 - stored_as.bits_stored
    above = num_bits - stored_as.high_bit - 1
    if below == 0 and above == 0:
        return values
    # The shift to the right repeats the sign of a signed type.
    return (values << above) >> (above + below)


def _decompress_frame(frame: DicomFrame) -> DecodedFrame:
    """Return the values of a compressed frame."""
    from pydicom.encaps import encapsulate, get_frame
    from pydicom.pixels import get_decoder

    stored_as = frame.format
    plugins = _PLUGINS.get(stored_as.syntax)
    if plugins is None:
        raise MedicalImageError("its transfer syntax is not supported", _DECOMPRESS)
    is_jpeg_of_12_bits = stored_as.syntax.endswith(".4.51") and stored_as.bits_stored > 8
    if is_jpeg_of_12_bits and "pylibjpeg" not in get_decoder(stored_as.syntax).available_plugins:
        raise MedicalImageError("JPEG with losses of 12 bits is not supported", "decompress it with dcmdjpeg")
    content = frame.dataset[stored_as.keyword].value
    offsets = [frame.dataset.get(name) for name in ("ExtendedOffsetTable", "ExtendedOffsetTableLengths")]
    try:
        extended = None if None in offsets else (offsets[0], offsets[1])
        compressed = get_frame(content, frame.index, extended_offsets=extended, number_of_frames=stored_as.num_frames)
    except MemoryError:
        raise
    except Exception as error:  # pydicom raises many types
        raise MedicalImageError(f"its compressed pixel data are damaged ({type(error).__name__})") from None
    if "pydicom" not in plugins:
        check_declared_size(compressed, stored_as.columns, stored_as.rows)
    options = _decode_options(frame)
    frame_bytes = stored_as.frame_bits // 8
    if stored_as.syntax not in _PIXELS_PER_BYTE:
        return DECODER.decode(compressed, stored_as.syntax, plugins, options, frame_bytes)
    if stored_as.pixels > _PIXELS_PER_BYTE[stored_as.syntax] * len(compressed):
        raise MedicalImageError(
            f"its header declares {stored_as.columns} x {stored_as.rows} pixels, which {len(compressed)} bytes of "
            "compressed pixel data cannot hold"
        )
    try:
        values, properties = get_decoder(stored_as.syntax).as_array(
            encapsulate([compressed]), index=0, decoding_plugin=plugins[0], **options
        )
    except MemoryError:
        raise
    except Exception as error:  # decoders raise many types
        raise MedicalImageError(f"its compressed pixel data are damaged ({type(error).__name__})") from None
    return DecodedFrame(values, str(properties["photometric_interpretation"]))


def _grey_levels(frame: DicomFrame, values: Values, window: Window) -> Pixels:
    """Return the grey levels of stored values."""
    if not np.isfinite(values).all():
        raise MedicalImageError("its pixels have NaN or infinity")
    is_padding = _find_padding(frame, values)
    content = values if is_padding is None else values[~is_padding]
    if not content.size:
        return np.zeros(values.shape, np.uint8)
    mapping = _GreyMapping(frame, _choose_window(frame, content, window))
    low = values.min()
    high = values.max()
    is_few = values.dtype.kind in "iu" and int(high) - int(low) < LARGEST_TABLE
    if is_few:
        table = mapping.apply(np.arange(int(low), int(high) + 1))
        levels: Pixels = table[values.astype(np.int64) - int(low)]
    else:
        levels = mapping.apply(values)
    if is_padding is not None:
        # Padding is background, also where the smallest value is white.
        levels[is_padding] = 0
    return levels


def _find_padding(frame: DicomFrame, values: Values) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return which pixels are padding (PS3.3, C.7.5.1.1.2); None if there is no such value."""
    if "PixelPaddingValue" not in frame.dataset or values.dtype.kind == "f":
        return None
    first = _padding_value(frame, "PixelPaddingValue")
    last = first
    if "PixelPaddingRangeLimit" in frame.dataset:
        last = _padding_value(frame, "PixelPaddingRangeLimit")
    is_padding = (values >= min(first, last)) & (values <= max(first, last))
    return is_padding if is_padding.any() else None


def _padding_value(frame: DicomFrame, keyword: str) -> int:
    """Return a value of padding with the sign of the pixels: some files write it with the other one."""
    value = integer(frame.dataset, keyword, -(2**31), 2**32 - 1)
    num_values = 1 << frame.format.bits_allocated
    if frame.format.is_signed and value >= num_values // 2:
        return value - num_values
    if not frame.format.is_signed and value < 0:
        return value + num_values
    return value


@dataclass(frozen=True)
class LookupTable:
    """A table of values, of a modality or VOI LUT.

    Attributes:
        entries: The values.
        first_value: Value of the first entry; lower ones have its value, and those above the last entry have its.
        bits: Bits of an entry.
    """

    entries: FloatArray
    first_value: int
    bits: int

    def apply(self, values: FloatArray) -> FloatArray:
        """Look values up."""
        places = np.clip(np.rint(values) - self.first_value, 0, len(self.entries) - 1).astype(np.int64)
        found: FloatArray = self.entries[places]
        return found


class _GreyMapping:
    """The map from stored values to grey levels."""

    def __init__(self, frame: DicomFrame, window: "GreyWindow | LookupTable") -> None:
        self._frame = frame
        self._window = window
        self._is_inverted = frame.format.photometric == "MONOCHROME1"

    def apply(self, stored: Values) -> Pixels:
        """Return grey levels of stored values of any shape."""
        values = modality_values(self._frame, stored)
        if isinstance(self._window, LookupTable):
            fraction = self._window.apply(values) / (2**self._window.bits - 1)
            fraction = np.clip(fraction, 0, 1)
        else:
            fraction = self._window.apply(values)
        if self._is_inverted:
            fraction = 1 - fraction
        levels: Pixels = np.rint(fraction * 255).astype(np.uint8)
        return levels


def modality_values(frame: DicomFrame, stored: Values) -> FloatArray:
    """Return values in the unit of the modality, such as Hounsfield units, by its table or its slope and intercept."""
    sequence = _read_sequence(frame.dataset, "ModalityLUTSequence")
    if sequence:
        return _read_table(sequence[0], frame.format.is_signed).apply(stored.astype(np.float64))
    source = frame.of_frame("PixelValueTransformationSequence", "RescaleSlope")
    slopes = numbers(source, "RescaleSlope") or [1.0]
    intercepts = numbers(source, "RescaleIntercept") or [0.0]
    if slopes[0] == 0:
        raise MedicalImageError("its RescaleSlope is 0, so that all pixels have one value")
    return stored.astype(np.float64) * slopes[0] + intercepts[0]


def _read_sequence(dataset: "Dataset", keyword: str) -> list[Any]:
    """Return the items of a sequence; none if it is missing."""
    try:
        return list(dataset.get(keyword) or [])
    except Exception:  # pydicom parses a sequence when it is first used
        raise MedicalImageError(f"{keyword} of its header is damaged") from None


def _read_table(item: "Dataset", first_is_signed: bool) -> LookupTable:
    """Read a lookup table from an item of its sequence."""
    descriptor = numbers(item, "LUTDescriptor")
    if len(descriptor) != 3:
        raise MedicalImageError("LUTDescriptor of its header is damaged")
    num_entries = int(descriptor[0]) % 2**16 or 2**16
    first = int(descriptor[1])
    if first_is_signed and first >= 2**15:
        first -= 2**16
    bits = int(descriptor[2])
    if not 8 <= bits <= 16:
        raise MedicalImageError(f"LUTDescriptor of its header has {bits} bits, not from 8 to 16")
    entries = _table_entries(item, "LUTData", num_entries)
    return LookupTable(entries, first, bits)


def _table_entries(item: "Dataset", keyword: str, num_entries: int) -> FloatArray:
    """Return the entries of a table, which are words, or bytes in pairs."""
    try:
        data = item.get(keyword)
        order = "<" if item.original_encoding[1] is not False else ">"
        if isinstance(data, bytes):
            is_bytes = len(data) < 2 * num_entries
            entries = np.frombuffer(data, np.uint8 if is_bytes else np.dtype(f"{order}u2"))
        else:
            entries = np.atleast_1d(np.asarray(data, dtype=np.int64)) % 2**16
            if len(entries) < num_entries:
                entries = np.stack([entries & 255, entries >> 8], axis=1).reshape(-1)
    except Exception:  # pydicom converts a value when it is first used
        raise MedicalImageError(f"{keyword} of its header is damaged") from None
    if len(entries) < num_entries:
        raise MedicalImageError(f"{keyword} of its header has fewer than the declared {num_entries} entries")
    return entries[:num_entries].astype(np.float64)


def _choose_window(frame: DicomFrame, pixel_values: Values, window: Window) -> GreyWindow | LookupTable:
    """Return the window of a frame.

    Args:
        frame: The frame.
        pixel_values: Its stored values without padding.
        window: The option.
    """
    if isinstance(window, tuple):
        return GreyWindow(*window)
    place = place_in_file(window)
    if place is not None:
        in_file = windows_in_file(frame)
        if in_file:
            return in_file[min(place, len(in_file) - 1)] if place == 0 else _window_at(in_file, place)
        return _full_window(frame, pixel_values)
    if window == AUTO:
        low, high = np.percentile(modality_values(frame, pixel_values), AUTO_PERCENTILES)
        return range_window(float(low), float(high))
    modality = text(frame.dataset, "Modality")
    rescale_type = text(frame.dataset, "RescaleType")
    if modality != "CT" and rescale_type != "HU":
        shown = modality if _MODALITY.fullmatch(modality) else "unknown"
        raise MedicalImageError(
            f"window={window!r} is for CT, but its modality is {shown}",
            "set window to file, auto, or [centre, width]",
        )
    return GreyWindow(*PRESETS[window])


def _window_at(in_file: list[GreyWindow | LookupTable], place: int) -> GreyWindow | LookupTable:
    """Return a window of a file by its place; raise a MedicalImageError if there are fewer."""
    if place >= len(in_file):
        raise MedicalImageError(
            f"it has {len(in_file)} windows, and none of number {place + 1}", "set window to file, auto, or a preset"
        )
    return in_file[place]


def _full_window(frame: DicomFrame, pixel_values: Values) -> GreyWindow:
    """Return the window of a file that has none: all values of up to 8 bits, and of more bits those that occur."""
    stored_as = frame.format
    if pixel_values.dtype.kind in "iu" and stored_as.bits_stored <= 8:
        tables = _read_sequence(frame.dataset, "ModalityLUTSequence")
        if tables:
            return range_window(0, 2 ** _read_table(tables[0], stored_as.is_signed).bits - 1)
        low = -(2 ** (stored_as.bits_stored - 1)) if stored_as.is_signed else 0
        pixel_values = np.array([low, low + 2**stored_as.bits_stored - 1])
    values = modality_values(frame, pixel_values)
    return range_window(float(values.min()), float(values.max()))


def windows_in_file(frame: DicomFrame) -> list[GreyWindow | LookupTable]:
    """Return the VOI tables and windows of a frame, in this order.

    Raises:
        MedicalImageError: If a width is too small for the window's function.
    """
    tables: list[GreyWindow | LookupTable] = []
    for item in _read_sequence(frame.dataset, "VOILUTSequence"):
        tables.append(_read_table(item, first_is_signed=_has_signed_modality(frame)))
    source = frame.of_frame("FrameVOILUTSequence", "WindowCenter")
    centres = numbers(source, "WindowCenter")
    widths = numbers(source, "WindowWidth")
    function = text(source, "VOILUTFunction") or "LINEAR"
    if function not in get_args(Function):
        raise MedicalImageError("its VOILUTFunction is unknown", "set window to auto, or [centre, width]")
    windows: list[GreyWindow | LookupTable] = []
    for centre, width in zip(centres, widths, strict=False):
        if width < (1 if function == "LINEAR" else 1e-12):
            raise MedicalImageError(f"its window has the width {width:g}", "set window to auto, or [centre, width]")
        windows.append(GreyWindow(centre, width, cast(Function, function)))
    return tables + windows


def _has_signed_modality(frame: DicomFrame) -> bool:
    """Return whether values after the modality's map may be negative, so that a VOI table may begin below zero."""
    extremes = np.array([-(2 ** (frame.format.bits_stored - 1)) if frame.format.is_signed else 0])
    return bool(modality_values(frame, extremes).min() < 0)


def _palette_entries(dataset: "Dataset", kind: str, num_entries: int, bits: int) -> FloatArray:
    """Return the entries of the palette of a colour."""
    if f"{kind}PaletteColorLookupTableData" in dataset:
        return _table_entries(dataset, f"{kind}PaletteColorLookupTableData", num_entries)
    segments = dataset.get(f"Segmented{kind}PaletteColorLookupTableData")
    if not isinstance(segments, bytes) or bits != 16:
        raise MedicalImageError("it has no palette, or one in segments of 8 bits", "convert it to RGB")
    order = ">" if transfer_syntax(dataset) == BIG_ENDIAN else "<"
    words = np.frombuffer(segments[: len(segments) // 2 * 2], np.dtype(f"{order}u2")).tolist()
    return np.array(expand_segments(words, num_entries), np.float64)


def _palette_colours(frame: DicomFrame, values: Values) -> Pixels:
    """Return the colours (H, W, 3) of places in a palette."""
    channels = []
    for kind in ("Red", "Green", "Blue"):
        keyword = f"{kind}PaletteColorLookupTableDescriptor"
        descriptor = numbers(frame.dataset, keyword)
        if len(descriptor) != 3 or int(descriptor[2]) not in (8, 16):
            raise MedicalImageError(f"{keyword} of its header is damaged")
        num_entries = int(descriptor[0]) % 2**16 or 2**16
        first = int(descriptor[1])
        entries = _palette_entries(frame.dataset, kind, num_entries, int(descriptor[2]))
        if int(descriptor[2]) == 16:
            entries = entries // 256
        places = np.clip(values.astype(np.int64) - first, 0, num_entries - 1)
        channels.append(entries[places].astype(np.uint8))
    return np.stack(channels, axis=-1)
