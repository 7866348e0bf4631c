# SPDX-License-Identifier: Apache-2.0
"""The commands that run recipes: LightningCLI's own, compare, and check, which sets a run up and does not train."""

import copy
import sys
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from perada.cli.messages import one_line, quiet_libraries
from perada.cli.parser import (
    RecipeParser,
    explained,
    full_names,
    spelt_out,
    typed_names,
    with_own_classes,
)
from perada.cli.parser_errors import option_error, rejected_option
from perada.cli.recipes import comparison_file, recipe_files
from perada.core.checks import OptionError, check_whole
from perada.core.text import printable
from perada.core.yaml_files import read_yaml
from perada.data import FederatedDataModule
from perada.data.batches.workers import worker_deaths_named
from perada.lightning import FederatedLoop, PredictionFile
from perada.lightning.callbacks import OF_A_TRAINER, listed, own_parts
from perada.lightning.checkpoint import described_early, find_checkpoint
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_folder import log_options, no_trace_if_refused
from perada.lightning.strategies import check_devices, check_trainer, check_words, device_defaults
from perada.privacy import ClientPrivacy, Privacy
from perada.results.report import client_table, epsilon_text, mode_line, notes_on_means, shift_tables
from perada.results.restore import plain_data

REFUSALS = (ValueError, TypeError, OSError, ImportError, ArgumentError, MisconfigurationException)
"""What a run ends in where it is refused; any other error is a mistake in the program."""
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false")
STAND_INS = (1, 0.5, 10, 1e-5)
"""Values that `perada check` tries in the place of a refused one without which nothing else can be checked."""


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder, if there is one."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the file once."""
        if not trainer.loggers:
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning
        if any(isinstance(callback, FederatedLoop) and callback.test_mode for callback in callbacks):
            self.config = self.config.clone()
            self.config.seed_everything = False  # the noise would follow from it
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                _ = logger.experiment  # warns of a folder that is not empty
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            log_options(trainer, yaml.safe_load(self.parser.dump(self.config)))


class PeradaCLI(LightningCLI):
    """LightningCLI with the federated loop in a section of its own, and perada's defaults for the trainer."""

    parsers: ClassVar[dict[object, dict[str, Any]]] = {}

    def __init__(self, args: Sequence[str], run: bool = True, command: Sequence[str] = ()) -> None:
        """Parse ``args``; with ``run`` the first one is a subcommand of LightningCLI, which is carried out.

        ``command`` is what was typed, for the run's record.
        """
        self.runs, self.command = run, list(command)
        self.subcommand = args[0] if run else None
        self.typed = typed_names(args)
        super().__init__(
            FederatedClassifier,
            FederatedDataModule,
            SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            parser_class=RecipeParser,
            parser_kwargs={"prog": "perada", "exit_on_error": False},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=spelt_out(args),
            run=run,
        )

    def setup_parser(self, add_subcommands: bool, *kwargs: Any) -> None:
        """Build the parser once a process: it takes longer than most command lines, and a comparison has many."""
        defaults = (self.subcommand, *device_defaults().items())
        if defaults not in self.parsers:
            before = set(vars(self))
            super().setup_parser(add_subcommands, *kwargs)
            self.parsers[defaults] = {name: value for name, value in vars(self).items() if name not in before}
        vars(self).update(self.parsers[defaults])

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning declares a static method and calls it as self.subcommands()
        """Return the subcommand that runs only: making the parsers of the others would take longer than parsing."""
        of_all = LightningCLI.subcommands()
        return {name: skipped for name, skipped in of_all.items() if name == self.subcommand}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser that takes no abbreviations: the next release may have another option that begins alike."""
        return super().init_parser(allow_abbrev=False, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``federated``, ``privacy`` and ``client_privacy``; the seed and the images' size are said once."""
        parser.add_lightning_class_args(FederatedLoop, "federated")
        parser.link_arguments("seed_everything", "federated.seed", compute_fn=int)
        parser.link_arguments("data.image_size", "model.image_size")
        for name, kind, whose in (
            ("privacy", Privacy | None, "the clients' images"),
            ("client_privacy", ClientPrivacy | None, "whole clients"),
        ):
            said = f"Differential privacy of {whose}; none by default. --{name}.help explains its options."
            parser.add_argument(f"--{name}", type=kind, default=None, help=said)
            parser.link_arguments(name, f"federated.{name}")
        if not self.runs:  # the config.yaml of a run holds these of its subcommand
            for name in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{name}", type=str | bool | None, default=None)
        defaults = OF_A_TRAINER | device_defaults()
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})

    def instantiate_classes(self) -> None:
        """Make the objects; what a class of ours refuses comes without what else jsonargparse has tried."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            rejected = rejected_option(error)
            if rejected is None or rejected is error:
                raise
            raise rejected from None

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add perada's logger, progress bar and checkpoint where the recipe names none."""
        trainer = self._get(self.config_init, "trainer")
        check_devices(trainer.accelerator, trainer.devices)
        check_words(vars(trainer))
        if not self.runs or self.config.get("subcommand") == "fit":
            self._check_rounds(trainer.max_epochs)
        chosen, callbacks = own_parts(vars(trainer), listed(trainer.callbacks))
        self.trainer_defaults = {"callbacks": callbacks}
        made = super().instantiate_trainer(**kwargs | chosen)
        check_trainer(made)
        return made

    @staticmethod
    def _check_rounds(rounds: int | None) -> None:
        """Refuse to train no rounds, which a command line asks for by mistake only; -1 sets no limit."""
        if rounds not in (None, -1):
            check_whole("max_epochs", rounds, hint="the number of rounds, --rounds")

    @property
    def loop(self) -> FederatedLoop:
        """The federated loop of the trainer."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]  # set by Lightning
        return next(callback for callback in callbacks if isinstance(callback, FederatedLoop))

    def _parse_ckpt_path(self) -> None:
        """A checkpoint does not change the configuration; ``last`` is the newest run's."""
        if not self.config.get("subcommand"):
            return
        config = self.config[self.config.subcommand]
        self._asked_ckpt_path = config.get("ckpt_path")  # which is looked at again once the recipe's objects are made
        config.ckpt_path = find_checkpoint(config.get("ckpt_path"), Path(config.trainer.default_root_dir or "."))
        if config.ckpt_path is None and self.config.subcommand != "fit":
            warnings.warn(
                f"`perada {self.config.subcommand}` has no --ckpt_path, and so takes the models before any training; "
                "give --ckpt_path last, or a run's checkpoints/last.ckpt",
                stacklevel=2,
            )
        if config.get("weights_only") is None:
            config.weights_only = True  # or any code would be run that a checkpoint brings

    def _run_subcommand(self, subcommand: str) -> None:
        """Carry out a subcommand of LightningCLI, from a checkpoint that belongs to this run if one is asked for."""
        config = self.config[subcommand]
        if config.ckpt_path is not None:
            early = described_early(self.loop, self.model, self.datamodule)
            root = Path(config.trainer.default_root_dir or ".")
            fits = subcommand == "fit"
            path = find_checkpoint(self._asked_ckpt_path, root, early, self.loop.resume_allow, fits)
            config.ckpt_path = self.config_init[subcommand].ckpt_path = path
        with (
            plain_data(self.config[subcommand].ckpt_path, self.trainer),
            no_trace_if_refused(self.trainer),
            worker_deaths_named(),
        ):
            super()._run_subcommand(subcommand)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's advice against giving the arguments in Python; propose what a wrong one may be."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            words: list[str] = [*args]  # type: ignore[misc]  # what the constructor gives
            own = self._subcommand_parsers[words[0]] if self.runs else parser
            for word, after in zip(words, [*words[1:], ""], strict=True):
                if word.partition("=")[0] in ("-h", "--help"):
                    print(explained(own, word.partition("=")[2] or ("" if after.startswith("-") else after)))
                    sys.exit(0)
            try:
                with_own_classes(partial(super().parse_arguments, parser, args))
            except ArgumentError as error:
                known = [action.dest for action in own._actions]
                rejected = option_error(str(error), self.typed, known)
                if rejected is None:
                    raise
                raise rejected from error

    def before_fit(self) -> None:
        """Keep what was asked for, for the run's record."""
        self.loop.measured.command = self.command

    def after_fit(self) -> None:
        """Print the table of clients, and say where the run is."""
        self.after_validate()
        folder = self.trainer.log_dir if self.trainer.loggers else None  # all processes ask, rank 0 says it
        if folder and self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
            print(f"Run folder: {folder}")

    def after_validate(self) -> None:
        """Print the table of clients."""
        if not self.trainer.is_global_zero:
            return
        metrics, data = self.loop.outcome(self.model).metrics, self.datamodule
        if metrics["clients"]:
            print(client_table(metrics["clients"], data.train_sizes, self.loop.test_mode, data.client_names))
            for line in self._notes(metrics.get("test_images", [])):
                print(f"\n{line}")
        for shown in shift_tables(metrics.get("shifts", {})):
            print(f"\n{shown}")
        if mode_line(self.model.scores):
            print(mode_line(self.model.scores))

    def _notes(self, test_images: Sequence[int]) -> list[str]:
        """What the mean over clients hides, in lines below the table."""
        participation = self.loop.parts.federation.participation
        return notes_on_means(self.model.scores, test_images, participation.recent, participation.span)

    after_test = after_validate

    def before_predict(self) -> None:
        """Write the predictions into a file."""
        self.predictions = PredictionFile()
        self.trainer.callbacks.append(self.predictions)  # type: ignore[attr-defined]  # set by Lightning

    def after_predict(self) -> None:
        """Say where the predictions are."""
        if self.predictions.path is not None:
            print(f"Predictions: {self.predictions.path}")


def compare(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada compare``."""
    from perada.studies.compare.command import main as command
    from perada.studies.compare.file import comparison

    command(parser, comparison(words, comparison_file), compared)


def compared(args: Sequence[str]) -> PeradaCLI:
    """A run of ``perada compare``, here or in a process of its own."""
    quiet_libraries()
    return PeradaCLI(args, run=False)


class _SetUpError(Exception):
    """Ends a run that is set up, before its first round."""


class _Stop(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise _SetUpError


def check(parser: ArgumentParser, words: list[str]) -> None:
    """Print what would be refused and warned of; the exit status is 1 if the recipe cannot be run."""
    parser.add_argument("recipe", nargs="*", help="Recipe, and others over it. Options of `perada fit` may follow.")
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    asks = {"-h", "--help"} & {*words}
    names: list[str] = parser.parse_args([*asks] or words[:first]).recipe
    given = [f"--config={path}" for name in names for path in recipe_files(name)] + spelt_out(words[first:])
    contents = [read_yaml(Path(word[9:])) for word in given if word.startswith("--config=")]
    if not contents:
        raise ValueError("give a recipe: perada check RECIPE; `perada ls` lists those that ship")
    recipes = [full_names(content) for content in contents]
    refused, warned, made = findings(recipes, [word for word in given if not word.startswith("--config=")])
    for title, lines in (("Refused", refused), ("Warned of", warned)):
        if lines:
            print("\n".join([f"{title} ({len(lines)}):", *(f"- {line}" for line in lines)]), end="\n\n")
    if refused or made is None:
        print("This cannot be run until it is fixed.")
        sys.exit(1)
    data, rounds = made.datamodule, made.trainer.max_epochs
    print(f"This can be run: {data.num_clients} clients, {sum(data.train_sizes)} training images, {rounds} rounds.")
    for line in privacy_lines(made):
        print(line)


def privacy_lines(made: PeradaCLI) -> list[str]:
    """The noise of a private run that is set up, and the ε that it comes to, one line for each section."""
    protection = made.loop.protection
    data = made.datamodule
    if protection is None:
        return []
    lines = []
    if protection.images is not None:
        options = protection.images.options
        planned = protection.images.planned_epsilons(data.num_clients)
        noise = sorted(protection.images.noise_multipliers)
        spent = ", ".join(f"{epsilon_text(max(values))} ({ledger} ledger)" for ledger, values in planned.items())
        lines.append(_privacy_line("privacy", noise, spent, made, options))
    if protection.clients is not None:
        planned = protection.clients.planned_epsilons(data.num_clients)
        spent = epsilon_text(max(planned["server"])) if planned else ""
        noise = [protection.clients.noise_multiplier]
        lines.append(_privacy_line("client_privacy", noise, spent, made, protection.clients.options))
    return lines


def _privacy_line(
    section: str, noise: Sequence[float], spent: str, made: PeradaCLI, options: Privacy | ClientPrivacy
) -> str:
    sigma = f"{noise[0]:.4g}" if noise[0] == noise[-1] else f"{noise[0]:.4g} to {noise[-1]:.4g}"
    if not spent:
        return f"{section}: noise multiplier σ = {sigma}; ε grows with every round, of which the number is open."
    whose = "" if len(made.datamodule.train_sizes) == 1 else "at most "
    limit = "" if options.max_epsilon is None else f"; training of a client ends at max_epsilon={options.max_epsilon:g}"
    return (
        f"{section}: noise multiplier σ = {sigma}; after {made.trainer.max_epochs} rounds ε = {whose}{spent}, "
        f"δ = {options.delta:g}{limit}."
    )


def findings(recipes: list[dict[str, Any]], words: Sequence[str]) -> tuple[list[str], list[str], PeradaCLI | None]:
    """What would be refused, what would be warned of, and the run of these recipes over one another, if there can be.

    An option that is refused is left out, and the rest is tried again: so all are found, not only the first. Where the
    option is needed, other values take its place. What is then refused only because of that is not of the recipe, and
    is not reported.
    """
    recipes, words, refused = copy.deepcopy(recipes), list(words), list[str]()
    changed: _Option | None = None  # the option that was refused last
    stand_ins: list[object] = []  # values that were not tried in its place
    while True:
        made, error, warned = _set_up(recipes, words)
        if error is None:
            return refused, warned, made
        option = _option_of(error, recipes, words)
        if changed is not None and (option is None or option.name == changed.name):
            if not stand_ins:
                return refused, warned, None
            changed.set(stand_ins.pop(0))
            continue
        refused.append(one_line(error))
        if option is None:
            return refused, warned, None
        option.remove()
        changed = option
        stand_ins = list(STAND_INS)


def _set_up(
    recipes: list[dict[str, Any]], words: Sequence[str]
) -> tuple[PeradaCLI | None, Exception | None, list[str]]:
    """Set up the run of these recipes; return it, what it was refused for, and what it warned of."""
    from perada.studies.compare.running import quiet

    made: PeradaCLI | None = None
    error: Exception | None = None
    with quiet(), warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always", UserWarning)
        paths = [Path(folder) / f"{number}.yaml" for number in range(len(recipes))]
        for path, recipe in zip(paths, recipes, strict=True):
            path.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        given = [*(f"--config={path}" for path in paths), *words, *(f"--trainer.{option}" for option in QUIET)]
        try:
            made = PeradaCLI(given, run=False)
            made.trainer.callbacks.insert(0, _Stop())  # type: ignore[attr-defined]  # set by Lightning
            made.trainer.fit(made.model, made.datamodule)
        except _SetUpError:
            pass
        except REFUSALS as refusal:
            error = refusal
    warned = [printable(" ".join(str(one.message).split())) for one in caught if one.category is UserWarning]
    return made, error, list(dict.fromkeys(warned))


@dataclass
class _Option:
    """An option that a message names, where it stands on the command line or in recipes.

    Attributes:
        name: As the message names it.
        words: The command line, which is changed.
        place: Of the option's first word there; None where it stands in recipes.
        count: Number of its words there.
        entries: The sections of recipes that hold it, and its key in each.
    """

    name: str
    words: list[str]
    place: int | None = None
    count: int = 0
    entries: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    flag: str = ""

    def remove(self) -> None:
        """Leave the option out."""
        if self.place is None:
            for section, key in self.entries:
                del section[key]
            return
        self.flag = self.words[self.place].split("=")[0]
        del self.words[self.place : self.place + self.count]
        self.count = 0

    def set(self, value: object) -> None:
        """Put a value in the place of the one that was removed."""
        if self.place is None:
            for section, key in self.entries:
                section[key] = value
            return
        self.words[self.place : self.place + self.count] = [f"{self.flag}={value}"]
        self.count = 1


def _option_of(error: Exception, recipes: list[dict[str, Any]], words: list[str]) -> _Option | None:
    """The option that an error is about; None where that is not clear, or it is not among those that were given."""
    if not isinstance(error, OptionError) or not error.name:
        return None
    name = error.option
    given = [place for place, word in enumerate(words) if word.startswith("--") and _is(name, word[2:].split("=")[0])]
    if given:
        last = given[-1]
        value_follows = "=" not in words[last] and not "".join(words[last + 1 :][:1]).startswith("-")
        return _Option(name, words, last, 1 + value_follows)
    places = [list(_places(name, recipe)) for recipe in recipes]
    if not any(places) or any(len(own) > 1 for own in places):
        return None
    return _Option(name, words, entries=list(chain(*places)))


def _places(name: str, section: dict[str, Any], above: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The sections of a recipe that an option stands in, by its full name or the last part of it, and its key there."""
    for key, value in section.items():
        if _is(name, above + key):
            yield section, key
        elif isinstance(value, dict):
            yield from _places(name, value, above if key == "init_args" else f"{above}{key}.")


def _is(name: str, full: str) -> bool:
    return full == name or full.endswith(f".{name}")
