# SPDX-License-Identifier: Apache-2.0
"""The journal of a private run: one line per round begun, written before anything in that round is drawn."""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perada.core.checks import OptionError
from perada.core.files import opener

JOURNAL = "privacy_ledger.jsonl"
"""Name of the file next to the checkpoints."""
FIELDS = frozenset({"id", "run", "round", "images", "clients"})
"""Keys of an entry: ids of the round and of the run, the round's number, and its costs for images and clients."""
CUT = b" #cut"
"""Appended to a line that a crash cut off."""


class Journal:
    """Files with one line of JSON per round begun.

    Args:
        paths: Files of this run. They must be writable.
        earlier_paths: Files of the runs that it was resumed from. Whoever resumes from there, too, has to count its
            rounds, so they are written if possible.
    """

    def __init__(self, paths: Iterable[Path], earlier_paths: Iterable[Path] = ()) -> None:
        self.paths = list(dict.fromkeys(path.absolute() for path in paths))
        earlier = dict.fromkeys(path.absolute() for path in earlier_paths)
        self.earlier_paths = [path for path in earlier if path not in self.paths]

    def write(self, entry: dict[str, Any]) -> None:
        """Add an entry to every file, and wait until it is on disk.

        Raises:
            OSError: If a file of this run cannot be written.
        """
        line = json.dumps(entry).encode() + b"\n"
        for path in (*self.paths, *self.earlier_paths):
            try:
                _append_line(path, line)
            except OSError as error:
                if path in self.paths:
                    raise OSError(
                        f"privacy: the round cannot be recorded in {str(path)!r} ({error}), so it is not begun; free "
                        "disk space or choose a different folder"
                    ) from error
                unaware = "cannot be written: a run resumed from there would not count this round"
                warnings.warn(f"privacy: {str(path)!r} {unaware}", stacklevel=2)


def _append_line(path: Path, line: bytes) -> None:
    """Append a line to a file, and mark the previous line if a crash truncated it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+", opener=opener()) as file:
        file.seek(max(0, file.tell() - 1))
        last_byte = file.read()
        if last_byte not in (b"", b"\n"):
            line = CUT + b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_journals(paths: Iterable[Path], run: str) -> dict[str, dict[str, Any]]:
    """Return the entries of one run, and of the runs resumed from it, by their ids.

    A line that was cut off is left out: its round was never begun.

    Raises:
        ValueError: If a complete line of a file is not an entry.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        if not path.is_file() or path.is_symlink():
            continue
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n") or line.endswith(CUT + b"\n"):
                continue
            try:
                entry = json.loads(line)
                if not FIELDS <= set(entry):
                    raise TypeError(entry)
            except (ValueError, TypeError) as error:
                raise OptionError(
                    f"privacy: line {number} of {str(path)!r} is damaged, so the spent budget is unknown; restore the "
                    "file from a copy, or start a new run",
                    name="privacy",
                ) from error
            if entry["run"] == run:
                entries[entry["id"]] = entry
    return entries
