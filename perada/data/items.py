# SPDX-License-Identifier: Apache-2.0
"""Datasets as they come: items that are dicts, such as those of Hugging Face's datasets, and labels that are words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from perada.core.text import some
from perada.data.batches.datasets import as_labels, isolated_randomness, length, read_item, tensor_source
from perada.data.federated import SCAN_LIMIT, FederatedData
from perada.data.sets.base import ImageSet

IMAGE_KEYS = ("image", "img", "pixel_values")
LABEL_KEYS = ("label", "labels")


@dataclass(eq=False)
class Pairs(Dataset[Any]):
    """A dataset read as (image, label), whose items may be dicts and whose labels may be words.

    Attributes:
        who: What messages call it.
        dataset: The one given.
        labelled: Whether labels are looked at.
        keys: Of the image and of the label in a dict; None for items that are pairs. Without a label's key, items are
            images alone.
        label: That of the first item.
        labels: All labels as the dataset has them, where they are known.
        numbers: The class of each word; None where labels are numbers.
        targets: All labels, (N,) or (N, K), where they are known.
    """

    who: str
    dataset: Dataset[Any]
    labelled: bool
    keys: tuple[str, ...] | None = None
    label: Any = None
    labels: list[Any] | None = None
    numbers: dict[str, int] | None = None
    targets: Tensor | None = None

    def __len__(self) -> int:
        return length(self.dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - an image, or an image and its label
        image, *label = self.entries(index)
        return (image, *(label if self.numbers is None else map(self.number, label))) if label else image

    def number(self, word: Any) -> int:  # noqa: ANN401
        """The class of a word; a ValueError if it is none of those known."""
        assert self.numbers is not None
        if not isinstance(word, str) or word not in self.numbers:
            raise ValueError(
                f"{self.who} has the label {word!r}, and the classes are {some(list(map(repr, self.numbers)))}: "
                "correct the label, or name all classes in classes"
            )
        return self.numbers[word]

    def entries(self, index: int) -> tuple[Any, ...]:
        """An image, and its label as the dataset has it."""
        item = self.dataset[index]
        if self.keys is None:
            return item[0], item[1]
        if not isinstance(item, Mapping) or not all(key in item for key in self.keys):
            raise ValueError(
                f"{self.who}, sample {index}: the item is {_shown(item)}, and the first one is a dict with "
                f"{' and '.join(map(repr, self.keys))}: give all items the same keys"
            )
        return tuple(item[key] for key in self.keys)


def check_datasets(data: FederatedData) -> None:
    """Refuse what is not a map-style dataset, before any is opened.

    Raises:
        TypeError: If a client's or the server's dataset is a DataLoader, a dict of datasets or a stream, or the
            clients' datasets are not in a list.
    """
    for name, sets in (("train", data.train), ("test", data.test)):
        if not isinstance(sets, Sequence):
            raise TypeError(
                f"FederatedData.{name} is a {type(sets).__name__}, and no list: give a list with one dataset per client"
            )
    for part in parts_of(data):
        base: Any = _base(part.dataset)
        wrong = ""
        if isinstance(base, DataLoader):
            wrong = "which has batches and no items: give its .dataset"
        elif isinstance(base, Mapping):
            wrong = f"with {_keys(base)}, and no dataset: give one of its entries"
        elif isinstance(base, IterableDataset) or not {"__len__", "__getitem__"} <= {*dir(type(base))}:
            wrong = "whose items have no numbers: give a dataset with len() and [index], such as a list of its items"
        if wrong:
            raise TypeError(f"{part.who} is a {type(part.dataset).__name__}, {wrong}")


def as_pairs(data: FederatedData, num_classes: int | None = None) -> FederatedData:
    """Give every dataset items that are (image, label), or images alone for the public set, with labels in numbers.

    Of a dict, the image is the entry ``image``, ``img`` or ``pixel_values`` and the label is ``label`` or ``labels``.
    Words become their places in ``classes``, or in their sorted order over all clients, which then is ``classes``.
    The names of classes that Hugging Face's datasets carry are taken over, unless ``num_classes`` is another number.

    Raises:
        ValueError: If a dict lacks an entry, labels are words at some clients alone, or names of classes differ.
        TypeError: If an item is neither a pair nor a dict.
    """
    parts = parts_of(data)
    with isolated_randomness():
        for part in parts:
            _look(part)
        first = next((part for part in parts if isinstance(part.label, str)), None)
        if first is None and all(part.keys is None for part in parts):
            return data
        for part in parts:
            part.labels = _declared(part.dataset, part.keys[-1] if part.keys else None) if part.labelled else None
        words = None if first is None else _words(parts, first, read=not data.classes)
        classes = data.classes or (_names(parts, num_classes or data.num_classes) if words is None else words)
    numbers = None if first is None else {word: number for number, word in enumerate(classes or ())}
    made = [_made(part, numbers) for part in parts]
    return replace(data.with_datasets(made), classes=classes)


def parts_of(data: FederatedData) -> list[Pairs]:
    """All datasets, in the order of the fields."""
    parts = [Pairs(f"client {client}: the training set", one, True) for client, one in enumerate(data.train)]
    parts += [Pairs(f"client {client}: the test set", one, True) for client, one in enumerate(data.test)]
    server = ("the public set", data.public, False), ("the server's validation set", data.server_validation, True)
    return parts + [Pairs(who, one, labelled) for who, one, labelled in server if one is not None]


def _base(dataset: Any) -> Any:  # noqa: ANN401
    """What Subsets are of."""
    return _base(dataset.dataset) if type(dataset) is Subset else dataset


def _look(part: Pairs) -> None:
    """Find the keys and the kind of label of a dataset by its first item; tensors and image sets have none of these."""
    if not length(part.dataset) or isinstance(_base(part.dataset), ImageSet) or tensor_source(part.dataset, False):
        return
    item: Any = read_item(part.dataset, 0, part.who)
    if isinstance(item, Mapping):
        part.keys = tuple(_key(part.who, item, what) for what in ("image", "label")[: 1 + part.labelled])
    elif part.labelled and (not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2):
        raise TypeError(f"{part.who}, sample 0: the item is {_shown(item)}: give (image, label), or a dict of both")
    part.label = part.entries(0)[1] if part.labelled else None


def _key(who: str, item: Mapping[str, Any], what: str) -> str:
    """The key of an image or of a label."""
    usual = IMAGE_KEYS if what == "image" else LABEL_KEYS
    here = [key for key in usual if key in item]
    if len(here) != 1:
        has = f"more than one {what}, {' and '.join(map(repr, here))}" if here else f"no {what}"
        raise ValueError(
            f"{who}, sample 0: the item is {_shown(item)}, which has {has}: name one entry "
            f"{', '.join(usual[:-1])} or {usual[-1]}"
        )
    return here[0]


def _shown(item: Any) -> str:  # noqa: ANN401
    if isinstance(item, Mapping):
        return f"a dict with {_keys(item)}"
    return f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")


def _keys(entries: Mapping[str, Any]) -> str:
    return f"the keys {', '.join(map(repr, entries))}" if entries else "no keys"


def _declared(dataset: Any, key: str | None) -> list[Any] | None:  # noqa: ANN401
    """All labels, where they are had without an image: of a column or of ``targets``; else None."""
    if type(dataset) is Subset:
        inner = _declared(dataset.dataset, key)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if key is None:
        values = None if getattr(dataset, "target_transform", None) is not None else getattr(dataset, "targets", None)
    else:  # a function that makes the items may make the labels too
        column = key in (getattr(dataset, "column_names", None) or ()) and dataset.format["type"] != "custom"
        values = dataset[key] if column else None
    return None if values is None or len(values) != length(dataset) else list(values[:])


def _words(parts: list[Pairs], first: Pairs, read: bool) -> list[str]:
    """All words in their order; read sample by sample, within SCAN_LIMIT, where they are not declared.

    Labels that are numbers at some and words at others are refused.
    """
    parts = [part for part in parts if part.labelled and length(part.dataset)]
    for part in parts:
        if not isinstance(part.label, str):
            raise ValueError(
                f"{part.who} has labels that are not words, such as {part.label!r}, and {first.who} has words such as "
                f"{first.label!r}: give words to all, or numbers to all"
            )
        if part.labels is not None and not all(isinstance(label, str) for label in part.labels):
            part.labels = None  # targets are not what the items have
    unknown = [part for part in parts if part.labels is None and read]
    count = sum(length(part.dataset) for part in unknown)
    if count > SCAN_LIMIT:
        raise ValueError(
            f"{unknown[0].who} has words as labels and declares none, and {count} samples are too many to read them "
            "all: give classes, or the datasets an attribute targets"
        )
    for part in unknown:
        part.labels = [part.entries(index)[1] for index in range(length(part.dataset))]
        wrong = next((label for label in part.labels if not isinstance(label, str)), None)
        if wrong is not None:
            raise ValueError(f"{part.who} has the label {wrong!r} among words: give a word to every sample")
    return sorted({label for part in parts for label in part.labels or ()})


def _names(parts: list[Pairs], num_classes: int | None) -> list[str] | None:
    """The names that Hugging Face's datasets carry, where they are as many as there are classes."""
    found: list[tuple[str, list[str]]] = []
    for part in parts:
        features = getattr(_base(part.dataset), "features", None)
        if part.labelled and part.keys is not None and isinstance(features, Mapping):
            names = getattr(features.get(part.keys[-1]), "names", None)
            found += [] if names is None else [(part.who, list(names))]
    for who, names in found:
        if names != found[0][1]:
            raise ValueError(
                f"{who} has the classes {names}, and {found[0][0]} has {found[0][1]}: number them alike, or give "
                "words as labels"
            )
    return found[0][1] if found and num_classes in (None, len(found[0][1])) else None


def _made(part: Pairs, numbers: dict[str, int] | None) -> Dataset[Any]:
    """The dataset as it is where nothing is to be done, or its pairs."""
    if part.keys is None and (numbers is None or not part.labelled):
        return part.dataset
    part.numbers = numbers if part.labelled else None
    if part.labels is not None:
        part.targets = as_labels(part.labels if numbers is None else [part.number(word) for word in part.labels])
        part.labels = None  # kept once
    return part
