# SPDX-License-Identifier: Apache-2.0
"""Atomic checkpoint files with a digest of their content."""

import hashlib
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import TorchCheckpointIO

from perada.core.files import open_atomic

_MARK = b"perada-sha256:"
_COMMENT = len(_MARK) + 64
_LENGTH = struct.pack("<H", _COMMENT)  # stands before the comment of a zip archive
LAST = "last.ckpt"
PREVIOUS = "last.previous.ckpt"
"""The checkpoint that :data:`LAST` replaced, beside it."""
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


def check_whole_file(path: Path) -> None:
    """Refuse a checkpoint that is cut off or whose bytes are not those that were written, by a ValueError.

    Of one that another program wrote the checksums are compared that each tensor has in a zip archive.
    """
    damage = damage_of(path)
    if damage:
        raise ValueError(f"ckpt_path={str(path)!r} {damage}; give another, or 'last' for the newest that is whole")


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint file, to stand behind its name; ``None`` if it is as it was written."""
    with path.open("rb") as file:
        content = max(0, path.stat().st_size - len(_LENGTH) - _COMMENT)
        file.seek(content)
        end = file.read()
        if end.startswith(_LENGTH + _MARK):
            file.seek(0)
            digest = hashlib.sha256()
            while block := file.read(min(content - file.tell(), 2**22)):
                digest.update(block)
            digest.update(b"\0\0")
            written = end.removeprefix(_LENGTH + _MARK).decode(errors="replace")
            return (
                None if digest.hexdigest() == written else "is damaged: its content does not have the digest it names"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.comment or _MARK in end:
                return "is damaged: its end is not as it was written"
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        return f"is not a checkpoint, or was cut off ({' '.join(str(error).split())[:150]})"
    return None if broken is None else f"is damaged: the checksum of {broken!r} in it does not fit"


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
        file.write(_LENGTH + _MARK + hashed.digest.hexdigest().encode())
