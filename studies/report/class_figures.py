# SPDX-License-Identifier: Apache-2.0
"""The figures of one run that are about classes: partition, confusions and calibration.

Each function gives None where the run does not hold what it would show. Shape suffixes: M clients, K classes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perada.studies.report.drawn import (
    COLOURS,
    NAMED,
    Drawn,
    cells,
    drawing,
    fading,
    finish,
    label,
    legend,
    line,
    name_axis,
    new_axes,
)
from perada.studies.report.facts import accuracies, confusion_tables, expected_calibration_error
from perada.studies.report.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

GRID = 12
"""Clients whose confusions are drawn."""


def partition(record: Record, name: str) -> Drawn | None:
    """Training images of each client and class."""
    counts = record.partition.get("train")
    if not counts:
        return None
    m, k = len(counts), len(counts[0])
    with drawing():
        figure = partition_figure(counts, record.class_names, record.client_names)
        sizes = [*map(sum, counts)]
        if record.several_labels:
            sizes = record.train_sizes
        alt = f"Training images of {m} clients and {k} classes"
        alt += f"; a client has {min(sizes)} to {max(sizes)} images." if sizes else "."
        return finish(figure, name, alt, wide=k > 12)


def partition_figure(counts: Sequence[Sequence[int]], classes: Sequence[str], clients: Sequence[str]) -> "Figure":
    """A figure of the training images (M, K) of each client and class."""
    m, k = len(counts), len(counts[0])
    under = 0.6 + 0.07 * min(max(map(len, classes)), 30)  # inches for the names of the classes
    figure, axes = new_axes(min(2.2 + 0.33 * k, 8.5), min(under + max(0.2 * m, 1.3), 8.5))
    drawn = axes.imshow(counts, aspect="auto", cmap=fading(), vmin=0, interpolation="none")
    if m * k <= 400 and m <= NAMED:
        for row, column, count in cells(counts):
            axes.text(column, row, str(count), ha="center", va="center", fontsize=7) if count else None
    axes.set(xlabel="class", ylabel="client")
    axes.grid(False)
    name_axis(axes.xaxis, classes, 30)
    name_axis(axes.yaxis, clients)
    axes.tick_params(axis="x", rotation=90 if max(map(len, classes)) > 2 else 0)
    figure.colorbar(drawn, label="training images")
    return figure


def confusion(record: Record, name: str) -> Drawn | None:
    """Which class was taken for which, on all clients' own images, by the clients' own models."""
    who = next((one for one in ("personal", "global") if record.confusion.get(one)), None)
    k = len(record.class_names)
    if who is None or k > 200:
        return None
    pooled = [[0] * k for _ in range(k)]
    for _, true, predicted, count in record.confusion[who]:
        pooled[true][predicted] += count
    size = min(1.8 + 0.33 * k, 8.5)
    with drawing():
        figure, axes = new_axes(max(size, 4.0), max(size - 0.6, 3.2))
        drawn = _confusion(axes, pooled, numbers=k <= 15)
        axes.set(xlabel="predicted class", ylabel="class")
        name_axis(axes.xaxis, record.class_names, 30)
        name_axis(axes.yaxis, record.class_names, 30)
        axes.tick_params(axis="x", rotation=90 if max(map(len, record.class_names)) > 2 else 0)
        figure.colorbar(drawn, label="share of the class")
        worst = max(((pooled[a][b], a, b) for a in range(k) for b in range(k) if a != b), default=(0, 0, 0))
        names = record.class_names
        most = f" Most often {names[worst[1]]} was taken for {names[worst[2]]} ({worst[0]} times)." if worst[0] else ""
        model = "each client's own model" if who == "personal" else "the global model"
        alt = f"Classes and predicted classes of all clients' test images by {model}.{most}"
        return finish(figure, name, alt, wide=k > 12)


def confusion_by_client(record: Record, name: str) -> Drawn | None:
    """The same for each of the clients whose own models are least accurate."""
    tables = confusion_tables(record, "personal")
    k = len(record.class_names)
    if not tables or k > 30:
        return None
    score = accuracies(tables)
    chosen = sorted(tables, key=lambda client: (score[client], client))[:GRID]
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.95 * columns, 2.05 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axes in grid[len(chosen) :]:
            axes.remove()
        for axes, client in zip(grid, chosen, strict=False):
            _confusion(axes, tables[client], numbers=k <= 5)
            axes.set(xticks=[], yticks=[])
            axes.set_title(f"{label(record.client_names[client], 14)}: {100 * score[client]:.0f} %")
        figure.supxlabel("predicted class", fontsize=9)
        figure.supylabel("class", fontsize=9)
        alt = f"Confusions of the {len(chosen)} clients whose models are least accurate; the table lists all clients."
        return finish(figure, name, alt, wide=columns > 2)


def calibration(record: Record, name: str) -> Drawn | None:
    """Accuracy against confidence."""
    if not any(sum(bins["count"]) for bins in record.calibration.values()):
        return None
    with drawing():
        figure, axes = new_axes()
        axes.plot([0, 100], [0, 100], color="#808080", linewidth=1)
        told = []
        for place, (who, bins) in enumerate(record.calibration.items()):
            known = [i for i, count in enumerate(bins["count"]) if count]
            x = [100 * bins["confidence"][i] for i in known]
            y = [100 * bins["right"][i] / bins["count"][i] for i in known]
            error = 100 * expected_calibration_error(bins)
            told.append(f"{who} {error:.1f} %")
            text = f"{label(who)}, ECE {error:.1f} %"
            line(axes, place, x, y, text, size=4)
            most = max(bins["count"])
            sizes = [4 + 60 * bins["count"][i] / most for i in known]
            axes.scatter(x, y, s=sizes, color=COLOURS[place], alpha=0.35, linewidths=0)
        axes.set(xlabel="confidence in %", ylabel="right in %", xlim=(0, 102), ylim=(0, 102))
        legend(figure)
        alt = f"Share of right predictions by confidence. Expected calibration error: {', '.join(told)}."
        return finish(figure, name, alt)


def _confusion(axes: "Axes", table: Sequence[Sequence[int]], numbers: bool) -> "AxesImage":
    """Each class's images by predicted class, coloured by their share of the class."""
    shares = [[count / max(1, sum(row)) for count in row] for row in table]
    drawn = axes.imshow(shares, cmap=fading(), vmin=0, vmax=1, interpolation="none")
    axes.grid(False)
    axes.spines[:].set(visible=True, color="#808080", linewidth=0.5)
    for row, column, count in cells(table) if numbers else ():
        axes.text(column, row, str(count), ha="center", va="center", fontsize=7) if count else None
    return drawn
