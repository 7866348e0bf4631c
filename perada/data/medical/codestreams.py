# SPDX-License-Identifier: Apache-2.0
"""Sizes that compressed frames declare, which decoders reserve memory for: they are compared with the file's header."""

import struct

from perada.data.medical.errors import MedicalImageError

_JPEG_SIZES = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
"""Markers of JPEG and JPEG-LS that begin with precision, height and width: SOF0 to SOF15 and SOF55."""
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
"""Markers without a length."""
_JPEG_2000_START = b"\xff\x4f\xff\x51"


def check_declared_size(frame: bytes, width: int, height: int) -> None:
    """Check that a compressed frame has the size that the header of its file declares.

    Args:
        frame: A frame of JPEG, JPEG-LS or JPEG 2000.
        width: Width in the header.
        height: Height in the header.

    Raises:
        MedicalImageError: If it has another size, or none is found.
    """
    size = declared_size(frame)
    if size is None:
        raise MedicalImageError("its compressed pixel data are damaged (no size)")
    if size != (width, height):
        raise MedicalImageError(
            f"its header declares {width} x {height} pixels, but its compressed pixel data {size[0]} x {size[1]}"
        )


def declared_size(frame: bytes) -> tuple[int, int] | None:
    """Return width and height that a compressed frame declares; None if it declares none."""
    start = frame.find(_JPEG_2000_START)
    if start >= 0:
        # After the marker come length and capabilities (2 bytes each), then the corners of the image.
        corners = frame[start + 8 : start + 24]
        if len(corners) < 16:
            return None
        right, bottom, left, top = struct.unpack(">4I", corners)
        return right - left, bottom - top
    if frame[:2] != b"\xff\xd8":
        return None
    place = 2
    while place + 9 <= len(frame):
        if frame[place] != 0xFF:
            return None
        marker = frame[place + 1]
        if marker == 0xFF:  # a byte that fills
            place += 1
        elif marker in _JPEG_SIZES:
            height, width = struct.unpack(">HH", frame[place + 5 : place + 9])
            return width, height
        elif marker in _WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + int.from_bytes(frame[place + 2 : place + 4], "big")
    return None
