# SPDX-License-Identifier: Apache-2.0
"""Each task against plain formulas, scikit-learn and scipy; records; and what the rest of perada asks of a task."""

import json
from dataclasses import dataclass

import pytest
import torch
from scipy.special import rel_entr
from scipy.stats import entropy
from sklearn.metrics import log_loss

from perada.tasks import Classification, MultiLabel, Task, task_of_labels
from perada.tasks.base import make_task

CLASSES = 4
RANDOM = torch.Generator().manual_seed(3)
LOGITS = torch.randn(6, CLASSES, generator=RANDOM, dtype=torch.float64)
TEACHER = torch.randn(6, CLASSES, generator=RANDOM, dtype=torch.float64)
CLASS_OF_IMAGE = torch.tensor([0, 3, 1, 1, 2, 0])
LABELS = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]]).double()


def test_the_loss_of_classes_is_scikit_learns():
    losses = Classification().loss(LOGITS, CLASS_OF_IMAGE)
    for row, label, loss in zip(LOGITS.softmax(-1), CLASS_OF_IMAGE, losses, strict=True):
        expected = log_loss([label.item()], [row.numpy()], labels=range(CLASSES))
        assert loss.item() == pytest.approx(expected)


def test_the_loss_of_labels_is_the_mean_of_scikit_learns():
    losses = MultiLabel().loss(LOGITS, LABELS)
    for row, labels, loss in zip(LOGITS.sigmoid(), LABELS, losses, strict=True):
        expected = [log_loss([label.item()], [p.item()], labels=[0, 1]) for p, label in zip(row, labels, strict=True)]
        assert loss.item() == pytest.approx(sum(expected) / CLASSES)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_is_scipys_divergence(temperature):
    teacher = (TEACHER / temperature).softmax(-1).numpy()
    student = (LOGITS / temperature).softmax(-1).numpy()
    expected = rel_entr(teacher, student).sum(-1).mean() * temperature**2
    assert Classification().distillation_loss(LOGITS, TEACHER, temperature).item() == pytest.approx(expected)

    teacher = (TEACHER / temperature).sigmoid().numpy()
    student = (LOGITS / temperature).sigmoid().numpy()
    divergences = rel_entr(teacher, student) + rel_entr(1 - teacher, 1 - student)
    expected = divergences.mean() * temperature**2
    assert MultiLabel().distillation_loss(LOGITS, TEACHER, temperature).item() == pytest.approx(expected)


def test_entropies_are_scipys():
    probabilities = LOGITS.softmax(-1)
    actual = Classification().entropy(probabilities)
    torch.testing.assert_close(actual, torch.as_tensor(entropy(probabilities.numpy(), axis=-1)))
    probabilities = LOGITS.sigmoid()
    pairs = torch.stack([probabilities, 1 - probabilities])
    expected = torch.as_tensor(entropy(pairs.numpy(), axis=0)).mean(-1)
    torch.testing.assert_close(MultiLabel().entropy(probabilities), expected)


def test_predictions_and_their_confidence():
    assert Classification().predicted(LOGITS).tolist() == [max(range(CLASSES), key=row.__getitem__) for row in LOGITS]
    highest = [max(row.tolist()) for row in LOGITS.softmax(-1)]
    assert Classification().confidence(LOGITS).tolist() == pytest.approx(highest)
    assert MultiLabel().predicted(LOGITS).tolist() == [[int(value > 0) for value in row] for row in LOGITS]
    likelier = [[max(p, 1 - p) for p in row.tolist()] for row in LOGITS.sigmoid()]
    torch.testing.assert_close(MultiLabel().confidence(LOGITS), torch.tensor(likelier, dtype=torch.float64))


def test_errors_are_one_minus_the_probability_of_the_target():
    probabilities = LOGITS.softmax(-1)
    expected = [1 - probabilities[row, label].item() for row, label in enumerate(CLASS_OF_IMAGE)]
    assert Classification().errors(probabilities, CLASS_OF_IMAGE).tolist() == pytest.approx(expected)
    probabilities = LOGITS.sigmoid()
    of_present = LABELS * probabilities + (1 - LABELS) * (1 - probabilities)
    torch.testing.assert_close(MultiLabel().errors(probabilities, LABELS), 1 - of_present)


def test_targets_are_counted_and_shown_as_indicators():
    counts = [CLASS_OF_IMAGE.tolist().count(label) for label in range(CLASSES)]
    assert Classification().class_counts(CLASS_OF_IMAGE, CLASSES).tolist() == counts
    assert Classification().presence(CLASS_OF_IMAGE, CLASSES).sum(0).tolist() == counts
    assert MultiLabel().class_counts(LABELS, CLASSES).tolist() == [sum(column.tolist()) for column in LABELS.T]
    assert torch.equal(MultiLabel().presence(LABELS, CLASSES), LABELS)


@pytest.mark.parametrize(("task", "targets"), [(Classification(), CLASS_OF_IMAGE), (MultiLabel(), LABELS)], ids=repr)
def test_targets_of_its_own_kind_fit(task, targets):
    assert task_of_labels(targets) == task
    assert task.fits(targets, CLASSES)
    assert task.count_classes(targets) == CLASSES
    assert targets.max() <= task.largest_label(CLASSES)
    other = MultiLabel() if task == Classification() else Classification()
    assert not other.fits(targets, CLASSES)
    blank = task.blank_targets((6,), CLASSES, torch.device("cpu"))
    assert blank.shape == targets.shape and task.fits(blank, CLASSES)
    assert task.loss(LOGITS, blank).shape == (6,)


def test_a_client_that_knows_some_classes_is_renumbered():
    assert Classification().renumber(torch.tensor([0, 1, 1]), [2, 0], 3).tolist() == [2, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_labels_that_the_data_of_a_client_lack_are_unknown(dtype):
    labels = torch.tensor([[1, 0], [1, 1]], dtype=dtype)
    renumbered = MultiLabel().renumber(labels, [2, 0], 3)
    assert renumbered.tolist() == [[0, -1, 1], [1, -1, 1]]
    logits = torch.randn(2, 3)
    losses_of_its_labels = MultiLabel().loss(logits[:, [2, 0]], labels)
    assert torch.equal(MultiLabel().loss(logits, renumbered), losses_of_its_labels)


@pytest.mark.parametrize("task", [Classification(), MultiLabel()], ids=repr)
def test_a_record_makes_the_same_task(task):
    assert make_task(json.loads(json.dumps(task.record()))) == task


def test_options_that_a_task_does_not_have_are_an_error_that_names_them():
    record = Classification().record() | {"init_args": {"sharpness": 2}}
    with pytest.raises(ValueError, match=r"'Classification'.*sharpness"):
        make_task(record)


def test_a_task_of_ones_own_is_made_once_it_is_defined():
    record = {"class_path": "Doubled", "init_args": {"factor": 3.0}}
    with pytest.raises(ValueError, match="'Doubled' is not defined"):
        make_task(record)

    @dataclass(frozen=True)
    class Doubled(Classification):
        factor: float = 2.0

        def loss(self, logits, targets):
            return self.factor * super().loss(logits, targets)

    task = make_task(record)
    assert isinstance(task, Task)
    torch.testing.assert_close(task.loss(LOGITS, CLASS_OF_IMAGE), 3 * Classification().loss(LOGITS, CLASS_OF_IMAGE))
