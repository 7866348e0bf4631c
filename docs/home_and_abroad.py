# SPDX-License-Identifier: Apache-2.0
"""Draw home_and_abroad.svg from the table of README.md: `python docs/home_and_abroad.py`.

Each method is a circle. Its horizontal position is the accuracy on the clients' own images, its vertical position the
accuracy on all clients' images, and its area the number of megabytes that a client sends in a round.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "home_and_abroad.svg"
# Columns of the table.
HOME = "own images"
ABROAD = "all clients' images"
SENT = "MB sent"

WIDTH = 420
HEIGHT = 420
# A phone displays the figure about 340 pixels wide, so that 14 of 420 units are 11 pixels.
FONT_SIZE = 14
# Margins around the plot.
LEFT = 52
RIGHT = 14
TOP = 40
BOTTOM = 60
# Scores in percent; guessing one of ten classes gives 10 %.
X_RANGE = (50, 96)
Y_RANGE = (10, 70)
LARGEST_RADIUS = 14.0
# Radius of a method that sends nothing, which is drawn as a ring.
RING_RADIUS = 4.0
# Sizes of a label's text, for finding room.
LETTER_WIDTH = 0.6 * FONT_SIZE
LINE_HEIGHT = 1.1 * FONT_SIZE
# Distance between a circle and its label.
GAP = 4

# An image in a page does not know the page's colours, but it knows whether the reader's system is dark.
STYLE = """<style>
.back { fill: #ffffff } .grid { stroke: #d8dee4 } text { fill: #24292f }
.perada { fill: #b3261e; stroke: #b3261e } .other { fill: #0b5cad; stroke: #0b5cad }
.ring { fill: none; stroke-width: 2 }
text.perada { stroke: none; font-weight: bold } text.other { stroke: none }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } .grid { stroke: #30363d } text { fill: #e6edf3 }
.perada { fill: #ff8f85; stroke: #ff8f85 } .other { fill: #79b8ff; stroke: #79b8ff } .ring { fill: none }
}
</style>"""


class Box(NamedTuple):
    """A rectangle in the units of the figure."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether two boxes share more than an edge."""
        overlaps_in_x = self.left < other.right and other.left < self.right
        overlaps_in_y = self.top < other.bottom and other.top < self.bottom
        return overlaps_in_x and overlaps_in_y

    def contains(self, other: "Box") -> bool:
        """Return whether another box is inside this one."""
        contains_in_x = self.left <= other.left and other.right <= self.right
        contains_in_y = self.top <= other.top and other.bottom <= self.bottom
        return contains_in_x and contains_in_y


class Circle(NamedTuple):
    """The circle of a method, in the units of the figure."""

    x: float
    y: float
    radius: float

    @property
    def box(self) -> Box:
        """The square around the circle."""
        return Box(self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius)


def read_table(text: str) -> dict[str, dict[str, float]]:
    """Read the first table of a page that has the columns of the figure.

    Args:
        text: The page, in Markdown.

    Returns:
        Values by method and column, without their standard deviations.
    """
    lines = text.splitlines()
    header = next(row for row, line in enumerate(lines) if HOME in line and ABROAD in line and line.startswith("|"))
    columns = [cell.strip() for cell in lines[header].split("|")[1:-1]]
    methods: dict[str, dict[str, float]] = {}
    # The line after the header has only dashes.
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip("* ") for cell in line.split("|")[1:-1]]
        values = {}
        for column, cell in zip(columns, cells, strict=True):
            # The number before the ±.
            number = re.match(r"[\d.]+", cell)
            if column in (HOME, ABROAD, SENT) and number:
                values[column] = float(number[0])
        methods[cells[0]] = values
    return methods


def x_of(score: float) -> float:
    """Return the horizontal position of a score on own images."""
    return LEFT + (score - X_RANGE[0]) / (X_RANGE[1] - X_RANGE[0]) * (WIDTH - LEFT - RIGHT)


def y_of(score: float) -> float:
    """Return the vertical position of a score on all clients' images."""
    return HEIGHT - BOTTOM - (score - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0]) * (HEIGHT - TOP - BOTTOM)


def place_label(lines: list[str], circle: Circle, obstacles: list[Box]) -> Box:
    """Return a free box for a label next to its circle.

    Args:
        lines: Lines of the label.
        circle: Circle of the label.
        obstacles: Boxes of all circles, and of the labels that were placed before.

    Raises:
        ValueError: If there is no room on any side of the circle.
    """
    width = max(map(len, lines)) * LETTER_WIDTH
    height = len(lines) * LINE_HEIGHT
    square = circle.box
    # To the right, to the left, below and above the circle.
    corners = [
        (square.right + GAP, circle.y - height / 2),
        (square.left - GAP - width, circle.y - height / 2),
        (circle.x - width / 2, square.bottom + GAP),
        (circle.x - width / 2, square.top - GAP - height),
    ]
    plot = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    for left, top in corners:
        label = Box(left, top, left + width, top + height)
        is_free = not any(label.overlaps(box) for box in obstacles)
        if is_free and plot.contains(label):
            return label
    raise ValueError(f"no room for the label {' '.join(lines)!r}: widen X_RANGE or Y_RANGE, or make circles smaller")


def draw_axes() -> list[str]:
    """Return the SVG elements of the background, the grid, the ticks and the titles."""
    parts = [f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>']
    for score in range(X_RANGE[0], X_RANGE[1] + 1, 10):
        x = f"{x_of(score):.1f}"
        parts.append(f'<path class="grid" d="M{x} {TOP} V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{score}</text>')
    for score in range(Y_RANGE[0], Y_RANGE[1] + 1, 10):
        y = f"{y_of(score):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y} H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="5" text-anchor="end">{score}</text>')
    middle_x = (LEFT + WIDTH - RIGHT) / 2
    middle_y = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="24" text-anchor="middle">area of a circle: MB sent in a round</text>')
    parts.append(f'<text x="{middle_x}" y="{HEIGHT - 14}" text-anchor="middle">accuracy on own images, %</text>')
    parts.append(
        f'<text transform="translate(17 {middle_y}) rotate(-90)" text-anchor="middle">'
        "accuracy on all clients' images, %</text>"
    )
    return parts


def draw_figure(methods: dict[str, dict[str, float]]) -> str:
    """Return the text of an SVG file with a circle and a label for each method."""
    largest_sent = max(values[SENT] for values in methods.values())
    circles = {}
    for method, values in methods.items():
        radius = RING_RADIUS
        if values[SENT]:
            # The area, not the radius, is proportional to the value.
            radius = LARGEST_RADIUS * math.sqrt(values[SENT] / largest_sent)
        circles[method] = Circle(x_of(values[HOME]), y_of(values[ABROAD]), radius)
    obstacles = [circle.box for circle in circles.values()]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}" role="img" '
        'aria-label="Accuracy of each method on own images and on all clients\' images, and MB sent in a round.">',
        STYLE,
        *draw_axes(),
    ]
    for method, circle in circles.items():
        sent = methods[method][SENT]
        colour = "perada" if method == "perada" else "other"
        ring = "" if sent else " ring"
        parts.append(
            f'<circle class="{colour}{ring}" cx="{circle.x:.1f}" cy="{circle.y:.1f}" r="{circle.radius:.2f}"/>'
        )
        amount = f"{sent:.2f} MB" if sent else "0 MB"
        lines = [method, amount]
        label = place_label(lines, circle, obstacles)
        obstacles.append(label)
        middle = (label.left + label.right) / 2
        for number, line in enumerate(lines):
            baseline = label.top + (number + 0.8) * LINE_HEIGHT
            parts.append(
                f'<text class="{colour}" x="{middle:.1f}" y="{baseline:.1f}" text-anchor="middle">{line}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    FIGURE.write_text(draw_figure(read_table(page)), encoding="utf-8")
