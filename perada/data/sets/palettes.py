# SPDX-License-Identifier: Apache-2.0
"""Colours that masks with a palette give to the numbers of their classes, and checks that files agree on them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from PIL import Image

from perada.data.medical.reading import medical_kind

Colour = tuple[int, ...]


@dataclass(frozen=True)
class PaletteEntry:
    """The colour that a file gives to a number.

    Attributes:
        file: Name of the file.
        value: The number.
        colour: Its colour.
    """

    file: str
    value: int
    colour: Colour


def palette_of(mask: str | IO[bytes]) -> list[Colour] | None:
    """Return the colours of a mask by number, from its header; None if it has no palette or cannot be read."""
    try:
        if medical_kind(mask) is not None:
            return None
        with Image.open(mask) as opened:
            if opened.mode != "P" or opened.palette is None:
                return None
            channels = len(opened.palette.mode)
            entries = list(opened.palette.palette)
    except Exception:  # Pillow raises many types; the mask itself is read, and reported, before
        return None
    return [tuple(entries[start : start + channels]) for start in range(0, len(entries), channels)]


def colours_of_values(palette: Sequence[Colour], mask_values: Sequence[int]) -> dict[int, Colour]:
    """Return the colour of each value that a mask has, without colours that several of its values share.

    >>> colours_of_values([(0, 0, 0), (9, 0, 0), (9, 0, 0)], [0, 1, 2])
    {0: (0, 0, 0)}
    """
    colours = {value: palette[value] for value in mask_values if 0 <= value < len(palette)}
    seen = list(colours.values())
    return {value: colour for value, colour in colours.items() if seen.count(colour) == 1}


def check_palettes(colours_of_files: Mapping[str, Mapping[int, Colour]], values_are_declared: bool) -> None:
    """Reject or warn of masks whose palettes disagree on the colours of the same numbers.

    Args:
        colours_of_files: Colour of each value of a mask, by the name of its file.
        values_are_declared: Whether the user has listed the values that stand for classes.

    Raises:
        ValueError: If a colour has different numbers in two files, unless the values are declared.
    """
    first_with_colour: dict[Colour, PaletteEntry] = {}
    first_with_value: dict[int, PaletteEntry] = {}
    other_colour = ""
    for file, colours in colours_of_files.items():
        for value, colour in colours.items():
            entry = PaletteEntry(file, value, colour)
            same_colour = first_with_colour.setdefault(colour, entry)
            if value != same_colour.value:
                _reject_moved_colour(same_colour, entry, values_are_declared)
                return
            same_value = first_with_value.setdefault(value, entry)
            if colour != same_value.colour and not other_colour:
                first_colour = _format_hex(same_value.colour)
                other_colour = f"{value} is {first_colour} in {same_value.file}, but {_format_hex(colour)} in {file}"
    if other_colour and not values_are_declared:
        warnings.warn(
            f"masks have palettes of different colours: {other_colour}. The numbers are the classes, whatever their "
            "colours: write each class with the same number in all masks. If the numbers are right, list them in "
            "mask_values",
            stacklevel=4,
        )


def _reject_moved_colour(first: PaletteEntry, second: PaletteEntry, values_are_declared: bool) -> None:
    """Raise a ValueError for a colour that has two numbers, or warn of it if values are declared."""
    problem = (
        f"masks have swapped palettes: the colour {_format_hex(first.colour)} is {first.value} in {first.file}, but "
        f"{second.value} in {second.file}"
    )
    if values_are_declared:
        warnings.warn(f"{problem}; the numbers are the classes, whatever their colours", stacklevel=5)
        return
    raise ValueError(
        f"{problem}: write each class with the same number in all masks; if the numbers are right whatever their "
        "colours, list those of all classes in mask_values"
    )


def _format_hex(colour: Colour) -> str:
    """Return a colour as in HTML.

    >>> _format_hex((255, 0, 16))
    '#ff0010'
    """
    return "#" + "".join(f"{channel:02x}" for channel in colour)
