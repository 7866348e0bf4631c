# SPDX-License-Identifier: Apache-2.0
"""What is run: every recipe, algorithm, seed, and value of the grid, as options of ``perada fit``."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from perada.algorithms import Algorithm
from perada.experiments.compare.entries import ENTRIES

MakeCLI = Callable[[Sequence[str]], Any]
"""Builds trainer, model and data from options of ``perada fit``."""
Point = dict[str, str]
"""A point of the grid: values by the names that ``--tune`` gave."""

START = "before fine-tuning"
"""The row of the initial model: pretrained backbone, untrained adapter."""
CHOSEN_BY = ("personal/local_test", "personal/global_test")
"""The scores whose mean, on validation images, chooses from the grid."""
HOLD_OUT = "--data.client_validation=0.2"
VALIDATE = "--data.evaluate_on=validation"


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        label: Its row in the table.
        recipe: Name or file.
        seed: Of the run.
        stage: ``tune`` for a run of the grid, ``run`` for one of the table.
        point: Value of the grid.
        args: Options of ``perada fit``.
        variant: What the user asked for beside recipe and algorithm, to tell rows of one file apart.
        digest: Of the recipe's content.
    """

    label: str
    recipe: str
    seed: int
    stage: str
    point: Point
    args: tuple[str, ...]
    variant: tuple[str, ...]
    digest: str

    def record(self) -> dict[str, Any]:
        """As it is written beside its results."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def made(self, record: dict[str, Any]) -> bool:
        """Whether a record is of this run."""
        return record.get("stage") == self.stage and record.get("args") == list(self.args)

    def __str__(self) -> str:
        values = "".join(f", {short(name)}={value}" for name, value in self.point.items())
        return f"{self.label}, seed {self.seed}{values}" + " (validation)" * (self.stage == "tune")


@dataclass(frozen=True)
class Request:
    """What `perada compare` was asked for.

    Attributes:
        recipes: Names or files.
        algorithms: Keys of :data:`~perada.experiments.compare.entries.ENTRIES`; where empty, each recipe's own.
        seeds: Seeds of the runs; the grid is run with the first.
        grid: Values by name; several options joined with ``+`` get the same value.
        paper: Whether each algorithm trains what its paper trains.
        overrides: Options of ``perada fit`` for every run.
    """

    recipes: Sequence[str]
    algorithms: Sequence[str] = ()
    seeds: Sequence[int] = (0,)
    grid: dict[str, list[str]] = field(default_factory=dict)
    paper: bool = False
    overrides: Sequence[str] = ()

    def points(self) -> list[Point]:
        """The grid, the last name's values changing fastest; none where nothing is tuned."""
        rows = product(*self.grid.values()) if self.grid else ()
        return [dict(zip(self.grid, row, strict=True)) for row in rows]

    @property
    def variant(self) -> tuple[str, ...]:
        """What is the same for all of the command's runs."""
        tuned = (f"--tune={name}={','.join(values)}" for name, values in self.grid.items())
        return (*(["--paper"] if self.paper else []), *self.overrides, *tuned)


def parse_grid(asked: Sequence[str]) -> dict[str, list[str]]:
    """Read the arguments of ``--tune``.

    Raises:
        ValueError: If one is not NAME=V1,V2,... with different values, or names an option twice.

    >>> parse_grid(["model.lr_local+model.lr_personal=0.01,0.1"])
    {'model.lr_local+model.lr_personal': ['0.01', '0.1']}
    """
    grid: dict[str, list[str]] = {}
    seen: set[str] = set()
    for text in asked:
        name, equals, listed = text.partition("=")
        name, values = name.removeprefix("--"), [value.strip() for value in listed.split(",")]
        options = name.split("+")
        if not equals or not all(options) or not all(values):
            raise ValueError(
                f"--tune {text!r} cannot be read: give NAME=V1,V2,..., for example model.lr_local=0.01,0.1"
            )
        if len(set(values)) < len(values):
            raise ValueError(f"--tune {text!r} has a value twice: give each once")
        twice = [option for index, option in enumerate(options) if option in seen or option in options[:index]]
        if twice:
            raise ValueError(f"--tune {text!r}: {twice[0]} is tuned twice, give it once")
        if HOLD_OUT.startswith(f"--{name}=") or VALIDATE.startswith(f"--{name}="):
            raise ValueError(f"--tune {text!r}: this says what is scored, so it cannot be tuned")
        seen.update(options)
        grid[name] = values
    return grid


def words(point: Point) -> list[str]:
    """A point of the grid as options of ``perada fit``."""
    return [f"--{option}={value}" for name, value in point.items() for option in name.split("+")]


def short(name: str) -> str:
    """The last parts of options joined with ``+``.

    >>> short("model.lr_personal+model.lr_local")
    'lr_personal+lr_local'
    """
    return "+".join(option.rpartition(".")[2] for option in name.split("+"))


class Plan:
    """The runs that a request asks for.

    Args:
        make_cli: See :data:`MakeCLI`.
        request: What was asked for.

    Raises:
        ValueError: If a run's options cannot be parsed: nothing has been run by then.
    """

    def __init__(self, make_cli: MakeCLI, request: Request) -> None:
        self.request = request
        self.given: dict[str, tuple[type[Algorithm], str]] = {}
        for recipe in request.recipes:
            cli = make_cli(["--config", recipe])
            self.given[recipe] = type(cli.loop.algorithm), _digest(map(str, cli.config.config))
        rows = [(recipe, algorithm) for recipe in request.recipes for algorithm in request.algorithms or [""]]
        self.rows = list(dict.fromkeys(rows))
        for row in self.rows:
            if make_cli(self.job(row, request.seeds[0], "run", {}).args).loop.test_mode:
                raise ValueError(
                    "privacy: secure_rng=false cannot be used with perada compare, which writes each run's seed beside "
                    "its results: the noise would follow from it; leave secure_rng out"
                )
            tried: set[str] = set()
            for point in request.points():
                if tried.issuperset(words(point)):
                    continue
                tried.update(words(point))
                job = self.job(row, request.seeds[0], "tune", point)
                try:
                    make_cli(job.args)
                except Exception as error:  # a parser's or a class's
                    raise ValueError(f"--tune {' '.join(words(point))} with {job.label}: {error}") from error

    def job(self, row: tuple[str, str], seed: int, stage: str, point: Point) -> Job:
        """A run of a row: recipe and algorithm."""
        recipe, algorithm = row
        given, digest = self.given[recipe]
        name = recipe.removesuffix(".yaml")
        label = f"{name} {algorithm}" if algorithm and len(self.request.recipes) > 1 else algorithm or name
        own = ENTRIES[algorithm].words(given, self.request.paper) if algorithm else []
        tunes = stage == "tune"
        args = [
            *("--config", recipe, "--trainer.logger=false"),  # no folder for every one of so many runs
            *own,
            f"--seed_everything={seed}",
            *([HOLD_OUT] if tunes else []),
            *self.request.overrides,
            *words(point),
            *([VALIDATE] if tunes else []),
        ]
        return Job(label, recipe, seed, stage, point, tuple(args), self.request.variant, digest)

    def tuning(self) -> list[Job]:
        """The runs of the grid."""
        seed = self.request.seeds[0]
        return [self.job(row, seed, "tune", point) for row in self.rows for point in self.request.points()]

    def final(self, chosen: dict[tuple[str, str], Point]) -> list[Job]:
        """The runs of the table, for the rows that have a point."""
        rows = [row for row in self.rows if row in chosen]
        return [self.job(row, seed, "run", chosen[row]) for seed in dict.fromkeys(self.request.seeds) for row in rows]

    def start_label(self, recipe: str) -> str:
        """The row of a recipe's initial model."""
        return f"{recipe.removesuffix('.yaml')} {START}" if len(self.request.recipes) > 1 else START


def _digest(paths: Iterable[str]) -> str:
    """Of the lines of a recipe's files, without comments."""
    text = (line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines())
    lines = [line.rstrip() for line in text if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
