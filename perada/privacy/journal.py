# SPDX-License-Identifier: Apache-2.0
"""The journal of a private run: a line for each round, written before any noise of the round is drawn.

Lines form a chain: each has the digest of the one before. A second file, the head, has the digest of the last line. A
line that is removed or changed is thus detected, wherever it was.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from perada.core.checks import OptionError
from perada.system.files import opener, sync, try_lock, write_atomic

JOURNAL = "privacy_ledger.jsonl"
"""Name of the file next to the checkpoints."""
PREVIOUS = "previous"
FIELDS = frozenset({"id", "run", "round", "images", "clients", PREVIOUS})
"""Keys of an entry.

Ids of the round and of the run, number of the round, its costs for images and clients, and digest of the previous line.
"""
BEGINNING = "0" * 64
"""Digest in place of that of a line before the first one."""
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
        for path in (*self.paths, *self.earlier_paths):
            try:
                _append_entry(path, entry)
            except OSError as error:
                if path in self.paths:
                    raise OSError(
                        f"privacy: the round cannot be recorded in {str(path)!r} ({error}), so it is not begun; free "
                        "disk space or choose a different folder"
                    ) from error
                unaware = "cannot be written: a run resumed from there would not count this round"
                warnings.warn(f"privacy: {str(path)!r} {unaware}", stacklevel=2)


def head_file(journal: Path) -> Path:
    """Return the file with the digest of the last line of a journal."""
    return journal.with_suffix(".head")


def _append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to a journal and note its digest in the head; mark the previous line if a crash truncated it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with open(path, "ab+", opener=opener()) as file:
        # Two runs that were resumed from one checkpoint may write to the same journal. Some file systems have no locks.
        with suppress(OSError):
            try_lock(file.fileno(), wait=True)
        if file.tell() == 0:
            # The head is written before the journal, since one that has lines but no head has lost lines.
            write_atomic(head_file(path), BEGINNING.encode())
        previous = BEGINNING
        for line in _complete_lines(file):
            previous = _digest_of_line(line)
        line = json.dumps(entry | {PREVIOUS: previous}).encode() + b"\n"
        digest = _digest_of_line(line)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        last_byte = file.read()
        if last_byte not in (b"", b"\n"):
            line = CUT + b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        if is_new:
            # Otherwise a power failure may take the name of the file, and the rounds in it.
            sync([path.parent])
        write_atomic(head_file(path), digest.encode())


def _complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a journal from its beginning, without those that a crash truncated."""
    file.seek(0)
    for line in file:
        if line.endswith(b"\n") and not line.endswith(CUT + b"\n"):
            yield line


def _digest_of_line(line: bytes) -> str:
    """Return the digest of a line."""
    return hashlib.sha256(line).hexdigest()


def read_journals(paths: Iterable[Path], run: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a run, and of the runs that were resumed from it, by their ids.

    A truncated line is left out: its round did not begin, since the line was not on disk.

    Args:
        paths: Files of journals. Those that do not exist, and links, are skipped.
        run: Id of the run.

    Raises:
        ValueError: If a complete line of a file is not an entry, or lines were removed or changed.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path in paths:
        if not path.is_file() or path.is_symlink():
            continue
        for entry in _read_chain(path):
            if entry["run"] == run:
                entries[entry["id"]] = entry
    return entries


def _read_chain(path: Path) -> list[dict[str, Any]]:
    """Return all entries of a journal, whose chain and head are checked.

    The journal may be ahead of its head, if a crash came between the two writes.
    """
    entries = []
    digests = [BEGINNING]
    # Lines are numbered as an editor shows them, so truncated lines count.
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n") or line.endswith(CUT + b"\n"):
            continue
        try:
            entry = json.loads(line)
            if not FIELDS <= set(entry):
                raise TypeError(entry)
        except (ValueError, TypeError) as error:
            raise _damaged_journal(f"line {number} of {str(path)!r} is damaged") from error
        if entry[PREVIOUS] != digests[-1]:
            raise _damaged_journal(f"a line of {str(path)!r} before line {number} was removed or changed")
        digests.append(_digest_of_line(line))
        entries.append(entry)
    head = head_file(path)
    if not entries and not head.is_file():
        return []
    if not head.is_file():
        raise _damaged_journal(
            f"{str(head)!r} is missing, without which lines removed from the end of {path.name} are not noticed"
        )
    if head.read_text(encoding="utf-8", errors="replace") not in digests:
        raise _damaged_journal(f"{str(path)!r} lacks its last line, whose digest {str(head)!r} has")
    return entries


def _damaged_journal(problem: str) -> OptionError:
    """Return the error that a journal cannot be relied on."""
    return OptionError(
        f"privacy: {problem}, so the spent budget is unknown; restore both files from a copy, or start a new run",
        name="privacy",
    )
