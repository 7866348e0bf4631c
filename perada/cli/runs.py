# SPDX-License-Identifier: Apache-2.0
"""Commands that run recipes: those of LightningCLI, compare, and check, which sets up a run without training."""

import copy
import sys
import tempfile
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from perada.api import OPTION_CLASSES, argument_texts
from perada.cli.messages import one_line, quiet_libraries
from perada.cli.parser import (
    ALWAYS_SET,
    RecipeParser,
    explained,
    resolve_names,
    spelt_out,
    typed_names,
    with_own_classes,
)
from perada.cli.parser_errors import option_error, rejected_option
from perada.cli.recipes import comparison_file, recipe_files
from perada.cli.setup_errors import SKIP_BROKEN, Part, errors_without_data, failed_part, way_around
from perada.cli.streams import output_is_lost
from perada.core.checks import OptionError, check_integer
from perada.core.text import printable
from perada.data import FederatedDataModule
from perada.data.batches.workers import explain_worker_deaths
from perada.data.broken_images import SKIPPED
from perada.lightning import FederatedLoop, PredictionFile
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_fingerprint import early_fingerprint
from perada.lightning.run_folder import check_run_folder, discard_folder_on_rejection, log_options
from perada.lightning.strategies import device_defaults
from perada.lightning.trainer_attributes import callbacks_of, is_dev_run
from perada.lightning.trainer_setup import check_devices, check_trainer, check_words
from perada.lightning.trainers import TRAINER_DEFAULTS, as_callback_list, default_components
from perada.privacy import ClientPrivacy, Privacy
from perada.results.report import client_table, epsilon_text, mode_line, notes_on_means, shift_tables, unit_of
from perada.results.restore import plain_data
from perada.scores.failed_outputs import REMEDY, FailedOutputs, FailedOutputsError, dated, describe_failed
from perada.system.quiet import info_messages_disabled
from perada.system.yaml_files import read_yaml

USER_ERRORS = (ValueError, TypeError, OSError, ImportError, ArgumentError, MisconfigurationException)
"""Errors with which a run is rejected; any other error is a bug."""
QUIET = ("logger=false", "enable_checkpointing=false", "enable_progress_bar=false")
REPLACEMENTS = (1, 0.5, 10, 1e-5)
"""Values that `perada check` substitutes for a rejected one that cannot be left out."""
STAND_INS = {"data.dataset": "Digits", "data.partition": "IID"}
"""Classes that `perada check` substitutes for a rejected one without which nothing else could be set up."""


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder, if there is one."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the file once."""
        if not trainer.loggers:
            return
        check_run_folder(trainer)
        callbacks = callbacks_of(trainer)
        if any(isinstance(callback, FederatedLoop) and callback.test_mode for callback in callbacks):
            self.config = self.config.clone()
            self.config.seed_everything = False  # the noise of a private run could be computed from it
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                _ = logger.experiment  # creates the folder, and warns if it is not empty
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            log_options(trainer, yaml.safe_load(self.parser.dump(self.config)))


class PeradaCLI(LightningCLI):
    """LightningCLI with a section for the federated loop, and perada's defaults for the trainer.

    Args:
        args: Words of the command line; with ``run`` the first one is the subcommand.
        run: Whether to run a subcommand of LightningCLI.
        command: What was typed, for the run's record.

    Attributes:
        parsers: Attributes that building a parser has set, by subcommand and defaults of the trainer.
    """

    parsers: ClassVar[dict[object, dict[str, Any]]] = {}

    def __init__(self, args: Sequence[str], run: bool = True, command: Sequence[str] = ()) -> None:
        self.runs = run
        self.command = list(command)
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
        """Build the parser once in a process: that takes longer than parsing, and a comparison parses many times."""
        key = (self.subcommand, *device_defaults().items())
        if key not in self.parsers:
            former_names = set(vars(self))
            super().setup_parser(add_subcommands, *kwargs)
            self.parsers[key] = {name: value for name, value in vars(self).items() if name not in former_names}
        for name, value in self.parsers[key].items():
            setattr(self, name, value)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Lightning declares a static method and calls it as self.subcommands()
        """Return only the subcommand that runs: building the parsers of the others would take longer than parsing."""
        all_subcommands = LightningCLI.subcommands()
        return {name: skipped for name, skipped in all_subcommands.items() if name == self.subcommand}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Build a parser without abbreviations: a later release may add an option with the same beginning."""
        return super().init_parser(allow_abbrev=False, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``federated`` and the sections that it takes, and link options that two sections share."""
        parser.add_lightning_class_args(FederatedLoop, "federated")
        parser.link_arguments("seed_everything", "federated.seed", compute_fn=int)
        parser.link_arguments("data.image_size", "model.image_size")
        texts = argument_texts(FederatedLoop)
        for name, options_class in OPTION_CLASSES.items():
            if name in ALWAYS_SET:
                parser.add_argument(f"--{name}", type=options_class, default=options_class(), help=texts[name])
            else:
                text = f"{texts[name]} --{name}.help explains its options."
                parser.add_argument(f"--{name}", type=options_class | None, default=None, help=text)
            parser.link_arguments(name, f"federated.{name}")
        if not self.runs:  # the config.yaml of a run has these options of its subcommand
            for name in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{name}", type=str | bool | None, default=None)
        defaults = TRAINER_DEFAULTS | device_defaults()
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items()})

    def instantiate_classes(self) -> None:
        """Build the objects. If a class of perada rejects an option, only its own message is kept."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            rejected = rejected_option(error)
            if rejected is None or rejected is error:
                raise
            raise rejected from None

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add perada's logger, progress bar and checkpoint where the recipe has none."""
        trainer = self._get(self.config_init, "trainer")
        check_devices(trainer.accelerator, trainer.devices)
        check_words(vars(trainer))
        if not self.runs or self.config.get("subcommand") == "fit":
            self._check_rounds(trainer.max_epochs)
        defaults, callbacks = default_components(vars(trainer), as_callback_list(trainer.callbacks))
        self.trainer_defaults = {"callbacks": callbacks}
        built = super().instantiate_trainer(**kwargs | defaults)
        check_trainer(built)
        return built

    @staticmethod
    def _check_rounds(rounds: int | None) -> None:
        """Reject 0 rounds, which nobody intends; -1 sets no limit."""
        if rounds not in (None, -1):
            check_integer("max_epochs", rounds, hint="it is the number of rounds, --trainer.max_epochs")

    @property
    def loop(self) -> FederatedLoop:
        """The federated loop of the trainer."""
        callbacks = callbacks_of(self.trainer)
        return next(callback for callback in callbacks if isinstance(callback, FederatedLoop))

    def _parse_ckpt_path(self) -> None:
        """Resolve ``last`` to the newest run's checkpoint, without taking over the checkpoint's configuration."""
        if not self.config.get("subcommand"):
            return
        config = self.config[self.config.subcommand]
        # It is resolved again when the objects are built, so that it is known which checkpoints belong to this run.
        self._requested_ckpt_path = config.get("ckpt_path")
        root = Path(config.trainer.default_root_dir or ".")
        config.ckpt_path = find_checkpoint(self._requested_ckpt_path, root)
        if config.ckpt_path is None and self.config.subcommand != "fit":
            warnings.warn(
                f"`perada {self.config.subcommand}` has no --ckpt_path and so uses untrained models; set --ckpt_path "
                "last, or the path of a run's checkpoints/last.ckpt",
                stacklevel=2,
            )
        if config.get("weights_only") is None:
            config.weights_only = True  # otherwise a checkpoint could run any code

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a subcommand of LightningCLI, from a checkpoint that belongs to this run if one is requested."""
        config = self.config[subcommand]
        if config.ckpt_path is not None:
            early = early_fingerprint(self.loop, self.model, self.datamodule)
            root = Path(config.trainer.default_root_dir or ".")
            fits = subcommand == "fit"
            path = find_checkpoint(self._requested_ckpt_path, root, early, self.loop.resume_allow, fits)
            config.ckpt_path = path
            self.config_init[subcommand].ckpt_path = path
        with (
            plain_data(self.config[subcommand].ckpt_path, self.trainer),
            discard_folder_on_rejection(self.trainer),
            explain_worker_deaths(),
        ):
            super()._run_subcommand(subcommand)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse arguments. For an unknown option, propose similar ones."""
        with warnings.catch_warnings():
            # LightningCLI advises against passing arguments from Python.
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            words = list(cast(list[str], args))  # the constructor passes a list
            command_parser = self._subcommand_parsers[words[0]] if self.runs else parser
            for word, next_word in zip(words, [*words[1:], ""], strict=True):
                option, _, topic = word.partition("=")
                if option in ("-h", "--help"):
                    if not topic and not next_word.startswith("-"):
                        topic = next_word
                    print(explained(command_parser, topic))
                    sys.exit(0)
            try:
                with_own_classes(partial(super().parse_arguments, parser, args))
            except ArgumentError as error:
                options = [action.dest for action in command_parser._actions]
                rejected = option_error(str(error), self.typed, options)
                if rejected is None:
                    raise
                raise rejected from error

    def before_fit(self) -> None:
        """Record the command in the run."""
        self.loop.command = self.command

    def after_fit(self) -> None:
        """Print the table of clients, and the folder of the run."""
        self._print_scores()
        # log_dir is a collective: all processes read it.
        folder = self.trainer.log_dir if self.trainer.loggers else None
        if folder and self.trainer.is_global_zero and not is_dev_run(self.trainer):
            # The only result that is in no file.
            print(f"Run folder: {folder}", file=sys.stderr if output_is_lost() else sys.stdout)
        self._check_outputs()

    def after_test(self) -> None:
        """Print the scores."""
        self._print_scores()
        self._check_outputs()

    def _check_outputs(self) -> None:
        """Raise a FailedOutputsError if models have no scores, so that the exit status is 1. Nothing is lost by it."""
        self._raise_for(self.model.results.failed_outputs)

    def _raise_for(self, failed_outputs: Sequence[FailedOutputs]) -> None:
        """Raise a FailedOutputsError that names the models, if there are any."""
        if failed_outputs:
            private = self.loop.context.settings.private
            message = describe_failed(failed_outputs, self.datamodule.client_names, anonymous=private)
            raise FailedOutputsError(f"{message}; {REMEDY}")

    def _print_scores(self) -> None:
        """Print the table of clients, and the scores on shifted test sets."""
        if not self.trainer.is_global_zero:
            return
        data = self.datamodule
        metrics = self.loop.outcome(self.model).metrics
        unit = unit_of(self.model.task.record())
        if metrics["clients"]:
            print(
                client_table(
                    metrics["clients"],
                    data.train_sizes,
                    test_mode=self.loop.test_mode,
                    client_names=data.client_names,
                    unit=unit,
                    metric=self.model.metrics[0].name,
                    means=self.model.scores,
                    zero_shot=metrics.get("initial") if self.model.text_head is not None else None,
                )
            )
            for line in self._notes_on_scores(metrics.get("test_images", [])):
                print(f"\n{line}")
        for shift_table in shift_tables(metrics.get("shifts", {}), unit):
            print(f"\n{shift_table}")
        if mode_line(self.model.scores):
            print(mode_line(self.model.scores, unit))

    def _notes_on_scores(self, test_images: Sequence[int]) -> list[str]:
        """Return lines on what the mean over clients hides."""
        participation = self.loop.context.federation.participation
        unit = unit_of(self.model.task.record())
        return notes_on_means(self.model.scores, test_images, participation.recent, participation.span, unit)

    def before_predict(self) -> None:
        """Write the predictions into a file."""
        self.predictions = PredictionFile()
        callbacks_of(self.trainer).append(self.predictions)

    def after_predict(self) -> None:
        """Print where the predictions are."""
        if self.predictions.path is not None:
            print(f"Predictions: {self.predictions.path}")
        federation = self.loop.context.federation
        failed_outputs: list[FailedOutputs] = []
        for (model, client), images in sorted(self.predictions.failed.items()):
            if model == "global":
                failed_outputs.append(FailedOutputs("global", client, images, federation.rounds_done))
            elif federation.personalized:
                failed_outputs.append(FailedOutputs("personal", client, images, federation.rounds_done))
        self._raise_for(dated(failed_outputs, self.model.results.failed_outputs))


def compare(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada compare``."""
    from perada.studies.compare.command import main as command
    from perada.studies.compare.file import expand_comparison

    command(parser, expand_comparison(words, comparison_file), build_compared)


def choose(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada choose``."""
    from perada.studies.choose.command import main as command

    command(parser, words, build_compared)


def build_compared(args: Sequence[str]) -> PeradaCLI:
    """Build a run of ``perada compare`` or ``perada choose``, in this process or another one."""
    quiet_libraries()
    # Each run is one process. On a cluster it is a job, which submitit starts.
    warnings.filterwarnings("ignore", "The `srun` command is available on your system but is not used")
    return PeradaCLI(args, run=False)


class _SetUpError(Exception):
    """Raised to end a run that is set up, before its first round."""


class _StopAfterSetUp(pl.Callback):
    """Ends a run before its first round."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise _SetUpError


def print_problems(parser: ArgumentParser, words: list[str]) -> None:
    """Print the errors and warnings of a recipe; the exit status is 1 if it is invalid."""
    parser.add_argument(
        "recipe", nargs="*", help="Recipes; later ones override earlier ones. Options of `perada fit` may follow."
    )
    is_option = [word.startswith("-") for word in words]
    num_recipes = is_option.index(True) if any(is_option) else len(words)
    help_words = {"-h", "--help"} & {*words}
    names: list[str] = parser.parse_args([*help_words] or words[:num_recipes]).recipe
    paths = [path for name in names for path in recipe_files(name)]
    options = []
    for word in spelt_out(words[num_recipes:]):
        if word.startswith("--config="):
            paths.append(Path(word.removeprefix("--config=")))
        else:
            options.append(word)
    if not paths:
        raise ValueError("no recipe; use perada check RECIPE, with one of those that `perada ls` lists")
    recipes = [resolve_names(read_yaml(path)) for path in paths]
    result = find_problems(recipes, options)
    for title, lines in (("Errors", result.errors), ("Warnings", result.warnings)):
        if lines:
            print(f"{title} ({len(lines)}):")
            for line in lines:
                print(f"- {printable(line)}")
            print()
    cli = result.cli
    if result.errors or cli is None:
        print("The recipe is invalid.")
        sys.exit(1)
    data = cli.datamodule
    num_images = sum(data.train_sizes)
    rounds = cli.trainer.max_epochs
    print(f"The recipe is valid: {data.num_clients} clients, {num_images} training images, {rounds} rounds.")
    for line in privacy_lines_of_setup(cli):
        print(line)


def privacy_lines_of_setup(cli: PeradaCLI) -> list[str]:
    """Return a line for each privacy section of a run after set-up, with its noise and the resulting ε."""
    protection = cli.loop.protection
    data = cli.datamodule
    if protection is None:
        return []
    lines = []
    if protection.image_account is not None:
        options = protection.image_account.options
        planned = protection.image_account.planned_epsilons(data.num_clients)
        noise = sorted(protection.image_account.noise_multipliers)
        spent = ", ".join(f"{epsilon_text(max(values))} ({ledger} ledger)" for ledger, values in planned.items())
        lines.append(_privacy_line("privacy", noise, spent, cli, options))
    if protection.client_level is not None:
        planned = protection.client_level.planned_epsilons(data.num_clients)
        spent = epsilon_text(max(planned["server"])) if planned else ""
        noise = [protection.client_level.noise_multiplier]
        lines.append(_privacy_line("client_privacy", noise, spent, cli, protection.client_level.options))
    return lines


def _privacy_line(
    section: str, noise: Sequence[float], spent: str, cli: PeradaCLI, privacy: Privacy | ClientPrivacy
) -> str:
    """Format the privacy of a section; ``noise`` are the noise multipliers in ascending order."""
    sigma = f"{noise[0]:.4g}" if noise[0] == noise[-1] else f"{noise[0]:.4g} to {noise[-1]:.4g}"
    if not spent:
        return f"{section}: noise multiplier σ = {sigma}; ε grows with every round, and the number of rounds is open."
    bound = "" if len(cli.datamodule.train_sizes) == 1 else "at most "
    limit = "" if privacy.max_epsilon is None else f"; a client stops training at max_epsilon={privacy.max_epsilon:g}"
    return (
        f"{section}: noise multiplier σ = {sigma}; after {cli.trainer.max_epochs} rounds ε = {bound}{spent}, "
        f"δ = {privacy.delta:g}{limit}."
    )


@dataclass(frozen=True)
class Problems:
    """The findings of a recipe's set-up.

    Attributes:
        errors: Messages of all errors.
        warnings: Messages of the warnings of the last attempt.
        cli: The run that was set up, without the options that were rejected; None if there is none.
    """

    errors: list[str]
    warnings: list[str]
    cli: PeradaCLI | None


def find_problems(recipes: list[dict[str, Any]], words: Sequence[str]) -> Problems:
    """Find all errors and warnings of a run.

    A rejected option is removed, and the rest is set up again, so that all errors are found and not only the first. If
    the option is required, other values replace it. Broken images are skipped, and missing weights are replaced by
    random ones. If the data cannot be used, each image set and the model are examined on their own. An error that only
    such a change causes is not reported.

    Args:
        recipes: Contents of recipes; later ones take precedence.
        words: Options on the command line.
    """
    recipes = copy.deepcopy(recipes)
    words = list(words)
    errors: list[str] = []
    changed: _Option | None = None  # the option that was rejected last
    replacements: list[object] = []  # values not yet tried in its place
    has_stand_in = False  # whether the data are not those of the recipe
    ways_around: list[str] = []
    while True:
        attempt = _set_up(recipes, words)
        if SKIP_BROKEN in ways_around:
            # This warning is about the change, and names the images of the error.
            attempt.warnings[:] = [text for text in attempt.warnings if not text.endswith(SKIPPED)]
        if attempt.error is None:
            return Problems(errors, attempt.warnings, attempt.cli)
        if has_stand_in and attempt.part != "options":
            # Only missing files and libraries do not depend on the data, which are others than the recipe's.
            if attempt.part == "model" and isinstance(attempt.error, OSError | ImportError):
                errors.append(one_line(attempt.error))
            errors += _further_errors(attempt, errors)
            return Problems(errors, attempt.warnings, None)
        option = _option_of(attempt.error, recipes, words)
        is_same = (
            changed is not None
            and option is not None
            and (_is_named(option.name, changed.name) or _is_named(changed.name, option.name))
        )
        is_unrelated = option is None and changed is not None and _concerns_files(attempt, changed.name)
        if changed is not None and (is_same or (option is None and not is_unrelated)):
            # The error follows from the removal or the replacement, not from the recipe.
            if not replacements:
                return Problems(errors, attempt.warnings, None)
            changed.set(replacements.pop(0))
            continue
        message = one_line(attempt.error)
        is_new = message not in errors and not (ways_around and attempt.part == "data" and option is None)
        if is_new:
            errors.append(message)
        if option is None:
            flag = way_around(attempt.error, attempt.part)
            if flag is None or flag in ways_around:
                errors += _further_errors(attempt, errors)
                return Problems(errors, attempt.warnings, None)
            ways_around.append(flag)
            words.append(flag)
            changed = None
            continue
        option.remove()
        # The data module itself calls its option by the second of its names.
        full_name = option.name if option.name in STAND_INS else f"data.{option.name}"
        if full_name in STAND_INS and option.position is None:
            _drop_suboptions(words, full_name)
            option.set(STAND_INS[full_name])
            has_stand_in = True
        changed = option
        replacements = list(REPLACEMENTS)


def _further_errors(attempt: "_SetUpAttempt", errors: Sequence[str]) -> list[str]:
    """Return the errors of image sets and model that are not among these, if the data could not be set up."""
    if attempt.part != "data" or attempt.cli is None:
        return []
    messages = [one_line(error) for error in errors_without_data(attempt.cli.datamodule, attempt.cli.model)]
    return [message for message in dict.fromkeys(messages) if message not in errors]


def _drop_suboptions(words: list[str], name: str) -> None:
    """Remove the options of a class from a command line, when another class takes its place."""
    position = 0
    while position < len(words):
        if not words[position].startswith(f"--{name}."):
            position += 1
            continue
        if "=" not in words[position] and not "".join(words[position + 1 : position + 2]).startswith("-"):
            del words[position + 1 : position + 2]
        del words[position]


def _concerns_files(attempt: "_SetUpAttempt", changed: str) -> bool:
    """Return whether an error is about images or weights, which an option of another section does not cause.

    Args:
        attempt: The set-up that failed.
        changed: Name of the option that was removed or replaced before.
    """
    if attempt.part == "data":
        return not changed.startswith("data")
    return attempt.part == "model" and isinstance(attempt.error, OSError | ImportError)


class _SetUpAttempt(NamedTuple):
    """The run, if the parser accepted it; the error that rejected it, if any; its warnings; and what failed."""

    cli: PeradaCLI | None
    error: Exception | None
    warnings: list[str]
    part: Part


def _set_up(recipes: list[dict[str, Any]], words: Sequence[str]) -> _SetUpAttempt:
    """Set up the run of these recipes, and stop before the first round."""
    cli: PeradaCLI | None = None
    error: Exception | None = None
    with (
        info_messages_disabled(),
        warnings.catch_warnings(record=True) as caught,
        tempfile.TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("always", UserWarning)
        paths = [Path(folder) / f"{number}.yaml" for number in range(len(recipes))]
        for path, recipe in zip(paths, recipes, strict=True):
            path.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        configs = [f"--config={path}" for path in paths]
        quiet_options = [f"--trainer.{option}" for option in QUIET]
        try:
            cli = PeradaCLI([*configs, *words, *quiet_options], run=False)
            callbacks_of(cli.trainer).insert(0, _StopAfterSetUp())
            cli.trainer.fit(cli.model, cli.datamodule)
        except _SetUpError:
            pass
        except USER_ERRORS as rejection:
            error = rejection
    messages = []
    for warning in caught:
        if warning.category is UserWarning:
            messages.append(printable(" ".join(str(warning.message).split())))
    part: Part = "options" if cli is None else failed_part(cli.datamodule, cli.model)
    return _SetUpAttempt(cli, error, list(dict.fromkeys(messages)), part)


@dataclass
class _Option:
    """An option of an error message, on the command line or in recipes.

    Attributes:
        name: Its name in the message.
        words: The command line, which is changed.
        position: Position of the option's first word there; None if it is in recipes.
        count: Number of its words there.
        entries: The sections of recipes that have it, and its key in each.
        flag: The option as it was typed.
    """

    name: str
    words: list[str]
    position: int | None = None
    count: int = 0
    entries: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    flag: str = ""

    def remove(self) -> None:
        """Remove the option."""
        if self.position is None:
            for section, key in self.entries:
                del section[key]
            return
        self.flag = self.words[self.position].split("=")[0]
        del self.words[self.position : self.position + self.count]
        self.count = 0

    def set(self, value: object) -> None:
        """Set a value in place of the removed one."""
        if self.position is None:
            for section, key in self.entries:
                section[key] = value
            return
        self.words[self.position : self.position + self.count] = [f"{self.flag}={value}"]
        self.count = 1


def _option_of(error: Exception, recipes: list[dict[str, Any]], words: list[str]) -> _Option | None:
    """Return the option that an error is about; None if that is unclear, or the option was not set."""
    if not isinstance(error, OptionError) or not error.name:
        return None
    name = error.option
    positions = [
        position
        for position, word in enumerate(words)
        if word.startswith("--") and _is_named(name, word[2:].split("=")[0])
    ]
    if positions:
        last = positions[-1]  # which takes precedence
        next_word = "".join(words[last + 1 : last + 2])
        has_value_word = "=" not in words[last] and not next_word.startswith("-")
        return _Option(name, words, last, 1 + has_value_word)
    entries = []
    for recipe in recipes:
        entries_of_recipe = list(_find_entries(name, recipe))
        if len(entries_of_recipe) > 1:
            return None
        entries += entries_of_recipe
    return _Option(name, words, entries=entries) if entries else None


def _find_entries(name: str, section: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the sections of a recipe that have an option, by its full name or the end of it, and its key in each."""
    for key, value in section.items():
        if _is_named(name, prefix + key):
            yield section, key
        elif isinstance(value, dict):
            # init_args is no part of an option's name.
            yield from _find_entries(name, value, prefix if key == "init_args" else f"{prefix}{key}.")


def _is_named(name: str, full_name: str) -> bool:
    """Return whether a name is an option's full name, or the end of it."""
    return full_name == name or full_name.endswith(f".{name}")
