# SPDX-License-Identifier: Apache-2.0
"""A matplotlib figure as inline SVG that follows the page's colours, and as a PNG beside it."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from perada.core.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

INK = "#1f2328"
"""Text and axes; in the SVG they take the colour of the page's text."""
COLOURS = ("#2f7de1", "#d9730d", "#0f9d76", "#a65fd6", "#d64f79", "#8f8a2a", "#5f7f99", "#b0603f")
"""For lines and points: they stand out from white as from black, and differ in lightness."""
LARGEST = 125
"""Pixels of the page for an inch of a figure at most, so that a small one is not blown up."""
MARKERS = "osD^vPX*"
NAMED = 40
"""Clients up to this number have their names in a figure."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#808080",
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "perada",
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass
class Drawn:
    """A figure as it stands in the page.

    Attributes:
        name: Of its file, without an ending.
        alt: What it shows, for those who do not see it.
        svg: Its markup.
        png: Its file.
        wide: Whether it takes the page's whole width.
    """

    name: str
    alt: str
    svg: str
    png: bytes
    wide: bool = False


@contextmanager
def drawing() -> Iterator[None]:
    """The style of the report; names in letters that the font lacks are drawn by the browser's."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def new_axes(width: float = 4.5, height: float = 2.9, **options: Any) -> tuple["Figure", "Axes"]:
    """A figure, so many inches wide and high, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def finish(figure: "Figure", name: str, alt: str, wide: bool = False) -> Drawn:
    """Make both forms of a figure."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # it has its layout by now, for both forms
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return Drawn(name, alt, as_svg(figure, name, alt), png.getvalue(), wide)


def as_svg(figure: "Figure", name: str, alt: str) -> str:
    """The figure as SVG to stand in a page: no header, no background, ids of its own, the page's colour of text."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))

    def named(found: re.Match[str]) -> str:
        """An id that something refers to, at its first place."""
        if found[1] not in used:
            return ""
        used.remove(found[1])
        return found[0]

    text = re.sub(r' id="([^"]*)"', named, text)
    text = re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>{name}-", text)
    size = re.compile(r' (width|height)="[^"]*"')
    widest = f"max-width: {LARGEST * figure.get_figwidth():.0f}px"
    said = f' role="img" style="{widest}" aria-label="{escape(alt)}"'
    text = size.sub("", size.sub(lambda found: said, text, count=1), count=1)
    return re.sub(r"\n\s*", "\n", text.replace(INK, "currentColor"))


def fading(colour: str = COLOURS[0]) -> "Colormap":
    """From nothing to a colour, so that a heat map stands on light and dark pages."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("fading", [(*to_rgb(colour), 0.04), (*to_rgb(colour), 1.0)])


def label(name: str, most: int = 22) -> str:
    """A name on one line, cut to so many letters, without control characters."""
    plain = printable(name)
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"


def whole_rounds(axes: "Axes", text: str) -> None:
    """Name the x-axis, whose values are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def name_axis(axis: "XAxis | YAxis", names: Sequence[str], most: int = 45) -> None:
    """Put names on an axis of a heat map, or as many as can be read."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), [label(name) for name in names[::step]])


def line(axes: "Axes", place: int, x: Sequence[float], y: Sequence[float], text: str, size: float = 3) -> None:
    """Draw the figure's line of that place, with a marker at each point."""
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    axes.plot(x, y, color=colour, marker=marker, markersize=size, label=text)


def legend(figure: "Figure") -> None:
    """Above the plot, where it covers nothing."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper left", ncols=2, fontsize=8, columnspacing=1.0, handlelength=1.4, borderaxespad=0.2
        )


def cells(rows: Sequence[Sequence[float]]) -> Iterator[tuple[int, int, float]]:
    """Row, column and value of each cell."""
    return ((i, j, value) for i, row in enumerate(rows) for j, value in enumerate(row))
