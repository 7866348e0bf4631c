# SPDX-License-Identifier: Apache-2.0
"""What is run: every recipe, algorithm, seed, and value of the grid, as options of ``perada fit``."""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from perada.algorithms import Algorithm
from perada.compare.entries import ENTRIES
from perada.compare.grid import HOLD_OUT, VALIDATE, Grid, Point, Range, Sampler, ends, points, ranged

MakeCLI = Callable[[Sequence[str]], Any]
"""Builds trainer, model and data from options of ``perada fit``."""
Row = tuple[str, str, tuple[tuple[str, str], ...]]
"""A row of the table: recipe, algorithm, and the values of what ``--vary`` names."""

START = "before fine-tuning"
"""The row of the initial model: pretrained backbone, untrained adapter."""
CHOSEN_BY = ("personal/local_test", "personal/global_test")
"""The scores whose mean, on validation images, chooses from the grid where nothing else is asked for."""
DIAGNOSED = ("theory/", "updates/")
"""What the names of diagnostics begin with."""


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


def named(point: Point) -> str:
    """Values with the names of their options without sections, to put behind a label."""
    return "".join(f", {re.sub(r'[^+]*[.]', '', name)}={value}" for name, value in point.items())


def words(point: Point) -> list[str]:
    """A point of the grid as options of ``perada fit``."""
    return [f"--{option}={value}" for name, value in point.items() for option in name.split("+")]


@dataclass
class Plan:
    """The runs that a command asks for.

    Attributes:
        make_cli: See :data:`MakeCLI`.
        recipes: Names or files.
        algorithms: Keys of :data:`~perada.compare.entries.ENTRIES`; where empty, each recipe's own.
        seeds: Seeds of the runs; the grid is run with the first.
        grids: The grid of each algorithm, of whose points the best is taken.
        vary: Values of which each makes a row of its own.
        chosen_by: Scores whose mean, on validation images, chooses from the grid.
        paper: Whether each algorithm trains what its paper trains.
        overrides: Options of ``perada fit`` for every run.
        trials: Points that are tried of a grid with a range.
        sampler: How they are drawn.

    Raises:
        ValueError: If a run's options cannot be parsed: nothing has been run by then.
    """

    make_cli: MakeCLI
    recipes: Sequence[str]
    algorithms: Sequence[str]
    seeds: list[int]
    grids: dict[str, Grid]
    vary: Grid
    chosen_by: list[str]
    paper: bool
    overrides: Sequence[str]
    trials: int
    sampler: Sampler

    def __post_init__(self) -> None:
        self.seeds = list(dict.fromkeys(self.seeds))
        varied = [tuple(point.items()) for point in points(self.vary)] or [()]  # the last name's values change fastest
        self.rows: list[Row] = list(dict.fromkeys(product(self.recipes, self.algorithms or [""], varied)))
        # Where nothing is tuned there is no point; those of ranges are found as results come.
        self.points = {name: points(grid) for name, grid in self.grids.items()}
        self.signed = self.chosen_by
        self.given: dict[str, tuple[type[Algorithm], str]] = {}
        for recipe in self.recipes:
            cli = self.make_cli(["--config", recipe])
            self.given[recipe] = type(cli.loop.algorithm), _digest(map(str, cli.config.config))
        asked = {part for grid in (self.vary, *self.grids.values()) for name in grid for part in name.split("+")}
        if twice := sorted(asked & {word[2:].partition("=")[0] for word in self.overrides if word.startswith("--")}):
            raise ValueError(f"--{twice[0]} is given for every run, and tuned or varied: leave one of them out")
        for row in self.rows:
            self._check(row)

    def _check(self, row: Row) -> None:
        """Refuse a row with runs that cannot be made."""
        cli = self.make_cli(self.job(row, self.seeds[0], "run", {}).args)
        grid = self.grids[row[1]]
        shared = [name for name in self.chosen_by if name.startswith("global/")]
        if grid and shared and not cli.loop.algorithm.global_model:
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
        for point in ends(grid) if ranged(grid) else self.points[row[1]]:
            if tried.issuperset(words(point)):
                continue
            tried.update(words(point))
            job = self.job(row, self.seeds[0], "tune", point)
            try:
                self.make_cli(job.args)
            except Exception as error:  # a parser's or a class's
                raise ValueError(f"--tune {' '.join(words(point))} with {job.label}: {error}") from error

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
        grid = self.grids[algorithm]
        tuned = [
            f"--tune={name}={values.text if isinstance(values, Range) else ','.join(values)}"
            for name, values in grid.items()
        ]
        if ranged(grid):
            tuned += [f"--trials={self.trials}", f"--sampler={self.sampler}"]
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
        return self.trials if ranged(self.grids[algorithm]) else len(self.points[algorithm])

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
