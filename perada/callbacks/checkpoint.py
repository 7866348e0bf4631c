# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run is resumed from."""

import zipfile
from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint


class RoundCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after every round, in place of the one before.

    Args:
        dirpath: Folder; by default ``checkpoints`` in the run's.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(
            dirpath, filename="last", save_top_k=1, save_on_train_epoch_end=True, enable_version_counter=False
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run writes into its own folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing was saved."""


def newest_checkpoint(root: Path) -> Path:
    """The checkpoint written last below ``root/lightning_logs``, whatever its name.

    Raises:
        FileNotFoundError: If there is none.
    """
    found = sorted(root.glob("lightning_logs/*/checkpoints/**/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise FileNotFoundError(
            f"ckpt_path=last: there is no checkpoint below {str(root / 'lightning_logs')!r}; train first, or name one "
            "by its path"
        )
    return found[-1]


def find_checkpoint(ckpt_path: str | None, root: Path) -> str | None:
    """The path of a checkpoint asked for as ``last`` or by its path.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it is no checkpoint, or only the beginning of one.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        return str(newest_checkpoint(root))
    if not Path(ckpt_path).is_file():
        raise FileNotFoundError(f"ckpt_path={ckpt_path!r} is not there; give a checkpoint's path, or 'last'")
    if not zipfile.is_zipfile(ckpt_path):
        raise ValueError(f"ckpt_path={ckpt_path!r} is no checkpoint, or was cut off; give another, or 'last'")
    return ckpt_path
