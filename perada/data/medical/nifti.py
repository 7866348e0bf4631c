# SPDX-License-Identifier: Apache-2.0
"""Slices of NIfTI volumes, in the orientation in which radiologists see them."""

import gzip
import io
import logging
import os
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from perada.core.checks import installed
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.headers import open_source
from perada.data.medical.windows import (
    AUTO,
    AUTO_PERCENTILES,
    PRESETS,
    GreyWindow,
    Window,
    place_in_file,
    range_window,
)

Axis = Literal["axial", "coronal", "sagittal"]
HEADER_BYTES = 348
LARGEST_VOLUME = 2**31
"""Bytes of a volume, at most."""
_MAGIC = (b"n+1\0", b"n+2\0")
_PLACE_OF_MAGIC = (344, 4)
"""Where NIfTI-1 and NIfTI-2 have their magic."""
_GZIP = b"\x1f\x8b"
_AXIS_NUMBERS: dict[str, int] = {"sagittal": 0, "coronal": 1, "axial": 2}


def is_nifti(beginning: bytes) -> bool:
    """Return whether the first bytes of a file are those of a NIfTI volume, which may be compressed by gzip."""
    if beginning[:2] == _GZIP:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(beginning)) as file:
                beginning = file.read(HEADER_BYTES)
        except (EOFError, OSError):
            return False
    return any(beginning[place : place + 4] in _MAGIC for place in _PLACE_OF_MAGIC)


@dataclass(frozen=True)
class Volume:
    """A volume in the orientation RAS+: its axes point to the patient's right, to the front and up.

    Attributes:
        values: The values (X, Y, Z).
        spacing: Distance of voxels along each axis in mm.
        limits: The values that its header makes black and white; None if it states none.
    """

    values: np.ndarray[Any, np.dtype[Any]]
    spacing: tuple[float, float, float]
    limits: tuple[float, float] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of voxels along each axis."""
        right, front, up = self.values.shape
        return right, front, up

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest finite value."""
        finite = self._finite_values()
        return float(finite.min()), float(finite.max())

    @cached_property
    def percentiles(self) -> tuple[float, float]:
        """The values that the window ``auto`` makes black and white."""
        low, high = np.percentile(self._finite_values(), AUTO_PERCENTILES)
        return float(low), float(high)

    def _finite_values(self) -> np.ndarray[Any, np.dtype[Any]]:
        finite: np.ndarray[Any, np.dtype[Any]] = self.values[np.isfinite(self.values)]
        if not finite.size:
            raise MedicalImageError("its voxels are NaN or infinity", "leave it out")
        return finite

    def slice(self, axis: Axis, index: int) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a slice (H, W) as radiologists see it.

        In axial and coronal slices, the patient's right is on the left; in sagittal ones, the front is on the left.
        The front of axial slices, and the head of the others, is at the top.
        """
        plane = np.take(self.values, index, axis=_AXIS_NUMBERS[axis])
        seen: np.ndarray[Any, np.dtype[Any]] = plane[::-1, ::-1].T
        return seen


def read_volume(source: str | Path | IO[bytes]) -> Volume:
    """Read a volume. That of a path stays in memory until another one is read, since its slices are read in turn.

    Raises:
        MedicalImageError: If it is damaged, has a fourth dimension, or is larger than its file allows.
    """
    if isinstance(source, str | Path):
        state = os.stat(source)
        return _read_path(str(source), state.st_size, state.st_mtime_ns)
    return _read_volume(source)


@lru_cache(maxsize=1)
def _read_path(path: str, size: int, modified_ns: int) -> Volume:
    """Read a volume. Size and time of the last modification are part of the key of the cache."""
    return _read_volume(path)


def volume_shape(source: str | Path | IO[bytes]) -> tuple[int, int, int]:
    """Return the shape of a volume in the orientation RAS+, from its header.

    Raises:
        MedicalImageError: If the header is damaged, or the volume has a fourth dimension.
    """
    nibabel = _import_nibabel()
    with open_source(source) as file:
        content = _read_inflated(file, header_only=True)
    try:
        header_class = nibabel.Nifti2Header if _is_second(content) else nibabel.Nifti1Header
        header = header_class.from_fileobj(io.BytesIO(content))
        shape = _three_sides(tuple(int(side) for side in header.get_data_shape()))
        axes = nibabel.io_orientation(header.get_best_affine())[:, 0].astype(int).tolist()
    except MedicalImageError:
        raise
    except Exception as error:  # nibabel raises many types
        raise MedicalImageError(f"its header is damaged ({type(error).__name__})") from None
    turned = [side for _, side in sorted(zip(axes, shape, strict=True))]
    return turned[0], turned[1], turned[2]


def num_slices(shape: tuple[int, int, int], axis: Axis) -> int:
    """Return the number of slices of a volume across an axis."""
    return shape[_AXIS_NUMBERS[axis]]


def slice_size(shape: tuple[int, int, int], axis: Axis) -> tuple[int, int]:
    """Return width and height of the slices of a volume across an axis."""
    sides = list(shape)
    sides.pop(_AXIS_NUMBERS[axis])
    return sides[0], sides[1]


def _import_nibabel() -> Any:  # noqa: ANN401  # a module
    nibabel = installed("nibabel", "a NIfTI volume", "medical")
    # It writes corrections of damaged headers to the standard error.
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)
    return nibabel


def _is_second(content: bytes) -> bool:
    """Return whether a volume has the second format, NIfTI-2."""
    return content[4:8] == _MAGIC[1]


def _three_sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a shape without further dimensions of 1; raise a MedicalImageError if it is not that of a volume."""
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        raise MedicalImageError(f"it has {len(shape)} dimensions larger than 1, not 3", "save each volume as a file")
    if min(shape) < 1:
        raise MedicalImageError(f"its header declares {shape[0]} x {shape[1]} x {shape[2]} voxels")
    return shape[0], shape[1], shape[2]


def _read_volume(source: str | Path | IO[bytes]) -> Volume:
    nibabel = _import_nibabel()
    with open_source(source) as file:
        content = _read_inflated(file)
    try:
        image_class = nibabel.Nifti2Image if _is_second(content) else nibabel.Nifti1Image
        image = image_class.from_bytes(content)
        _check_size(_three_sides(tuple(int(side) for side in image.shape)), image.header, len(content))
        image = nibabel.as_closest_canonical(image)
        values = np.asanyarray(image.dataobj).reshape(image.shape[:3])
        spacing = [abs(float(zoom)) for zoom in image.header.get_zooms()[:3]]
        black = float(image.header["cal_min"])
        white = float(image.header["cal_max"])
    except (MedicalImageError, MemoryError):
        raise
    except Exception as error:  # nibabel raises many types
        raise MedicalImageError(f"it is damaged or truncated ({type(error).__name__})") from None
    if values.dtype.kind not in "iufb":
        raise MedicalImageError("its voxels are colours or complex numbers", "convert it to numbers")
    limits = (black, white) if np.isfinite([black, white]).all() and black < white else None
    return Volume(values, (spacing[0], spacing[1], spacing[2]), limits)


def _check_size(shape: tuple[int, int, int], header: Any, num_bytes: int) -> None:  # noqa: ANN401  # nibabel's header
    """Raise a MedicalImageError unless a file has all voxels that its header declares."""
    declared = shape[0] * shape[1] * shape[2] * header.get_data_dtype().itemsize
    if declared > num_bytes:
        raise MedicalImageError(
            f"its header declares {declared} bytes of voxels, but it has {num_bytes}; it is probably truncated",
            "fetch it again",
        )


def _read_inflated(file: IO[bytes], header_only: bool = False) -> bytes:
    """Return the content of a volume's file, which may be compressed, up to the size that its header declares.

    Args:
        file: The file.
        header_only: Whether to return the header only.
    """
    beginning = file.read(2)
    file.seek(0)
    if beginning != _GZIP:
        return file.read(HEADER_BYTES + 192 if header_only else -1)
    try:
        with gzip.GzipFile(fileobj=file) as inflated:
            header = inflated.read(HEADER_BYTES + 192)
            if header_only:
                return header
            largest = min(_declared_bytes(header), LARGEST_VOLUME)
            return header + inflated.read(largest)
    except (EOFError, OSError, ValueError, struct.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise MedicalImageError(f"it is damaged or truncated ({type(error).__name__})") from None


def _declared_bytes(header_bytes: bytes) -> int:
    """Return the bytes of a volume's header, extensions and voxels, as the header declares them."""
    order = "<"
    is_second = header_bytes[4:8] == _MAGIC[1]
    if struct.unpack("<i", header_bytes[:4])[0] not in (348, 540):
        order = ">"
    if is_second:
        shape = struct.unpack(f"{order}8q", header_bytes[16:80])
        bits = struct.unpack(f"{order}h", header_bytes[14:16])[0]
        offset = struct.unpack(f"{order}q", header_bytes[168:176])[0]
    else:
        shape = struct.unpack(f"{order}8h", header_bytes[40:56])
        bits = struct.unpack(f"{order}h", header_bytes[72:74])[0]
        offset = int(struct.unpack(f"{order}f", header_bytes[108:112])[0])
    voxels = 1
    for side in shape[1 : 1 + max(0, min(7, shape[0]))]:
        voxels *= max(1, side)
    total: int = max(0, offset) + voxels * max(1, bits) // 8
    return total


def decode_nifti(
    source: str | Path | IO[bytes], number: int | None, axis: Axis, window: Window
) -> np.ndarray[Any, Any]:
    """Decode a slice of a volume to grey levels (H, W).

    Args:
        source: The file, or an opened one.
        number: Number of the slice, from 1; None for the one in the middle.
        axis: The axis that slices are across.
        window: See :class:`.MedicalReading`. Without a window in the file, the volume's smallest value is black and its
            largest white, so that its slices can be compared.

    Raises:
        MedicalImageError: If the volume cannot be read.
    """
    volume = read_volume(source)
    values = volume.slice(axis, _slice_index(volume, number, axis)).astype(np.float64)
    if not np.isfinite(values).all():
        raise MedicalImageError("its voxels have NaN or infinity", "replace them by the value of the background")
    fraction = _window_of_volume(volume, window).apply(values)
    return np.rint(fraction * 255).astype(np.uint8)


def decode_label_slice(source: str | Path | IO[bytes], number: int | None, axis: Axis) -> np.ndarray[Any, Any]:
    """Return a slice (H, W) of a volume with its own values, which are numbers of classes."""
    volume = read_volume(source)
    return volume.slice(axis, _slice_index(volume, number, axis))


def _slice_index(volume: Volume, number: int | None, axis: Axis) -> int:
    """Return the index of a slice by its number from 1; None for the one in the middle."""
    count = num_slices(volume.shape, axis)
    chosen = count // 2 + 1 if number is None else number
    if not 1 <= chosen <= count:
        raise MedicalImageError(f"it has {count} {axis} slices, and none of number {chosen}")
    return chosen - 1


def _window_of_volume(volume: Volume, window: Window) -> GreyWindow:
    """Return the window of a volume."""
    if isinstance(window, tuple):
        return GreyWindow(*window)
    if window in PRESETS:
        return GreyWindow(*PRESETS[window])
    if window == AUTO:
        return range_window(*volume.percentiles)
    place = place_in_file(window)
    if place:
        raise MedicalImageError(f"a NIfTI volume has no window of number {place + 1}", "set window to file")
    if volume.limits is not None:
        return range_window(*volume.limits)
    return range_window(*volume.extremes)
