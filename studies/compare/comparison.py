# SPDX-License-Identifier: Apache-2.0
"""The scores of a comparison by row, seed and client, and the differences between its rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from perada.core.checks import check_known
from perada.results.report import ScoreUnit, unit_of
from perada.studies.compare.differences import Difference, ScoreMatrix, correct_p_values, difference, seed_variance
from perada.studies.compare.results import Record, Results, lower_is_better, records_of_rows

OWN = "own"
EVERYONE = "all"
MEAN = "mean"
CRITERIA = {OWN: "own images", EVERYONE: "all clients' images", MEAN: "mean of the two"}
"""What rows are compared by, with its title: scores on a client's own test images, on those of all clients, and the
mean of these two scores."""
MODELS = {"personal": "personal model", "both": "both models"}
"""What clients predict with, by the beginning of the scores' names."""


@dataclass(frozen=True)
class ComparedRow:
    """A row of a comparison, with one way to predict.

    Attributes:
        name: Its name in the table, followed by what clients predict with if its algorithm leaves a choice.
        scores: Scores (S, M) of the M clients with each of S seeds, by criterion (:data:`CRITERIA`); NaN for clients
            without a score.
        megabytes: Megabytes that a client sends in a round, mean over seeds.
    """

    name: str
    scores: Mapping[str, ScoreMatrix]
    megabytes: float

    @property
    def trains_alone(self) -> bool:
        """Whether its clients send nothing."""
        return self.megabytes == 0

    def mean(self, criterion: str) -> float:
        """Return the mean score over clients and seeds, without the clients that lack a score."""
        return float(np.nanmean(self.scores[criterion]))


class NotComparableError(ValueError):
    """The rows of a comparison have no clients, test images or seeds in common.

    Attributes:
        is_worth_saying: Whether there were several rows, so that a reader would expect a comparison.
    """

    def __init__(self, message: str, is_worth_saying: bool = True) -> None:
        super().__init__(message)
        self.is_worth_saying = is_worth_saying


SAME_IN_ALL_ROWS = {"client_test_images": "test images", "client_names": "clients", "metric": "metrics"}
"""Fields of records that must be the same in all rows of a seed, with what they hold."""


class Comparison:
    """A finished comparison, whose rows are compared client by client and seed by seed.

    Args:
        records: Records of ``perada compare``, such as those of its ``--output``.

    Attributes:
        rows: The rows with scores of clients. An algorithm with personal models and a global one has a row for each way
            to predict, if it was scored with ``evaluation.prediction: both``.
        without_scores: Names of the rows that are left out, since a run diverged, or a model of it has outputs that are
            NaN or infinite. A comparison on the other clients would favour such a row.
        seeds: The seeds that all rows have.
        client_names: Names of the clients; ``client 0`` and so on if they have none, or if names were not written.
        criteria: The keys of :data:`CRITERIA` that all rows have scores for.
        unit: Unit of the scores.
        lower_is_better: Whether a lower score is better.

    Raises:
        NotComparableError: If there are no two rows with scores of the same clients on the same images.

    >>> Comparison.from_file("hospitals.json").differences("own")  # doctest: +SKIP
    """

    def __init__(self, records: Iterable[Record]) -> None:
        records_by_name = records_of_rows([record for record in records if _has_client_scores(record)])
        self.without_scores = [name for name, of_row in records_by_name.items() if any(map(_lacks_scores, of_row))]
        for name in self.without_scores:
            del records_by_name[name]
        self.seeds = _find_common_seeds(records_by_name.values())
        records_of_row = _select_seeds(records_by_name, self.seeds)
        _check_same_images(records_of_row)

        first_record = next(iter(records_of_row.values()))[0]
        self.unit: ScoreUnit = unit_of(first_record)
        self.lower_is_better = lower_is_better(first_record)
        self.client_names = _name_clients(first_record)
        self.rows: list[ComparedRow] = []
        for name, row_records in records_of_row.items():
            self.rows += _make_rows(name, row_records)
        if len(self.rows) < 2:
            raise NotComparableError("there is one row; compare it with another one", is_worth_saying=False)
        self.criteria = _complete_criteria(self.rows)
        if not self.criteria:
            raise NotComparableError("no client has a score in all rows")

    @classmethod
    def from_file(cls, path: str | Path) -> "Comparison":
        """Read the file of ``perada compare --output``.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is not a file of ``perada compare``, or has no rows that can be compared.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} does not exist; name the file of `perada compare --output`")
        return cls(Results(path).records)

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.client_names)

    def best(self, criterion: str) -> ComparedRow:
        """Return the row with the best mean score, the first of several.

        Args:
            criterion: A key of :data:`CRITERIA`.
        """
        sign = -1 if self.lower_is_better else 1
        return max(self.rows, key=lambda row: sign * row.mean(criterion))

    def differences(self, criterion: str = OWN, reference: str | None = None) -> list[Difference]:
        """Compare every other row with one row.

        Args:
            criterion: ``own``, each client's own test images; ``all``, those of all clients; ``mean``, the mean of both
                scores.
            reference: Name of the row that the others are compared with, by default that with the best mean score.

        Returns:
            A difference for each other row, in the order of the rows: the reference's score minus that of the row,
            positive if the reference is better. p-values are corrected for the number of rows and of criteria.

        Raises:
            ValueError: If there is no such criterion or row.
        """
        check_known("criterion", criterion, self.criteria)
        if reference is not None:
            check_known("reference", reference, [row.name for row in self.rows])
        # Advice on several criteria has that many more chances to be wrong, so all are corrected together.
        of_criteria: list[Difference] = []
        for name in self.criteria:
            reference_of_criterion = self.best(name).name if reference is None else reference
            of_criteria += self._uncorrected_differences(name, reference_of_criterion)
        num_differences = len(self.rows) - 1
        start = self.criteria.index(criterion) * num_differences
        return correct_p_values(of_criteria)[start : start + num_differences]

    def _uncorrected_differences(self, criterion: str, reference: str) -> list[Difference]:
        """Compare every other row with one row, without correcting the p-values for their number."""
        scores_by_name = {row.name: row.scores[criterion] for row in self.rows}
        has_score = np.isfinite(scores_by_name[reference]).all(0)  # (M,), the same clients in all rows
        pooled = seed_variance([scores[:, has_score] for scores in scores_by_name.values()])
        differences = []
        for name, scores in scores_by_name.items():
            if name == reference:
                continue
            entry = difference(
                reference,
                name,
                scores_by_name[reference][:, has_score],
                scores[:, has_score],
                pooled_seed_variance=pooled,
                num_rows=len(self.rows),
                lower_is_better=self.lower_is_better,
            )
            # The entry gets one value for each client, NaN for those without a score.
            of_clients = np.full(self.num_clients, np.nan)
            of_clients[has_score] = entry.of_clients
            differences.append(replace(entry, of_clients=tuple(of_clients.tolist())))
        return differences


def _lacks_scores(record: Record) -> bool:
    """Return whether a run diverged, or one of its models has outputs that are NaN or infinite."""
    return bool(record.get("diverged")) or "failed_outputs" in record


def _find_common_seeds(records_of_all_rows: Iterable[Sequence[Record]]) -> list[int]:
    """Return the seeds that all rows have, in the order of the first row."""
    seeds: list[int] | None = None
    for records in records_of_all_rows:
        seeds_of_row = [record["seed"] for record in records]
        seeds = seeds_of_row if seeds is None else [seed for seed in seeds if seed in seeds_of_row]
    if seeds is None:
        raise NotComparableError("no run has scores of its clients", is_worth_saying=False)
    if not seeds:
        raise NotComparableError("no seed has finished runs of all rows")
    return list(dict.fromkeys(seeds))


def _check_same_images(records_of_row: Mapping[str, Sequence[Record]]) -> None:
    """Raise a NotComparableError if rows were tested on other clients or images, or by other metrics."""
    first_name, *other_names = records_of_row
    for name in other_names:
        for record, record_of_first in zip(records_of_row[name], records_of_row[first_name], strict=True):
            differing = _different_field(record, record_of_first)
            if differing is not None:
                raise NotComparableError(
                    f"{first_name} and {name} have different {differing} with seed {record['seed']}"
                )


def _different_field(record: Record, other: Record) -> str | None:
    """Return what two runs of a seed do not have in common, although their scores are compared; None if nothing."""
    for key, subject in SAME_IN_ALL_ROWS.items():
        if record.get(key) != other.get(key):
            return subject
    return None


def _has_client_scores(record: Record) -> bool:
    """Return whether a record is of a finished run of the table, with scores of its clients."""
    return record["stage"] == "run" and "failed" not in record and bool(record.get("clients"))


def _select_seeds(records_by_name: Mapping[str, Sequence[Record]], seeds: Sequence[int]) -> dict[str, list[Record]]:
    """Return the records of each row with some seeds, in their order."""
    records_of_row = {}
    for name, records in records_by_name.items():
        record_of_seed = {record["seed"]: record for record in records}
        records_of_row[name] = [record_of_seed[seed] for seed in seeds]
    return records_of_row


def _name_clients(record: Record) -> list[str]:
    """Return the names of a run's clients; ``client 0`` and so on if it has none."""
    names: list[str] | None = record.get("client_names")
    return names or [f"client {number}" for number in range(len(record["client_test_images"]))]


def _complete_criteria(compared_rows: Sequence[ComparedRow]) -> list[str]:
    """Return the criteria that all rows have scores for, and leave out the scores of clients that lack one."""
    criteria = []
    for criterion in CRITERIA:
        if all(criterion in row.scores for row in compared_rows):
            has_scores = _leave_out_incomplete([row.scores[criterion] for row in compared_rows])
            if has_scores:
                criteria.append(criterion)
    return criteria


def _make_rows(name: str, records: Sequence[Record]) -> list[ComparedRow]:
    """Return the rows of an algorithm, one for each way to predict, from its records with each seed."""
    megabytes = fmean(record.get("mb_sent", 0.0) for record in records)
    models = [model for model in MODELS if all(f"{model}/local_test" in record["clients"] for record in records)]
    rows = []
    for model in models:
        own_scores = _read_scores(records, f"{model}/local_test")
        scores = {OWN: own_scores}
        if all(f"{model}/global_test" in record["clients"] for record in records):
            scores_on_everyone = _read_scores(records, f"{model}/global_test")
            scores[EVERYONE] = scores_on_everyone
            scores[MEAN] = (own_scores + scores_on_everyone) / 2
        row_name = name if len(models) == 1 else f"{name}, {MODELS[model]}"
        rows.append(ComparedRow(row_name, scores, megabytes))
    return rows


def _read_scores(records: Sequence[Record], score: str) -> ScoreMatrix:
    """Return the clients' scores (S, M) of all seeds, NaN where a client has none."""
    rows = []
    for record in records:
        rows.append([np.nan if value is None else value for value in record["clients"][score]])
    return np.array(rows, dtype=np.float64)


def _leave_out_incomplete(matrices: Sequence[ScoreMatrix]) -> bool:
    """Set the scores (S, M) of clients that lack one in any matrix to NaN in all, so that rows have the same clients.

    Returns:
        Whether a client is left.
    """
    complete = np.isfinite(np.stack(matrices)).all((0, 1))  # (M,)
    for matrix in matrices:
        matrix[:, ~complete] = np.nan
    return bool(complete.any())
