# SPDX-License-Identifier: Apache-2.0
"""What is run: every recipe, algorithm, seed, and value of the grid, as options of ``perada fit``."""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from perada.algorithms import Algorithm
from perada.api import full_name
from perada.experiments.compare.entries import ENTRIES

MakeCLI = Callable[[Sequence[str]], Any]
"""Builds trainer, model and data from options of ``perada fit``."""
Point = dict[str, str]
"""A point of the grid: values by the names that ``--tune`` gave."""
Grid = dict[str, list[str]]
"""Values by name; several options joined with ``+`` get the same value."""
Sampler = Literal["tpe", "random"]
Row = tuple[str, str, tuple[tuple[str, str], ...]]
"""A row of the table: recipe, algorithm, and the values of what ``--vary`` names."""

START = "before fine-tuning"
"""The row of the initial model: pretrained backbone, untrained adapter."""
CHOSEN_BY = ("personal/local_test", "personal/global_test")
"""The scores whose mean, on validation images, chooses from the grid where nothing else is asked for."""
DIAGNOSED = ("theory/", "updates/")
"""What the names of diagnostics begin with."""
HOLD_OUT = "--data.client_validation=0.2"
VALIDATE = "--data.evaluate_on=validation"


@dataclass(frozen=True)
class Trials:
    """How the grids that have a range are gone through: the two ends of each, how many points are tried, by what."""

    ends: dict[str, list[Point]]
    number: int
    sampler: Sampler


@dataclass(frozen=True)
class Job:
    """One run. Its fields are written beside its results."""

    label: str  # its row in the table
    recipe: str  # name or file
    seed: int
    stage: str  # "tune" for a run of the grid, "run" for one of the table
    point: Point
    args: list[str]  # options of `perada fit`
    variant: list[str]  # what the user asked for beside recipe and algorithm, to tell rows of one file apart
    digest: str  # of the recipe's content
    chosen_by: list[str]  # scores whose mean, on validation images, chooses; with a minus, the lower one is better
    varied: Point  # values of what ``--vary`` names

    def __str__(self) -> str:
        values = named(self.point)
        return f"{self.label}, seed {self.seed}{values}" + " (validation)" * (self.stage == "tune")


def split_values(text: str) -> list[str]:
    """What stands between commas, but for those within brackets or quotes; quotes around a whole value are left out.

    >>> split_values('1, [2,3],{"a": "b,c"},"d, e"')
    ['1', '[2,3]', '{"a": "b,c"}', 'd, e']
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    stripped = [value.strip() for value in values]
    return [value[1:-1] if re.fullmatch(r"\"[^\"]*\"|'[^']*'", value) else value for value in stripped]


def parse_grids(asked: Sequence[str], algorithms: Sequence[str]) -> dict[str, Grid]:
    """The grid of each algorithm (the recipes' own: ""), from the arguments of ``--tune``, which may begin with names.

    Raises:
        ValueError: As :func:`parse_grid`, or if a name is not an algorithm's. What is for one that is not among the
            ``algorithms`` is left out.

    >>> parse_grids(["model.lr_local=1,2", "ditto:model.momentum=0,0.9"], ["fedavg", "ditto"])["fedavg"]
    {'model.lr_local': ['1', '2']}
    """
    grids: dict[str, list[str]] = {name: [] for name in algorithms or [""]}
    for text in asked:
        named, colon, _ = text.partition("=")[0].rpartition(":")
        only = named.split(",") if colon else list(grids)
        if colon and not algorithms:
            raise ValueError(f"--tune {text!r} is for named algorithms: give --algorithms too")
        for name in only:
            if colon and name not in ENTRIES:
                raise ValueError(f"--tune {text!r} is for {name!r}, which is not an algorithm: `perada compare --help`")
            if name in grids:
                grids[name].append(text.removeprefix(f"{named}:") if colon else text)
    return {name: parse_grid(own) for name, own in grids.items()}


def parse_grid(asked: Sequence[str], option: str = "--tune") -> Grid:
    """Read the arguments of ``--tune``, without names of algorithms, or of ``--vary``.

    Raises:
        ValueError: If one is not NAME=V1,V2,... with different values, or names an option twice.

    >>> parse_grid(["model.lr_local+model.lr_personal=0.01,0.1"])
    {'model.lr_local+model.lr_personal': ['0.01', '0.1']}
    """
    grid: Grid = {}
    seen: set[str] = set()
    for text in asked:
        name, equals, listed = text.partition("=")
        values, options = split_values(listed), [full_name(one) for one in name.removeprefix("--").split("+")]
        if not equals or not all(options) or not all(values):
            raise ValueError(
                f"{option} {text!r} cannot be read: give NAME=V1,V2,..., for example model.lr_local=0.01,0.1"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"{option} {text!r} has a value twice: give each once")
        known = [option.replace(".init_args.", ".") for option in options]  # the same option with and without it
        twice = [option for n, option in enumerate(options) if known[n] in seen or known[n] in known[:n]]
        if twice:
            raise ValueError(f"{option} {text!r}: {twice[0]} is given twice, give it once")
        if fixed := {"seed_everything", *(word[2:].partition("=")[0] for word in (HOLD_OUT, VALIDATE))} & {*options}:
            what = "--seeds gives the seeds" if "seed_everything" in fixed else "this says what is scored"
            raise ValueError(f"{option} {text!r}: {what}, so it cannot be tuned or varied")
        seen.update(known)
        grid["+".join(options)] = values
    return grid


def named(point: Point) -> str:
    """Values with the names of their options without sections, to put behind a label."""
    return "".join(f", {re.sub(r'[^+]*[.]', '', name)}={value}" for name, value in point.items())


def words(point: Point) -> list[str]:
    """A point of the grid as options of ``perada fit``."""
    return [f"--{option}={value}" for name, value in point.items() for option in name.split("+")]


class Plan:
    """The runs that a command asks for.

    Args:
        make_cli: See :data:`MakeCLI`.
        recipes: Names or files.
        algorithms: Keys of :data:`~perada.experiments.compare.entries.ENTRIES`; where empty, each recipe's own.
        seeds: Seeds of the runs; the grid is run with the first.
        grids: The grid of each algorithm, of whose points the best is taken.
        vary: Values of which each makes a row of its own.
        chosen_by: Scores whose mean, on validation images, chooses from the grid.
        paper: Whether each algorithm trains what its paper trains.
        overrides: Options of ``perada fit`` for every run.
        trials: Of the grids that have a range.

    Raises:
        ValueError: If a run's options cannot be parsed: nothing has been run by then.
    """

    def __init__(
        self,
        make_cli: MakeCLI,
        recipes: Sequence[str],
        algorithms: Sequence[str],
        seeds: Sequence[int],
        grids: dict[str, Grid],
        vary: Grid,
        chosen_by: Sequence[str],
        paper: bool,
        overrides: Sequence[str],
        trials: Trials | None = None,
    ) -> None:
        self.recipes, self.seeds, self.paper, self.overrides = recipes, list(dict.fromkeys(seeds)), paper, overrides
        # The last name's values change fastest.
        varied = [tuple(zip(vary, values, strict=True)) for values in product(*vary.values())]
        self.rows: list[Row] = list(dict.fromkeys(product(recipes, algorithms or [""], varied)))
        self.trials = trials or Trials({}, 0, "tpe")
        # Where nothing is tuned there is no point; those of ranges are found as results come.
        self.points: dict[str, list[Point]] = {
            name: [dict(zip(grid, values, strict=True)) for values in product(*grid.values()) if values]
            if name not in self.trials.ends
            else []
            for name, grid in grids.items()
        }
        self.grids, self.chosen_by = grids, list(chosen_by)
        self.signed = self.chosen_by
        self.given: dict[str, tuple[type[Algorithm], str]] = {}
        for recipe in recipes:
            cli = make_cli(["--config", recipe])
            self.given[recipe] = type(cli.loop.algorithm), _digest(map(str, cli.config.config))
        asked = {
            part for name in [*vary, *(name for grid in grids.values() for name in grid)] for part in name.split("+")
        }
        if twice := sorted(asked & {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}):
            raise ValueError(f"--{twice[0]} is given for every run, and tuned or varied: leave one of them out")
        for row in self.rows:
            cli = make_cli(self.job(row, self.seeds[0], "run", {}).args)
            shared = [name for name in chosen_by if name.startswith("global/")]
            if self.grids[row[1]] and shared and not cli.loop.algorithm.global_model:
                name = row[1] or type(cli.loop.algorithm).__name__
                raise ValueError(f"--choose_by {shared[0]}: {name} has no global model; leave it or the score out")
            self._sign(cli.model.score_names)
            if row[1]:
                ENTRIES[row[1]].check(cli.config.federated.algorithm)
            if cli.loop.test_mode:
                raise ValueError(
                    "privacy: secure_rng=false cannot be used with perada compare, which writes each run's seed beside "
                    "its results: the noise would follow from it; leave secure_rng out"
                )
            tried: set[str] = set()
            ends = [self.job(row, self.seeds[0], "tune", point) for point in self.trials.ends.get(row[1], ())]
            for job in self.tuning(row) + ends:
                if tried.issuperset(words(job.point)):
                    continue
                tried.update(words(job.point))
                try:
                    make_cli(job.args)
                except Exception as error:  # a parser's or a class's
                    raise ValueError(f"--tune {' '.join(words(job.point))} with {job.label}: {error}") from error

    def job(self, row: Row, seed: int, stage: str, point: Point) -> Job:
        """A run of a row."""
        recipe, algorithm, varied = row
        given, digest = self.given[recipe]
        label = f"{self._prefix(recipe)}{algorithm}" if algorithm else recipe.removesuffix(".yaml")
        own = ENTRIES[algorithm].words(given, self.paper) if algorithm else []
        tunes = stage == "tune"
        args = [
            *("--config", recipe, "--trainer.logger=false"),  # no folder for every one of so many runs
            *own,
            f"--seed_everything={seed}",
            *([HOLD_OUT] if tunes else []),
            *self.overrides,
            *words(dict(varied)),
            *words(point),
            *([VALIDATE] if tunes else []),
        ]
        tuned = [f"--tune={name}={','.join(values)}" for name, values in self.grids[algorithm].items()]
        if algorithm in self.trials.ends:
            tuned += [f"--trials={self.trials.number}", f"--sampler={self.trials.sampler}"]
        choice = [f"--choose_by={','.join(self.chosen_by)}"] if tuned and self.chosen_by != list(CHOSEN_BY) else []
        variant = [*(["--paper"] if self.paper else []), *self.overrides, *words(dict(varied)), *tuned, *choice]
        label += named(dict(varied))
        return Job(label, recipe, seed, stage, point, args, variant, digest, self.signed, dict(varied))

    def _sign(self, scores: dict[str, bool]) -> None:
        """Put a minus before the scores to choose by of which the lower one is the better."""
        if unknown := [name for name in self.chosen_by if name not in scores]:
            close = difflib.get_close_matches(unknown[0], scores, n=3) or [
                name for name in scores if "_test_" not in name
            ]
            raise ValueError(
                f"--choose_by {unknown[0]}: no such score with this --model.metric; did you mean {', '.join(close)}?"
            )
        signed = ["-" * scores[name] + name for name in self.chosen_by]
        if self.signed not in (self.chosen_by, signed):
            raise ValueError("--choose_by: of a score the lower is better in some recipes only; give all one metric")
        self.signed = signed

    def count(self, algorithm: str) -> int:
        """How many settings of an algorithm are tried."""
        return self.trials.number if algorithm in self.trials.ends else len(self.points[algorithm])

    def tuning(self, row: Row) -> list[Job]:
        """The runs of the grid for a row; none where it has a range."""
        return [self.job(row, self.seeds[0], "tune", point) for point in self.points[row[1]]]

    def final(self, chosen: dict[Row, Point]) -> list[Job]:
        """The runs of the table, for the rows that have a point."""
        return [self.job(row, seed, "run", point) for seed in self.seeds for row, point in chosen.items()]

    def start_label(self, recipe: str) -> str:
        """The row of a recipe's initial model."""
        return self._prefix(recipe) + START

    def _prefix(self, recipe: str) -> str:
        """What tells a row from the same one of another recipe."""
        return f"{recipe.removesuffix('.yaml')} " if len(self.recipes) > 1 else ""


def _digest(paths: Iterable[str]) -> str:
    """Of the lines of a recipe's files, without comments."""
    text = (line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines())
    lines = [line.rstrip() for line in text if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
