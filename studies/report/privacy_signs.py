# SPDX-License-Identifier: Apache-2.0
"""Signs in a run's folder that the run was private: its journal, its loggers' options, and its checkpoints.

A copied folder may lack ``run.json`` and ``config.yaml``. Its scores must not be shown if another file shows that they
are private.
"""

from pathlib import Path
from typing import Any

import yaml

from perada.deploy.server import SERVER_STATE
from perada.deploy.server.progress import read_run_progress
from perada.privacy.journal import JOURNAL

_JOURNAL_FILES = f"{Path(JOURNAL).stem}*"
"""The journal, its head, and copies of them."""
_LOGGERS_OPTIONS = "hparams.yaml"
"""File in which Lightning's loggers keep the configuration."""
_LOGS_FOLDER = "lightning_logs"
_SECTIONS = ("privacy", "client_privacy")
"""Sections of a configuration that set a level of privacy."""


def sets_privacy(config_text: str) -> bool | None:
    """Return whether the text of a ``config.yaml`` sets a level of privacy, or cannot be read, so that it may.

    None if it has no sections, such as an empty file, so that this is unknown.
    """
    try:
        content = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return True
    if not isinstance(content, dict):
        return None
    return any(content.get(section) not in (None, False) for section in _SECTIONS)


def shows_privacy(folder: Path) -> bool:
    """Return whether a folder has the journal of a private run, or is that of a deployed run with client privacy."""
    if any(folder.rglob(_JOURNAL_FILES)):
        return True
    if not (folder / SERVER_STATE).is_file():
        return False
    progress = read_run_progress(folder)
    return progress.client_level is not None


def may_be_private(folder: Path) -> bool:
    """Return whether further files show privacy, for a folder that has neither a record nor a configuration.

    These are the options that a logger kept, the journal of a run without checkpoints, which is in the trainer's
    folder, and the checkpoints. One that cannot be read counts as private.
    """
    options_file = folder / _LOGGERS_OPTIONS
    if options_file.is_file() and sets_privacy(options_file.read_text(encoding="utf-8", errors="replace")):
        return True
    logs = folder.resolve().parent
    if logs.name == _LOGS_FOLDER and (logs.parent / JOURNAL).exists():
        return True
    return any(_is_private_checkpoint(path) for path in sorted(folder.rglob("*.ckpt")))


def _is_private_checkpoint(path: Path) -> bool:
    """Return whether a checkpoint is that of a private run, or cannot be read."""
    # Importing torch takes longer than drawing a page, so most pages do without.
    import torch

    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return bool(content["perada"]["info"]["privacy"])
    except Exception:  # whatever a damaged file causes
        return True
