# SPDX-License-Identifier: Apache-2.0
"""What came of each fault that was tried, and the table of all."""

from collections import Counter
from dataclasses import dataclass, field

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


def report(found: list[Outcomes]) -> str:
    """The table of all kinds, and what fell."""
    rows = [one.row() for one in found]
    lines = [line for one in found for line in one.fallen]
    return "\n".join([table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]), *lines])
