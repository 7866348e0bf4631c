# SPDX-License-Identifier: Apache-2.0
"""The command line: LightningCLI's subcommands, and ``ls``, ``cp``, ``export``, ``report``, ``compare``, ``pretrain``."""

import shutil
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jsonargparse
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger

import perada.algorithms  # noqa: F401  # short class names of algorithms work in YAML once they are imported
from perada.api import outcome, round_checkpoint
from perada.callbacks import FederatedLoop, RoundProgressBar
from perada.data import FederatedDataModule
from perada.module import FederatedClassifier
from perada.report import client_table, run_report

RECIPES = Path(__file__).parent / "recipes"
LIGHTNING = ("fit", "validate", "test", "predict")


class PeradaCLI(LightningCLI):
    """LightningCLI with the federated loop in a section of its own, and perada's defaults for the trainer."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section ``federated``; the seed and the size of the images are said once."""
        parser.add_lightning_class_args(FederatedLoop, "federated")
        parser.link_arguments("seed_everything", "federated.seed", compute_fn=int)
        parser.link_arguments("data.image_size", "model.image_size")
        parser.set_defaults(
            {
                "trainer.devices": 1,
                "trainer.num_sanity_val_steps": 0,
                "trainer.log_every_n_steps": 1,
                "trainer.enable_model_summary": False,
            }
        )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add perada's logger, progress bar and checkpoint where the recipe names none."""
        trainer = self._get(self.config_init, "trainer")
        given = trainer.callbacks or []
        given = given if isinstance(given, list) else [given]
        callbacks: list[pl.Callback] = []
        if trainer.enable_progress_bar is not False and not any(isinstance(c, pl.callbacks.ProgressBar) for c in given):
            callbacks.append(RoundProgressBar())
        if trainer.enable_checkpointing is not False and not any(isinstance(c, ModelCheckpoint) for c in given):
            callbacks.append(round_checkpoint())
        self.trainer_defaults = {"callbacks": callbacks}
        if trainer.logger in (None, True):
            kwargs["logger"] = CSVLogger(trainer.default_root_dir or ".")
        return super().instantiate_trainer(**kwargs)

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
        if config.get("ckpt_path") == "last":
            config.ckpt_path = str(last_checkpoint(Path(config.trainer.default_root_dir or ".")))
        elif config.get("ckpt_path") and not Path(config.ckpt_path).is_file():
            raise FileNotFoundError(f"ckpt_path={config.ckpt_path!r} is not there; give a checkpoint's path, or 'last'")

    def after_fit(self) -> None:
        """Print the table of clients, and say where the run is."""
        self.after_validate()
        if self.trainer.log_dir:
            print(f"Run folder: {self.trainer.log_dir}")

    def after_validate(self) -> None:
        """Print the table of clients."""
        if self.model.per_client:
            print(client_table(self.model.per_client, self.datamodule.train_sizes))

    after_test = after_validate


def last_checkpoint(root: Path) -> Path:
    """The ``last.ckpt`` written last below ``root/lightning_logs``.

    Raises:
        FileNotFoundError: If there is none.
    """
    found = sorted(root.glob("lightning_logs/*/checkpoints/last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(
            f"ckpt_path=last: there is no checkpoint below {str(root / 'lightning_logs')!r}; run `perada fit` first, or name "
            "one by its path"
        )
    return found[-1]


def recipes() -> dict[str, Path]:
    """The shipped recipes: name (path below ``recipes/`` without ending) and file."""
    return {str(path.relative_to(RECIPES).with_suffix("")): path for path in sorted(RECIPES.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A configuration file, or the shipped recipe of that name.

    Raises:
        FileNotFoundError: If there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = recipes()
    key = name.removesuffix(".yaml")
    if key not in known:
        close = get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`perada ls` lists the recipes"
        raise FileNotFoundError(f"--config {name!r} is neither a file nor a recipe; {hint}")
    return known[key]


def _with_recipes(args: Sequence[str]) -> list[str]:
    """Replace the names of recipes after ``--config`` by their files."""
    out = list(args)
    for index, word in enumerate(out):
        if word in ("--config", "-c") and index + 1 < len(out):
            out[index + 1] = str(find_recipe(out[index + 1]))
        elif word.startswith("--config="):
            out[index] = f"--config={find_recipe(word.removeprefix('--config='))}"
    return out


def make_cli(args: Sequence[str], run: bool = True) -> PeradaCLI:
    """Parse ``args``; with ``run`` the first one is a subcommand of LightningCLI, which is carried out."""
    return PeradaCLI(
        FederatedClassifier,
        FederatedDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        args=_with_recipes(args),
        run=run,
    )


def _ls(args: Sequence[str]) -> None:
    """List the shipped recipes with their first line."""
    jsonargparse.ArgumentParser(prog="perada ls", description="List the shipped recipes.").parse_args(list(args))
    width = max(map(len, recipes()))
    for name, path in recipes().items():
        print(f"{name:{width}}  {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")


def _cp(args: Sequence[str]) -> None:
    """Copy a recipe."""
    parser = jsonargparse.ArgumentParser(prog="perada cp", description="Copy a shipped recipe, to edit it.")
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
    parser = jsonargparse.ArgumentParser(prog="perada export", description="Write a run's adapters as PEFT folders.")
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    parser.add_argument(
        "--output", type=Path, required=True, help="Folder to write client_0, client_1, … and global to."
    )
    given = parser.parse_args(list(args))
    for name in ("config.yaml", "checkpoints/last.ckpt"):
        if not (given.run / name).is_file():
            raise FileNotFoundError(
                f"{str(given.run)!r} is no finished run: it has no {name}; give a run folder of `perada fit`"
            )
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    cli = make_cli(["--config", str(given.run / "config.yaml"), *quiet], run=False)
    loop = cli.loop
    cli.trainer.fit_loop.max_epochs = 0
    cli.trainer.validate(
        cli.model, cli.datamodule, ckpt_path=str(given.run / "checkpoints" / "last.ckpt"), verbose=False
    )
    print(
        f"Wrote {loop.num_clients} personal adapters and the global one to {outcome(cli.model, loop).save(given.output)}"
    )


def _report(args: Sequence[str]) -> None:
    """Print a run's rounds and clients."""
    parser = jsonargparse.ArgumentParser(prog="perada report", description="Print a run's metrics as tables.")
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    print(run_report(parser.parse_args(list(args)).run))


def _compare(args: Sequence[str]) -> None:
    from perada.compare import main as compare

    compare(args, lambda words: make_cli(words, run=False))


def _pretrain(args: Sequence[str]) -> None:
    from perada.pretrain import main as pretrain

    pretrain(args)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "ls": (_ls, "list the shipped recipes"),
    "cp": (_cp, "copy a recipe, to edit it"),
    "compare": (_compare, "run recipes or algorithms one after another and print one table"),
    "export": (_export, "write a run's adapters as PEFT folders"),
    "report": (_report, "print a run's metrics as tables"),
    "pretrain": (_pretrain, "train a small backbone on Fashion-MNIST"),
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
    """The ``perada`` program: errors about what was asked for are one line."""
    try:
        main()
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        sys.exit(f"perada: error: {error}")
