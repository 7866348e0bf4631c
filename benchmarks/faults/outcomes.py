# SPDX-License-Identifier: Apache-2.0
"""What came of each fault that was tried, written down as the campaign goes, and the table of all."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.results.report import table

HELD = ("held", "named", "harmless")


@dataclass
class Outcomes:
    """Counts of one kind of fault: ``held`` as it should, ``named`` in an error or warning, ``harmless``, or ``fell``.

    ``fallen`` says, one line each, what fell.
    """

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    fallen: list[str] = field(default_factory=list)

    def add(self, outcome: str, what: str = "") -> None:
        """Count one; any outcome that is not one of ``HELD`` fell."""
        if outcome in HELD:
            self.counts[outcome] += 1
        else:
            self.counts["fell"] += 1
            self.fallen.append(f"{self.kind}: {what}: {outcome}")

    def row(self) -> dict[str, object]:
        """A row of the table."""
        tried = sum(self.counts.values())
        return {"fault": self.kind, "tried": tried} | {name: self.counts[name] for name in (*HELD, "fell")}


class Campaign:
    """The faults of one seed and what came of them, each a line of JSON in a file, so that a campaign can be resumed.

    Args:
        path: The file; without one nothing is written down.
        about: What the campaign is: seed, size, commit. One that was stopped is resumed only by the same.

    Raises:
        ValueError: If the file is of another campaign.
    """

    def __init__(self, path: Path | None = None, about: dict[str, Any] | None = None) -> None:
        self.path, self.about = path, about or {}
        self.found: dict[str, dict[int, tuple[str, str]]] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.is_file() else []
        if lines and json.loads(lines[0]) != self.about:
            raise ValueError(
                f"{str(path)!r} is of the campaign {lines[0]}, and this is {json.dumps(self.about)}; name another file"
            )
        for line in lines[1:]:
            kind, number, outcome, what = json.loads(line)
            self.found.setdefault(kind, {})[number] = (outcome, what)
        if path is not None and not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.about) + "\n", encoding="utf-8")

    def left(self, kind: str, count: int) -> Iterator[int]:
        """The numbers, of ``range(count)``, of the faults of a kind that were not tried yet."""
        self.found.setdefault(kind, {})
        return (number for number in range(count) if number not in self.found[kind])

    def add(self, kind: str, number: int, outcome: str, what: str = "") -> None:
        """Write down what came of one."""
        self.found.setdefault(kind, {})[number] = (outcome, what)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, number, outcome, what]) + "\n")

    def each(self, kind: str, count: int, judge: Callable[[int], tuple[str, str]], together: int = 1) -> None:
        """Try the faults of a kind that are left; ``judge`` says of a number what came of it, and what it was."""
        numbers = list(self.left(kind, count))
        if together == 1:
            for number in numbers:
                self.add(kind, number, *judge(number))
            return
        with ThreadPoolExecutor(together) as pool:
            for number, found in zip(numbers, pool.map(judge, numbers), strict=True):
                self.add(kind, number, *found)

    @property
    def outcomes(self) -> list[Outcomes]:
        """The counts of each kind, in the order in which they were tried."""
        counted = []
        for kind, found in self.found.items():
            counted.append(Outcomes(kind))
            for _, (outcome, what) in sorted(found.items()):
                counted[-1].add(outcome, what)
        return counted


def report(found: list[Outcomes]) -> str:
    """The table of all kinds, and what fell."""
    rows = [one.row() for one in found]
    lines = [line for one in found for line in one.fallen]
    return "\n".join([table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]), *lines])
