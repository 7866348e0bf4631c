# SPDX-License-Identifier: Apache-2.0
"""Checks that saved runs and exported models replace only files that perada wrote.

perada writes no links, so the target of a link is not read, which may be a file of somebody else.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from perada.results.run_file import RUN_FILE, STATE_FILE, TYPICAL_FILE, finish_interrupted_move
from perada.system.digests import SUMS_FILE

MODEL_README = re.compile(r"# .* of a run of perada\n")
"""First line of the README of an exported model."""
_RUN_KEYS = {"format", "num_clients", "info", "metrics"}
_BEGINNING_OF_RUN = re.compile(rb'\{\s*"(sha256|format)":')
_ADAPTER_FOLDER = re.compile(r"(client|global)(_\d+)?")
_RUN_FILES = re.compile(rf"adapter_config\.json|backbone\.safetensors|{STATE_FILE.pattern}")
"""Names of the files of a saved run, except for its README, in which users may write."""
_ADAPTER_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "backbone.safetensors",
    "config.json",
    TYPICAL_FILE,
    SUMS_FILE,
)
"""Names of the files of an adapter's folder, except for its README."""


def check_saved_run(folder: Path) -> None:
    """Check that a run may be saved to a folder: that it has no file of such a name that perada did not write.

    Raises:
        FileExistsError: If it has one.
    """
    if not folder.is_dir():
        return
    # What a killed process has left is complete after this.
    finish_interrupted_move(folder)
    run_file = folder / RUN_FILE
    if run_file.exists():
        if not is_run_file(run_file):
            raise foreign_file(run_file)
        return
    for file in _files_of_run(folder):
        raise foreign_file(file)


def _files_of_run(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder without ``run.json`` that a saved run would replace, and perada did not write."""
    adapters = [path for path in folder.iterdir() if path.is_dir() and _ADAPTER_FOLDER.fullmatch(path.name)]
    # The export of a single client writes no run.json, but its folder, and the backbone beside it.
    exported = [path for path in (folder, *adapters) if _has_sums(path)]
    if not exported:
        yield from (path for path in sorted(folder.iterdir()) if _RUN_FILES.fullmatch(path.name))
    for path in adapters:
        if path not in exported:
            yield from (path / name for name in _ADAPTER_FILES if (path / name).exists())


def _has_sums(folder: Path) -> bool:
    """Return whether a folder is an adapter's, with the list of digests that perada writes."""
    sums = folder / SUMS_FILE
    if folder.is_symlink() or sums.is_symlink():
        return False
    return sums.is_file() and "  adapter_model.safetensors\n" in sums.read_text(encoding="utf-8", errors="replace")


def is_run_file(path: Path) -> bool:
    """Return whether a ``run.json`` is one of perada, which may be damaged or of another release."""
    if path.is_symlink():
        return False
    content = path.read_bytes()
    try:
        entries = json.loads(content)
    except ValueError:
        # A damaged one begins like an intact one.
        return _BEGINNING_OF_RUN.match(content) is not None
    return isinstance(entries, dict) and len(_RUN_KEYS & entries.keys()) > 1


def check_exported_model(folder: Path, files: Iterable[str], readme_name: str = "README.md") -> None:
    """Check that a model may be exported to a folder: that its files replace only those of an earlier export.

    The folder of a saved run has a README too, in which users may write.

    Args:
        folder: The folder.
        files: Paths of the files in it.
        readme_name: Path of the README in it.

    Raises:
        FileExistsError: If they would replace another README, or a file without a README.
    """
    readme = folder / readme_name
    if readme.exists():
        if readme.is_symlink():
            raise foreign_file(readme)
        if MODEL_README.match(readme.read_text(encoding="utf-8", errors="replace")) is None:
            raise FileExistsError(
                f"{str(readme)!r} is not the README of an exported model, so it is not replaced; choose a different "
                "folder, or move it away"
            )
        return
    for name in files:
        if (folder / name).exists():
            raise foreign_file(folder / name)


def foreign_file(path: Path) -> FileExistsError:
    """Return the error for a file that would be replaced, and that perada did not write."""
    reason = "is a link" if path.is_symlink() else "was not written by perada"
    return FileExistsError(f"{str(path)!r} {reason}, so it is not replaced; choose a different folder, or move it away")
