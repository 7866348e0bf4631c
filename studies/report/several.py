# SPDX-License-Identifier: Apache-2.0
"""Several runs side by side: runs that differ only in their seed are a group, and groups are compared by client."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import yaml

from perada.results.report import SCORES, ScoreUnit, scores_beside, scores_of_both, shift_names, title_with_metric
from perada.studies.report.facts import PairedDifference, paired_difference
from perada.studies.report.figures import OWN_SCORE, TITLES
from perada.studies.report.plotting import (
    GREY,
    MAX_NAMED_CLIENTS,
    RenderedFigure,
    add_legend,
    colour_of,
    draw_line,
    label_round_axis,
    marker_of,
    new_axes,
    render,
    report_style,
    short_label,
)
from perada.studies.report.records import RunRecord
from perada.studies.report.sections import SPREAD, Cell, Section, Table

IGNORED_OPTIONS = ("seed_everything", "federated.seed", "trainer.logger", "trainer.default_root_dir", "ckpt_path")
"""Options, or beginnings of their names, in which the runs of a group may differ."""
MAX_DEPTH = 20
"""Largest depth of a configuration, so that a broken file cannot exhaust the stack."""


@dataclass
class Group:
    """Runs that differ only in their seed.

    Attributes:
        name: Name in tables and figures.
        runs: The runs.
        options: Options of the runs by their dotted names; empty if they are not known.
    """

    name: str
    runs: list[RunRecord]
    options: dict[str, str]

    @property
    def unit(self) -> ScoreUnit:
        """The unit of the scores."""
        return self.runs[0].unit

    def axis_label(self, score: str) -> str:
        """Return the label of an axis with a score."""
        return self.unit.label(title_with_metric(score, self.runs[0].first_metric))

    def last_scores(self, score: str) -> list[float]:
        """Return the last value of a score in each run that has it; empty if it is NaN in all of them.

        It is NaN in a run in which a model has no score: the mean over the other runs would look like that of all.
        """
        values = [run.last(score) for run in self.runs if score in run.metric_names]
        return [] if all(map(math.isnan, values)) else values

    def has_mean(self, score: str) -> bool:
        """Return whether the score is a number in each run that has it."""
        return not any(score in run.undefined_scores for run in self.runs)

    def client_scores(self, score: str) -> list[float]:
        """Return each client's score (M,), the mean over the runs; empty if a run does not have the scores."""
        scores_of_run = [run.scores_of_clients.get(score, []) for run in self.runs]
        num_clients = len(scores_of_run[0])
        if any(len(scores) != num_clients for scores in scores_of_run):
            return []
        return [fmean(scores) for scores in zip(*scores_of_run, strict=True)]


def group_runs(run_records: Sequence[RunRecord]) -> list[Group]:
    """Return the groups in the order of their first runs, with distinct names."""
    groups: dict[Hashable, Group] = {}
    for record in run_records:
        options = _read_options(record)
        key: Hashable
        if record.row_name:
            key = record.row_name
        elif options:
            key = tuple(sorted(options.items()))
        else:
            key = id(record)  # without options, two runs cannot be known to have the same
        if key in groups:
            groups[key].runs.append(record)
        else:
            name = record.name if record.row_name else str(record.info.get("algorithm") or record.name)
            groups[key] = Group(name, [record], options)
    return _with_distinct_names(list(groups.values()))


def _with_distinct_names(groups: Sequence[Group]) -> list[Group]:
    """Return groups whose names, where they were equal, have the options that differ, or numbers."""
    distinct: list[Group] = []
    for number, group in enumerate(groups, start=1):
        namesakes = [other for other in groups if other.name == group.name]
        name = group.name
        if len(namesakes) > 1:
            first = group.runs[0]
            difference = _describe_differences(group.options, [other.options for other in namesakes])
            name = first.row_name or f"{name}: {difference or first.name}"
        if any(other.name == name for other in distinct):
            name = f"{name} ({number})"
        distinct.append(Group(name, group.runs, group.options))
    return distinct


def _describe_differences(options: dict[str, str], others: Sequence[dict[str, str]]) -> str:
    """Return the first few options that are not the same in all runs of one algorithm."""
    differing = []
    for name, value in options.items():
        if any(other.get(name) != value for other in others):
            differing.append(f"{name.split('.')[-1]}={value}")
    return ", ".join(differing[:3])


def _read_options(record: RunRecord) -> dict[str, str]:
    """Return the options of ``config.yaml`` by their dotted names, without :data:`IGNORED_OPTIONS`."""
    if not record.config:
        return {}
    try:
        content = yaml.safe_load(record.config)
    except yaml.YAMLError as error:
        raise ValueError(f"{str(record.folder / 'config.yaml')!r} cannot be read ({type(error).__name__})") from error
    options: dict[str, str] = {}

    def collect(value: Any, name: str, depth: int) -> None:  # noqa: ANN401  # any YAML
        if isinstance(value, dict) and depth < MAX_DEPTH:
            for key, inner_value in value.items():
                collect(inner_value, f"{name}.{key}" if name else str(key), depth + 1)
        elif not name.startswith(IGNORED_OPTIONS):
            options[name] = str(value)

    collect(content or {}, "", 0)
    return options


def comparison(run_records: Sequence[RunRecord]) -> list[Section]:
    """Return the sections that show runs side by side.

    Raises:
        ValueError: If some runs have scores in percent, and others errors in the unit of their targets.
    """
    first = run_records[0]
    for record in run_records:
        if record.unit != first.unit:
            raise ValueError(
                f"{str(first.folder)!r} and {str(record.folder)!r} cannot be compared: their scores are "
                f"{first.first_metric} and {record.first_metric}; make a report of each"
            )
    groups = group_runs(run_records)
    return [_report_scores(groups), *_paired_differences(groups)]


def _report_scores(groups: Sequence[Group]) -> Section:
    figures = []
    for score in SCORES:
        figure = _score_figure(groups, score)
        if figure is not None:
            figures.append(figure)
    return Section(
        key="comparison",
        title="Scores",
        intro="Runs that differ only in their seed are one row and one line: their mean, and a sample standard "
        "deviation around it.",
        figures=figures,
        tables=[_score_table(groups)],
        opened=True,
    )


def _score_table(groups: Sequence[Group]) -> Table:
    """Return the table of the last scores, a row for each group."""
    scores = [score for score in _all_scores(groups) if any(group.last_scores(score) for group in groups)]
    header = ["run", "runs", "seeds"]
    for score in scores:
        header += [score, f"{SPREAD}{score}"]
    rows: list[list[Cell]] = []
    for group in groups:
        seeds = [str(run.info.get("seed", run.seed)) for run in group.runs]
        row: list[Cell] = [group.name, len(group.runs), ", ".join(seeds)]
        for score in scores:
            values = group.last_scores(score)
            row.append(fmean(values) if values else math.nan)
            row.append(_compute_deviation(values))
        rows.append(row)
    return Table(
        name="comparison",
        caption="The last scores: mean and sample standard deviation over runs",
        column_names=header,
        rows=rows,
        metric_axis="columns",
        unit=groups[0].unit,
    )


def _compute_deviation(run_scores: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN for a single value, or if a value is NaN."""
    # stdev() raises an error for NaN.
    if len(run_scores) < 2 or any(map(math.isnan, run_scores)):
        return math.nan
    return stdev(run_scores)


def _all_scores(groups: Sequence[Group]) -> list[str]:
    """Return the scores that a table may have, in its order."""
    last_rounds = []
    test_images: list[int] = []
    score_names: list[str] = []
    for group in groups:
        for run in group.runs:
            last_rounds += run.rounds[-1:]
            test_images += run.test_images
            score_names += run.metric_names
    own_score, *other_scores = SCORES
    own_scores = [own_score, *scores_beside(last_rounds, test_images)]
    return [*own_scores, *other_scores, *scores_of_both(score_names), *shift_names(score_names)]


def _score_figure(groups: Sequence[Group], score: str) -> RenderedFigure | None:
    """Draw a score of all groups: by round, or only the last one if there was one evaluation."""
    scored_rounds: set[float] = set()
    for group in groups:
        for run in group.runs:
            scored_rounds.update(row["round"] for row in run.rounds if score in row)
    if not any(group.last_scores(score) for group in groups):
        return None
    if len(scored_rounds) == 1:
        return _draw_points(groups, score)
    return _draw_curves(groups, score)


def _draw_curves(groups: Sequence[Group], score: str) -> RenderedFigure:
    """Draw a line for each group, the mean over runs by round, with a band of one standard deviation."""
    with report_style():
        figure, axes = new_axes()
        for index, group in enumerate(groups):
            scores_by_round = _scores_by_round(group, score)
            if not scores_by_round:
                continue
            rounds_done = sorted(scores_by_round)
            means = [fmean(scores_by_round[number]) for number in rounds_done]
            errors = []
            for number in rounds_done:
                deviation = _compute_deviation(scores_by_round[number])
                errors.append(0.0 if math.isnan(deviation) else deviation)
            draw_line(axes, index, rounds_done, means, short_label(group.name, 34))
            if any(errors):
                lowest = [mean - error for mean, error in zip(means, errors, strict=True)]
                highest = [mean + error for mean, error in zip(means, errors, strict=True)]
                axes.fill_between(rounds_done, lowest, highest, color=colour_of(index), alpha=0.15, linewidth=0)
        axes.set(ylabel=groups[0].axis_label(score))
        label_round_axis(axes, "rounds done")
        add_legend(figure)
        return render(figure, _file_name(score), f"{TITLES[score]}, by round, of {len(groups)} settings.")


def _scores_by_round(group: Group, score: str) -> dict[float, list[float]]:
    """Return a score in its unit by the number of rounds done, a value for each run that has it.

    A value is NaN where a model of the run has no score.
    """
    scores_by_round: dict[float, list[float]] = {}
    for run in group.runs:
        for row in run.rounds:
            if score in row:
                scores_by_round.setdefault(row["round"] + 1, []).append(group.unit.factor * row[score])
    return scores_by_round


def _draw_points(groups: Sequence[Group], score: str) -> RenderedFigure:
    """Draw a point for each group, the mean over runs, with its standard deviation."""
    scored_groups = [group for group in groups if group.last_scores(score)]
    with report_style():
        figure, axes = new_axes(4.5, min(1.2 + 0.3 * len(scored_groups), 12))
        for index, group in enumerate(scored_groups):
            values = [group.unit.factor * value for value in group.last_scores(score)]
            deviation = _compute_deviation(values)
            error = 0 if math.isnan(deviation) else deviation
            axes.errorbar(fmean(values), index, xerr=error, fmt=marker_of(index), color=colour_of(index), capsize=3)
        axes.set_yticks(range(len(scored_groups)), [short_label(group.name, 30) for group in scored_groups])
        axes.set(xlabel=groups[0].axis_label(score), ylim=(len(scored_groups) - 0.5, -0.5))
        alt = f"{groups[0].axis_label(score)}, of {len(scored_groups)} settings, with a standard deviation over runs."
        return render(figure, _file_name(score), alt)


def _file_name(score: str) -> str:
    return f"compared_{score.replace('/', '_')}"


@dataclass(frozen=True)
class GroupContrast:
    """The clients' scores in one group against those in the first group.

    Attributes:
        name: Name of the group.
        by_client: Difference of each client's score (M,); NaN for a client that lacks one of the two scores.
        difference: The differences that are not NaN, with their mean.
    """

    name: str
    by_client: list[float]
    difference: PairedDifference


def _paired_differences(groups: Sequence[Group]) -> list[Section]:
    """Return the section that compares each other group with the first one; none if no group has the same clients."""
    baseline, *others = groups
    base_scores = baseline.client_scores(OWN_SCORE)
    contrasts = []
    for group in others:
        scores = group.client_scores(OWN_SCORE)
        if base_scores and scores and _have_same_clients(baseline, group):
            by_client = [score - base for score, base in zip(scores, base_scores, strict=True)]
            difference = paired_difference(scores, base_scores)
            if not baseline.has_mean(OWN_SCORE) or not group.has_mean(OWN_SCORE):
                # A mean over the other clients would look like that of all.
                difference = replace(difference, mean=math.nan, standard_error=math.nan)
            contrasts.append(GroupContrast(group.name, by_client, difference))
    if not contrasts:
        return []

    rows: list[list[Cell]] = []
    for contrast in contrasts:
        differences = contrast.difference.differences
        # A difference of rounding is none.
        num_higher = sum(difference > 1e-9 for difference in differences)
        num_lower = sum(difference < -1e-9 for difference in differences)
        lower_is_better = baseline.runs[0].lower_is_better
        num_better = num_lower if lower_is_better else num_higher
        num_worse = num_higher if lower_is_better else num_lower
        mean = contrast.difference.mean
        error = contrast.difference.standard_error
        rows.append([contrast.name, baseline.name, len(differences), mean, error, num_better, num_worse])
    table = Table(
        name="paired",
        caption=f"Differences over clients: {TITLES[OWN_SCORE]}",
        column_names=["run", "less", "clients", "mean difference", "standard error", "clients better", "clients worse"],
        rows=rows,
        unit=baseline.unit,
    )
    section = Section(
        key="paired",
        title="Paired differences",
        intro="The score of each client's personal model on the client's own images, averaged over seeds, minus the "
        f"client's score in {baseline.name}. The standard error is that of the mean over clients; it does not include "
        "the variation of runs over seeds.",
        figures=[_draw_differences(contrasts, baseline)],
        tables=[table],
        opened=True,
    )
    return [section]


def _have_same_clients(group: Group, other: Group) -> bool:
    """Return whether the clients of all runs have the same names and numbers of images."""
    first = group.runs[0]
    for run in (*group.runs, *other.runs):
        has_same_names = run.client_names == first.client_names
        has_same_images = run.partition == first.partition and run.train_sizes == first.train_sizes
        if not has_same_names or not has_same_images:
            return False
    return True


def _draw_differences(contrasts: Sequence[GroupContrast], baseline: Group) -> RenderedFigure:
    """Draw a row for each client with its differences to the first group, and above them their means.

    Clients are sorted by their difference in the first contrast; an error bar is the standard error of a mean.
    """
    client_names = baseline.runs[0].client_names
    clients = sorted(range(len(client_names)), key=lambda client: _nan_last(contrasts[0].by_client[client]))
    num_clients = len(clients)
    mean_rows = [num_clients + index for index in range(len(contrasts))]
    ticks = list(mean_rows)
    tick_names = ["mean"] * len(contrasts)
    # With many clients the figure keeps its height: the markers shrink, and the names are left out.
    has_names = num_clients <= MAX_NAMED_CLIENTS
    if has_names:
        ticks = [*range(num_clients), *mean_rows]
        tick_names = [*(short_label(client_names[client]) for client in clients), *tick_names]
        height = min(max(1.2 + 0.19 * len(ticks), 2.6), 10)
        marker_size = 4
    else:
        height = min(3.4 + 0.19 * len(contrasts), 10)
        marker_size = 2
    with report_style():
        figure, axes = new_axes(4.5, height)
        factor = baseline.unit.factor
        axes.axvline(0, color=GREY, linewidth=1)
        for index, contrast in enumerate(contrasts):
            colour = colour_of(index + 1)  # the first colour is that of the first group
            marker = marker_of(index + 1)
            points = [factor * contrast.by_client[client] for client in clients]
            label = short_label(contrast.name, 40)
            axes.plot(points, range(num_clients), marker, color=colour, markersize=marker_size, alpha=0.7, label=label)
            error = contrast.difference.standard_error
            axes.errorbar(
                factor * contrast.difference.mean,
                mean_rows[index],
                xerr=0 if math.isnan(error) else factor * error,
                fmt=marker,
                color=colour,
                capsize=3,
            )
        axes.axhline(num_clients - 0.5, color=GREY, linewidth=0.5)
        xlabel = f"difference to {short_label(baseline.name, 40)}"
        axes.set(xlabel=f"{xlabel} in % points" if baseline.unit.symbol else xlabel)
        axes.set_yticks(ticks, tick_names)
        if not has_names:
            axes.set_ylabel("clients, sorted")
        add_legend(figure)
        alt = f"Differences to {baseline.name} by client, and above them their mean with its standard error."
        return render(figure, "paired", alt)


def _nan_last(value: float) -> float:
    """Return a sort key that places NaN after all numbers."""
    return math.inf if math.isnan(value) else value
