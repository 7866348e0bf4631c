# SPDX-License-Identifier: Apache-2.0
"""Several runs side by side: those that differ in the seed alone are one group, and groups are compared by client."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import yaml

from perada.results.report import SCORES, scores_beside, shift_names
from perada.studies.report.drawn import (
    COLOURS,
    MARKERS,
    Drawn,
    drawing,
    finish,
    label,
    legend,
    line,
    new_axes,
    whole_rounds,
)
from perada.studies.report.facts import paired
from perada.studies.report.figures import TITLES
from perada.studies.report.records import Record
from perada.studies.report.sections import Cell, Section, Table

SEEDS = ("seed_everything", "federated.seed", "trainer.logger", "trainer.default_root_dir", "ckpt_path")
"""Options in which the runs of a group may differ."""


@dataclass
class Group:
    """Runs that differ in the seed alone."""

    name: str
    runs: list[Record]

    def values(self, score: str) -> list[float]:
        """The last score of each run that has it."""
        return [value for run in self.runs if not math.isnan(value := run.last(score))]

    def clients(self, score: str) -> list[float]:
        """Each client's score (M,), mean over the runs; empty where a run does not tell."""
        every = [run.clients.get(score, []) for run in self.runs]
        if not all(every) or len({len(own) for own in every}) > 1:
            return []
        return [fmean(own) for own in zip(*every, strict=True)]


def groups_of(records: Sequence[Record]) -> list[Group]:
    """The groups, in the order of their first runs, with names that tell them apart."""
    found: dict[Any, list[Record]] = {}
    settings = {id(record): _settings(record) for record in records}
    for record in records:
        options = settings[id(record)]
        key = record.group or (tuple(sorted(options.items())) if options else id(record))
        found.setdefault(key, []).append(record)
    groups = []
    for runs in found.values():
        first = runs[0]
        groups.append(Group(first.name if first.group else str(first.info.get("algorithm") or first.name), runs))
    names = [group.name for group in groups]
    for group, name in zip(groups, names, strict=True):
        if names.count(name) > 1:
            first = group.runs[0]
            alike = [settings[id(other.runs[0])] for other, own in zip(groups, names, strict=True) if own == name]
            group.name = first.group or f"{name}: {_difference(settings[id(first)], alike) or first.name}"
    for place, group in enumerate(groups):
        if any(other.name == group.name for other in groups[:place]):
            group.name = f"{group.name} ({place + 1})"
    return groups


def _difference(own: dict[str, str], others: Sequence[dict[str, str]]) -> str:
    """The first few options that are not the same in all runs of one algorithm."""
    names = [name for name in own if any(other.get(name) != own[name] for other in others)]
    return ", ".join(f"{name.split('.')[-1]}={own[name]}" for name in names[:3])


def _settings(record: Record) -> dict[str, str]:
    """The options of ``config.yaml`` by their dotted names, without what runs of a group may differ in."""
    try:
        content = yaml.safe_load(record.config) if record.config else None
    except yaml.YAMLError as error:
        raise ValueError(f"{str(record.folder / 'config.yaml')!r} cannot be read ({type(error).__name__})") from error
    flat: dict[str, str] = {}

    def walk(value: Any, name: str, depth: int) -> None:  # noqa: ANN401  # any YAML
        if isinstance(value, dict) and depth < 20:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key), depth + 1)
        elif not name.startswith(SEEDS):
            flat[name] = str(value)

    walk(content or {}, "", 0)
    return flat


def comparison(records: Sequence[Record]) -> list[Section]:
    """The sections that show runs side by side."""
    groups = groups_of(records)
    return [_scores(groups), *_paired(groups)]


def _scores(groups: Sequence[Group]) -> Section:
    extra = shift_names(name for group in groups for run in group.runs for row in run.rounds for name in row)
    last = [run.rounds[-1] for group in groups for run in group.runs if run.rounds]
    test_images = [count for group in groups for run in group.runs for count in run.test_images]
    scores = (SCORES[0], *scores_beside(last, test_images), *SCORES[1:], *extra)
    names = [name for name in scores if any(group.values(name) for group in groups)]
    rows: list[list[Cell]] = []
    for group in groups:
        seeds = [str(run.info.get("seed", run.seed)) for run in group.runs]
        row: list[Cell] = [group.name, len(group.runs), ", ".join(seeds)]
        for name in names:
            values = group.values(name)
            row += [fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan]
        rows.append(row)
    header = ["run", "runs", "seeds", *(text for name in names for text in (name, f"± {name}"))]
    caption = "The last scores: mean and sample standard deviation over runs"
    tables = [Table("comparison", caption, header, rows, metrics="columns")]
    drawn = [one for one in (_curves(groups, name) for name in SCORES) if one is not None]
    intro = (
        "Runs that differ in their seed alone are one row and one line: their mean, and a sample standard deviation "
        "around it."
    )
    return Section("comparison", "Scores", intro, drawn, tables, opened=True)


def _curves(groups: Sequence[Group], score: str) -> Drawn | None:
    """A line for each group, by round."""
    if not any(score in row for group in groups for run in group.runs for row in run.rounds):
        return None
    scored = {row["round"] for group in groups for run in group.runs for row in run.rounds if score in row}
    if len(scored) == 1:
        return _points(groups, score)
    with drawing():
        figure, axes = new_axes()
        for place, group in enumerate(groups):
            by_round: dict[float, list[float]] = {}
            for run in group.runs:
                for row in run.rounds:
                    if not math.isnan(row.get(score, math.nan)):
                        by_round.setdefault(row["round"] + 1, []).append(100 * row[score])
            if not by_round:
                continue
            x = sorted(by_round)
            y = [fmean(by_round[one]) for one in x]
            line(axes, place, x, y, label(group.name, 34))
            error = [stdev(by_round[one]) if len(by_round[one]) > 1 else 0.0 for one in x]
            if any(error):
                low, high = zip(*((a - e, a + e) for a, e in zip(y, error, strict=True)), strict=True)
                axes.fill_between(x, low, high, color=COLOURS[place % len(COLOURS)], alpha=0.15, linewidth=0)
        axes.set(ylabel=f"{TITLES[score]}, in %")
        whole_rounds(axes, "rounds done")
        legend(figure)
        return finish(
            figure, f"compared_{score.replace('/', '_')}", f"{TITLES[score]}, by round, of {len(groups)} settings."
        )


def _points(groups: Sequence[Group], score: str) -> Drawn:
    """A point for each group, where runs were scored once."""
    shown = [group for group in groups if group.values(score)]
    with drawing():
        figure, axes = new_axes(4.5, min(1.2 + 0.3 * len(shown), 12))
        for place, group in enumerate(shown):
            values = [100 * value for value in group.values(score)]
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            error = stdev(values) if len(values) > 1 else 0
            axes.errorbar(fmean(values), place, xerr=error, fmt=marker, color=colour, capsize=3)
        axes.set_yticks(range(len(shown)), [label(group.name, 30) for group in shown])
        axes.set(xlabel=f"{TITLES[score]}, in %", ylim=(len(shown) - 0.5, -0.5))
        alt = f"{TITLES[score]}, of {len(shown)} settings, in %, with a standard deviation over runs."
        return finish(figure, f"compared_{score.replace('/', '_')}", alt)


def _paired(groups: Sequence[Group]) -> list[Section]:
    """Each other group against the first one, client by client, where they have the same clients."""
    first, score = groups[0], SCORES[0]
    base = first.clients(score)
    rows: list[list[Cell]] = []
    each: dict[str, list[float]] = {}
    for group in groups[1:]:
        other = group.clients(score)
        if not base or not other or not _same_clients(first, group):
            continue
        differences, mean, error = paired(other, base)
        each[group.name] = differences
        better, worse = (sum(sign * one > 1e-9 for one in differences) for sign in (1, -1))
        rows.append([group.name, first.name, len(differences), mean, error, better, worse])
    if not rows:
        return []
    header = ["run", "less", "clients", "mean difference", "standard error", "clients better", "clients worse"]
    tables = [Table("paired", f"Differences over clients: {TITLES[score]}", header, rows)]
    intro = "The score of each client's personal model on the client's own images, its mean over seeds, less what the "
    intro += f"client has in {first.name}. The standard error "
    intro += "is that of the mean over clients; it does not count how much a run changes with its seed."
    return [Section("paired", "Paired differences", intro, [_differences(each, first.name)], tables, opened=True)]


def _same_clients(one: Group, other: Group) -> bool:
    """Whether clients have the same names and as many images of each class."""
    first = one.runs[0]
    return all(
        (run.client_names, run.partition, run.train_sizes) == (first.client_names, first.partition, first.train_sizes)
        for run in (*one.runs, *other.runs)
    )


def _differences(each: dict[str, list[float]], first: str) -> Drawn:
    with drawing():
        figure, axes = new_axes(4.5, min(1.4 + 0.5 * len(each), 8))
        axes.axvline(0, color="#808080", linewidth=1)
        for place, (name, values) in enumerate(each.items()):
            colour = COLOURS[(place + 1) % len(COLOURS)]
            shown = [100 * value for value in values]
            axes.plot(shown, [place] * len(shown), "|", color=colour, markersize=9, alpha=0.6)
            _, mean, error = paired(shown, [0.0] * len(shown))
            axes.errorbar(mean, place + 0.25, xerr=0 if math.isnan(error) else error, fmt="o", color=colour, capsize=3)
            axes.annotate(
                label(name, 40), (mean, place + 0.25), (0, 5), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set(ylim=(-0.5, len(each) - 0.2), yticks=[], xlabel=f"difference to {label(first, 40)} in % points")
        alt = f"Differences to {first} by client, and their mean with its standard error."
        return finish(figure, "paired", alt)
