# SPDX-License-Identifier: Apache-2.0
"""The server's side of a run on disk: its states, the sites that take part, and what happened in each round."""

import csv
import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.core.files import write_atomic
from perada.core.rounds import BatchSize, RoundPlan, make_plan
from perada.deploy.files import read_kept, write_kept
from perada.deploy.protocol import STEPS, Answer, Terms
from perada.federation.settings import Settings
from perada.privacy.client_level import ClientLevel

STATE = "server.safetensors"
METRICS = "metrics.csv"
FORMAT = 2
PASSING = ("late", "unreachable", "crashed", "busy")
"""Codes after which a site may be asked again in the same round."""
REPEAT = 10
"""Rounds after which a site that could not be let in is asked once more; one that did not answer, in the next."""

log = logging.getLogger("perada.deploy")


@dataclass
class Member:
    """A site of the roster; its place there is its number in the run."""

    name: str  # as the transport knows it
    size: int | None  # training images; None where the site does not say
    joined: int  # the first round that it could take part in
    left: str = ""  # why it takes part no more; empty if it does
    late: int = -1  # the last round in which it did not answer in time
    rounds: int = 0  # that it took part in
    epsilon: dict[str, float | None] = field(default_factory=dict)  # by ledger, as it last said


@dataclass
class Record:
    """What happened in a round; sites go by their names."""

    round: int  # counted from 0
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)  # of whom the answer counted
    failed: dict[str, str] = field(default_factory=dict)  # code of each other site
    far: dict[str, float] = field(default_factory=dict)  # whose change was so many times as long as the median
    outside: dict[str, str] = field(default_factory=dict)  # why sites that were connected have not joined
    void: str = ""  # why the global state stayed as it was; empty if it moved
    seconds: float = 0.0  # from the first message to the new state
    up: float = 0.0  # megabytes of replies
    down: float = 0.0  # and of messages


@dataclass
class Progress:
    """How far a run is."""

    run: str  # its id
    recipe: str  # its digest
    rounds: int
    done: int = 0  # rounds that are over
    tuned: bool = False  # whether the fine-tuning after them is
    scored: int = -1  # the round after which models were last scored
    roster: list[Member] = field(default_factory=list)  # all sites that ever joined, in the order of their numbers
    labels: str = ""  # digest of the classes that all sites have
    records: list[Record] = field(default_factory=list)  # of each round
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of each round
    asked: list[str] = field(default_factory=list)  # sites asked in the round that is under way, in their order
    lengths: list[int] = field(default_factory=list)  # its phases' steps
    plain: bool = False  # whether the tensors of the global state are laid out row by row
    level: dict[str, Any] | None = None  # state of the privacy of whole clients


def write_progress(folder: Path, progress: Progress, states: dict[str, Any]) -> None:
    """Write the states of the server and how far it is, all at once, and the metrics beside them."""
    if progress.history:  # first: a run that was killed in between writes them again
        write_atomic(folder / METRICS, _csv(progress.history).encode(), private=True)
    write_kept(folder / STATE, {"progress": progress, "states": states}, FORMAT)


def read_progress(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """What :func:`write_progress` wrote.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no deployed run: it has no {STATE}; give the folder of one")

    def build(progress: dict[str, Any], states: dict[str, Any]) -> tuple[Progress, dict[str, Any]]:
        progress["roster"] = [Member(**member) for member in progress["roster"]]
        progress["records"] = [Record(**record) for record in progress["records"]]
        return Progress(**progress), states

    return read_kept(path, FORMAT, build)


def _csv(history: list[dict[str, float]]) -> str:
    """The rounds as a simulation's ``metrics.csv`` has them."""
    text, names = io.StringIO(), sorted({name for row in history for name in row} - {"round", "step"})
    writer = csv.DictWriter(text, ["epoch", "round", "step", *names], restval="", lineterminator="\n")
    writer.writeheader()
    for row in history:
        shown = {name: value for name, value in row.items() if not math.isnan(value)}
        writer.writerow({"epoch": int(row["round"]), **shown})
    return text.getvalue()


class Roster:
    """The sites of a run, whose numbers are their places in ``progress.roster``; ``outside`` are those not in it."""

    def __init__(
        self, progress: Progress, terms: Terms, settings: Settings, batch_size: BatchSize, level: ClientLevel | None
    ) -> None:
        self.progress, self.terms, self.settings = progress, terms, settings
        self.batch_size, self.level = batch_size, level
        self._turned_away: dict[str, int] = {}  # the round in which a site was last not let in
        self.outside: dict[str, str] = {}  # why a site that is connected has not joined

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each site."""
        return {member.name: number for number, member in enumerate(self.progress.roster)}

    def newcomers(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are to be asked to join now."""
        known, done = set(self.numbers), self.progress.done
        if len(known) >= self.terms.min_sites:
            known |= {name for name, round in self._turned_away.items() if round <= done < round + REPEAT}
        return sorted(set(names) - known)

    def admit(self, answers: Mapping[str, Answer], failed: Mapping[str, str]) -> None:
        """Let those of the newcomers join who answered as they should."""
        progress = self.progress
        for name in sorted({*answers, *failed}):
            if reason := failed.get(name) or self._objection(answers[name]):
                if reason not in PASSING:
                    self._turned_away[name] = progress.done
                self.outside[name] = reason
                log.warning("site %s does not join: %s", name, reason)
            else:
                self.outside.pop(name, None)
                progress.labels = answers[name].facts["labels"]
                progress.roster.append(Member(name, answers[name].facts.get("size"), progress.done))

    def _objection(self, answer: Answer) -> str:
        """Why a site is not let in; empty if it is."""
        labels, size = answer.facts.get("labels"), answer.facts.get("size")
        if labels is None or self.progress.labels not in ("", labels):
            return "it has other classes than the recipe, or the sites before it"
        if size is None:
            weighted = self.settings.weighting == "samples"
            return "weighting='samples' needs its size, which it does not send" if weighted else ""
        steps = sum(make_plan(0, [0], [size], self.settings.phases, self.batch_size).lengths) if size else 0
        return "" if 0 < steps <= STEPS else f"it says that it has {size} images, which cannot be"

    def eligible(self, names: Sequence[str]) -> list[int]:
        """Numbers of the sites that may be asked, of those that are connected."""
        roster, last = self.progress.roster, self.progress.done - 1
        present = [number for number, member in enumerate(roster) if member.name in names and not member.left]
        if self.level is not None:
            present = self.level.affordable(present)
        ready = [number for number in present if last < 0 or roster[number].late != last]
        return ready if self.terms.late == "skip" and len(ready) >= self.terms.min_sites else present

    def plan(self, clients: Sequence[int]) -> RoundPlan:
        """A round of so many of the sites; those that do not say their size count as one image."""
        sizes = [member.size or 1 for member in self.progress.roster]
        return make_plan(self.progress.done, clients, sizes, self.settings.phases, self.batch_size)

    def lengths(self, clients: Sequence[int]) -> list[int]:
        """Steps of each phase of the longest of ``clients``, if all of them say their sizes."""
        sizes = [self.progress.roster[client].size for client in clients]
        if self.settings.privacy is not None or any(size is None for size in sizes):
            return []
        return list(self.plan(clients).lengths)

    def note(self, record: Record, got: Mapping[int, Answer]) -> None:
        """Write down who took part, who was late and who is not to be asked any more."""
        for client, answer in got.items():
            member = self.progress.roster[client]
            member.rounds += 1
            member.epsilon = answer.facts.get("epsilon", member.epsilon)
        for member in self.progress.roster:
            code = record.failed.get(member.name)
            if code in ("exhausted", "unapproved"):
                member.left = code
            if code in ("late", "busy"):
                member.late = record.round
