# SPDX-License-Identifier: Apache-2.0
"""What a run on a node of a cluster needs: it outlives its job, and has the code and the data of the other runs."""

import hashlib
import json
import os
import platform
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint

from perada.data import FederatedDataModule
from perada.lightning.trainer_attributes import datamodule_of
from perada.results.restore import damage_of
from perada.studies.compare.configured import ConfiguredRun


class OtherNodeError(ValueError):
    """A node has other code or other data than the runs it would be compared with."""


class KeptRound(Checkpoint):
    """Saves a run after every round but the last, so that it goes on from there in another job.

    This is a callback for checkpoints, so that Lightning calls it after the round was scored.

    Args:
        path: The file.
        saves: Whether to save. A private run begins again instead: a repeated round would spend more privacy.
    """

    def __init__(self, path: Path, saves: bool) -> None:
        self.path = path
        self.saves = saves

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave SIGTERM to Slurm, which sends it before it preempts a job, kills the job later, and starts it again.

        If the run ended by itself, its job would count as done.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the run, unless it is only to be scored: from here, the last round would not be scored again."""
        is_last = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        if self.saves and not is_last:
            trainer.save_checkpoint(self.path)

    def find(self) -> Path | None:
        """Return the file if there is an intact one, and remove a damaged one."""
        if not self.path.is_file():
            return None
        if damage_of(self.path):
            self.path.unlink()
            return None
        return self.path


class SameData(pl.Callback):
    """Compares the images of a run with those of the first run with the same options for them, maybe on another node.

    Args:
        folder: Folder that all nodes share, with a file for the images of each set of options.
        cli: The run.
    """

    def __init__(self, folder: Path, cli: ConfiguredRun) -> None:
        options = json.dumps(cli.config.data.as_dict(), sort_keys=True, default=str)
        self.path = folder / f"{_digest_of_text(options)}.json"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the digests of the images, or compare them.

        Raises:
            OtherNodeError: If they differ.
        """
        data = cast(FederatedDataModule, datamodule_of(trainer))
        digests = {}
        for part, content in data.fingerprint.items():
            # A digest does not reveal the names of clients.
            digests[part] = _digest_of_text(json.dumps(content, sort_keys=True, default=str))
        node = socket.gethostname()
        _write_first(self.path, {"node": node, "digests": digests})
        first = json.loads(self.path.read_text(encoding="utf-8"))
        differing = _first_difference(digests, first["digests"])
        if differing is not None:
            raise OtherNodeError(
                f"{_DATA_PARTS.get(differing, differing)} on node {node} are not those that the first "
                f"run read on node {first['node']}; give all nodes the same files, or delete "
                f"{str(self.path)!r} if you changed them on purpose"
            )


def _write_first(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file if no other process has, which may try at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    # Other processes see the complete file or none.
    with suppress(FileExistsError):
        os.link(partial, path)
    partial.unlink()


_DATA_PARTS = {
    "train": "the training images",
    "test": "the test images",
    "validation": "the validation images",
    "public": "the public images",
    "clients": "the names of clients",
    "classes": "the names of classes",
}


def package_folder() -> Path:
    """Return the folder of perada's source."""
    spec = find_spec("perada")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def code_versions() -> dict[str, str]:
    """Return the versions of what a run computes with, and a digest of perada's source."""
    digest = hashlib.sha256()
    package = package_folder()
    # Path.rglob would not follow the links to packages outside of this one.
    for folder, folders, file_names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(file_names):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(package)}\0".encode())
                digest.update(path.read_bytes())
    return {
        "perada": f"{version('perada')} ({digest.hexdigest()[:12]})",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Lightning": pl.__version__,
    }


def check_code(expected: Mapping[str, str]) -> None:
    """Raise an OtherNodeError if this machine has other versions than the one that submitted the run.

    Args:
        expected: The versions there (:func:`code_versions`).
    """
    versions = code_versions()
    differing = _first_difference(versions, expected)
    if differing is not None:
        raise OtherNodeError(
            f"node {socket.gethostname()} has {differing} {versions.get(differing)}, but the command was started with "
            f"{expected.get(differing)}; give all nodes the same environment, and start the command again after you "
            "edited code"
        )


def _first_difference(values: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """Return the first name whose value is not the same in both; None if there is none."""
    for name in dict.fromkeys([*values, *others]):
        if values.get(name) != others.get(name):
            return name
    return None


def _digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
