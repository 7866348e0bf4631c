# SPDX-License-Identifier: Apache-2.0
"""What is run: every recipe, algorithm, seed, and value of the grid, as options of ``perada fit``."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import Namespace

from perada.algorithms import ALGORITHMS, VARIANTS, Algorithm
from perada.api import full_name
from perada.core.checks import check_installed, check_known
from perada.core.text import near_names
from perada.server import SERVER_RULES
from perada.studies.compare.file import leaves
from perada.studies.compare.grid import (
    HOLD_OUT,
    VALIDATE,
    Grid,
    Point,
    Range,
    check_free,
    corners,
    parse_grid,
    points,
    ranged,
)

MakeCLI = Callable[[Sequence[str]], Any]
"""Builds trainer, model and data from options of ``perada fit``."""


class Row(NamedTuple):
    """A row of the table."""

    recipe: str
    algorithm: str  # "" for the recipe's own
    variant: str  # name of one of ``--variants``; "" where there are none
    varied: tuple[tuple[str, str], ...]  # values of what ``--vary`` names


TRIALS = 10
"""Settings that are tried where ``--tune`` has a range."""
START = "before fine-tuning"
"""The row of the initial model: pretrained backbone, untrained adapter."""
CHOSEN_BY = ("personal/local_test", "personal/global_test")
"""The scores whose mean, on validation images, chooses from the grid where nothing else is asked for."""
DIAGNOSED = ("theory/", "updates/")
"""What the names of diagnostics begin with."""
FULL = ("--model.adapter=full", "--model.adapter_options=null")
"""Train the whole model."""


@dataclass(frozen=True)
class Entry:
    """A row that can be asked for by name: an algorithm with its options of ``perada fit``."""

    base: str  # its name for make_algorithm, which says its class and its arguments
    options: tuple[str, ...] = ()  # further ones that belong to it
    paper: tuple[str, ...] = FULL  # with which it trains what its paper trains
    adapter: str = ""  # the one that it is about; where there is none, the recipe's
    adapter_options: dict[str, bool] = field(default_factory=dict)

    def words(self, cli: Any, paper: bool = False) -> list[str]:  # noqa: ANN401 - a LightningCLI
        """Options of ``perada fit`` for this algorithm, with ``paper`` those that train what the paper trains.

        An algorithm of the class that the recipe names keeps the arguments that the recipe gives it; any other has its
        own defaults, and not another algorithm's arguments of the same name.
        """
        own = spec_of(self.base)
        reset = [] if own["class_path"] == _path(type(cli.loop.algorithm)) else ["--federated.algorithm=null"]
        return [*reset, *words_of("federated.algorithm", own), *self.options, *(self.paper if paper else ())]

    def adapter_words(self, cli: Any) -> list[str]:  # noqa: ANN401 - a LightningCLI
        """Options of ``perada fit`` for the adapter that it is about, if any, with the ``cli``'s options that it knows.

        They belong behind all others: what is given for every run is for every algorithm.
        """
        if not self.adapter:
            return []
        model = cli.config.model
        given = dict(model.adapter_options or {})
        if model.adapter != self.adapter:
            both = _LORA if model.adapter in ("lora", "dual_lora") else {"last_blocks"}
            given = {name: value for name, value in given.items() if name in both}
        options = json.dumps(given | self.adapter_options) if given or self.adapter_options else "null"
        return [f"--model.adapter={self.adapter}", f"--model.adapter_options={options}"]

    def check(self, made: Namespace) -> None:
        """Refuse to call by this name an algorithm that is another one by its ``class_path`` or ``init_args``."""
        own = spec_of(self.base)
        if self.base not in ALGORITHMS:  # the parser gives a class the path of the module that defines it
            module, _, name = self.base.rpartition(".")
            own["class_path"] = _path(getattr(import_module(module), name))
        wrong = [
            f"{name}={made.init_args.get(name)}"
            for name, value in own["init_args"].items()
            if made.init_args.get(name) != value
        ]
        if made.class_path != own["class_path"] or wrong:
            other = wrong[0] if made.class_path == own["class_path"] else made.class_path
            raise ValueError(
                f"--algorithms {self.base}: an option or a --config for all runs makes it {other}, so that its row "
                "would show another algorithm; leave that out, or --algorithms (then a recipe has its own algorithm)"
            )


def _path(kind: Callable[..., Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_BACKBONE = ("--model.train_backbone=true",)
_LORA = {"r", "lora_alpha", "target_modules", "exclude_modules", "last_blocks"}
"""Options of ``lora`` and ``dual_lora``, of the same meaning in both."""
ENTRIES = {name: Entry(name) for name in ALGORITHMS} | {
    # PerAda is about adapters: the recipe's.
    "perada": Entry("perada", paper=()),
    "perada_no_kd": Entry("perada_no_kd", paper=()),
    # Where the adapter is what stays private, the backbone is trained and shared beside it.
    "fedalt_adapter": Entry("fedalt_adapter", _BACKBONE, paper=()),
    "fedsim_adapter": Entry("fedsim_adapter", _BACKBONE, paper=()),
    # About LoRA's factors.
    "ffa_lora": Entry("ffa_lora", paper=(), adapter="lora"),
    "fedsa_lora": Entry("fedsa_lora", paper=(), adapter="lora"),
    "rolora": Entry("rolora", paper=(), adapter="lora"),
    "het_lora": Entry("het_lora", paper=(), adapter="lora"),
    "fedex_lora": Entry("fedex_lora", paper=(), adapter="lora"),
    "flora": Entry("flora", paper=(), adapter="lora"),
    # About its two branches.
    "feddpa": Entry("feddpa", paper=(), adapter="dual_lora"),
    "feddpa_f": Entry("feddpa_f", paper=(), adapter="dual_lora"),
    "fedalt_row": Entry("fedalt_row", paper=(), adapter="dual_lora", adapter_options={"gate": True}),
}
for _name, _variant in VARIANTS.items():
    _words = [
        f"--federated.algorithm.{argument}={_path(ALGORITHMS[own])}" for argument, own in _variant.options.items()
    ]
    if _variant.server_rule is not None:
        _words.append(f"--federated.server_rule={_path(SERVER_RULES[_variant.server_rule])}")
    ENTRIES[_name] = Entry(_variant.base, tuple(_words))
# What they train where that is not the whole model.
ENTRIES["fed_ensemble_perada"] = replace(ENTRIES["fed_ensemble_perada"], paper=())
for _name in ("flexlora", "lora_fair"):
    ENTRIES[_name] = replace(ENTRIES[_name], paper=(), adapter="lora")


def entry_of(name: str) -> Entry:
    """The entry of a named algorithm, or of one's own class by its path, which trains what the recipe says.

    Raises:
        ValueError: If there is neither.
    """
    if name in ENTRIES:
        return ENTRIES[name]
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name):
        return Entry(name, paper=())
    check_known("--algorithms", name, ENTRIES, ", or a class of your own by its path, such as mine.MyAlgorithm")
    raise AssertionError("check_known refuses what is unknown")


def words_of(option: str, made: dict[str, Any]) -> list[str]:
    """Options of ``perada fit`` for a class with its arguments.

    >>> words_of("data.partition", {"class_path": "Shards", "init_args": {"num_clients": 3}})
    ['--data.partition=Shards', '--data.partition.num_clients=3']
    """
    own = [
        f"--{option}.{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in made.get("init_args", {}).items()
    ]
    return [f"--{option}={made['class_path']}", *own]


def spec_of(name: str) -> dict[str, Any]:
    """Class of a named algorithm, and the arguments that tell it from other names of that class, as in a recipe."""
    if name not in ALGORITHMS:
        return {"class_path": name, "init_args": {}}
    kind, own = _bound(ALGORITHMS[name])
    defaults = inspect.signature(kind).parameters
    told = [argument for make in ALGORITHMS.values() if _bound(make)[0] is kind for argument in _bound(make)[1]]
    return {
        "class_path": _path(kind),
        "init_args": {argument: own.get(argument, defaults[argument].default) for argument in told},
    }


def _bound(make: Callable[..., Algorithm]) -> tuple[Callable[..., Algorithm], dict[str, Any]]:
    """Class and arguments of an entry of :data:`perada.algorithms.ALGORITHMS`."""
    given = partial(make)  # of a partial it is the same one
    return given.func, inspect.signature(given.func).bind_partial(*given.args, **given.keywords).arguments


def parse_settings(asked: Sequence[str], algorithms: Sequence[str]) -> dict[str, Point]:
    """Parse the arguments of ``--set`` into the settings of each algorithm.

    Raises:
        ValueError: If an option has several values.

    >>> parse_settings(["ditto:model.lr_local=1"], ["fedavg", "ditto"])
    {'fedavg': {}, 'ditto': {'model.lr_local': '1'}}
    """
    settings: dict[str, Point] = {}
    for algorithm, grid in parse_grids(asked, algorithms, "--set").items():
        settings[algorithm] = {}
        for name, values in grid.items():
            if isinstance(values, Range) or len(values) > 1:
                raise ValueError(
                    f"--set {name} must have one value for each algorithm; give --tune to choose among several"
                )
            settings[algorithm][name] = values[0]
    return settings


def parse_variants(asked: Sequence[str]) -> dict[str, Point]:
    """Parse the arguments of ``--variants`` into the options of each variant, by its name.

    Raises:
        ValueError: If one has no name, or its options cannot be read or cannot be changed.

    >>> parse_variants(["plain={}", "mirrored={data: {flip: true}, lr_local: 0.1}"])
    {'plain': {}, 'mirrored': {'data.flip': 'true', 'model.lr_local': '0.1'}}
    """
    variants: dict[str, Point] = {}
    for text in asked:
        name, _, listed = text.partition("=")
        try:
            changes = yaml.safe_load(listed)
        except yaml.YAMLError:
            changes = None
        if not name or not isinstance(changes, dict):
            raise ValueError(
                f"--variants {text!r} cannot be read: give a name and options, for example "
                "'mirrored={data.flip: true}'"
            )
        if name in variants:
            raise ValueError(f"--variants {name!r} is given twice: give each variant a name of its own")
        variants[name] = {}
        for option, value in leaves(changes):
            check_free(option, f"--variants {name!r}")
            word = value if isinstance(value, str) else json.dumps(value)
            variants[name][full_name(option)] = word
    return variants


def parse_grids(asked: Sequence[str], algorithms: Sequence[str], option: str = "--tune") -> dict[str, Grid]:
    """The grid of each algorithm (the recipes' own: ""), from the arguments of ``--tune``, which may begin with names.

    What is for an algorithm that is not among the ``algorithms`` is left out.

    >>> parse_grids(["model.lr_local=1,2", "ditto:model.momentum=0,0.9"], ["fedavg", "ditto"])["fedavg"]
    {'model.lr_local': ['1', '2']}
    """
    grids: dict[str, list[str]] = {name: [] for name in algorithms}
    for text in asked:
        named, colon, _ = text.partition("=")[0].rpartition(":")
        if colon and "" in grids:
            raise ValueError(f"{option} {text!r} is for named algorithms: give --algorithms too")
        for name in named.split(",") if colon else grids:
            if colon and name not in grids and name not in ENTRIES:
                raise ValueError(
                    f"{option} {text!r} is for {name!r}, which is not an algorithm: `perada compare --help`"
                )
            if name in grids:
                grids[name].append(text.removeprefix(f"{named}:"))
    return {name: parse_grid(own, option) for name, own in grids.items()}


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
    varied: Point  # values of what ``--vary`` names, and the name of its variant

    def __str__(self) -> str:
        values = named(self.point)
        return f"{self.label}, seed {self.seed}{values}" + " (validation)" * (self.stage == "tune")


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
        given: The options of ``perada compare``.
        overrides: Options of ``perada fit`` for every run.

    Options that contradict one another, or that a run cannot be made of, are refused before anything is run.
    """

    def __init__(self, make_cli: MakeCLI, given: Namespace, overrides: Sequence[str]) -> None:
        self.make_cli, self.given, self.overrides = make_cli, given, overrides
        every = list(ENTRIES) if "all" in given.algorithms else []
        algorithms = list(dict.fromkeys([*every, *(name for name in given.algorithms if name != "all")])) or [""]
        for name in given.algorithms:
            entry_of("perada" if name == "all" else name)
        self.seeds = list(dict.fromkeys(given.seeds))
        vary, self.grids = parse_grid(given.vary, "--vary"), parse_grids(given.tune, algorithms)
        self.settings = parse_settings(given.set, algorithms)
        self.variants = parse_variants(given.variants)
        self._check_options(vary)
        self.trials = (given.trials or TRIALS) if any(map(ranged, self.grids.values())) else 0
        self.asked = ["--paper"] * given.paper + [f"--tune={text}" for text in given.tune]
        self.asked += [f"--set={text}" for text in given.set]
        if self.trials:
            self.asked += [f"--trials={self.trials}", f"--sampler={given.sampler}"]
        if given.tune and given.choose_by != list(CHOSEN_BY):
            self.asked.append(f"--choose_by={','.join(given.choose_by)}")
        varied = [tuple(point.items()) for point in points(vary)] or [()]  # the last name's values change fastest
        rows = product(given.recipes, algorithms, self.variants or [""], varied)
        self.rows = list(dict.fromkeys(Row(*row) for row in rows))
        self.signed: list[str] = given.choose_by
        self.recipes: dict[str, tuple[Any, str]] = {}
        self._adapters: dict[tuple[str, str], list[str]] = {}
        for recipe in given.recipes:
            cli = make_cli(["--config", recipe])
            self.recipes[recipe] = cli, _digest(map(str, cli.config.config))
        for row in self.rows:
            self._check(row)

    def _check_options(self, vary: Grid) -> None:
        """Refuse options that contradict one another."""
        ranges = any(map(ranged, self.grids.values()))
        tuned = {one for grid in self.grids.values() for name in grid for one in name.split("+")}
        varied = {one for name in vary for one in name.split("+")}
        for algorithm, settings in self.settings.items():
            chosen = {name for joined in (*self.grids[algorithm], *vary) for name in joined.split("+")}
            for name in (name for joined in settings for name in joined.split("+")):
                if name in chosen:
                    raise ValueError(
                        f"--set gives {name} one value, and --tune or --vary others: leave one of them out"
                    )
        for variant, changes in self.variants.items():
            for name in changes:
                if name in tuned | varied:
                    raise ValueError(f"--variants {variant!r} and --tune or --vary both give {name}: leave one out")
        if both := sorted(tuned & varied):
            raise ValueError(f"--tune and --vary both name {both[0]}: tune it or vary it")
        if twice := sorted((tuned | varied) & {word[2:].partition("=")[0] for word in self.overrides}):
            raise ValueError(f"--{twice[0]} is given for every run, and tuned or varied: leave one of them out")
        if self.given.paper and "" in self.grids:
            raise ValueError("--paper says what named algorithms train: give --algorithms too, for example all")
        if ranged(vary):
            name = next(name for name, values in vary.items() if isinstance(values, Range))
            raise ValueError(f"--vary {name}: a range cannot be varied, give values")
        if self.given.trials is not None and not ranges:
            raise ValueError(f"--trials {self.given.trials} is for ranges: give --tune NAME=lo..hi, or leave it out")
        if ranges:
            check_installed("--tune with a range", "tune", "optuna")

    def _check(self, row: Row) -> None:
        """Refuse a row with runs that cannot be made."""
        cli = self.make_cli(self.job(row, self.seeds[0], "run", {}).args)
        shared = [name for name in self.given.choose_by if name.startswith("global/")]
        if self.grids[row.algorithm] and shared and not cli.loop.algorithm.global_model:
            name = row.algorithm or type(cli.loop.algorithm).__name__
            raise ValueError(f"--choose_by {shared[0]}: {name} has no global model; leave it or the score out")
        self._sign(cli.model.score_names)
        if row.algorithm:
            entry_of(row.algorithm).check(cli.config.federated.algorithm)
        if cli.loop.test_mode:
            raise ValueError(
                "privacy: secure_rng=false cannot be used with perada compare, which writes each run's seed beside "
                "its results: the noise would follow from it; leave secure_rng out"
            )
        if self.grids[row.algorithm] and (cli.loop.privacy or cli.loop.client_privacy):
            raise ValueError(
                "--tune cannot be used with privacy or client_privacy: it chooses by private images, which no ledger "
                "counts; choose on public data, and give the values"
            )
        for point in corners(self.grids[row.algorithm]):
            job = self.job(row, self.seeds[0], "tune", point)
            try:
                self.make_cli(job.args)
            except Exception as error:  # a parser's or a class's
                raise ValueError(f"--tune {' '.join(words(point))} with {job.label}: {error}") from error

    def _sign(self, scores: dict[str, bool]) -> None:
        """Put a minus before the scores to choose by of which the lower one is the better."""
        chosen_by = self.given.choose_by
        if unknown := [name for name in chosen_by if name not in scores]:
            near = near_names(unknown[0], scores, limit=3)
            of_set = [name for name in scores if "_test_" not in name]
            remedy = f"did you mean {', '.join(near)}?" if near else f"choose one of {', '.join(of_set)}"
            raise ValueError(f"--choose_by {unknown[0]}: no such score with this --model.metric; {remedy}")
        signed = ["-" * scores[name] + name for name in chosen_by]
        if self.signed not in (chosen_by, signed):
            raise ValueError("--choose_by: of a score the lower is better in some recipes only; give all one metric")
        self.signed = signed

    def job(self, row: Row, seed: int, stage: str, point: Point) -> Job:
        """A run of a row."""
        recipe, algorithm = row.recipe, row.algorithm
        own, digest = self.recipes[recipe]
        label = f"{self._prefix(recipe)}{algorithm}" if algorithm else recipe.removesuffix(".yaml")
        varied = dict(row.varied)
        point_of_row = [*words(self.variants.get(row.variant, {})), *words(varied)]
        tunes = stage == "tune"
        args = [
            *("--config", recipe, "--trainer.logger=false"),  # no folder for every one of so many runs
            *(entry_of(algorithm).words(own, self.given.paper) if algorithm else ()),
            f"--seed_everything={seed}",
            *([HOLD_OUT] if tunes else []),
            *self.overrides,
            *self._adapter(recipe, algorithm),
            *words(self.settings[algorithm]),
            *point_of_row,
            *words(point),
            *([VALIDATE] if tunes else []),
        ]
        if row.variant:
            label += f", {row.variant}"
            varied = {"variant": row.variant} | varied
        label += named(dict(row.varied))
        given = [*self.asked, *self.overrides, *point_of_row]
        return Job(label, recipe, seed, stage, point, args, given, digest, self.signed, varied)

    def _adapter(self, recipe: str, algorithm: str) -> list[str]:
        """Options for the adapter that an algorithm is about, with those that the recipe or all runs give one."""
        entry = entry_of(algorithm) if algorithm else None
        if entry is None or not entry.adapter:
            return []
        if (recipe, algorithm) not in self._adapters:
            own = entry.words(self.recipes[recipe][0], self.given.paper)
            cli = self.make_cli(["--config", recipe, "--trainer.logger=false", *own, *self.overrides])
            self._adapters[recipe, algorithm] = entry.adapter_words(cli)
        return self._adapters[recipe, algorithm]

    def count(self, algorithm: str) -> int:
        """How many settings of an algorithm are tried."""
        grid = self.grids[algorithm]
        return self.trials if ranged(grid) else len(points(grid))

    def start_label(self, recipe: str) -> str:
        """The row of a recipe's initial model."""
        return self._prefix(recipe) + START

    def _prefix(self, recipe: str) -> str:
        """What tells a row from the same one of another recipe."""
        return f"{recipe.removesuffix('.yaml')} " if len(self.given.recipes) > 1 else ""


def _digest(paths: Iterable[str]) -> str:
    """Of the lines of a recipe's files, without comments."""
    text = (line for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines())
    lines = [line.rstrip() for line in text if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
