# SPDX-License-Identifier: Apache-2.0
"""Test images that look foreign to their clients, in runs whose clients predict with both of their models."""

import math
from dataclasses import dataclass

from perada.results.report import TYPICAL, TYPICAL_SHARES
from perada.studies.report.pictures import ForeignExample
from perada.studies.report.plotting import (
    COLOURS,
    MAX_NAMED_CLIENTS,
    RenderedFigure,
    new_axes,
    render,
    report_style,
    short_label,
)
from perada.studies.report.records import RunRecord


@dataclass(frozen=True)
class ForeignShare:
    """The share of a client's test images that do not look like its training images.

    Attributes:
        client: Number of the client.
        share: The share, from 0 to 1.
    """

    client: int
    share: float


def foreign_shares(record: RunRecord, name: str = TYPICAL) -> list[ForeignShare]:
    """Return the shares of the clients that have test images, the largest first.

    Args:
        record: The run.
        name: Metric of the share of images that look typical, of own or of shifted images.
    """
    shares = []
    for client, typical_share in enumerate(record.clients.get(name, [])):
        if not math.isnan(typical_share):
            shares.append(ForeignShare(client, 1 - typical_share))
    return sorted(shares, key=lambda foreign: -foreign.share)


def shifts_with_shares(record: RunRecord) -> list[str]:
    """Return the names of the shifted test sets of which the run has such shares, sorted."""
    names = [name for name in record.clients if name.startswith(TYPICAL_SHARES) and name != TYPICAL]
    return sorted(name.removeprefix(TYPICAL_SHARES) for name in names)


def foreign_images(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the share of each client's test images that look foreign, the largest at the top."""
    shares = foreign_shares(record)
    if not shares:
        return None
    has_names = len(shares) <= MAX_NAMED_CLIENTS
    height = min(max(1.2 + 0.19 * len(shares), 1.8), 8.5) if has_names else 3.4
    with report_style():
        figure, axes = new_axes(4.5, height)
        ranks = range(len(shares))
        axes.barh(ranks, [100 * foreign.share for foreign in shares], color=COLOURS[0], height=0.7)
        axes.set_xlim(0, 100)
        axes.set_xlabel("own test images that look foreign in %")
        axes.invert_yaxis()
        if has_names:
            axes.set_ylabel("client")
            axes.set_yticks(ranks, [short_label(record.client_names[foreign.client]) for foreign in shares])
        else:
            axes.set_ylabel("clients, sorted")
            axes.set_yticks([], [])
        first = shares[0]
        client_name = short_label(record.client_names[first.client])
        alt = (
            "Share of each client's test images that do not look like its training images. The largest: "
            f"{100 * first.share:.1f} % (client {client_name})."
        )
        return render(figure, name, alt)


def foreign_pictures(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the most foreign test images, a row for each client, with their distances."""
    if not record.foreign_examples:
        return None
    examples_of_clients: dict[int, list[ForeignExample]] = {}
    for example in record.foreign_examples:
        examples_of_clients.setdefault(example.client, []).append(example)
    num_columns = max(len(examples) for examples in examples_of_clients.values())
    with report_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.3 * num_columns + 0.6, 1.4 * len(examples_of_clients) + 0.3), layout="constrained")
        rows = figure.subplots(len(examples_of_clients), num_columns, squeeze=False)
        for axes_of_row, (client, examples) in zip(rows, examples_of_clients.items(), strict=True):
            axes_of_row[0].set_ylabel(short_label(record.client_names[client], 18), fontsize=8)
            for axes in axes_of_row:
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
            for axes, example in zip(axes_of_row, examples, strict=False):
                axes.imshow(example.picture, cmap="gray", vmin=0, vmax=255)
                axes.set_title(f"{example.distance:.3g}", fontsize=8)
            for axes in axes_of_row[len(examples) :]:
                axes.set_visible(False)
        most_foreign = max(record.foreign_examples, key=lambda example: example.distance)
        client_name = short_label(record.client_names[most_foreign.client])
        alt = (
            "The most foreign test images of each client, with their distance to its training images: up to 1, images "
            f"look typical. The largest: {most_foreign.distance:.3g} (client {client_name}, image "
            f"{most_foreign.number})."
        )
        return render(figure, name, alt)
