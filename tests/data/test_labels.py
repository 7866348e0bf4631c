# SPDX-License-Identifier: Apache-2.0
"""Labels in the shapes and types in which data sets have them."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from perada.data import FederatedData, FederatedDataModule
from perada.data.checked import check
from perada.tasks import Classification, MultiLabel

IMAGES = torch.zeros(6, 3, 8, 8, dtype=torch.uint8)


class Declared(Dataset):
    """A data set that declares its labels, as torchvision's do."""

    def __init__(self, labels):
        self.targets = labels

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return IMAGES[index], self.targets[index]


KINDS = {
    "tensors": lambda labels: TensorDataset(IMAGES, torch.as_tensor(labels)),
    "items": lambda labels: [(IMAGES[index], label) for index, label in enumerate(labels)],
    "arrays": lambda labels: [(IMAGES[index], np.asarray(label)) for index, label in enumerate(labels)],
    "dicts": lambda labels: [{"image": IMAGES[index], "label": label} for index, label in enumerate(labels)],
    "declared": Declared,
}


@pytest.mark.every(19)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int32, torch.int16])
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 1, 1)])
@pytest.mark.parametrize("classes", [2, 3])
def test_classes_in_columns_are_classes(kind, dtype, shape, classes):
    labels = torch.arange(6) % classes
    dataset = KINDS[kind](labels.to(dtype).view(shape))
    checked = check(FederatedData([dataset, dataset], [dataset, dataset]))
    assert (checked.num_classes, checked.task) == (classes, Classification())
    for store in (checked.train, checked.test):
        assert store.client_labels()[1].tolist() == labels.tolist()
        assert store.take(torch.zeros(6, dtype=torch.int64), torch.arange(6))[1].tolist() == labels.tolist()
    module = FederatedDataModule(FederatedData([dataset, dataset]), batch_size=6)
    assert module.first_batch([0]).y.shape == (1, 6)


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [torch.eye(3, dtype=torch.int64).repeat(2, 1), torch.ones(6, 2, dtype=torch.uint8)])
def test_vectors_of_whole_numbers_say_what_to_give(kind, labels):
    with pytest.raises(TypeError, match=r"labels\.argmax.*labels\.float"):
        check(FederatedData([KINDS[kind](labels)]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_hot_vectors_are_warned_of_and_several_labels_are_not(kind):
    one_hot = torch.eye(3).repeat(2, 1)
    with pytest.warns(UserWarning, match=r"12 training images.*3 labels.*argmax"):
        assert check(FederatedData([KINDS[kind](one_hot)] * 2)).task == MultiLabel()
    several = one_hot.clone()
    soft = one_hot.clone()
    single = torch.tensor([[0.0], [1.0]]).repeat(3, 1)
    several[0, :2] = 1
    soft[0] = torch.tensor([0.5, 0.25, 0.25])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for labels in (several, soft, single):
            assert check(FederatedData([KINDS[kind](labels)])).task == MultiLabel()


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label", [0, 1, 7])
def test_a_single_class_is_rejected_where_the_number_is_inferred(kind, label):
    data = [KINDS[kind](torch.full((6,), label))] * 2
    with pytest.raises(ValueError, match=f"label {label}"):
        check(FederatedData(data, [KINDS[kind](torch.arange(6))] * 2))
    # A site may have one class of several.
    assert check(FederatedData(data, num_classes=8)).num_classes == 8
    assert check(FederatedData(data, classes=list("abcdefgh"))).num_classes == 8


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [0, 1, 2, 255, 0, 1],
            r"go up to 255, which implies 256 classes, but 252 .* \(those used are 0, 1, 2, 255\): number",
        ),
        ([1000, 1001, 1002, 1003, 1004, 1005], "1000 of them have no image"),
        ([0, 10, 20, 30, 40, 50], "num_classes=51"),
    ],
)
def test_sparse_labels_are_rejected_where_the_number_is_inferred(kind, labels, message):
    data = [KINDS[kind](torch.tensor(labels))]
    with pytest.raises(ValueError, match=message.replace("\\\\", "\\")):
        check(FederatedData(data))
    assert check(FederatedData(data, num_classes=max(labels) + 1)).num_classes == max(labels) + 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 2, 0, 2, 0, 2], "no image has the label 1, .* 3 outputs for 2 classes"),
        ([1, 2, 3, 1, 2, 3], "no image has the label 0, .* 4 outputs for 3 classes.* subtracting 1 from each label"),
        ([2, 3, 4, 2, 3, 4], "no image has the labels 0, 1, .* 5 outputs for 3 classes.* subtracting 2"),
        ([0, 1, 3, 4, 5, 6], "no image has the label 2, .* 7 outputs for 6 classes"),
    ],
)
def test_a_few_gaps_are_accepted_with_a_warning(labels, message):
    data = FederatedData([TensorDataset(IMAGES, torch.tensor(labels))])
    with pytest.warns(UserWarning, match=message):
        assert check(data).num_classes == max(labels) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The remedies of the warning.
        assert check(data, num_classes=max(labels) + 1).num_classes == max(labels) + 1
        renumbered = torch.tensor(labels).unique(return_inverse=True)[1]
        assert check(FederatedData([TensorDataset(IMAGES, renumbered)])).num_classes == len({*labels})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.0, 1.0] * 3, "labels are one float32 number per image: use integers for classes"),
        ([0.0, float("nan")] * 3, "labels are one float32 number"),
        ([True, False] * 3, "labels are booleans"),
        ([0, None] * 3, "sample 1: labels are None"),
        ([b"a", b"b"] * 3, "labels are b'a'"),
        ([["a"], ["b"]] * 3, r"labels are \['a'\]"),
        ([1j, 2j] * 3, "labels are complex numbers"),
    ],
)
def test_other_labels_are_rejected_by_name(labels, message):
    with pytest.raises(TypeError, match=message):
        check(FederatedData([[(image, label) for image, label in zip(IMAGES, labels, strict=True)]]))


@pytest.mark.parametrize("labels", [np.array([0, 1] * 3, dtype=object), [np.int8(0), np.int8(1)] * 3])
def test_numbers_of_numpy_are_classes(labels):
    assert check(FederatedData([list(zip(IMAGES, labels, strict=True))])).num_classes == 2


@pytest.mark.parametrize("first", ["grey", "colour"])
@pytest.mark.parametrize("together", [True, False])
def test_the_remedy_for_grey_among_colour_images_helps(first, together):
    grey = [(Image.new("L", (8, 8), 90), 0), (Image.new("L", (9, 9), 90), 1)]
    colour = [(Image.new("RGB", (8, 8)), 0), (Image.new("RGB", (8, 8)), 1)]
    parts = [grey, colour] if first == "grey" else [colour, grey]
    clients = [sum(parts, [])] if together else parts  # noqa: RUF017
    wrong = FederatedDataModule(FederatedData(clients), image_size=8, batch_size=4)
    with pytest.raises(ValueError, match="grey images") as error:
        wrong.setup()
    reason = str(error.value)
    assert "convert grey images to three channels (image.convert('RGB') of a PIL image" in reason
    assert "image_size" not in reason
    clients = [[(image.convert("RGB"), label) for image, label in client] for client in clients]
    (datamodule := FederatedDataModule(FederatedData(clients), image_size=8, batch_size=4)).setup()
    assert not next(iter(datamodule.train_dataloader())).failed
