# SPDX-License-Identifier: Apache-2.0
"""Draw home_and_abroad.svg from the table of README.md: `python docs/home_and_abroad.py`.

A method is a point: to the right are good scores on own images, at the top good scores on all clients' images. An arrow
leads from the personal models of a method to its prediction with both models.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "home_and_abroad.svg"
PREDICTS_WITH, HOME, ABROAD = "predicts with", "own images", "all clients' images"
BOTH, PERSONAL = "both models", "personal model"
"""Cells of the second column in rows of methods with a personal and a global model."""

# A phone shows the figure about 340 pixels wide, where 14 units of 420 are 11 pixels.
WIDTH, HEIGHT, FONT_SIZE = 420, 420, 14
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 40, 60
# Ten classes are guessed with 10 %.
X_RANGE, Y_RANGE = (50, 96), (10, 80)
RADIUS, SMALL_RADIUS = 6.0, 3.5
LETTER_WIDTH, LINE_HEIGHT, GAP = 0.6 * FONT_SIZE, 1.1 * FONT_SIZE, 4

# An image in a page cannot see the page's colours, but it does see whether the reader's system is dark.
STYLE = """<style>
.back { fill: #ffffff } .grid { stroke: #d8dee4 } text { fill: #24292f }
.perada { fill: #b3261e; stroke: #b3261e } .other { fill: #0b5cad; stroke: #0b5cad }
.arrow { stroke-width: 2; stroke-dasharray: 5 4 }
text.perada { stroke: none; font-weight: bold } text.other { stroke: none }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } .grid { stroke: #30363d } text { fill: #e6edf3 }
.perada { fill: #ff8f85; stroke: #ff8f85 } .other { fill: #79b8ff; stroke: #79b8ff }
}
</style>"""


@dataclass(frozen=True)
class Scores:
    """Scores of one row of the table, in %."""

    home: float
    abroad: float


@dataclass(frozen=True)
class Method:
    """The scores of a method.

    Attributes:
        best: Those that its point shows: of both models together where it has them.
        personal: Those of its personal models alone; None for a method without a second row.
    """

    best: Scores
    personal: Scores | None = None


@dataclass(frozen=True)
class Box:
    """A rectangle in the units of the figure."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether two boxes share more than an edge."""
        beside = self.right <= other.left or other.right <= self.left
        above = self.bottom <= other.top or other.bottom <= self.top
        return not (beside or above)


@dataclass(frozen=True)
class Point:
    """A point of the figure, drawn as a circle."""

    x: float
    y: float
    radius: float

    @property
    def box(self) -> Box:
        """The square around the circle."""
        return Box(
            self.x - self.radius,
            self.y - self.radius,
            self.x + self.radius,
            self.y + self.radius,
        )


def read_table(text: str) -> dict[str, Method]:
    """Read the first table of a page that has the columns of the figure, without what follows the ±."""
    lines = text.splitlines()
    header = next(
        place
        for place, line in enumerate(lines)
        if line.startswith("|") and HOME in line and ABROAD in line
    )
    columns = [cell.strip() for cell in lines[header].split("|")[1:-1]]
    scores: dict[str, dict[str, Scores]] = {}
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip("* ") for cell in line.split("|")[1:-1]]
        value_of = dict(zip(columns, cells, strict=True))
        numbers = [float(value_of[column].split()[0]) for column in (HOME, ABROAD)]
        scores.setdefault(cells[0], {})[value_of[PREDICTS_WITH]] = Scores(*numbers)
    methods: dict[str, Method] = {}
    for name, scores_of_method in scores.items():
        if BOTH in scores_of_method:
            methods[name] = Method(
                scores_of_method[BOTH], scores_of_method[PERSONAL]
            )
        else:
            (only_scores,) = scores_of_method.values()
            methods[name] = Method(only_scores)
    return methods


def point_of(scores: Scores, radius: float) -> Point:
    """Return the place of scores in the figure."""
    x_share = (scores.home - X_RANGE[0]) / (X_RANGE[1] - X_RANGE[0])
    y_share = (scores.abroad - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0])
    x = LEFT + x_share * (WIDTH - LEFT - RIGHT)
    y = HEIGHT - BOTTOM - y_share * (HEIGHT - TOP - BOTTOM)
    return Point(x, y, radius)


def place_label(text: str, point: Point, taken: list[Box]) -> Box:
    """Find room for a label beside its point.

    Args:
        text: The label.
        point: The point that the label names.
        taken: Boxes of all points and arrows, and of the labels that have their place.

    Raises:
        ValueError: There is no free place on any side of the point.
    """
    width = len(text) * LETTER_WIDTH
    around = point.box
    places = [
        (around.right + GAP, point.y - LINE_HEIGHT / 2),
        (around.left - GAP - width, point.y - LINE_HEIGHT / 2),
        (point.x - width / 2, around.top - GAP - LINE_HEIGHT),
        (point.x - width / 2, around.bottom + GAP),
    ]
    plot = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    for left, top in places:
        label = Box(left, top, left + width, top + LINE_HEIGHT)
        fits_across = plot.left <= label.left and label.right <= plot.right
        fits_down = plot.top <= label.top and label.bottom <= plot.bottom
        if (
            fits_across
            and fits_down
            and not any(label.overlaps(box) for box in taken)
        ):
            return label
    raise ValueError(
        f"no room for the label {text!r}: widen X_RANGE or Y_RANGE, or make points smaller"
    )


def cover_arrow(start: Point, end: Point) -> list[Box]:
    """Return boxes that cover the line between two points, each as high or as wide as half a letter."""
    pieces = max(
        1, round(math.dist((start.x, start.y), (end.x, end.y)) / (FONT_SIZE / 2))
    )
    corners = []
    for piece in range(pieces + 1):
        share = piece / pieces
        corners.append(
            (
                start.x + share * (end.x - start.x),
                start.y + share * (end.y - start.y),
            )
        )
    boxes = []
    for (x, y), (next_x, next_y) in itertools.pairwise(corners):
        boxes.append(
            Box(
                min(x, next_x) - 1,
                min(y, next_y),
                max(x, next_x) + 1,
                max(y, next_y),
            )
        )
    return boxes


def draw_axes() -> list[str]:
    """Draw the background, grid, ticks and titles."""
    parts = [f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>']
    for score in range(X_RANGE[0], X_RANGE[1] + 1, 10):
        x = f"{point_of(Scores(score, 0), 0).x:.1f}"
        parts.append(f'<path class="grid" d="M{x} {TOP} V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{score}</text>'
        )
    for score in range(Y_RANGE[0], Y_RANGE[1] + 1, 10):
        y = f"{point_of(Scores(0, score), 0).y:.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y} H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y}" dy="5" text-anchor="end">{score}</text>'
        )
    middle_x = (LEFT + WIDTH - RIGHT) / 2
    middle_y = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{middle_x}" y="24" text-anchor="middle">Good at home, and abroad</text>'
    )
    parts.append(
        f'<text x="{middle_x}" y="{HEIGHT - 14}" text-anchor="middle">accuracy on own images, %</text>'
    )
    parts.append(
        f'<text transform="translate(17 {middle_y}) rotate(-90)" text-anchor="middle">'
        "accuracy on all clients' images, %</text>"
    )
    return parts


def draw_figure(methods: dict[str, Method]) -> str:
    """Draw a point and a label for each method, and its arrow, as the text of an SVG file."""
    best_points = {
        name: point_of(method.best, RADIUS) for name, method in methods.items()
    }
    personal_points: dict[str, Point] = {}
    for name, method in methods.items():
        if method.personal is not None:
            personal_points[name] = point_of(method.personal, SMALL_RADIUS)
    taken = [
        point.box for point in (*best_points.values(), *personal_points.values())
    ]
    for name, start in personal_points.items():
        taken += cover_arrow(start, best_points[name])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}" role="img" '
        'aria-label="Accuracy of each method on own images and on all clients\' images, and with both models.">',
        STYLE,
        *draw_axes(),
    ]
    for name, point in best_points.items():
        colour = "perada" if name == "perada" else "other"
        if name in personal_points:
            start = personal_points[name]
            parts.append(
                f'<path class="{colour} arrow" d="M{start.x:.1f} {start.y:.1f} L{point.x:.1f} {point.y:.1f}"/>'
            )
            parts.append(
                f'<circle class="{colour}" cx="{start.x:.1f}" cy="{start.y:.1f}" r="{start.radius}"/>'
            )
        parts.append(
            f'<circle class="{colour}" cx="{point.x:.1f}" cy="{point.y:.1f}" r="{point.radius}"/>'
        )
        label = place_label(name, point, taken)
        taken.append(label)
        middle = (label.left + label.right) / 2
        baseline = label.top + 0.8 * LINE_HEIGHT
        parts.append(
            f'<text class="{colour}" x="{middle:.1f}" y="{baseline:.1f}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(
        draw_figure(read_table((ROOT / "README.md").read_text(encoding="utf-8"))),
        encoding="utf-8",
    )
