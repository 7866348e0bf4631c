# SPDX-License-Identifier: Apache-2.0
"""Scores of sites: what the server makes of those that they tell, or of their secure sum."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perada.federation.metrics import Metric, spread

Facts = Mapping[str, Any]
"""What a site says beside its update (:class:`perada.deploy.protocol.Response`)."""


def mean_scores(
    metrics: Sequence[Metric], facts: Sequence[Facts], recent: Sequence[bool] | None = None
) -> dict[str, float]:
    """Mean scores of the sites' models on their own images, and the global model's accuracy on the images of all.

    ``recent`` says of each site whether it took part in one of the last rounds (:class:`.Participation`).
    """
    found: dict[str, float] = {}
    counts = [fact.get("counts", {}) for fact in facts]
    sizes = [own.get("personal", own.get("global", [0, 0]))[1] for own in counts]
    weights = torch.tensor(sizes, dtype=torch.float64) if facts and all(sizes) else None
    for place, metric in enumerate(metrics):
        ending = f"_{metric.name}" if place else ""
        own = [own_score(fact, metric) for fact in facts]
        if any(map(math.isfinite, own)):
            found |= spread(f"personal/local_test{ending}", torch.tensor(own), metric.falls, weights, recent)
        shared = [one["global"] for one in counts if "global" in one and one["global"][1]]
        if metric.compute is None and shared:
            found[f"global/global_test{ending}"] = sum(right for right, _ in shared) / sum(total for _, total in shared)
    return found


def own_score(facts: Facts, metric: Metric) -> float:
    """A site's score of the model that it predicts with; NaN where it says none."""
    for model in ("personal", "global"):
        if metric.compute is None and model in facts.get("counts", {}):
            right, total = facts["counts"][model]
            return right / total if total else math.nan
        value = facts.get("scores", {}).get(model, {}).get(metric.name)
        if value is not None:
            return float(value)
    return math.nan


def score_summands(metrics: Sequence[Metric], facts: Facts) -> dict[str, float]:
    """What a site adds to a sum of scores, of those that may leave it; nothing if none may."""
    found: dict[str, float] = {}
    for metric in metrics:
        score = own_score(facts, metric)
        if math.isfinite(score):
            found |= {f"own/{metric.name}": score, f"square/{metric.name}": score**2}
    counts = facts.get("counts", {})
    own = counts.get("personal", counts.get("global"))
    for name, pair in (("own", own), ("global", counts.get("global"))):
        if pair is not None:
            found |= {f"{name}/right": float(pair[0]), f"{name}/all": float(pair[1])}
    return found


def summed_scores(metrics: Sequence[Metric], numbers: Mapping[str, float]) -> dict[str, float]:
    """Those of :func:`mean_scores` that follow from means over the sites: not the worst ones."""
    found: dict[str, float] = {}
    ratio = {
        model: numbers[f"{model}/right"] / numbers[f"{model}/all"]
        for model in ("own", "global")
        if f"{model}/right" in numbers and numbers.get(f"{model}/all")
    }
    for place, metric in enumerate(metrics):
        ending, whole = f"_{metric.name}" if place else "", metric.compute is None
        name, mean = f"personal/local_test{ending}", numbers.get(f"own/{metric.name}", math.nan)
        square = numbers.get(f"square/{metric.name}", math.nan)  # a site that lies can make one of them go
        if math.isfinite(mean) and math.isfinite(square):
            found |= {name: mean, f"{name}_std": math.sqrt(max(0.0, square - mean**2))}
            if whole and "own" in ratio:
                found[f"{name}_weighted"] = ratio["own"]
        if whole and "global" in ratio:
            found[f"global/global_test{ending}"] = ratio["global"]
    return found
