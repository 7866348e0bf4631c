# SPDX-License-Identifier: Apache-2.0
"""What private rounds cost, on disk before they are trained, so that no crash makes a ledger forget one.

A checkpoint knows the rounds up to its own. What was begun after it, and was lost with the process, has been drawn from
the generator all the same: whoever resumes draws again, and both are counted.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

JOURNAL = "privacy_ledger.jsonl"
"""Name of the file, beside the checkpoints."""
FIELDS = frozenset({"id", "run", "round", "images", "clients", "noise_multiplier"})
"""What a line says: of which run it is, and the costs of a round by client."""
CUT = b" #cut"
"""Put behind a line that a crash cut off."""


def _no_link(path: str, flags: int) -> int:
    """Open a file; with ``OSError`` if a symbolic link stands in its place."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


class Journal:
    """Files with a line of JSON for every round that was begun.

    Those of this run, ``own``, must be writable; ``others``, of the runs that it is resumed from, are to know of its
    rounds too.
    """

    def __init__(self, own: Iterable[Path], others: Iterable[Path] = ()) -> None:
        self.own = list(dict.fromkeys(path.absolute() for path in own))
        self.others = [path for path in dict.fromkeys(path.absolute() for path in others) if path not in self.own]

    def write(self, entry: dict[str, Any]) -> list[Path]:
        """Add an entry to every file, and give those of ``others`` that could not be written; it is then on disk.

        An OSError if one of ``own`` cannot be written.
        """
        lost = []
        for path in (*self.own, *self.others):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab+", opener=_no_link) as file:
                    file.seek(max(0, file.tell() - 1))
                    cut = file.read() not in (b"", b"\n")  # by a crash
                    file.write((CUT + b"\n") * cut + json.dumps(entry).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                if path in self.own:
                    raise OSError(
                        f"privacy: the round cannot be written down in {str(path)!r} ({error}), and is not begun; make "
                        "room or give another folder"
                    ) from error
                lost.append(path)
        return lost


def read_journals(paths: Iterable[Path], run: str) -> dict[str, dict[str, Any]]:
    """The entries of one run, and of those resumed from it, by their ``id``; a line that was cut off was never begun.

    A ValueError if a whole line of a file is no entry.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() and not path.is_symlink() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") or line.endswith(CUT + b"\n"):
                continue
            try:
                entry = json.loads(line)
                if not FIELDS <= set(entry):
                    raise TypeError(entry)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"privacy: line {number} of {str(path)!r} is damaged, so that it cannot be known what was spent; "
                    "restore the file from a copy, or start anew"
                ) from error
            if entry["run"] == run:
                found[entry["id"]] = entry
    return found
