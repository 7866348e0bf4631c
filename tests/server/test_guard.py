# SPDX-License-Identifier: Apache-2.0
"""The guard of the distillation: whether a round is distilled follows from predictions on public images."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.core.states import get_state, parameter_keys, stack
from perada.engine import Engine
from perada.server import Distillation, Distiller, SecureSums
from perada.server.distill import ensemble_looks_better, predicted_class_entropy
from tests.options import sections
from tests.rejections import rejects

CLASSES = 3
IMAGES = 12


def test_entropy_is_that_of_the_histogram_of_predictions():
    classes = [0, 0, 0, 0, 2, 2, 1, 0]
    logits = nn.functional.one_hot(torch.tensor(classes), CLASSES).float()
    shares = [classes.count(c) / len(classes) for c in set(classes)]
    assert predicted_class_entropy(logits) == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert predicted_class_entropy(logits.flip(0) * 7 - 3) == predicted_class_entropy(logits)


def predicting(counts):
    """Logits by which so many images are of each class."""
    return nn.functional.one_hot(torch.repeat_interleave(torch.tensor(counts)), CLASSES).float()


@pytest.mark.parametrize(
    ("average", "ensemble", "better"),
    [
        ([60, 30, 10], [50, 30, 20], True),
        ([60, 30, 10], [59, 30, 11], False),  # by one image: 0.013 nats
        ([50, 30, 20], [60, 30, 10], False),
        ([34, 33, 33], [34, 33, 33], False),
        ([100, 0, 0], [50, 25, 25], False),  # they agree on half of the images
        ([100, 0, 0], [51, 25, 24], True),
    ],
)
def test_the_ensemble_must_agree_on_most_images_and_be_more_even_by_more_than_an_image(average, ensemble, better):
    assert ensemble_looks_better(predicting(average), predicting(ensemble)) == better


class Public:
    """Public images, each a unit vector of its class, and a count of how often they are read."""

    def __init__(self):
        self.classes, self.read = torch.arange(IMAGES) % CLASSES, 0

    def public_indices(self, round, steps, batch_size):
        return torch.stack([torch.arange(IMAGES).roll(step) for step in range(steps)])

    def public_images(self, indices, device):
        self.read += len(indices)
        return nn.functional.one_hot(self.classes[indices], CLASSES).double()


def model(favoured=None, strength=5.0):
    """A linear model that is right on all images, or predicts the ``favoured`` class too often."""
    layer = nn.Linear(CLASSES, CLASSES).double()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(CLASSES))
        layer.bias.zero_()
        if favoured is not None:
            layer.bias[favoured] = strength
    return layer


def confused():
    """A linear model that takes the images of class 1, by a little, for those of class 0, and is right otherwise."""
    layer = model()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.55, -0.5, 0.0]))
    return layer


def distil(student, teachers, guard, **options):
    public = Public()
    arguments = {"lr": 0.5, "optimizer": "sgd", "schedule": "constant"} | options
    distiller = Distiller(Engine(model()), Distillation(4, guard=guard, **arguments), parameter_keys(student), public)
    refined = distiller(get_state(student), stack([get_state(teacher) for teacher in teachers]))
    return refined, distiller, public


def test_teachers_that_predict_fewer_classes_than_the_average_are_not_followed():
    student = model()
    teachers = [model(0), model(0, 4.0)]
    refined, distiller, public = distil(student, teachers, "predictions")
    assert all(torch.equal(value, get_state(student)[key]) for key, value in refined.items())
    assert distiller.report.metrics == {"server/distilled": 0.0}
    assert public.read == 2 * IMAGES  # by the teachers and by the average: no step was taken
    unguarded, _, _ = distil(student, teachers, None)
    assert not torch.equal(unguarded["bias"], refined["bias"])


def test_teachers_that_agree_with_the_average_on_each_image_change_nothing():
    student = model()
    teachers = [model(1, 0.2), model(2, 0.2)]
    refined, distiller, _ = distil(student, teachers, "predictions")
    assert torch.equal(refined["bias"], get_state(student)["bias"])
    assert distiller.report.metrics["server/distilled"] == 0


def test_teachers_that_predict_more_evenly_are_followed_as_without_a_guard():
    student = confused()
    teachers = [model(), model(1, 0.3)]
    refined, distiller, _ = distil(student, teachers, "predictions")
    expected, plain, _ = distil(student, teachers, None)
    assert all(torch.equal(value, expected[key]) for key, value in refined.items())
    assert distiller.report.metrics == {"server/distilled": 1.0}
    assert plain.report.metrics == {}


def test_teachers_that_disagree_with_the_average_on_most_images_are_not_followed():
    """On images of another kind than the clients' nothing follows from the predicted classes."""
    shuffled = model()
    with torch.no_grad():
        shuffled.weight.copy_(torch.eye(CLASSES).roll(1, 0))
        shuffled.bias[0] = 0.1
    student = confused()
    refined, distiller, _ = distil(student, [shuffled, shuffled], "predictions")
    x = Public().public_images(torch.arange(IMAGES), "cpu")
    assert predicted_class_entropy(shuffled(x)) > predicted_class_entropy(student(x))
    assert (shuffled(x).argmax(1) == student(x).argmax(1)).double().mean() <= 0.5
    assert torch.equal(refined["weight"], get_state(student)["weight"])
    assert distiller.report.metrics["server/distilled"] == 0


@pytest.mark.parametrize(("weight", "diverged"), [(0.0, False), (math.nan, True)])
def test_a_student_that_ends_less_even_than_the_average_is_dropped(weight, diverged):
    """One that ends in predicting a single class, or is not finite."""
    student = confused()
    teachers = [model(), model(1, 0.3)]
    distiller = Distiller(Engine(model()), Distillation(4, guard="predictions"), parameter_keys(student), Public())
    ended = get_state(model(0)) | {"weight": torch.full((CLASSES, CLASSES), weight).double()}
    distiller.train = lambda *_, **__: ended
    refined = distiller(get_state(student), stack([get_state(teacher) for teacher in teachers]))
    assert all(torch.equal(value, get_state(student)[key]) for key, value in refined.items())
    assert distiller.report.diverged == diverged
    assert distiller.report.metrics == {"server/distilled": 0.0}


def task(multilabel=False):
    random = torch.Generator().manual_seed(0)

    def part(n):
        x = torch.randn(n, 4, generator=random, dtype=torch.float64)
        if multilabel:
            return TensorDataset(x, torch.randint(0, 2, (n, CLASSES), generator=random).float())
        return TensorDataset(x, (torch.arange(n) % 2 + n) % CLASSES)

    public = TensorDataset(torch.randn(60, 4, generator=random, dtype=torch.float64))
    return perada.FederatedData([part(9), part(5), part(7), part(8)], public=public)


def run(multilabel=False, **options):
    torch.manual_seed(0)
    return perada.finetune(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double(),
        task(multilabel),
        **sections(
            adapter="full",
            rounds=6,
            local_steps=10,
            batch_size=4,
            lr_local=0.5,
            distillation={"steps": 3, "batch_size": 20, "lr": 0.05, "guard": "predictions"},
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
            **options,
        ),
    )


def test_each_round_is_told_in_the_metrics_and_secure_sums_decide_alike():
    plain = run()
    summed = run(secure_sums=SecureSums(fraction_bits=40))
    decisions = [row["server/distilled"] for row in plain.metrics["rounds"]]
    assert {*decisions} == {0.0, 1.0}
    assert [row["server/distilled"] for row in summed.metrics["rounds"]] == decisions


def test_images_with_several_labels_are_rejected():
    with pytest.raises(
        ValueError,
        match=r"guard='predictions'.*several",
    ):
        run(multilabel=True)


def test_an_unknown_guard_is_rejected():
    with rejects("distillation: guard", "entropy"):
        Distillation(guard="entropy")
