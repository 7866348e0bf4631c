# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: atomic files with a digest, and the choice and restoring of the one that a run resumes from."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import TorchCheckpointIO

from perada.core.checks import invalid_option
from perada.data import FederatedDataModule
from perada.data.fingerprints import first_changed_client, training_fingerprint
from perada.lightning.run_fingerprint import (
    ALLOW_CLIENTS,
    ALLOW_IMAGES,
    EarlyFingerprint,
    early_difference,
)
from perada.results.restore import LAST, LENGTH, MARK, PREVIOUS, check_intact_file, newest_intact
from perada.system.files import open_atomic


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning checkpoint I/O for local disks that writes to a partial file and then renames it.

    If the process is killed or the disk is full, the file that was there before is still there. A digest of the content
    is the comment of the zip archive that a checkpoint is, so other programs read these files like any checkpoint. The
    ``last.ckpt`` that is replaced becomes ``last.previous.ckpt``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:  # noqa: ANN401  # Lightning's
        """Write a checkpoint with the digest of its bytes as the comment of the zip archive.

        It is streamed to the disk, so that no second copy is held in memory.

        Raises:
            OSError: With the name of the file.
        """
        if "://" in str(path):  # on another file system, which has no renaming
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        backup_path = target.with_name(PREVIOUS) if target.name == LAST else None
        with open_atomic(target, backup_path=backup_path) as file:
            # The digest covers the bytes to be written, not those read back: a disk that changes them must not go
            # unnoticed.
            digest = hashlib.sha256()

            def write(chunk: bytes) -> int:
                digest.update(chunk)
                return file.write(chunk)

            try:
                torch.save(checkpoint, SimpleNamespace(write=write, flush=file.flush))
            except RuntimeError as error:
                # torch raises one of its own while it handles the error of the file, which is then its context.
                raise (error.__context__ or error) from None
            # A zip archive ends in the length of its comment in two bytes, here 0, and the comment.
            file.seek(-2, os.SEEK_END)
            file.write(LENGTH + MARK + digest.hexdigest().encode())

    def load_checkpoint(self, path: str | Path, *options: Any, **others: Any) -> dict[str, Any]:
        """Read a checkpoint, and raise a ValueError if it is damaged."""
        if "://" not in str(path):
            check_intact_file(Path(path))
        return super().load_checkpoint(path, *options, **others)


class RoundCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after every round, by default into the run's ``checkpoints``.

    The one before becomes ``last.previous.ckpt``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(
            dirpath,
            filename=LAST.removesuffix(".ckpt"),
            save_top_k=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, so that a resumed run writes into its own folder."""
        return {}


def find_checkpoint(
    ckpt_path: str | None,
    root: Path,
    fingerprint: EarlyFingerprint | None = None,
    allowed: Sequence[str] = (),
    trains: bool = True,
) -> str | None:
    """Find a checkpoint by its path or, for ``last``, the newest intact one below ``root``.

    Args:
        ckpt_path: The path, ``last`` or None.
        root: Folder with ``lightning_logs``.
        fingerprint: What identifies the run before set-up. ``last`` is then the newest checkpoint that belongs to the
            run, and a checkpoint of another run is rejected at once.
        allowed: Options that may differ.
        trains: Whether training resumes, so that options are compared.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If it is not a checkpoint, truncated, damaged, or of another run.
    """
    if ckpt_path is None:
        return None
    if not isinstance(ckpt_path, str | Path):
        raise invalid_option("ckpt_path", ckpt_path, "a checkpoint's path or 'last'")
    if ckpt_path == "last":
        return str(_find_last(root, fingerprint, allowed, trains))
    path = Path(ckpt_path)
    if not path.is_file():
        raise FileNotFoundError(f"ckpt_path={ckpt_path!r} does not exist; pass the path of a checkpoint, or 'last'")
    check_intact_file(path)
    if fingerprint is not None:
        difference = early_difference(path, fingerprint, allowed, trains)
        if difference is not None:
            raise ValueError(difference)
    return ckpt_path


def _find_last(root: Path, fingerprint: EarlyFingerprint | None, allowed: Sequence[str], trains: bool) -> Path:
    """Return the newest intact checkpoint below ``root``; with a fingerprint, the newest one of that run."""
    folder = root / "lightning_logs"
    paths = list(folder.glob("*/checkpoints/**/*.ckpt"))
    rejected: dict[Path, str] = {}

    def belongs_to_run(path: Path) -> bool:
        if fingerprint is None:
            return True
        difference = early_difference(path, fingerprint, allowed, trains)
        if difference is not None:
            rejected[path] = difference
        return difference is None

    newest = newest_intact(paths, belongs_to_run)
    if newest is not None:
        return newest
    if rejected:
        # The newest is tried first.
        path, difference = next(iter(rejected.items()))
        raise ValueError(
            f"ckpt_path=last: no checkpoint below {str(folder)!r} belongs to this run; the newest, {str(path)!r}, was "
            f"rejected: {difference}"
        )
    what = "intact checkpoint" if paths else "checkpoint"
    raise FileNotFoundError(
        f"ckpt_path=last: there is no {what} below {str(folder)!r}; train first, or pass the path of a checkpoint"
    )


def set_resume_point(checkpoint: dict[str, Any], rounds: int, step: int, max_epochs: int) -> None:
    """Change the progress in a Lightning checkpoint so that training resumes after ``rounds`` rounds.

    A checkpoint that was written within a round, or between the end of a round and the end of its epoch, has counted
    part of an epoch. Its clients' states are those of the last complete round.

    Args:
        checkpoint: Lightning's checkpoint; its entry ``loops`` is changed.
        rounds: Number of complete rounds.
        step: The last optimiser step of these rounds.
        max_epochs: The trainer's limit of rounds; negative for none.

    Raises:
        ValueError: If training cannot resume from the checkpoint, or more rounds are complete than are requested.
    """
    if "loops" not in checkpoint:
        raise ValueError(
            "the checkpoint was saved with save_weights_only=True and can only be evaluated; resume from a full "
            "checkpoint"
        )
    if rounds > max_epochs >= 0:
        raise ValueError(
            f"the checkpoint was saved after {rounds} rounds, more than max_epochs={max_epochs}; set max_epochs to at "
            f"least {rounds}"
        )
    # The names of the counters are private to Lightning (2.6.6). Each counts "total" and, of an epoch, "current".
    progress = checkpoint["loops"]["fit_loop"]
    batches = progress["epoch_loop.batch_progress"]
    _set_counts(progress["epoch_progress"], total=rounds, current=rounds)
    _set_counts(batches, total=step, current=0)
    _set_counts(progress["epoch_loop.manual_optimization.optim_step_progress"], total=step, current=0)
    batches["is_last_batch"] = False
    progress["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def _set_counts(progress: dict[str, Any], total: int, current: int) -> None:
    """Set every counter of a saved Lightning progress, such as ``ready`` and ``completed``."""
    progress["total"] = dict.fromkeys(progress["total"], total)
    progress["current"] = dict.fromkeys(progress["current"], current)


def remap_clients(saved: dict[str, Any], data: FederatedDataModule, allowed: Sequence[str]) -> dict[str, Any]:
    """Renumber a checkpoint's clients for a run that has more clients.

    Clients are matched by name if both runs have names, and otherwise by number. New clients start from the global
    state. Scores and fine-tuned models are left out, since they belong to the former clients only.

    Args:
        saved: The checkpoint's content.
        data: The data of the run that resumes.
        allowed: The run's ``resume_allow``.

    Returns:
        The content for the run; ``saved`` itself if the number of clients is the same.

    Raises:
        ValueError: If a former client is missing or has other images, or the run is private.
    """
    former_count = saved["belongs"]["number of clients"]
    if ALLOW_CLIENTS not in allowed or former_count == data.num_clients:
        return saved
    former_names: Sequence[int | str] | None = saved["info"].get("clients")
    client_names: Sequence[int | str] | None = data.client_names
    if former_names is None or client_names is None:
        former_names = range(former_count)
        client_names = range(data.num_clients)
    number_of = {name: number for number, name in enumerate(client_names)}
    former_sizes = saved["belongs"]["clients' numbers of images"]
    new_numbers = []
    for name, former_size in zip(former_names, former_sizes, strict=True):
        num_images: int | str = "none"
        if name in number_of:
            num_images = data.train_sizes[number_of[name]]
        if former_size != num_images:
            raise ValueError(
                f"client {name} had {former_size} training images when the checkpoint was written but has {num_images} "
                "now; resume with all original clients and their original images, and any new clients"
            )
        new_numbers.append(number_of[name])
    if ALLOW_IMAGES not in allowed:
        # The sizes are compared first, since hashing large data takes a while.
        changed_client = first_changed_client(saved["data"]["train"], training_fingerprint(data.checked, new_numbers))
        if changed_client is not None:
            raise ValueError(
                f"the training images or labels of client {former_names[changed_client]} have changed since the "
                "checkpoint was written; resume with all original clients and their original images, and any new "
                f"clients, or accept the change with resume_allow=[{ALLOW_CLIENTS!r}, {ALLOW_IMAGES!r}]"
            )
    ledgers = saved["federation"]["privacy"] or {}
    if ledgers.get("images") or ledgers.get("clients"):
        raise ValueError(
            f"the checkpoint is from a private run of {former_count} clients, but this run has {data.num_clients}: "
            "its noise and its ledgers cover only the original clients; start a new run, or add the "
            "new clients with `perada clients add RUN --help`"
        )
    return saved | {
        "federation": saved["federation"] | {"tuned": None, "numbers": new_numbers},
        "metrics": {"rounds": saved["metrics"]["rounds"], "clients": {}},
        "scores": {},
        "shifted": {},
    }
