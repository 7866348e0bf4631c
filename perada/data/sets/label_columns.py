# SPDX-License-Identifier: Apache-2.0
"""Columns that hold labels: numbers, zeros and ones, or several words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from perada.core.checks import OptionError, invalid_option, without_effect
from perada.core.states import loses_digits
from perada.data.partitions.shares import Array
from perada.data.sets.manifest import ListedImages
from perada.data.sets.masks import check_mask_values

Decimal = Literal[".", ","]
"""What separates the whole from the fraction of a number."""
_NUMBERS: Mapping[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(r"[+-]?(\d+,?\d*|,\d+)(e[+-]?\d+)?", re.IGNORECASE),
}
"""Numbers by what separates their fraction."""
TRUE_CELLS = frozenset({"1", "1.0", "true"})
"""Cells of a column of zeros and ones that mean one, in lower case."""
BINARY = TRUE_CELLS | {"0", "0.0", "false"}
"""Accepted cells of such a column, in lower case."""
UNKNOWN_CELLS = frozenset({"-1", "-1.0", "nan"})
"""Cells of such a column that mark an unknown label, in lower case. A blank cell does too, unless it means absent."""
Unknown = Literal["reject", "ignore", "zeros", "ones"]
"""What is done with unknown labels."""
VALUES_OF_UNKNOWN: Mapping[Unknown, int] = {"zeros": 0, "ones": 1}
"""Values that replace unknown labels in training."""
Blank = Literal["unknown", "absent"]
"""What a blank cell means."""


def is_number(cell: str, decimal: Decimal = ".") -> bool:
    """Return whether a cell is a number.

    >>> is_number("-1.5e3"), is_number("1,5"), is_number("nan")
    (True, False, False)
    >>> is_number("1,5", decimal=","), is_number("1.5", decimal=","), is_number("1.234,5", decimal=",")
    (True, False, False)
    """
    return _NUMBERS[decimal].fullmatch(cell) is not None


def with_point(cell: str) -> str:
    """Return a number with a point before its fraction, as Python reads it."""
    return cell.replace(",", ".")


def holds_measurements(cells: Sequence[str], decimal: Decimal = ".") -> bool:
    """Return whether a column holds measurements: mostly different numbers, some of which have a fraction.

    >>> holds_measurements(["1.5", "2", "3"]), holds_measurements(["1", "2", "3"])
    (True, False)
    """
    values = {*cells}
    if 2 * len(values) <= len(cells) or not all(is_number(value, decimal) for value in values):
        return False
    return any(float(with_point(value)) % 1 for value in values)


def guess_separator(cells: list[str]) -> str | None:
    """Guess the separator of several labels in a cell: a character whose parts are labels of other cells, too."""
    distinct_cells = {*cells}
    for separator in "|;,":
        parts = {part.strip() for cell in distinct_cells if separator in cell for part in cell.split(separator)}
        if parts and parts <= distinct_cells:
            return separator
    return None


@dataclass(frozen=True)
class RowLabels:
    """What the rows of a list are labelled with: classes, masks or numbers. The other attributes are None.

    Attributes:
        classes: Names of the classes, or of the numbers.
        labels: Labels by row; see :class:`.Manifest`.
        masks: Path of each row's mask.
        numbers: Numbers (rows, D) to predict.
    """

    classes: tuple[str, ...] | None = None
    labels: Array | None = None
    masks: list[str] | None = None
    numbers: Array | None = None


def read_numbers(
    image_set: ListedImages, column_names: Sequence[str], decimal: Decimal = ".", comma_option: str = ""
) -> Array:
    """Read columns of numbers.

    Args:
        image_set: The image set with the columns.
        column_names: Names of the D columns.
        decimal: What separates their fraction.
        comma_option: Option of the image set with which commas separate it; empty if there is none.

    Returns:
        The numbers, float32 (N, D).

    Raises:
        ValueError: If there is no such column, or a cell is not a number. The message names the rows.
    """
    numbers_of_columns = []
    for name in column_names:
        column = image_set.column("numbers", name, "fill it in, or take the row out")
        cells = [str(cell).strip() for cell in column]
        not_numbers = [row for row, cell in enumerate(cells) if not is_number(cell, decimal)]
        if not_numbers:
            example = cells[not_numbers[0]]
            problem = f"{name} is {example!r}, which is not a number"
            remedy = "correct it, with a point for decimals, or take the row out"
            if decimal == ",":
                problem += " with a decimal comma"
                remedy = "correct it, or take the row out"
                if is_number(example):
                    remedy += "; if all numbers have points, leave decimal out"
            elif comma_option and is_number(example, ","):
                remedy = f"set {comma_option} if the table has decimal commas, or correct it"
            image_set.reject_rows(not_numbers, problem, remedy)
        exact = np.array([with_point(cell) for cell in cells], dtype=np.float64)
        if loses_digits(torch.from_numpy(exact)):
            raise ValueError(
                f"numbers: the column {name!r} has numbers from {exact.min():.15g} to {exact.max():.15g}, which "
                "float32 cannot tell apart; subtract a reference from them in the table, such as the smallest"
            )
        numbers_of_columns.append(exact.astype(np.float32))
    return np.stack(numbers_of_columns, 1)


def names_of_numbers(option: str | list[str]) -> tuple[str, ...]:
    """Return the names of the D columns that the option ``numbers`` selects: the name of one, or those of several."""
    return (option,) if isinstance(option, str) else tuple(option)


def check_columns(name: str, value: object, optional: bool = False) -> None:
    """Raise an OptionError unless an option is the name of a column, or a list of some."""
    if optional and value is None:
        return
    column_names: Sequence[object] = []
    if isinstance(value, str):
        column_names = [value]
    elif isinstance(value, list | tuple):
        column_names = value
    if not column_names or not all(isinstance(entry, str) and entry for entry in column_names):
        raise invalid_option(name, value, "the name of a column or a list of names")


def check_one_kind_of_label(**options: str | list[str] | None) -> None:
    """Raise an OptionError if more than one of the options that select kinds of labels is set.

    Args:
        **options: Values of these options by name, None for those that are not set.
    """
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        first = names[0]
        second = names[1]
        raise OptionError(
            f"{second}={options[second]!r} cannot be combined with {first}={options[first]!r}: labels are either "
            "masks, numbers, names in one column, or columns of zeros and ones; leave one out",
            name=second,
            value=options[second],
        )


def checked_mask_values(values: object, mask: str | None) -> tuple[int, ...] | None:
    """Return the option ``mask_values`` as a tuple; raise an OptionError if it is invalid, or no masks are read."""
    checked_values = check_mask_values(values)
    if checked_values is not None and mask is None:
        raise without_effect("mask_values", checked_values, "mask=None", "name the column of the masks in mask")
    return checked_values
