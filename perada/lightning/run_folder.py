# SPDX-License-Identifier: Apache-2.0
"""What is in a run's folder, and where the journal of its private rounds is.

The journal is beside the checkpoints that a run writes, and beside those it came from.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.core.digests import sealed
from perada.core.files import clear
from perada.federation.federation import Federation
from perada.federation.store import Storage
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.steps import rounds_left
from perada.privacy.ledgers import JOURNAL, Journal


def run_folder(trainer: pl.Trainer) -> Path | None:
    """The run's folder; ``None`` where it has none."""
    if not trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        return None
    return Path(trainer.log_dir) if trainer.log_dir else None


@contextmanager
def no_trace_if_refused(trainer: pl.Trainer) -> Iterator[None]:
    """Remove the run folders that are made in here if it ends in an error before a run has begun.

    Loggers make their folders before anything is checked; :func:`write_description` is called after it. A folder that
    holds anything but this process's events stays: another process may have chosen the same number for its run.
    """
    found = [Path(folder) for logger in trainer.loggers if (folder := getattr(logger, "log_dir", None))]
    made = [folder for folder in found if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in made if trainer.is_global_zero else []:
            begun = {path.name for path in folder.glob("*")}
            own = {path.name for path in folder.glob(f"events.out.tfevents.*.{os.getpid()}.*")}
            with suppress(OSError):  # it holds other runs, or is another process's and not empty any more
                for name in own if begun == own else ():
                    (folder / name).unlink()
                folder.rmdir()
                folder.parent.rmdir()
        raise


def write_description(trainer: pl.Trainer, partition: dict[str, Any], config: dict[str, Any]) -> None:
    """Write who has which images, and the configuration if there is one, into the run's folder, and tell loggers."""
    if config:
        log_options(trainer, config)
    folder = run_folder(trainer)  # all processes ask, rank 0 writes
    if folder is None or not trainer.is_global_zero:
        return
    folder.mkdir(parents=True, exist_ok=True)
    runs = folder.parent  # whoever was killed may have left a file as large as a checkpoint
    clear([*runs.glob("*/checkpoints/.*.partial"), *runs.glob("*/clients/**/.*.partial"), *runs.glob("*/.*.partial")])
    (folder / "partition.json").write_text(json.dumps(sealed(partition)))
    if config:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")


def log_options(trainer: pl.Trainer, config: dict[str, Any]) -> None:
    """Tell loggers what the run was asked for; beside CSV files ``config.yaml`` says it."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(config, {})  # without its metric hp_metric
        elif not isinstance(logger, CSVLogger):
            logger.log_hyperparams(config)


def log_history(trainer: pl.Trainer, history: list[dict[str, float]]) -> None:
    """Give CSV files the rounds before a resumed one too, so that the run's folder holds them all."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            for record in history:
                values = {name: value for name, value in record.items() if name != "step"}
                logger.log_metrics({"epoch": record["round"], **values}, step=int(record["step"]) - 1)


def storage(wanted: Storage, clients_per_round: int, num_clients: int, trainer: pl.Trainer) -> Storage:
    """Where a run holds its clients' states: their files, if any, are in its folder.

    Files that only older checkpoints name are deleted where all that writes checkpoints replaces its own.
    """
    limit, folder = trainer.max_epochs, run_folder(trainer)
    return replace(
        wanted,
        folder=None if folder is None else folder / "clients",
        prune=all(isinstance(callback, RoundCheckpoint) for callback in trainer.checkpoint_callbacks),
        clients=num_clients if limit is None or limit < 0 else min(num_clients, limit * clients_per_round),
    )


def journals_of(states: dict[str, Any], checkpoint: str | Path) -> list[Path]:
    """The journals that tell what was begun after a ``checkpoint``, by the saved ``states`` of its federation."""
    saved = states.get("privacy") or {}
    folder = Path(checkpoint).absolute().parent
    before = Path(saved.get("folder") or folder)
    found = [folder / JOURNAL]
    for path in map(Path, saved.get("journals", [])):
        moved = Path(os.path.normpath(folder / os.path.relpath(path, before)))  # together with the checkpoint
        # A stranger's checkpoint may name any file, and these are written to.
        here = [
            place for place in (path, moved) if place.name == JOURNAL and place.is_file() and not place.is_symlink()
        ]
        if not here and path.parent != before:  # its own one is asked for when it is read
            rank_zero_warn(
                f"privacy: {str(path)!r} is not there, of a run that this one was resumed from: rounds that others "
                "began from it are not counted, if there are any"
            )
        found += here
    return list(dict.fromkeys(found))


def keep_journal(trainer: pl.Trainer, federation: Federation, earlier: Sequence[Path]) -> None:
    """Have private rounds written down from now on, in the folders of the trainer's checkpoint callbacks.

    What only the ``earlier`` journals know of, those of the runs that this one is resumed from, is counted.
    """
    protection = federation.protection
    if not protection.private:
        return
    begun = protection.count_begun(earlier, federation.ranks)
    if begun:
        rank_zero_warn(
            f"privacy: round {', '.join(map(str, begun))} was begun once already since this checkpoint was written; "
            "its noise has been drawn, so it is counted too"
        )
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    own = [Path(folder) / JOURNAL for folder in folders if folder and "://" not in str(folder)]
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        protection.journal = Journal(own, earlier)


def journal_rounds_to_come(trainer: pl.Trainer, federation: Federation) -> None:
    """Where no checkpoint callback names a folder, keep the journal in the default one from the first checkpoint on."""
    done = federation.rounds_done
    if trainer.training and rounds_left(trainer, done) and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        federation.protection.journal_in(Path(trainer.default_root_dir) / JOURNAL, done)
