# SPDX-License-Identifier: Apache-2.0
"""Palettes that are stored in segments (PS3.3, C.7.9.2): lists of values, lines between values, and copies of both."""

import numpy as np

from perada.data.medical.errors import MedicalImageError

_DISCRETE = 0
_LINEAR = 1
_INDIRECT = 2
_DAMAGED = MedicalImageError("the segments of its palette are damaged")


class _Segments:
    """Segments of a palette with the entries that they have given so far, of which there are never more than declared.

    Args:
        table_words: The segments: words of 16 bits, or bytes.
        num_entries: Number of entries of the palette.
    """

    def __init__(self, table_words: list[int], num_entries: int) -> None:
        self._words = table_words
        self._num_entries = num_entries
        self.table_entries: list[int] = []

    def expand(self) -> None:
        """Expand all segments."""
        place = 0
        # A last byte may be padding.
        while place + 2 < len(self._words) and len(self.table_entries) < self._num_entries:
            place = self._expand_one(place, may_be_copy=True)

    def _expand_one(self, place: int, may_be_copy: bool) -> int:
        """Expand the segment at a place, and return the place of the next one."""
        kind, length = self._words[place : place + 2]
        first = place + 2
        if kind == _DISCRETE:
            self._add_entries(self._words[first : first + length])
            return first + length
        if not self.table_entries:
            raise _DAMAGED
        if kind == _LINEAR:
            line = np.linspace(self.table_entries[-1], self._words[first], length + 1)[1:]
            self._add_entries([int(value) for value in np.around(line)])
            return first + 1
        if kind != _INDIRECT or not may_be_copy:
            raise _DAMAGED
        # The place of the first of the copied segments has two words, the lower one first.
        low, high = self._words[first : first + 2]
        copied = low + (high << 16)
        for _ in range(length):
            if len(self.table_entries) >= self._num_entries:
                break
            copied = self._expand_one(copied, may_be_copy=False)
        return first + 2

    def _add_entries(self, values: list[int]) -> None:
        self.table_entries += values[: self._num_entries - len(self.table_entries)]


def expand_segments(table_words: list[int], num_entries: int) -> list[int]:
    """Return the entries of a palette that is stored in segments of words of 16 bits.

    Args:
        table_words: The segments.
        num_entries: Number of entries, which bounds the memory: few segments can stand for very many.

    Raises:
        MedicalImageError: If the segments are damaged, or have fewer entries.

    >>> expand_segments([0, 2, 10, 20, 1, 2, 40], 4)
    [10, 20, 30, 40]
    """
    segments = _Segments(table_words, num_entries)
    try:
        segments.expand()
    except (IndexError, ValueError):
        raise _DAMAGED from None
    if len(segments.table_entries) < num_entries:
        raise _DAMAGED
    return segments.table_entries
