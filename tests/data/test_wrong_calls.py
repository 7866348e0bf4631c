# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the clients' data are named at set-up, and unusual but right forms of data are accepted."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from perada.core.checks import OptionTypeError
from perada.data import IID, ByDomain, FederatedData, FederatedDataModule, ImageSet
from perada.data.partitions import Partition
from tests.rejections import raises_naming, rejects

IMAGES = torch.arange(12 * 3 * 4 * 4).view(12, 3, 4, 4).byte()
LABELS = torch.arange(12) % 2
CLIENT = TensorDataset(IMAGES, LABELS)


def set_up(train, test=(), **options):
    module = FederatedDataModule(FederatedData(train, list(test), **options), batch_size=4)
    module.setup()
    return module


class WithLength(Dataset):
    """A dataset whose length is what a function returns."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length()

    def __getitem__(self, index):
        return CLIENT[index]


def fail():
    raise RuntimeError("no index file")


@pytest.mark.parametrize(
    ("train", "facts"),
    [
        (None, ["FederatedData.train", None]),
        ("folder", ["FederatedData.train", "'folder'"]),
        ({"a": CLIENT}, ["train=[*datasets.values()]", "client_names=[*datasets]"]),
        ([None], ["client 0", "training set", None]),
        ([5], ["client 0", "training set", 5]),
        ([(IMAGES, LABELS)], ["client 0", "sample 0", "item", "(12, 3, 4, 4)"]),
        ([CLIENT, [None]], ["client 1", "sample 0", "item", None]),
        ([CLIENT, [IMAGES[0]]], ["client 1", "sample 0", "item", "(3, 4, 4)"]),
        ([[(None, 0), (None, 1)]], ["client 0", "sample 0", "image", None]),
        ([[(IMAGES[0], [1.0, 0.0]), (IMAGES[0], [1.0])]], ["client 0", "sample 1", "label", "(1,)"]),
        ([WithLength(fail)], ["client 0", "training set", "WithLength", "RuntimeError: no index file"]),
        ([WithLength(lambda: 4.0)], ["length", "WithLength"]),
        ([Subset(CLIENT, [12])], ["client 0", "training set", "item 12", "dataset of 12"]),
        ([CLIENT, Subset(CLIENT, [0.5, 1.5])], ["client 1", "indices of a Subset", "[0.5, 1.5]"]),
        ([Subset(CLIENT, LABELS.bool().tolist())], ["indices of a Subset", "mask.nonzero"]),
        ([Subset(CLIENT, LABELS.numpy().astype(bool))], ["indices of a Subset", "array of shape (12,)"]),
        ([Subset(CLIENT, ["a"])], ["indices of a Subset", "['a']"]),
        ([Subset(CLIENT, None)], ["indices of a Subset", None]),
        ([Subset(CLIENT, 5)], ["indices of a Subset", 5]),
        ([Subset(CLIENT, [[0, 1], [2]])], ["indices of a Subset", "[[0, 1], [2]]"]),
        ([Subset(Subset(CLIENT, [0, 1]), [0.5])], ["indices of a Subset", "[0.5]"]),
        ([TensorDataset(torch.zeros(12, 3, 0, 0).byte(), LABELS)], ["(3, 0, 0)", "no pixels"]),
        ([TensorDataset(torch.zeros(12, 0, 4, 4), LABELS)], ["(0, 4, 4)", "no pixels"]),
    ],
)
def test_mistakes_in_training_sets_are_named(train, facts):
    with raises_naming((TypeError, ValueError, IndexError), *facts):
        set_up(train)


def test_mistakes_in_other_sets_name_the_set():
    with raises_naming(TypeError, "FederatedData.test", "test=[]"):
        FederatedDataModule(FederatedData([CLIENT], None)).setup()
    with raises_naming(TypeError, "client 0", "test set", "sample 0"):
        set_up([CLIENT], [[IMAGES[0]]])
    with raises_naming(TypeError, "server's validation set", "sample 0"):
        set_up([CLIENT], server_validation=TensorDataset(IMAGES))


@pytest.mark.parametrize("option", ["classes", "client_names"])
@pytest.mark.parametrize("names", [["a", None], ["a", ""], [0, 1], [["a"], ["b"]], "ab", b"ab", {"a", "b"}, {0: "a"}])
def test_names_are_strings(option, names):
    with rejects(f"FederatedData: {option}", names, error=OptionTypeError):
        FederatedData([CLIENT, CLIENT], **{option: names})


def test_right_calls_in_unusual_forms():
    data = FederatedData((CLIENT for _ in range(2)), iter([CLIENT, []]), classes=np.array(["a", "b"]))
    assert (data.train, data.test, data.classes) == ([CLIENT, CLIENT], [CLIENT, []], ["a", "b"])
    datasets = {"north": CLIENT, "south": CLIENT}
    assert FederatedData(datasets.values(), client_names=datasets.keys()).client_names == ["north", "south"]
    for train in (
        [Subset(CLIENT, np.arange(4)), Subset(CLIENT, torch.arange(4, 12))],
        [Subset(CLIENT, range(4)), Subset(CLIENT, [torch.tensor(5), torch.tensor(6)])],
        [Subset(CLIENT, np.arange(4, dtype=np.uint8)), ConcatDataset([CLIENT, CLIENT])],
        [[{"image": image, "label": np.int32(label)} for image, label in CLIENT], CLIENT],
    ):
        assert set_up(train).train_sizes == tuple(len(dataset) for dataset in train)


def test_words_of_numpy_are_names_of_python():
    module = set_up([[(IMAGES[0], np.str_("cat")), (IMAGES[1], "dog")]])
    assert module.classes == ["cat", "dog"]
    assert {type(name) for name in module.classes} == {str}


def test_numbers_without_the_task_are_sent_to_regression():
    with pytest.raises(ValueError, match=r"1\.5, .*0\.\.1: .*Regression\(\)"):
        set_up([TensorDataset(IMAGES, torch.full((12, 1), 1.5))])


@pytest.mark.parametrize("num_classes", [None, 2])
def test_masks_without_two_classes_are_named(num_classes):
    for masks, problem in (
        (torch.full((12, 4, 4), 255), "ignored"),
        (torch.zeros(12, 4, 4).long(), "class 0"),
        (LABELS.view(12, 1, 1).expand(12, 4, 4) * 255, "class 0"),
    ):
        with raises_naming(ValueError, "all pixels of the training masks", problem, "mask_values"):
            set_up([TensorDataset(IMAGES, masks)], num_classes=num_classes)


def test_masks_of_several_channels_are_named():
    with pytest.raises(TypeError, match=r"\(12, 3, 4, 4\).*\(H, W\)"):
        set_up([TensorDataset(IMAGES, IMAGES.long())])


class Own(ImageSet):
    """A set in memory with columns."""

    def __init__(self, column=None, classes=None, identities=None):
        super().__init__()
        self.column = column
        self.classes = classes
        self.identities = identities

    def _load_images(self):
        return IMAGES, LABELS

    @property
    def columns(self):
        return {} if self.column is None else {"site": self.column}


@pytest.mark.parametrize("blank", [None, float("nan")])
def test_columns_without_a_value_are_named(blank):
    for column in ([blank, "a"] * 6, np.array([blank, 1.0] * 6, dtype=object)):
        module = FederatedDataModule(dataset=Own(column), partition=ByDomain("site"))
        if isinstance(column, list) and blank is not None:
            continue  # NumPy turns NaN among words into the word "nan"
        with pytest.raises(ValueError, match=r"'site'.*6 images.*image 0"):
            module.setup()


def test_attributes_of_an_image_set_are_checked():
    with pytest.raises(ValueError, match="classes"):
        FederatedDataModule(dataset=Own(classes=["a", None]), partition=IID(2)).setup()
    with pytest.raises(ValueError, match=r"identities .*1 .*12 images"):
        FederatedDataModule(dataset=Own(identities=["a"]), partition=IID(2), client_validation=0.5).setup()


def test_rows_of_a_partition_may_not_be_nested():
    class Nested(Partition):
        def split(self, train, test, seed):
            return [[[0], [1, 2]], [3]], []

    with pytest.raises(ValueError, match=r"^Nested\.split .*training rows"):
        FederatedDataModule(dataset=Own(), partition=Nested()).setup()


def test_names_of_shifts_are_words():
    with pytest.raises(ValueError, match=r"^shifts: .* 1"):
        FederatedDataModule(FederatedData([CLIENT]), shifts={1: "gaussian_noise"})
    with pytest.raises(ValueError, match=r"^shifts: noise=None"):
        FederatedDataModule(FederatedData([CLIENT]), shifts={"noise": None})
