# SPDX-License-Identifier: Apache-2.0
"""Where in ``Run.metrics`` values of single clients are: what changes where a client comes or is forgotten."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = {"privacy/client_epsilon": 0.0}
"""Of a client that joined, by the name of the metric; it sent nothing. What is not named is NaN."""


def with_client(
    metrics: Mapping[str, Any], scores: Mapping[str, float], before: float | None, counts: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The metrics of a run with one more client, of which ``scores`` are known, by the name of the metric.

    ``before`` is what the global model scores on its images; ``counts`` are its images of each class, by part.
    """
    found = dict(metrics)
    found["clients"] = {
        name: [*values, scores.get(name, ABSENT.get(name, math.nan))] for name, values in metrics["clients"].items()
    }
    if "initial" in found:
        found["initial"] = {name: [*values, math.nan] for name, values in found["initial"].items()}
    if "by_round" in found:
        found["by_round"] = [_each(row, lambda values: [*values, math.nan]) for row in found["by_round"]]
    if "global/local_test" in found:
        found["global/local_test"] = [*found["global/local_test"], math.nan if before is None else before]
    if "per_class" in found:
        found["per_class"] = {name: _more_rows(rows) for name, rows in found["per_class"].items()}
    if "partition" in found:
        parts = found["partition"]
        found["partition"] = {part: [*rows, list(counts.get(part, [0] * len(rows[0])))] for part, rows in parts.items()}
    return found


def without_client(metrics: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The metrics without the values of a client, NaN or zeros instead; its ε stay."""

    def blank(values: Sequence[Any]) -> list[Any]:
        return [*values[:number], math.nan, *values[number + 1 :]]

    found = dict(metrics)
    found["clients"] = {
        name: list(values) if name.startswith("privacy/") else blank(values)
        for name, values in metrics["clients"].items()
    }
    if "initial" in found:
        found["initial"] = _each(found["initial"], blank)
    if "by_round" in found:
        found["by_round"] = [_each(row, blank) for row in found["by_round"]]
    if "global/local_test" in found:
        found["global/local_test"] = blank(found["global/local_test"])
    for name, filler in (("per_class", math.nan), ("partition", 0)):
        if name in found:
            found[name] = {key: _blank_row(rows, number, filler) for key, rows in found[name].items()}
    if "predictions" in found:
        found["predictions"] = {role: _others(told, number) for role, told in found["predictions"].items()}
    return found


def _each(content: Mapping[str, Any], change: Any) -> dict[str, Any]:  # noqa: ANN401  # lists to lists
    return {name: change(value) if isinstance(value, list) else value for name, value in content.items()}


def _blank_row(rows: list[Any], number: int, filler: float) -> list[Any]:
    """Rows (M, K) without one; what is (K,) is of all clients."""
    if not isinstance(rows[0], list):
        return rows
    return [*rows[:number], [filler] * len(rows[0]), *rows[number + 1 :]]


def _more_rows(rows: list[Any]) -> list[Any]:
    """Rows (M + 1, K) of (M, K); what is (K,) is of all clients."""
    return [*rows, [math.nan] * len(rows[0])] if isinstance(rows[0], list) else rows


def _others(told: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What was predicted, without the rows of a client's confusions; calibration is of all images together."""
    rows = {"confusion": [row for row in told["confusion"] if row[0] != number]} if "confusion" in told else {}
    return dict(told) | rows
