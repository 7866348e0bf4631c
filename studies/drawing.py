# SPDX-License-Identifier: Apache-2.0
"""Files and figures of the studies, drawn with matplotlib, which is imported only when one is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perada.core.checks import installed
from perada.core.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_output(output: Path) -> None:
    """See that a study can be drawn and written into a folder, before anything is computed.

    Raises:
        FileExistsError: If ``output`` is a file.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{str(output)!r} is a file; give a folder as output")
    check_drawing("this study")


def check_drawing(who: str, extra: str = "studies") -> None:
    """See that there is something to draw with, before anything is computed.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    installed("matplotlib.figure", who, extra)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, so many inches wide and high, that belongs to no window system and to no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write(output: Path, name: str, numbers: str, figures: "Mapping[str, Figure]") -> None:
    """Write a study's numbers as NAME.json, and each figure as PNG under its own name.

    A figure has 100 dots per inch and no date.
    """
    output.mkdir(parents=True, exist_ok=True)
    with writing(output):
        (output / f"{name}.json").write_text(numbers + "\n", encoding="utf-8")
        for title, figure in figures.items():
            figure.savefig(output / f"{title}.png", dpi=100, metadata={"Software": None})
    files = [f"{name}.json", *(f"{title}.png" for title in figures)]
    print(f"Wrote {', '.join(files)} to {output}")
