# SPDX-License-Identifier: Apache-2.0
"""The figures of predicted numbers, drawn from counts of test images.

Each function takes the run and the name of the figure, and returns None if the run lacks the data for it.
"""

from typing import TYPE_CHECKING

from perada.studies.report.facts import model_title
from perada.studies.report.plotting import (
    GREY,
    RenderedFigure,
    add_legend,
    colour_of,
    fading_colormap,
    render,
    report_style,
    short_label,
)
from perada.studies.report.records import NumberBins, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TARGETS = 6
"""Largest number of predicted numbers that are drawn; the table has all."""


def predicted_and_true(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw predictions against true values, one plot per number.

    The predictions are those of the clients' own models, or of the global model if there are no personal ones.
    """
    models = [model for model in ("personal", "global") if model in record.numbers]
    if not models:
        return None
    model = models[0]
    bins_of_targets = record.numbers[model][:MAX_TARGETS]
    with report_style():
        figure, plots = _new_plots(len(bins_of_targets))
        for axes, bins, target in zip(plots, bins_of_targets, _target_titles(record), strict=False):
            low = bins.edges[0]
            high = bins.edges[-1]
            # Rows of the counts are true values, which are on the x-axis.
            columns_by_row = list(zip(*bins.counts, strict=True))
            axes.imshow(
                columns_by_row,
                origin="lower",
                extent=(low, high, low, high),
                cmap=fading_colormap(),
                vmin=0,
                interpolation="none",
            )
            axes.axline((low, low), slope=1, color=GREY, linewidth=1)
            axes.grid(False)
            axes.set(xlabel=f"true {target}", ylabel=f"predicted {target}")
        model_text = "each client's personal model" if model == "personal" else "the global model"
        alt = f"Predicted against true numbers of all clients' test images, by {model_text}. " + _describe_residuals(
            record, bins_of_targets
        )
        return render(figure, name, alt, wide=len(bins_of_targets) > 1)


def residuals(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the density of the residuals, one plot per number, with a line for each kind of model."""
    if not record.numbers:
        return None
    num_targets = min(len(next(iter(record.numbers.values()))), MAX_TARGETS)
    sentences = []
    with report_style():
        figure, plots = _new_plots(num_targets)
        for index, (model, bins_of_targets) in enumerate(record.numbers.items()):
            sentences.append(f"{model_title(model)}: {_describe_residuals(record, bins_of_targets[:num_targets])}")
            for axes, bins in zip(plots, bins_of_targets, strict=False):
                # The bins of each model have their own width, so that counts could not be compared.
                width = bins.residual_edges[1] - bins.residual_edges[0]
                densities = [count / (max(1, bins.num_images) * width) for count in bins.residual_counts]
                axes.stairs(densities, bins.residual_edges, color=colour_of(index), label=model_title(model))
        for axes, target in zip(plots, _target_titles(record), strict=False):
            axes.axvline(0, color=GREY, linewidth=1)
            axes.set(xlabel=f"predicted − true {target}", ylabel="density of test images")
        add_legend(figure)
        alt = f"Residuals, that is, prediction − true value, of all clients' test images. {' '.join(sentences)}"
        return render(figure, name, alt, wide=num_targets > 1)


def _new_plots(count: int) -> tuple["Figure", list["Axes"]]:
    """Return a figure with plots beside each other, three in a row, and the plots."""
    from matplotlib.figure import Figure

    num_columns = min(3, count)
    num_rows = -(-count // num_columns)
    width = 4.5 if count == 1 else 2.9 * num_columns
    height = 3.4 if count == 1 else 2.7 * num_rows
    figure = Figure(figsize=(width, height), layout="constrained")
    plots = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for axes in plots[count:]:
        axes.remove()
    return figure, plots[:count]


def _target_titles(record: RunRecord) -> list[str]:
    """Return the names of the predicted numbers for labels of axes."""
    if not record.info.get("classes"):
        return ["value" if len(record.class_names) == 1 else f"value {name}" for name in record.class_names]
    return [short_label(name) for name in record.class_names]


def _describe_residuals(record: RunRecord, bins_of_targets: list[NumberBins]) -> str:
    """Return a sentence on the residuals of each number."""
    sentences = []
    for bins, target in zip(bins_of_targets, _target_titles(record), strict=False):
        sentences.append(
            f"{target}: residuals have mean {bins.residual_mean:.4g} and standard deviation {bins.residual_std:.4g} "
            f"on {bins.num_images} images."
        )
    return " ".join(sentences)
