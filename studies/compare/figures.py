# SPDX-License-Identifier: Apache-2.0
"""Figures of a comparison: scores at home and abroad, and the clients between two rows."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perada.core.checks import check_known
from perada.results.report import SHARES
from perada.studies.compare.comparison import CRITERIA, EVERYONE, MEAN, OWN, ComparedRow, Comparison
from perada.studies.drawing import new_figure
from perada.system.files import writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BETTER = "#1a7f37"
WORSE = "#b3261e"
EQUAL = "#6e7781"
HIGHLIGHTED = "#b3261e"
OTHERS = "#0b5cad"
HOME_AND_ABROAD = "home_and_abroad.png"
CLIENTS = "clients.png"
NAMED_CLIENTS = 20
"""Largest number of clients whose names are written beside their lines."""


def draw_figures(comparison: Comparison) -> "dict[str, Figure]":
    """Return the figures that a comparison has the scores for, by the names of their files.

    The lines of the clients lead to the best row by the mean of both scores, or on own images, from the row that trains
    alone, or else from the first row that is not the best.
    """
    figures: dict[str, Figure] = {}
    criterion = MEAN if MEAN in comparison.criteria else OWN
    if criterion not in comparison.criteria:
        return figures
    best = comparison.best(criterion)
    if EVERYONE in comparison.criteria:
        figures[HOME_AND_ABROAD] = draw_home_and_abroad(comparison, best.name)
    others = [row for row in comparison.rows if row is not best]
    alone = [row for row in others if row.trains_alone]
    figures[CLIENTS] = draw_clients(comparison, (alone or others)[0].name, best.name)
    return figures


def draw_home_and_abroad(comparison: Comparison, highlighted: str = "") -> "Figure":
    """Draw a point for each row: to the right are good scores on own images, at the top on all clients' images.

    The bars are the 95 % confidence intervals of the difference from the row that is best in the direction of the bar:
    rows are compared client by client, so intervals of single rows would be too wide.

    Args:
        comparison: The comparison, with both scores.
        highlighted: Name of a row in another colour; none by default.

    Raises:
        ValueError: If the rows have no scores on the images of all clients.
    """
    if OWN not in comparison.criteria or EVERYONE not in comparison.criteria:
        raise ValueError("home and abroad need scores on own images and on those of all clients, and one is missing")
    if highlighted:
        check_known("highlighted", highlighted, [row.name for row in comparison.rows])
    figure = new_figure(6.4, 5.2)
    axes = figure.add_subplot()
    factor = comparison.unit.factor
    for row in comparison.rows:
        colour = HIGHLIGHTED if row.name == highlighted else OTHERS
        x = factor * row.mean(OWN)
        y = factor * row.mean(EVERYONE)
        axes.errorbar(
            x,
            y,
            xerr=_bar_lengths(comparison, row, OWN),
            yerr=_bar_lengths(comparison, row, EVERYONE),
            fmt="o",
            color=colour,
            elinewidth=1,
            capsize=2,
        )
        axes.annotate(row.name, (x, y), xytext=(6, 6), textcoords="offset points", fontsize=9, color=colour)
    axes.set_xlabel(_axis_title(comparison, OWN))
    axes.set_ylabel(_axis_title(comparison, EVERYONE))
    axes.set_title("Bars: 95 % interval of the difference from the best row", fontsize=9)
    axes.grid(alpha=0.3)
    if comparison.lower_is_better:
        axes.invert_xaxis()
        axes.invert_yaxis()
    return figure


def _bar_lengths(comparison: Comparison, row: ComparedRow, criterion: str) -> "np.ndarray | None":
    """Return the lengths (2, 1) of a bar to both sides of a row's score; None for the best row, or without interval."""
    for entry in comparison.differences(criterion):
        if entry.second != row.name or not np.isfinite(entry.low):
            continue
        half_width = comparison.unit.factor * (entry.high - entry.low) / 2
        return np.full((2, 1), half_width)
    return None


def draw_clients(comparison: Comparison, first: str, second: str, criterion: str = OWN) -> "Figure":
    """Draw a line for each client, from its score in one row to that in another one.

    Args:
        comparison: The comparison.
        first: Name of the row at the left.
        second: Name of the row at the right.
        criterion: A key of :data:`~perada.studies.compare.comparison.CRITERIA`.

    Raises:
        ValueError: If there is no such row or criterion.
    """
    rows = {row.name: row for row in comparison.rows}
    for option, name in (("first", first), ("second", second)):
        check_known(option, name, rows)
    check_known("criterion", criterion, comparison.criteria)
    starts = comparison.unit.factor * rows[first].scores[criterion].mean(0)
    ends = comparison.unit.factor * rows[second].scores[criterion].mean(0)
    figure = new_figure(5.6, 5.2)
    axes = figure.add_subplot()
    for name, start, end in zip(comparison.client_names, starts, ends, strict=True):
        if np.isfinite(start) and np.isfinite(end):
            _draw_client(axes, comparison, name, float(start), float(end))
    axes.set_xticks([0, 1], [first, second])
    axes.set_xlim(-0.15, 1.45 if comparison.num_clients <= NAMED_CLIENTS else 1.15)
    axes.set_ylabel(_axis_title(comparison, criterion))
    axes.set_title("A line for each client: green gains, red loses", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    if comparison.lower_is_better:
        axes.invert_yaxis()
    return figure


def _draw_client(axes: "Axes", comparison: Comparison, name: str, start: float, end: float) -> None:
    gain = start - end if comparison.lower_is_better else end - start
    colour = EQUAL
    if gain > 0:
        colour = BETTER
    elif gain < 0:
        colour = WORSE
    axes.plot([0, 1], [start, end], color=colour, marker="o", markersize=4, linewidth=1.2)
    if comparison.num_clients <= NAMED_CLIENTS:
        axes.annotate(name, (1, end), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)


def _axis_title(comparison: Comparison, criterion: str) -> str:
    unit = "%" if comparison.unit is SHARES else "units of the targets"
    return f"{CRITERIA[criterion]}, {unit}"


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG file."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without matplotlib's version equal numbers give equal files.
        figure.savefig(path, dpi=120, metadata={"Software": None})
