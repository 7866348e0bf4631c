# SPDX-License-Identifier: Apache-2.0
"""Scores of sites, which the server computes from the scores that they send or from a secure sum of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perada.federation.metrics import Metric, spread

Facts = Mapping[str, Any]
"""What a site sends beside its update (:class:`perada.deploy.protocol.Response`)."""


def mean_scores(
    metrics: Sequence[Metric],
    facts: Sequence[Facts],
    recent: Sequence[bool] | None = None,
) -> dict[str, float]:
    """Average the scores of the sites' models on their own images, and the global model's accuracy on all images.

    Args:
        metrics: Metrics of the run; the names of scores of the first one have no suffix.
        facts: What each site has sent.
        recent: Whether each site took part in one of the last rounds (:class:`.Participation`).
    """
    scores: dict[str, float] = {}
    counts_of_sites = [fact.get("counts", {}) for fact in facts]
    global_counts = [counts["global"] for counts in counts_of_sites if "global" in counts and counts["global"][1]]
    weights = _test_sizes(counts_of_sites)
    for index, metric in enumerate(metrics):
        suffix = f"_{metric.name}" if index else ""
        local_scores = [local_score(fact, metric) for fact in facts]
        if any(map(math.isfinite, local_scores)):
            scores |= spread(
                f"personal/local_test{suffix}", torch.tensor(local_scores), metric.lower_is_better, weights, recent
            )
        if metric.is_accuracy and global_counts:
            correct = sum(correct for correct, _ in global_counts)
            total = sum(total for _, total in global_counts)
            scores[f"global/global_test{suffix}"] = correct / total
    return scores


def _test_sizes(counts_of_sites: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the number of test images of each site; None if any site does not report it."""
    sizes = []
    for counts in counts_of_sites:
        _, total = counts.get("personal", counts.get("global", [0, 0]))
        sizes.append(total)
    return torch.tensor(sizes, dtype=torch.float64) if sizes and all(sizes) else None


def local_score(facts: Facts, metric: Metric) -> float:
    """Return a site's score of the model that it predicts with; NaN if it sends none."""
    for model in ("personal", "global"):
        if metric.is_accuracy and model in facts.get("counts", {}):
            correct, total = facts["counts"][model]
            return correct / total if total else math.nan
        value = facts.get("scores", {}).get(model, {}).get(metric.name)
        if value is not None:
            return float(value)
    return math.nan


def score_summands(metrics: Sequence[Metric], facts: Facts) -> dict[str, float]:
    """Return a site's contribution to a secure sum of scores, limited to those that may leave it.

    The names are those of :meth:`.Recipe.contents_of_scores`.
    """
    summands: dict[str, float] = {}
    for metric in metrics:
        score = local_score(facts, metric)
        if math.isfinite(score):
            summands[f"own/{metric.name}"] = score
            summands[f"square/{metric.name}"] = score**2
    counts = facts.get("counts", {})
    counts_by_model = {"own": counts.get("personal", counts.get("global")), "global": counts.get("global")}
    for model, pair in counts_by_model.items():
        if pair is not None:
            correct, total = pair
            summands[f"{model}/right"] = float(correct)
            summands[f"{model}/all"] = float(total)
    return summands


def scores_of_sums(metrics: Sequence[Metric], means: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of :func:`mean_scores` that follow from means over the sites, so not the worst ones.

    Args:
        metrics: Metrics of the run.
        means: Mean over the sites of each number of :func:`score_summands`.
    """
    scores: dict[str, float] = {}
    accuracies = {}
    for model in ("own", "global"):
        if f"{model}/right" in means and means.get(f"{model}/all"):
            accuracies[model] = means[f"{model}/right"] / means[f"{model}/all"]
    for index, metric in enumerate(metrics):
        suffix = f"_{metric.name}" if index else ""
        is_accuracy = metric.is_accuracy
        name = f"personal/local_test{suffix}"
        # A site that lies can remove one of the two numbers.
        mean = means.get(f"own/{metric.name}", math.nan)
        mean_square = means.get(f"square/{metric.name}", math.nan)
        if math.isfinite(mean) and math.isfinite(mean_square):
            scores[name] = mean
            scores[f"{name}_std"] = math.sqrt(max(0.0, mean_square - mean**2))
            if is_accuracy and "own" in accuracies:
                scores[f"{name}_weighted"] = accuracies["own"]
        if is_accuracy and "global" in accuracies:
            scores[f"global/global_test{suffix}"] = accuracies["global"]
    return scores
