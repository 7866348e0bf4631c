# SPDX-License-Identifier: Apache-2.0
"""The figures of one run. Each function gives None where the run does not hold what it would show.

Shape suffixes: M clients, K classes.
"""

import math
from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from perada.experiments.report.drawn import (
    COLOURS,
    MARKERS,
    Drawn,
    drawing,
    fading,
    finish,
    label,
    name_axis,
    new_axes,
    whole_rounds,
)
from perada.experiments.report.facts import accuracies, confusion_tables, expected_calibration_error, sent
from perada.results.record import Record
from perada.results.report import SCORES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 40
"""Clients up to this number have their names in a figure."""
GRID = 12
"""Clients whose confusions are drawn."""
TITLES = {
    "personal/local_test": "personal, own images",
    "personal/global_test": "personal, everyone's images",
    "global/global_test": "global, everyone's images",
}


def curves(record: Record, name: str) -> Drawn | None:
    """The scores after each round, with the spread over clients."""
    shown = [score for score in SCORES if any(score in row for row in record.rounds)]
    if not shown:
        return None
    with drawing():
        figure, axes = new_axes()
        for place, score in enumerate(shown):
            rows = [row for row in record.rounds if score in row]
            x, y = [row["round"] + 1 for row in rows], [100 * row[score] for row in rows]
            if score == SCORES[0] and score in record.initial:
                x, y = [0, *x], [100 * mean(record.initial[score]), *y]
            axes.plot(x, y, color=COLOURS[place], marker=MARKERS[place], markersize=3, label=TITLES[score])
        if record.by_round:
            every = [(0, record.initial[SCORES[0]])] * (SCORES[0] in record.initial)
            every += [(round + 1, values) for round, values in record.by_round]
            low, high = zip(*(spread(values) for _, values in every), strict=True)
            x = [round for round, _ in every]
            axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.18, linewidth=0, label="middle 80 % of clients")
        axes.set(ylabel="score in %")
        whole_rounds(axes, "rounds done")
        legend(figure)
        last = ", ".join(f"{TITLES[score]} {100 * record.last(score):.1f} %" for score in shown)
        return finish(figure, name, f"Scores by round. After the last one: {last}.")


def losses(record: Record, name: str) -> Drawn | None:
    """The training losses of each round."""
    shown = sorted({key for row in record.rounds for key in row if key.startswith("train/") and key.endswith("_loss")})
    if not shown:
        return None
    with drawing():
        figure, axes = new_axes()
        for place, key in enumerate(shown):
            rows = [row for row in record.rounds if key in row]
            x, y = [row["round"] + 1 for row in rows], [row[key] for row in rows]
            axes.plot(x, y, color=COLOURS[place % 8], marker=MARKERS[place % 8], markersize=3, label=label(key[6:], 40))
        axes.set(ylabel="mean training loss")
        whole_rounds(axes, "round")
        legend(figure)
        return finish(figure, name, "Mean loss of the local steps of each round.")


def before_and_after(record: Record, name: str) -> Drawn | None:
    """Each client's score on its own images before the first round and after the last, sorted by the latter."""
    after, before = record.clients.get(SCORES[0]), record.initial.get(SCORES[0])
    known = [client for client, value in enumerate(after or []) if not math.isnan(value)]
    if not after or not known:
        return None
    known.sort(key=lambda client: after[client])
    places = range(len(known))
    few = len(known) <= NAMED
    with drawing():
        figure, axes = new_axes(4.5, min(max(1.2 + 0.19 * len(known), 2.6), 8.5) if few else 3.4)
        y = [100 * after[client] for client in known]
        if before:
            x = [100 * before[client] for client in known]
            axes.hlines(places, x, y, color="#808080", linewidth=1 if few else 0.4)
            axes.plot(x, places, "o", markersize=4 if few else 2, mfc="none", color=COLOURS[1], label="before")
        axes.plot(y, places, "o", markersize=4 if few else 2, color=COLOURS[0], label="after")
        axes.set(xlabel="score on the client's own images in %", ylabel="client" if few else "clients, sorted")
        axes.set_yticks(places if few else [], [label(record.client_names[client]) for client in known] if few else [])
        legend(figure)
        worst, best = (record.client_names[known[place]] for place in (0, -1))
        better = sum(after[client] > before[client] for client in known) if before else 0
        gain = f" {better} of {len(known)} clients are better than before." if before else ""
        ends = f"From {y[0]:.1f} % (client {label(worst)}) to {y[-1]:.1f} % (client {label(best)})"
        return finish(figure, name, f"Each client's score on its own images, sorted. {ends}.{gain}")


def personal_and_global(record: Record, name: str) -> Drawn | None:
    """Each client's own model against the global one, on the client's images."""
    own, shared = record.clients.get(SCORES[0]), record.global_local
    pairs = [(b, a) for a, b in zip(own or [], shared, strict=False) if not math.isnan(a + b)]
    if not pairs:
        return None
    with drawing():
        figure, axes = new_axes()
        low = min(map(min, pairs))
        axes.axline((100 * low, 100 * low), slope=1, color="#808080", linewidth=1)
        x, y = ([100 * one for one in values] for values in zip(*pairs, strict=True))
        axes.plot(x, y, "o", color=COLOURS[0], alpha=0.7, markersize=5 if len(pairs) <= 200 else 2)
        axes.set(xlabel="global model in %", ylabel="client's own model in %")
        above = sum(a > b for b, a in pairs)
        alt = f"On their own images, {above} of {len(pairs)} clients' models are better than the global one"
        return finish(figure, name, f"{alt}; {sum(a < b for b, a in pairs)} are worse.")


def partition(record: Record, name: str) -> Drawn | None:
    """Training images of each client and class."""
    counts = record.partition.get("train")
    if not counts:
        return None
    m, k = len(counts), len(counts[0])
    with drawing():
        figure, axes = new_axes(min(2.2 + 0.33 * k, 8.5), min(1.3 + 0.2 * m, 8.5))
        drawn = axes.imshow(counts, aspect="auto", cmap=fading(), vmin=0, interpolation="none")
        if m * k <= 400 and m <= NAMED:
            for (row, column), count in _cells(counts):
                axes.text(column, row, str(count), ha="center", va="center", fontsize=7) if count else None
        axes.set(xlabel="class", ylabel="client")
        axes.grid(False)
        name_axis(axes.xaxis, record.class_names, 30)
        name_axis(axes.yaxis, record.client_names)
        axes.tick_params(axis="x", rotation=90 if max(map(len, record.class_names)) > 2 else 0)
        figure.colorbar(drawn, label="training images")
        most = max(map(sum, counts))
        alt = f"Training images of {m} clients and {k} classes; a client has {min(map(sum, counts))} to {most} images."
        return finish(figure, name, alt, wide=k > 12)


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
        return finish(figure, name, alt, wide=True)


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
            axes.plot(x, y, color=COLOURS[place], marker=MARKERS[place], markersize=4, label=text)
            most = max(bins["count"])
            sizes = [4 + 60 * bins["count"][i] / most for i in known]
            axes.scatter(x, y, s=sizes, color=COLOURS[place], alpha=0.35, linewidths=0)
        axes.set(xlabel="confidence in %", ylabel="right in %", xlim=(0, 102), ylim=(0, 102))
        legend(figure)
        alt = f"Share of right predictions by confidence. Expected calibration error: {', '.join(told)}."
        return finish(figure, name, alt)


def communication(record: Record, name: str) -> Drawn | None:
    """Scores against the megabytes sent so far, up and down, by all clients."""
    total = sent(record)
    shown = [score for score in (SCORES[0], SCORES[2]) if any(score in row for row in record.rounds)]
    if not total or not total[-1] or not shown:
        return None
    with drawing():
        figure, axes = new_axes()
        for score in shown:
            place = SCORES.index(score)
            pairs = [(mb, 100 * row[score]) for mb, row in zip(total, record.rounds, strict=True) if score in row]
            if score in record.initial:
                pairs = [(0.0, 100 * mean(record.initial[score])), *pairs]
            x, y = zip(*pairs, strict=True)
            axes.plot(x, y, color=COLOURS[place], marker=MARKERS[place], markersize=3, label=TITLES[score])
        axes.set(xlabel="megabytes sent so far, by all clients and the server", ylabel="score in %")
        legend(figure)
        return finish(figure, name, f"Scores against communication; {total[-1]:.2f} MB were sent in all.")


def shifts(record: Record, name: str) -> Drawn | None:
    """The scores by kind of corruption and severity, personal and global."""
    heads, rows, names = _shift_rows(record)
    if not rows:
        return None
    with drawing():
        width = 2.6 + 0.55 * len(heads)
        figure, axes = new_axes(min(max(width, 4.4), 8.5), 1.5 + 0.24 * len(rows))
        shown = [[100 * value for value in row] for row in rows]
        drawn = axes.imshow(shown, aspect="auto", cmap=fading(), vmin=0, vmax=100, interpolation="none")
        for (row, column), value in _cells(shown):
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7) if value == value else None
        axes.grid(False)
        name_axis(axes.xaxis, heads)
        name_axis(axes.yaxis, names)
        axes.tick_params(axis="x", rotation=90)
        figure.colorbar(drawn, label="score in %")
        return finish(figure, name, "Scores by kind of corruption and severity.", wide=len(heads) > 8)


def _shift_rows(record: Record) -> tuple[list[str], list[list[float]], list[str]]:
    """Columns of model and severity, a row for each kind of corruption, and the rows' names."""
    curves = {(shift, kind): curve for shift, own in record.shifts.items() for kind, curve in own.items()}
    every = [
        (who, s)
        for who in ("personal", "global")
        for curve in curves.values()
        if who in curve
        for s in curve["severity"]
    ]
    columns = sorted(dict.fromkeys(every), key=lambda pair: (pair[0] != "personal", pair[1]))
    rows = []
    for curve in curves.values():
        known = {
            (w, s): v for w in ("personal", "global") for s, v in zip(curve["severity"], curve.get(w, []), strict=False)
        }
        rows.append([known.get(column, math.nan) for column in columns])
    several = len(record.shifts) > 1
    return [f"{who} {s:g}" for who, s in columns], rows, [f"{a} {b}" if several else b for a, b in curves]


def epsilon(record: Record, name: str) -> Drawn | None:
    """What the privacy ledgers say after each round."""
    shown = sorted({key for row in record.rounds for key in row if key.startswith("privacy/") and "epsilon" in key})
    shown = [key for key in shown if not key.endswith("_std") and not key.startswith("privacy/epsilon")]
    shown = [key for key in shown if any(math.isfinite(row.get(key, math.nan)) for row in record.rounds)]
    if not shown:
        return None
    with drawing():
        figure, axes = new_axes()
        for place, key in enumerate(shown):
            rows = [row for row in record.rounds if math.isfinite(row.get(key, math.nan))]
            x, y = [row["round"] + 1 for row in rows], [row[key] for row in rows]
            text = label(key.removeprefix("privacy/").replace("_epsilon_", " ledger, ").replace("max", "largest"), 40)
            axes.plot(x, y, color=COLOURS[place % 8], marker=MARKERS[place % 8], markersize=3, label=text)
        axes.set(ylabel="ε", ylim=(0, None))
        whole_rounds(axes, "rounds done")
        legend(figure)
        return finish(figure, name, "ε of the privacy ledgers after each round.")


def mean(values: Sequence[float]) -> float:
    """Mean of those that are known; NaN if none is."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Deciles 1 and 9 of the clients' scores, in %.

    >>> spread([0.0, 0.5, 1.0])
    (10.0, 90.0)
    """
    known = [100 * value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return (known[0], known[0]) if known else (math.nan, math.nan)
    deciles = quantiles(known, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def legend(figure: "Figure") -> None:
    """Above the plot, where it covers nothing."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(
            loc="outside upper left", ncols=2, fontsize=8, columnspacing=1.0, handlelength=1.4, borderaxespad=0.2
        )


def _confusion(axes: "Axes", table: Sequence[Sequence[int]], numbers: bool):  # type: ignore[no-untyped-def]  # noqa: ANN202  # matplotlib's image
    """Each class's images by predicted class, coloured by their share of the class."""
    shares = [[count / max(1, sum(row)) for count in row] for row in table]
    drawn = axes.imshow(shares, cmap=fading(), vmin=0, vmax=1, interpolation="none")
    axes.grid(False)
    axes.spines[:].set(visible=True, color="#808080", linewidth=0.5)
    for (row, column), count in _cells(table) if numbers else ():
        axes.text(column, row, str(count), ha="center", va="center", fontsize=7) if count else None
    return drawn


def _cells(rows: Sequence[Sequence[float]]):  # type: ignore[no-untyped-def]  # noqa: ANN202  # (row, column), value
    return (((i, j), value) for i, row in enumerate(rows) for j, value in enumerate(row))
