# SPDX-License-Identifier: Apache-2.0
"""Datasets as they come: dicts, words for labels, and what is no dataset at all."""

import pandas
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from perada.data import FederatedData, FederatedDataModule

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
        self.rows, self.transform, self.read = rows, transform, []
        self.column_names, self.features = list(rows[0]), {"label": Names(names) if names else None}
        self.format = {"type": "custom" if transform else None}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if isinstance(index, str):
            return [row[index] for row in self.rows]
        self.read.append(index)
        return self.transform(self.rows[index]) if self.transform else self.rows[index]


def opened(data, **options):
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
    expected = opened(FederatedData(pairs, pairs, TensorDataset(public)), **holdout)
    module = opened(FederatedData(rows, rows, dicts(public, [None] * 6, *keys)), **holdout)
    for got, wanted in zip(batches(module), batches(expected), strict=True):
        torch.testing.assert_close(got, wanted)
    assert torch.equal(module.public_images(torch.arange(6)), expected.public_images(torch.arange(6)))


@pytest.mark.every(4)
@pytest.mark.parametrize("kind", ["pairs", "dicts", "columns", "subsets", "declared"])
@pytest.mark.parametrize("classes", [None, ["owl", "cat", "bee", "ant"]])
def test_words_are_numbered_over_all_clients(kind, classes):
    class Declared(list):
        pass

    def made(pixels, labels):
        rows = dicts(pixels, labels)
        if kind in ("pairs", "declared"):
            given = Declared((row["image"], row["label"]) for row in rows)
            given.targets = labels if kind == "declared" else [0] * len(labels)  # not what the items have
            return given
        backwards = Subset(Columns(rows[::-1]), range(len(rows) - 1, -1, -1))
        return {"dicts": rows, "columns": Columns(rows), "subsets": backwards}[kind]

    given = [["owl", "owl", "bee"], ["bee", "bee"], ["ant", "owl", "bee", "ant"]]
    module = opened(
        FederatedData(
            [made(images(len(w), 1), w) for w in given[:2]], [made(images(4, 2), given[2])] * 2, classes=classes
        )
    )
    order = classes or ["ant", "bee", "owl"]
    assert module.classes == order and module.num_classes == len(order)
    (test, *_) = module.test_batches()
    assert test[1].tolist() == [order.index(word) for word in given[2] * 2][: len(test[1])]
    (first, second) = (module.first_batch([client]).y[0].tolist() for client in (0, 1))
    assert sorted(first) == sorted(order.index(word) for word in given[0]) and second == [order.index("bee")] * 2


def test_columns_are_read_without_the_images_and_name_the_classes():
    data = Columns(dicts(images(8, 1), [0, 1] * 4), ["cat", "dog"])
    module = opened(FederatedData([data], [Subset(data, [3, 1])]))
    assert module.classes == ["cat", "dog"] and set(data.read[8:]) <= {0, 3}  # after each is read once
    assert opened(FederatedData([data], num_classes=5)).classes is None
    function = Columns(dicts(images(8, 1), [0, 1] * 4), transform=lambda row: row | {"label": row["label"] + 2})
    with pytest.warns(UserWarning, match="labels 0, 1"):
        assert opened(FederatedData([function])).num_classes == 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


LABELLED = TensorDataset(images(4, 1), torch.arange(4) % 3)


def pairs(labels):
    return list(zip(images(len(labels), 1), labels, strict=True))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("train", "rest", "words"),
    [
        ([LABELLED, DataLoader(LABELLED)], {}, "client 1: the training set is a DataLoader.*pass its .dataset"),
        ([LABELLED], {"test": [Subset(DataLoader(LABELLED), [0])]}, "client 0: the test set .* pass its .dataset"),
        ([LABELLED], {"public": DataLoader(LABELLED)}, "the public set is a DataLoader"),
        ([LABELLED, Stream()], {}, "client 1: the training set is a Stream, whose items cannot be indexed"),
        ([{"train": LABELLED}], {}, "client 0: the training set is a dict, with the keys 'train'.* one of its entries"),
        (LABELLED, {}, "FederatedData.train must be a list with one dataset per client, got a TensorDataset"),
        ({"a": LABELLED}, {}, r"FederatedData.train must be a list .*, got \{'a': a TensorDataset\}; pass train="),
        ([list(images(3, 1))], {}, "client 0, sample 0: the item is a tensor of shape .*: return .image, label."),
        ([dicts(images(2, 1), [0, 1], label="fine_label")], {}, "keys 'image', 'fine_label', 'id', which has no label"),
        ([dicts(images(2, 1), [0, 1], "x")], {"public": LABELLED}, "has no image: name one entry image, img or pixel"),
        ([[{"img": 0, "image": 0, "label": 1}]], {}, "more than one image, 'image' and 'img': name one entry"),
        ([[*dicts(images(2, 1), [0, 1]), {"image": 0}]], {}, "sample 2: .* with the keys 'image', which has no label"),
        ([pairs(WORDS), LABELLED], {}, "client 1 has the training label 0, but .* 'ant': use words for all"),
        ([pairs(WORDS), pairs([1, 2])], {}, "client 1 has the training label 1, but others are words"),
        ([pairs([*WORDS, 4])], {}, "client 0 has the training label 4, but others are words"),
        (
            [pairs(WORDS)],
            {"classes": ["owl", "bee"]},
            "the label 'ant', outside 'owl', 'bee': correct the label or classes",
        ),
        ([pairs(WORDS)], {"num_classes": 2}, "3 names for 2 classes"),
        ([pairs([1, None])], {}, "client 0, sample 1: labels are None: use integer classes"),
        (
            [Columns(dicts(images(2, 1), [0, 1]), names) for names in (["cat", "dog"], ["dog", "cat"])],
            {},
            "client 1: the training set has the classes .*: number them identically",
        ),
    ],
)
def test_one_line_says_what_was_given(train, rest, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        opened(FederatedData(train, **rest))
    assert "\n" not in str(caught.value)


class Listed(list):
    """Items that have names of columns, as Hugging Face's have, and no format of them."""

    column_names = ("label",)


@pytest.mark.parametrize(("labels", "classes"), [([1, 0, 1], None), (["b", "a", "b"], ["a", "b"])])
def test_targets_are_read_in_their_order_whatever_their_keys_are(labels, classes):
    items = Listed(pairs(labels))
    items.targets = labels if classes is None else pandas.Series(labels, index=[7, 8, 9])
    data = opened(FederatedData([items]))
    assert data.classes == classes
    assert data.checked.train.client_labels()[0].tolist() == [1, 0, 1]


def test_a_client_without_test_images_may_have_words_as_labels():
    items = Listed(pairs(["b", "a", "b"]))
    items.targets = ["b", "a", "b"]
    data = opened(FederatedData([items, items], [items, Subset(items, [])]))
    assert [labels.tolist() for labels in data.checked.test.client_labels()] == [[1, 0, 1], []]


def test_of_many_classes_a_few_are_named():
    with pytest.raises(ValueError, match=r"the label 'owl', outside '0', '1', '2', '3', '4' and 95 more: correct"):
        opened(FederatedData([pairs(WORDS)], classes=[str(number) for number in range(100)]))


def test_many_words_that_nobody_declares_need_classes(monkeypatch):
    monkeypatch.setattr("perada.data.checked.SCAN_LIMIT", 2)
    with pytest.raises(
        ValueError, match=r"declares no labels, and its 3 training samples are too many .* or classes if"
    ):
        opened(FederatedData([pairs(WORDS)]))
    assert opened(FederatedData([pairs(WORDS)], classes=WORDS)).num_classes == 3
