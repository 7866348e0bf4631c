# SPDX-License-Identifier: Apache-2.0
"""Datasets as they come: dicts, words for labels, and what is no dataset at all."""

import pandas
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from perada.data import FederatedData, FederatedDataModule
from tests.rejections import raises_naming

WORDS = ["owl", "ant", "bee"]


def images(count, seed):
    return torch.randint(0, 256, (count, 3, 6, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def dicts(pixels, labels, image="image", label="label"):
    return [{image: x, label: y, "id": n} for n, (x, y) in enumerate(zip(pixels, labels, strict=True))]


class Names:
    """A feature of Hugging Face's that names its classes."""

    def __init__(self, names):
        self.names = names


class Columns(Dataset):
    """What is used of a ``datasets.Dataset``: dicts by number, columns by name, features."""

    def __init__(self, rows, names=None, transform=None):
        self.rows = rows
        self.transform = transform
        self.read = []
        self.column_names, self.features = list(rows[0]), {"label": Names(names) if names else None}
        self.format = {"type": "custom" if transform else None}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if isinstance(index, str):
            return [row[index] for row in self.rows]
        self.read.append(index)
        return self.transform(self.rows[index]) if self.transform else self.rows[index]


def set_up_module(data, **options):
    module = FederatedDataModule(data, batch_size=3, **options)
    module.setup()
    return module


def batches(module):
    return [(b.x, b.y) for b in module.cohort_loader(module.plan(0))], [(b.x, b.y) for b in module.val_dataloader()]


@pytest.mark.every(2)
@pytest.mark.parametrize("keys", [("image", "label"), ("img", "labels"), ("pixel_values", "label")])
@pytest.mark.parametrize("holdout", [{}, {"client_validation": 0.3}])
def test_dicts_give_what_pairs_give(keys, holdout):
    parts = [(images(n, n), torch.arange(n) % 3) for n in (5, 7, 4)]
    pairs, rows = ([make(*part) for part in parts] for make in (TensorDataset, lambda *part: dicts(*part, *keys)))
    public = images(6, 9)
    expected = set_up_module(FederatedData(pairs, pairs, TensorDataset(public)), **holdout)
    module = set_up_module(FederatedData(rows, rows, dicts(public, [None] * 6, *keys)), **holdout)
    for batch, expected_batch in zip(batches(module), batches(expected), strict=True):
        torch.testing.assert_close(batch, expected_batch)
    assert torch.equal(module.public_images(torch.arange(6)), expected.public_images(torch.arange(6)))


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["pairs", "dicts", "columns", "subsets", "declared"])
@pytest.mark.parametrize("classes", [None, ["owl", "cat", "bee", "ant"]])
def test_words_are_numbered_over_all_clients(kind, classes):
    class Declared(list):
        pass

    def dataset(words, seed):
        rows = dicts(images(len(words), seed), words)
        if kind in ("pairs", "declared"):
            labelled = Declared((row["image"], row["label"]) for row in rows)
            labelled.targets = words if kind == "declared" else [0] * len(words)  # not what the items have
            return labelled
        backwards = Subset(Columns(rows[::-1]), range(len(rows) - 1, -1, -1))
        return {"dicts": rows, "columns": Columns(rows), "subsets": backwards}[kind]

    training = [["owl", "owl", "bee"], ["bee", "bee"]]
    testing = ["ant", "owl", "bee", "ant"]
    data = FederatedData([dataset(words, 1) for words in training], [dataset(testing, 2)] * 2, classes=classes)
    module = set_up_module(data)
    order = classes or ["ant", "bee", "owl"]
    assert module.classes == order
    assert module.num_classes == len(order)
    (test, *_) = module.test_batches()
    assert test[1].tolist() == [order.index(word) for word in testing * 2][: len(test[1])]
    for client, words in enumerate(training):
        labels = module.first_batch([client]).y[0].tolist()
        assert sorted(labels) == sorted(order.index(word) for word in words)


def test_columns_are_read_without_the_images_and_name_the_classes():
    data = Columns(dicts(images(8, 1), [0, 1] * 4), ["cat", "dog"])
    module = set_up_module(FederatedData([data], [Subset(data, [3, 1])]))
    assert module.classes == ["cat", "dog"] and set(data.read[8:]) <= {0, 3}  # after each is read once
    assert set_up_module(FederatedData([data], num_classes=5)).classes is None
    function = Columns(dicts(images(8, 1), [0, 1] * 4), transform=lambda row: row | {"label": row["label"] + 2})
    with pytest.warns(UserWarning, match="labels 0, 1"):
        assert set_up_module(FederatedData([function])).num_classes == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


LABELLED = TensorDataset(images(4, 1), torch.arange(4) % 3)


def pairs(labels):
    return list(zip(images(len(labels), 1), labels, strict=True))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("train", "options", "facts"),
    [
        ([LABELLED, DataLoader(LABELLED)], {}, ["client 1", "training set", "DataLoader", ".dataset"]),
        ([LABELLED], {"test": [Subset(DataLoader(LABELLED), [0])]}, ["client 0", "test set", ".dataset"]),
        ([LABELLED], {"public": DataLoader(LABELLED)}, ["public set", "DataLoader"]),
        ([LABELLED, Stream()], {}, ["client 1", "training set", "Stream"]),
        ([{"train": LABELLED}], {}, ["client 0", "training set", "dict", "'train'"]),
        (LABELLED, {}, ["FederatedData.train", "a TensorDataset"]),
        ({"a": LABELLED}, {}, ["FederatedData.train", "{'a': a TensorDataset}", "train="]),
        ([list(images(3, 1))], {}, ["client 0", "sample 0", "item", "(image, label)"]),
        ([dicts(images(2, 1), [0, 1], label="fine_label")], {}, ["'image', 'fine_label', 'id'", "no label"]),
        ([dicts(images(2, 1), [0, 1], "x")], {"public": LABELLED}, ["no image", "image, img or pixel_values"]),
        ([[{"img": 0, "image": 0, "label": 1}]], {}, ["more than one image", "'image' and 'img'"]),
        ([[*dicts(images(2, 1), [0, 1]), {"image": 0}]], {}, ["sample 2", "'image'", "no label"]),
        ([pairs(WORDS), LABELLED], {}, ["client 1", "training label 0", "'ant'"]),
        ([pairs(WORDS), pairs([1, 2])], {}, ["client 1", "training label 1", "words"]),
        ([pairs([*WORDS, 4])], {}, ["client 0", "training label 4", "words"]),
        ([pairs(WORDS)], {"classes": ["owl", "bee"]}, ["label 'ant'", "'owl', 'bee'", "classes"]),
        ([pairs(WORDS)], {"num_classes": 2}, ["3 names", "2 classes"]),
        ([pairs([1, None])], {}, ["client 0", "sample 1", "labels", None]),
        (
            [Columns(dicts(images(2, 1), [0, 1]), names) for names in (["cat", "dog"], ["dog", "cat"])],
            {},
            ["client 1", "training set", "classes", "number them"],
        ),
    ],
)
def test_a_wrong_dataset_is_named(train, options, facts):
    with raises_naming((TypeError, ValueError), *facts):
        set_up_module(FederatedData(train, **options))


class Listed(list):
    """Items that have names of columns, as Hugging Face's have, and no format of them."""

    column_names = ("label",)


@pytest.mark.parametrize(("labels", "classes"), [([1, 0, 1], None), (["b", "a", "b"], ["a", "b"])])
def test_targets_are_read_in_their_order_whatever_their_keys_are(labels, classes):
    items = Listed(pairs(labels))
    items.targets = labels if classes is None else pandas.Series(labels, index=[7, 8, 9])
    data = set_up_module(FederatedData([items]))
    assert data.classes == classes
    assert data.checked.train.client_labels()[0].tolist() == [1, 0, 1]


def test_a_client_without_test_images_may_have_words_as_labels():
    items = Listed(pairs(["b", "a", "b"]))
    items.targets = ["b", "a", "b"]
    data = set_up_module(FederatedData([items, items], [items, Subset(items, [])]))
    assert [labels.tolist() for labels in data.checked.test.client_labels()] == [[1, 0, 1], []]


def test_of_many_classes_a_few_are_named():
    with pytest.raises(ValueError, match=r"'owl'.*'0', '1', '2', '3', '4' and 95 more"):
        set_up_module(FederatedData([pairs(WORDS)], classes=[str(number) for number in range(100)]))


def test_many_words_that_nobody_declares_need_classes(monkeypatch):
    monkeypatch.setattr("perada.data.labels.SCAN_LIMIT", 2)
    with pytest.raises(ValueError, match=r"3 training samples.*classes"):
        set_up_module(FederatedData([pairs(WORDS)]))
    assert set_up_module(FederatedData([pairs(WORDS)], classes=WORDS)).num_classes == 3
