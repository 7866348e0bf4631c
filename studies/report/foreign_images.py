# SPDX-License-Identifier: Apache-2.0
"""Test images that look foreign to their clients, in runs whose clients predict with both of their models."""

import math
from dataclasses import dataclass

from perada.results.report import TYPICAL, TYPICAL_OF_ALL, TYPICAL_SHARES
from perada.studies.report.pictures import ForeignExample
from perada.studies.report.plotting import (
    COLOURS,
    MAX_NAMED_CLIENTS,
    RenderedFigure,
    add_legend,
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
        share_of_others: The share of the other clients' test images; NaN if it is not known.
    """

    client: int
    share: float
    share_of_others: float = math.nan


def foreign_shares(record: RunRecord, name: str = TYPICAL) -> list[ForeignShare]:
    """Return the shares of the clients that have test images, the largest first.

    Args:
        record: The run.
        name: Metric of the share of images that look typical, of own or of shifted images.
    """
    shares = []
    for client, typical_share in enumerate(record.scores_of_clients.get(name, [])):
        if not math.isnan(typical_share):
            others = share_of_others(record, client) if name == TYPICAL else math.nan
            shares.append(ForeignShare(client, 1 - typical_share, others))
    return sorted(shares, key=lambda foreign: -foreign.share)


def share_of_others(record: RunRecord, client: int) -> float:
    """Return the share of the other clients' test images that look foreign to a client; NaN if it is not known.

    It follows from the shares of all clients' images and of the client's own.
    """
    typical_shares_of_all = record.scores_of_clients.get(TYPICAL_OF_ALL)
    if typical_shares_of_all is None or not record.test_images:
        return math.nan
    num_own = record.test_images[client]
    num_others = sum(record.test_images) - num_own
    if num_others == 0:
        return math.nan
    num_typical = typical_shares_of_all[client] * sum(record.test_images)
    num_typical_own = record.scores_of_clients[TYPICAL][client] * num_own
    # Shares are floating-point numbers, whose difference may be a little below 0 or above 1.
    return min(1.0, max(0.0, 1 - (num_typical - num_typical_own) / num_others))


def shifts_with_shares(record: RunRecord) -> list[str]:
    """Return the names of the shifted test sets of which the run has such shares, sorted."""
    of_test_images = (TYPICAL, TYPICAL_OF_ALL)
    names = [
        name for name in record.scores_of_clients if name.startswith(TYPICAL_SHARES) and name not in of_test_images
    ]
    return sorted(name.removeprefix(TYPICAL_SHARES) for name in names)


def foreign_images(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the share of each client's test images that look foreign, and of other clients', the largest at the top."""
    shares = foreign_shares(record)
    if not shares:
        return None
    has_names = len(shares) <= MAX_NAMED_CLIENTS
    height = min(max(1.2 + 0.19 * len(shares), 1.8), 8.5) if has_names else 3.4
    with report_style():
        figure, axes = new_axes(4.5, height)
        ranks = range(len(shares))
        has_others = any(not math.isnan(foreign.share_of_others) for foreign in shares)
        bar_height = 0.38 if has_others else 0.7
        own_places = [rank - bar_height / 2 if has_others else rank for rank in ranks]
        own_percentages = [100 * foreign.share for foreign in shares]
        axes.barh(own_places, own_percentages, color=COLOURS[0], height=bar_height, label="own images")
        if has_others:
            places = [rank + bar_height / 2 for rank in ranks]
            percentages = [100 * foreign.share_of_others for foreign in shares]
            axes.barh(places, percentages, color=COLOURS[1], height=bar_height, label="other clients' images")
            add_legend(figure)
        axes.set_xlim(0, 100)
        axes.set_xlabel("test images that look foreign in %")
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
        shares_of_others = [foreign.share_of_others for foreign in shares if not math.isnan(foreign.share_of_others)]
        if shares_of_others:
            smallest = 100 * min(shares_of_others)
            largest = 100 * max(shares_of_others)
            alt += f" Of other clients' images, {smallest:.1f} to {largest:.1f} % look foreign."
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
