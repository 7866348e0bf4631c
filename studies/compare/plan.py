# SPDX-License-Identifier: Apache-2.0
"""The runs of a comparison: every recipe, algorithm, seed and point of the grid, as options of ``perada fit``."""

import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import Namespace

from perada.core.checks import check_installed
from perada.core.text import near_names
from perada.data import ByDomain
from perada.data.partitions.division import Division
from perada.data.sets.manifest import OwnImages
from perada.models.weight_files import check_weights
from perada.scores.metrics import score_names
from perada.studies.compare.configured import ConfiguredRun, MakeCLI
from perada.studies.compare.entries import ALGORITHM, ENTRIES, entry_of
from perada.studies.compare.file import leaves
from perada.studies.compare.grid import (
    HOLD_OUT,
    VALIDATE,
    Grid,
    Point,
    Range,
    check_free,
    corners,
    has_range,
    options_of_name,
    parse_grid,
    points,
)

TRIALS = 10
"""Settings that are tried if ``--tune`` has a range."""
START = "before fine-tuning"
"""Label of the row of the initial model: pretrained backbone, untrained adapter."""
ZERO_SHOT = "zero-shot"
"""Label of this row if the head is made from the names of the classes."""
SELECTION_SCORES = ("personal/local_test", "personal/global_test")
"""Scores whose mean, on validation images, chooses from the grid by default."""
SELECTION_SCORES_OF_BOTH = ("both/local_test", "both/global_test")
"""The same of clients that predict with both of their models."""
DIAGNOSTIC_PREFIXES = ("theory/", "updates/")
"""Beginnings of the names of diagnostics."""
NO_LOGGER = "--trainer.logger=false"
"""A comparison has too many runs for a folder each."""


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        recipe: Name or file of the recipe.
        algorithm: Name of the algorithm; empty for the recipe's own.
        variant: Name of one of ``--variants``; empty without any.
        varied: Values of the options of ``--vary``.
    """

    recipe: str
    algorithm: str
    variant: str
    varied: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ConfiguredRecipe:
    """A recipe's CLI, and a digest of its content."""

    cli: ConfiguredRun
    digest: str


@dataclass(frozen=True)
class Job:
    """One run. The fields are written beside its results.

    Attributes:
        label: Its row in the table.
        recipe: Name or file of the recipe.
        seed: Seed of the run.
        stage: ``tune`` for a run of the grid, ``run`` for one of the table.
        point: Values of the options that are tuned.
        args: Options of ``perada fit``.
        variant: Options that the user set beside recipe and algorithm, to tell rows of one file apart.
        digest: Digest of the recipe's content.
        chosen_by: Scores whose mean, on validation images, chooses; with a minus if lower values are better.
        varied: Values of the options of ``--vary``, and the name of the variant.
    """

    label: str
    recipe: str
    seed: int
    stage: str
    point: Point
    args: list[str]
    variant: list[str]
    digest: str
    chosen_by: list[str]
    varied: Point

    def __str__(self) -> str:
        text = f"{self.label}, seed {self.seed}{named(self.point)}"
        return f"{text} (validation)" if self.stage == "tune" else text


def named(point: Point) -> str:
    """Return the values of a point with the names of their options without sections, to put behind a label.

    >>> named({"training.lr_local+training.lr_personal": "0.1"})
    ', lr_local+lr_personal=0.1'
    """
    text = ""
    for name, value in point.items():
        short_name = re.sub(r"[^+]*[.]", "", name)
        text += f", {short_name}={value}"
    return text


def words(point: Point) -> list[str]:
    """Return a point as options of ``perada fit``."""
    options = []
    for name, value in point.items():
        options += [f"--{option}={value}" for option in options_of_name(name)]
    return options


def parse_settings(option_words: Sequence[str], algorithms: Sequence[str]) -> dict[str, Point]:
    """Parse the arguments of ``--set`` into the settings of each algorithm.

    Raises:
        ValueError: If an option has several values.

    >>> parse_settings(["ditto:training.lr_local=1"], ["fedavg", "ditto"])
    {'fedavg': {}, 'ditto': {'training.lr_local': '1'}}
    """
    points: dict[str, Point] = {}
    for algorithm, grid in parse_grids(option_words, algorithms, "--set").items():
        points[algorithm] = {}
        for name, values in grid.items():
            if isinstance(values, Range) or len(values) > 1:
                raise ValueError(f"--set {name} must have one value per algorithm; use --tune to choose among several")
            points[algorithm][name] = values[0]
    return points


def parse_variants(option_words: Sequence[str]) -> dict[str, Point]:
    """Parse the arguments of ``--variants`` into the options of each variant, by its name.

    Raises:
        ValueError: If one has no name, or its options cannot be read or cannot be changed.

    >>> parse_variants(["plain={}", "mirrored={data: {flip: true}, training.lr_local: 0.1}"])
    {'plain': {}, 'mirrored': {'data.flip': 'true', 'training.lr_local': '0.1'}}
    """
    variants: dict[str, Point] = {}
    for argument in option_words:
        name, _, changes_text = argument.partition("=")
        try:
            changes = yaml.safe_load(changes_text)
        except yaml.YAMLError:
            changes = None
        if not name or not isinstance(changes, dict):
            raise ValueError(
                f"--variants {argument!r} cannot be parsed; write a name and options, for example "
                "'mirrored={data.flip: true}'"
            )
        if name in variants:
            raise ValueError(f"--variants {name!r} is used twice; give each variant a unique name")
        variants[name] = {}
        for option, value in leaves(changes):
            check_free(option, f"--variants {name!r}")
            value_text = value if isinstance(value, str) else json.dumps(value)
            variants[name][option] = value_text
    return variants


def parse_grids(option_words: Sequence[str], algorithms: Sequence[str], option: str = "--tune") -> dict[str, Grid]:
    """Parse the arguments of ``--tune``, which may begin with names of algorithms, into the grid of each algorithm.

    Args:
        option_words: The arguments. Those for other algorithms are left out.
        algorithms: Names of the algorithms; only an empty one for the recipes' own.
        option: The option, for messages.

    Raises:
        ValueError: If an argument cannot be read, or is for a name that is not an algorithm.

    >>> parse_grids(["training.lr_local=1,2", "ditto:training.momentum=0,0.9"], ["fedavg", "ditto"])["fedavg"]
    {'training.lr_local': ['1', '2']}
    """
    arguments_of: dict[str, list[str]] = {name: [] for name in algorithms}
    for argument in option_words:
        prefix, colon, _ = argument.partition("=")[0].rpartition(":")
        if not colon:
            for algorithm_arguments in arguments_of.values():
                algorithm_arguments.append(argument)
            continue
        if "" in arguments_of:
            raise ValueError(f"{option} {argument!r} is for named algorithms; add --algorithms")
        for name in prefix.split(","):
            if name in arguments_of:
                arguments_of[name].append(argument.removeprefix(f"{prefix}:"))
            elif name not in ENTRIES:
                raise ValueError(
                    f"{option} {argument!r} is for {name!r}, which is not an algorithm; see `perada compare --help`"
                )
    return {name: parse_grid(arguments_of[name], option) for name in arguments_of}


class Plan:
    """The runs that a command requests.

    Options that contradict each other, or with which a run cannot be built, are rejected before anything is run.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        arguments: Options of ``perada compare``.
        overrides: Options of ``perada fit`` for every run.

    Raises:
        ValueError: If options contradict each other, or a run cannot be built.
    """

    def __init__(self, make_cli: MakeCLI, arguments: Namespace, overrides: Sequence[str]) -> None:
        self.make_cli = make_cli
        self.options = arguments
        self.overrides = overrides
        algorithms = _algorithms_of(arguments)
        self.seeds = list(dict.fromkeys(arguments.seeds))
        self.tune_seeds = list(dict.fromkeys(arguments.tune_seeds)) or self.seeds[:1]
        vary = parse_grid(arguments.vary, "--vary")
        self.grids = parse_grids(arguments.tune, algorithms)
        self.settings = parse_settings(arguments.set, algorithms)
        self.variants = parse_variants(arguments.variants)
        self._check_options(vary)

        has_ranges = any(has_range(grid) for grid in self.grids.values())
        self.trials = (arguments.trials or TRIALS) if has_ranges else 0
        self._option_words = self._words_of_options()
        varied_points = [tuple(point.items()) for point in points(vary)] or [()]
        # The values of the last option of --vary change fastest.
        rows = product(arguments.recipes, algorithms, self.variants or [""], varied_points)
        self.rows = list(dict.fromkeys(Row(*row) for row in rows))
        # The scores to choose by, with a minus if lower values are better: known once a row has been built.
        self._chosen_by: dict[Row, list[str]] = {}
        self._adapter_words_of: dict[tuple[str, str], list[str]] = {}
        self.recipes: dict[str, ConfiguredRecipe] = {}
        for recipe in arguments.recipes:
            cli = make_cli(["--config", recipe])
            self.recipes[recipe] = ConfiguredRecipe(cli, digest_of_recipe(cli))
            if arguments.redivide:
                _warn_of_fixed_images(recipe, cli.datamodule.division)
        # What algorithms have in place of an argument that a recipe sets for its own one, by recipe and argument.
        self._defaults_in_place: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            self._check_row(row)
        self._warn_of_defaults()

    def _words_of_options(self) -> list[str]:
        """Return the options other than recipes and algorithms, which distinguish rows of one file."""
        options = self.options
        option_words = []
        if options.paper:
            option_words.append("--paper")
        if options.redivide:
            option_words.append("--redivide")
        option_words += [f"--tune={argument}" for argument in options.tune]
        option_words += [f"--set={argument}" for argument in options.set]
        if self.trials:
            option_words += [f"--trials={self.trials}", f"--sampler={options.sampler}"]
        if options.tune_seeds:
            option_words.append(f"--tune_seeds={','.join(map(str, self.tune_seeds))}")
        if options.tune and options.choose_by != list(SELECTION_SCORES):
            option_words.append(f"--choose_by={','.join(options.choose_by)}")
        return option_words

    def _check_options(self, vary: Grid) -> None:
        """Raise if options contradict each other."""
        tuned_options: set[str] = set()
        for grid in self.grids.values():
            tuned_options |= _option_names(grid)
        varied_options = _option_names(vary)
        self._check_values_given_once(tuned_options, varied_options)
        if self.options.paper and "" in self.grids:
            raise ValueError("--paper determines what named algorithms train; add --algorithms, for example all")
        for name, values in vary.items():
            if isinstance(values, Range):
                raise ValueError(f"--vary {name}: a range cannot be varied; list values")
        has_ranges = any(has_range(grid) for grid in self.grids.values())
        if self.options.trials is not None and not has_ranges:
            raise ValueError(
                f"--trials {self.options.trials} requires a range; add --tune NAME=lo..hi, or leave --trials out"
            )
        if self.options.sampler != "tpe" and not has_ranges:
            raise ValueError(
                f"--sampler {self.options.sampler} requires a range; add --tune NAME=lo..hi, or leave --sampler out"
            )
        if self.options.tune_seeds and not self.options.tune:
            seeds = " ".join(map(str, self.tune_seeds))
            raise ValueError(f"--tune_seeds {seeds} requires settings to try; add --tune, or leave --tune_seeds out")
        if self.options.choose_by != list(SELECTION_SCORES) and not self.options.tune:
            scores = " ".join(self.options.choose_by)
            raise ValueError(
                f"--choose_by {scores} requires settings to choose from; add --tune, or leave --choose_by out"
            )
        if has_ranges:
            check_installed("--tune with a range", "tune", "optuna")

    def _check_values_given_once(self, tuned_options: set[str], varied_options: set[str]) -> None:
        """Raise if two options set the same option of ``perada fit``."""
        for algorithm, settings in self.settings.items():
            other_options = _option_names(self.grids[algorithm]) | varied_options
            for joined_name in settings:
                for name in options_of_name(joined_name):
                    if name in other_options:
                        raise ValueError(
                            f"--set sets {name} to one value, but --tune or --vary to others; leave one of them out"
                        )
        for variant, changes in self.variants.items():
            for name in changes:
                if name in tuned_options | varied_options:
                    raise ValueError(f"--variants {variant!r} and --tune or --vary both set {name}; leave one out")
        tuned_and_varied = sorted(tuned_options & varied_options)
        if tuned_and_varied:
            raise ValueError(f"--tune and --vary both set {tuned_and_varied[0]}; tune it or vary it")
        overridden = {word[2:].partition("=")[0] for word in self.overrides}
        if self.options.redivide:
            self._check_division_seed_is_free(tuned_options | varied_options | overridden)
        given_for_all = sorted((tuned_options | varied_options) & overridden)
        if given_for_all:
            raise ValueError(
                f"--{given_for_all[0]} is set for every run but also tuned or varied; leave one of them out"
            )

    def _check_division_seed_is_free(self, names: set[str]) -> None:
        """Raise if an option sets the seed of the division, which --redivide sets for each run."""
        for settings in (*self.settings.values(), *self.variants.values()):
            for joined_name in settings:
                names = names | set(options_of_name(joined_name))
        if "data.seed" in names:
            raise ValueError("--redivide takes data.seed from each run's seed, but data.seed is set too; leave one out")

    def _check_row(self, row: Row) -> None:
        """Raise if a run of a row cannot be built, or cannot be chosen for."""
        cli = self._make_checked_cli(self.job(row, self.seeds[0], "run", {}))
        grid = self.grids[row.algorithm]
        global_scores = [name for name in self.options.choose_by if name.startswith("global/")]
        if grid and global_scores and not cli.loop.algorithm.global_model:
            name = row.algorithm or type(cli.loop.algorithm).__name__
            raise ValueError(f"--choose_by {global_scores[0]}: {name} has no global model; leave it or the score out")
        self._chosen_by[row] = self._scores_to_choose_by(cli)
        if row.algorithm:
            entry_of(row.algorithm).check(cli.config.federated.algorithm)
            self._note_defaults(row, cli)
        if cli.loop.test_mode:
            raise ValueError(
                "privacy: secure_rng=false is rejected by perada compare, which writes each run's seed next to "
                "its results: the noise would follow from it; leave secure_rng out"
            )
        if grid and (cli.loop.privacy or cli.loop.client_privacy):
            raise ValueError(
                "--tune is rejected with privacy or client_privacy: it selects by private images, which no ledger "
                "counts; tune on public data, and set the values"
            )
        for point in corners(grid):
            job = self.job(row, self.seeds[0], "tune", point)
            try:
                self._make_checked_cli(job)
            except Exception as error:  # a parser's, or any class's
                raise ValueError(f"--tune {' '.join(words(point))} with {job.label}: {error}") from error

    def _note_defaults(self, row: Row, cli: ConfiguredRun) -> None:
        """Note arguments that the recipe sets for its own algorithm, and whose default a related one has in a row.

        Args:
            row: The row.
            cli: A run of it.
        """
        recipe = self.recipes[row.recipe].cli
        algorithm_class = type(recipe.loop.algorithm)
        row_class = type(cli.loop.algorithm)
        # Elsewhere an argument of the same name may mean something else, such as λ of FedProx and of pFedMe.
        if not (issubclass(row_class, algorithm_class) or issubclass(algorithm_class, row_class)):
            return
        recipe_arguments = arguments_of_algorithm(recipe)
        row_arguments = arguments_of_algorithm(cli)
        entry = entry_of(row.algorithm)
        set_options = _option_names(self.grids[row.algorithm])
        for joined_name in (*self.settings[row.algorithm], *self.variants.get(row.variant, {}), *dict(row.varied)):
            set_options |= set(options_of_name(joined_name))
        for name, parameter in inspect.signature(algorithm_class).parameters.items():
            if name not in row_arguments or name in entry.init_args or f"{ALGORITHM}.{name}" in set_options:
                continue
            recipe_value = recipe_arguments.get(name, parameter.default)
            if recipe_value not in (parameter.default, row_arguments[name]):
                rows = self._defaults_in_place.setdefault((row.recipe, name), [])
                text = f"{row.algorithm} {row_arguments[name]}"
                if text not in rows:
                    rows.append(text)

    def _warn_of_defaults(self) -> None:
        """Warn of arguments that the rows of a recipe do not have in common, although they could."""
        for (recipe, name), rows in self._defaults_in_place.items():
            recipe_cli = self.recipes[recipe].cli
            value = arguments_of_algorithm(recipe_cli)[name]
            algorithm = rows[0].partition(" ")[0]
            algorithm_of_recipe = type(recipe_cli.loop.algorithm).__name__
            warnings.warn(
                f"{recipe!r} sets {name}={value} for {algorithm_of_recipe} only; other algorithms have "
                f"their default: {', '.join(rows)}. For the same value, add "
                f"--set {algorithm}:{ALGORITHM}.{name}={value}",
                stacklevel=2,
            )

    def _make_checked_cli(self, job: Job) -> ConfiguredRun:
        """Build a run without its model, and raise a FileNotFoundError if the model's weights are missing."""
        cli = self.make_cli(job.args)
        check_weights(cli.model.backbone, cli.model.pretrained)
        return cli

    def _scores_to_choose_by(self, cli: ConfiguredRun) -> list[str]:
        """Return the scores that settings of a row are chosen by, with a minus if lower values are better.

        Args:
            cli: A run of the row.

        Raises:
            ValueError: If its runs lack a score, or the signs differ from those of an earlier row.
        """
        lower_is_better = score_names(cli.loop.evaluation.metric, cli.datamodule.chosen_task)
        for name in self.options.choose_by:
            if name not in lower_is_better:
                raise ValueError(_unknown_score_message(name, lower_is_better))
        chosen_by = self.options.choose_by
        if chosen_by == list(SELECTION_SCORES) and _predicts_with_both_models(cli):
            chosen_by = list(SELECTION_SCORES_OF_BOTH)
        signed = [f"-{name}" if lower_is_better[name] else name for name in chosen_by]
        for other_signed in self._chosen_by.values():
            has_minus = [name.startswith("-") for name in signed]
            other_has_minus = [name.startswith("-") for name in other_signed]
            if has_minus != other_has_minus:
                raise ValueError(
                    "--choose_by: lower scores are better in some recipes only; use one metric for all recipes"
                )
        return signed

    def job(self, row: Row, seed: int, stage: str, point: Point) -> Job:
        """Return a run of a row.

        Args:
            row: The row.
            seed: Seed of the run.
            stage: ``tune`` for a run on validation images, ``run`` for one of the table.
            point: Values of the options that are tuned.
        """
        recipe = self.recipes[row.recipe]
        varied = dict(row.varied)
        row_words = [*words(self.variants.get(row.variant, {})), *words(varied)]

        # If an option is given twice, the later value counts.
        args = ["--config", row.recipe, NO_LOGGER]
        if row.algorithm:
            args += entry_of(row.algorithm).words(recipe.cli, self.options.paper)
        args.append(f"--seed_everything={seed}")
        if self.options.redivide:
            args.append(f"--data.seed={seed}")
        if stage == "tune":
            args.append(HOLD_OUT)
        args += self.overrides
        args += self._adapter_words(row.recipe, row.algorithm)
        args += words(self.settings[row.algorithm])
        args += row_words
        args += words(point)
        if stage == "tune":
            args.append(VALIDATE)

        if row.algorithm:
            label = f"{self._label_prefix(row.recipe)}{row.algorithm}"
        else:
            label = row.recipe.removesuffix(".yaml")
        if row.variant:
            label += f", {row.variant}"
        label += named(varied)
        return Job(
            label=label,
            recipe=row.recipe,
            seed=seed,
            stage=stage,
            point=point,
            args=args,
            variant=[*self._option_words, *self.overrides, *row_words],
            digest=recipe.digest,
            chosen_by=self._chosen_by.get(row, self.options.choose_by),
            varied={"variant": row.variant} | varied if row.variant else varied,
        )

    def _adapter_words(self, recipe: str, algorithm: str) -> list[str]:
        """Return the options for the adapter that an algorithm is about, with those that the recipe or all runs have.

        Building a CLI takes long, so the words are stored.
        """
        if not algorithm:
            return []
        entry = entry_of(algorithm)
        if not entry.adapter:
            return []
        if (recipe, algorithm) not in self._adapter_words_of:
            algorithm_words = entry.words(self.recipes[recipe].cli, self.options.paper)
            cli = self.make_cli(["--config", recipe, NO_LOGGER, *algorithm_words, *self.overrides])
            self._adapter_words_of[recipe, algorithm] = entry.adapter_words(cli)
        return self._adapter_words_of[recipe, algorithm]

    def count(self, algorithm: str) -> int:
        """Return the number of settings of an algorithm that are tried."""
        grid = self.grids[algorithm]
        return self.trials if has_range(grid) else len(points(grid))

    def start_label(self, recipe: str) -> str:
        """Return the label of the row of a recipe's initial model."""
        has_text_head = self.recipes[recipe].cli.model.text_head is not None
        return self._label_prefix(recipe) + (ZERO_SHOT if has_text_head else START)

    def _label_prefix(self, recipe: str) -> str:
        """Return what tells a row from the same one of another recipe."""
        if len(self.options.recipes) == 1:
            return ""
        return f"{recipe.removesuffix('.yaml')} "


def arguments_of_algorithm(cli: ConfiguredRun) -> dict[str, Any]:
    """Return the arguments of a run's algorithm, defaults included; none if it takes none, or is the default one."""
    algorithm = cli.config.federated.algorithm
    if algorithm is None or algorithm.get("init_args") is None:
        return {}
    return dict(vars(algorithm.init_args))


def _warn_of_fixed_images(recipe: str, division: Division | None) -> None:
    """Warn of what --redivide does not draw anew in a recipe with images that have their own split or clients."""
    if division is None or not isinstance(division.dataset, OwnImages):
        return
    kept = (
        f"the test images of {type(division.dataset).__name__}, which its own seed or the split of the source chooses"
    )
    partition = division.partition
    if isinstance(partition, ByDomain) and partition.clients_per_domain == 1 and partition.within is None:
        kept += f", and the images of each {partition.column}"
    warnings.warn(
        f"--redivide leaves in {recipe!r} as they are: {kept}; ± does not cover other test images. If the source has "
        "no split, --vary data.dataset.init_args.seed=0,1,2 draws others",
        stacklevel=2,
    )


def _algorithms_of(arguments: Namespace) -> list[str]:
    """Return the names of the algorithms to compare; only an empty one for the recipes' own.

    Raises:
        ValueError: If a name is not an algorithm.
    """
    names: list[str] = []
    if "all" in arguments.algorithms:
        names += ENTRIES
    for name in arguments.algorithms:
        if name != "all":
            entry_of(name)  # raises if it is unknown
            names.append(name)
    return list(dict.fromkeys(names)) or [""]


def _option_names(grid: Grid) -> set[str]:
    """Return the options that a grid has values for."""
    names: set[str] = set()
    for name in grid:
        names.update(options_of_name(name))
    return names


def _predicts_with_both_models(cli: ConfiguredRun) -> bool:
    """Return whether clients predict with a personal and the global model together."""
    algorithm = cli.loop.algorithm
    has_personal_models = algorithm.inference == "personal" or algorithm.personalization() is not None
    return cli.loop.evaluation.prediction == "both" and has_personal_models and algorithm.global_model


def _unknown_score_message(name: str, score_names: Iterable[str]) -> str:
    similar = near_names(name, score_names, limit=3)
    if similar:
        remedy = f"did you mean {', '.join(similar)}?"
    else:
        remedy = f"choose one of {', '.join(score for score in score_names if '_test_' not in score)}"
    return f"--choose_by {name}: there is no such score with this --evaluation.metric; {remedy}"


def digest_of_recipe(cli: ConfiguredRun) -> str:
    """Return a digest of a run's recipe without empty lines and comments.

    Of several files, the recipe is the first; the others are options for all runs.
    """
    recipe = Path(str(cli.config.config[0]))
    lines = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append(line.rstrip())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
