# SPDX-License-Identifier: Apache-2.0
"""The figures of test images with right and wrong predictions, and of the server's public images."""

import math
from typing import TYPE_CHECKING

from perada.studies.report.pictures import PredictedExample
from perada.studies.report.plotting import COLOURS, RenderedFigure, render, report_style, short_label
from perada.studies.report.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RIGHT_COLOUR = COLOURS[2]
"""Frame of an image that is predicted correctly."""
WRONG_COLOUR = COLOURS[1]
"""Frame of an image that is not."""
MAX_ROWS = 6
"""Largest number of clients below each other."""
PUBLIC_COLUMNS = 8


def predicted_images(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw test images with right and with wrong predictions, a row for each client."""
    if not record.predicted_examples:
        return None
    examples_of_clients: dict[int, list[PredictedExample]] = {}
    for example in record.predicted_examples:
        examples_of_clients.setdefault(example.client, []).append(example)
    num_right = max(_count_right(examples) for examples in examples_of_clients.values())
    num_wrong = max(len(examples) - _count_right(examples) for examples in examples_of_clients.values())
    num_columns = num_right + num_wrong
    # Many clients stand in two blocks side by side, since a page is wider than high.
    num_blocks = 2 if len(examples_of_clients) > MAX_ROWS else 1
    num_rows = math.ceil(len(examples_of_clients) / num_blocks)
    with report_style():
        from matplotlib.figure import Figure

        width = num_blocks * (0.72 * num_columns + 1.1)
        figure = Figure(figsize=(width, 0.9 * num_rows + 0.2), layout="constrained")
        places = figure.subplots(num_rows, num_blocks * num_columns, squeeze=False)
        for axes in places.flatten().tolist():
            _leave_empty(axes)
        for rank, (client, examples) in enumerate(sorted(examples_of_clients.items())):
            first_column = rank // num_rows * num_columns
            axes_of_client = places[rank % num_rows, first_column : first_column + num_columns]
            client_name = short_label(record.client_names[client], 12)
            axes_of_client[0].set_ylabel(client_name, fontsize=7.5, rotation=0, ha="right", va="center")
            right = [example for example in examples if example.is_right]
            wrong = [example for example in examples if not example.is_right]
            for axes, example in zip(axes_of_client[:num_right], right, strict=False):
                _draw_example(axes, example, record)
            for axes, example in zip(axes_of_client[num_right:], wrong, strict=False):
                _draw_example(axes, example, record)
        alt = (
            "The first test images of each client that are predicted correctly (green frames, left) and the first that "
            "are not (orange frames, right, with the prediction and the true class)."
        )
        return render(figure, name, alt, wide=num_columns > 3)


def _count_right(examples: list[PredictedExample]) -> int:
    return sum(example.is_right for example in examples)


def _draw_example(axes: "Axes", example: PredictedExample, record: RunRecord) -> None:
    """Draw an image in a frame, with its class, and the predicted one if it is another."""
    axes.imshow(example.picture, cmap="gray", vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    label = short_label(record.class_names[example.label], 12)
    if example.is_right:
        text = f"{label} ✓"
    elif example.predicted is None:
        text = f"none ✗ ({label})"
    else:
        text = f"{short_label(record.class_names[example.predicted], 12)} ✗ ({label})"
    axes.set_title(text, fontsize=7)
    colour = RIGHT_COLOUR if example.is_right else WRONG_COLOUR
    axes.spines[:].set(visible=True, color=colour, linewidth=2)


def _leave_empty(axes: "Axes") -> None:
    """Hide the frame of a place without an image, but keep the name of a client beside it."""
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set(visible=False)
    axes.patch.set_visible(False)


def public_images(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw some of the server's public images."""
    pictures = record.public_pictures
    if not pictures:
        return None
    num_columns = min(PUBLIC_COLUMNS, len(pictures))
    num_rows = math.ceil(len(pictures) / num_columns)
    with report_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.0 * num_columns, 1.05 * num_rows), layout="constrained")
        places = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
        for axes in places:
            _leave_empty(axes)
        for axes, picture in zip(places, pictures, strict=False):
            axes.imshow(picture, cmap="gray", vmin=0, vmax=255)
        alt = f"{len(pictures)} of the server’s public images, spread evenly over the set."
        return render(figure, name, alt, wide=num_columns > 3)
