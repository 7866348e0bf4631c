# SPDX-License-Identifier: Apache-2.0
"""What the parties keep on their disks: a file of nested values and tensors each, written all at once.

A site's, which is here, has its personal state, its ledgers and its last reply. The server's is
:mod:`perada.deploy.server.progress`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from perada.algorithms import Stacks
from perada.core.digests import WrongFormat, check_format
from perada.core.files import LOCK, FolderLock, sync, write_atomic
from perada.core.states import State
from perada.deploy.audit import (
    OLD_STATE_REMEDY,
    STATE,
    AuditLog,
    Committed,
    HighWaterMark,
    LogContent,
    Tip,
    check_chain,
    check_state,
    read_log,
)
from perada.deploy.protocol import RefusalError, Request, pack, read_header
from perada.privacy.accounting import Ledger

IMAGES_LEDGER, SITE_LEDGER = 0, 1
"""By which numbers a site's ledger knows what was spent of its images, and of the site as a whole."""
SITE_STATE, SITE_FORMAT = STATE, 5
FORMER_RUNS = "runs"
"""Folder, in that of the state, of the states of former runs."""
KeptT = TypeVar("KeptT")


def write_nested(path: Path, kept: Mapping[str, object], version: int, former: Path | None = None) -> None:
    """Write a file that only its owner may read.

    Args:
        path: The file.
        kept: Dictionaries, lists and dataclasses of numbers, texts, bytes and tensors.
        version: Of its format.
        former: Where the file that is replaced is kept; nowhere by default.
    """
    tensors: State = {}

    def in_json(value: Any) -> Any:  # noqa: ANN401  # what JSON does not know
        if not isinstance(value, Tensor | bytes):
            return vars(value)
        kind, name = ("$tensor" if isinstance(value, Tensor) else "$bytes"), str(len(tensors))
        content = value if isinstance(value, Tensor) else torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))
        tensors[name] = content
        return {kind: name}

    header = {"format": version, "kept": json.dumps(kept, default=in_json)}
    write_atomic(path, pack(header, tensors), private=True, former=former)


def read_nested(path: Path, version: int, build: Callable[..., KeptT]) -> KeptT:
    """What ``build`` makes of the dictionary that :func:`write_nested` wrote, given as keywords.

    Raises:
        ValueError: If the file is damaged, or of another version's format.
    """
    content = path.read_bytes()
    try:
        header, tensors = read_header(content, len(content)), load(content)

        def from_json(entry: dict[str, Any]) -> Any:  # noqa: ANN401  # what was written
            match list(entry.items()):
                case [("$tensor", name)]:
                    return tensors[name]
                case [("$bytes", name)]:
                    return tensors[name].numpy().tobytes()
            return entry

        check_format(path, header["format"], version)
        return build(**json.loads(header["kept"], object_hook=from_json))
    except WrongFormat:
        raise
    except Exception as error:  # whatever a damaged file gives
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a copy: nothing else says "
            "what was trained and spent"
        ) from error


@dataclass
class RunState:
    """Where a site is in a run."""

    run: str  # its id
    recipe: str = ""  # its digest
    client: int | None = None  # the site's number in it; None before it is known
    round: int = -1  # the last that was trained, or one more than there are after the fine-tuning; -1 before the first
    trained: int = 0  # how many rounds were
    message: str = ""  # digest of what was last asked
    reply: bytes = b""  # what was answered to it
    account: dict[str, Any] | None = None  # state of the run's ledgers; None where training is not private
    kept: Stacks | None = None  # what the client keeps, (1, ...) by role; None before the first round
    tuned: Stacks | None = None  # what it fine-tuned after the last one, likewise
    shared: State = field(default_factory=dict)  # the global state that the last round made; empty before it was told
    scored: int = -1  # the last round after which it scored models; -1 before the first
    score: str = ""  # digest of what was asked then
    scores: bytes = b""  # what was answered to it
    transport: str = ""  # what the transport called the run last, such as Flower's id
    rank: int = 0  # of the site's LoRA; 0 for that of the adapter
    update: State = field(default_factory=dict)  # for the secure sum of the round; empty where there is none
    shown: State = field(default_factory=dict)  # what the server sent for it
    norm: float = 0.0  # S that the server said for it, where sites clip and it moves
    losses: dict[str, float] = field(default_factory=dict)  # of the round, by role, for the sum
    received: str = ""  # digest of what was sent to be trained
    heard: dict[str, str] = field(default_factory=dict)  # that of each round
    summed: int = -1  # the last round whose update left under masks
    numbers: dict[str, float] = field(default_factory=dict)  # scores for a secure sum; empty where they stay
    asked: str = ""  # digest of the models that were scored
    counted: int = -1  # the last round after which scores left under masks
    data: dict[str, Any] = field(default_factory=dict)  # fingerprint of the images trained on; empty before the first


class SiteStore:
    """The state folder of a site.

    ``state.safetensors`` holds the run that was last trained, and what all runs together spent. A change is one
    renaming: after a crash the file is the one before or the one after. ``runs/`` has the former runs.

    Each change is counted. The number is in the state, in each line of the audit log and in the folder's lock file, so
    that an older copy of one of them is noticed when the folder is opened, and while it is open. The state also has the
    number of each former run, whose file could be put back as well.

    Args:
        folder: Is made for its owner alone, and locked.

    Attributes:
        total: What all runs have spent, of its images as client 0, where a round without privacy is one step without
            noise, and of the site as a whole as client 1, where a noisy secure sum is a step, and a training or scoring
            of which something leaves without the site's noise is a step without noise.
        rounds: How many all runs have trained.
        sampling: How private batches were drawn; None before the first.
        commits: How often the state was written.
        audit: The log of what leaves.

    Raises:
        OSError: If another worker uses the folder, or others may write to it.
        ValueError: If its file, or the audit log, is not what was written, is an older copy, or is gone while those of
            former runs are there.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FolderLock(folder, "worker")
        self.folder, self.total, self.rounds = folder, Ledger(), 0
        self.sampling: str | None = None
        self.commits = 0
        self._attempted: int | None = None  # the largest number that this process tried to write; None before the first
        self._tip = Tip()  # of the log, when the state was last written
        self._run: str | None = None
        self._former: dict[str, int] = {}  # commits of each former run's file
        try:
            self.current()
            log = read_log(folder)
            check_chain(log)
            committed = Committed(self.commits, self._tip, self.rounds, self._former)
            check_state(log, committed, HighWaterMark.unpack(self._lock.read()))
            check_former(folder, committed)
            self.audit = AuditLog(folder)
        except (ValueError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Let others have the folder."""
        if hasattr(self, "audit"):
            self.audit.close()
        self._lock.close()

    def current(self) -> RunState | None:
        """The run that was last trained, whose totals are taken over; None if there is none.

        Raises:
            ValueError: If the file is damaged or gone, or not the one that this process read or wrote last.
        """
        path = self.folder / SITE_STATE
        if not path.exists():
            check_not_lost(self.folder, max(self.commits, HighWaterMark.unpack(self._lock.read()).commits))
            return None
        state, header = read_state(path)
        commits = header["commits"]
        if self._attempted is not None and not self.commits <= commits <= self._attempted:
            raise ValueError(
                f"{str(path)!r} was replaced while this worker ran: it is the state that was written as number "
                f"{commits}, and the worker's own is number {self.commits}; put that one back, or stop the worker and "
                "put the newest copy of the whole folder in its place"
            )
        if self._attempted is not None and commits > self.commits:
            # A commit failed after its renaming. What is there counts from now on, so it must not be lost again.
            sync([path, self.folder])
        self.total.load_state_dict(header["total"])
        self.rounds, self.sampling, self._run = header["rounds"], header["sampling"], state.run
        self.commits, self._tip, self._former = commits, header["audit"], header["former"]
        self._attempted = commits
        return state

    def load(self, run: str) -> RunState:
        """Where the site is in a run; at its beginning if it does not know it.

        Raises:
            ValueError: If its file is damaged or another's.
            Refused: If its file is gone, or is an older copy.
        """
        current = self.current()
        if current is not None and current.run == run:
            return current
        former = former_file(self.folder, run)
        if run not in self._former:
            return RunState(run)
        if not former.exists():
            raise RefusalError(
                f"{str(former)!r} is gone, so run {run} cannot be continued; restore it from a copy", "other"
            )
        state, header = read_state(former)
        if state.run != run:
            raise ValueError(f"{str(former)!r} holds the run {state.run}; restore it from a copy")
        if header["commits"] != self._former[run]:
            raise RefusalError(_older_former(former, header["commits"], self._former[run]), "other")
        return state

    @property
    def runs(self) -> list[str]:
        """Ids of all runs that the site has trained in."""
        return sorted(self._former if self._run is None else {*self._former, self._run})

    def commit(self, state: RunState, total: Ledger, rounds: int, sampling: str | None) -> None:
        """Write a run's state and the totals, all at once."""
        former_path = None
        former = {run: commits for run, commits in self._former.items() if run != state.run}
        if self._run not in (None, state.run):
            assert self._run is not None
            (self.folder / FORMER_RUNS).mkdir(exist_ok=True, mode=0o700)
            former_path = former_file(self.folder, self._run)
            former[self._run] = self.commits
        commits = self.commits + 1
        tip = self.audit.tip
        kept = {
            "state": state,
            "total": total.state_dict(),
            "rounds": rounds,
            "sampling": sampling,
            "commits": commits,
            "audit": list(tip),
            "former": former,
        }
        self._attempted = commits
        write_nested(self.folder / SITE_STATE, kept, SITE_FORMAT, former_path)
        self.total, self.rounds, self.sampling, self._run = total, rounds, sampling, state.run
        self.commits, self._tip, self._former = commits, tip, former

    def note(self, message: bytes, reply: bytes, spent: Callable[[Request], object]) -> None:
        """Write a reply to the audit log, before it leaves; see :meth:`AuditLog.note`."""
        self.audit.note(message, reply, trained=self.rounds, commits=self.commits, spent=spent)
        self._lock.write(HighWaterMark(self.audit.tip, self.commits).pack())


def check_not_lost(folder: Path, commits: int) -> None:
    """Refuse, by a ValueError, a folder without a state in which one was written before."""
    if commits or (folder / FORMER_RUNS).exists():
        raise ValueError(
            f"{str(folder)!r} has lost its {SITE_STATE}, which says what was spent on these images; "
            "restore it from a copy"
        )


def former_file(folder: Path, run: str) -> Path:
    """Where the state of a former run is kept."""
    return folder / FORMER_RUNS / f"{run}.safetensors"


def check_former(folder: Path, committed: Committed) -> None:
    """Compare the files of former runs with the state: none of them, nor the state itself, may be an older copy.

    One that is gone is no reason to refuse the folder: its run cannot be continued, and the totals have what it spent.

    Args:
        folder: Of the site's state.
        committed: What the state says.

    Raises:
        ValueError: In one line, which says what is wrong and what to do.
    """
    for path in sorted((folder / FORMER_RUNS).glob("*.safetensors")):
        commits = _commits_of(path)
        if commits > committed.commits:
            raise ValueError(
                f"{SITE_STATE} is an older copy: it is the state that was written as number {committed.commits}, and "
                f"{str(path)!r} as number {commits}, so what was spent and sent since is forgotten; {OLD_STATE_REMEDY}"
            )
        if path.stem in committed.former and commits != committed.former[path.stem]:
            raise ValueError(_older_former(path, commits, committed.former[path.stem]))


def _older_former(path: Path, found: int, expected: int) -> str:
    return (
        f"{str(path)!r} is an older copy: it is the state that was written as number {found}, and that of number "
        f"{expected} was put aside; put this one back, or remove the file if the run is over"
    )


def _commits_of(path: Path) -> int:
    """How often the state had been written when a file was, without reading its tensors."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            header = read_header(size + file.read(int.from_bytes(size, "little")), path.stat().st_size)
        check_format(path, header["format"], SITE_FORMAT)
        return int(json.loads(header["kept"])["commits"])
    except WrongFormat:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """A run's state, and what the file says of all runs; a ValueError if it is damaged.

    The latter are ``total``, ``rounds``, ``sampling``, ``commits``, ``audit`` (a :class:`Tip`) and ``former``.
    """

    def build(state: dict[str, Any], audit: Sequence[Any], **all_runs: Any) -> tuple[RunState, dict[str, Any]]:
        Ledger().load_state_dict(all_runs["total"])
        names = ("total", "rounds", "sampling", "commits", "former")
        return RunState(**state), {name: all_runs[name] for name in names} | {"audit": Tip(*audit)}

    return read_nested(path, SITE_FORMAT, build)


def read_committed(folder: Path) -> Committed:
    """What the state in a folder says of itself; the defaults if there is none, a ValueError if it is damaged."""
    path = folder / SITE_STATE
    if not path.is_file():
        return Committed()
    header = read_state(path)[1]
    return Committed(header["commits"], header["audit"], header["rounds"], header["former"])


def read_mark(folder: Path) -> HighWaterMark:
    """The furthest point that the lock file in a folder tells of."""
    path = folder / LOCK
    return HighWaterMark.unpack(path.read_bytes() if path.is_file() else b"")


def read_witnesses(folder: Path) -> tuple[LogContent, Committed, HighWaterMark]:
    """What the log, the state and the lock file say, also while a worker writes to them; they are not compared."""
    while True:
        # The lock file is written last, so what it says was in the two others before.
        mark = read_mark(folder)
        before = read_committed(folder)
        log = read_log(folder)
        if read_committed(folder) == before:
            return log, before, mark


def read_runs(folder: Path) -> tuple[list[RunState], dict[str, Any]]:
    """The runs of a site, the current one first, and what :func:`read_state` says of all; nothing if there are none."""
    if not (folder / SITE_STATE).is_file():
        return [], {}
    current, all_runs = read_state(folder / SITE_STATE)
    former = [former_file(folder, run) for run in sorted(all_runs["former"])]
    return [current, *(read_state(path)[0] for path in former if path.is_file())], all_runs
