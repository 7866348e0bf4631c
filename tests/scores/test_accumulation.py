# SPDX-License-Identifier: Apache-2.0
"""Scores against scikit-learn and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, roc_auc_score
from torchmetrics.functional.classification import multiclass_accuracy, multilabel_accuracy

from perada.core.ranks import Ranks
from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics
from perada.tasks import Classification, MultiLabel, Regression, Segmentation, task_of_labels
from tests.label_kinds import task_of

MODELS = 3
IMAGES = 60
CLASSES = 4


def task(multilabel):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(MODELS, IMAGES, CLASSES, generator=random)
    if multilabel:
        y = torch.randint(0, 2, (IMAGES, CLASSES), generator=random).float()
    else:
        y = torch.randint(0, CLASSES, (IMAGES,), generator=random)
    owner = torch.randint(0, MODELS, (IMAGES,), generator=random)
    return logits, y, owner


def collect_scores(metric, logits, y, owner, local=False):
    """All models on all images, or the first on those of each owner; in batches of unequal sizes."""
    models, groups = (1, MODELS) if local else (len(logits), 1)
    scores = Scores(make_metrics(metric, task_of_labels(y), CLASSES), task_of_labels(y), models, groups)
    assert not scores
    for rows in torch.arange(len(y)).split(25):
        scores.update(logits[:models, rows], y[rows], owner[rows] if local else None)
    assert scores
    (result,) = scores.means().values()
    assert result.shape == (models, groups)
    return result.flatten()


def owners_logits(logits, owner):
    """Logits (1, B, K) of each image by the model of its owner."""
    return logits[owner, torch.arange(len(owner))].unsqueeze(0)


def reference(metric, logits, y):
    y = y.numpy()
    if metric == "accuracy":
        return (
            accuracy_score(y.flatten(), (logits > 0).flatten()) if y.ndim == 2 else accuracy_score(y, logits.argmax(1))
        )
    truth = y if y.ndim == 2 else np.eye(CLASSES)[y]
    probabilities = logits.sigmoid() if y.ndim == 2 else logits.softmax(1)
    return roc_auc_score(truth, probabilities.numpy(), average="macro")


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_scores_equal_scikit_learns(metric, multilabel):
    logits, y, owner = task(multilabel)
    expected = [reference(metric, model, y) for model in logits]
    assert collect_scores(metric, logits, y, owner).tolist() == pytest.approx(expected, abs=1e-6)
    local = [reference(metric, logits[m, owner == m], y[owner == m]) for m in range(MODELS)]
    actual = collect_scores(metric, owners_logits(logits, owner), y, owner, local=True)
    assert actual.tolist() == pytest.approx(local, abs=1e-6)
    assert len(set(expected + local)) == 2 * MODELS


@pytest.mark.parametrize("multilabel", [False, True])
def test_accuracy_is_torchmetrics_to_the_last_digit(multilabel):
    logits, y, owner = task(multilabel)
    single = {"num_labels": CLASSES} if multilabel else {"num_classes": CLASSES}
    accuracy = multilabel_accuracy if multilabel else multiclass_accuracy

    def scored(model, rows):
        predicted = model[rows].sigmoid() if multilabel else model[rows].argmax(-1)
        return accuracy(predicted, y[rows].long(), **single, average="micro")

    everywhere = [scored(model, slice(None)) for model in logits]
    assert torch.equal(collect_scores("accuracy", logits, y, owner), torch.stack(everywhere))
    own = torch.stack([scored(logits[m], owner == m) for m in range(MODELS)])
    assert torch.equal(collect_scores("accuracy", owners_logits(logits, owner), y, owner, local=True), own)


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_a_group_without_images_has_no_score(metric):
    logits, y, owner = task(False)
    owner[owner == 1] = 0
    assert collect_scores(metric, logits, y, owner, local=True).isnan().tolist() == [False, True, False]


class Together(Ranks):
    """One of two processes, each of which counted for itself."""

    def __init__(self, other):
        self.other = other

    def sum_(self, tensors):
        for tensor, others in zip(tensors, (self.other._accuracy.counts, self.other._failed_images), strict=True):
            tensor.add_(others)

    def gather(self, value):
        return [value, self.other._predictions._batches]


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_what_two_processes_count_adds_up(metric, multilabel):
    """Each runs some models on all images, or all models on some images, or counts some of the images only."""
    logits, y, owner = task(multilabel)
    counts = collect_scores(metric, logits, y, owner)
    whole_local = collect_scores(metric, owners_logits(logits, owner), y, owner, local=True)

    def merged(add, **options):
        parts = [
            Scores(make_metrics(metric, task_of(multilabel), CLASSES), task_of(multilabel), **options) for _ in range(2)
        ]
        for rank, scores in enumerate(parts):
            add(scores, rank)
        parts[0].merge(Together(parts[1]))
        (result,) = parts[0].means().values()
        return result.flatten()

    def some_models(scores, rank):
        models = [0, 2] if rank == 0 else [1]
        for rows in torch.arange(IMAGES).split(25):
            scores.update(logits[models][:, rows], y[rows], models=models)

    def some_batches(scores, rank):
        for rows in torch.arange(IMAGES).split(10)[rank::2]:
            scores.update(logits[:, rows], y[rows])

    def some_images(scores, rank):
        counted = owner != 1 if rank == 0 else owner == 1
        scores.update(owners_logits(logits, owner), y, owner, counted=counted)

    assert torch.equal(merged(some_models, num_models=MODELS), counts)
    assert torch.equal(merged(some_batches, num_models=MODELS), counts)
    assert torch.equal(merged(some_images, num_groups=MODELS), whole_local)


def test_auroc_is_the_mean_over_the_classes_that_occur_both_ways():
    logits, y, owner = task(True)
    y[:, 1], y[:, 3] = 0, 1
    expected = np.mean([roc_auc_score(y[:, k], logits[0, :, k].sigmoid()) for k in (0, 2)])
    assert collect_scores("auroc", logits[:1], y, owner).tolist() == pytest.approx([expected], abs=1e-6)
    y[:] = 1
    assert collect_scores("auroc", logits[:1], y, owner).isnan().all()


def test_auroc_ranks_confident_predictions():
    """Logits far beyond where a sigmoid in single precision reaches 1 are still told apart."""
    logits, y, owner = task(True)
    expected = roc_auc_score(y, logits[0].numpy(), average="macro")
    confident = collect_scores("auroc", logits[:1] + 20, y, owner)
    assert confident.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_only_the_images_that_count_are_scored(metric, multilabel):
    logits, y, owner = task(multilabel)
    counted = owner != 1
    scores = Scores(make_metrics(metric, task_of(multilabel), CLASSES), task_of(multilabel), num_models=1)
    scores.update(logits[:1], y, models=[0], counted=counted)
    (result,) = scores.means().values()
    assert result.item() == pytest.approx(reference(metric, logits[0, counted], y[counted]), abs=1e-6)
    assert result.item() != pytest.approx(reference(metric, logits[0], y), abs=1e-3)


def test_a_label_as_likely_as_not_is_not_predicted_as_in_torchmetrics():
    logits, y, _ = task(multilabel=True)
    logits = logits.round()  # many are 0
    scores = Scores(make_metrics("accuracy", MultiLabel(), CLASSES), MultiLabel(), num_models=MODELS)
    scores.update(logits, y)
    (actual,) = scores.means().values()
    expected = [multilabel_accuracy(model.sigmoid(), y, num_labels=CLASSES, average="micro") for model in logits]
    assert actual.flatten().tolist() == pytest.approx([float(value) for value in expected], abs=1e-6)


def test_scores_are_in_the_order_of_the_metrics():
    """Whatever they are computed from: names of scores on shifted sets have no suffix for the first metric."""
    names = ["auroc", "accuracy"]
    logits, y, _ = task(multilabel=False)
    scores = Scores(make_metrics(names, task_of(False), CLASSES), task_of(False), num_models=MODELS)
    scores.update(logits, y)
    assert list(scores.means()) == names


def test_unknown_labels_are_left_out_of_all_scores():
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(40, CLASSES, generator=random, dtype=torch.float64)
    y = torch.randint(0, 2, (40, CLASSES), generator=random).float()
    y[torch.rand(40, CLASSES, generator=random) < 0.2] = torch.nan
    y[torch.rand(40, CLASSES, generator=random) < 0.2] = -1
    scores = Scores(
        make_metrics(["accuracy", "auroc", "average_precision", "f1_macro"], MultiLabel(), CLASSES), MultiLabel()
    )
    scores.update(logits.unsqueeze(0), y)
    actual = {name: float(value) for name, value in scores.means().items()}

    right = []
    expected = {"auroc": [], "average_precision": [], "f1_macro": []}
    for k in range(CLASSES):
        rows = (y[:, k] == 0) | (y[:, k] == 1)
        truth = y[rows, k].numpy()
        values = logits[rows, k].numpy()
        right += ((values > 0) == (truth == 1)).tolist()
        expected["auroc"].append(roc_auc_score(truth, values))
        expected["average_precision"].append(average_precision_score(truth, values))
        expected["f1_macro"].append(f1_score(truth, values > 0))
    assert actual["accuracy"] == pytest.approx(sum(right) / len(right))
    for name, values in expected.items():
        assert actual[name] == pytest.approx(sum(values) / CLASSES), name


METRICS_BY_TASK = {
    "classes": (Classification(), ["accuracy", "auroc", "ece", "f1_per_class", "balanced_accuracy"]),
    "labels": (MultiLabel(), ["accuracy", "auroc", "f1_macro"]),
    "masks": (Segmentation(), ["accuracy", "dice", "miou", "dice_per_class"]),
    "numbers": (Regression(), ["mae", "rmse", "r2", "pearson", "mse_per_target"]),
}


@pytest.mark.parametrize("kind", METRICS_BY_TASK)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_with_outputs_that_are_not_finite_has_no_score(kind, value):
    """Nor a score of the other images. Groups and models without such outputs have theirs, and a group without any
    image has none, but has not failed."""
    task, names = METRICS_BY_TASK[kind]
    random = torch.Generator().manual_seed(0)
    pixels = (4, 4) if kind == "masks" else ()
    logits = torch.randn(2, 30, *pixels, 3, generator=random)
    y = (torch.arange(30) // 3 % 3).view(-1, *[1] * len(pixels)).expand(-1, *pixels)
    if kind in ("labels", "numbers"):
        y = torch.randint(0, 2, (30, 3), generator=random).float()
    groups = torch.arange(30) % 3
    whole = Scores(make_metrics(names, task, 3), task, num_models=2, num_groups=4)
    whole.update(logits, y, groups)
    assert not whole.failed_images.any()
    # A single output of model 1 for an image of group 2, in the first of two batches.
    logits[(1, 2, *[0] * len(pixels), 0)] = value
    scores = Scores(make_metrics(names, task, 3), task, num_models=2, num_groups=4)
    for rows in torch.arange(30).split(20):
        scores.update(logits[:, rows], y[rows], groups[rows])
    expected_failures = torch.zeros(2, 4, dtype=torch.int64)
    expected_failures[1, 2] = 1
    assert torch.equal(scores.failed_images, expected_failures)
    results = scores.all()
    for name, before in whole.all().items():
        assert before[:, :3].isfinite().all()
        expected = before.clone()
        expected[1, 2] = math.nan
        torch.testing.assert_close(results[name], expected, equal_nan=True, rtol=1e-6, atol=1e-7)
    assert all(means[1, 2].isnan() for means in scores.means().values())


def test_outputs_of_images_that_do_not_count_may_be_anything():
    """Another process has the model of their owner."""
    logits = torch.tensor([[[1.0], [math.nan], [3.0]]])
    scores = Scores(make_metrics(["mae", "r2"], Regression(), 1), Regression())
    scores.update(logits, torch.tensor([1.0, 5.0, 4.0]), counted=torch.tensor([True, False, True]))
    assert not scores.failed_images.any()
    results = scores.all()
    assert results["mae"].item() == pytest.approx(0.5)
    assert results["r2"].item() == pytest.approx(1 - 1 / 4.5)
