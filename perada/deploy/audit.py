# SPDX-License-Identifier: Apache-2.0
"""A site's audit log: what was asked, what was answered and what left, a line each, in a chain of hashes.

``audit.jsonl`` only ever grows. A line is JSON with sorted keys and no spaces. It holds its number, the digest of the
line before it, and its own. ``audit.head`` holds the number and the digest of the last line, so that lines that are cut
off at the end are missed. A line is on the disk before the reply leaves, and the head after the line: a process that
is killed leaves a head that is one line behind at most. A line that was cut off by that stays where it is, with a ``~``
behind it. The next one says how many bytes these are, and their digest.

This module imports no torch, for the log is read without a model.
"""

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from perada.core.digests import KEY, digest_of, sealed
from perada.core.files import FolderLock, sync, write_atomic
from perada.deploy.protocol import SUMS, Answer, Order, Refused, canonical, digest, header_of, sizes_of

LOG, HEAD = "audit.jsonl", "audit.head"
REMEDY = "put a copy of the folder in its place, or begin another log by `perada deploy audit --begin`"
Entry = dict[str, Any]


class Tip(NamedTuple):
    """How far a log is."""

    lines: int = 0
    last: str = "0" * 64  # digest of the last line


class Found(NamedTuple):
    """What a file holds."""

    entries: list[Entry]  # which follow one another, from the first
    torn: bytes  # what stands behind them
    wrong: str  # of the first line that is not an entry; "" if all are
    head: Tip | None  # what the file beside it says; None if there is none

    @property
    def tip(self) -> Tip:
        """Where the entries end."""
        return Tip(len(self.entries), self.entries[-1][KEY]) if self.entries else Tip()


def entry_of(message: bytes, reply: bytes, spent: Callable[[Order], object]) -> Entry:
    """What is written of a message and its reply: no number and no name of the site's but those of tensors and facts.

    Args:
        message: As it came.
        reply: As it leaves.
        spent: The ε that all training has spent, for an order that was carried out; None if it was not private.
    """
    answer, sizes = Answer.read(header_of(reply)), sizes_of(reply)
    asked: Entry = {"message": digest(message), "bytes": len(message)}
    left = {"bytes": len(reply), "tensors": sizes, "facts": _names(answer.facts), "sums": sorted(answer.sums)}
    entry: Entry = {"asked": asked, "answered": answer.code, "left": left, "run": None, "round": None}
    try:
        order = Order.read(header_of(message))
    except Refused:
        return entry
    asked |= {"kind": order.kind, "recipe": order.recipe}
    if order.kind in SUMS:
        asked |= {"of": order.of, "attempt": order.attempt}
    left["masks"] = order.kind == "mask" and bool(sizes)
    entry |= {"run": order.run, "round": order.round}
    epsilon = spent(order) if answer.code == "ok" and order.kind in ("train", "tune", "mask") else None
    return entry if epsilon is None else entry | {"epsilon": epsilon}


def _names(facts: Mapping[str, Any], before: str = "") -> list[str]:
    """Names of what a site says, with those of its parts, such as ``counts.personal``."""
    return [
        name
        for key, value in sorted(facts.items())
        for name in (_names(value, f"{before}{key}.") if isinstance(value, Mapping) and value else [before + key])
    ]


class AuditLog:
    """The log in a state folder, of which there is one writer.

    Args:
        folder: Of the site's state, which is locked.

    Raises:
        ValueError: If the log is not what was written; see :func:`check_chain`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self.tip = folder, -1, Tip()
        self._open()

    def close(self) -> None:
        """Let go of the file, which the next line opens again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def note(self, message: bytes, reply: bytes, trained: int, spent: Callable[[Order], object]) -> None:
        """Write a line, on the disk, for a reply that may leave after it.

        Args:
            message: What came.
            reply: What is to leave.
            trained: Rounds that the site has trained so far, all runs together.
            spent: See :func:`entry_of`.

        Raises:
            OSError: If it cannot be written. The reply must not leave then.
        """
        if self._file < 0:
            self._open()
        self._append(entry_of(message, reply, spent) | {"trained": trained})

    def _open(self) -> None:
        found = read_log(self._folder)
        check_chain(found)
        path = self._folder / LOG
        if found.head is None:  # first: a log without a head has lost it
            self._write_head(Tip())
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        sync([self._folder])
        self.tip = found.tip
        if found.torn:
            # The mark is for a line that lacks nothing but its end.
            before = b"" if found.torn.endswith(b"\n") else b"~\n"
            trained = found.entries[-1]["trained"] if found.entries else 0
            self._append({"torn": _torn((found.torn + before).removesuffix(b"\n")), "trained": trained}, before)
        elif found.head not in (None, self.tip):
            self._write_head(self.tip)

    def _append(self, what: Entry, before: bytes = b"") -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = sealed({"number": self.tip.lines + 1, "time": now, "previous": self.tip.last, **what})
        data = before + canonical(line) + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
            self._write_head(Tip(self.tip.lines + 1, line[KEY]))
        except BaseException:
            self.close()  # what is there now is read before the next line
            raise
        self.tip = Tip(self.tip.lines + 1, line[KEY])

    def _write_head(self, tip: Tip) -> None:
        write_atomic(self._folder / HEAD, canonical(tip._asdict()) + b"\n", private=True)


def read_log(folder: Path) -> Found:
    """The log in a state folder, also while a worker writes to it; it is not checked."""
    while True:
        head = _read_head(folder)
        content = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
        if head == _read_head(folder):
            return Found(*_parsed(content), head)


def _parsed(content: bytes) -> tuple[list[Entry], bytes, str]:
    entries, torn, wrong, tip = list[Entry](), list[bytes](), "", Tip()
    *lines, rest = content.split(b"\n")
    for place, line in enumerate(lines, 1):
        entry, problem = _entry(line, tip)
        if entry is not None and entry.get("torn") == (_torn(b"\n".join(torn)) if torn else None):
            entries.append(entry)
            torn, wrong, tip = [], "", Tip(len(entries), entry[KEY])
        else:
            torn.append(line)
            wrong = wrong or f"line {place} {problem or 'does not go with what stands before it'}"
    whole = b"".join(line + b"\n" for line in torn)
    return entries, whole + rest, wrong


def _entry(line: bytes, before: Tip) -> tuple[Entry | None, str]:
    """The entry of a line that follows another, or what is wrong with it."""
    try:
        entry = json.loads(line)
        content = {name: value for name, value in entry.items() if name != KEY}
        whole = canonical(entry) == line and sealed(content)[KEY] == entry[KEY]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, "is not one that a worker wrote"
    if not whole:
        return None, "was changed: its sha256 is not that of its content"
    if (entry.get("number"), entry.get("previous")) != (before.lines + 1, before.last):
        return None, "does not follow the one before it: a line was removed, moved or put in"
    return entry, ""


def check_chain(found: Found) -> None:
    """Refuse a log of which a line was changed, removed, moved or cut off.

    What a process left that was killed is no reason: a line behind the head, or one that is not whole. Neither was
    answered.

    Raises:
        ValueError: In one line, which says what is wrong.
    """
    tip, head = found.tip, found.head
    if head is None:
        missing = f"{HEAD} is gone, which says how many lines there are"
        problem = missing if found.entries or found.torn else ""
    elif tip.lines < head.lines:
        problem = found.wrong or f"it ends after line {tip.lines}, and had {head.lines}: lines were cut off"
    elif head.lines and found.entries[head.lines - 1][KEY] != head.last:
        problem = f"line {head.lines} is not the one that {HEAD} tells of: lines were written anew"
    else:
        more = tip.lines - head.lines
        problem = f"it has {more} lines more than {HEAD} tells of: one of the two is a copy" if more > 1 else ""
    if problem:
        raise ValueError(f"{LOG}: {problem}; {REMEDY}")


def check_state(found: Found, committed: Tip | None, trained: int) -> None:
    """Compare a log with what is kept of the training: neither may be older than the other.

    Args:
        found: A log that is whole.
        committed: How far the log was when the state was last written; None if that does not say.
        trained: Rounds that were trained by then, all runs together.

    Raises:
        ValueError: In one line, which says what is wrong.
    """
    entries, problem = found.entries, ""
    counts = [entry["trained"] for entry in entries]
    fallen = next((place for place in range(1, len(counts)) if counts[place] < counts[place - 1]), None)
    if committed is not None and committed.lines:
        begun = entries[0].get("begun", {}) if entries else {}
        there = committed.lines <= len(entries) and entries[committed.lines - 1][KEY] == committed.last
        if not there and begun.get("committed") != list(committed):
            problem = f"the state was written after a line {committed.lines} that is not in it"
    if fallen is not None:
        problem = f"line {fallen + 1} has fewer rounds trained than the one before it: the ledgers are an older copy"
    if counts and counts[-1] > trained:
        forgot = counts[-1] - trained
        problem = f"the state is an older copy, which has forgotten what {forgot} rounds spent"
    if problem:
        raise ValueError(f"{LOG}: {problem}; {REMEDY}")


def begin_log(folder: Path, committed: Tip | None, trained: int) -> Path | None:
    """Begin another log where the present one cannot be continued; its first line says so.

    Args:
        folder: Of the site's state; an OSError if a worker has it.
        committed: See :func:`check_state`.
        trained: See :func:`check_state`.

    Returns:
        Where the former log is now; None if there was none.
    """
    lock, path, kept = FolderLock(folder, "worker"), folder / LOG, None
    try:
        head, about = _read_head(folder, damaged=Tip()) or Tip(), ""
        if path.exists():
            taken = len(list(folder.glob("audit-*.jsonl")))
            kept, about = folder / f"audit-{taken + 1}.jsonl", digest_of(path)
            path.replace(kept)
        (folder / HEAD).unlink(missing_ok=True)
        log = AuditLog(folder)
        begun = {"file": about, "head": list(head), "committed": None if committed is None else list(committed)}
        log._append({"begun": begun, "trained": trained})
        log.close()
    finally:
        lock.close()
    return kept


def _read_head(folder: Path, damaged: Tip | None = None) -> Tip | None:
    """What the file beside a log says; None if there is none, and ``damaged``, if that is given, of a damaged one."""
    path = folder / HEAD
    try:
        return Tip(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        if damaged is not None:
            return damaged
        raise ValueError(f"{HEAD} is damaged, which says how many lines {LOG} has; {REMEDY}") from None


def _torn(left: bytes) -> dict[str, Any]:
    return {"bytes": len(left), KEY: digest(left)}
