# SPDX-License-Identifier: Apache-2.0
"""The figures of one run, except those about classes.

Each function takes the run and the name of the figure, and returns None if the run lacks the data for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perada.results.report import SCORES
from perada.studies.report.baselines import predicted_scores
from perada.studies.report.contrasts import ALONE
from perada.studies.report.facts import deciles, mean_of_scores, megabytes_sent, model_title, right_counts
from perada.studies.report.plotting import (
    COLOURS,
    GREY,
    MAX_NAMED_CLIENTS,
    RenderedFigure,
    add_legend,
    draw_line,
    fading_colormap,
    label_points,
    label_round_axis,
    new_axes,
    render,
    report_style,
    set_tick_names,
    short_label,
    write_in_cells,
)
from perada.studies.report.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN_SCORE, _, GLOBAL_SCORE = SCORES
MAX_NAMED_POINTS = 12
"""Largest number of clients whose names stand beside their points in a plot; more would overlap."""
TITLES = {
    "personal/local_test": "personal models, own images",
    "personal/global_test": "personal models, all clients' images",
    "global/global_test": "global model, all clients' images",
    "both/local_test": "both models, own images",
    "both/global_test": "both models, all clients' images",
}

MODELS_OF_SHIFTS = ("personal", "global", "both")
"""Models that are scored on shifted test sets, in the order of the figure's columns."""

DrawFigure = Callable[[RunRecord, str], RenderedFigure | None]


@dataclass
class Curve:
    """The points of a line."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        self.x.append(x)
        self.y.append(y)


def curves(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the scores after each round, with their spread over clients."""
    scores = [score for score in SCORES if score in record.metric_names]
    if not scores:
        return None
    with report_style():
        figure, axes = new_axes()
        for index, score in enumerate(scores):
            curve = Curve()
            if score == OWN_SCORE and score in record.initial:
                curve.add(0, record.unit.factor * mean_of_scores(record.initial[score]))
            for row in record.rounds:
                if score in row:
                    curve.add(row["round"] + 1, record.unit.factor * row[score])
            draw_line(axes, index, curve.x, curve.y, TITLES[score])
        if record.by_round:
            lowest, highest = _client_band(record)
            axes.fill_between(
                lowest.x, lowest.y, highest.y, color=COLOURS[0], alpha=0.18, linewidth=0, label="middle 80 % of clients"
            )
        axes.set(ylabel=record.unit.label(record.score_name))
        label_round_axis(axes, "rounds done")
        add_legend(figure)
        last_scores = ", ".join(f"{TITLES[score]} {record.unit.text(record.last(score))}" for score in scores)
        return render(figure, name, f"Scores by round. After the last one: {last_scores}.")


def _client_band(record: RunRecord) -> tuple[Curve, Curve]:
    """Return the first and the ninth decile of the clients' scores on their own images after each evaluation."""
    first_decile = Curve()
    ninth_decile = Curve()
    evaluations = []
    if OWN_SCORE in record.initial:
        evaluations.append((0, record.initial[OWN_SCORE]))
    for evaluation in record.by_round:
        evaluations.append((evaluation.round + 1, evaluation.scores))
    for rounds_done, scores in evaluations:
        if rounds_done and not record.has_mean_after(rounds_done - 1):
            # A band over the other clients would look like that of all.
            first_decile.add(rounds_done, math.nan)
            ninth_decile.add(rounds_done, math.nan)
            continue
        spread = deciles([record.unit.factor * score for score in scores])
        first_decile.add(rounds_done, spread.first)
        ninth_decile.add(rounds_done, spread.ninth)
    return first_decile, ninth_decile


def losses(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the training losses of each round."""
    loss_names = sorted(key for key in record.metric_names if key.startswith("train/") and key.endswith("_loss"))
    if not loss_names:
        return None
    with report_style():
        figure, axes = new_axes()
        for index, key in enumerate(loss_names):
            curve = Curve()
            for row in record.rounds:
                if key in row:
                    curve.add(row["round"] + 1, row[key])
            role = key.removeprefix("train/").removesuffix("_loss").replace("_", " ")
            draw_line(axes, index, curve.x, curve.y, short_label(f"{role} models", 40))
        axes.set(ylabel="mean training loss")
        label_round_axis(axes, "round")
        add_legend(figure)
        return render(figure, name, "Mean loss of the local steps of each round.")


def before_and_after(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw each client's score on its own images before the first round and after the last, sorted by the latter."""
    after = record.scores_of_clients.get(OWN_SCORE, [])
    before = record.initial.get(OWN_SCORE, [])
    clients = [client for client, score in enumerate(after) if not math.isnan(score)]
    if not clients:
        return None
    clients.sort(key=lambda client: after[client])
    ranks = range(len(clients))
    names = [short_label(record.client_names[client]) for client in clients]

    # With many clients the figure keeps its height: the markers shrink, and the names are left out.
    has_names = len(clients) <= MAX_NAMED_CLIENTS
    if has_names:
        height = min(max(1.2 + 0.19 * len(clients), 2.6), 8.5)
        marker_size = 4
        line_width = 1.0
    else:
        height = 3.4
        marker_size = 2
        line_width = 0.4
    with report_style():
        figure, axes = new_axes(4.5, height)
        scores_after = [record.unit.factor * after[client] for client in clients]
        if before:
            scores_before = [record.unit.factor * before[client] for client in clients]
            axes.hlines(ranks, scores_before, scores_after, color=GREY, linewidth=line_width)
            axes.plot(scores_before, ranks, "o", markersize=marker_size, mfc="none", color=COLOURS[1], label="before")
        axes.plot(scores_after, ranks, "o", markersize=marker_size, color=COLOURS[0], label="after")
        axes.set_xlabel(record.unit.label(f"{record.score_name} on the client's own images"))
        if has_names:
            axes.set_ylabel("client")
            axes.set_yticks(ranks, names)
        else:
            axes.set_ylabel("clients, sorted")
            axes.set_yticks([], [])
        add_legend(figure)

        worst = f"{scores_after[0]:.1f}{record.unit.symbol} (client {names[0]})"
        best = f"{scores_after[-1]:.1f}{record.unit.symbol} (client {names[-1]})"
        alt = f"Each client's score on its own images, sorted. From {worst} to {best}."
        if scores_after[0] == scores_after[-1]:
            alt = f"Each client's score on its own images. All clients have {scores_after[0]:.1f}{record.unit.symbol}."
        if before:
            num_better = sum(_is_better(record, after[client], before[client]) for client in clients)
            alt += f" Better than before: {num_better} of {len(clients)}."
        alt += _sentence_on_missing(len(after) - len(clients))
        return render(figure, name, alt)


def alone_and_together(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw each client's score on its own images if it trains alone and in this run, with the run's interval."""
    contrast = None if record.baselines is None else record.baselines.contrast_with(ALONE)
    if contrast is None:
        return None
    together = predicted_scores(record).own
    alone = contrast.baseline.scores["own"].mean(0).tolist()
    clients = [client for client in range(len(together)) if not math.isnan(together[client] + alone[client])]
    clients.sort(key=lambda client: together[client])
    counts = right_counts(record, together)
    has_names = len(clients) <= MAX_NAMED_CLIENTS
    height = min(max(1.2 + 0.22 * len(clients), 2.6), 8.5) if has_names else 3.4
    marker_size = 4.5 if has_names else 2
    with report_style():
        figure, axes = new_axes(4.5, height)
        factor = record.unit.factor
        for rank, client in enumerate(clients):
            count = counts[client] if counts else None
            if count is not None and has_names:
                axes.hlines(rank, factor * count.low, factor * count.high, color=COLOURS[0], alpha=0.25, linewidth=5)
        ranks = range(len(clients))
        scores_alone = [factor * alone[client] for client in clients]
        scores_together = [factor * together[client] for client in clients]
        axes.plot(scores_alone, ranks, "o", markersize=marker_size, mfc="none", color=COLOURS[1], label="alone")
        axes.plot(scores_together, ranks, "o", markersize=marker_size, color=COLOURS[0], label="together (this run)")
        axes.set_xlabel(record.unit.label(f"{record.score_name} on the client's own images"))
        if has_names:
            axes.set_ylabel("client")
            axes.set_yticks(ranks, [short_label(record.client_names[client]) for client in clients])
        else:
            axes.set_ylabel("clients, sorted")
            axes.set_yticks([], [])
        add_legend(figure)
        alt = (
            f"Each client alone and in this run, on its own test images: {contrast.own.num_better} of {len(clients)} "
            f"are better in this run, {contrast.own.num_worse} worse."
        )
        if counts and has_names:
            alt += " The bar is the 95 % interval of this run: what it would be on many more images of that client."
        return render(figure, name, alt)


def _sentence_on_missing(num_clients: int) -> str:
    """Return a sentence on clients that a figure lacks, with a space before it; empty if there are none."""
    if not num_clients:
        return ""
    return f" Clients without a score: {num_clients}."


def _is_better(record: RunRecord, score: float, other: float) -> bool:
    """Return whether a score is better than another one."""
    return score < other if record.lower_is_better else score > other


def personal_and_global(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the score of each client's personal model against the global model's, on the client's images."""
    points = Curve()
    names = []
    num_better = 0
    num_worse = 0
    # A run without a global model has no scores of it.
    scores_of_clients = zip(record.scores_of_clients.get(OWN_SCORE, []), record.global_local, strict=False)
    for client, (personal, shared) in enumerate(scores_of_clients):
        if math.isnan(personal + shared):
            continue
        names.append(short_label(record.client_names[client], 20))
        points.add(record.unit.factor * shared, record.unit.factor * personal)
        num_better += _is_better(record, personal, shared)
        num_worse += _is_better(record, shared, personal)
    num_clients = len(points.x)
    if not num_clients:
        return None
    with report_style():
        figure, axes = new_axes()
        lowest = min(*points.x, *points.y)
        axes.axline((lowest, lowest), slope=1, color=GREY, linewidth=1)
        marker_size = 5 if num_clients <= 200 else 2
        axes.plot(points.x, points.y, "o", color=COLOURS[0], alpha=0.7, markersize=marker_size)
        if num_clients <= MAX_NAMED_POINTS:
            _name_points(axes, points, names)
        axes.set(
            xlabel=record.unit.label(f"global model, {record.score_name}"),
            ylabel=record.unit.label(f"client's own model, {record.score_name}"),
        )
        return render(
            figure,
            name,
            f"Clients' models that beat the global one on the clients' own images: {num_better} of {num_clients}; "
            f"beaten by it: {num_worse}." + _sentence_on_missing(len(record.global_local) - num_clients),
        )


def _name_points(axes: "Axes", points: Curve, names: Sequence[str]) -> None:
    """Write the names of clients beside their points; clients with the same point share a label."""
    names_at: dict[tuple[float, float], list[str]] = {}
    for name, x, y in zip(names, points.x, points.y, strict=True):
        names_at.setdefault((round(x, 1), round(y, 1)), []).append(name)
    labels = [short_label(", ".join(names_of_point), 44) for names_of_point in names_at.values()]
    label_points(axes, list(names_at), labels)


def communication(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the scores against the megabytes sent so far, up and down, by all clients."""
    total_sent = megabytes_sent(record)
    scores = [score for score in (OWN_SCORE, GLOBAL_SCORE) if score in record.metric_names]
    if not total_sent or not total_sent[-1] or not scores:
        return None
    with report_style():
        figure, axes = new_axes()
        for score in scores:
            curve = Curve()
            if score in record.initial:
                curve.add(0.0, record.unit.factor * mean_of_scores(record.initial[score]))
            for megabytes, row in zip(total_sent, record.rounds, strict=True):
                if score in row:
                    curve.add(megabytes, record.unit.factor * row[score])
            # A score has the same colour in the figure of the scores by round.
            draw_line(axes, SCORES.index(score), curve.x, curve.y, TITLES[score])
        axes.set(
            xlabel="megabytes sent so far by all clients and the server", ylabel=record.unit.label(record.score_name)
        )
        add_legend(figure)
        return render(figure, name, f"Scores against communication; {total_sent[-1]:.2f} MB were sent in total.")


def shifts(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the scores of the personal models, the global one and both together by kind of corruption and severity."""
    grid = _shift_grid(record)
    if not grid.row_names:
        return None
    num_columns = len(grid.column_names)
    with report_style():
        width = min(max(2.6 + 0.55 * num_columns, 4.4), 8.5)
        figure, axes = new_axes(width, 1.5 + 0.24 * len(grid.row_names))
        # Numbers have no highest score: the colours then end at the largest one.
        highest = 100 if record.has_classes else None
        image = axes.imshow(
            grid.scores, aspect="auto", cmap=fading_colormap(), vmin=0, vmax=highest, interpolation="none"
        )
        write_in_cells(axes, grid.scores, lambda score: "" if math.isnan(score) else f"{score:.0f}")
        axes.grid(False)
        set_tick_names(axes.xaxis, grid.column_names)
        set_tick_names(axes.yaxis, grid.row_names)
        axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("model and severity")
        figure.colorbar(image, label=record.unit.label(record.score_name))
        return render(figure, name, _describe_shifts(record), wide=num_columns > 8)


def _describe_shifts(record: RunRecord) -> str:
    """Describe the scores on corrupted images: the mean of each model over the kinds, at the extreme severities."""
    scores_of_model: dict[str, dict[float, list[float]]] = {}
    for curve_of_kind in record.shifts.values():
        for curve in curve_of_kind.values():
            for model in MODELS_OF_SHIFTS:
                for severity, score in zip(curve["severity"], curve.get(model, []), strict=False):
                    scores_of_model.setdefault(model, {}).setdefault(severity, []).append(score)
    sentences = []
    for model, scores_of_severity in scores_of_model.items():
        mildest = min(scores_of_severity)
        severest = max(scores_of_severity)
        first = record.unit.text(mean_of_scores(scores_of_severity[mildest]))
        last = record.unit.text(mean_of_scores(scores_of_severity[severest]))
        models = model_title(model)
        sentences.append(f"{models} {first} at severity {mildest:g}, {last} at {severest:g}")
    return f"Scores by kind of corruption and severity. Means over the kinds: {'; '.join(sentences)}."


@dataclass(frozen=True)
class ShiftGrid:
    """Scores on corrupted images: a row for each kind of corruption, a column for each model and severity.

    Attributes:
        row_names: Names of the kinds, with the shift if there are several.
        column_names: Model and severity.
        scores: Scores in their unit, (rows, columns); NaN where a kind was not scored.
    """

    row_names: list[str]
    column_names: list[str]
    scores: list[list[float]]


def _shift_grid(record: RunRecord) -> ShiftGrid:
    """Return the run's scores on corrupted images as a grid, the personal models' columns first."""
    row_names = []
    scores_of_row: list[dict[tuple[str, float], float]] = []
    models_and_severities: set[tuple[str, float]] = set()
    for shift, curve_of_kind in record.shifts.items():
        for kind, curve in curve_of_kind.items():
            row_names.append(f"{shift} {kind}" if len(record.shifts) > 1 else kind)
            score_of_column: dict[tuple[str, float], float] = {}
            for model in MODELS_OF_SHIFTS:
                if model in curve:
                    for severity, score in zip(curve["severity"], curve[model], strict=True):
                        score_of_column[model, severity] = score
            scores_of_row.append(score_of_column)
            models_and_severities.update(score_of_column)
    ordered_columns = sorted(models_and_severities, key=lambda column: (MODELS_OF_SHIFTS.index(column[0]), column[1]))
    rows = []
    for score_of_column in scores_of_row:
        rows.append([record.unit.factor * score_of_column.get(column, math.nan) for column in ordered_columns])
    return ShiftGrid(row_names, [f"{model} {severity:g}" for model, severity in ordered_columns], rows)


def epsilon(record: RunRecord, name: str) -> RenderedFigure | None:
    """Draw the ε of the privacy ledgers after each round."""
    figure_curves = {}
    for key in sorted(record.metric_names):
        if not _is_ledger(key):
            continue
        curve = Curve()
        for row in record.rounds:
            value = row.get(key, math.nan)
            if math.isfinite(value):
                curve.add(row["round"] + 1, value)
        if curve.x:
            figure_curves[key] = curve
    if not figure_curves:
        return None
    with report_style():
        figure, axes = new_axes()
        for index, (key, curve) in enumerate(figure_curves.items()):
            label = key.removeprefix("privacy/").replace("_epsilon_", " ledger, ").replace("max", "largest")
            draw_line(axes, index, curve.x, curve.y, short_label(label.replace("_", " "), 40))
        axes.set(ylabel="ε", ylim=(0, None))
        label_round_axis(axes, "rounds done")
        add_legend(figure)
        return render(figure, name, "ε of the privacy ledgers after each round.")


def _is_ledger(name: str) -> bool:
    """Return whether a metric is a ledger's ε.

    Standard deviations are left out, and ``privacy/epsilon_…``, which repeats the ledger of releases.
    """
    if not name.startswith("privacy/") or "epsilon" not in name:
        return False
    return not name.endswith("_std") and not name.startswith("privacy/epsilon")
