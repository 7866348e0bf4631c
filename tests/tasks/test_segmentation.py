# SPDX-License-Identifier: Apache-2.0
"""Losses, distillation and metrics of masks, against loops over pixels, scikit-learn, SciPy and torchmetrics."""

import math

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from sklearn.metrics import jaccard_score
from sklearn.utils.class_weight import compute_class_weight
from torchmetrics.functional.segmentation import dice_score

from perada.core.checks import OptionError
from perada.core.ranks import Ranks
from perada.scores.accumulation import Scores, Tally
from perada.scores.metrics import make_metrics
from perada.tasks import Segmentation
from perada.tasks.base import make_task

CLASSES = 4
IGNORED = 255
RANDOM = torch.Generator().manual_seed(3)
LOGITS = torch.randn(5, 6, 7, CLASSES, generator=RANDOM, dtype=torch.float64)
TEACHER = torch.randn(5, 6, 7, CLASSES, generator=RANDOM, dtype=torch.float64)
MASKS = torch.randint(0, CLASSES, (5, 6, 7), generator=RANDOM)
MASKS[torch.rand(MASKS.shape, generator=RANDOM) < 0.2] = IGNORED
MASKS[0][MASKS[0] == 2] = 1  # no image has to have each class
MASKS[4] = IGNORED
WEIGHTS = [0.5, 1.0, 2.0, 3.0]
PROBABILITIES = LOGITS.softmax(-1).numpy()


def pixels_that_count(image):
    """Probabilities and class of each."""
    for row, column in np.ndindex(*MASKS.shape[1:]):
        label = int(MASKS[image, row, column])
        if label != IGNORED:
            yield PROBABILITIES[image, row, column], label


def cross_entropy(image, weights):
    terms = [-weights[label] * math.log(p[label]) for p, label in pixels_that_count(image)]
    return sum(terms) / max(1, len(terms))


def dice_loss(image, classes, smoothing):
    scores = []
    for k in classes:
        overlap = sum(p[k] for p, label in pixels_that_count(image) if label == k)
        size = sum(p[k] + (label == k) for p, label in pixels_that_count(image))
        scores.append((2 * overlap + smoothing) / (size + smoothing))
    return 1 - sum(scores) / len(scores)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_cross_entropy_is_the_mean_over_the_pixels_that_count(weights):
    losses = Segmentation(class_weights=weights).loss(LOGITS, MASKS)
    expected = [cross_entropy(image, weights or [1.0] * CLASSES) for image in range(5)]
    assert losses.tolist() == pytest.approx(expected)
    assert losses[4] == 0


@pytest.mark.parametrize(("background", "smoothing"), [(True, 1.0), (False, 0.01)])
def test_the_dice_loss_is_that_of_one_image(background, smoothing):
    task = Segmentation("dice", include_background=background, dice_smoothing=smoothing)
    classes = range(CLASSES) if background else range(1, CLASSES)
    expected = [dice_loss(image, classes, smoothing) for image in range(5)]
    assert task.loss(LOGITS, MASKS).tolist() == pytest.approx(expected)
    for image in range(5):
        alone = task.loss(LOGITS[image : image + 1], MASKS[image : image + 1])
        assert float(alone) == pytest.approx(expected[image])


def test_both_is_the_sum_of_the_losses():
    losses = Segmentation("both", class_weights=WEIGHTS).loss(LOGITS, MASKS)
    expected = [cross_entropy(image, WEIGHTS) + dice_loss(image, range(CLASSES), 1.0) for image in range(5)]
    assert losses.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", ["cross_entropy", "dice", "both"])
def test_pixels_that_do_not_count_have_no_gradient(loss):
    logits = LOGITS.clone().requires_grad_()
    Segmentation(loss).loss(logits, MASKS.to(torch.uint8)).sum().backward()
    ignored = MASKS == IGNORED
    assert (logits.grad[ignored] == 0).all()
    assert (logits.grad[~ignored].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("stride", [1, 2])
def test_distillation_is_scipys_divergence_of_each_pixel_of_the_grid(temperature, stride):
    task = Segmentation(distill_stride=stride)
    loss = task.distillation_loss(task.distilled(LOGITS), task.distilled(TEACHER), temperature)
    grid = (slice(None), slice(None, None, stride), slice(None, None, stride))
    teacher = (TEACHER / temperature).softmax(-1).numpy()[grid]
    student = (LOGITS / temperature).softmax(-1).numpy()[grid]
    assert loss.item() == pytest.approx(rel_entr(teacher, student).sum(-1).mean() * temperature**2)


def test_an_ensemble_averages_the_probabilities_of_each_pixel():
    both = torch.stack([LOGITS, TEACHER])
    ensemble = Segmentation().ensemble(both, "probabilities").softmax(-1)
    torch.testing.assert_close(ensemble, both.softmax(-1).mean(0))


def scores_of(metrics, logits, masks, parts=((0, 2), (2, 5))):
    scores = Scores(make_metrics(metrics, Segmentation(), CLASSES), Segmentation())
    for start, stop in parts:
        scores.update(logits[None, start:stop], masks[start:stop])
    return {name: values[0, 0] for name, values in scores.all().items()}


def test_iou_is_scikit_learns_over_the_pixels_of_all_images():
    scores = scores_of(["miou", "iou_per_class", "accuracy"], LOGITS, MASKS)
    counts = MASKS != IGNORED
    predicted = LOGITS.argmax(-1)
    expected = jaccard_score(MASKS[counts], predicted[counts], average=None)
    assert scores["iou_per_class"].tolist() == pytest.approx(expected.tolist())
    assert float(scores["miou"]) == pytest.approx(expected.mean())
    assert float(scores["accuracy"]) == pytest.approx(float((MASKS == predicted)[counts].double().mean()))


def test_dice_is_that_of_torchmetrics_where_each_image_has_each_class():
    masks = torch.randint(0, CLASSES, (5, 6, 7), generator=torch.Generator().manual_seed(1))
    scores = scores_of(["dice", "dice_per_class"], LOGITS, masks)
    expected = dice_score(LOGITS.argmax(-1), masks, CLASSES, average="none", input_format="index")
    assert scores["dice_per_class"].tolist() == pytest.approx(expected.mean(0).tolist())
    assert float(scores["dice"]) == pytest.approx(float(expected.mean()))


def test_dice_of_a_class_is_the_mean_over_the_images_that_have_it():
    scores = scores_of(["dice", "dice_per_class"], LOGITS, MASKS)
    predicted = LOGITS.argmax(-1)
    expected = []
    for k in range(CLASSES):
        of_images = []
        for image in range(5):
            counts = MASKS[image] != IGNORED
            is_true = (MASKS[image] == k) & counts
            is_predicted = (predicted[image] == k) & counts
            if is_true.any():
                overlap = int((is_true & is_predicted).sum())
                of_images.append(2 * overlap / int(is_true.sum() + is_predicted.sum()))
        expected.append(sum(of_images) / len(of_images))
    assert scores["dice_per_class"].tolist() == pytest.approx(expected)
    assert float(scores["dice"]) == pytest.approx(sum(expected) / CLASSES)


def test_a_class_that_no_mask_has_gets_no_score():
    masks = MASKS.where(MASKS != 3, 0)
    scores = scores_of(["dice", "dice_per_class", "miou", "iou_per_class"], LOGITS, masks)
    for name in ("dice", "iou"):
        of_classes = scores[f"{name}_per_class"]
        assert of_classes.isnan().tolist() == [False, False, False, True]
        mean = scores["miou" if name == "iou" else name]
        assert float(mean) == pytest.approx(float(of_classes[:3].mean()))


def test_scores_of_groups_and_models_are_separate():
    metrics = make_metrics(["dice", "miou"], Segmentation(), CLASSES)
    together = Scores(metrics, Segmentation(), num_models=2, num_groups=2)
    groups = torch.tensor([0, 1, 0, 1, 1])
    together.update(torch.stack([LOGITS, TEACHER]), MASKS, groups)
    for model, logits in enumerate([LOGITS, TEACHER]):
        for group in range(2):
            rows = groups == group
            alone = Scores(metrics, Segmentation())
            alone.update(logits[None, rows], MASKS[rows])
            for name, values in alone.all().items():
                assert float(together.all()[name][model, group]) == pytest.approx(float(values))


def test_calibration_counts_pixels():
    tally = Tally(Segmentation())
    tally.update(LOGITS, MASKS, torch.zeros(5, dtype=torch.int64))
    record = tally.record(Ranks())
    counts = MASKS != IGNORED
    assert sum(record["calibration"]["count"]) == int(counts.sum())
    assert sum(record["calibration"]["right"]) == int((LOGITS.argmax(-1) == MASKS)[counts].sum())
    assert "confusion" not in record


def test_balanced_weights_are_scikit_learns_for_pixels():
    task = Segmentation(class_weights="balanced").fitted_to(MASKS, CLASSES)
    pixels = MASKS[MASKS != IGNORED].numpy()
    expected = compute_class_weight("balanced", classes=np.arange(CLASSES), y=pixels)
    assert task.class_weights == pytest.approx(tuple(expected))
    assert make_task(task.record()) == task


def test_facts_of_masks():
    task = Segmentation()
    assert task.class_counts(MASKS, CLASSES).tolist() == [
        sum(bool((mask == k).any()) for mask in MASKS) for k in range(CLASSES)
    ]
    renumbered = task.renumber(MASKS, [3, 2, 1, 0], CLASSES)
    assert torch.equal(renumbered, (3 - MASKS).where(MASKS != IGNORED, IGNORED))
    errors = task.errors(LOGITS.softmax(-1), MASKS)
    assert float(errors[1].sum()) == pytest.approx(sum(1 - p[label] for p, label in pixels_that_count(1)))
    entropies = -(LOGITS.softmax(-1) * LOGITS.log_softmax(-1)).sum(-1).mean((1, 2))
    torch.testing.assert_close(task.entropy(LOGITS.softmax(-1)), entropies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_function": "focal"}, "loss_function"),
        ({"loss_function": "dice", "class_weights": WEIGHTS}, "class_weights have no effect"),
        ({"dice_smoothing": 0.0}, "dice_smoothing"),
        ({"distill_stride": 0}, "distill_stride"),
        ({"ignore_index": 0.5}, "ignore_index"),
    ],
)
def test_options_out_of_range_are_rejected(options, message):
    with pytest.raises(OptionError, match=message):
        Segmentation(**options)


def test_options_that_do_not_fit_the_classes_are_rejected():
    with pytest.raises(OptionError, match=r"ignore_index=2 .*4 classes"):
        Segmentation(ignore_index=2).check_classes(CLASSES)
    with pytest.raises(OptionError, match="4 numbers"):
        Segmentation(class_weights=[1.0, 2.0]).check_classes(CLASSES)


@pytest.mark.parametrize("metric", ["auroc", "balanced_accuracy", "f1_macro", "ece", "MulticlassAUROC"])
def test_metrics_that_need_all_predictions_are_rejected(metric):
    with pytest.raises(OptionError, match=r"accuracy, dice, .*miou"):
        make_metrics(metric, Segmentation(), CLASSES)
