# SPDX-License-Identifier: Apache-2.0
"""Which files are medical images, which of their frames are images of a set, and how they are decoded."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import numpy as np

from perada.core.checks import OptionError, check_choice, invalid_option
from perada.core.text import abbreviated, near_names, plain_number
from perada.data.medical.dicom import decode_dicom
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import is_dicom, is_directory, open_source, pixel_format, read_dataset
from perada.data.medical.nifti import Axis, decode_nifti, is_nifti, num_slices, slice_size, volume_shape
from perada.data.medical.windows import FILE, Window, check_window

Kind = Literal["DICOM", "NIfTI"]
Frames = Literal["middle", "all"] | int
DICOM_EXTENSIONS = (".dcm", ".dicom", ".ima")
NIFTI_EXTENSIONS = (".nii", ".nii.gz")
MEDICAL_EXTENSIONS = DICOM_EXTENSIONS + NIFTI_EXTENSIONS
_LIBRARIES: dict[Kind, str] = {"DICOM": "pydicom", "NIfTI": "nibabel"}
_NUMBERED = re.compile(r"(.+)#([1-9]\d{0,9})", re.DOTALL)
_OTHER_EXTENSION = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,7}")
"""An extension of another kind of file. The last part of a UID, as in ``1.2.840.10008``, is none."""
_BEGINNING = 2048


@dataclass(frozen=True)
class MedicalReading:
    """How medical images become grey levels.

    Attributes:
        window: Which values become black and white: ``file``, the window in the file; ``auto``, percentiles of the
            image; the name of a preset; or centre and width. None if only clients have windows.
        frames: Which frames or slices of a file are images: the ``middle`` one, ``all``, or each n-th.
        axis: The axis that slices of a volume are across.
        window_of_client: Windows of clients by their names, which take the place of ``window``.
    """

    window: Window | None = FILE
    frames: Frames = "middle"
    axis: Axis = "axial"
    window_of_client: Mapping[str, Window] = field(default_factory=dict, hash=False)

    def record(self) -> dict[str, Any]:
        """Return plain values, for a JSON file."""
        record: dict[str, Any] = {"window": _plain_window(self.window), "frames": self.frames, "axis": self.axis}
        if self.window_of_client or self.window is None:
            record["window_of_client"] = {
                client: _plain_window(window) for client, window in self.window_of_client.items()
            }
        return record

    @classmethod
    def checked(
        cls,
        window: object = FILE,
        frames: object = "middle",
        axis: object = "axial",
        window_of_client: Mapping[str, object] | None = None,
    ) -> "MedicalReading":
        """Return the reading of options, or of a :meth:`record`.

        Args:
            window: A window, or a mapping with a window for each client.
            frames: See the class.
            axis: See the class.
            window_of_client: See the class.

        Raises:
            OptionError: If an option is invalid.
        """
        check_choice("axis", axis, list(get_args(Axis)))
        if isinstance(window, Mapping) and window:
            window_of_client = window
            window = None
        windows: dict[str, Window] = {}
        for client, client_window in (window_of_client or {}).items():
            windows[str(client)] = check_window(client_window)
        default = None if window is None and window_of_client is not None else check_window(window)
        return cls(default, _check_frames(frames), cast(Axis, axis), windows)

    def of_client(self, client: str | None) -> "MedicalReading":
        """Return the reading of a client's images; of None, that of images of no client.

        Raises:
            OptionError: If neither this client nor all images have a window.
        """
        window = self.window if client is None else self.window_of_client.get(client, self.window)
        if window is None:
            raise self._no_window_error(client)
        return replace(self, window=window, window_of_client={})

    def _no_window_error(self, client: str | None) -> OptionError:
        """Return the error for a client, or images of no client (None), without a window."""
        clients = abbreviated(list(self.window_of_client))
        if client is None:
            return OptionError(
                f"client=None has no window: each client has its own ({clients}); name the client whose images these "
                "are",
                name="client",
                value=client,
            )
        near = near_names(client, self.window_of_client)
        remedy = f"did you mean {near[0]!r}?" if near else "add one, such as file"
        return OptionError(
            f"window has none for client {client!r}, only for {clients}; {remedy}", name="window", value=client
        )

    def chosen_frames(self, num_frames: int) -> list[int]:
        """Return the numbers, from 1, of the frames of a file that are images.

        >>> MedicalReading(frames=4).chosen_frames(9)
        [1, 5, 9]
        """
        if self.frames == "middle":
            return [num_frames // 2 + 1]
        step = 1 if self.frames == "all" else int(self.frames)
        return list(range(1, num_frames + 1, step))


DEFAULT_READING = MedicalReading()


def _plain_window(window: Window | None) -> str | list[float] | None:
    """Return a window as a recipe has it."""
    return list(window) if isinstance(window, tuple) else window


def _check_frames(frames: object) -> Frames:
    """Return the option ``frames``; raise an OptionError for an invalid one."""
    number = plain_number(frames)
    if number == "middle" or number == "all":
        return number
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return number
    raise invalid_option("frames", frames, "middle, all, or an integer n >= 1 for each n-th frame or slice")


@dataclass(frozen=True)
class NumberedPath:
    """A file, and the number of one of its frames or slices; None if the path names none."""

    file: str
    number: int | None


def split_number(path: str | Path) -> NumberedPath:
    """Return the file and the frame that a path such as ``scan.dcm#12`` names.

    >>> split_number("scan.dcm#12")
    NumberedPath(file='scan.dcm', number=12)
    """
    text = str(path)
    match = _NUMBERED.fullmatch(text)
    if match is None or os.path.exists(text):
        return NumberedPath(text, None)
    return NumberedPath(match[1], int(match[2]))


def with_number(path: str, number: int) -> str:
    """Return the path of a frame of a file."""
    return f"{path}#{number}"


def has_medical_name(path: str) -> bool:
    """Return whether a file's extension is that of a medical image."""
    return path.lower().endswith(MEDICAL_EXTENSIONS)


def may_be_dicom(path: str) -> bool:
    """Return whether a file's name has no extension, as of files that a PACS exports."""
    return not _OTHER_EXTENSION.fullmatch(Path(path).suffix)


def medical_kind(source: str | Path | IO[bytes]) -> Kind | None:
    """Return what kind of medical image a file is; None for other files. Its extension decides before its content.

    Raises:
        OSError: If a file without a known extension cannot be read.
    """
    if isinstance(source, str | Path):
        file = split_number(source).file
        name = file.lower()
        if name.endswith(DICOM_EXTENSIONS):
            return "DICOM"
        if name.endswith(NIFTI_EXTENSIONS):
            return "NIfTI"
        if not may_be_dicom(file):
            return None
        with open(file, "rb") as opened:
            return "DICOM" if is_dicom(opened.read(_BEGINNING)) else None
    source.seek(0)
    beginning = source.read(_BEGINNING)
    source.seek(0)
    if is_dicom(beginning):
        return "DICOM"
    return "NIfTI" if is_nifti(beginning) else None


def medical_kind_of_file(file: str, folder: Path) -> Kind | None:
    """Return the kind of a file in a folder that is listed; None for other files, and for a DICOMDIR."""
    name = file.lower()
    if name.endswith(NIFTI_EXTENSIONS):
        return "NIfTI"
    if name.endswith(DICOM_EXTENSIONS):
        return "DICOM"
    if not may_be_dicom(file):
        return None
    try:
        with open(folder / file, "rb") as opened:
            beginning = opened.read(_BEGINNING)
    except OSError:
        return None
    return "DICOM" if is_dicom(beginning) and not is_directory(beginning) else None


def is_readable_kind(kind: Kind) -> bool:
    """Return whether the library that reads a kind of medical image is installed."""
    return find_spec(_LIBRARIES[kind]) is not None


def decode_medical(source: str | Path | IO[bytes], kind: Kind, reading: MedicalReading) -> np.ndarray[Any, Any]:
    """Decode a frame or slice of a medical image to uint8: grey (H, W) or colours (H, W, 3).

    Args:
        source: The file, which may name a frame, or an opened one.
        kind: Its kind.
        reading: How it is decoded.

    Raises:
        MedicalImageError: If it cannot be decoded.
        ModuleNotFoundError: If the library is not installed.
    """
    number = None
    if isinstance(source, str | Path):
        path = split_number(source)
        source = path.file
        number = path.number
    window = reading.of_client(None).window
    assert window is not None
    if kind == "NIfTI":
        return decode_nifti(source, number, reading.axis, window)
    return decode_dicom(source, number, window)


def size_of_medical(source: str | Path | IO[bytes], kind: Kind, reading: MedicalReading) -> tuple[int, int]:
    """Return width and height of a medical image without decoding a DICOM file."""
    if isinstance(source, str | Path):
        source = split_number(source).file
    if kind == "NIfTI":
        return slice_size(volume_shape(source), reading.axis)
    with open_source(source) as file:
        stored_as = pixel_format(read_dataset(file, with_pixels=False))
    return stored_as.columns, stored_as.rows


def count_frames(path: str, kind: Kind, axis: Axis) -> int:
    """Return the number of frames or slices of a file; 1 if it cannot be read, so that reading it names the problem."""
    try:
        state = os.stat(path)
        return _count_frames(path, kind, axis, state.st_size, state.st_mtime_ns)
    except (MedicalImageError, OSError):
        return 1


@lru_cache(maxsize=2**16)
def _count_frames(path: str, kind: Kind, axis: Axis, size: int, modified_ns: int) -> int:
    """Count frames. Size and time of the last modification are part of the key of the cache."""
    if kind == "NIfTI":
        return num_slices(volume_shape(path), axis)
    with open_source(path) as file:
        return pixel_format(read_dataset(file, with_pixels=False)).num_frames


def known_kinds(paths: Sequence[str]) -> list[Kind | None]:
    """Return the kind of each file; None for those that are no medical images, or cannot be read."""
    kinds: list[Kind | None] = []
    for path in paths:
        try:
            kinds.append(medical_kind(path))
        except OSError:
            kinds.append(None)
    return kinds
