# SPDX-License-Identifier: Apache-2.0
"""Windows: which values of a medical image become black and white, and the option that chooses one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np

from perada.core.checks import invalid_option
from perada.core.text import plain_number

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
Window = str | tuple[float, float]
"""``file``, ``file:N``, ``auto``, the name of a preset, or centre and width."""
Function = Literal["LINEAR", "LINEAR_EXACT", "SIGMOID"]
"""The VOI LUT functions of DICOM (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
FILE = "file"
AUTO = "auto"
AUTO_PERCENTILES = (0.5, 99.5)
"""Percentiles of an image's values that ``auto`` makes black and white."""
PRESETS = {
    "brain": (40.0, 80.0),
    "lung": (-600.0, 1500.0),
    "mediastinum": (50.0, 350.0),
    "abdomen": (50.0, 400.0),
    "liver": (30.0, 150.0),
    "bone": (400.0, 1800.0),
}
"""Centre and width of common windows of CT in Hounsfield units."""
_FILE_WINDOW = re.compile(r"file(?::([1-9]\d{0,2}))?")


def check_window(window: object) -> Window:
    """Return the option ``window`` with a pair of numbers as a tuple.

    Raises:
        OptionError: If it is neither a name nor a pair of finite numbers with a width of at least 1.

    >>> check_window([40, 400])
    (40.0, 400.0)
    """
    expected = (
        f"file (of several windows in a file, file:2 is the second), auto, one of {', '.join(PRESETS)}, or a list of "
        "centre and width such as [40, 400]"
    )
    if isinstance(window, str):
        if window == AUTO or window in PRESETS or _FILE_WINDOW.fullmatch(window):
            return window
        raise invalid_option("window", window, expected)
    if not isinstance(window, Sequence) or len(window) != 2:
        raise invalid_option("window", window, expected)
    centre = _finite_number(window[0])
    width = _finite_number(window[1])
    if centre is None or width is None or width < 1:
        raise invalid_option("window", window, expected)
    return centre, width


def _finite_number(value: object) -> float | None:
    """Return a number that is finite; None for other values."""
    number = plain_number(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
        return None
    return float(number)


def place_in_file(window: Window) -> int | None:
    """Return the place, from 0, of the window of a file that the option chooses; None if it chooses none.

    >>> place_in_file("file:2"), place_in_file("lung")
    (1, None)
    """
    match = _FILE_WINDOW.fullmatch(window) if isinstance(window, str) else None
    return None if match is None else int(match[1] or 1) - 1


@dataclass(frozen=True)
class GreyWindow:
    """A window with its function."""

    centre: float
    width: float
    function: Function = "LINEAR"

    def apply(self, values: FloatArray) -> FloatArray:
        """Map values to [0, 1], black to white, by the formulas of PS3.3, C.11.2.1.2.1 and C.11.2.1.3.

        >>> GreyWindow(2048, 4096).apply(np.array([0.0, 4095.0])).tolist()
        [0.0, 1.0]
        """
        if self.function == "SIGMOID":
            # Beyond 700, exp() overflows; its value is 0 or 1 long before.
            exponent = np.clip(-4 * (values - self.centre) / self.width, -700, 700)
            sigmoid: FloatArray = 1 / (1 + np.exp(exponent))
            return sigmoid
        if self.function == "LINEAR_EXACT":
            fraction = (values - self.centre) / self.width + 0.5
        elif self.width == 1:
            # The limit of the formula below is a threshold.
            fraction = (values > self.centre - 0.5).astype(np.float64)
        else:
            fraction = (values - (self.centre - 0.5)) / (self.width - 1) + 0.5
        clipped: FloatArray = np.clip(fraction, 0, 1)
        return clipped


def range_window(low: float, high: float) -> GreyWindow:
    """Return the window in which ``low`` is black and ``high`` white."""
    return GreyWindow((low + high) / 2, max(high - low, np.finfo(np.float64).tiny), "LINEAR_EXACT")
