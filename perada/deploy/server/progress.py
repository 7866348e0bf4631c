# SPDX-License-Identifier: Apache-2.0
"""How far a deployed run is: the server's file, with its states, the sites that take part, and each round's record."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.core.files import write_atomic
from perada.core.states import State, laid_out, strides_of
from perada.deploy.state import read_nested, write_nested
from perada.deploy.sums.progress import SumState
from perada.federation.participation import Participation

SERVER_STATE, SERVER_FORMAT, METRICS = "server.safetensors", 3, "metrics.csv"
SUM_STATE, SUM_FORMAT = "sum.safetensors", 1


@dataclass
class Member:
    """A site of the roster; its place there is its number in the run."""

    name: str  # as the transport knows it
    size: int | None  # training images; None where the site does not say
    joined: int  # the first round that it could take part in
    left: str = ""  # why it takes part no more; empty if it does
    late: int = -1  # the last round in which it did not answer in time
    lied: str = ""  # what it did in a secure sum that no honest site does; empty if nothing is proven
    rounds: int = 0  # that it took part in
    last_round: int = 0  # that it took part in last, counted from 1; 0 if it never did
    epsilon: dict[str, float | None] = field(default_factory=dict)  # by ledger, as it last said

    def spent(self, ledger: str) -> float:
        """Return the ε that the site last said; infinite if it does not say, and 0 if it took part in no round."""
        if not self.rounds and not self.epsilon:
            return 0.0
        value = self.epsilon.get(ledger)
        return math.inf if value is None else value


@dataclass
class RoundRecord:
    """What happened in a round; sites go by their names."""

    round: int  # counted from 0
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # of whom the answer counted
    summed: list[str] = field(default_factory=list)  # who is in the secure sum
    masked: list[str] = field(default_factory=list)  # whose numbers came under masks
    failed: dict[str, str] = field(default_factory=dict)  # code of each other site
    far: dict[str, float] = field(default_factory=dict)  # whose change was so many times as long as the median
    away: list[str] = field(default_factory=list)  # sites of the run that were not connected
    outside: dict[str, str] = field(default_factory=dict)  # why sites that were connected have not joined
    void: str = ""  # why the global state stayed as it was; empty if it moved
    seconds: float = 0.0  # from the first message to the new state
    up: float = 0.0  # megabytes of replies
    down: float = 0.0  # and of messages


@dataclass
class RunProgress:
    """How far a run is."""

    run: str  # its id
    recipe: str  # its digest
    rounds: int
    done: int = 0  # rounds that are over
    tuned: bool = False  # whether the fine-tuning after them is
    scored: int = -1  # the round after which models were last scored
    roster: list[Member] = field(default_factory=list)  # all sites that ever joined, in the order of their numbers
    labels: str = ""  # digest of the classes that all sites have
    records: list[RoundRecord] = field(default_factory=list)  # of each round
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of each round
    asked: list[str] = field(default_factory=list)  # sites asked in the round that is under way, in their order
    strides: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # of the states' tensors, as of strides_of
    level: dict[str, Any] | None = None  # state of the privacy of whole clients
    moves: list[float] = field(default_factory=list)  # how far each secure sum moved the model, at the full rate
    spoiled: int = 0  # rounds in a row that the model, or a site, has spoiled since the last secure sum
    told: dict[str, str] = field(default_factory=dict)  # digests of what sites were told, by round; for secure sums


def participation_of(progress: RunProgress, sites_per_round: int | None) -> Participation:
    """When the sites of a run took part last, of whom so many are asked in a round (None: all)."""
    return Participation([member.last_round for member in progress.roster], progress.done, sites_per_round)


def write_progress(folder: Path, progress: RunProgress, states: dict[str, Any]) -> None:
    """Write the states of the server and how far it is, all at once, and the metrics beside them."""
    if progress.history:  # first: a run that was killed in between writes them again
        write_atomic(folder / METRICS, _csv(progress.history).encode(), private=True)
    progress.strides = {name: strides_of(state) for name, state in _named(states).items()}
    write_nested(folder / SERVER_STATE, {"progress": progress, "states": states}, SERVER_FORMAT)


def read_progress(folder: Path) -> tuple[RunProgress, dict[str, Any]]:
    """What :func:`write_progress` wrote.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is damaged.
    """
    path = folder / SERVER_STATE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} holds no deployed run: it has no {SERVER_STATE}; give the folder of one"
        )

    def build(progress: dict[str, Any], states: dict[str, Any]) -> tuple[RunProgress, dict[str, Any]]:
        progress["roster"] = [Member(**member) for member in progress["roster"]]
        progress["records"] = [RoundRecord(**record) for record in progress["records"]]
        read = RunProgress(**progress)
        return read, _placed(states, read.strides)

    return read_nested(path, SERVER_FORMAT, build)


def write_sum(folder: Path, run: str, state: SumState) -> None:
    """Write how far the secure sum of the round under way is; the file is a small one beside the server's own."""
    write_nested(folder / SUM_STATE, {"run": run, "state": state}, SUM_FORMAT)


def read_sum(folder: Path, run: str, round: int, of: str) -> SumState | None:
    """How far a secure sum was when the server was stopped; None if it was not begun.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / SUM_STATE
    if not path.is_file():
        return None

    def build(run: str, state: dict[str, Any]) -> tuple[str, SumState]:
        return run, SumState(**state)

    of_run, state = read_nested(path, SUM_FORMAT, build)
    same = (of_run, state.round, state.of) == (run, round, of)
    return state if same else None


def _named(states: dict[str, Any], group: str = "") -> dict[str, State]:
    """All states of a server by one name each, those that a round began with too, if they are kept as ``former``."""
    found = {f"{group}global": states["global"]}
    for name, state in states["server"].items():
        found[f"{group}server/{name}"] = state
    if "former" in states:
        found |= _named(states["former"], "former/")
    return found


def _placed(states: dict[str, Any], strides: dict[str, dict[str, list[int]]], group: str = "") -> dict[str, Any]:
    """The states as they lay in memory when they were written; ``strides`` are by the names of :func:`_named`."""
    found = dict(states)
    found["global"] = laid_out(states["global"], strides.get(f"{group}global", {}))
    found["server"] = {
        name: laid_out(state, strides.get(f"{group}server/{name}", {})) for name, state in states["server"].items()
    }
    if "former" in states:
        found["former"] = _placed(states["former"], strides, "former/")
    return found


def _csv(history: list[dict[str, float]]) -> str:
    """The rounds as a simulation's ``metrics.csv`` has them."""
    text, names = io.StringIO(), sorted({name for row in history for name in row} - {"round", "step"})
    writer = csv.DictWriter(text, ["epoch", "round", "step", *names], restval="", lineterminator="\n")
    writer.writeheader()
    for row in history:
        shown = {name: value for name, value in row.items() if not math.isnan(value)}
        writer.writerow({"epoch": int(row["round"]), **shown})
    return text.getvalue()
