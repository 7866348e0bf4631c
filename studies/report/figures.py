# SPDX-License-Identifier: Apache-2.0
"""The figures of one run but for those about classes.

Each function gives None where the run does not hold what it would show.
"""

import math
from collections.abc import Sequence
from statistics import fmean, quantiles

from perada.results.report import SCORES
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
    whole_rounds,
)
from perada.studies.report.facts import sent
from perada.studies.report.records import Record

TITLES = {
    "personal/local_test": "personal models, own images",
    "personal/global_test": "personal models, all clients' images",
    "global/global_test": "global model, all clients' images",
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
            line(axes, place, x, y, TITLES[score])
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
            line(axes, place, x, y, label(key[6:], 40))
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
        gain = f" Better than before: {better} of {len(known)}." if before else ""
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
        alt = f"Clients' models that beat the global one on the clients' own images: {above} of {len(pairs)}"
        return finish(figure, name, f"{alt}; beaten by it: {sum(a < b for b, a in pairs)}.")


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
            line(axes, place, x, y, TITLES[score])
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
        for row, column, value in cells(shown):
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
            line(axes, place, x, y, text)
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
