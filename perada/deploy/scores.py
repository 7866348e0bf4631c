# SPDX-License-Identifier: Apache-2.0
"""Scores of sites, which the server computes from the scores that they send or from a secure sum of them.

A model whose outputs are NaN or infinite for some of a site's test images has no score. The site then names
the model instead (``failed_models``), and no mean over the other sites is computed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from perada.deploy.sums.vector import SumResult
from perada.scores.accumulation import Scores
from perada.scores.metrics import Metric, by_suffix, spread
from perada.tasks import Task

Facts = Mapping[str, Any]
"""What a site sends beside its update (:class:`perada.deploy.protocol.Response`)."""
PREDICTING = ("personal", "global")
"""The model that a site predicts with is the first of these that it has."""
BOTH = ("both",)
"""In place of :data:`PREDICTING`, for predictions with both models."""


@dataclass(frozen=True)
class _OwnScore:
    """A score of each site on its own images, whose mean over the sites the server computes.

    Attributes:
        name: Name of the mean.
        models: The models whose score it is: that of the first one that a site has.
        score: Name of the score in a secure sum.
        square: Name of its square there.
        weighted: Name of its product with the number of test images.
        failed_model: Name of the number of sites at which outputs of the model are NaN or infinite.
    """

    name: str
    models: Sequence[str]
    score: str
    square: str
    weighted: str
    failed_model: str

    def summand_names(self, metric: Metric) -> list[str]:
        """Return the names of the three numbers of a metric in a secure sum."""
        return [f"{self.score}/{metric.name}", f"{self.square}/{metric.name}", f"{self.weighted}/{metric.name}"]


_PREDICTING_SCORE = _OwnScore("personal/local_test", PREDICTING, "own", "square", "weighted", "own/failed")
_BOTH_SCORE = _OwnScore("both/local_test", BOTH, "both", "both_square", "both_weighted", "both/failed")
_TYPICAL = "own/typical"
"""Name in a secure sum of the share of a site's test images that look like its training images."""


def _own_scores(with_both: bool) -> list[_OwnScore]:
    """Return the scores of sites on their own images."""
    return [_PREDICTING_SCORE, _BOTH_SCORE] if with_both else [_PREDICTING_SCORE]


def describe_model(model: str) -> str:
    """Return what a message calls one of :data:`perada.deploy.protocol.SCORED_MODELS`.

    >>> describe_model("personal"), describe_model("both")
    ('the personal model', 'both models together')
    """
    return "both models together" if model == "both" else f"the {model} model"


def count_summands(metrics: Sequence[Metric], task: Task, num_classes: int) -> dict[str, int]:
    """Count the sums over images from which each metric is computed. Metrics that do not follow from sums are left out.

    Args:
        metrics: Metrics of the run.
        task: What the models predict.
        num_classes: Number of classes K.
    """
    pixels = (1, 1) if task.per_pixel else ()
    predicted = task.predicted(torch.zeros(1, 1, *pixels, num_classes))
    targets = task.blank_targets((1, *pixels), num_classes, predicted.device)
    num_summands: dict[str, int] = {}
    for metric in metrics:
        if metric.summed is not None:
            num_summands[metric.name] = metric.summed.summands(predicted, targets).shape[-1]
    return num_summands


def counts_of(scores_of_model: Mapping[str, Scores], test_size: int) -> dict[str, Any]:
    """Return the facts that a site sends with ``counts``, from which scores on the images of all sites are computed.

    Args:
        scores_of_model: Scores of the site's models by name.
        test_size: Number of the site's test images.

    Returns:
        ``counts`` and ``sums`` of each model as far as there are any, and ``tests``; nothing if there are neither. A
        model whose outputs are NaN or infinite for some images has neither.
    """
    counts_of_model: dict[str, list[int]] = {}
    sums_of_model: dict[str, dict[str, list[float]]] = {}
    for model, score in scores_of_model.items():
        if score.failed_images.any():
            continue
        if score.counts.any():
            counts_of_model[model] = score.counts[:, 0, 0].tolist()
        if score.statistics:
            sums_of_model[model] = {name: values[0, 0].tolist() for name, values in score.statistics.items()}
    facts: dict[str, Any] = {}
    if counts_of_model:
        facts["counts"] = counts_of_model
    if sums_of_model:
        facts["sums"] = sums_of_model
    if facts:
        facts["tests"] = test_size
    return facts


def failed_models_of(scores_of_model: Mapping[str, Scores]) -> dict[str, Any]:
    """Return the fact ``failed_models``: the models whose outputs are NaN or infinite for some test images.

    For how many is not sent: if these are all of them, it is the number of the site's test images.

    Args:
        scores_of_model: Scores of the site's models by name.

    Returns:
        The fact; nothing if all outputs are finite.
    """
    failed = sorted(model for model, score in scores_of_model.items() if score.failed_images.any())
    return {"failed_models": failed} if failed else {}


def _has_failed(facts: Facts, model: str) -> bool:
    """Return whether a model of a site has outputs that are NaN or infinite."""
    return model in facts.get("failed_models", ())


def impossible_sums(
    metrics: Sequence[Metric], num_summands: Mapping[str, int], facts: Facts, max_pixels: float = math.inf
) -> str:
    """Return why the sums that a site sends cannot be those of its test images; "" if they can.

    Args:
        metrics: Metrics of the run.
        num_summands: Number of sums of each metric, from :func:`count_summands`.
        facts: What the site has sent.
        max_pixels: Largest number of pixels of an image.
    """
    summed = {metric.name: metric.summed for metric in metrics}
    num_images = facts.get("tests", math.inf)
    for model, sums_of_metrics in facts.get("sums", {}).items():
        for name, values in sums_of_metrics.items():
            metric = summed.get(name)
            if metric is None:
                return f"{name!r} of {describe_model(model)} is not computed from sums"
            if len(values) != num_summands[name]:
                return f"{name!r} of {describe_model(model)} has {len(values)} sums, expected {num_summands[name]}"
            if not metric.is_possible(_as_sums(values), num_images, max_pixels):
                return f"{name!r} of {describe_model(model)} has sums that no {num_images} test images can have"
    return ""


def _as_sums(values: Sequence[float]) -> Tensor:
    """Return the sums of a metric as a tensor (S,)."""
    return torch.tensor(values, dtype=torch.float64)


def _sent_sums(facts: Facts, model: str, metric: Metric) -> Tensor | None:
    """Return the sums (S,) that a site has sent for a metric of one of its models; None if it sends none."""
    values = facts.get("sums", {}).get(model, {}).get(metric.name)
    if values is None:
        return None
    return _as_sums(values)


@dataclass(frozen=True)
class _Hits:
    """Numbers of correct and of all predictions of a model."""

    correct: int
    total: int


def _sent_hits(facts: Facts, model: str) -> _Hits | None:
    """Return the counts of predictions that a site has sent for one of its models; None if it sends none."""
    counts_of_models = facts.get("counts", {})
    if model not in counts_of_models:
        return None
    return _Hits(*counts_of_models[model])


def _score_of_statistics(metric: Metric, statistics: Tensor) -> float:
    """Return a metric's score from its statistics (S,), rounded as in a simulation; of scores of classes, the mean."""
    assert metric.summed is not None
    return float(metric.summed.score(statistics).to(torch.get_default_dtype()).nanmean())


def mean_scores(
    metrics: Sequence[Metric],
    facts_of_sites: Sequence[Facts],
    recent: Sequence[bool] | None = None,
    with_both: bool = False,
) -> dict[str, float]:
    """Average the scores of the sites' models on their own images, and score the global model on all images.

    The global model is scored only by accuracy and by metrics that are computed from sums over images.

    Args:
        metrics: Metrics of the run; the names of scores of the first one have no suffix.
        facts_of_sites: What each site has sent.
        recent: Whether each site took part in one of the last rounds (:class:`.Participation`).
        with_both: Whether sites predict with both models, too.
    """
    scores: dict[str, float] = {}
    weights = _test_sizes(facts_of_sites)
    for suffix, metric in by_suffix(metrics).items():
        for own_score in _own_scores(with_both):
            local_scores = [local_score(site_facts, metric, own_score.models) for site_facts in facts_of_sites]
            local_failed = [_local_model_failed(site_facts, own_score.models) for site_facts in facts_of_sites]
            if any(local_failed) or any(map(math.isfinite, local_scores)):
                scores |= spread(
                    f"{own_score.name}{suffix}",
                    torch.tensor(local_scores),
                    metric.lower_is_better,
                    weights,
                    recent,
                    torch.tensor(local_failed),
                )
        global_failed = any(_has_failed(site_facts, "global") for site_facts in facts_of_sites)
        global_score = math.nan
        if not global_failed:
            global_score = (
                _pooled_accuracy(facts_of_sites) if metric.is_accuracy else _pooled_score(metric, facts_of_sites)
            )
        if global_failed or math.isfinite(global_score):
            scores[f"global/global_test{suffix}"] = global_score
    shares_typical = [site_facts["typical"] for site_facts in facts_of_sites if "typical" in site_facts]
    if with_both and shares_typical:
        scores["typical/local_test"] = float(torch.tensor(shares_typical, dtype=torch.float64).mean())
    return scores


def _test_sizes(facts_of_sites: Sequence[Facts]) -> Tensor | None:
    """Return the number of test images of each site; None if any site does not report it."""
    sizes = [site_facts.get("tests", 0) for site_facts in facts_of_sites]
    if not sizes or not all(sizes):
        return None
    return torch.tensor(sizes, dtype=torch.float64)


def _pooled_accuracy(facts_of_sites: Sequence[Facts]) -> float:
    """Return the global model's accuracy on the images of all sites; NaN if none sends counts of its predictions."""
    correct = 0
    total = 0
    for site_facts in facts_of_sites:
        hits = _sent_hits(site_facts, "global")
        if hits is not None:
            correct += hits.correct
            total += hits.total
    if not total:
        return math.nan
    return correct / total


def _pooled_score(metric: Metric, facts_of_sites: Sequence[Facts]) -> float:
    """Return the global model's score from its sums over the images of all sites; NaN if no site sends them."""
    sums_of_sites = []
    for site_facts in facts_of_sites:
        sums = _sent_sums(site_facts, "global", metric)
        if sums is not None:
            sums_of_sites.append(sums)
    if not sums_of_sites:
        return math.nan
    assert metric.summed is not None
    return _score_of_statistics(metric, reduce(metric.summed.combine, sums_of_sites))


def local_score(facts: Facts, metric: Metric, models: Sequence[str] = PREDICTING) -> float:
    """Return a site's score of the first of some models of which it sends any; NaN if it sends none."""
    for model in models:
        if _has_failed(facts, model):
            # The global model's score must not stand in for that of the personal one.
            return math.nan
        hits = _sent_hits(facts, model)
        if metric.is_accuracy and hits is not None:
            return hits.correct / hits.total if hits.total else math.nan
        sums = _sent_sums(facts, model, metric)
        if sums is not None:
            return _score_of_statistics(metric, sums)
        score = facts.get("scores", {}).get(model, {}).get(metric.name)
        if score is not None:
            return float(score)
    return math.nan


def _local_model_failed(facts: Facts, models: Sequence[str] = PREDICTING) -> bool:
    """Return whether the first of some models that a site has has outputs that are NaN or infinite."""
    for model in models:
        if _has_failed(facts, model):
            return True
        if any(model in facts.get(fact, {}) for fact in ("counts", "sums", "scores")):
            return False
    return False


def summand_names(metrics: Sequence[Metric], num_summands: Mapping[str, int], with_both: bool = False) -> list[str]:
    """Return the names of a site's contribution to a secure sum of scores.

    Of the site's own model these are, for each metric, the score, its square, and its product with the number of test
    images. Of the global model they are the sums of each metric that is computed from sums over images, and the numbers
    of correct and of all predictions. Of both they are 1 if the model has no scores because outputs are NaN or
    infinite, and otherwise 0, so that the server learns whether any site has such a model, but not which. Of
    predictions with both models there are the same numbers as of the site's own model, and the share of the test images
    that look like the site's training images.

    Args:
        metrics: Metrics of the run.
        num_summands: Number of sums of each such metric, from :func:`count_summands`.
        with_both: Whether sites predict with both models, too.
    """
    own_scores = _own_scores(with_both)
    names = []
    for own_score in own_scores:
        for metric in metrics:
            names += own_score.summand_names(metric)
    for name, length in num_summands.items():
        names += _pooled_names(name, length)
    names += ["own/tests", "global/right", "global/all", "global/failed"]
    names += [own_score.failed_model for own_score in own_scores]
    if with_both:
        names.append(_TYPICAL)
    return names


def _pooled_names(metric_name: str, length: int) -> list[str]:
    """Return the names of the global model's sums for a metric."""
    return [f"pooled/{metric_name}:{index}" for index in range(length)]


def claimed_name(name: str) -> str:
    """Return the name under which a site announces a summand: one for all sums of a metric.

    >>> claimed_name("pooled/miou:7"), claimed_name("own/miou")
    ('pooled/miou', 'own/miou')
    """
    return name.partition(":")[0]


def score_summands(
    metrics: Sequence[Metric], facts: Facts, limit: float = math.inf, with_both: bool = False
) -> dict[str, float]:
    """Return a site's contribution to a secure sum of scores, limited to those that may leave it.

    Args:
        metrics: Metrics of the run.
        facts: What may leave the site.
        limit: Magnitude below which numbers can be summed. A metric with larger sums is left out.
        with_both: Whether sites predict with both models, too.

    Returns:
        Numbers by some of the names of :func:`summand_names`.
    """
    summands: dict[str, float] = {}
    own_scores = _own_scores(with_both)
    for own_score in own_scores:
        for metric in metrics:
            score = local_score(facts, metric, own_score.models)
            if not math.isfinite(score):
                continue
            score_name, square_name, weighted_name = own_score.summand_names(metric)
            summands[score_name] = score
            summands[square_name] = score**2
            if "tests" in facts:
                summands[weighted_name] = score * facts["tests"]
    if "tests" in facts:
        summands["own/tests"] = float(facts["tests"])
    if "typical" in facts and with_both:
        summands[_TYPICAL] = facts["typical"]
    if facts:
        for own_score in own_scores:
            summands[own_score.failed_model] = float(_local_model_failed(facts, own_score.models))
        summands["global/failed"] = float(_has_failed(facts, "global"))
    summed = {metric.name: metric.summed for metric in metrics}
    for name, statistics in facts.get("sums", {}).get("global", {}).items():
        metric_of_sums = summed[name]
        assert metric_of_sums is not None
        sums = metric_of_sums.to_sums(_as_sums(statistics)).tolist()
        if max(map(abs, sums)) < limit:
            summands |= zip(_pooled_names(name, len(sums)), sums, strict=True)
    hits = _sent_hits(facts, "global")
    if hits is not None:
        summands["global/right"] = float(hits.correct)
        summands["global/all"] = float(hits.total)
    return summands


def scores_of_sums(
    metrics: Sequence[Metric],
    num_summands: Mapping[str, int],
    sum_result: SumResult,
    max_pixels: float = math.inf,
    with_both: bool = False,
) -> dict[str, float]:
    """Return the scores of :func:`mean_scores` that can be computed from sums over the sites: no quantiles.

    Args:
        metrics: Metrics of the run.
        num_summands: Number of sums of each metric, from :func:`count_summands`.
        sum_result: Sums and means over the sites of the numbers of :func:`score_summands`.
        max_pixels: Largest number of pixels of an image.
        with_both: Whether sites predict with both models, too.
    """
    means = sum_result.metrics
    global_failed = sum_result.totals.get("global/failed", 0) > 0
    scores: dict[str, float] = {}
    accuracy = math.nan
    if "global/right" in means and means.get("global/all"):
        accuracy = means["global/right"] / means["global/all"]
    for suffix, metric in by_suffix(metrics).items():
        for own_score in _own_scores(with_both):
            scores |= _own_score_of_sums(own_score, suffix, metric, sum_result)
        global_score = math.nan
        if not global_failed:
            global_score = (
                accuracy if metric.is_accuracy else _score_of_total(metric, num_summands, sum_result, max_pixels)
            )
        if global_failed or math.isfinite(global_score):
            scores[f"global/global_test{suffix}"] = global_score
    if with_both and _TYPICAL in means:
        scores["typical/local_test"] = means[_TYPICAL]
    return scores


def _own_score_of_sums(own_score: _OwnScore, suffix: str, metric: Metric, sum_result: SumResult) -> dict[str, float]:
    """Return the statistics of the sites' own scores that can be computed from sums; nothing without such scores.

    The variance over sites is the mean of squares minus the square of the mean m. Sums round both means by up to
    2^-(f + 1) with f fraction bits, and hence the variance by (1 + 2 |m|) 2^-(f + 1): with 24 bits, a deviation of
    scores up to 1 that is smaller than 0.0003 cannot be told from 0.
    """
    means = sum_result.metrics
    name = f"{own_score.name}{suffix}"
    if sum_result.totals.get(own_score.failed_model, 0) > 0:
        return dict.fromkeys((name, f"{name}_std", f"{name}_weighted"), math.nan)
    score_name, square_name, weighted_name = own_score.summand_names(metric)
    # A lying site can make either of them missing.
    mean = means.get(score_name, math.nan)
    mean_square = means.get(square_name, math.nan)
    if not (math.isfinite(mean) and math.isfinite(mean_square)):
        return {}
    statistics = {name: mean, f"{name}_std": math.sqrt(max(0.0, mean_square - mean**2))}
    if weighted_name in means and means.get("own/tests"):
        statistics[f"{name}_weighted"] = means[weighted_name] / means["own/tests"]
    return statistics


def _score_of_total(metric: Metric, num_summands: Mapping[str, int], sum_result: SumResult, max_pixels: float) -> float:
    """Return the global model's score on the images of all sites; NaN if their sums are missing or impossible."""
    if metric.summed is None:
        return math.nan
    names = _pooled_names(metric.name, num_summands[metric.name])
    # A lying site can make some of them missing or impossible.
    if not all(name in sum_result.totals for name in names):
        return math.nan
    statistics = metric.summed.from_sums(_as_sums([sum_result.totals[name] for name in names]))
    num_images = sum_result.totals.get("own/tests", math.inf)
    if not metric.summed.is_possible(statistics, num_images, max_pixels):
        return math.nan
    return _score_of_statistics(metric, statistics)
