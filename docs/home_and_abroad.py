# SPDX-License-Identifier: Apache-2.0
"""Draw home_and_abroad.svg from the table of README.md: `python docs/home_and_abroad.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "home_and_abroad.svg"
WIDTH, HEIGHT = 520, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 24, 56
X_RANGE, Y_RANGE = (40, 100), (0, 80)
HOME, ABROAD = "own images", "all clients' images"


def table_of(text: str) -> dict[str, dict[str, float]]:
    """Read the first table of a page that has both columns.

    Returns:
        For each method the score by column, without what follows the ±.
    """
    lines = text.splitlines()
    header = next(place for place, line in enumerate(lines) if HOME in line and ABROAD in line and line.startswith("|"))
    columns = [cell.strip() for cell in lines[header].split("|")[1:-1]]
    methods: dict[str, dict[str, float]] = {}
    for line in lines[header + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        scores = {}
        for column, cell in zip(columns, cells, strict=True):
            number = re.match(r"[\d.]+", cell.strip("* "))
            if column in (HOME, ABROAD) and number:
                scores[column] = float(number[0])
        if len(scores) == 2:
            methods[cells[0].strip("* ")] = scores
    return methods


def drawn(methods: dict[str, dict[str, float]]) -> str:
    """Draw a point for each method, as the text of an SVG file."""

    def x_of(score: float) -> float:
        return LEFT + (score - X_RANGE[0]) / (X_RANGE[1] - X_RANGE[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(score: float) -> float:
        return HEIGHT - BOTTOM - (score - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" role="img" '
        "aria-label=\"Accuracy of the hospitals' models on their own images and on all hospitals', by method.\">",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for score in range(X_RANGE[0], X_RANGE[1] + 1, 10):
        x = f"{x_of(score):.1f}"
        parts.append(f'<path d="M{x} {TOP} V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444">{score}</text>')
    for score in range(Y_RANGE[0], Y_RANGE[1] + 1, 20):
        y = f"{y_of(score):.1f}"
        parts.append(f'<path d="M{LEFT} {y} H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end" fill="#444">{score}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{middle_x}" y="{HEIGHT - 14}" text-anchor="middle" fill="#222">accuracy on own images, %</text>'
    )
    parts.append(
        f'<text transform="translate(18 {middle_y}) rotate(-90)" text-anchor="middle" fill="#222">'
        "accuracy on all hospitals' images, %</text>"
    )
    for method, scores in methods.items():
        x, y = x_of(scores[HOME]), y_of(scores[ABROAD])
        colour, weight = ("#c0392b", "bold") if method == "perada" else ("#2a7fb8", "normal")
        # Beside a point that is close and further right there is no room for the label.
        beside = [other for other in methods.values() if abs(other[ABROAD] - scores[ABROAD]) < 5]
        left = any(other[HOME] > scores[HOME] for other in beside)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        parts.append(
            f'<text x="{x + (-9 if left else 9):.1f}" y="{y + 4:.1f}" text-anchor="{"end" if left else "start"}" '
            f'fill="{colour}" font-weight="{weight}">{method}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(drawn(table_of((ROOT / "README.md").read_text(encoding="utf-8"))), encoding="utf-8")
