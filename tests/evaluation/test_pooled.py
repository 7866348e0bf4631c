# SPDX-License-Identifier: Apache-2.0
"""Scores from sums over clients, against scores of all images in one place."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from perada.evaluation.outputs import ClientOutputs, ModelOutputs, class_auroc
from perada.evaluation.pooled import Summaries
from perada.evaluation.rows import POOLED
from perada.scores.auroc import mean_auroc
from perada.scores.intervals import LEVEL
from perada.scores.summed_scores import predictions_for, summed_scores
from perada.tasks import Classification, Regression
from tests.rejections import raises_naming

TASK = Classification()
MODELS = ("ours", "vendor")


def outputs_of(name, logits_of_models, targets, groups=None):
    """What models predict for the images of a client."""
    num_classes = logits_of_models[0].shape[1]
    models = {}
    for model, logits in zip(MODELS, logits_of_models, strict=False):
        probabilities = predictions_for(TASK, logits)
        summands = {each.name: each.summands(probabilities, targets) for each in summed_scores(TASK, num_classes)}
        models[model] = ModelOutputs(probabilities, summands, num_failed=0)
    groups = np.arange(len(targets)) if groups is None else groups
    return ClientOutputs(name, groups, targets, models)


def draw(seed, num_images, num_classes, images_per_patient=1):
    """Logits of two models that resemble each other, targets and patients, whose images resemble each other."""
    random = torch.Generator().manual_seed(seed)
    patients = np.repeat(np.arange(num_images // images_per_patient), images_per_patient)
    num_patients = patients.max() + 1
    targets = torch.randint(0, num_classes, (num_patients,), generator=random)[patients]
    shape = (num_patients, num_classes)
    common = torch.randn(shape, generator=random)[patients]
    logits = []
    for strength in (1.5, 1.0):
        noise = torch.randn(len(patients), num_classes, generator=random)
        logits.append(strength * torch.nn.functional.one_hot(targets, num_classes) + common + 0.5 * noise)
    return logits, targets, patients


def row_of(rows, model, score, versus=None, class_name=None):
    (row,) = [
        row for row in rows if (row.model, row.score, row.versus, row.class_name) == (model, score, versus, class_name)
    ]
    return row


@pytest.mark.parametrize("images_per_patient", [1, 3])
@pytest.mark.parametrize("num_classes", [2, 4])
def test_sums_over_clients_give_nearly_what_all_images_together_do(num_classes, images_per_patient):
    sizes = (120, 60, 240)
    drawn = [draw(seed, size, num_classes, images_per_patient) for seed, size in enumerate(sizes)]
    summaries = Summaries(MODELS, TASK, tuple(map(str, range(num_classes))))
    vectors = [summaries.summarize(outputs_of("x", *each)) for each in drawn]
    assert all(len(vector) == summaries.size for vector in vectors)
    rows = summaries.rows(POOLED, sum(vectors))

    begins = np.cumsum([0, *(size // images_per_patient for size in sizes[:-1])])
    logits = [torch.cat([each[0][model] for each in drawn]) for model in range(2)]
    groups = np.concatenate([each[2] + begin for each, begin in zip(drawn, begins, strict=True)])
    together = outputs_of("all", logits, torch.cat([each[1] for each in drawn]), groups)
    classes = [1] if num_classes == 2 else range(num_classes)
    exact = {}
    for model in MODELS:
        exact[model] = mean_auroc([class_auroc(together, model, TASK, k) for k in classes])
        row = row_of(rows, model, "auroc")
        assert row.value == pytest.approx(exact[model].value, abs=0.002)
        error = exact[model].standard_error(groups)
        assert row.high - row.low == pytest.approx(2 * 2 * error, rel=0.15)
    difference = exact["ours"].minus(exact["vendor"])
    row = row_of(rows, "ours", "auroc", versus="vendor")
    assert row.value == pytest.approx(difference.value, abs=0.003)
    assert row.high - row.low == pytest.approx(2 * 2 * difference.standard_error(groups), rel=0.15)

    # All else is the same, whether images are together or not, but for rounding.
    expected = summaries.rows(POOLED, summaries.summarize(together))
    for row in rows:
        if row.score != "auroc":
            same = row_of(expected, row.model, row.score, row.versus, row.class_name)
            assert (row.value, row.low, row.high) == pytest.approx((same.value, same.low, same.high), abs=1e-4)
            assert row.support == same.support


def test_numbers_that_no_images_have_are_found():
    summaries = Summaries(MODELS, TASK, ("a", "b"))
    total = summaries.summarize(outputs_of("x", *draw(0, 30, 2)))
    assert summaries.find_impossible(total) == ""
    sizes = [each.size for each in summaries.fields]
    begins = dict(zip([each.name for each in summaries.fields], np.cumsum([0, *sizes[:-1]]), strict=True))
    for name, value in (
        ("groups", 31),
        ("groups", -1),
        ("moments 0 accuracy", -1),
        ("histograms 1", -(2**40)),
        ("histograms 1", 2**40),
        ("influences", -1),
    ):
        spoiled = total.copy()
        spoiled[begins[name]] = value
        assert summaries.find_impossible(spoiled) == name


def test_sums_are_exact_in_any_order():
    summaries = Summaries(MODELS, TASK, ("a", "b"))
    vectors = [summaries.summarize(outputs_of("x", *draw(seed, 30 + seed, 2))) for seed in range(5)]
    rows = summaries.rows(POOLED, sum(vectors))
    assert rows == summaries.rows(POOLED, sum(reversed(vectors)))


def test_a_client_without_one_of_the_classes_adds_its_images():
    logits, targets, _ = draw(0, 40, 2)
    only_negatives = targets == 0
    parts = [outputs_of("x", [each[only_negatives] for each in logits], targets[only_negatives])]
    parts.append(outputs_of("x", [each[~only_negatives] for each in logits], targets[~only_negatives]))
    summaries = Summaries(MODELS, TASK, ("a", "b"))
    rows = summaries.rows(POOLED, sum(summaries.summarize(part) for part in parts))
    exact = class_auroc(outputs_of("all", logits, targets), "ours", TASK, 1)
    row = row_of(rows, "ours", "auroc")
    assert row.value == pytest.approx(exact.value, abs=0.01)
    assert row.low < row.value < row.high


def test_numbers_in_large_units_need_a_scale():
    targets = 1e5 * torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    task = Regression()
    summaries = Summaries(("ours",), task, ("grams",))

    def summarize(task, logits):
        summands = {each.name: each.summands(predictions_for(task, logits), targets) for each in summed_scores(task, 1)}
        models = {"ours": ModelOutputs(None, summands, num_failed=0)}
        return ClientOutputs("x", np.arange(100), None, models)

    with raises_naming(ValueError, "mae", "std"):
        summaries.summarize(summarize(task, torch.zeros(100, 1)))
    task = Regression(mean=0.0, std=1e5)
    summaries = Summaries(("ours",), task, ("grams",))
    rows = summaries.rows(POOLED, summaries.summarize(summarize(task, torch.zeros(100, 1))))
    assert row_of(rows, "ours", "mae").value == pytest.approx(float(targets.abs().mean()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("images_per_patient", [1, 3])
def test_pooled_intervals_cover(images_per_patient):
    """The sites of each federation have their own shares of positive images."""
    summaries = Summaries(MODELS, TASK, ("a", "b"))
    random = np.random.default_rng(0)
    federations = 400
    truth = {"ours": 0.85, "vendor": 0.75}
    hits = dict.fromkeys(("ours", "vendor", "difference", "accuracy"), 0)
    for _ in range(federations):
        total = 0
        for share in (0.2, 0.4, 0.6):
            patients = np.repeat(np.arange(40), images_per_patient)
            labels = random.random(40) < share
            common = random.normal(size=(40, 1))
            noise = common * math.sqrt(0.4) + random.normal(size=(40, 2)) * math.sqrt(0.3)
            margins = noise[patients] + random.normal(size=(len(patients), 2)) * math.sqrt(0.3)
            margins = margins + np.outer(labels[patients], [norm.ppf(value) * math.sqrt(2) for value in truth.values()])
            logits = [torch.tensor(np.stack([0 * each, each - 0.7], 1)) for each in margins.T]
            total = total + summaries.summarize(
                outputs_of("x", logits, torch.tensor(labels[patients]).long(), patients)
            )
        rows = summaries.rows(POOLED, total)
        for model, value in truth.items():
            row = row_of(rows, model, "auroc")
            hits[model] += row.low <= value <= row.high
        row = row_of(rows, "ours", "auroc", versus="vendor")
        hits["difference"] += row.low <= 0.1 <= row.high
        row = row_of(rows, "ours", "accuracy")
        shift = norm.ppf(0.85) * math.sqrt(2)
        expected = 0.6 * norm.cdf(0.7) + 0.4 * norm.cdf(shift - 0.7)
        hits["accuracy"] += row.low <= expected <= row.high
    error = 2 * math.sqrt(LEVEL * (1 - LEVEL) / federations)
    assert {name: count / federations for name, count in hits.items()} == pytest.approx(
        dict.fromkeys(hits, LEVEL), abs=error + 0.015
    )
