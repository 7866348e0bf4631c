# SPDX-License-Identifier: Apache-2.0
"""Numbers that a report works out of a run's counts."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev

from perada.studies.report.records import Counts, Record


def expected_calibration_error(bins: Mapping[str, Sequence[float]]) -> float:
    """Mean over predictions of the distance between confidence and accuracy in each one's bin; NaN without any.

    Source: Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599, equation 3.

    >>> round(expected_calibration_error({"count": [1, 3], "right": [0, 3], "confidence": [0.5, 0.9]}), 6)
    0.2
    """
    total = sum(bins["count"])
    gaps = zip(bins["count"], bins["right"], bins["confidence"], strict=True)
    return sum(abs(right - count * sure) for count, right, sure in gaps) / total if total else math.nan


def confusion_tables(record: Record, who: str) -> dict[int, Counts]:
    """By client, images (K, K) of each class and predicted class; only the clients that have any."""
    k = len(record.class_names)
    tables: dict[int, Counts] = {}
    for client, true, predicted, count in record.confusion.get(who, []):
        tables.setdefault(client, [[0] * k for _ in range(k)])[true][predicted] += count
    return tables


def accuracies(tables: Mapping[int, Counts]) -> dict[int, float]:
    """Share of right predictions of each client.

    >>> accuracies({3: [[2, 1], [0, 1]]})
    {3: 0.75}
    """
    return {
        client: sum(row[i] for i, row in enumerate(table)) / max(1, sum(map(sum, table)))
        for client, table in tables.items()
    }


def sent(record: Record) -> list[float]:
    """Megabytes that were sent up and down until the end of each round, by all clients together."""
    return list(accumulate(row.get("comm/up_mb", 0.0) + row.get("comm/down_mb", 0.0) for row in record.rounds))


def paired(one: Sequence[float], other: Sequence[float]) -> tuple[list[float], float, float]:
    """Each client's score in ``one`` less its score in ``other``, their mean, and its standard error over clients.

    Clients that lack either are left out. The standard error is that of a mean, s / √M with s² the variance (M − 1) of
    the differences; NaN for a single client.

    >>> paired([0.5, 1.0, float("nan")], [0.5, 0.5, 0.0])
    ([0.0, 0.5], 0.25, 0.25)
    """
    both = [a - b for a, b in zip(one, other, strict=True) if not math.isnan(a + b)]
    error = stdev(both) / math.sqrt(len(both)) if len(both) > 1 else math.nan
    return both, fmean(both) if both else math.nan, error
