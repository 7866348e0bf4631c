# SPDX-License-Identifier: Apache-2.0
"""Scores against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

from perada.evaluation import Scores

MODELS, IMAGES, CLASSES = 3, 60, 4


def task(multilabel):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(MODELS, IMAGES, CLASSES, generator=random)
    if multilabel:
        y = torch.randint(0, 2, (IMAGES, CLASSES), generator=random).float()
    else:
        y = torch.randint(0, CLASSES, (IMAGES,), generator=random)
    owner = torch.randint(0, MODELS, (IMAGES,), generator=random)
    return logits, y, owner


def collected(metric, logits, y, owner):
    """In batches of unequal sizes, as evaluation adds them."""
    scores = Scores(metric, y.dim() == 2)
    assert not scores
    for rows in torch.arange(len(y)).split(25):
        scores.update(logits[:, rows], y[rows], owner[rows])
    assert scores
    return scores


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
    scores = collected(metric, logits, y, owner)
    expected = [reference(metric, model, y) for model in logits]
    assert scores.global_test().tolist() == pytest.approx(expected, abs=1e-6)
    local = [reference(metric, logits[m, owner == m], y[owner == m]) for m in range(MODELS)]
    assert scores.local_test(MODELS).tolist() == pytest.approx(local, abs=1e-6)
    assert len(set(expected + local)) == 2 * MODELS


def test_one_model_serves_all_clients():
    logits, y, owner = task(False)
    scores = collected("accuracy", logits[:1], y, owner)
    local = [accuracy_score(y[owner == m], logits[0, owner == m].argmax(1)) for m in range(MODELS)]
    assert scores.local_test(MODELS).tolist() == pytest.approx(local)
    assert scores.global_test().shape == (1,)


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_a_client_without_test_images_has_no_score(metric):
    logits, y, owner = task(False)
    owner[owner == 1] = 0
    local = collected(metric, logits, y, owner).local_test(MODELS)
    assert local.isnan().tolist() == [False, True, False]


def test_auroc_is_the_mean_over_the_classes_that_occur_both_ways():
    logits, y, owner = task(True)
    y[:, 1], y[:, 3] = 0, 1
    expected = np.mean([roc_auc_score(y[:, k], logits[0, :, k].sigmoid()) for k in (0, 2)])
    assert collected("auroc", logits[:1], y, owner).global_test().tolist() == pytest.approx([expected], abs=1e-6)
    y[:] = 1
    assert collected("auroc", logits[:1], y, owner).global_test().isnan().all()


def test_auroc_ranks_confident_predictions():
    """Logits far beyond where a sigmoid in single precision reaches 1 are still told apart."""
    logits, y, owner = task(True)
    expected = roc_auc_score(y, logits[0].numpy(), average="macro")
    confident = collected("auroc", logits[:1] + 20, y, owner)
    assert confident.global_test().tolist() == pytest.approx([expected], abs=1e-6)
