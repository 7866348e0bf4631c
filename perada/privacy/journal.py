# SPDX-License-Identifier: Apache-2.0
"""The journal of a private run: a line for each round, written before any noise of the round is drawn."""

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perada.core.checks import OptionError
from perada.core.files import opener, sync

JOURNAL = "privacy_ledger.jsonl"
"""Name of the file next to the checkpoints."""
FIELDS = frozenset({"id", "run", "round", "images", "clients"})
"""Keys of an entry: ids of the round and of the run, number of the round, and its costs for images and clients."""
CUT = b" #cut"
"""Mark at the end of a line that a crash truncated."""


class Journal:
    """Files with a line of JSON for each round that was begun.

    Args:
        paths: Files of this run, which must be writable.
        earlier_paths: Files of the runs from which it was resumed. They are written if possible, since another run that
            is resumed from there must count the rounds of this one too.
    """

    def __init__(self, paths: Iterable[Path], earlier_paths: Iterable[Path] = ()) -> None:
        self.paths = list(dict.fromkeys(path.absolute() for path in paths))
        earlier = dict.fromkeys(path.absolute() for path in earlier_paths)
        self.earlier_paths = [path for path in earlier if path not in self.paths]

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry to all files, and wait until it is on disk.

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
    is_new = not path.exists()
    with open(path, "ab+", opener=opener()) as file:
        # The file is opened at its end.
        file.seek(max(0, file.tell() - 1))
        last_byte = file.read()
        if last_byte not in (b"", b"\n"):
            line = CUT + b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        # Otherwise a power failure may take the name of the file, and the rounds in it.
        sync([path.parent])


def read_journals(paths: Iterable[Path], run: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a run, and of the runs that were resumed from it, by their ids.

    A truncated line is left out: its round did not begin, since the line was not on disk.

    Args:
        paths: Files of journals. Those that do not exist, and links, are skipped.
        run: Id of the run.

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
