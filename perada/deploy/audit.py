# SPDX-License-Identifier: Apache-2.0
"""A site's audit log: what was asked, what was answered and what left, a line each, in a chain of hashes.

``audit.jsonl`` only ever grows. A line is JSON with sorted keys and no spaces. It holds its number, the digest of the
line before it, and its own. ``audit.head`` holds the number and the digest of the last line, so that lines that are cut
off at the end are missed. A line is on the disk before the reply leaves, and the head after the line: a process that
is killed leaves a head that is one line behind at most. A line that was cut off by that stays where it is, with a ``~``
behind it. The next one says how many bytes these are, and their digest.

Each line also holds how often the site's state was written by then (``commits``), and so does the state itself. A state
that counts fewer than the log is an older copy, whatever it is that was committed. The folder's lock file holds a third
copy of both numbers (:class:`HighWaterMark`), so that the log and its head cannot be put back together either.

The state is written before the line, and the line before the lock file. A process that is killed in between therefore
leaves a state that is ahead of the log, or a log that is ahead of the lock file, and neither is an error. The reverse
never happens, and is refused.

This module imports no torch, for the log is read without a model.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from perada.core.digests import KEY, digest_of, sealed
from perada.core.files import LOCK, FolderLock, open_atomic, sync, write_atomic
from perada.deploy.protocol import (
    SUM_KINDS,
    RefusalError,
    Request,
    Response,
    canonical,
    digest,
    read_header,
    tensor_sizes,
)

LOG, HEAD = "audit.jsonl", "audit.head"
REMEDY = "put the newest copy of the whole folder in its place, or begin another log by `perada deploy audit --begin`"
OLD_STATE_REMEDY = (
    "put the newest copy of the whole folder in its place. If there is none, have the runs stopped that the site takes "
    "part in, and accept this copy by `perada deploy audit --begin`; the site's limits then lack what was spent since"
)
STATE = "state.safetensors"
"""Name of the file with a site's state."""
Entry = dict[str, Any]


class Tip(NamedTuple):
    """How far a log is."""

    lines: int = 0
    last: str = "0" * 64  # digest of the last line


NOTHING = Tip()
"""Where a log begins."""


@dataclass(frozen=True)
class Committed:
    """What a site's state says of itself; the defaults are those of a site without one.

    Attributes:
        commits: How often the state was written, in all runs together.
        tip: How far the log was when it was last written.
        trained: Rounds that were trained by then, in all runs together.
        former: For each former run, how often the state had been written when the file of that run was put aside.
    """

    commits: int = 0
    tip: Tip = NOTHING
    trained: int = 0
    former: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HighWaterMark:
    """The furthest point that a site is known to have reached, which the folder's lock file holds.

    Attributes:
        tip: How far the log was.
        commits: How often the state was written.
    """

    tip: Tip = NOTHING
    commits: int = 0

    def pack(self) -> bytes:
        """The content of the lock file, which always has the same length; see :meth:`FolderLock.write`."""
        content = {"commits": self.commits, "last": self.tip.last, "lines": self.tip.lines}
        return canonical(content).ljust(159) + b"\n"

    @classmethod
    def unpack(cls, content: bytes) -> "HighWaterMark":
        """What :meth:`pack` wrote; of any other content the defaults.

        The file is a witness beside the log and the state. If it is lost or damaged these two are still compared, so
        that is no reason to refuse a folder.
        """
        try:
            fields = json.loads(content)
            return cls(Tip(int(fields["lines"]), str(fields["last"])), int(fields["commits"]))
        except (ValueError, KeyError, TypeError):
            return cls()


class LogContent(NamedTuple):
    """What a file holds."""

    entries: list[Entry]  # which follow one another, from the first
    torn: bytes  # what stands behind them
    wrong: str  # of the first line that is not an entry; "" if all are
    head: Tip | None  # what the file beside it says; None if there is none

    @property
    def tip(self) -> Tip:
        """Where the entries end."""
        return Tip(len(self.entries), self.entries[-1][KEY]) if self.entries else Tip()


def make_entry(message: bytes, reply: bytes, spent: Callable[[Request], object]) -> Entry:
    """What is written of a message and its reply: no number and no name of the site's but those of tensors and facts.

    Args:
        message: As it came.
        reply: As it leaves.
        spent: The ε that all training has spent, for an order that was carried out; None if it was not private.
    """
    answer, sizes = Response.read(read_header(reply)), tensor_sizes(reply)
    asked: Entry = {"message": digest(message), "bytes": len(message)}
    left = {"bytes": len(reply), "tensors": sizes, "facts": _names(answer.facts), "sums": sorted(answer.sums)}
    entry: Entry = {"asked": asked, "answered": answer.code, "left": left, "run": None, "round": None}
    try:
        order = Request.read(read_header(message))
    except RefusalError:
        return entry
    asked |= {"kind": order.kind, "recipe": order.recipe}
    if order.kind in SUM_KINDS:
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
        self._size = 0  # bytes of the file, which grows by this process's lines only
        self._open()

    def close(self) -> None:
        """Let go of the file, which the next line opens again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def note(
        self, message: bytes, reply: bytes, *, trained: int, commits: int, spent: Callable[[Request], object]
    ) -> None:
        """Write a line, on the disk, for a reply that may leave after it.

        Args:
            message: What came.
            reply: What is to leave.
            trained: Rounds that the site has trained so far, all runs together.
            commits: How often the site's state was written so far.
            spent: See :func:`make_entry`.

        Raises:
            OSError: If it cannot be written. The reply must not leave then.
            ValueError: If the log is not the one that this process wrote, likewise.
        """
        if self._file < 0:
            self._open()
        self._append(make_entry(message, reply, spent) | {"trained": trained, "commits": commits})

    def _open(self) -> None:
        found = read_log(self._folder)
        check_chain(found)
        if not _holds(found.entries, self.tip):  # this process wrote more before it closed the file
            raise ValueError(f"{LOG}: line {self.tip.lines}, which this worker wrote, is not in it any more; {REMEDY}")
        path = self._folder / LOG
        if found.head is None:  # first: a log without a head has lost it
            _write_head(self._folder, Tip())
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        sync([self._folder])
        self.tip = found.tip
        if found.torn:
            # The mark is for a line that lacks nothing but its end.
            before = b"" if found.torn.endswith(b"\n") else b"~\n"
            last = found.entries[-1] if found.entries else {"trained": 0, "commits": 0}
            counters = {name: last[name] for name in ("trained", "commits")}
            self._append({"torn": _torn((found.torn + before).removesuffix(b"\n")), **counters}, before)
        elif found.head not in (None, self.tip):
            _write_head(self._folder, self.tip)

    def _append(self, what: Entry, before: bytes = b"") -> None:
        line = _sealed_line(self.tip, what)
        data = before + canonical(line) + b"\n"
        try:
            self._check_in_place()
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]
            os.fsync(self._file)
            _write_head(self._folder, Tip(self.tip.lines + 1, line[KEY]))
        except BaseException:
            self.close()  # what is there now is read before the next line
            raise
        self.tip = Tip(self.tip.lines + 1, line[KEY])

    def _check_in_place(self) -> None:
        """Refuse to write into a file that was deleted, replaced or changed since this process opened it."""
        opened = os.fstat(self._file)
        try:
            named = os.stat(self._folder / LOG, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or not os.path.samestat(named, opened) or opened.st_size != self._size:
            raise OSError(f"{LOG} was deleted, replaced or changed by another process while this worker ran; {REMEDY}")


def read_log(folder: Path) -> LogContent:
    """The log in a state folder, also while a worker writes to it; it is not checked."""
    while True:
        head = _read_head(folder)
        content = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
        if head == _read_head(folder):
            return LogContent(*_parsed(content), head)


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
    if type(entry.get("trained")) is not int or type(entry.get("commits")) is not int:
        return None, "does not say how much was trained and how often the state was written"
    if (entry.get("number"), entry.get("previous")) != (before.lines + 1, before.last):
        return None, "does not follow the one before it: a line was removed, moved or put in"
    return entry, ""


def check_chain(found: LogContent) -> None:
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


def check_state(found: LogContent, committed: Committed, mark: HighWaterMark) -> None:
    """Compare a log with the state and the lock file beside it: neither the log nor the state may be an older copy.

    Args:
        found: A log that is whole.
        committed: What the state says.
        mark: What the lock file says. It must have been read before the two others if a worker may be running.

    Raises:
        ValueError: In one line, which says what is wrong and what to do.
    """
    entries = found.entries
    counts = [entry["commits"] for entry in entries]
    logged = counts[-1] if counts else 0
    if max(logged, mark.commits) > committed.commits:
        witness = f"line {len(entries)} of {LOG}" if logged >= mark.commits else f"the file {LOCK}"
        written = f"an older copy: it was written {_times(committed.commits)}" if committed.commits else "gone"
        raise ValueError(
            f"{STATE} is {written}, and {witness} tells of {_times(max(logged, mark.commits))}, so what was spent and "
            f"sent since is forgotten; {OLD_STATE_REMEDY}"
        )
    fallen = next((place for place in range(1, len(counts)) if counts[place] < counts[place - 1]), None)
    begun = entries[0].get("begun", {}) if entries else {}
    problem = ""
    if fallen is not None:
        problem = f"line {fallen + 1} was written with an older copy of {STATE} than the line before it"
    elif found.head is None and committed.commits:
        problem = f"it is gone, and {HEAD} with it"
    elif not _holds(entries, committed.tip) and begun.get("committed") != list(committed.tip):
        problem = f"the state was written after a line {committed.tip.lines} that is not in it"
    elif not _holds(entries, mark.tip):
        problem = f"it is an older copy: {LOCK} tells of a line {mark.tip.lines} that is not in it"
    if problem:
        raise ValueError(f"{LOG}: {problem}; {REMEDY}")


def _holds(entries: list[Entry], tip: Tip) -> bool:
    """Whether a log goes as far as ``tip`` says, or further."""
    if not tip.lines:
        return True
    return tip.lines <= len(entries) and bool(entries[tip.lines - 1][KEY] == tip.last)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def begin_log(folder: Path, committed: Committed) -> Path | None:
    """Begin another log where the present one cannot be continued; its first line says so.

    The former log is renamed and the new one put in its place in one step. Whoever is killed before the head and the
    lock file are written finds a log that is refused, and begins once more.

    Args:
        folder: Of the site's state; an OSError if a worker has it.
        committed: What the state says.

    Returns:
        Where the former log is now; None if there was none.
    """
    lock = FolderLock(folder, "worker")
    try:
        path = folder / LOG
        head = _read_head(folder, damaged=Tip()) or Tip()
        former = None
        former_digest = ""
        if path.exists():
            former = _free_name(folder)
            former_digest = digest_of(path)
        begun = {"file": former_digest, "head": list(head), "committed": list(committed.tip)}
        entry = {"begun": begun, "trained": committed.trained, "commits": committed.commits}
        line = _sealed_line(Tip(), entry)
        with open_atomic(path, private=True, former=former) as file:
            file.write(canonical(line) + b"\n")
        tip = Tip(1, line[KEY])
        _write_head(folder, tip)
        lock.write(HighWaterMark(tip, committed.commits).pack())
    finally:
        lock.close()
    return former


def _free_name(folder: Path) -> Path:
    """Where a log is put aside: ``audit-1.jsonl``, or the first of the following that is not there."""
    number = 1
    while (folder / f"audit-{number}.jsonl").exists():
        number += 1
    return folder / f"audit-{number}.jsonl"


def _sealed_line(before: Tip, what: Entry) -> Entry:
    """The entry that follows ``before``, with its number, its time and its digest."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return sealed({"number": before.lines + 1, "time": now, "previous": before.last, **what})


def _write_head(folder: Path, tip: Tip) -> None:
    write_atomic(folder / HEAD, canonical(tip._asdict()) + b"\n", private=True)


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
