# SPDX-License-Identifier: Apache-2.0
"""The server's file: how far a deployed run is, with its states, its sites, and a record of each round."""

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

SERVER_STATE = "server.safetensors"
SERVER_FORMAT = 4
METRICS = "metrics.csv"
SUM_STATE = "sum.safetensors"
SUM_FORMAT = 2


@dataclass
class Member:
    """A site of the run, whose number is its index in the roster.

    Attributes:
        name: Name by which the transport knows it.
        size: Number of training images; None if the site does not report it.
        joined: First round that it could take part in.
        left: Why it no longer takes part; empty if it does.
        late: Last round in which it did not answer in time.
        lie: What it did in a secure sum that no honest site does; empty if nothing is proven.
        rounds: Number of rounds that it took part in.
        last_round: Last round that it took part in, counted from 1; 0 if it never did.
        epsilon: ε by ledger, as last reported by the site; None is infinite.
    """

    name: str
    size: int | None
    joined: int
    left: str = ""
    late: int = -1
    lie: str = ""
    rounds: int = 0
    last_round: int = 0
    epsilon: dict[str, float | None] = field(default_factory=dict)

    def spent(self, ledger: str) -> float:
        """Return the ε last reported by the site; infinite if it reports none, 0 if it took part in no round."""
        if not self.rounds and not self.epsilon:
            return 0.0
        value = self.epsilon.get(ledger)
        return math.inf if value is None else value


@dataclass
class RoundRecord:
    """What happened in a round; sites are named.

    Attributes:
        round: Counted from 0.
        selected: Sites that were selected, and sent a request.
        answered: Sites whose answer counted.
        summed: Sites in the secure sum.
        masked: Sites whose masked vector arrived.
        failed: Code of each other site.
        outliers: Sites with an unusually large change, with its multiple of the median.
        away: Sites of the run that were not connected.
        outside: Why connected sites have not joined.
        void: Why the global state did not change; empty if it did.
        seconds: Time from the first message to the new state.
        up: Megabytes of replies.
        down: Megabytes of messages.
    """

    round: int
    selected: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    masked: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    outliers: dict[str, float] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)
    outside: dict[str, str] = field(default_factory=dict)
    void: str = ""
    seconds: float = 0.0
    up: float = 0.0
    down: float = 0.0


@dataclass
class RunProgress:
    """Progress of a run.

    Attributes:
        run: Id of the run.
        recipe: Digest of its recipe.
        rounds: Number of rounds of the recipe.
        done: Number of rounds that are over.
        tuned: Whether the fine-tuning after them is over.
        scored: Round after which models were last scored.
        roster: All sites that ever joined, in the order of their numbers.
        labels: Digest of the classes that all sites have.
        records: What happened in each round.
        history: Metrics of each round.
        selected: Sites that are selected for the round under way, in their order.
        strides: Strides of the states' tensors, by state and tensor.
        client_level: State of the client-level privacy.
        moves: How far recent secure sums moved the model, at the full learning rate.
        spoiled: Number of consecutive rounds, since the last secure sum, that the model or a site has spoiled.
        sent_digests: Digests of what sites were sent in each round, for secure sums.
    """

    run: str
    recipe: str
    rounds: int
    done: int = 0
    tuned: bool = False
    scored: int = -1
    roster: list[Member] = field(default_factory=list)
    labels: str = ""
    records: list[RoundRecord] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    selected: list[str] = field(default_factory=list)
    strides: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    client_level: dict[str, Any] | None = None
    moves: list[float] = field(default_factory=list)
    spoiled: int = 0
    sent_digests: dict[str, str] = field(default_factory=dict)


def participation_of(progress: RunProgress, sites_per_round: int | None) -> Participation:
    """Return when each site of a run last took part.

    Args:
        progress: Progress of the run.
        sites_per_round: Number of sites that are asked in a round; None for all.
    """
    return Participation([member.last_round for member in progress.roster], progress.done, sites_per_round)


def write_progress(folder: Path, progress: RunProgress, states: dict[str, Any]) -> None:
    """Write the server's states and the progress in one step, and the metrics next to them."""
    if progress.history:
        # Before the state: a run that is killed in between writes the metrics again.
        write_atomic(folder / METRICS, _format_csv(progress.history).encode(), private=True)
    progress.strides = {name: strides_of(state) for name, state in _flatten(states).items()}
    write_nested(folder / SERVER_STATE, {"progress": progress, "states": states}, SERVER_FORMAT)


def read_progress(folder: Path) -> tuple[RunProgress, dict[str, Any]]:
    """Read what :func:`write_progress` wrote.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is damaged.
    """
    path = folder / SERVER_STATE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} does not contain a deployed run: it has no {SERVER_STATE}; pass the folder of one"
        )

    def build(progress: dict[str, Any], states: dict[str, Any]) -> tuple[RunProgress, dict[str, Any]]:
        progress["roster"] = [Member(**member) for member in progress["roster"]]
        progress["records"] = [RoundRecord(**record) for record in progress["records"]]
        restored = RunProgress(**progress)
        return restored, _lay_out(states, restored.strides)

    return read_nested(path, SERVER_FORMAT, build)


def write_sum(folder: Path, run: str, state: SumState) -> None:
    """Write the state of a secure sum to a small file next to the server's."""
    write_nested(folder / SUM_STATE, {"run": run, "state": state}, SUM_FORMAT)


def read_sum(folder: Path, run: str, round: int, of: str) -> SumState | None:
    """Return the state that a secure sum had when the server was stopped; None if it had not begun.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / SUM_STATE
    if not path.is_file():
        return None

    def build(run: str, state: dict[str, Any]) -> tuple[str, SumState]:
        return run, SumState(**state)

    saved_run, state = read_nested(path, SUM_FORMAT, build)
    # The file stays when a sum is over, so it may be that of another one.
    is_this_sum = (saved_run, state.round, state.of) == (run, round, of)
    return state if is_this_sum else None


def _flatten(states: dict[str, Any], prefix: str = "") -> dict[str, State]:
    """Return all states of a server by unique names, with those before the last secure sum (``former``)."""
    flat = {f"{prefix}global": states["global"]}
    for name, state in states["server"].items():
        flat[f"{prefix}server/{name}"] = state
    if "former" in states:
        flat |= _flatten(states["former"], "former/")
    return flat


def _lay_out(states: dict[str, Any], strides: dict[str, dict[str, list[int]]], prefix: str = "") -> dict[str, Any]:
    """Return states with the strides that they had when they were written.

    Args:
        states: The server's states.
        strides: Strides by the names of :func:`_flatten`.
        prefix: Prefix of these names.
    """
    restored = dict(states)
    restored["global"] = laid_out(states["global"], strides.get(f"{prefix}global", {}))
    restored["server"] = {
        name: laid_out(state, strides.get(f"{prefix}server/{name}", {})) for name, state in states["server"].items()
    }
    if "former" in states:
        restored["former"] = _lay_out(states["former"], strides, "former/")
    return restored


def _format_csv(history: list[dict[str, float]]) -> str:
    """Format the rounds as a simulation's ``metrics.csv``."""
    names = {name for row in history for name in row} - {"round", "step"}
    text = io.StringIO()
    writer = csv.DictWriter(text, ["epoch", "round", "step", *sorted(names)], restval="", lineterminator="\n")
    writer.writeheader()
    for row in history:
        finite = {name: value for name, value in row.items() if not math.isnan(value)}
        writer.writerow({"epoch": int(row["round"]), **finite})
    return text.getvalue()
