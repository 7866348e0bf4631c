# SPDX-License-Identifier: Apache-2.0
"""What a site keeps on its disk: its personal state, its ledgers and its last reply, in one file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.algorithms import Stacks
from perada.core.files import FolderLock
from perada.core.states import State
from perada.deploy.files import read_kept, write_kept
from perada.privacy.accounting import Ledger

STATE = "state.safetensors"
FORMAT = 3


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


class Book:
    """The state folder of a site.

    ``state.safetensors`` holds the run that was last trained, and what all runs together spent. A change is one
    renaming: after a crash the file is the one before or the one after. ``runs/`` has the former runs.

    Args:
        folder: Is made for its owner alone, and locked.

    Attributes:
        total: What all runs have spent, as client 0; a round without privacy is one step without noise.
        rounds: How many all runs have trained.
        sampling: How private batches were drawn; None before the first.

    Raises:
        OSError: If another worker uses the folder, or others may write to it.
        ValueError: If its file is not what was written, or is gone while those of former runs are there.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = FolderLock(folder, "worker")
        self.folder, self.total, self.rounds = folder, Ledger(), 0
        self.sampling: str | None = None
        self._run: str | None = None
        try:
            self.current()
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()

    def current(self) -> RunState | None:
        """The run that was last trained, whose totals are taken over; None if there is none."""
        path = self.folder / STATE
        if not path.exists():
            if self._lock.marked or (self.folder / "runs").exists():
                raise ValueError(
                    f"{str(self.folder)!r} has lost its {STATE}, which says what was spent on these images; restore it "
                    "from a copy"
                )
            return None
        state, header = read_state(path)
        self.total.load_state_dict(header["total"])
        self.rounds, self.sampling, self._run = header["rounds"], header["sampling"], state.run
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
        """Ids of all runs that the site has trained in, the current one last."""
        former = sorted(path.stem for path in (self.folder / "runs").glob("*.safetensors") if path.stem != self._run)
        return former if self._run is None else [*former, self._run]

    def commit(self, state: RunState, total: Ledger, rounds: int, sampling: str | None) -> None:
        """Write a run's state and the totals, all at once."""
        former = None
        if self._run not in (None, state.run):
            (self.folder / "runs").mkdir(exist_ok=True, mode=0o700)
            former = self.folder / "runs" / f"{self._run}.safetensors"
        kept = {"state": state, "total": total.state_dict(), "rounds": rounds, "sampling": sampling}
        write_kept(self.folder / STATE, kept, FORMAT, former)
        self._lock.mark()
        self.total, self.rounds, self.sampling, self._run = total, rounds, sampling, state.run


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """A run's state, and the ``total``, ``rounds`` and ``sampling`` of all runs; a ValueError if it is damaged."""

    def build(state: dict[str, Any], **all_runs: Any) -> tuple[RunState, dict[str, Any]]:
        Ledger().load_state_dict(all_runs["total"])
        return RunState(**state), {name: all_runs[name] for name in ("total", "rounds", "sampling")}

    return read_kept(path, FORMAT, build)
