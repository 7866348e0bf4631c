# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is written to it and to loggers, and where its clients' files are."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from perada.federation.settings import Storage
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.run_context import RunContext, log_folder
from perada.results.overwriting import foreign_file, is_run_file
from perada.results.run_file import RUN_FILE
from perada.system.digests import sealed
from perada.system.files import clear

PARTIAL_FILES = ("*/checkpoints/.*.partial", "*/clients/**/.*.partial", "*/.*.partial")
"""Files in and next to a run's folder that a killed process was writing."""
CONFIG_FILE = "config.yaml"
_CONFIG_HEADER = "# perada\n"
_CONFIG_HEADERS = (_CONFIG_HEADER.encode(), b"# pytorch_lightning==")
"""Beginnings of the ``config.yaml`` of runs. The second one is LightningCLI's."""


@contextmanager
def discard_folder_on_rejection(trainer: pl.Trainer) -> Iterator[None]:
    """Delete the run folders that loggers make in a ``with`` statement if it raises before the run has begun.

    Loggers make their folders before anything is checked; :func:`write_description` is called after it. A folder that
    contains anything but event files of this process is kept: another process may have chosen the same number for its
    run.
    """
    folders = []
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if folder and not Path(folder).exists():
            folders.append(Path(folder))
    try:
        yield
    except BaseException:
        if trainer.is_global_zero:
            for folder in folders:
                _delete_if_unused(folder)
        raise


def _delete_if_unused(folder: Path) -> None:
    """Delete a run folder with no files except this process's events, and its parent folder if that is then empty."""
    if all(path.match(f"events.out.tfevents.*.{os.getpid()}.*") for path in folder.glob("*")):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # it contains other runs
            folder.parent.rmdir()


def check_run_folder(trainer: pl.Trainer) -> None:
    """Check that perada wrote the files that a run would replace in its folder, if there are any.

    Loggers choose a new folder for each run by default, but a folder may be set, and some loggers have only one.

    Raises:
        FileExistsError: If it did not write one of them.
    """
    folder = log_folder(trainer)
    if folder is None:
        return
    run_file = folder / RUN_FILE
    if run_file.is_file() and not is_run_file(run_file):
        raise foreign_file(run_file)
    config_file = folder / CONFIG_FILE
    if config_file.is_symlink():
        raise foreign_file(config_file)
    if config_file.is_file() and not config_file.read_bytes().startswith(_CONFIG_HEADERS):
        raise foreign_file(config_file)


def write_description(context: RunContext, config: dict[str, Any]) -> None:
    """Write the partition and the configuration into the run's folder, and pass the configuration to loggers.

    Args:
        context: The run.
        config: The configuration; empty if another writes it.
    """
    if config:
        log_options(context.trainer, config)
    folder = context.folder()
    if folder is None:
        return
    clear(path for pattern in PARTIAL_FILES for path in folder.parent.glob(pattern))
    (folder / "partition.json").write_text(json.dumps(sealed(context.data.partition_dict())))
    if config:
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / CONFIG_FILE).write_text(f"{_CONFIG_HEADER}{text}", encoding="utf-8")


def log_options(trainer: pl.Trainer, config: dict[str, Any]) -> None:
    """Pass the configuration to all loggers except CSV loggers, whose folder has it as ``config.yaml``."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(config, {})  # without metrics, or it would log one named hp_metric
        elif not isinstance(logger, CSVLogger):
            logger.log_hyperparams(config)


def log_history(trainer: pl.Trainer, history: list[dict[str, float]]) -> None:
    """Write the rounds before the resumed one into CSV files, so that the run's folder has all rounds."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            for record in history:
                metrics = {name: value for name, value in record.items() if name != "step"}
                # Loggers count steps from 0.
                logger.log_metrics({"epoch": record["round"], **metrics}, step=int(record["step"]) - 1)


def client_storage(requested: Storage, clients_per_round: int | None, num_clients: int, trainer: pl.Trainer) -> Storage:
    """Return the store of a run's client states; its files, if any, are in the run's folder."""
    run_folder = log_folder(trainer)
    # Files that only older checkpoints refer to are deleted only if nothing keeps an older checkpoint.
    replaces_checkpoints = all(isinstance(callback, RoundCheckpoint) for callback in trainer.checkpoint_callbacks)
    stored_clients = num_clients
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        stored_clients = min(num_clients, trainer.max_epochs * (clients_per_round or num_clients))
    return replace(
        requested,
        folder=None if run_folder is None else run_folder / "clients",
        prune=replaces_checkpoints,
        num_clients=stored_clients,
    )
