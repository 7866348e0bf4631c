# SPDX-License-Identifier: Apache-2.0
"""Metrics by name against scikit-learn, alone and in a run; what is said of many clients' scores against NumPy."""

import json
import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch.utils.data import TensorDataset

import perada
from perada.scores.accumulation import Scores
from perada.scores.metrics import make_metrics, metric_names, spread
from tests.label_kinds import task_of
from tests.options import sections

CLASSES = 4
F2 = {"MulticlassFBetaScore": {"beta": 2.0, "average": "macro", "name": "f2"}}


def task(images=80, missing=False, seed=0):
    """Probabilities and classes; with ``missing``, a class never occurs and is never predicted."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, CLASSES, generator=random)
    if missing:
        logits[:, 3] = -9.0
    return logits.double().softmax(1), torch.randint(CLASSES - missing, (images,), generator=random)


def calibration_error(truth, shares):
    """Mean over 15 bins of confidence, by their sizes, of the gap between accuracy and confidence."""
    confidence = shares.max(1)
    right = shares.argmax(1) == truth
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean() for b in np.unique(bins)]
    return sum(gaps)


def by_class(score):
    return lambda truth, shares: score(truth, shares.argmax(1))


EXPECTED = {
    "accuracy": by_class(sklearn.metrics.accuracy_score),
    "balanced_accuracy": by_class(sklearn.metrics.balanced_accuracy_score),
    "f1_macro": by_class(lambda y, p: sklearn.metrics.f1_score(y, p, average="macro")),
    "f1_weighted": by_class(lambda y, p: sklearn.metrics.f1_score(y, p, average="weighted")),
    "precision_macro": by_class(lambda y, p: sklearn.metrics.precision_score(y, p, average="macro")),
    "recall_macro": by_class(lambda y, p: sklearn.metrics.recall_score(y, p, average="macro")),
    "mcc": by_class(sklearn.metrics.matthews_corrcoef),
    "kappa": by_class(sklearn.metrics.cohen_kappa_score),
    "ece": calibration_error,
    "f2": by_class(lambda y, p: sklearn.metrics.fbeta_score(y, p, beta=2, average="macro")),
    "MulticlassJaccardIndex": by_class(lambda y, p: sklearn.metrics.jaccard_score(y, p, average="macro")),
}


def precision_of_those_that_occur(truth, shares):
    """Mean over the classes that some image has."""
    return np.mean([sklearn.metrics.average_precision_score(truth == k, shares[:, k]) for k in np.unique(truth)])


EXPECTED["average_precision"] = precision_of_those_that_occur
CHOICE = [F2 if name == "f2" else name for name in EXPECTED]


def score_in_batches(choice, shares, labels, multilabel=False):
    """In batches, by a single model that gives these probabilities."""
    scores = Scores(make_metrics(choice, task_of(multilabel), CLASSES), task_of(multilabel))
    logits = shares.logit() if multilabel else shares.log()
    for rows in torch.arange(len(labels)).split(33):
        scores.update(logits[None, rows], labels[rows])
    return {name: results[0, 0] for name, results in scores.all().items()}


@pytest.mark.parametrize("missing", [False, True])
def test_metrics_equal_scikit_learns(missing):
    shares, labels = task(missing=missing)
    actual = score_in_batches(CHOICE, shares, labels)
    expected = {name: score(labels.numpy(), shares.numpy()) for name, score in EXPECTED.items()}
    assert {name: float(value) for name, value in actual.items()} == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected.values()}) > 6  # they are told apart


def test_a_class_that_is_predicted_and_does_not_occur():
    """Balanced accuracy is over the classes that occur."""
    shares = torch.tensor([[0.9, 0.1, 0, 0], [0.1, 0, 0, 0.9], [0.2, 0.8, 0, 0]]).double().clamp(min=1e-9)
    assert float(score_in_batches(["balanced_accuracy"], shares, torch.tensor([0, 0, 1]))["balanced_accuracy"]) == 0.75


@pytest.mark.parametrize(
    ("name", "score"), [("f1", "f1_score"), ("precision", "precision_score"), ("recall", "recall_score")]
)
def test_per_class(name, score):
    shares, labels = task(missing=True)
    actual = score_in_batches([f"{name}_per_class"], shares, labels)[f"{name}_per_class"]
    expected = getattr(sklearn.metrics, score)(labels.numpy(), shares.argmax(1).numpy(), average=None)
    assert actual[:3].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert actual[3].isnan()


def test_several_labels_an_image():
    random = torch.Generator().manual_seed(0)
    shares = torch.rand(80, CLASSES, generator=random)
    labels = torch.randint(0, 2, (80, CLASSES), generator=random)
    result = score_in_batches(
        ["auroc", "f1_macro", "average_precision"], shares.double(), labels.float(), multilabel=True
    )
    truth = labels.numpy()
    shares = shares.numpy()
    assert {name: float(value) for name, value in result.items()} == pytest.approx(
        {
            "auroc": sklearn.metrics.roc_auc_score(truth, shares, average="macro"),
            "f1_macro": sklearn.metrics.f1_score(truth, shares > 0.5, average="macro"),
            "average_precision": sklearn.metrics.average_precision_score(truth, shares, average="macro"),
        },
        abs=1e-6,
    )


def test_labels_that_no_image_has_do_not_count():
    shares = torch.tensor([[0.9, 0.3, 0.4, 0.5], [0.2, 0.6, 0.4, 0.1], [0.8, 0.1, 0.2, 0.7]]).double()
    labels = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    result = score_in_batches(["average_precision"], shares, labels, multilabel=True)["average_precision"]
    precisions = [sklearn.metrics.average_precision_score(labels[:, k].numpy(), shares[:, k].numpy()) for k in (0, 1)]
    assert float(result) == pytest.approx(np.mean(precisions))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("f1_makro", r"metric='f1_makro' is unknown: did you mean f1_macro"),
        ("BinaryAccuracy", r"metric='BinaryAccuracy' is unknown"),
        ([], r"metric .*got \[\]"),
        (["ece", "ece"], "metric contains 'ece' twice"),
        (["accuracy", "auto"], "metric='auto' cannot be part"),
        ([{"f1_macro": {"top_k": 2}}], "'f1_macro' takes no options"),
        ([{"MulticlassF1Score": 2}], r"'MulticlassF1Score'.*2"),
        ([{"MulticlassF1Score": {"name": "std"}}], "the name 'std'"),
        ([{"MulticlassF1Score": {"name": "a/b"}}], "metric: the name 'a/b' is invalid"),
        (3, r"metric .*got 3"),
        (None, r"metric .*got None"),
    ],
)
def test_unknown_metrics_are_rejected_at_once(choice, message):
    with pytest.raises(ValueError, match=message) as caught:
        perada.Evaluation(metric=choice)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "multilabel", "message"),
    [
        ("ece", True, "metric='ece' does not support"),
        ("balanced_accuracy", True, "requires one class per image"),
        ("MultilabelF1Score", False, "metric='MultilabelF1Score' does not support"),
        ([{"MulticlassF1Score": {"averages": 1}}], False, "metric 'MulticlassF1Score' fails: .*averages"),
        ("MulticlassConfusionMatrix", False, "neither a number nor one per class"),
    ],
)
def test_metrics_that_the_data_do_not_allow(choice, multilabel, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_metrics(choice, task_of(multilabel), CLASSES)
    assert "\n" not in str(caught.value)


def test_the_badly_off():
    values = torch.tensor([0.9, math.nan, 0.2, 0.6, 0.7])
    sizes = torch.tensor([10, 0, 30, 20, 40])
    known = np.array([0.9, 0.2, 0.6, 0.7])
    weights = np.array([10, 30, 20, 40])
    expected = {
        "x": known.mean(),
        "x_std": known.std(),
        "x_worst": 0.2,
        "x_p10": np.percentile(known, 10),
        "x_weighted": np.average(known, weights=weights),
    }
    assert spread("x", values, sizes=sizes) == pytest.approx(expected)
    errors = spread("x", values, lower_is_better=True)
    assert errors["x_worst"] == pytest.approx(0.9)
    assert errors["x_p10"] == pytest.approx(np.percentile(known, 90))
    assert "x_weighted" not in errors
    assert all(value != value for value in spread("x", torch.full((2,), math.nan), sizes=torch.zeros(2)).values())


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["ditto", "fedavg"])
def test_several_metrics_in_one_run(tiny, tmp_path, algorithm):
    """Every score again from the finished models; accuracy as in a run that has it alone."""
    choice = ["accuracy", "f1_macro", "recall_per_class", F2]
    data = tiny.data()
    data.test = [TensorDataset(*(t[:n] for t in p.tensors)) for p, n in zip(data.train, (3, 0, 9, 5, 8), strict=True)]

    def fit(metric):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        return perada.finetune(
            tiny.net(),
            data,
            **sections(adapter="full", algorithm=algorithm, rounds=1, lr_local=0.5, metric=metric, **quiet),
        )

    run = fit(choice)
    alone = fit("accuracy")
    last = run.metrics["rounds"][-1]
    clients = run.metrics["clients"]
    for name, value in alone.metrics["rounds"][-1].items():
        assert last[name] == pytest.approx(value)
    tests = [part.tensors for part in data.test]
    everyone = tuple(torch.cat(parts) for parts in zip(*tests, strict=True))
    for client, test_set in enumerate(tests):
        model = run.personal(client)
        for place, (x, y) in {"local_test": test_set, "global_test": everyone}.items():
            with torch.no_grad():
                predicted = model(x).argmax(1)
            for name, expected in (
                ("f1_macro", lambda y, p: sklearn.metrics.f1_score(y, p, average="macro")),
                ("f2", lambda y, p: sklearn.metrics.fbeta_score(y, p, beta=2, average="macro", zero_division=0)),
            ):
                actual = clients[f"personal/{place}_{name}"][client]
                assert actual == pytest.approx(expected(y, predicted) if len(y) else math.nan, nan_ok=True, abs=1e-6)
    recalls = np.array(run.metrics["per_class"]["personal/local_test_recall_per_class"])
    assert recalls.shape == (5, 3)
    assert clients["personal/local_test_recall_per_class"] == pytest.approx(
        [np.nan if np.isnan(row).all() else np.nanmean(row) for row in recalls], nan_ok=True, abs=1e-6
    )
    known = np.array([score for score in clients["personal/local_test"] if score == score])
    assert last["personal/local_test_worst"] == pytest.approx(known.min())
    assert last["personal/local_test_weighted"] == pytest.approx(np.average(known, weights=[3, 9, 5, 8]), abs=1e-6)
    assert last["global/global_test_f1_macro"] != last["global/global_test"]
    run.save(tmp_path / "run")
    saved = json.loads((tmp_path / "run" / "run.json").read_text())["metrics"]["per_class"]
    assert len(saved["personal/local_test_recall_per_class"]) == 5


def test_names():
    assert metric_names(CHOICE) == list(EXPECTED)
