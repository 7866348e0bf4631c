# SPDX-License-Identifier: Apache-2.0
"""The server's files: the progress of a deployed run with its states, its sites and a record of each round."""

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perada.deploy.server import SERVER_STATE
from perada.deploy.state import read_nested, write_nested
from perada.deploy.sums.progress import SumState
from perada.system.files import write_atomic

if TYPE_CHECKING:
    from perada.federation.participation import Participation

SERVER_FORMAT = 5
METRICS = "metrics.csv"
SUM_STATE = "sum.safetensors"
"""Name of the file with the state of the secure sum under way."""
SUM_FORMAT = 3
SCORE_PREFIXES = ("personal/", "global/", "both/")
"""How the names of scores begin among the metrics of a round."""


@dataclass
class Member:
    """A site of the run, whose number is its index in the roster.

    Attributes:
        name: Name of the site in the transport.
        size: Number of training images; None if the site does not report it.
        joined: First round that it could take part in, counted from 0.
        left: Why it no longer takes part; empty if it does.
        late: Last round in which it did not answer in time, counted from 0; -1 if there is none.
        lie: Proven misbehaviour in a secure sum that no honest site shows; empty if there is none.
        rounds: Number of rounds that it took part in.
        last_round: Last round that it took part in, counted from 1; 0 if it never did.
        epsilon: ε by ledger, as last reported by the site; None if infinite.
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
        """Return the ε of a ledger, as last reported by the site.

        It is 0 before the site's first round, and infinite if the site does not report it afterwards.
        """
        if not self.rounds and not self.epsilon:
            return 0.0
        value = self.epsilon.get(ledger)
        if value is None:
            return math.inf
        return value


@dataclass
class RoundRecord:
    """Events of a round, in which sites are given by their names.

    Attributes:
        round: Number of the round, counted from 0.
        selected: Sites that were selected and received a request.
        answered: Sites that answered as requested.
        summed: Sites that are part of the secure sum.
        masked: Sites whose masked vector arrived.
        failed: Error code of each selected site whose answer was not used.
        outliers: Sites with an unusually large change, and how many times the median it is.
        away: Sites of the run that were not connected.
        outside: Connected sites that have not joined the run, and why.
        void: Why the global state did not change; empty if it did.
        seconds: Time from the first message to the new state.
        up: Megabytes received from sites.
        down: Megabytes sent to sites.
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

    @property
    def used(self) -> list[str]:
        """Sites whose answers are part of the new global state; none if it did not change."""
        if self.void:
            return []
        return self.summed or self.answered


@dataclass
class RunProgress:
    """Progress of a run.

    Attributes:
        run: Id of the run.
        recipe: Digest of its recipe.
        rounds: Number of rounds of the recipe.
        done: Number of completed rounds.
        tuned: Whether the fine-tuning after the last round is completed.
        scored: Round after which models were last scored; -1 if they never were.
        roster: All sites that ever joined, in the order of their numbers.
        has_classes: Whether models predict classes, whose scores are shown in percent, and not numbers.
        labels: Digest of the classes, which must be the same at all sites; empty until it is known.
        records: Events of each round.
        history: Metrics of each round.
        selected: Sites that are selected for the round under way, in order.
        client_level: State of the client-level privacy; None without it.
        moves: How far recent secure sums moved the model, at the full learning rate.
        spoiled: Number of rounds since the last secure sum that failed because of the model or of a site.
        sent_digests: Digests of what sites were sent in each round, for secure sums.
    """

    run: str
    recipe: str
    rounds: int
    done: int = 0
    tuned: bool = False
    scored: int = -1
    roster: list[Member] = field(default_factory=list)
    has_classes: bool = True
    labels: str = ""
    records: list[RoundRecord] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    selected: list[str] = field(default_factory=list)
    client_level: dict[str, Any] | None = None
    moves: list[float] = field(default_factory=list)
    spoiled: int = 0
    sent_digests: dict[str, str] = field(default_factory=dict)


def is_over(progress: RunProgress) -> bool:
    """Return whether a run has trained all rounds, fine-tuned if its recipe does, and scored the models of its end."""
    return progress.scored == progress.done >= progress.rounds


def participation_of(progress: RunProgress, sites_per_round: int | None) -> "Participation":
    """Return the record of when each site of a run last took part.

    Args:
        progress: Progress of the run.
        sites_per_round: Number of sites that are selected in a round; None for all.
    """
    from perada.federation.participation import Participation

    last_rounds = [member.last_round for member in progress.roster]
    return Participation(last_rounds, progress.done, sites_per_round)


def write_progress(folder: Path, progress: RunProgress, saved_states: dict[str, Any]) -> None:
    """Write the states and the progress to one file, atomically, and the metrics to another one.

    Args:
        folder: Folder of the run.
        progress: Progress of the run.
        saved_states: The server's states: ``global``, ``server`` (by name) and, with secure sums, ``former``.
    """
    if progress.history:
        # The metrics come first: a run that is killed between the two files writes them again when it is resumed.
        write_atomic(folder / METRICS, _format_csv(progress.history).encode(), private=True)
    write_nested(folder / SERVER_STATE, {"progress": progress, "states": saved_states}, SERVER_FORMAT)


@dataclass(frozen=True)
class SavedRun:
    """What the server has saved of a run.

    Attributes:
        progress: Progress of the run.
        states: The server's states: ``global``, ``server`` (by name) and, with secure sums, ``former``.
    """

    progress: RunProgress
    states: dict[str, Any]


def read_saved_run(folder: Path, *, with_tensors: bool = True) -> SavedRun:
    """Read the progress and the states that :func:`write_progress` wrote.

    Args:
        folder: Folder of the run.
        with_tensors: Whether to read the states' tensors; otherwise they are None, and PyTorch is not imported.

    Raises:
        FileNotFoundError: If the folder has no such file.
        ValueError: If the file is damaged.
    """
    path = folder / SERVER_STATE
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} does not contain a deployed run: it has no {SERVER_STATE}; pass the folder of one"
        )

    def build(progress: dict[str, Any], states: dict[str, Any]) -> SavedRun:
        progress["roster"] = [Member(**member) for member in progress["roster"]]
        progress["records"] = [RoundRecord(**record) for record in progress["records"]]
        return SavedRun(RunProgress(**progress), states)

    return read_nested(path, SERVER_FORMAT, build, with_tensors=with_tensors)


def read_run_progress(folder: Path) -> RunProgress:
    """Read only the progress of a run, without importing PyTorch. Raises the errors of :func:`read_saved_run`."""
    return read_saved_run(folder, with_tensors=False).progress


def write_sum(folder: Path, run: str, sum_state: SumState) -> None:
    """Write the state of a secure sum to a small file next to the server's."""
    write_nested(folder / SUM_STATE, {"run": run, "state": sum_state}, SUM_FORMAT)


def read_sum(folder: Path, run: str, round: int, summand: str) -> SumState | None:
    """Return the state that a secure sum had when the server was stopped; None if it had not begun.

    Args:
        folder: Folder of the run.
        run: Id of the run.
        round: Round of the sum.
        summand: Quantity that is summed: ``update`` or ``scores``.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / SUM_STATE
    if not path.is_file():
        return None

    def build(run: str, state: dict[str, Any]) -> tuple[str, SumState]:
        return run, SumState(**state)

    saved_run, state = read_nested(path, SUM_FORMAT, build)
    # The file is not deleted when a sum is completed, so it may belong to an earlier one.
    is_this_sum = (saved_run, state.round, state.of) == (run, round, summand)
    if not is_this_sum:
        return None
    return state


def _format_csv(history: list[dict[str, float]]) -> str:
    """Format the metrics of rounds like the ``metrics.csv`` of a simulation; cells that a round lacks are empty."""
    metric_names: set[str] = set()
    for row in history:
        metric_names.update(row)
    columns = ["epoch", "round", "step", *sorted(metric_names - {"round", "step"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in history:
        # NaN is written as `nan`: an empty cell would stand for a round without an evaluation.
        writer.writerow({"epoch": int(row["round"]), **row})
    return text.getvalue()
