# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from perada.data import IID, FederatedDataModule
from perada.studies.shapes import SMALLEST_RADIUS, Shapes, contour
from tests.rejections import rejects


def test_a_contour_is_its_sum_of_waves():
    random = torch.Generator().manual_seed(0)
    coefficients = torch.randn(3, 2, 5, generator=random) * 0.3
    theta = (torch.rand(3, 4, 4, generator=random) * 2 - 1) * math.pi
    radius = contour(coefficients, theta)
    for b in range(3):
        for i in range(4):
            for j in range(4):
                angle = theta[b, i, j].item()
                waves = [(k, *coefficients[b, :, k - 1].tolist()) for k in range(1, 6)]
                expected = 1 + sum(c * math.cos(k * angle) + s * math.sin(k * angle) for k, c, s in waves)
                assert radius[b, i, j].item() == pytest.approx(max(expected, SMALLEST_RADIUS), abs=1e-5)


def test_splits_are_of_the_same_shapes_and_repeat():
    train = Shapes(60, num_classes=3)
    again = Shapes(60, num_classes=3)
    other = Shapes(60, num_classes=3, seed=1)
    test = train.with_split(False)
    assert train.images.shape == (60, 1, 28, 28)
    assert test.images.shape == (6, 1, 28, 28)
    assert torch.equal(train.images, again.images)
    assert torch.equal(train.labels, again.labels)
    assert not torch.equal(train.images, other.images)
    assert not torch.equal(train.images[:6], test.images)


def test_classes_can_be_told_apart():
    train, test = (Shapes(2000, num_classes=10).with_split(part) for part in (True, False))
    distances = torch.cdist(test.images.flatten(1).float(), train.images.flatten(1).float())
    guesses = train.labels[distances.topk(5, largest=False).indices].mode().values
    assert (guesses == test.labels).float().mean() > 0.5  # chance is 0.1


def test_images_are_on_black_and_neither_empty_nor_full():
    lit = (Shapes(500, num_classes=50).images > 20).float().mean((1, 2, 3))
    assert lit.min() > 0.01
    assert 0.1 < lit.mean() < 0.5


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("count", 9),
        ("num_classes", 0),
        ("size", 0),
    ],
)
def test_nothing_to_draw_is_rejected(option, value):
    with rejects(option, value):
        Shapes(**{option: value})


def test_shapes_are_divided_among_clients():
    data = FederatedDataModule(dataset=Shapes(60, num_classes=3), partition=IID(2))
    data.setup()
    assert (data.num_classes, data.classes) == (3, None)
