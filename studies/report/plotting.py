# SPDX-License-Identifier: Apache-2.0
"""The style and the parts of the report's figures, and their rendering as inline SVG and as PNG."""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
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
"""Colour of text and axes, which the SVG replaces by the colour of the page's text."""
COLOURS = ("#2f7de1", "#d9730d", "#0f9d76", "#a65fd6", "#d64f79", "#8f8a2a", "#5f7f99", "#b0603f")
"""Of lines and points. They stand out from white and from black, and differ in lightness."""
GREY = "#808080"
"""Of reference lines."""
MAX_PIXELS_PER_INCH = 125
"""Limit on the width of a figure in the page, so that small figures are not enlarged."""
MARKERS = "osD^vPX*"
MAX_NAMED_CLIENTS = 40
"""Largest number of clients whose names a figure shows."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
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


@dataclass(frozen=True)
class RenderedFigure:
    """A figure in the two forms that a report needs.

    Attributes:
        name: Name of its file, without an extension.
        alt: Description for readers who do not see the figure.
        svg: Markup for the page.
        png: Content of the PNG file.
        wide: Whether the figure takes the whole width of the page.
    """

    name: str
    alt: str
    svg: str
    png: bytes
    wide: bool = False


@contextmanager
def report_style() -> Iterator[None]:
    """Draw in the style of the report; letters that the font lacks are left to the browser's fonts."""
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def new_axes(width: float = 4.5, height: float = 2.9) -> tuple["Figure", "Axes"]:
    """Return a figure with one pair of axes, and the axes; width and height are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def render(figure: "Figure", name: str, alt: str, wide: bool = False) -> RenderedFigure:
    """Render a figure as SVG and as PNG.

    Args:
        figure: The finished figure.
        name: Name of its file, without an extension.
        alt: Description for readers who do not see the figure.
        wide: Whether the figure takes the whole width of the page.
    """
    figure.draw_without_rendering()
    # The layout is computed by now. Each savefig would compute it again, with slightly different results.
    figure.set_layout_engine("none")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return RenderedFigure(name=name, alt=alt, svg=as_svg(figure, name, alt), png=png.getvalue(), wide=wide)


def as_svg(figure: "Figure", name: str, alt: str) -> str:
    """Return a figure as SVG that can be placed in a page.

    It has no XML header and no background, its ids begin with ``name``, and its text has the colour of the page's text.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _with_unique_ids(svg, prefix=name)

    # The page scales the figure: its fixed size is replaced by a largest width.
    size = re.compile(r' (width|height)="[^"]*"')
    max_width = f"max-width: {MAX_PIXELS_PER_INCH * figure.get_figwidth():.0f}px"
    attributes = f' role="img" style="{max_width}" aria-label="{escape(printable(alt))}"'
    # re.sub() would interpret backslashes in a string, so the replacement is a function.
    svg = size.sub(lambda match: attributes, svg, count=1)
    svg = size.sub("", svg, count=1)
    return re.sub(r"\n\s*", "\n", svg.replace(INK, "currentColor"))


def _with_unique_ids(svg: str, prefix: str) -> str:
    """Remove ids that nothing refers to, and put a prefix before the others, since a page has many figures."""
    referenced = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))

    def keep_if_referenced(match: re.Match[str]) -> str:
        # matplotlib repeats some ids; only the first element may keep it.
        if match[1] not in referenced:
            return ""
        referenced.remove(match[1])
        return match[0]

    svg = re.sub(r' id="([^"]*)"', keep_if_referenced, svg)
    return re.sub(r'(\bid="|\burl\(#|href="#)', rf"\g<1>{prefix}-", svg)


def fading_colormap() -> "Colormap":
    """Return a colormap from transparent to the first colour, for heat maps on light and dark pages."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    rgb = to_rgb(COLOURS[0])
    return LinearSegmentedColormap.from_list("fading", [(*rgb, 0.04), (*rgb, 1.0)])


def short_label(name: str, limit: int = 22) -> str:
    """Return a name on one line without control characters, cut to ``limit`` characters."""
    plain = printable(name)
    if len(plain) <= limit:
        return plain
    return f"{plain[: limit - 1]}…"


def label_round_axis(axes: "Axes", text: str) -> None:
    """Label the x-axis, put its ticks at whole numbers, and end it at the last round."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _, last = axes.dataLim.intervalx
    if math.isfinite(last):
        # The margin would otherwise reach to a round that does not exist.
        axes.set_xlim(right=last + 0.4)


def set_tick_names(axis: "XAxis | YAxis", names: Sequence[str], limit: int = 45) -> None:
    """Put names on an axis of a heat map, leaving out some if there are more than ``limit``."""
    step = math.ceil(len(names) / limit)
    axis.set_ticks(range(0, len(names), step), [short_label(name) for name in names[::step]])


def colour_of(index: int) -> str:
    """Return the colour of the line or point with this index."""
    return COLOURS[index % len(COLOURS)]


def marker_of(index: int) -> str:
    """Return the marker of the line or point with this index."""
    return MARKERS[index % len(MARKERS)]


def draw_line(
    axes: "Axes", index: int, x: Sequence[float], y: Sequence[float], label: str, marker_size: float = 3
) -> None:
    """Draw a line with a marker at each point, in the colour of its index."""
    axes.plot(x, y, color=colour_of(index), marker=marker_of(index), markersize=marker_size, label=label)


def add_legend(figure: "Figure") -> None:
    """Put the legend above the plot, where it covers nothing; figures without labels have no legend."""
    handles, _ = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            loc="outside upper left", ncols=2, fontsize=8, columnspacing=1.0, handlelength=1.4, borderaxespad=0.2
        )


@dataclass(frozen=True)
class _Box:
    """A rectangle in a plot, in points (1/72 inch)."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "_Box") -> float:
        """Return the area that two boxes share."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)


LABEL_SIZE = 7
"""Size of the labels of points, in points."""
LABEL_GAP = 4
"""Distance between a point and its label, in points."""


@dataclass(frozen=True)
class _LabelSide:
    """A place of a label beside its point.

    Attributes:
        offset: From the point to the label's anchor, in points.
        alignment: Horizontal alignment of the label at its anchor.
        shift: Left edge of the label relative to its anchor, in widths of the label.
    """

    offset: tuple[float, float]
    alignment: str
    shift: float


LABEL_SIDES = (
    _LabelSide((LABEL_GAP, 0), "left", 0),
    _LabelSide((-LABEL_GAP, 0), "right", -1),
    _LabelSide((0, LABEL_SIZE), "center", -0.5),
    _LabelSide((0, -LABEL_SIZE), "center", -0.5),
    _LabelSide((LABEL_GAP, LABEL_SIZE), "left", 0),
    _LabelSide((LABEL_GAP, -LABEL_SIZE), "left", 0),
    _LabelSide((-LABEL_GAP, LABEL_SIZE), "right", -1),
    _LabelSide((-LABEL_GAP, -LABEL_SIZE), "right", -1),
)
"""Places of a label, the preferred ones first."""


def label_points(axes: "Axes", points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Write labels beside points, each on the side where it covers least of the other labels, the points and the edges.

    Sizes are estimated, since the layout is computed only when the figure is finished.
    """
    box = axes.get_window_extent()
    points_per_pixel = 72 / axes.figure.dpi
    plot_width = box.width * points_per_pixel
    plot_height = box.height * points_per_pixel
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    anchors = []
    for x, y in points:
        anchors.append(((x - left) / (right - left) * plot_width, (y - bottom) / (top - bottom) * plot_height))
    occupied = []
    for anchor_x, anchor_y in anchors:
        radius = LABEL_GAP - 1
        occupied.append(_Box(anchor_x - radius, anchor_y - radius, anchor_x + radius, anchor_y + radius))
    # What lies beyond the edges is as bad as what covers a label.
    far = 10 * (plot_width + plot_height)
    occupied += [_Box(-far, -far, 0, far), _Box(plot_width, -far, far, far)]
    occupied += [_Box(-far, -far, far, 0), _Box(-far, plot_height, far, far)]

    for point, anchor, label in zip(points, anchors, labels, strict=True):
        anchor_x, anchor_y = anchor
        width = 0.6 * LABEL_SIZE * len(label)
        overlaps = []
        boxes = []
        for side in LABEL_SIDES:
            text_left = anchor_x + side.offset[0] + side.shift * width
            middle = anchor_y + side.offset[1]
            candidate = _Box(text_left, middle - LABEL_SIZE / 2, text_left + width, middle + LABEL_SIZE / 2)
            overlaps.append(sum(candidate.overlap(other) for other in occupied))
            boxes.append(candidate)
        best = overlaps.index(min(overlaps))
        occupied.append(boxes[best])
        axes.annotate(
            label,
            point,
            LABEL_SIDES[best].offset,
            textcoords="offset points",
            ha=LABEL_SIDES[best].alignment,
            va="center",
            fontsize=LABEL_SIZE,
        )


def write_in_cells(axes: "Axes", cell_rows: Sequence[Sequence[float]], text_of: Callable[[float], str]) -> None:
    """Write a text into each cell of a heat map.

    Args:
        axes: Axes with the heat map.
        cell_rows: Values of the cells, row by row.
        text_of: Returns the text for a value; a cell with an empty text stays empty.
    """
    for row_number, row in enumerate(cell_rows):
        for column, value in enumerate(row):
            text = text_of(value)
            if text:
                axes.text(column, row_number, text, ha="center", va="center", fontsize=7)


def count_text(count: float) -> str:
    """Return a count as text; 0 is empty, so that heat maps of counts stay readable."""
    return str(count) if count else ""
