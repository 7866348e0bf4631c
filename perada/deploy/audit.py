# SPDX-License-Identifier: Apache-2.0
"""A site's audit log: a hash chain with a line for each request, its reply and what left the site.

``audit.jsonl`` is append-only. A line is JSON with sorted keys and no spaces. It has its number, the digest of the line
before it, and its own digest. ``audit.head`` has the number and the digest of the last line, which reveals that lines
were removed at the end. A line is on disk before the head, the head before the lock file, and all of them before the
reply is sent. A process that is killed, or whose disk fails, may therefore leave any number of lines after the head,
none of which was answered. The next process that opens the log writes the head again. A line that was only partly
written is kept, with a ``~`` after it, and the next line has the number of its bytes and their digest.

Each line also has the number of times that the site's state was written before (``commits``), and so does the state
itself. A state with fewer writes than the log is an older copy. The folder's lock file has a third copy of both numbers
(:class:`HighWaterMark`), so that an older copy of the log and its head, or of the head only, is noticed.

The state is written before the line, and the line before the lock file. A process that is killed in between leaves a
state that is ahead of the log, or a log that is ahead of the lock file, and neither is an error. The reverse never
happens, and is rejected.

This module imports no torch, since the log is read without a model.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from perada.deploy.protocol import (
    JOB_KINDS,
    SUM_KINDS,
    RejectionError,
    Request,
    Response,
    canonical,
    digest_of_message,
    read_header,
    tensor_sizes,
)
from perada.system.digests import KEY, digest_of, sealed
from perada.system.disk_errors import naming_disk
from perada.system.files import LOCK, FolderLock, open_atomic, sync, write_atomic, writing

LOG = "audit.jsonl"
HEAD = "audit.head"
STATE = "state.safetensors"
"""Name of the file with a site's state."""
REMEDY = "restore the newest copy of the entire folder, or start a new log with `perada deploy audit --begin`"
OLD_STATE_REMEDY = (
    "restore the newest copy of the entire folder. If there is none, have the site's runs stopped, and accept this "
    "copy with `perada deploy audit --begin`; the site's limits then miss what was spent since"
)
_LOCK_BYTES = 160
"""Size of the lock file."""
Entry = dict[str, Any]


class Tip(NamedTuple):
    """Position of the last line of a log.

    Attributes:
        lines: Number of lines.
        last: Digest of the last line.
    """

    lines: int = 0
    last: str = "0" * 64


EMPTY_TIP = Tip()
"""Tip of an empty log."""


@dataclass(frozen=True)
class SavedCounters:
    """Counters in a site's saved state; the defaults are those of a site without one.

    Attributes:
        commits: How often the state was written, in all runs together.
        tip: How far the log was when it was last written.
        trained: Number of rounds that were trained by then, in all runs together.
        former_commits: For each former run, how often the state had been written when its file was put aside.
    """

    commits: int = 0
    tip: Tip = EMPTY_TIP
    trained: int = 0
    former_commits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HighWaterMark:
    """The furthest point that a site is known to have reached, stored in the folder's lock file.

    Attributes:
        tip: How far the log was.
        commits: How often the state was written.
    """

    tip: Tip = EMPTY_TIP
    commits: int = 0

    def pack(self) -> bytes:
        """Return the content of the lock file, which always has the same length; see :meth:`FolderLock.write`."""
        content = {"commits": self.commits, "last": self.tip.last, "lines": self.tip.lines}
        return canonical(content).ljust(_LOCK_BYTES - 1) + b"\n"

    @classmethod
    def unpack(cls, content: bytes) -> "HighWaterMark":
        """Read what :meth:`pack` wrote; any other content gives the defaults.

        The file is a witness beside the log and the state. If it is lost or damaged these two are still compared, so
        that is no reason to reject a folder.
        """
        try:
            values = json.loads(content)
            tip = Tip(int(values["lines"]), str(values["last"]))
            return cls(tip, int(values["commits"]))
        except (ValueError, KeyError, TypeError):
            return cls()


class LogContent(NamedTuple):
    """Content of a log.

    Attributes:
        entries: Valid entries without a gap, from the first.
        torn: Bytes after them.
        problem: What is wrong with the first invalid line; "" if all lines are valid.
        head: Content of the file beside the log; None if there is none.
    """

    entries: list[Entry]
    torn: bytes
    problem: str
    head: Tip | None

    @property
    def tip(self) -> Tip:
        """Position of the last entry."""
        return Tip(len(self.entries), self.entries[-1][KEY]) if self.entries else EMPTY_TIP


def make_entry(message: bytes, reply: bytes, spent: Callable[[Request], object]) -> Entry:
    """Describe a message and its reply. The entry holds names of the site's tensors and facts, but no values.

    Args:
        message: Message as it came.
        reply: Reply as it leaves.
        spent: Returns the ε that all training has spent, for a request that was carried out; None if it was not
            private.
    """
    response = Response.read(read_header(reply))
    sizes = tensor_sizes(reply)
    request_fields: Entry = {"message": digest_of_message(message), "bytes": len(message)}
    reply_fields: Entry = {
        "bytes": len(reply),
        "tensors": sizes,
        "facts": _fact_names(response.facts),
        "sums": sorted(response.sums),
    }
    entry: Entry = {
        "request": request_fields,
        "answered": response.code,
        "left": reply_fields,
        "run": None,
        "round": None,
    }
    try:
        request = Request.read(read_header(message))
    except RejectionError:
        return entry
    request_fields["kind"] = request.kind
    request_fields["recipe"] = request.recipe
    if request.of in JOB_KINDS:
        request_fields["of"] = request.of
    if request.kind in SUM_KINDS:
        request_fields["of"] = request.of
        request_fields["attempt"] = request.attempt
    reply_fields["masks"] = request.kind == "mask" and bool(sizes)
    entry["run"] = request.run
    entry["round"] = request.round
    if response.code == "ok" and request.kind in ("train", "tune", "count", "mask"):
        epsilon = spent(request)
        if epsilon is not None:
            entry["epsilon"] = epsilon
    return entry


def _fact_names(nested_facts: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of facts, including nested ones such as ``counts.personal``."""
    names = []
    for key, value in sorted(nested_facts.items()):
        if isinstance(value, Mapping) and value:
            names += _fact_names(value, f"{prefix}{key}.")
        else:
            names.append(prefix + key)
    return names


class AuditLog:
    """The audit log in a state folder; it has a single writer.

    Args:
        folder: State folder of the site, which is locked.

    Attributes:
        tip: How far the log goes.

    Raises:
        ValueError: If the log was changed or is incomplete; see :func:`check_chain`.
    """

    def __init__(self, folder: Path) -> None:
        self.tip = EMPTY_TIP
        self._folder = folder
        self._descriptor = -1
        # The file grows by this process's lines only.
        self._size = 0
        self.ensure_open()

    def close(self) -> None:
        """Close the file; :meth:`ensure_open` reopens it."""
        descriptor = self._descriptor
        # The descriptor is forgotten first: it is invalid even if closing it fails.
        self._descriptor = -1
        if descriptor >= 0:
            # All lines have been synced, so an error that a disk reports only now loses none.
            with suppress(OSError):
                os.close(descriptor)

    def append(
        self,
        message: bytes,
        reply: bytes,
        *,
        trained: int,
        commits: int,
        spent: Callable[[Request], object],
    ) -> None:
        """Write the line of a reply, which may be sent once this returns.

        Args:
            message: Message as it came.
            reply: Reply as it will be sent.
            trained: Number of rounds that the site has trained so far, all runs together.
            commits: How often the site's state was written so far.
            spent: See :func:`make_entry`.

        Raises:
            OSError: If the line cannot be written. The reply must not leave then.
            ValueError: If the log is not the one that this process wrote, likewise.
        """
        self.ensure_open()
        entry = make_entry(message, reply, spent) | {"trained": trained, "commits": commits}
        self._append_entry(entry)

    def ensure_open(self) -> None:
        """Open and check the file, unless it is open, and repair what a killed process or a failed disk left.

        Raises:
            OSError: If it cannot be repaired. The next call tries again.
            ValueError: If the log was changed or is incomplete, or its files are older than what this process wrote.
        """
        if self._descriptor >= 0:
            return
        log = read_log(self._folder)
        check_chain(log)
        self._check_continues(log)
        if log.head is None:
            # Write the head first: a log with entries but no head counts as tampered with.
            _write_head(self._folder, EMPTY_TIP)
        path = self._folder / LOG
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        try:
            self._size = os.fstat(self._descriptor).st_size
            sync([self._folder])
            if log.torn:
                self._append_torn(log)
            else:
                is_behind = log.head is not None and log.head != log.tip
                if is_behind:
                    # The lines after the head may not be on disk, and the head must not be ahead of them.
                    with writing(path):
                        os.fsync(self._descriptor)
                    _write_head(self._folder, log.tip)
                self.tip = log.tip
        except BaseException:
            # No line may be written after one that the head does not record.
            self.close()
            raise

    def _check_continues(self, log: LogContent) -> None:
        """Raise a ValueError if a log and its head lack lines that this process wrote."""
        if not _contains_tip(log.entries, self.tip):
            raise ValueError(f"{LOG}: line {self.tip.lines}, written by this worker, is missing; {REMEDY}")
        if log.head is not None and log.head.lines < self.tip.lines:
            raise ValueError(_older_head_message(log.head, f"this worker wrote line {self.tip.lines}"))

    def _append_torn(self, log: LogContent) -> None:
        """Write an entry that describes the incomplete lines at the end of a log."""
        # The mark is for a line that lacks nothing but its end.
        mark = b"" if log.torn.endswith(b"\n") else b"~\n"
        last = log.entries[-1] if log.entries else {"trained": 0, "commits": 0}
        counters = {name: last[name] for name in ("trained", "commits")}
        torn = (log.torn + mark).removesuffix(b"\n")
        self._append_entry({"torn": _describe_torn(torn), **counters}, mark, log.tip)

    def _append_entry(self, entry: Entry, prefix: bytes = b"", before: Tip | None = None) -> None:
        """Write an entry to the log and to disk.

        Args:
            entry: The entry.
            prefix: Bytes to write before it.
            before: Position of the line that it follows; by default the last one that this process wrote.
        """
        if before is None:
            before = self.tip
        line = _sealed_line(before, entry)
        data = prefix + canonical(line) + b"\n"
        tip = Tip(before.lines + 1, line[KEY])
        try:
            self._check_in_place()
            with writing(self._folder / LOG):
                while data:
                    written = os.write(self._descriptor, data)
                    self._size += written
                    data = data[written:]
                os.fsync(self._descriptor)
            _write_head(self._folder, tip)
        except BaseException:
            self.close()  # the next line reads what is there now
            raise
        self.tip = tip

    def _check_in_place(self) -> None:
        """Raise if the file was deleted, replaced or changed since this process opened it."""
        opened = os.fstat(self._descriptor)
        try:
            at_path = os.stat(self._folder / LOG, follow_symlinks=False)
        except FileNotFoundError:
            at_path = None
        if at_path is None or not os.path.samestat(at_path, opened) or opened.st_size != self._size:
            raise OSError(
                f"{LOG} was deleted, replaced or changed by another process while this worker was running; {REMEDY}"
            )


def read_log(folder: Path) -> LogContent:
    """Read the log in a state folder without checking it; a worker may be writing to it."""
    path = folder / LOG
    while True:
        head = _read_head(folder)
        content = path.read_bytes() if path.exists() else b""
        if head == _read_head(folder):
            return _parse_log(content, head)


def _parse_log(log_bytes: bytes, head: Tip | None) -> LogContent:
    """Read the content of a log, and find its first invalid line."""
    entries: list[Entry] = []
    torn_lines: list[bytes] = []
    problem = ""
    tip = EMPTY_TIP
    *lines, last_line = log_bytes.split(b"\n")
    for number, line in enumerate(lines, 1):
        entry, problem_of_line = _read_entry(line, tip)
        # An entry after torn lines must describe them; the entry of an undamaged log describes none.
        torn = _describe_torn(b"\n".join(torn_lines)) if torn_lines else None
        if entry is not None and entry.get("torn") == torn:
            entries.append(entry)
            tip = Tip(len(entries), entry[KEY])
            torn_lines = []
            problem = ""
        else:
            torn_lines.append(line)
            if not problem:
                problem = f"line {number} {problem_of_line or 'does not match the lines before it'}"
    complete_lines = b"".join(line + b"\n" for line in torn_lines)
    return LogContent(entries, complete_lines + last_line, problem, head)


def _read_entry(line: bytes, before: Tip) -> tuple[Entry | None, str]:
    """Return the entry in the line after ``before``, or None and the reason why the line is invalid."""
    try:
        entry = json.loads(line)
        content = {name: value for name, value in entry.items() if name != KEY}
        is_unchanged = canonical(entry) == line and sealed(content)[KEY] == entry[KEY]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, "was not written by a worker"
    if not is_unchanged:
        return None, "was changed: its sha256 does not match its content"
    if type(entry.get("trained")) is not int or type(entry.get("commits")) is not int:
        return None, "does not record how much was trained and how often the state was written"
    if (entry.get("number"), entry.get("previous")) != (before.lines + 1, before.last):
        return None, "does not follow the previous line: a line was removed, moved or inserted"
    return entry, ""


def check_chain(log: LogContent) -> None:
    """Raise if a line of a log was changed, removed, moved or cut off.

    A killed process, or a disk that failed, may leave lines after the head, and an incomplete one. They are accepted,
    since none of them was answered. :func:`check_state` notices a head that is an older copy.

    Raises:
        ValueError: If one was; the message names it.
    """
    tip = log.tip
    head = log.head
    problem = ""
    if head is None:
        if log.entries or log.torn:
            problem = f"{HEAD}, which records the number of lines, is missing"
    elif tip.lines < head.lines:
        problem = log.problem or f"it ends after line {tip.lines} but had {head.lines}: lines were cut off"
    elif head.lines and log.entries[head.lines - 1][KEY] != head.last:
        problem = f"line {head.lines} is not the one recorded in {HEAD}: lines were rewritten"
    if problem:
        raise ValueError(f"{LOG}: {problem}; {REMEDY}")


def check_state(log: LogContent, counters: SavedCounters, mark: HighWaterMark) -> None:
    """Raise if the log or the state is an older copy, by comparing them and the lock file.

    Args:
        log: An undamaged log.
        counters: Number of writes and log position in the state.
        mark: The copy of both in the lock file. Must be read before the two others if a worker may be running.

    Raises:
        ValueError: If one is; the message names it and the remedy.
    """
    entries = log.entries
    counts = [entry["commits"] for entry in entries]
    logged = counts[-1] if counts else 0
    if max(logged, mark.commits) > counters.commits:
        witness = f"line {len(entries)} of {LOG}" if logged >= mark.commits else f"the file {LOCK}"
        condition = f"an older copy (written {_format_times(counters.commits)})" if counters.commits else "gone"
        raise ValueError(
            f"{STATE} is {condition}, but according to {witness} it was written "
            f"{_format_times(max(logged, mark.commits))}, so everything spent and sent since is forgotten; "
            f"{OLD_STATE_REMEDY}"
        )
    decreases = [index for index in range(1, len(counts)) if counts[index] < counts[index - 1]]
    origin = entries[0].get("begun", {}) if entries else {}
    problem = ""
    if decreases:
        problem = f"line {decreases[0] + 1} was written with an older copy of {STATE} than the previous line"
    elif log.head is None and counters.commits:
        problem = f"it is missing, and so is {HEAD}"
    elif not _contains_tip(entries, counters.tip) and origin.get("committed") != list(counters.tip):
        problem = f"the state was written after a line {counters.tip.lines} that the log does not contain"
    elif not _contains_tip(entries, mark.tip):
        problem = f"it is an older copy: {LOCK} records a line {mark.tip.lines} that it does not contain"
    if problem:
        raise ValueError(f"{LOG}: {problem}; {REMEDY}")
    if log.head is not None and log.head.lines < mark.tip.lines:
        # The lock file is written after the head, so no failure leaves it ahead.
        raise ValueError(_older_head_message(log.head, f"{LOCK} records line {mark.tip.lines}"))


def _older_head_message(head: Tip, witness: str) -> str:
    """Return the text of the error for a head file that was replaced by an older copy."""
    return f"{HEAD} is an older copy: it records {head.lines} lines, but {witness}; {REMEDY}"


def _contains_tip(entries: list[Entry], tip: Tip) -> bool:
    """Return whether a log contains the line at ``tip``."""
    if not tip.lines:
        return True
    return tip.lines <= len(entries) and bool(entries[tip.lines - 1][KEY] == tip.last)


def _format_times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def begin_log(folder: Path, counters: SavedCounters) -> Path | None:
    """Start a new log when the current one cannot be continued; its first line records this.

    The former log is renamed and the new one put in its place in one step. A process that is killed before the head and
    the lock file are written leaves a log that is rejected, so that it has to be begun once more.

    Args:
        folder: State folder of the site.
        counters: Number of writes and log position in the state.

    Returns:
        Where the former log is now; None if there was none.

    Raises:
        OSError: If a worker uses the folder, or it cannot be read or written.
    """
    with naming_disk(folder), closing(FolderLock(folder, "worker")) as lock:
        path = folder / LOG
        try:
            head = _read_head(folder) or EMPTY_TIP
        except ValueError:  # a damaged one may be the reason to begin
            head = EMPTY_TIP
        moved_log = None
        log_digest = ""
        if path.exists():
            moved_log = _free_name(folder)
            log_digest = digest_of(path)
        origin = {"file": log_digest, "head": list(head), "committed": list(counters.tip)}
        entry = {"begun": origin, "trained": counters.trained, "commits": counters.commits}
        line = _sealed_line(EMPTY_TIP, entry)
        with open_atomic(path, private=True, backup_path=moved_log) as file:
            file.write(canonical(line) + b"\n")
        tip = Tip(1, line[KEY])
        _write_head(folder, tip)
        lock.write(HighWaterMark(tip, counters.commits).pack())
    return moved_log


def _free_name(folder: Path) -> Path:
    """Return the path to move a log to: ``audit-1.jsonl``, or the first such name that is free."""
    number = 1
    while (folder / f"audit-{number}.jsonl").exists():
        number += 1
    return folder / f"audit-{number}.jsonl"


def _sealed_line(before: Tip, entry: Entry) -> Entry:
    """Return the entry that follows ``before``, with its number, its time and its digest."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return sealed({"number": before.lines + 1, "time": now, "previous": before.last, **entry})


def _write_head(folder: Path, tip: Tip) -> None:
    write_atomic(folder / HEAD, canonical(tip._asdict()) + b"\n", private=True)


def _read_head(folder: Path) -> Tip | None:
    """Read the head file of a log; None if it does not exist, a ValueError if it is damaged."""
    try:
        return Tip(**json.loads((folder / HEAD).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ValueError(f"{HEAD}, which records the number of lines in {LOG}, is damaged; {REMEDY}") from None


def _describe_torn(torn: bytes) -> dict[str, Any]:
    """Describe bytes that were cut off, for the next line of the log."""
    return {"bytes": len(torn), KEY: digest_of_message(torn)}
