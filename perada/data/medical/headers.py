# SPDX-License-Identifier: Apache-2.0
"""Headers of DICOM files: only the elements that perada uses are parsed, so that no name of a patient is ever read."""

import io
import logging
import re
import struct
import warnings
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from perada.core.checks import installed
from perada.data.medical.errors import MedicalImageError

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PREAMBLE = 128
MAGIC = b"DICM"
PIXEL_KEYWORDS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
LARGEST_FRAME = 2 * 89_478_485
"""Pixels of a frame, at most; the limit of Pillow for other images."""
LARGEST_INFLATED = 2**30
"""Bytes of a deflated file after inflation, at most."""
_DIRECTORY_CLASS = re.compile(rb"1\.2\.840\.10008\.1\.3\.10(?![.\d])")
_DEFLATED = "1.2.840.10008.1.2.1.99"
_NO_PIXELS_REMEDY = "leave it out: it is no image"
_HEADER_KEYWORDS = (
    "SpecificCharacterSet",
    "SOPClassUID",
    "Modality",
    "Manufacturer",
    "ManufacturerModelName",
    "EncryptedAttributesSequence",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PlanarConfiguration",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "PixelSpacing",
    "ImagerPixelSpacing",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "PixelPaddingValue",
    "PixelPaddingRangeLimit",
    "RescaleIntercept",
    "RescaleSlope",
    "RescaleType",
    "ModalityLUTSequence",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "VOILUTSequence",
    "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
)
_PALETTE_KEYWORDS = tuple(
    f"{kind}PaletteColorLookupTable{part}" for kind in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")
) + tuple(f"Segmented{kind}PaletteColorLookupTableData" for kind in ("Red", "Green", "Blue"))
UID_KEYWORDS = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID")
_IDENTITY_KEYWORDS = ("IssuerOfPatientID", "PatientID", "AccessionNumber", *UID_KEYWORDS)
_EXTENDED_OFFSETS = ("ExtendedOffsetTable", "ExtendedOffsetTableLengths")


def is_dicom(beginning: bytes) -> bool:
    """Return whether the first bytes of a file are those of a DICOM file, with or without the preamble.

    >>> is_dicom(bytes(128) + b"DICM"), is_dicom(b"PNG")
    (True, False)
    """
    if beginning[PREAMBLE : PREAMBLE + 4] == MAGIC:
        return True
    if len(beginning) < 8:
        return False
    # Without the preamble a file begins with an element of the group 0002 or 0008, whose length is small.
    group, element = struct.unpack("<HH", beginning[:4])
    if group not in (2, 8) or element > 0x70:
        return False
    explicit = re.fullmatch(rb"[A-Z]{2}", beginning[4:6]) is not None
    return explicit or int.from_bytes(beginning[4:8], "little") <= 64


def is_directory(beginning: bytes) -> bool:
    """Return whether the first bytes of a file are those of a DICOMDIR, which lists other files."""
    return beginning[PREAMBLE : PREAMBLE + 4] == MAGIC and _DIRECTORY_CLASS.search(beginning) is not None


class _BoundedFile(io.RawIOBase):
    """A file whose reads never ask for more bytes than it has: Python would first reserve the memory for them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        position = file.tell()
        self._size = file.seek(0, io.SEEK_END)
        file.seek(position)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._file.tell(), io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            # The operating system's error would look like one of the disk.
            raise ValueError("a place before the beginning of the file")
        return self._file.seek(start + offset)

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._size - self._file.tell())
        return self._file.read(remaining if size is None or size < 0 else min(size, remaining))


def _configure_pydicom() -> Any:  # noqa: ANN401  # a module
    """Import pydicom, and keep it from quoting values of files, which may identify patients, in warnings and logs."""
    pydicom = installed("pydicom", "a DICOM file", "medical")
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    own_filter = ("ignore", None, Warning, re.compile("pydicom"), 0)
    if own_filter not in warnings.filters:
        warnings.filterwarnings("ignore", module="pydicom")
    return pydicom


def read_dataset(
    file: IO[bytes], with_pixels: bool, with_identity: bool = False, more_keywords: tuple[str, ...] = ()
) -> "Dataset":
    """Read the elements of a DICOM file that perada uses.

    Args:
        file: The file, at its beginning.
        with_pixels: Whether to read the pixel data, too. Without them the file is then at their element.
        with_identity: Whether to read the elements that identify the patient, the study and the image.
        more_keywords: Further elements to read.

    Raises:
        MedicalImageError: If it is not a DICOM file, or damaged.
    """
    pydicom = _configure_pydicom()
    beginning = file.read(2048)
    file.seek(0)
    if not is_dicom(beginning):
        raise MedicalImageError("it is no DICOM file; it may be encrypted, or have another format")
    if is_directory(beginning):
        raise MedicalImageError("it is a DICOMDIR, a list of other files", _NO_PIXELS_REMEDY)
    keywords: tuple[str, ...] = (*_HEADER_KEYWORDS, *_PALETTE_KEYWORDS)
    if with_pixels:
        keywords += (*_EXTENDED_OFFSETS, *PIXEL_KEYWORDS)
    if with_identity:
        keywords += _IDENTITY_KEYWORDS
    keywords += more_keywords
    try:
        _check_inflated_size(file, beginning)
        return pydicom.dcmread(
            cast(BinaryIO, _BoundedFile(file)), force=True, stop_before_pixels=not with_pixels, specific_tags=keywords
        )
    except MedicalImageError:
        raise
    except MemoryError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise MedicalImageError(f"its header is damaged or truncated ({type(error).__name__})") from None
    except Exception as error:  # pydicom raises many types, whose texts may quote values
        raise MedicalImageError(f"its header is damaged or truncated ({type(error).__name__})") from None


def _check_inflated_size(file: IO[bytes], beginning: bytes) -> None:
    """Raise a MedicalImageError for a deflated file that is damaged or becomes very large; pydicom sets no limit."""
    if _DEFLATED.encode() not in beginning:
        return
    # The first element of the file is the length of the others of its group: tag, VR, length and value of 4 bytes.
    start = PREAMBLE + len(MAGIC)
    if beginning[start : start + 8] != b"\x02\x00\x00\x00UL\x04\x00":
        raise MedicalImageError("its header is damaged (no length of the group 0002)")
    length = int.from_bytes(beginning[start + 8 : start + 12], "little")
    file.seek(start + 12 + length)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    total = 0
    while not inflater.eof:
        chunk = inflater.unconsumed_tail or file.read(2**20)
        if not chunk:
            break
        total += len(inflater.decompress(chunk, 2**24))
        if total > LARGEST_INFLATED:
            raise MedicalImageError(f"it inflates to more than {LARGEST_INFLATED >> 20} MiB")
    file.seek(0)


def open_source(source: str | Path | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """Open a file for a ``with`` statement, or return an opened one at its beginning, which stays open."""
    if isinstance(source, str | Path):
        return open(source, "rb")
    source.seek(0)
    return nullcontext(source)


@dataclass(frozen=True)
class PixelFormat:
    """How the pixels of a file are stored.

    Attributes:
        rows: Height.
        columns: Width.
        samples: 1, or 3 for colours.
        bits_allocated: Bits of a sample in the file.
        bits_stored: Bits of it that are used.
        high_bit: Place of the highest of these.
        is_signed: Whether samples are signed.
        photometric: Photometric interpretation.
        is_planar: Whether the samples of a colour are stored together.
        num_frames: Number of frames.
        keyword: Element of the pixels.
        syntax: UID of the transfer syntax.
    """

    rows: int
    columns: int
    samples: int
    bits_allocated: int
    bits_stored: int
    high_bit: int
    is_signed: bool
    photometric: str
    is_planar: bool
    num_frames: int
    keyword: str
    syntax: str

    @property
    def pixels(self) -> int:
        """Pixels of a frame."""
        return self.rows * self.columns

    @property
    def frame_bits(self) -> int:
        """Bits of a frame without compression."""
        if self.photometric == "YBR_FULL_422" and not self.is_encapsulated:
            return self.pixels * 2 * self.bits_allocated
        return self.pixels * self.samples * self.bits_allocated

    @property
    def is_encapsulated(self) -> bool:
        """Whether frames are compressed."""
        return self.syntax not in NATIVE_SYNTAXES


NATIVE_SYNTAXES = (
    "1.2.840.10008.1.2",  # implicit, little endian
    "1.2.840.10008.1.2.1",
    "1.2.840.10008.1.2.1.99",  # deflated
    "1.2.840.10008.1.2.2",  # big endian
)
BIG_ENDIAN = "1.2.840.10008.1.2.2"
_UNDEFINED_LENGTH = 0xFFFFFFFF


def read_stored_frame(file: IO[bytes], stored_as: PixelFormat, index: int) -> bytes | None:
    """Read the bytes of one frame, so that the others need not be read, nor the header a second time.

    Args:
        file: A file at the element of its pixel data.
        stored_as: How its pixels are stored, without compression.
        index: Place of the frame, from 0.

    Returns:
        The bytes; None if the element is none of the common ones or too short, which reading all of it will tell.
    """
    is_plain = stored_as.syntax in (*NATIVE_SYNTAXES[:2], BIG_ENDIAN) and stored_as.frame_bits % 16 == 0
    if not is_plain:
        return None
    order = ">" if stored_as.syntax == BIG_ENDIAN else "<"
    is_implicit = stored_as.syntax == NATIVE_SYNTAXES[0]
    element = file.read(8 if is_implicit else 12)
    if element[:4] != struct.pack(f"{order}HH", 0x7FE0, 0x0010) or len(element) < 8:
        return None
    is_swapped = order == ">" and stored_as.bits_allocated == 8
    if is_swapped or (not is_implicit and element[4:6] not in (b"OB", b"OW")):
        return None
    (length,) = struct.unpack(f"{order}I", element[-4:])
    frame_bytes = stored_as.frame_bits // 8
    if length == _UNDEFINED_LENGTH or stored_as.num_frames * frame_bytes > length:
        return None
    start = file.tell()
    if file.seek(0, io.SEEK_END) < start + stored_as.num_frames * frame_bytes:
        return None
    file.seek(start + index * frame_bytes)
    return file.read(frame_bytes)


def pixel_format(dataset: "Dataset", keyword: str = "PixelData") -> PixelFormat:
    """Return how pixels are stored, after checking that all numbers are possible.

    Raises:
        MedicalImageError: If an element is missing or impossible.
    """
    bits_allocated = integer(dataset, "BitsAllocated", 1, 64)
    if bits_allocated not in (1, 8, 16, 32, 64):
        raise MedicalImageError(f"it has {bits_allocated} bits per sample, not 1, 8, 16 or 32")
    bits_stored = integer(dataset, "BitsStored", 1, bits_allocated, default=bits_allocated)
    high_bit = integer(dataset, "HighBit", bits_stored - 1, bits_allocated - 1, default=bits_stored - 1)
    samples = integer(dataset, "SamplesPerPixel", 1, 3, default=1)
    photometric = text(dataset, "PhotometricInterpretation")
    supported = MONOCHROME + COLOURS if samples == 1 else COLOURS
    if photometric not in supported or (photometric == "PALETTE COLOR") != (samples == 1 and photometric in COLOURS):
        shown = photometric if photometric in MONOCHROME + COLOURS else "another"
        raise MedicalImageError(f"its photometric interpretation is {shown} with {samples} samples per pixel")
    rows = integer(dataset, "Rows", 1, 65535)
    columns = integer(dataset, "Columns", 1, 65535)
    if rows * columns > LARGEST_FRAME:
        raise MedicalImageError(f"it declares {columns} x {rows} pixels, more than {LARGEST_FRAME}")
    return PixelFormat(
        rows=rows,
        columns=columns,
        samples=samples,
        bits_allocated=bits_allocated,
        bits_stored=bits_stored,
        high_bit=high_bit,
        is_signed=integer(dataset, "PixelRepresentation", 0, 1, default=0) == 1,
        photometric=photometric,
        is_planar=samples > 1 and integer(dataset, "PlanarConfiguration", 0, 1, default=0) == 1,
        num_frames=integer(dataset, "NumberOfFrames", 1, 2**31 - 1, default=1),
        keyword=keyword,
        syntax=transfer_syntax(dataset),
    )


MONOCHROME = ("MONOCHROME1", "MONOCHROME2")
COLOURS = ("RGB", "PALETTE COLOR", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")


def transfer_syntax(dataset: "Dataset") -> str:
    """Return the UID of the transfer syntax; that of a file without one follows from how it was parsed."""
    declared = getattr(dataset, "file_meta", {}).get("TransferSyntaxUID")
    if declared:
        return str.__str__(declared)
    is_implicit, is_little_endian = dataset.original_encoding
    if not is_little_endian:
        return BIG_ENDIAN
    return NATIVE_SYNTAXES[0] if is_implicit else NATIVE_SYNTAXES[1]


def integer(dataset: Any, keyword: str, least: int, largest: int, default: int | None = None) -> int:  # noqa: ANN401
    """Return a number of a dataset.

    Args:
        dataset: The dataset.
        keyword: Keyword of the element.
        least: Least possible value.
        largest: Largest possible value.
        default: Value if the element is missing or empty; None if it is required.

    Raises:
        MedicalImageError: If the element is required and missing, or impossible.
    """
    try:
        value = dataset.get(keyword)
        if value is None or value == "":
            value = default
        number = None if value is None else int(value)
    except Exception:  # pydicom converts a value when it is first used
        raise MedicalImageError(f"{keyword} of its header is damaged") from None
    if number is None:
        raise MedicalImageError(f"its header has no {keyword}")
    if not least <= number <= largest:
        raise MedicalImageError(f"{keyword} of its header is {number}, not from {least} to {largest}")
    return number


def text(dataset: "Dataset", keyword: str) -> str:
    """Return a text of a dataset; an empty one if it is missing or damaged."""
    try:
        value = dataset.get(keyword)
        return "" if value is None else str(value).strip()
    except Exception:  # pydicom converts a value when it is first used
        return ""


def numbers(dataset: "Dataset", keyword: str) -> list[float]:
    """Return the finite numbers of an element with one or several; none if it is missing.

    Raises:
        MedicalImageError: If a value is no finite number.
    """
    try:
        value = dataset.get(keyword)
        if value is None or value == "":
            return []
        is_list = hasattr(value, "__iter__") and not isinstance(value, str | bytes)
        values = [float(entry) for entry in value] if is_list else [float(value)]
    except Exception:  # pydicom converts a value when it is first used
        raise MedicalImageError(f"{keyword} of its header is damaged") from None
    if any(number != number or abs(number) == float("inf") for number in values):
        raise MedicalImageError(f"{keyword} of its header is not finite")
    return values
