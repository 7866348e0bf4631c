# SPDX-License-Identifier: Apache-2.0
"""Scores of trials on the images that clients hold out, and the choice by these scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perada.results.report import ScoreUnit, unit_of
from perada.studies.choose.candidates import METHODS, Candidate
from perada.studies.compare.comparison import EVERYONE, MEAN, MODELS, OWN
from perada.studies.compare.differences import ScoreMatrix, standard_error
from perada.studies.compare.plan import Job
from perada.studies.compare.results import Record, Results, lower_is_better

CLEAR_LEAD = 2
"""Number of standard errors up to which chance may explain a lead on held-out images."""

GOALS = (MEAN, OWN, EVERYONE)
"""What a model shall be good at: the keys of :data:`~perada.studies.compare.comparison.CRITERIA`."""


@dataclass(frozen=True)
class Trial:
    """A setting that is trained for some rounds without the images of one draw.

    Attributes:
        candidate: The setting.
        draw: Number of the draw of held-out images.
        rounds: Rounds after which it is scored.
        job: Its run.
    """

    candidate: Candidate
    draw: int
    rounds: int
    job: Job


def make_trial(job: Job, candidate: Candidate, draw: int, rounds: int) -> Trial:
    """Return a trial, whose run is told from those of other lengths by ``varied``.

    Args:
        job: The complete run of the setting, whose clients hold out the images of the draw.
        candidate: The setting.
        draw: Number of the draw.
        rounds: Rounds after which it is scored.
    """
    varied = {"rounds": str(rounds), "draw": str(draw), "setting": str(candidate.number)}
    return Trial(candidate, draw, rounds, replace(job, varied=varied))


def find_record(results: Results, job: Job) -> Record | None:
    """Return the record of a trial or of another run, also of one that failed."""
    for record in results.records:
        if record["stage"] == job.stage and record["args"] == job.args and record["varied"] == job.varied:
            return record
    return None


@dataclass(frozen=True)
class HeldOutScores:
    """The scores of a setting with one way to predict.

    Attributes:
        candidate: The setting.
        way: What clients predict with, a key of :data:`~perada.studies.compare.comparison.MODELS`.
        rounds: Rounds that it was trained.
        scores: Scores (D, M) of M clients on D draws of held-out images; NaN for a client without a score.
        lower_is_better: Whether a lower score is better.
        unit: Unit of the scores.
    """

    candidate: Candidate
    way: str
    rounds: int
    scores: ScoreMatrix
    lower_is_better: bool
    unit: ScoreUnit

    @property
    def mean(self) -> float:
        """Mean score over clients and draws."""
        return float(np.nanmean(self.scores))

    @property
    def merit(self) -> float:
        """The mean score with the sign by which higher is better."""
        return -self.mean if self.lower_is_better else self.mean


def read_scores(candidate: Candidate, rounds: int, records: Sequence[Record], goal: str) -> list[HeldOutScores]:
    """Return the scores of a setting, one for each way to predict.

    Args:
        candidate: The setting.
        rounds: Rounds that it was trained.
        records: Records of its trials, one for each draw.
        goal: One of :data:`GOALS`.

    Returns:
        The scores; none if a trial failed or diverged, since a setting must work on every draw.
    """
    for record in records:
        if "failed" in record or record.get("diverged") or "failed_outputs" in record:
            return []
    scores = []
    for way in MODELS:
        rows = [_scores_of_record(record, way, goal) for record in records]
        known_rows = [row for row in rows if row is not None]
        if not known_rows or len(known_rows) < len(records):
            continue
        matrix = np.array(known_rows, dtype=np.float64)
        if np.isfinite(matrix).any():
            scores.append(
                HeldOutScores(candidate, way, rounds, matrix, lower_is_better(records[0]), unit_of(records[0]))
            )
    return scores


def _scores_of_record(record: Record, way: str, goal: str) -> list[float] | None:
    """Return the scores of the clients by a goal; None if the run has none for this way to predict."""
    clients = record["clients"]
    own = clients.get(f"{way}/local_test")
    everyone = clients.get(f"{way}/global_test")
    if own is None:
        return None
    if everyone is None or goal == OWN:
        return [_as_number(value) for value in own]
    if goal == EVERYONE:
        return [_as_number(value) for value in everyone]
    return [(_as_number(first) + _as_number(second)) / 2 for first, second in zip(own, everyone, strict=True)]


def _as_number(value: float | None) -> float:
    return math.nan if value is None else value


def best_of(held_out_scores: Sequence[HeldOutScores]) -> HeldOutScores | None:
    """Return the best scores, the first of several; None if there are none."""
    best = None
    for entry in held_out_scores:
        if best is None or entry.merit > best.merit:
            best = entry
    return best


def prefer_both_models(best: HeldOutScores, scores: Sequence[HeldOutScores], goal: str) -> HeldOutScores:
    """Return the scores of both models of the best setting, unless its personal model is clearly better.

    Trials are short and held-out images are few, so that chance often decides between two ways to predict with the same
    trained models. On all clients' images, both models are better in all our studies (docs/prediction.md). On own
    images either may be, so the better scores decide there.

    Args:
        best: The best scores of a method.
        scores: All scores of the method.
        goal: One of :data:`GOALS`.
    """
    if goal == OWN or best.way == "both":
        return best
    for entry in scores:
        if entry.candidate == best.candidate and entry.way == "both":
            difference = lead(best, entry)
            is_clear = difference.mean > CLEAR_LEAD * difference.standard_error
            return best if is_clear else entry
    return best


def rank_candidates(held_out_scores: Sequence[HeldOutScores]) -> list[Candidate]:
    """Return settings from the best to the worst, each by its best way to predict."""
    merits: dict[int, float] = {}
    candidate_of_number: dict[int, Candidate] = {}
    for entry in held_out_scores:
        number = entry.candidate.number
        candidate_of_number[number] = entry.candidate
        merits[number] = max(entry.merit, merits.get(number, -math.inf))
    numbers = sorted(merits, key=lambda number: -merits[number])  # stable: the first of equal ones stays first
    return [candidate_of_number[number] for number in numbers]


def choose_method(best_of_method: Mapping[str, HeldOutScores]) -> HeldOutScores:
    """Return the scores of the method to take: the best ones, those of the simplest method of several."""
    in_order = [best_of_method[method] for method in METHODS if method in best_of_method]
    best = best_of(in_order)
    assert best is not None
    return best


@dataclass(frozen=True)
class Lead:
    """How far a choice is ahead of another one on held-out images.

    Attributes:
        mean: Mean difference, above zero if the first is better.
        standard_error: Its standard error, paired by client and draw; NaN with one client and one draw.
    """

    mean: float
    standard_error: float


def lead(first: HeldOutScores, second: HeldOutScores) -> Lead:
    """Return how far the first scores are ahead of the second ones."""
    differences = first.scores - second.scores
    differences = differences[:, np.isfinite(differences).all(0)]
    if first.lower_is_better:
        differences = -differences
    if differences.size == 0:
        return Lead(math.nan, math.nan)
    return Lead(float(differences.mean()), standard_error(differences))
