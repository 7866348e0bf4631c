# SPDX-License-Identifier: Apache-2.0
"""Numbers that a report computes from a run's counts and scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, stdev

from perada.core.text import printable
from perada.studies.report.records import Counts, RunRecord


def expected_calibration_error(bins: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over predictions of the gap between confidence and accuracy in the prediction's bin.

    Source: Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599, equation 3.

    Args:
        bins: ``count``, number of ``right`` predictions and mean ``confidence`` of each bin.

    Returns:
        The error; NaN without predictions.

    >>> round(expected_calibration_error({"count": [1, 3], "right": [0, 3], "confidence": [0.5, 0.9]}), 6)
    0.2
    """
    total = sum(bins["count"])
    if not total:
        return math.nan
    weighted_gaps = []
    for count, right, confidence in zip(bins["count"], bins["right"], bins["confidence"], strict=True):
        weighted_gaps.append(abs(right - count * confidence))
    return sum(weighted_gaps) / total


@dataclass(frozen=True)
class RightCount:
    """Images that are predicted correctly, of those that were tested, as a sample of all images like them.

    Attributes:
        right: Number of correct predictions.
        num_images: Number of test images, at least 1.
        low: Lower end of the 95 % confidence interval of the share of correct predictions, from 0 to 1.
        high: Its upper end.
    """

    right: int
    num_images: int
    low: float
    high: float

    @classmethod
    def of(cls, right: int, num_images: int) -> "RightCount":
        """Return the counts with Wilson's interval, which also holds for few images and near 0 and 100 %.

        Source: Wilson, Journal of the American Statistical Association 22, 1927.

        >>> count = RightCount.of(34, 47)
        >>> round(count.low, 3), round(count.high, 3), count.text, count.interval_text
        (0.582, 0.831, '34 of 47', '58 to 83 %')
        """
        # The command prints the path of its page before it imports SciPy, which takes longer.
        from scipy.stats import binomtest

        interval = binomtest(right, num_images).proportion_ci(method="wilson")
        return cls(right, num_images, float(interval.low), float(interval.high))

    @property
    def text(self) -> str:
        """The counts in words."""
        return f"{self.right} of {self.num_images}"

    @property
    def interval_text(self) -> str:
        """The interval in whole percent."""
        return f"{100 * self.low:.0f} to {100 * self.high:.0f} %"


def predicts_counts(record: RunRecord) -> bool:
    """Return whether scores are shares of images that are predicted correctly."""
    is_accuracy = record.has_classes and not record.several_labels and record.first_metric == "accuracy"
    return is_accuracy and not record.task.get("per_pixel")


def right_counts(record: RunRecord, client_scores: Sequence[float]) -> list[RightCount | None]:
    """Return the number of correct predictions of each client, whose accuracies are given.

    Returns:
        The counts, None for a client without a score; empty if scores are not shares of a client's test images.
    """
    if not predicts_counts(record) or len(client_scores) != len(record.test_images):
        return []
    counts_of_clients: list[RightCount | None] = []
    for score, images in zip(client_scores, record.test_images, strict=True):
        if math.isnan(score) or not images:
            counts_of_clients.append(None)
            continue
        right = round(score * images)
        if abs(score * images - right) > 1e-3:
            return []  # not a count of these images
        counts_of_clients.append(RightCount.of(right, images))
    return counts_of_clients


def model_title(model: str) -> str:
    """Return words for the models of a file's entry, ``personal``, ``global`` or ``both``.

    >>> model_title("personal"), model_title("global"), model_title("both")
    ('personal models', 'global model', 'both models')
    """
    if model == "global":
        return "global model"
    return f"{printable(model)} models"


def model_of_confusion(record: RunRecord) -> str | None:
    """Return whose mistakes a page shows: both models of each client, its own, or the global one.

    Returns:
        The first of ``both``, ``personal`` and ``global`` of which the run has counts; None if it has none.
    """
    for model in ("both", "personal", "global"):
        if record.confusion.get(model):
            return model
    return None


def confusion_tables(record: RunRecord, model: str) -> dict[int, Counts]:
    """Return the images (K, K) of each class and predicted class by client, for the clients that have any.

    Args:
        record: The run.
        model: ``personal``, ``global`` or ``both``.
    """
    num_classes = len(record.class_names)
    tables: dict[int, Counts] = {}
    for client, label, predicted, count in record.confusion.get(model, []):
        if client not in tables:
            tables[client] = empty_confusion(num_classes)
        tables[client][label][predicted] += count
    return tables


def empty_confusion(num_classes: int) -> Counts:
    """Return a table (K, K) of zeros."""
    return [[0] * num_classes for _ in range(num_classes)]


def accuracies(tables: Mapping[int, Counts]) -> dict[int, float]:
    """Return the share of correct predictions of each client.

    >>> accuracies({3: [[2, 1], [0, 1]]})
    {3: 0.75}
    """
    accuracy_of_client = {}
    for client, table in tables.items():
        correct = sum(row[label] for label, row in enumerate(table))
        accuracy_of_client[client] = correct / max(1, count_images(table))
    return accuracy_of_client


def count_images(table: Counts) -> int:
    """Return the number of images in a table of counts."""
    return sum(sum(row) for row in table)


@dataclass(frozen=True)
class Mistake:
    """Images of one class for which another class was predicted."""

    label: int
    predicted: int
    num_images: int


def mistakes(table: Counts) -> list[Mistake]:
    """Return the entries of a confusion table that are off its diagonal and not zero."""
    entries = []
    for label, row in enumerate(table):
        for predicted, images in enumerate(row):
            if label != predicted and images:
                entries.append(Mistake(label, predicted, images))
    return entries


def most_frequent_mistakes(table: Counts) -> list[Mistake]:
    """Return the mistakes that most images have, several if they are equally frequent.

    >>> most_frequent_mistakes([[5, 2], [1, 5]]), len(most_frequent_mistakes([[5, 1], [1, 5]]))
    ([Mistake(label=0, predicted=1, num_images=2)], 2)
    """
    candidates = mistakes(table)
    largest = max((mistake.num_images for mistake in candidates), default=0)
    return [mistake for mistake in candidates if mistake.num_images == largest]


def megabytes_sent(record: RunRecord) -> list[float]:
    """Return the megabytes sent, up and down, by all clients together until the end of each round."""
    totals = []
    total = 0.0
    for row in record.rounds:
        total += row.get("comm/up_mb", 0.0) + row.get("comm/down_mb", 0.0)
        totals.append(total)
    return totals


@dataclass(frozen=True)
class PairedDifference:
    """Differences between two scores of the same clients.

    Attributes:
        differences: Of each client that has both scores.
        mean: Mean over clients; NaN without any.
        standard_error: Of the mean: s / √M, where s² is the variance (M − 1) of the differences. NaN for one client.
    """

    differences: list[float]
    mean: float
    standard_error: float


def paired_difference(client_scores: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Return the difference of each client's score to its baseline; clients that lack one of the two are left out.

    >>> paired_difference([0.5, 1.0, float("nan")], [0.5, 0.5, 0.0])
    PairedDifference(differences=[0.0, 0.5], mean=0.25, standard_error=0.25)
    """
    differences = []
    for score, base in zip(client_scores, baseline, strict=True):
        difference = score - base
        if not math.isnan(difference):
            differences.append(difference)
    mean = fmean(differences) if differences else math.nan
    standard_error = math.nan
    if len(differences) > 1:
        standard_error = stdev(differences) / math.sqrt(len(differences))
    return PairedDifference(differences, mean, standard_error)


def mean_of_scores(client_scores: Sequence[float]) -> float:
    """Return the mean over the clients that have test images; NaN if there are none.

    Args:
        client_scores: Scores of clients, none of which is NaN because outputs of its model are NaN or infinite.
    """
    scores = [value for value in client_scores if not math.isnan(value)]
    return fmean(scores) if scores else math.nan


@dataclass(frozen=True)
class Deciles:
    """The first and the ninth decile of numbers."""

    first: float
    ninth: float


def deciles(client_scores: Sequence[float]) -> Deciles:
    """Return deciles 1 and 9 of the numbers that are not NaN.

    >>> deciles([0.0, 50.0, 100.0])
    Deciles(first=10.0, ninth=90.0)
    """
    scores = [value for value in client_scores if not math.isnan(value)]
    if not scores:
        return Deciles(math.nan, math.nan)
    if len(scores) == 1:
        return Deciles(scores[0], scores[0])
    cut_points = quantiles(scores, n=10, method="inclusive")
    return Deciles(cut_points[0], cut_points[-1])
