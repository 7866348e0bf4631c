# SPDX-License-Identifier: Apache-2.0
"""What a site keeps on its disk: its personal state, its ledgers and its last reply, in one file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from perada.algorithms import Stacks
from perada.core.files import FolderLock, write_atomic
from perada.core.states import State
from perada.deploy.protocol import header_of, pack
from perada.privacy.accounting import Ledger

STATE = "state.safetensors"
FORMAT = 2


@dataclass
class RunState:
    """Where a site is in a run.

    Attributes:
        run: Id of the run.
        transport: What the transport called it last, such as Flower's id.
        recipe: Digest of its recipe.
        client: The site's number in it; None before it is known.
        round: The last round that was trained, or one more than there are after the fine-tuning; -1 before the first.
        trained: How many rounds were.
        message: Digest of what was last asked.
        reply: What was answered to it.
        account: State of the run's ledgers; None where training is not private.
        kept: What the client keeps, (1, ...) by role; None before the first round.
        tuned: What it fine-tuned after the last one, likewise.
        shared: The global state that the last round made; empty before it was told.
        scored: The last round after which it scored models; -1 before the first.
        score: Digest of what was asked then.
        scores: What was answered to it.
    """

    run: str
    recipe: str = ""
    client: int | None = None
    round: int = -1
    trained: int = 0
    message: str = ""
    reply: bytes = b""
    account: dict[str, Any] | None = None
    kept: Stacks | None = None
    tuned: Stacks | None = None
    shared: State = field(default_factory=dict)
    scored: int = -1
    score: str = ""
    scores: bytes = b""
    transport: str = ""


_PLAIN = ("run", "recipe", "client", "round", "trained", "message", "account", "scored", "score", "transport")
"""What of it is written as it is."""
_REPLIES = ("reply", "scores")
"""What of it is bytes."""


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
            if self.current() is None and (folder / "runs").exists():
                raise ValueError(
                    f"{str(folder)!r} has former runs and no {STATE}, where it says what they spent; restore it from a "
                    "copy, or give another folder and lower limits"
                )
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
            if self._lock.marked:
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
        header = {name: getattr(state, name) for name in _PLAIN}
        header |= {"total": total.state_dict(), "rounds": rounds, "sampling": sampling, "format": FORMAT}
        tensors = {f"shared/{key}": value for key, value in state.shared.items()}
        for name, stacks in (("kept", state.kept), ("tuned", state.tuned)):
            header[name] = None if stacks is None else list(stacks)
            for role, stack in (stacks or {}).items():
                tensors |= {f"{name}/{role}/{key}": value for key, value in stack.items()}
        for name in _REPLIES:
            if content := getattr(state, name):
                tensors[name] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        write_atomic(self.folder / STATE, pack(header, tensors), private=True, former=former)
        self._lock.mark()
        self.total, self.rounds, self.sampling, self._run = total, rounds, sampling, state.run


def read_state(path: Path) -> tuple[RunState, dict[str, Any]]:
    """A run's state, and all that its file says.

    Raises:
        ValueError: If it is not what :meth:`Book.commit` wrote.
    """
    content = path.read_bytes()
    try:
        header = header_of(content, len(content))
        if header["format"] != FORMAT:
            raise KeyError(f"format {header['format']}, this version reads {FORMAT}")
        tensors = load(content)
        Ledger().load_state_dict(header["total"])
        _ = header["rounds"], header["sampling"]
        state = RunState(**{name: header[name] for name in _PLAIN if name in header or name != "transport"})
        state.shared = {key[7:]: value for key, value in tensors.items() if key.startswith("shared/")}
        for name in ("kept", "tuned"):
            if header[name] is not None:
                setattr(state, name, {role: _part(tensors, f"{name}/{role}/") for role in header[name]})
        for name in _REPLIES:
            setattr(state, name, tensors[name].numpy().tobytes() if name in tensors else b"")
    except Exception as error:  # whatever a damaged file gives
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a copy: without its ledger "
            "nobody knows what was spent"
        ) from error
    return state, header


def _part(tensors: State, prefix: str) -> State:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
