# SPDX-License-Identifier: Apache-2.0
"""The file of results, from which a command resumes, and the choice of the best point of a grid."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from perada.results.report import unit_of
from perada.studies.compare.grid import Point
from perada.studies.compare.plan import SELECTION_SCORES, Job
from perada.system.digests import check_sealed, sealed
from perada.system.files import write_atomic

Record = dict[str, Any]
"""A run as the file has it: the fields of its :class:`~perada.studies.compare.plan.Job`, and its scores and costs, or
``failed`` with the reason."""
NO_POINT = "every run of the grid failed or diverged; choose other values for --tune"


class Results:
    """Records of runs, in a JSON file or only in memory.

    Args:
        path: The file; what it holds is read. None keeps the records in memory.

    Raises:
        ValueError: If the file is not one of ``perada compare``.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: list[Record] = []
        if path is not None and path.is_file():
            try:
                self.records = [check_sealed(record) for record in json.loads(path.read_text(encoding="utf-8"))]
                if any("stage" not in record for record in self.records):
                    raise TypeError("its records have no stage")
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{str(path)!r} has no results of this version of `perada compare` ({error}); choose a different "
                    "file, or delete it"
                ) from error

    def check(self, digests: Mapping[str, str]) -> None:
        """Raise if a recipe was edited since: old and new rows must not be mixed.

        Args:
            digests: The recipes' digests by their names.
        """
        for record in self.records:
            if digests.get(record["recipe"], record["digest"]) != record["digest"]:
                raise ValueError(
                    f"--output {str(self.path)!r} has results of an earlier version of {record['recipe']!r}; choose a "
                    "different file, or delete it"
                )

    def find(self, job: Job) -> Record | None:
        """Return the record of a run that did not fail."""
        return self._find_record({"stage": job.stage, "args": job.args})

    def has_start(self, job: Job) -> bool:
        """Return whether the initial model of a run was scored."""
        fields = {"stage": "start", "recipe": job.recipe, "varied": job.varied, "seed": job.seed}
        return self._find_record(fields) is not None

    def _find_record(self, fields: Mapping[str, object]) -> Record | None:
        """Return the first record with these values that did not fail."""
        for record in self.records:
            if "failed" not in record and fields.items() <= record.items():
                return record
        return None

    def add(self, record: Record) -> None:
        """Add a record, replacing an earlier one of the same run, and write the file."""
        identity = _identity_of(record)
        self.records = [other for other in self.records if _identity_of(other) != identity]
        self.records.append(record)
        self.write()

    def arrange(self, jobs: Iterable[Job]) -> None:
        """Put the records of these runs last, in this order, and write the file."""
        place_of = {(job.stage, tuple(job.args)): place for place, job in enumerate(jobs)}
        # The sort is stable: records of other runs stay in front, in their order.
        self.records.sort(key=lambda record: place_of.get((record["stage"], tuple(record["args"])), -1))
        self.write()

    def write(self) -> None:
        """Write the file completely or not at all, if there is one."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = [sealed(record) for record in self.records]
        write_atomic(self.path, json.dumps(content, indent=1, allow_nan=False).encode())

    def seconds(self, label: str = "") -> float:
        """Return the mean duration of the runs of a row, or of all rows if the row has none yet; 0 without any."""
        all_durations = []
        durations_of_row = []
        for record in self.records:
            if record.get("seconds") and "failed" not in record:
                all_durations.append(record["seconds"])
                if record["label"] == label:
                    durations_of_row.append(record["seconds"])
        durations = durations_of_row or all_durations
        return fmean(durations) if durations else 0.0


def _identity_of(record: Record) -> list[object]:
    """Return the values in which two records of one run agree."""
    return [record.get(name) for name in ("stage", "args", "recipe", "varied", "seed")]


IGNORED_WORDS = {"tune": ("--tune=", "--tune_seeds=", "--choose_by=", "--trials=", "--sampler=")}
"""By stage, options that make no new row: a grid may be extended by a later command."""


def records_of_rows(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return records by the name of their row: the label, and the options that other rows of the label do not have."""
    records_of_variant: dict[tuple[str, tuple[str, ...]], list[Record]] = {}
    for record in records:
        ignored = IGNORED_WORDS.get(record["stage"], ())
        variant = tuple(word for word in record["variant"] if not word.startswith(ignored))
        if record["stage"] == "start":
            variant = ()  # the initial model is one row, whichever command scored it
        records_of_variant.setdefault((record["label"], variant), []).append(record)
    common_words: dict[str, set[str]] = {}
    for label, variant in records_of_variant:
        common_words[label] = common_words.get(label, set(variant)) & set(variant)
    rows_by_name = {}
    for (label, variant), records_of_row in records_of_variant.items():
        distinguishing = [word for word in variant if word not in common_words[label]]
        rows_by_name[" ".join([label, *distinguishing])] = records_of_row
    return rows_by_name


class GridTrial(NamedTuple):
    """A point of the grid, and the record of its run with each seed; None for a run without one."""

    point: Point
    records: list[Record | None]


def trials_of(records: Iterable[Record]) -> list[GridTrial]:
    """Return the trials of one row, each with the records of all its seeds, in the order of the records."""
    trials: list[GridTrial] = []
    for record in records:
        for trial in trials:
            if trial.point == record["point"]:
                trial.records.append(record)
                break
        else:
            trials.append(GridTrial(record["point"], [record]))
    return trials


def choose_trial(trials: Iterable[GridTrial]) -> GridTrial | None:
    """Return the trial with the best mean score, the first of several; None if no trial has a score."""
    best = None
    best_score = None
    for trial in trials:
        value = mean_score(trial.records)
        if value is None:
            continue
        if best_score is None or value > best_score:
            best = trial
            best_score = value
    return best


def mean_score(records_of_seeds: Sequence[Record | None]) -> float | None:
    """Return the mean score of a setting over seeds; None if a run has none: a setting must work with every seed."""
    scores = [score(record) for record in records_of_seeds]
    known_scores = [value for value in scores if value is not None]
    if not known_scores or len(known_scores) < len(scores):
        return None
    return fmean(known_scores)


def score(record: Record | None) -> float | None:
    """Return the score that the grid is judged by: the mean of those in ``chosen_by``.

    A name with a minus before it counts negative, since its lower values are better.

    Returns:
        The score; None for a run that failed or diverged. A run has diverged if a training loss or a score became NaN
        or infinite.
    """
    if record is None or "failed" in record or record["diverged"]:
        return None
    values = []
    for signed_name in record.get("chosen_by", SELECTION_SCORES):
        value = record.get(signed_name.removeprefix("-"))
        if value is None:
            return None
        values.append(-value if signed_name.startswith("-") else value)
    return fmean(values)


def score_text(records: Sequence[Record]) -> str:
    """Return the mean score of a setting as it is printed, without its unit, with the deviation over several seeds.

    An error has no minus, by which it is chosen.
    """
    mean = mean_score(records)
    if mean is None:
        has_failed = any("failed" in record for record in records)
        return "failed" if has_failed else "diverged"
    number = unit_of(records[0]).number
    text = number(-mean if lower_is_better(records[0]) else mean)
    if len(records) > 1:
        scores = [value for value in map(score, records) if value is not None]
        text += f" ± {number(stdev(scores))}"
    return text


def lower_is_better(record: Record) -> bool:
    """Return whether all scores that a run is judged by are better if they are lower."""
    return all(name.startswith("-") for name in record.get("chosen_by", SELECTION_SCORES))
