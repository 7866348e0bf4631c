# SPDX-License-Identifier: Apache-2.0
"""Atomic checkpoint files with a digest of their content."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import TorchCheckpointIO

from perada.core.files import open_atomic
from perada.results.checkpoints import LAST, LENGTH, MARK, PREVIOUS, check_whole_file

REMEDY = "fix this, and resume with ckpt_path=last, or train again if no round was saved"
"""After an error of the disk."""


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints on this machine's disks, written beside their place and put there by one renaming.

    A process that is killed, or a disk that is full, leaves the file before as it was. A digest of the content stands
    in the comment of the zip archive that a checkpoint is, so other programs read these files as they read any. The
    ``last.ckpt`` that is replaced becomes ``last.previous.ckpt``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:  # noqa: ANN401  # Lightning's
        """Write a checkpoint; an OSError names the file."""
        if "://" in str(path):  # of another file system, which has ways of its own
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            _write(checkpoint, Path(path))
        except OSError as error:
            what = f"the checkpoint {str(path)!r} could not be written"
            raise OSError(error.errno, f"{what}: {error.strerror or error}; {REMEDY}") from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; a ValueError says so if it is damaged."""
        if "://" not in str(path):
            check_whole_file(Path(path))
        return super().load_checkpoint(path, map_location, weights_only)


def write_whole(trainer: pl.Trainer) -> None:
    """Have a trainer write its checkpoints so, unless it was given a way of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpointIO()


class _Hashed:
    """A file that is written from its beginning to its end, with the digest of its bytes.

    torch's writer makes an error of its own of what ``write`` raises: so the first OSError is kept, and nothing is
    written after it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write some more."""
        if self.error is None:
            try:
                self.file.write(content)
                self.digest.update(content)
            except OSError as error:
                self.error = error
        return len(content)

    def flush(self) -> None:
        """Nothing to do: the file is flushed at its end."""


def _write(checkpoint: dict[str, Any], target: Path) -> None:
    """Put a checkpoint in its place, as a zip archive with the digest of its bytes as its comment.

    It goes to the disk as it is made: no copy of it is held in memory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(target, former=target.with_name(PREVIOUS) if target.name == LAST else None) as file:
        hashed = _Hashed(file)
        torch.save(checkpoint, hashed)  # type: ignore[arg-type]  # it needs write and flush
        if hashed.error is not None:
            raise hashed.error
        file.seek(-2, os.SEEK_END)  # the length of the comment, which was 0
        file.write(LENGTH + MARK + hashed.digest.hexdigest().encode())
