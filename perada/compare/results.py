# SPDX-License-Identifier: Apache-2.0
"""The file of results: written as they come, read when a command resumes where it stopped."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from perada.compare.grid import Point
from perada.compare.plan import CHOSEN_BY, Job
from perada.core.digests import check_sealed, sealed
from perada.core.files import write_atomic
from perada.results.report import percent

Record = dict[str, Any]


class Results:
    """Records of runs, in a JSON file, whose own are read, or only in memory.

    Raises:
        ValueError: If the file holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is not None and path.is_file():
            try:
                self.records = json.loads(path.read_text(encoding="utf-8"))
                self.records = [check_sealed(record) for record in self.records]
                if any("stage" not in record for record in self.records):
                    raise TypeError("its records say no stage")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{str(path)!r} holds no results of this version of `perada compare` ({error}): give "
                    "another file, or delete it"
                ) from error

    def check(self, digests: dict[str, str]) -> None:
        """Refuse to resume with a recipe that was edited: old and new rows would be mixed; ``digests`` are by name."""
        for record in self.records:
            if digests.get(record["recipe"], record["digest"]) != record["digest"]:
                raise ValueError(
                    f"--output {str(self.path)!r} holds results of an earlier version of {record['recipe']!r}: give "
                    "another file, or delete it"
                )

    def find(self, job: Job) -> Record | None:
        """The record of a run that did not fail."""
        same = {"stage": job.stage, "args": job.args}
        return next((one for one in self.records if "failed" not in one and same.items() <= one.items()), None)

    def started(self, recipe: str, varied: Point, seed: int) -> bool:
        """Whether the initial model of a recipe with some values was scored with a seed."""
        wanted = {"stage": "start", "recipe": recipe, "varied": varied, "seed": seed}
        return any(wanted.items() <= record.items() for record in self.records)

    def add(self, record: Record, order: Sequence[Job]) -> None:
        """Add a record, replacing an earlier one of the same run, and :meth:`arrange` them."""
        same = ("stage", "args", "recipe", "varied", "seed")
        self.records = [old for old in self.records if any(old.get(name) != record.get(name) for name in same)]
        self.records.append(record)
        self.arrange(order)

    def arrange(self, order: Sequence[Job]) -> None:
        """Put the records of these runs last, in this order, and write the file, whole or not at all."""
        places = {(job.stage, tuple(job.args)): place for place, job in enumerate(order)}
        # The sort is stable: what is not of these runs stays in front, in its order.
        self.records.sort(key=lambda record: places.get((record["stage"], tuple(record["args"])), -1))
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = [sealed(record) for record in self.records]
        write_atomic(self.path, json.dumps(written, indent=1, allow_nan=False).encode())

    def seconds(self, label: str) -> float | None:
        """Mean duration of the runs of a row, or of all rows where it has none yet."""
        known = [record for record in self.records if record.get("seconds") and "failed" not in record]
        own = [record for record in known if record["label"] == label]
        return fmean(record["seconds"] for record in own or known) if known else None


def choose(records: Sequence[tuple[Point, Record | None]]) -> tuple[Point, float] | None:
    """The point of the grid with the best score, the first of several; None where no run has one."""
    scored = [(point, value) for point, record in records if (value := score(record)) is not None]
    return max(scored, key=lambda pair: pair[1]) if scored else None


def score(record: Record | None) -> float | None:
    """What the grid is judged by: the mean of the scores in ``chosen_by``; None for a run that failed or diverged.

    A name with a minus before it counts negative, since the lower score is the better one. A run has diverged where a
    training loss or a score became NaN or infinite.
    """
    if record is None or "failed" in record or record["diverged"]:
        return None
    signs = {name.removeprefix("-"): -1 if name.startswith("-") else 1 for name in record.get("chosen_by", CHOSEN_BY)}
    if any(record.get(name) is None for name in signs):
        return None
    return fmean(sign * record[name] for name, sign in signs.items())


def shown_score(value: float, chosen_by: Sequence[str]) -> str:
    """A score as it is printed, in %: an error, or the mean of several, without the minus that it is chosen by."""
    return percent(-value if all(name.startswith("-") for name in chosen_by) else value)
