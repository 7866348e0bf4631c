# SPDX-License-Identifier: Apache-2.0
"""The outcome of each fault that was tried, recorded in a file, and a table of them."""

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perada.results.report import table

SURVIVED = "survived"
"""The run ended as if the fault had not happened."""
REPORTED = "reported"
"""An error or a warning named the fault."""
HARMLESS = "harmless"
"""The fault changed nothing that is read."""
FAILED = "failed"
"""Any other outcome, in the table. The verdict itself describes what went wrong."""
ACCEPTED = (SURVIVED, REPORTED, HARMLESS)
"""Outcomes that pass."""


class Verdict(NamedTuple):
    """What came of a fault.

    Attributes:
        outcome: One of :data:`ACCEPTED`, or a description of what went wrong.
        description: The fault, for a list of those that went wrong.
    """

    outcome: str
    description: str


@dataclass
class Outcomes:
    """Counts of the outcomes of one kind of fault.

    Attributes:
        kind: The kind.
        counts: Number of faults by outcome; those not in :data:`ACCEPTED` count as :data:`FAILED`.
        failures: A line for each fault that failed.
    """

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Count a fault."""
        if verdict.outcome in ACCEPTED:
            self.counts[verdict.outcome] += 1
        else:
            self.counts[FAILED] += 1
            self.failures.append(f"{self.kind}: {verdict.description}: {verdict.outcome}")

    def row(self) -> dict[str, object]:
        """Return the kind's row of the table."""
        counts = {name: self.counts[name] for name in (*ACCEPTED, FAILED)}
        return {"fault": self.kind, "tried": sum(self.counts.values()), **counts}


class Campaign:
    """The faults of one seed and what came of them, with which a campaign is resumed.

    Args:
        path: File with a line of JSON for each fault; None keeps the verdicts in memory.
        about: Seed, size and commit of the campaign. Only the same campaign is resumed.

    Raises:
        ValueError: If the file is of another campaign.
    """

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self.path = path
        self.about = about or {}
        self.verdicts: dict[str, dict[int, Verdict]] = {}
        """By kind and number of the fault."""
        if path is None:
            return
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            if lines:
                self._read(lines)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.about) + "\n", encoding="utf-8")

    def _read(self, lines: list[str]) -> None:
        """Read the lines of a file, the first of which says what the campaign is."""
        if json.loads(lines[0]) != self.about:
            raise ValueError(
                f"{str(self.path)!r} is of the campaign {lines[0]}, and this is {json.dumps(self.about)}; name another "
                "file"
            )
        for line in lines[1:]:
            kind, number, outcome, description = json.loads(line)
            self.verdicts.setdefault(kind, {})[number] = Verdict(outcome, description)

    def remaining(self, kind: str, count: int) -> list[int]:
        """Return the numbers below ``count`` of the faults of a kind that were not tried yet."""
        verdicts = self.verdicts.setdefault(kind, {})
        return [number for number in range(count) if number not in verdicts]

    def add(self, kind: str, number: int, verdict: Verdict) -> None:
        """Record what came of a fault."""
        self.verdicts.setdefault(kind, {})[number] = verdict
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, number, *verdict]) + "\n")

    def try_all(self, kind: str, count: int, judge: Callable[[int], Verdict], parallel: int = 1) -> None:
        """Try the faults of a kind that were not tried yet.

        Args:
            kind: The kind.
            count: Number of faults.
            judge: Tries the fault of a number.
            parallel: Faults that are tried at once, in threads.
        """
        numbers = self.remaining(kind, count)
        if parallel == 1:
            # Not in a thread: some faults need signals, which only the main thread gets.
            for number in numbers:
                self.add(kind, number, judge(number))
            return
        with ThreadPoolExecutor(parallel) as pool:
            for number, verdict in zip(numbers, pool.map(judge, numbers), strict=True):
                self.add(kind, number, verdict)

    @property
    def outcomes(self) -> list[Outcomes]:
        """The counts of each kind, in the order in which the kinds were tried."""
        all_outcomes = []
        for kind, verdicts in self.verdicts.items():
            outcomes = Outcomes(kind)
            for number in sorted(verdicts):
                outcomes.add(verdicts[number])
            all_outcomes.append(outcomes)
        return all_outcomes


def report(all_outcomes: list[Outcomes]) -> str:
    """Return a table of all kinds, followed by the faults that failed."""
    header = list(all_outcomes[0].row())
    rows = []
    failures = []
    for outcomes in all_outcomes:
        rows.append([str(value) for value in outcomes.row().values()])
        failures += outcomes.failures
    return "\n".join([table(header, rows), *failures])
