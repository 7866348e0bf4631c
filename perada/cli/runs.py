# SPDX-License-Identifier: Apache-2.0
"""The commands that run recipes: LightningCLI's own, compare, and check, which sets a run up and does not train."""

import copy
import re
import sys
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
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
    with_own_classes,
    with_proposal,
    wrong_option,
)
from perada.cli.recipes import comparison_file, recipe_files
from perada.core.text import printable
from perada.core.yaml_files import read_yaml
from perada.data import FederatedDataModule
from perada.data.batches.workers import worker_deaths_named
from perada.lightning import FederatedLoop, PredictionFile
from perada.lightning.callbacks import OF_A_TRAINER, listed, own_parts
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_folder import log_options, no_trace_if_refused
from perada.lightning.strategies import check_trainer, device_defaults
from perada.privacy import ClientPrivacy, Privacy
from perada.results.report import client_table, mode_line, shift_tables
from perada.results.restore import plain_data

REFUSALS = (ValueError, TypeError, OSError, ImportError, ArgumentError, MisconfigurationException)
"""What a run ends in where it is refused; any other error is a mistake in the program."""
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false")
_NAME = re.compile(r"(?:((?:client_)?privacy|distillation): )?([a-z_][\w.]*)(?:=|:| '| is \d)")
"""How a message begins with the option that it is about."""


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
        defaults = (add_subcommands, *device_defaults().items())
        if defaults not in self.parsers:
            before = set(vars(self))
            super().setup_parser(add_subcommands, *kwargs)
            self.parsers[defaults] = {name: value for name, value in vars(self).items() if name not in before}
        vars(self).update(self.parsers[defaults])

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

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add perada's logger, progress bar and checkpoint where the recipe names none."""
        trainer = self._get(self.config_init, "trainer")
        chosen, callbacks = own_parts(vars(trainer), listed(trainer.callbacks))
        self.trainer_defaults = {"callbacks": callbacks}
        made = super().instantiate_trainer(**kwargs | chosen)
        check_trainer(made)
        return made

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
        """Carry out a subcommand of LightningCLI."""
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
                raise ArgumentError(None, with_proposal(str(error), known)) from error

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
        for shown in shift_tables(metrics.get("shifts", {})):
            print(f"\n{shown}")
        if mode_line(self.model.scores):
            print(mode_line(self.model.scores))

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


def findings(recipes: list[dict[str, Any]], words: Sequence[str]) -> tuple[list[str], list[str], PeradaCLI | None]:
    """What would be refused, what would be warned of, and the run of these recipes over one another, if there can be.

    An option that is refused is left out, and the rest is tried again: so all are found, not only the first. What is
    then refused only because the option is left out is not of the recipe, and is not said.
    """
    from perada.studies.compare.running import quiet

    recipes, words, refused = copy.deepcopy(recipes), list(words), list[str]()
    while True:
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
        said = [printable(" ".join(str(one.message).split())) for one in caught if one.category is UserWarning]
        if error is None:
            return refused, list(dict.fromkeys(said)), made
        known = _leave_out(error, recipes, words)
        if known or not refused:
            refused.append(one_line(error))
        if not known:
            return refused, list(dict.fromkeys(said)), None


def _leave_out(error: Exception, recipes: list[dict[str, Any]], words: list[str]) -> bool:
    """Remove the option that an error is about, where it is clear which one it is; whether there was one."""
    if wrong := wrong_option(str(error)):
        name = wrong[1]
    elif found := _NAME.match(one_line(error)):
        name = ".".join(filter(None, found.groups()))
    else:
        return False
    given = [place for place, word in enumerate(words) if word.startswith("--") and _is(name, word[2:].split("=")[0])]
    if given:
        follows = "=" not in words[given[-1]] and not "".join(words[given[-1] + 1 :][:1]).startswith("-")
        del words[given[-1] : given[-1] + 1 + follows]
        return True
    places = [list(_places(name, recipe)) for recipe in recipes]
    if not any(places) or any(len(own) > 1 for own in places):
        return False
    for section, key in chain(*places):
        del section[key]
    return True


def _places(name: str, section: dict[str, Any], above: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The sections of a recipe that an option stands in, by its full name or the last part of it, and its key there."""
    for key, value in section.items():
        if _is(name, above + key):
            yield section, key
        elif isinstance(value, dict):
            yield from _places(name, value, above if key == "init_args" else f"{above}{key}.")


def _is(name: str, full: str) -> bool:
    return full == name or full.endswith(f".{name}")
