# SPDX-License-Identifier: Apache-2.0
"""Deployed runs with options of labels and of batches, with and without secure sums, against their simulations."""

from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.cli.deploy_status import format_rounds
from perada.data import FederatedData
from perada.server import SecureSums
from perada.tasks import Classification, Keypoints, MultiLabel, Regression

from .parties import Parties
from .test_parity import assert_equal

WEIGHTS = [1.0, 3.0, 0.5]
OPTIONS = {
    "class_weights": {"task": Classification(class_weights=WEIGHTS)},
    "weights per client": {"task": Classification(class_weights="balanced_per_client")},
    "label_smoothing": {"task": Classification(label_smoothing=0.2)},
    "focal_gamma": {"task": Classification(focal_gamma=2.0)},
    "unknown labels": {"task": MultiLabel(positive_weights=WEIGHTS)},
    "numbers": {"task": Regression("huber", mean=[1.0, 0.0, 20.0], std=[0.5, 2.0, 10.0])},
    "keypoints": {"task": Keypoints(8, mirrored=[0, 1]), "num_classes": 4, "flip": True, "crop_padding": 1},
    "mixed images": {"mixup": 0.4, "cutmix": 1.0},
    "balanced sampling": {"sampling": "balanced"},
}


def with_unknown_labels(data):
    """Replace the classes of a federation by several labels, of which some are unknown."""

    def relabelled(dataset):
        images, classes = dataset.tensors
        indices = torch.arange(len(classes)).unsqueeze(1)
        labels = ((indices + classes.unsqueeze(1)) // torch.arange(1, 4) % 2).float()
        labels[1::3, 0] = -1.0
        labels[2::4, 1:] = torch.nan
        return TensorDataset(images, labels)

    return FederatedData([*map(relabelled, data.train)], [*map(relabelled, data.test)], data.public)


def with_numbers(data):
    """Replace the classes of a federation by three numbers of different sizes."""

    def relabelled(dataset):
        images, classes = dataset.tensors
        brightness = images.flatten(1).float().mean(1)
        return TensorDataset(images, torch.stack([classes.float(), brightness, 10.0 * classes + 5], 1))

    return FederatedData([*map(relabelled, data.train)], [*map(relabelled, data.test)], data.public)


def with_keypoints(data):
    """Replace the classes of a federation by two points, of which one is sometimes unknown."""

    def relabelled(dataset):
        images, classes = dataset.tensors
        points = torch.stack([classes.float(), classes + 2.5, 7.0 - classes, classes + 0.25], 1)
        points[::3, 2:] = torch.nan
        return TensorDataset(images, points)

    return FederatedData([*map(relabelled, data.train)], [*map(relabelled, data.test)], data.public)


def with_few_of_a_class(data):
    """Replace class 1 by class 0 in every second image."""

    def relabelled(dataset):
        images, classes = dataset.tensors
        is_replaced = (classes == 1) & (torch.arange(len(classes)) % 2 == 0)
        return TensorDataset(images, classes.where(~is_replaced, 0))

    return FederatedData([*map(relabelled, data.train)], data.test, data.public)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("secure_sums", [None, SecureSums()], ids=["plain", "secure"])
@pytest.mark.every(13)
def test_a_deployed_run_equals_its_simulation(case, secure_sums, tiny, tmp_path):
    loop = {} if secure_sums is None else {"secure_sums": secure_sums}
    parties = Parties(tiny, tmp_path, "perada", loop=loop, data=OPTIONS[case])
    if case == "weights per client":
        parties.whole = with_few_of_a_class(parties.whole)
    if case == "numbers":
        parties.whole = with_numbers(parties.whole)
    if case == "keypoints":
        parties.options["net"] = partial(tiny.net, classes=4)
        parties.whole = with_keypoints(parties.whole)
    if case == "unknown labels":
        parties.whole = with_unknown_labels(parties.whole)
    loop, coordinator = assert_equal(parties)
    error_of_numbers = loop.history[-1]["personal/local_test"]
    rounds = format_rounds(coordinator.progress)
    assert (f" {error_of_numbers:.4g} |" in rounds and "%" not in rounds) == (case in ("numbers", "keypoints"))
