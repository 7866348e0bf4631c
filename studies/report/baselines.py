# SPDX-License-Identifier: Apache-2.0
"""What a run is compared with on its page: each client training alone, and one shared model for all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perada.results.report import SCORES, SCORES_OF_BOTH
from perada.studies.report.contrasts import ALONE, SHARED, THIS_RUN, Baselines, Contrast, with_shared_images
from perada.studies.report.facts import predicts_counts
from perada.studies.report.records import RunRecord

# The command prints the path of its page before it imports anything large.
if TYPE_CHECKING:
    from perada.studies.compare.comparison import Comparison
    from perada.studies.compare.differences import Difference

BASELINES_FILE = "baselines.json"
"""File in a run's folder with the runs that ``perada report --baselines`` trained, as of ``perada compare``."""
ALGORITHMS = ("standalone", "fedavg")
"""The methods that ``perada report --baselines`` trains."""
_SHARED_ALGORITHM = "FedAvg"


@dataclass(frozen=True)
class PredictedScores:
    """The scores of what clients predict with: both of their models if the run is set so, or their personal model.

    Attributes:
        own: Score of each client on its own test images (M,); NaN without any.
        everyone: The same on the test images of all clients; empty if they were not scored.
    """

    own: Sequence[float]
    everyone: Sequence[float]


def predicted_scores(record: RunRecord) -> PredictedScores:
    """Return the scores of what the clients of a run predict with."""
    own_score, everyone_score, _ = SCORES
    if predicts_with_both(record):
        own_score, everyone_score = SCORES_OF_BOTH
    return PredictedScores(
        record.scores_of_clients.get(own_score, []), record.scores_of_clients.get(everyone_score, [])
    )


def predicts_with_both(record: RunRecord) -> bool:
    """Return whether clients predict with their personal and the global model together."""
    own_score, _ = SCORES_OF_BOTH
    return record.info.get("prediction") == "both" and own_score in record.scores_of_clients


def read_baselines(path: Path, record: RunRecord) -> Baselines:
    """Read the baselines of a run from a file of ``perada compare``, and compare the run with them.

    Training alone is a row whose clients send nothing, the shared model one of federated averaging (FedAvg). Of several
    such rows the one with the best mean score on own images is taken, so that the run has the strongest opponent.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a file of ``perada compare``, or has no baselines for the clients and the seed of the
            run.
    """
    # These modules import SciPy and all algorithms, which pages without baselines do not need.
    from perada.studies.compare.comparison import Comparison, NotComparableError
    from perada.studies.compare.results import Results, records_of_rows

    if not path.is_file():
        raise FileNotFoundError(f"--baselines={path} does not exist; name a file of `perada compare --output`")
    records = []
    for entry in Results(path).records:
        if entry["stage"] == "run" and "failed" not in entry and entry.get("clients"):
            records.append(entry)
    rows = records_of_rows(records)
    chosen_rows = {
        ALONE: _best_row([of_row for of_row in rows.values() if _train_alone(of_row)]),
        SHARED: _best_row([of_row for of_row in rows.values() if _average_updates(of_row)]),
    }
    own_record = _own_record(record, records)
    compared = [own_record]
    for name, of_row in chosen_rows.items():
        compared += [entry | {"label": name, "variant": []} for entry in of_row]
    if len(compared) == 1:
        raise ValueError(
            f"--baselines={path} has neither training alone nor FedAvg; run `perada compare RECIPE --algorithms "
            f"{' '.join(ALGORITHMS)} --output {path}`"
        )
    try:
        comparison = Comparison(compared)
    except NotComparableError as error:
        raise ValueError(
            f"--baselines={path} does not fit the run ({error}); compare with the run's recipe and seed, or leave the "
            "file out to train the baselines"
        ) from error
    return Baselines(comparison, _find_contrasts(comparison, record), path)


def _find_contrasts(comparison: "Comparison", record: RunRecord) -> list[Contrast]:
    """Return the contrasts of the first row, which is the run's, with the others."""
    from perada.studies.compare.comparison import EVERYONE, OWN

    differences: dict[str, list[Difference]] = {}
    for criterion in (OWN, EVERYONE):
        if criterion in comparison.criteria:
            differences[criterion] = comparison.differences(criterion, reference=comparison.rows[0].name)
    own_row, *other_rows = comparison.rows
    num_tests = len(differences) * len(other_rows)
    contrasts = []
    for place, row in enumerate(other_rows):
        everyone = differences[EVERYONE][place] if EVERYONE in differences else None
        if everyone is not None and predicts_counts(record):
            accuracies = (own_row.mean(EVERYONE), row.mean(EVERYONE))
            everyone = with_shared_images(everyone, accuracies, sum(record.test_images), num_tests)
        contrasts.append(Contrast(row, differences[OWN][place], everyone))
    return contrasts


def _train_alone(saved_records: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether the clients of a row send nothing."""
    return all(entry.get("mb_sent") == 0 for entry in saved_records)


def _average_updates(saved_records: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a row is one of federated averaging."""
    for entry in saved_records:
        algorithms = [word for word in entry["args"] if word.startswith("--federated.algorithm=")]
        if not algorithms or not algorithms[-1].endswith((f"={_SHARED_ALGORITHM}", f".{_SHARED_ALGORITHM}")):
            return False
    return True


def _best_row(records_of_rows: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the records of the row with the best mean score on own images; empty without rows."""
    from perada.studies.compare.results import lower_is_better

    best: list[dict[str, Any]] = []
    best_score = -math.inf
    for of_row in records_of_rows:
        scores = [entry[SCORES[0]] for entry in of_row if entry.get(SCORES[0]) is not None]
        if len(scores) < len(of_row):
            continue  # a run diverged
        mean = sum(scores) / len(scores)
        signed_mean = -mean if lower_is_better(of_row[0]) else mean
        if signed_mean > best_score:
            best = of_row
            best_score = signed_mean
    return best


def _own_record(record: RunRecord, others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run in the form of a comparison's record, with the scores of what its clients predict with."""
    scores = predicted_scores(record)
    clients = {}
    for name, values in zip(SCORES, (scores.own, scores.everyone), strict=False):
        if values:
            clients[name] = [value if math.isfinite(value) else None for value in values]
    own_record: dict[str, Any] = {
        "stage": "run",
        "label": THIS_RUN,
        "variant": [],
        "seed": record.seed,
        "clients": clients,
        "client_test_images": record.test_images,
        "client_names": record.info.get("clients"),
        "metric": record.first_metric,
        "has_classes": record.has_classes,
        # This marks the baseline as one that sends something; the number is not compared.
        "mb_sent": record.last("comm/up_mb"),
    }
    if others:
        own_record["chosen_by"] = others[0].get("chosen_by", [])
        if others[0].get("client_names") is None:  # --anonymous
            own_record["client_names"] = None
    if record.failed_outputs:
        own_record["failed_outputs"] = record.failed_outputs
    return own_record


def own_and_global(record: RunRecord) -> "Difference | None":
    """Compare what a run's clients predict with, with the run's global model, on their own test images.

    Returns:
        The difference, positive if the clients' predictions are better; None if there are no such scores, or the global
        model is what clients predict with.
    """
    scores = predicted_scores(record).own
    shared = record.global_local
    if len(scores) != len(shared) or list(scores) == list(shared):
        return None
    pairs = [pair for pair in zip(scores, shared, strict=True) if math.isfinite(pair[0] + pair[1])]
    if not pairs or record.failed_outputs:
        return None
    import numpy as np

    from perada.studies.compare.differences import difference

    return difference(
        THIS_RUN,
        "the global model",
        np.array([[own_score for own_score, _ in pairs]]),
        np.array([[global_score for _, global_score in pairs]]),
        lower_is_better=record.lower_is_better,
    )
