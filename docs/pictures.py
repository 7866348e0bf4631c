# SPDX-License-Identifier: Apache-2.0
"""Draw pictures of the documentation: `python docs/pictures.py` (with the extras `examples` and `shifts`).

scanners.svg and corruptions.svg show one digit as each scanner and each corruption leaves it, deployment.svg what
travels between a server and its sites, and round.svg a round of PerAda.
"""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from perada.data import Digits
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.scanners import DEVICES, scan
from perada.data.shifts import GROUPS, corrupt

DOCS = Path(__file__).parent
DIGIT, SIDE, SEVERITY = 4, 32, 3
"""Which of the digits is shown, its height and width in pixels, and how strongly it is corrupted."""

# A phone shows pictures about 340 pixels wide, where 14 units of 420 are 11 pixels.
WIDTH, FONT_SIZE, LINE_HEIGHT = 420, 14, 18

# An image in a page cannot see the page's colours, but it does see whether the reader's system is dark.
STYLE = """<style>
.back { fill: #ffffff } .box { fill: #f0f3f6; stroke: #8c959f } text { fill: #24292f }
.arrow { stroke: #0b5cad; stroke-width: 2; fill: none } .head { fill: #0b5cad } .label { fill: #0b5cad }
.title { font-weight: bold }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117 } .box { fill: #21262d; stroke: #6e7681 } text { fill: #e6edf3 }
.arrow { stroke: #79b8ff } .head { fill: #79b8ff } .label { fill: #79b8ff }
}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>"""


def frame(parts: Sequence[str], height: int, description: str) -> str:
    """Return the text of an SVG file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}" role="img" aria-label="{description}">'
    )
    background = f'<rect class="back" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, STYLE, background, *parts, "</svg>", ""])


def write(
    lines: Sequence[str],
    x: float,
    y: float,
    style: str = "",
    anchor: str = "middle",
) -> list[str]:
    """Write lines of text below each other; y is the first baseline."""
    attribute = f' class="{style}"' if style else ""
    return [
        f'<text{attribute} x="{x:g}" y="{y + number * LINE_HEIGHT:g}" text-anchor="{anchor}">{line}</text>'
        for number, line in enumerate(lines)
    ]


def box(
    title: str, lines: Sequence[str], left: float, top: float, width: float
) -> list[str]:
    """Draw a box with a title and lines of text, as high as they need."""
    height = (1 + len(lines)) * LINE_HEIGHT + 14
    rectangle = f'<rect class="box" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="6"/>'
    middle, baseline = left + width / 2, top + 22
    return [
        rectangle,
        *write([title], middle, baseline, "title"),
        *write(lines, middle, baseline + LINE_HEIGHT),
    ]


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draw an arrow between two points."""
    path = f"M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}"
    return f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'


def draw_sheet(images: dict[str, Tensor], columns: int, description: str) -> str:
    """Draw named images in rows, each name below its image.

    Args:
        images: uint8 (1, H, W) by name.
        columns: Number of images in a row.
        description: For readers who do not see the picture.
    """
    cell_width = WIDTH / columns
    image_side = cell_width - 20
    cell_height = image_side + 2 * LINE_HEIGHT + 12
    parts = []
    for number, (name, image) in enumerate(images.items()):
        row, column = divmod(number, columns)
        left, top = column * cell_width + 10, row * cell_height + 10
        file = io.BytesIO()
        Image.fromarray(image[0].numpy()).save(file, format="PNG")
        data = base64.b64encode(file.getvalue()).decode()
        parts.append(
            f'<image x="{left:g}" y="{top:g}" width="{image_side:g}" height="{image_side:g}" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{data}"/>'
        )
        parts += write(
            split_name(name),
            left + image_side / 2,
            top + image_side + LINE_HEIGHT - 2,
        )
    rows = -(-len(images) // columns)
    return frame(parts, round(rows * cell_height) + 6, description)


def split_name(name: str) -> list[str]:
    """Break a long name behind its last underscore, so that it fits below an image."""
    if len(name) <= 9 or "_" not in name:
        return [name]
    first, _, second = name.rpartition("_")
    return [f"{first}_", second]


def read_digit() -> Tensor:
    """Return the digit that is shown: uint8 (1, 1, SIDE, SIDE)."""
    image, _ = Digits(train=True)[DIGIT]
    return resize_uint8(image[None], SIDE)


def scanned_images() -> dict[str, Tensor]:
    """Return the digit as each scanner sees it: uint8 (1, SIDE, SIDE) by the name of the scanner."""
    digit = read_digit()
    return {name: scan(digit, name, [0])[0] for name in DEVICES}


def corrupted_images() -> dict[str, Tensor]:
    """Return the digit and its corruptions: uint8 (1, SIDE, SIDE) by kind."""
    digit = read_digit()[0]
    return {"unchanged": digit} | {
        kind: corrupt(digit, kind, SEVERITY, seed=0) for kind in GROUPS["all"]
    }


def draw_scanners() -> str:
    """Draw what each scanner does to an image."""
    return draw_sheet(
        scanned_images(),
        4,
        "The same digit as each of the twelve scanners sees it.",
    )


def draw_corruptions() -> str:
    """Draw what each kind of corruption does to an image."""
    return draw_sheet(
        corrupted_images(),
        4,
        f"A digit, and its 19 kinds of corruption with severity {SEVERITY}.",
    )


def draw_deployment() -> str:
    """Draw a server and three sites, and what travels between them."""
    server_lines = ["recipe, common adapter,", "unlabelled public images"]
    site_lines = [
        "images, labels",
        "personal model",
        "ε account",
        "log of all sent",
    ]
    site_width, site_top = 124, 206
    parts = box("Server", server_lines, 40, 14, 340)
    for number, name in enumerate("ABC"):
        left = 10 + number * (site_width + 14)
        parts += box(f"Site {name}", site_lines, left, site_top, site_width)
        parts.append(arrow((left + 45, 84), (left + 45, site_top - 4)))
        parts.append(arrow((left + 79, site_top - 2), (left + 79, 86)))
    # The words lie on the arrows of all sites.
    parts.append('<rect class="back" x="10" y="112" width="400" height="66"/>')
    parts += write(["↓ common adapter"], WIDTH / 2, 130, "label")
    parts += write(
        [
            "↑ what the site changed in it: as it is,",
            "with noise (ε), or masked (secure sums)",
        ],
        WIDTH / 2,
        150,
        "label",
    )
    parts += write(["Everything in the box of a site stays there."], WIDTH / 2, 332)
    return frame(
        parts,
        346,
        "The server sends the common adapter to three sites, which send what they changed in it.",
    )


def draw_round() -> str:
    """Draw a round of PerAda."""
    server_left, client_left, width = 36, 236, 174
    parts = box("Server", ["has the common", "adapter w"], server_left, 14, width)
    client_lines = [
        "trains θ from w, and v,",
        "which λ pulls to w,",
        "on its own images",
    ]
    parts += box("Each sampled client", client_lines, client_left, 14, width)
    parts += box("Server", ["averages the θ"], server_left, 150, width)
    parts += box(
        "Server", ["distils them on", "public images"], server_left, 244, width
    )
    parts += box(
        "Each client", ["keeps v, its", "personal adapter"], client_left, 244, width
    )
    server_middle, client_middle = server_left + width / 2, client_left + width / 2
    parts += [
        arrow((server_left + width + 2, 40), (client_left - 3, 40)),
        *write(["w"], 223, 32, "label"),
    ]
    parts += [
        arrow((client_left + 10, 102), (server_left + width - 40, 147)),
        *write(["θ"], 218, 134, "label"),
    ]
    parts += [arrow((server_middle, 202), (server_middle, 241))]
    parts += [
        arrow((client_middle, 102), (client_middle, 241)),
        *write(["v"], client_middle + 14, 176, "label"),
    ]
    back = f"M{server_left} 280 H16 V40 H{server_left - 3}"
    parts += [
        f'<path class="arrow" d="{back}" marker-end="url(#head)"/>',
        *write(["w"], 26, 170, "label"),
    ]
    return frame(
        parts,
        326,
        "A round: w goes to clients, which train θ and v; the server averages the θ and distils.",
    )


PICTURES: dict[str, Callable[[], str]] = {
    "scanners.svg": draw_scanners,
    "corruptions.svg": draw_corruptions,
    "deployment.svg": draw_deployment,
    "round.svg": draw_round,
}


if __name__ == "__main__":
    for file_name, draw in PICTURES.items():
        (DOCS / file_name).write_text(draw(), encoding="utf-8")
