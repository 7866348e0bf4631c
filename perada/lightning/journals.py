# SPDX-License-Identifier: Apache-2.0
"""Locations of a private run's journal: next to the checkpoints that it writes and those that it was resumed from."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.lightning.run_context import RunContext
from perada.lightning.trainer_attributes import is_dev_run
from perada.privacy.journal import JOURNAL, Journal


def find_journals(saved_states: dict[str, Any], checkpoint: str | Path) -> list[Path]:
    """Return the journals in which rounds may be recorded that were begun after a checkpoint was written.

    One is beside the checkpoint. Those of the runs that its run was resumed from are at their recorded paths or, where
    all of them were moved together, at the same paths relative to the checkpoint.

    Args:
        saved_states: The saved states of the checkpoint's federation.
        checkpoint: Path of the checkpoint.
    """
    saved = saved_states.get("privacy") or {}
    folder = Path(checkpoint).absolute().parent
    former_folder = Path(saved.get("folder") or folder)
    journals = [folder / JOURNAL]
    for path in map(Path, saved.get("journals", [])):
        moved = Path(os.path.normpath(folder / os.path.relpath(path, former_folder)))
        # Journals are written to, and a checkpoint from elsewhere may name any file.
        files = [candidate for candidate in (path, moved) if candidate.name == JOURNAL and candidate.is_file()]
        existing = [candidate for candidate in files if not candidate.is_symlink()]
        # If the journal of the checkpoint's own run is missing, reading it raises an error.
        if not existing and path.parent != former_folder:
            rank_zero_warn(
                f"{str(path)!r} is missing, the journal of a private run that this one was resumed from: any rounds "
                "that other runs began from it are not counted"
            )
        journals += existing
    return list(dict.fromkeys(journals))


def keep_journal(context: RunContext, earlier: Sequence[Path]) -> None:
    """Record private rounds in the folders of the trainer's checkpoint callbacks from now on. A collective.

    Rounds that only the ``earlier`` journals know of, those of the runs that this one is resumed from, are counted as
    spent.
    """
    trainer = context.trainer
    protection = context.federation.protection
    if not protection.private:
        return
    begun = protection.count_begun(earlier, context.federation.ranks)
    if begun:
        rounds = ", ".join(str(round + 1) for round in begun)
        options = context.settings.privacy_options
        rank_zero_warn(
            f"{options}: round {rounds} was already begun once after this checkpoint was written; its noise has been "
            "drawn, so it is counted too"
        )
    paths = []
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback.dirpath and "://" not in str(callback.dirpath):  # on a local disk
            paths.append(Path(callback.dirpath) / JOURNAL)
    if not is_dev_run(trainer):
        protection.journal = Journal(paths, earlier)


def keep_default_journal(context: RunContext) -> None:
    """Record private rounds in the trainer's default folder, if no checkpoint callback names a folder.

    That is known when the first checkpoint is written: before it, nothing can be resumed from.
    """
    trainer = context.trainer
    federation = context.federation
    if is_dev_run(trainer) or not trainer.is_global_zero:
        return
    if trainer.training and context.has_rounds_left():
        federation.protection.journal_in(Path(trainer.default_root_dir) / JOURNAL, federation.rounds_done)
