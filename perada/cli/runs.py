# SPDX-License-Identifier: Apache-2.0
"""The command line: LightningCLI's subcommands, and commands of our own beside them."""

import os
import shutil
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jsonargparse
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from perada.cli.classes import import_named
from perada.cli.messages import one_line, quiet_lightning
from perada.cli.words import find_recipe, recipes, spelt_out
from perada.data import FederatedDataModule
from perada.lightning import FederatedLoop, PredictionFile, RoundCheckpoint, RoundProgressBar
from perada.lightning.checkpoint import find_checkpoint, plain_data
from perada.lightning.checks import check_precision, check_trainer
from perada.lightning.module import FederatedClassifier
from perada.lightning.outcome import outcome
from perada.lightning.strategies import choose_strategy, device_defaults
from perada.privacy import ClientPrivacy, Privacy
from perada.results.privacy_card import privacy_lines
from perada.results.report import client_table, mode_line, printable, run_report

LIGHTNING = ("fit", "validate", "test", "predict")


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


class PeradaCLI(LightningCLI):
    """LightningCLI with the federated loop in a section of its own, and perada's defaults for the trainer."""

    def __init__(self, *, run: bool, **kwargs: Any) -> None:
        self.runs = run
        super().__init__(run=run, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``federated``, ``privacy`` and ``client_privacy``; the seed and the images' size are said once."""
        parser.add_lightning_class_args(FederatedLoop, "federated")
        parser.link_arguments("seed_everything", "federated.seed", compute_fn=int)
        parser.link_arguments("data.image_size", "model.image_size")
        for name, kind in (("privacy", Privacy | None), ("client_privacy", ClientPrivacy | None)):
            parser.add_argument(f"--{name}", type=kind, default=None, help="Differential privacy; none by default.")
            parser.link_arguments(name, f"federated.{name}")
        if not self.runs:  # the config.yaml of a run holds these of its subcommand
            for name in ("ckpt_path", "weights_only"):
                parser.add_argument(f"--{name}", type=str | bool | None, default=None)
        defaults = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False}
        parser.set_defaults({f"trainer.{name}": value for name, value in (defaults | device_defaults()).items()})

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add perada's logger, progress bar and checkpoint where the recipe names none."""
        trainer = self._get(self.config_init, "trainer")
        given = trainer.callbacks or []
        given = given if isinstance(given, list) else [given]
        check_precision(trainer.precision)
        callbacks: list[pl.Callback] = []
        if trainer.enable_progress_bar is not False and not any(isinstance(c, pl.callbacks.ProgressBar) for c in given):
            callbacks.append(RoundProgressBar())
        if not any(isinstance(c, ModelCheckpoint) for c in given):
            if trainer.logger is False and trainer.enable_checkpointing is None:
                kwargs["enable_checkpointing"] = False  # without a logger there is no run folder to write to
            elif trainer.enable_checkpointing is not False:
                callbacks.append(RoundCheckpoint())
        self.trainer_defaults = {"callbacks": callbacks}
        if trainer.logger in (None, True):
            kwargs["logger"] = CSVLogger(trainer.default_root_dir or ".")
        kwargs["strategy"] = choose_strategy(trainer.strategy, trainer.devices, trainer.num_nodes)
        made = super().instantiate_trainer(**kwargs)
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
        if config.get("weights_only") is None:
            config.weights_only = True  # or any code would be run that a checkpoint brings

    def _run_subcommand(self, subcommand: str) -> None:
        """Carry out a subcommand of LightningCLI."""
        with plain_data(self.config[subcommand].ckpt_path):
            super()._run_subcommand(subcommand)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's advice against giving the arguments in Python."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            super().parse_arguments(parser, args)

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
        clients = outcome(self.model, self.loop).metrics["clients"]
        if clients:
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in clients.items()}
            print(client_table(columns, self.datamodule.train_sizes, self.loop.test_mode))
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


def make_cli(args: Sequence[str], run: bool = True) -> PeradaCLI:
    """Parse ``args``; with ``run`` the first one is a subcommand of LightningCLI, which is carried out."""
    words = spelt_out(args)
    import_named(words)
    return PeradaCLI(
        model_class=FederatedClassifier,
        datamodule_class=FederatedDataModule,
        seed_everything_default=0,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"exit_on_error": False} | {name: {"exit_on_error": False} for name in LIGHTNING},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=words,
        run=run,
    )


def _parser(prog: str, description: str) -> jsonargparse.ArgumentParser:
    return jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)


def _ls(args: Sequence[str]) -> None:
    """List the shipped recipes with their first line."""
    _parser("perada ls", "List the shipped recipes.").parse_args(list(args))
    width = max(map(len, recipes()))
    for name, path in recipes().items():
        print(f"{name:{width}}  {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")


def _cp(args: Sequence[str]) -> None:
    """Copy a recipe."""
    parser = _parser("perada cp", "Copy a shipped recipe, to edit it.")
    parser.add_argument("name", help="Name of a recipe, as `perada ls` lists it.")
    parser.add_argument("destination", type=Path, help="File or folder to copy it to.")
    parser.add_argument("--force", action="store_true", help="Overwrite a file that is there.")
    given = parser.parse_args(list(args))
    source = find_recipe(given.name)
    target = given.destination / source.name if given.destination.is_dir() else given.destination
    if target.exists() and not given.force:
        raise FileExistsError(f"{str(target)!r} is there already; choose another destination or add --force")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    print(f"Copied {given.name} to {target}; run it with: perada fit --config {target}")


def _export(args: Sequence[str]) -> None:
    """Write a finished run's adapters as PEFT folders."""
    parser = _parser("perada export", "Write a run's adapters as PEFT folders.")
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    parser.add_argument(
        "--output", type=Path, required=True, help="Folder to write client_0, client_1, … and global to."
    )
    given = parser.parse_args(list(args))
    config = given.run / "config.yaml"
    checkpoints = sorted((given.run / "checkpoints").rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if not config.is_file() or not checkpoints:
        lacks = "checkpoints/last.ckpt" if config.is_file() else "config.yaml"
        raise FileNotFoundError(
            f"{str(given.run)!r} is no finished run: it has no {lacks}; give a run folder of `perada fit`"
        )
    if config.read_text(encoding="utf-8").startswith("# perada.finetune"):
        raise ValueError(
            f"{str(given.run)!r} is of perada.finetune in Python: save what the call returned with Run.save"
        )
    quiet = ("logger=false", "enable_progress_bar=false", "devices=1", "num_nodes=1", "strategy=auto")
    cli = make_cli(["--config", str(config), *(f"--trainer.{option}" for option in quiet)], run=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The dirpath has changed", UserWarning)  # nothing is written there
        path = str(checkpoints[-1])
        with plain_data(path):
            cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=path, verbose=False, weights_only=True)
    run = outcome(cli.model, cli.loop)
    folder = run.save(given.output)
    written = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").is_file())
    print(f"Wrote {len(written)} adapters to {folder}: {written[0]} … {written[-1]}")
    if privacy_lines(run.info.get("privacy")):
        print(privacy_lines(run.info["privacy"]))


def _report(args: Sequence[str]) -> None:
    """Print a run's rounds and clients."""
    parser = _parser("perada report", "Print a run's metrics as tables.")
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    print(run_report(parser.parse_args(list(args)).run))


def _compare(args: Sequence[str]) -> None:
    from perada.experiments.compare.command import main as compare

    start = "import sys; sys.path[:] = sys.argv[1:]; from perada.cli.main import main; main(['compare', '--worker'])"
    compare(args, lambda words: make_cli(words, run=False), [sys.executable, "-P", "-c", start, *sys.path])


def _pretrain(args: Sequence[str]) -> None:
    from perada.experiments.pretrain import main as pretrain

    pretrain(args)


def _study(args: Sequence[str]) -> None:
    from perada.experiments.studies import main as study

    try:
        study(args)
    except ModuleNotFoundError as error:  # the drawing library is an extra
        raise MisconfigurationException(str(error)) from error


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "ls": (_ls, "list the shipped recipes"),
    "cp": (_cp, "copy a recipe, to edit it"),
    "compare": (_compare, "run recipes or algorithms one after another and print one table"),
    "export": (_export, "write a run's adapters as PEFT folders"),
    "report": (_report, "print a run's metrics as tables"),
    "pretrain": (_pretrain, "train a small backbone on Fashion-MNIST"),
    "study": (_study, "repeat a small experiment of a paper; alone it lists them"),
}

HELP = """usage: perada COMMAND [options]

  fit, validate, test, predict   run a recipe: perada fit --config quickstart --federated.clients_per_round=5
{commands}

`perada COMMAND --help` tells a command's options."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Words after ``perada``; by default those of the command line.
    """
    words = list(sys.argv[1:] if args is None else args)
    listed = "\n".join(f"  {name:30} {text}" for name, (_, text) in COMMANDS.items())
    if not words or words[0] in ("-h", "--help"):
        print(HELP.format(commands=listed))
        return
    if words[0] in COMMANDS:
        COMMANDS[words[0]][0](words[1:])
    elif words[0] in LIGHTNING:
        make_cli(words)
    else:
        close = get_close_matches(words[0], [*COMMANDS, *LIGHTNING], 1)
        hint = f"did you mean {close[0]!r}?" if close else "`perada --help` lists the commands"
        raise ValueError(f"there is no command {words[0]!r}; {hint}")


def entry_point() -> None:
    """The ``perada`` program: errors about what was asked for are one line; ``PERADA_DEBUG=1`` shows tracebacks."""
    quiet_lightning()
    try:
        main()
    except (ValueError, TypeError, OSError, ArgumentError, MisconfigurationException) as error:
        if os.environ.get("PERADA_DEBUG"):
            raise
        sys.exit(f"perada: error: {printable(one_line(error))}")
