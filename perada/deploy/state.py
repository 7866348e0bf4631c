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
from perada.core.files import FolderLock, write_atomic
from perada.core.states import State
from perada.deploy.audit import AuditLog, Tip, check_state, read_log
from perada.deploy.protocol import header_of, pack
from perada.privacy.accounting import Ledger

IMAGES, WHOLE = 0, 1
"""By which numbers a site's ledger knows what was spent of its images, and of the site as a whole."""
SITE_STATE, SITE_FORMAT = "state.safetensors", 4
KeptT = TypeVar("KeptT")


def write_kept(path: Path, kept: Mapping[str, object], version: int, former: Path | None = None) -> None:
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


def read_kept(path: Path, version: int, build: Callable[..., KeptT]) -> KeptT:
    """What ``build`` makes of the dictionary that :func:`write_kept` wrote, given as keywords.

    Raises:
        ValueError: If the file is damaged, or of another version's format.
    """
    content = path.read_bytes()
    try:
        header, tensors = header_of(content, len(content)), load(content)

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


class Book:
    """The state folder of a site.

    ``state.safetensors`` holds the run that was last trained, and what all runs together spent. A change is one
    renaming: after a crash the file is the one before or the one after. ``runs/`` has the former runs. It also says how
    far the audit log was, so that neither can be put back alone.

    Args:
        folder: Is made for its owner alone, and locked.

    Attributes:
        total: What all runs have spent, of its images as client 0, where a round without privacy is one step without
            noise, and of the site as a whole as client 1, where noisy secure sums are steps.
        rounds: How many all runs have trained.
        sampling: How private batches were drawn; None before the first.
        audit: The log of what leaves.

    Raises:
        OSError: If another worker uses the folder, or others may write to it.
        ValueError: If its file, or the audit log, is not what was written, or is gone while those of former runs are
            there.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FolderLock(folder, "worker")
        self.folder, self.total, self.rounds = folder, Ledger(), 0
        self.sampling: str | None = None
        self._run: str | None = None
        self._committed: Tip | None = None
        try:
            self.current()
            self.audit = AuditLog(folder)
            check_state(read_log(folder), self._committed, self.rounds)
        except (ValueError, OSError):
            self.close()
            raise

    def close(self) -> None:
        """Let others have the folder."""
        if hasattr(self, "audit"):
            self.audit.close()
        self._lock.close()

    def current(self) -> RunState | None:
        """The run that was last trained, whose totals are taken over; None if there is none."""
        path = self.folder / SITE_STATE
        if not path.exists():
            if self._lock.marked or (self.folder / "runs").exists():
                raise ValueError(
                    f"{str(self.folder)!r} has lost its {SITE_STATE}, which says what was spent on these images; "
                    "restore it from a copy"
                )
            return None
        state, header = read_state(path)
        self.total.load_state_dict(header["total"])
        self.rounds, self.sampling, self._run = header["rounds"], header["sampling"], state.run
        self._committed = header["audit"]
        return state

    def load(self, run: str) -> RunState:
        """Where the site is in a run; at its beginning if it does not know it."""
        current = self.current()
        if current is not None and current.run == run:
            return current
        former = self.folder / "runs" / f"{run}.safetensors"
        state = read_state(former)[0] if former.exists() else RunState(run)
        if state.run != run:
            raise ValueError(f"{str(former)!r} holds the run {state.run}; restore it from a copy")
        return state

    @property
    def runs(self) -> list[str]:
        """Ids of all runs that the site has trained in."""
        former = {path.stem for path in (self.folder / "runs").glob("*.safetensors")}
        return sorted(former if self._run is None else {*former, self._run})

    def commit(self, state: RunState, total: Ledger, rounds: int, sampling: str | None) -> None:
        """Write a run's state and the totals, all at once."""
        former = None
        if self._run not in (None, state.run):
            (self.folder / "runs").mkdir(exist_ok=True, mode=0o700)
            former = self.folder / "runs" / f"{self._run}.safetensors"
        kept = {"state": state, "total": total.state_dict(), "rounds": rounds, "sampling": sampling}
        kept["audit"] = list(self.audit.tip)
        write_kept(self.folder / SITE_STATE, kept, SITE_FORMAT, former)
        self._lock.mark()
        self.total, self.rounds, self.sampling, self._run = total, rounds, sampling, state.run


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """A run's state, and ``total``, ``rounds``, ``sampling`` and ``audit`` of all runs; a ValueError if damaged."""

    def build(
        state: dict[str, Any], audit: Sequence[Any] | None = None, **all_runs: Any
    ) -> tuple[RunState, dict[str, Any]]:
        Ledger().load_state_dict(all_runs["total"])
        told = {name: all_runs[name] for name in ("total", "rounds", "sampling")}
        return RunState(**state), told | {"audit": None if audit is None else Tip(*audit)}

    return read_kept(path, SITE_FORMAT, build)


def read_runs(folder: Path) -> tuple[list[RunState], dict[str, Any]]:
    """The runs of a site, the current one first, and what :func:`read_state` says of all; nothing if there are none."""
    if not (folder / SITE_STATE).is_file():
        return [], {}
    current, all_runs = read_state(folder / SITE_STATE)
    former = [read_state(path)[0] for path in sorted((folder / "runs").glob("*.safetensors"))]
    return [current, *(one for one in former if one.run != current.run)], all_runs
