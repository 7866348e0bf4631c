# SPDX-License-Identifier: Apache-2.0
"""Figures of the studies, drawn with matplotlib, which is imported only when one is drawn."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawing() -> None:
    """See that figures can be drawn, before anything is computed.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this study draws with matplotlib, which is not installed ({error}); pip install 'perada[studies]'"
        ) from error


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, so many inches wide and high, that belongs to no window system and to no global state."""
    check_drawing()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure as a PNG of 100 dots per inch without a date, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    return path
