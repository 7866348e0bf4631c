# SPDX-License-Identifier: Apache-2.0
"""The figure of test images with their true and predicted masks."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perada.studies.report.pictures import MaskExample, Pixels
from perada.studies.report.plotting import COLOURS, RenderedFigure, render, report_style, short_label
from perada.studies.report.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLOURS = 20
"""Number of colours of classes; further classes begin again with the first."""
IGNORED_COLOUR = "#ffffff"
"""Colour of pixels that do not count."""
BACKGROUND_COLOUR = "#d5dae0"
"""Colour of class 0."""
_TITLE_OF_MODEL = {"personal": "client's own model", "global": "global model", "both": "both models"}
"""Titles of the models by the names that their predictions have."""


def masks(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw test images beside their true masks and the predicted ones, a row for each image."""
    if not record.examples:
        return None
    examples = record.examples
    models = [model for model in _TITLE_OF_MODEL if all(model in example.predictions for example in examples)]
    if len(models) == 2 and all(_are_equal(example) for example in examples):
        # Clients predict with the global model.
        models = ["global"]
    classes = record.class_names
    ignored = int(record.task.get("init_args", {}).get("ignore_index", 255))
    with report_style():
        from matplotlib.figure import Figure

        num_columns = 2 + len(models)
        figure = Figure(figsize=(1.7 * num_columns + 0.4, 1.7 * len(examples) + 0.7), layout="constrained")
        rows = figure.subplots(len(examples), num_columns, squeeze=False)
        titles = ["image", "true mask", *(_TITLE_OF_MODEL[model] for model in models)]
        for axes, title in zip(rows[0], titles, strict=True):
            axes.set_title(title)
        for axes_of_row, example in zip(rows, examples, strict=True):
            axes_of_row[0].set_ylabel(f"{_client_name(record, example)}\nimage {example.number}", fontsize=8)
            axes_of_row[0].imshow(example.picture, cmap="gray", vmin=0, vmax=255)
            _draw_mask(axes_of_row[1], example.label, len(classes), ignored)
            for axes, model in zip(axes_of_row[2:], models, strict=True):
                _draw_mask(axes, example.predictions[model], len(classes), ignored)
            for axes in axes_of_row:
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
        _add_class_legend(figure, record, examples, models, ignored)
        return render(figure, name, _describe_figure(record, examples, models, ignored), wide=num_columns > 3)


def _are_equal(example: MaskExample) -> bool:
    """Return whether both models predict the same mask."""
    import numpy as np

    first, second = example.predictions.values()
    return bool(np.array_equal(first, second))


def _client_name(record: RunRecord, example: MaskExample) -> str:
    """Return the name of an image's client, or ``client`` and its number."""
    if record.info.get("clients"):
        return short_label(record.client_names[example.client], 18)
    return f"client {example.client}"


def _colour_of_class(number: int) -> str:
    """Return the colour of a class."""
    if number == 0:
        return BACKGROUND_COLOUR
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    place = (number - 1) % MAX_COLOURS
    if place < len(COLOURS):
        return COLOURS[place]
    return to_hex(colormaps["tab20"](place))


def _draw_mask(axes: "Axes", mask: Pixels, num_classes: int, ignored: int) -> None:
    """Draw a mask (H, W) in the colours of its classes."""
    import numpy as np
    from matplotlib.colors import to_rgb

    colours = np.ones((*mask.shape, 3))
    for number in np.unique(mask).tolist():
        colour = IGNORED_COLOUR if number == ignored or number >= num_classes else _colour_of_class(number)
        colours[mask == number] = to_rgb(colour)
    axes.imshow(colours, interpolation="none")


def _add_class_legend(
    figure: "Figure", record: RunRecord, examples: Sequence[MaskExample], shown_models: Sequence[str], ignored: int
) -> None:
    """Add a legend of the classes that occur in the masks that are shown."""
    import numpy as np
    from matplotlib.patches import Patch

    class_numbers: set[int] = set()
    for example in examples:
        for mask in (example.label, *(example.predictions[model] for model in shown_models)):
            class_numbers.update(np.unique(mask).tolist())
    handles = []
    for number, class_name in enumerate(record.class_names):
        if number in class_numbers:
            label = class_name if record.info.get("classes") else f"class {class_name}"
            handles.append(Patch(facecolor=_colour_of_class(number), edgecolor="none", label=short_label(label)))
    if ignored in class_numbers:
        handles.append(Patch(facecolor=IGNORED_COLOUR, edgecolor="#808080", label="does not count"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, fontsize=8, handlelength=1.2)


def _describe_figure(
    record: RunRecord, examples: Sequence[MaskExample], shown_models: Sequence[str], ignored: int
) -> str:
    """Describe the figure, with the share of pixels that each model predicts correctly."""
    sentences = []
    for example in examples:
        counted = example.label != ignored
        shares = []
        for model in shown_models:
            share = math.nan
            if counted.any():
                share = float((example.predictions[model] == example.label)[counted].mean())
            shares.append(f"{_TITLE_OF_MODEL[model]} {100 * share:.1f} %")
        sentences.append(f"{_client_name(record, example)}, image {example.number}: {', '.join(shares)}")
    return f"Test images, their true masks and the predicted ones. Pixels predicted correctly: {'; '.join(sentences)}."
