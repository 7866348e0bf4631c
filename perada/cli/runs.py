# SPDX-License-Identifier: Apache-2.0
"""The commands that run recipes: LightningCLI's own, and compare."""

import sys
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger

from perada.cli.messages import quiet_lightning
from perada.cli.parser import RecipeParser, explained, spelt_out, with_own_classes, with_proposal
from perada.cli.recipes import comparison
from perada.data import FederatedDataModule
from perada.lightning import FederatedLoop, PredictionFile
from perada.lightning.callbacks import OF_A_TRAINER, listed, own_parts
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_folder import log_options, no_trace_if_refused
from perada.lightning.strategies import check_trainer, device_defaults
from perada.privacy import ClientPrivacy, Privacy
from perada.results.report import client_table, mode_line, shift_tables
from perada.results.restore import plain_data


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

    _parsers: ClassVar[dict[object, dict[str, Any]]] = {}

    def __init__(self, *, run: bool, command: Sequence[str] = (), **kwargs: Any) -> None:
        self.runs, self.command = run, list(command)
        super().__init__(run=run, **kwargs)

    def setup_parser(self, add_subcommands: bool, *kwargs: Any) -> None:
        """Build the parser once a process: it takes longer than most command lines, and a comparison has many."""
        defaults = (add_subcommands, *device_defaults().items())
        if defaults not in self._parsers:
            before = set(vars(self))
            super().setup_parser(add_subcommands, *kwargs)
            self._parsers[defaults] = {name: value for name, value in vars(self).items() if name not in before}
        vars(self).update(self._parsers[defaults])

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
        with plain_data(self.config[subcommand].ckpt_path, self.trainer), no_trace_if_refused(self.trainer):
            super()._run_subcommand(subcommand)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's advice against giving the arguments in Python; propose what a wrong one may be."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LightningCLI's args parameter", UserWarning)
            words: list[str] = [*args]  # type: ignore[misc]  # what make_cli gives
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


def make_cli(args: Sequence[str], run: bool = True, command: Sequence[str] = ()) -> PeradaCLI:
    """Parse ``args``; with ``run`` the first one is a subcommand of LightningCLI, which is carried out.

    ``command`` is what was typed, for the run's record.
    """
    words = spelt_out(args)
    return PeradaCLI(
        model_class=FederatedClassifier,
        datamodule_class=FederatedDataModule,
        seed_everything_default=0,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_class=RecipeParser,
        parser_kwargs={"prog": "perada", "exit_on_error": False},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        args=words,
        run=run,
        command=command,
    )


def compare(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada compare``."""
    from perada.studies.compare.command import main as command

    command(parser, comparison(words), compared)


def compared(args: Sequence[str]) -> PeradaCLI:
    """A run of ``perada compare``, here or in a process of its own."""
    quiet_lightning()
    return make_cli(args, run=False)
