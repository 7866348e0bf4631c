# SPDX-License-Identifier: Apache-2.0
"""Draw home_and_abroad.svg from the table of README.md: `python docs/home_and_abroad.py`.

A method is a circle: to the right are good scores on own images, at the top good scores on all clients' images, and the
area is what a client sends in a round.
"""

import math
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "home_and_abroad.svg"
HOME, ABROAD, SENT = "own images", "all clients' images", "MB sent"

# A phone shows the figure about 340 pixels wide, where 14 units of 420 are 11 pixels.
WIDTH, HEIGHT, FONT_SIZE = 420, 420, 14
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 40, 60
# Ten classes are guessed with 10 %.
X_RANGE, Y_RANGE = (50, 96), (10, 70)
LARGEST_RADIUS, RING_RADIUS = 14.0, 4.0
LETTER_WIDTH, LINE_HEIGHT, GAP = 0.6 * FONT_SIZE, 1.1 * FONT_SIZE, 4

# An image in a page cannot see the page's colours, but it does see whether the reader's system is dark.
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
        """Whether two boxes share more than an edge."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Circle(NamedTuple):
    """The circle of a method."""

    x: float
    y: float
    radius: float

    @property
    def box(self) -> Box:
        """The square around the circle."""
        return Box(self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius)


def read_table(text: str) -> dict[str, dict[str, float]]:
    """Read the first table of a page that has the columns of the figure.

    Returns:
        For each method the value by column, without what follows the ±.
    """
    lines = text.splitlines()
    header = next(place for place, line in enumerate(lines) if HOME in line and ABROAD in line and line.startswith("|"))
    columns = [cell.strip() for cell in lines[header].split("|")[1:-1]]
    methods: dict[str, dict[str, float]] = {}
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip("* ") for cell in line.split("|")[1:-1]]
        values = {}
        for column, cell in zip(columns, cells, strict=True):
            number = re.match(r"[\d.]+", cell)
            if column in (HOME, ABROAD, SENT) and number:
                values[column] = float(number[0])
        methods[cells[0]] = values
    return methods


def x_of(score: float) -> float:
    """Horizontal place of a score on own images."""
    return LEFT + (score - X_RANGE[0]) / (X_RANGE[1] - X_RANGE[0]) * (WIDTH - LEFT - RIGHT)


def y_of(score: float) -> float:
    """Vertical place of a score on all clients' images."""
    return HEIGHT - BOTTOM - (score - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0]) * (HEIGHT - TOP - BOTTOM)


def place_label(lines: list[str], circle: Circle, taken: list[Box]) -> Box:
    """Find room for a label beside its circle.

    Args:
        lines: The lines of the label.
        circle: The circle that the label names.
        taken: Boxes of all circles, and of the labels that have their place.

    Raises:
        ValueError: There is no free place on any side of the circle.
    """
    width = max(map(len, lines)) * LETTER_WIDTH
    height = len(lines) * LINE_HEIGHT
    around = circle.box
    places = [
        (around.right + GAP, circle.y - height / 2),
        (around.left - GAP - width, circle.y - height / 2),
        (circle.x - width / 2, around.bottom + GAP),
        (circle.x - width / 2, around.top - GAP - height),
    ]
    plot = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    for left, top in places:
        label = Box(left, top, left + width, top + height)
        inside = plot.left <= label.left and label.right <= plot.right and plot.top <= label.top
        inside = inside and label.bottom <= plot.bottom
        if inside and not any(label.overlaps(box) for box in taken):
            return label
    raise ValueError(f"no room for the label {' '.join(lines)!r}: widen X_RANGE or Y_RANGE, or make circles smaller")


def draw_axes() -> list[str]:
    """Draw the background, grid, ticks and titles."""
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
    """Draw a circle and a label for each method, as the text of an SVG file."""
    most = max(values[SENT] for values in methods.values())
    circles = {}
    for method, values in methods.items():
        radius = LARGEST_RADIUS * math.sqrt(values[SENT] / most) if values[SENT] else RING_RADIUS
        circles[method] = Circle(x_of(values[HOME]), y_of(values[ABROAD]), radius)
    taken = [circle.box for circle in circles.values()]
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
        lines = [method, f"{sent:g} MB" if sent == 0 else f"{sent:.2f} MB"]
        label = place_label(lines, circle, taken)
        taken.append(label)
        middle = (label.left + label.right) / 2
        for number, line in enumerate(lines):
            baseline = label.top + (number + 0.8) * LINE_HEIGHT
            parts.append(
                f'<text class="{colour}" x="{middle:.1f}" y="{baseline:.1f}" text-anchor="middle">{line}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw_figure(read_table((ROOT / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
