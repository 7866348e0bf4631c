# SPDX-License-Identifier: Apache-2.0
"""Files and figures of the studies. Matplotlib is imported only when a figure is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perada.core.checks import check_installed
from perada.system.files import check_output_folder, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_output(output: Path) -> None:
    """Check that a study can be drawn and written into a folder, before anything is computed.

    Raises:
        NotADirectoryError: If ``output``, or a folder above it, is a file.
        PermissionError: If this user may not write to it.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    check_output_folder("--output", output)
    check_drawing("this study")


def check_drawing(who: str, extra: str = "studies") -> None:
    """Check that matplotlib is installed, before anything is computed, and without importing it.

    Args:
        who: What needs it, for the message.
        extra: The extra of perada that installs it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    check_installed(who, extra, "matplotlib")


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, independent of window systems and of pyplot's state; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write(output: Path, name: str, numbers: str, figures: "Mapping[str, Figure]") -> None:
    """Write a study's files, and print their names.

    Args:
        output: The folder.
        name: Name of the JSON file, without its extension.
        numbers: Content of the JSON file.
        figures: Figures by the names of their PNG files, without the extension.
    """
    output.mkdir(parents=True, exist_ok=True)
    files = [f"{name}.json"]
    with writing(output):
        (output / files[0]).write_text(numbers + "\n", encoding="utf-8")
        for figure_name, figure in figures.items():
            files.append(f"{figure_name}.png")
            # Without matplotlib's version equal numbers give equal files.
            figure.savefig(output / files[-1], dpi=100, metadata={"Software": None})
    print(f"Wrote {', '.join(files)} to {output}")
