# SPDX-License-Identifier: Apache-2.0
"""Names of the segments of masks, by which the numbers in the DICOM SEG and NIfTI files of clients are compared."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from perada.core.checks import OptionError
from perada.core.text import abbreviated, near_names
from perada.data.medical.errors import MedicalImageError
from perada.data.medical.reading import medical_kind, split_number
from perada.data.medical.segmentations import read_segmentation

BACKGROUND = "background"
NAMES_FILE = "dataset.json"
"""File of nnU-Net and of the Medical Segmentation Decathlon with the names of the numbers in label maps."""
NamesOfNumbers = Mapping[int, str]


def segment_names(mask: str) -> NamesOfNumbers | None:
    """Return the names of the numbers in a mask from 1; None without names.

    A DICOM SEG has them itself, NIfTI volumes in a ``dataset.json`` beside the folder of masks, or in it. Files that
    cannot be read have no names: reading the mask names the problem.
    """
    file = split_number(mask).file
    try:
        kind = medical_kind(file)
        if kind == "DICOM":
            return read_segmentation(file).segment_names
    except (MedicalImageError, OSError):
        return None
    if kind != "NIfTI":
        return None
    for folder in (Path(file).parent, Path(file).parent.parent):
        names = _names_in_file(folder / NAMES_FILE)
        if names is not None:
            return names
    return None


@lru_cache(maxsize=2**10)
def _names_in_file(path: Path) -> NamesOfNumbers | None:
    """Return the names in a file whose ``labels`` are ``{"liver": 1}`` or ``{"1": "liver"}``; None without any."""
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))["labels"]
        names = {}
        for key, value in labels.items():
            # Some versions of nnU-Net name numbers, others number names. 0 is the background.
            if str(key).isdigit():
                number = int(key)
                name = str(value)
            else:
                number = int(value)
                name = str(key)
            if number:
                names[number] = name
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return names


def check_segment_names(
    source: str, names_of_masks: Sequence[NamesOfNumbers], owners: Sequence[str], class_names: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Return the classes of masks whose numbers have names: those that were declared, or else those of the names.

    Args:
        source: Name of the images' source, for messages.
        names_of_masks: The names of the numbers in each mask that has any.
        owners: Client of each of these masks.
        class_names: The declared classes, of which the first is the background.

    Raises:
        OptionError: If a name is none of the declared classes; or without these, if a number has two names.
    """
    owner_of_names: dict[tuple[int, str], str] = {}
    for names, owner in zip(names_of_masks, owners, strict=True):
        for number, name in names.items():
            owner_of_names.setdefault((number, name), owner)
    if not owner_of_names:
        return None if class_names is None else tuple(class_names)
    if class_names is not None:
        for (_, name), owner in owner_of_names.items():
            _check_declared(source, name, owner, class_names)
        return tuple(class_names)
    name_of_number: dict[int, str] = {}
    for (number, name), owner in owner_of_names.items():
        first_name = name_of_number.setdefault(number, name)
        if first_name != name:
            raise OptionError(
                f"classes are not declared, and the masks of {source} call the segment {number} {first_name!r} "
                f"({owner_of_names[number, first_name]}) and {name!r} ({owner}); if one is misspelt, correct it; "
                f"otherwise declare the classes, such as [{BACKGROUND}, {first_name}, {name}], by whose names segments "
                "are numbered",
                name="classes",
            )
    classes = [BACKGROUND]
    for number in range(1, max(name_of_number) + 1):
        classes.append(name_of_number.get(number, str(number)))
    return tuple(classes)


def _check_declared(source: str, name: str, owner: str, class_names: Sequence[str]) -> None:
    """Raise an OptionError if the name of a segment is none of the declared classes, or the first, the background."""
    if name in class_names[1:]:
        return
    if name == class_names[0]:
        raise OptionError(
            f"classes begin with {name!r}, a segment of {source} ({owner}), but the first class is that of pixels "
            f"without segment; declare [{BACKGROUND}, {name}, ...]",
            name="classes",
            value=list(class_names),
        )
    near = near_names(name, class_names)
    remedy = f"{near[0]!r} is spelt differently: correct one of them" if near else "correct it, or add it to classes"
    raise OptionError(
        f"classes are {abbreviated(class_names)}, but {source} has the segment {name!r} ({owner}); {remedy}",
        name="classes",
        value=list(class_names),
    )


def class_numbers(
    names_of_numbers: NamesOfNumbers | None, class_names: Sequence[str] | None
) -> Mapping[int, int] | None:
    """Return the class of each number of a mask, by their names; None if its numbers are those of the classes."""
    if names_of_numbers is None or class_names is None:
        return None
    numbers = {0: 0}
    for number, name in names_of_numbers.items():
        if name in class_names:
            numbers[number] = list(class_names).index(name)
    return numbers
