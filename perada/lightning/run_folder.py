# SPDX-License-Identifier: Apache-2.0
"""What is in a run's folder, and where the journal of its private rounds is.

The journal is beside the checkpoints that a run writes, and beside those it came from.
"""

import json
import os
import shutil
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
from perada.federation.settings import Storage
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.parts import Parts, run_folder
from perada.privacy.protection import JOURNAL, Journal


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
            if all(path.match(f"events.out.tfevents.*.{os.getpid()}.*") for path in folder.glob("*")):
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):  # it holds other runs
                    folder.parent.rmdir()
        raise


def write_description(parts: Parts, config: dict[str, Any]) -> None:
    """Write who has which images, and the configuration if there is one, into the run's folder, and tell loggers."""
    if config:
        log_options(parts.trainer, config)
    folder = parts.folder()
    if folder is None:
        return
    left = ("*/checkpoints/.*.partial", "*/clients/**/.*.partial", "*/.*.partial")  # by whoever was killed
    clear(path for pattern in left for path in folder.parent.glob(pattern))
    (folder / "partition.json").write_text(json.dumps(sealed(parts.data.partition_dict())))
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


def store_of(wanted: Storage, clients_per_round: int | None, num_clients: int, trainer: pl.Trainer) -> Storage:
    """Where a run holds its clients' states: their files, if any, are in its folder.

    Files that only older checkpoints name are deleted where all that writes checkpoints replaces its own.
    """
    limit, folder, drawn = trainer.max_epochs, run_folder(trainer), clients_per_round or num_clients
    return replace(
        wanted,
        folder=None if folder is None else folder / "clients",
        prune=all(isinstance(callback, RoundCheckpoint) for callback in trainer.checkpoint_callbacks),
        clients=num_clients if limit is None or limit < 0 else min(num_clients, limit * drawn),
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
        places = [place for place in (path, moved) if place.name == JOURNAL and place.is_file()]
        here = [place for place in places if not place.is_symlink()]
        if not here and path.parent != before:  # its own one is asked for when it is read
            rank_zero_warn(
                f"privacy: {str(path)!r} is not there, of a run that this one was resumed from: rounds that others "
                "began from it are not counted, if there are any"
            )
        found += here
    return list(dict.fromkeys(found))


def keep_journal(parts: Parts, earlier: Sequence[Path]) -> None:
    """Have private rounds written down from now on, in the folders of the trainer's checkpoint callbacks.

    What only the ``earlier`` journals know of, those of the runs that this one is resumed from, is counted.
    """
    trainer, protection = parts.trainer, parts.federation.protection
    if not protection.private:
        return
    begun = protection.count_begun(earlier, parts.federation.ranks)
    if begun:
        rounds = ", ".join(str(round + 1) for round in begun)
        rank_zero_warn(
            f"privacy: round {rounds} was begun once already since this checkpoint was written; its noise has been "
            "drawn, so it is counted too"
        )
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    own = [Path(folder) / JOURNAL for folder in folders if folder and "://" not in str(folder)]
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        protection.journal = Journal(own, earlier)


def journal_rounds_to_come(parts: Parts) -> None:
    """Where no checkpoint callback names a folder, keep the journal in the default one from the first checkpoint on."""
    trainer, federation = parts.trainer, parts.federation
    if trainer.training and parts.rounds_left() and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        federation.protection.journal_in(Path(trainer.default_root_dir) / JOURNAL, federation.rounds_done)
