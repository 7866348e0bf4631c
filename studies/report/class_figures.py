# SPDX-License-Identifier: Apache-2.0
"""The figures of one run on classes: partition, confusions and calibration.

Each function takes the run and the name of the figure, and returns None if the run lacks the data for it. Shape
suffixes: M clients, K classes.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perada.studies.report.facts import (
    accuracies,
    confusion_tables,
    empty_confusion,
    expected_calibration_error,
    model_of_confusion,
    model_title,
    most_frequent_mistakes,
)
from perada.studies.report.plotting import (
    GREY,
    MAX_NAMED_CLIENTS,
    RenderedFigure,
    add_legend,
    colour_of,
    count_text,
    draw_line,
    fading_colormap,
    new_axes,
    render,
    report_style,
    set_tick_names,
    short_label,
    write_in_cells,
)
from perada.studies.report.records import Counts, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_CLIENTS = 12
"""Largest number of clients whose confusions are drawn."""
MODEL_TEXTS = {
    "personal": "each client's personal model",
    "global": "the global model",
    "both": "both models of each client together",
}
"""Whose predictions a figure shows, by the entry of the run's file."""
MAX_TIES = 3
"""Largest number of equally frequent mistakes that a sentence names."""


def partition(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the training images of each client and class."""
    counts = record.partition.get("train")
    if not counts:
        return None
    num_classes = len(counts[0])
    with report_style():
        figure = partition_figure(counts, record.class_names, record.client_names)
        if record.several_labels:
            sizes = record.train_sizes  # an image counts for each of its labels
        else:
            sizes = [sum(row) for row in counts]
        alt = f"Training images of {len(counts)} clients and {num_classes} classes"
        alt += f"; a client has {min(sizes)} to {max(sizes)} images." if sizes else "."
        return render(figure, name, alt, wide=num_classes > 12)


def partition_figure(
    images_of_clients: Sequence[Sequence[int]], classes: Sequence[str], clients: Sequence[str]
) -> "Figure":
    """Return a figure of the training images (M, K) of each client and class."""
    num_clients = len(images_of_clients)
    num_classes = len(images_of_clients[0])
    longest_name = max(len(name) for name in classes)
    inches_for_names = 0.6 + 0.07 * min(longest_name, 30)
    width = min(2.2 + 0.33 * num_classes, 8.5)
    height = min(inches_for_names + max(0.2 * num_clients, 1.3), 8.5)
    figure, axes = new_axes(width, height)
    image = axes.imshow(images_of_clients, aspect="auto", cmap=fading_colormap(), vmin=0, interpolation="none")
    if num_clients * num_classes <= 400 and num_clients <= MAX_NAMED_CLIENTS:
        write_in_cells(axes, images_of_clients, count_text)
    axes.set(xlabel="class", ylabel="client")
    axes.grid(False)
    _name_classes(axes.xaxis, classes)
    set_tick_names(axes.yaxis, clients)
    axes.tick_params(axis="x", rotation=_rotation_of(classes))
    figure.colorbar(image, label="training images")
    return figure


def confusion(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw which class was predicted for which, over the test images of all clients.

    The predictions are those that clients make (:func:`.facts.model_of_confusion`).
    """
    num_classes = len(record.class_names)
    model = model_of_confusion(record)
    if model is None or num_classes > 200:
        return None
    pooled = empty_confusion(num_classes)
    for _, label, predicted, count in record.confusion[model]:
        pooled[label][predicted] += count
    size = min(1.8 + 0.33 * num_classes, 8.5)
    with report_style():
        figure, axes = new_axes(max(size, 4.0), max(size - 0.6, 3.2))
        image = _draw_confusion(axes, pooled, has_numbers=num_classes <= 15)
        axes.set(xlabel="predicted class", ylabel="class")
        _name_classes(axes.xaxis, record.class_names)
        _name_classes(axes.yaxis, record.class_names)
        axes.tick_params(axis="x", rotation=_rotation_of(record.class_names))
        figure.colorbar(image, label="share of the class")
        model_text = MODEL_TEXTS.get(model, model_title(model))
        alt = f"Classes and predicted classes of all clients' test images by {model_text}."
        alt += _most_frequent_mistake(pooled, record.class_names)
        return render(figure, name, alt, wide=num_classes > 12)


def _most_frequent_mistake(table: Counts, class_names: Sequence[str]) -> str:
    """Return a sentence on the most frequent mistakes, with a space before it; empty if there are no mistakes."""
    worst = most_frequent_mistakes(table)
    if not worst:
        return ""
    num_images = worst[0].num_images
    times = "once" if num_images == 1 else f"{num_images} times"
    if len(worst) > MAX_TIES:
        return f" No mistake stands out: the most frequent {len(worst)} occur {times} each."
    texts = [f"{class_names[mistake.label]} was taken for {class_names[mistake.predicted]}" for mistake in worst]
    each = " each" if len(worst) > 1 else ""
    return f" Most often {', and '.join(texts)} ({times}{each})."


def confusion_by_client(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the confusions of the clients with the least accurate models, one plot per client."""
    model = model_of_confusion(record)
    # All clients make the mistakes of one global model.
    tables = {} if model in (None, "global") else confusion_tables(record, model)
    num_classes = len(record.class_names)
    if not tables or num_classes > 30:
        return None
    accuracy = accuracies(tables)
    clients = sorted(tables, key=lambda client: (accuracy[client], client))[:MAX_CLIENTS]
    num_columns = min(4, len(clients))
    num_rows = math.ceil(len(clients) / num_columns)
    with report_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.95 * num_columns, 2.05 * num_rows), layout="constrained")
        plots = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
        for axes in plots[len(clients) :]:
            axes.remove()
        for axes, client in zip(plots, clients, strict=False):
            _draw_confusion(axes, tables[client], has_numbers=num_classes <= 5)
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{short_label(record.client_names[client], 20)}: {100 * accuracy[client]:.0f} %")
        figure.supxlabel("predicted class", fontsize=9)
        figure.supylabel("class", fontsize=9)
        alt = f"The mistakes of each of the {len(clients)} clients, least accurate first."
        if len(clients) < len(tables):
            alt = f"The mistakes of the {len(clients)} least accurate of {len(tables)} clients; the table lists all."
        return render(figure, name, alt, wide=num_columns > 2)


def calibration(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw accuracy against confidence."""
    if not any(sum(bins["count"]) for bins in record.calibration.values()):
        return None
    with report_style():
        figure, axes = new_axes()
        axes.plot([0, 100], [0, 100], color=GREY, linewidth=1)
        errors = []
        for index, (model, bins) in enumerate(record.calibration.items()):
            confidences = []
            right = []
            marker_areas = []
            largest_bin = max(bins["count"])
            for bin_number, count in enumerate(bins["count"]):
                if count:
                    confidences.append(100 * bins["confidence"][bin_number])
                    right.append(100 * bins["right"][bin_number] / count)
                    marker_areas.append(4 + 60 * count / largest_bin)
            error = f"{100 * expected_calibration_error(bins):.1f} %"
            errors.append(f"{model_title(model)} {error}")
            draw_line(axes, index, confidences, right, f"{model_title(model)}, ECE {error}", marker_size=4)
            axes.scatter(confidences, right, s=marker_areas, color=colour_of(index), alpha=0.35, linewidths=0)
        axes.set(xlabel="confidence in %", ylabel="right in %", xlim=(0, 102), ylim=(0, 102))
        add_legend(figure)
        alt = f"Share of correct predictions by confidence. Expected calibration error: {', '.join(errors)}."
        return render(figure, name, alt)


def _draw_confusion(axes: "Axes", table: Counts, has_numbers: bool) -> "AxesImage":
    """Draw each class's images by predicted class, coloured by their share of the class."""
    shares = []
    for row in table:
        num_images = max(1, sum(row))
        shares.append([count / num_images for count in row])
    image = axes.imshow(shares, cmap=fading_colormap(), vmin=0, vmax=1, interpolation="none")
    axes.grid(False)
    axes.spines[:].set(visible=True, color=GREY, linewidth=0.5)
    if has_numbers:
        write_in_cells(axes, table, count_text)
    return image


def _name_classes(axis: "XAxis | YAxis", classes: Sequence[str]) -> None:
    set_tick_names(axis, classes, limit=30)


def _rotation_of(classes: Sequence[str]) -> int:
    """Return the angle at which the names of the classes fit below an axis."""
    return 90 if max(len(name) for name in classes) > 2 else 0
