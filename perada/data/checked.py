# SPDX-License-Identifier: Apache-2.0
"""The checks of what the datasets of the clients and the server hold, and what they find."""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError, check_integer
from perada.core.text import abbreviated
from perada.data.batches.datasets import (
    LABEL_KEYS,
    Kind,
    as_labels,
    check_kind,
    check_label_kinds,
    declared_labels,
    entries,
    isolated_randomness,
    kind,
    length,
    read_item,
    resolved,
)
from perada.data.batches.samples import MapStore, Store, TensorStore, make_store
from perada.data.federated import FederatedData, warn_of_look_alikes
from perada.data.sets.base import ImageSet, class_names

Labels = Tensor | list[Any]  # of one client; a list where some are words
_CHUNK = 4096  # images of a tensor gathered at a time


def _digests(store: Store) -> Iterator[bytes]:
    """A hash of each image, client after client; equal images have equal ones, others do not (128 bits)."""
    if isinstance(store, MapStore):
        for client, size in enumerate(store.sizes):
            for index in range(size):
                with isolated_randomness():
                    image, _ = store.item(client, index, resize=False)
                yield from _hashes(image.unsqueeze(0))
        return
    for rows in torch.split(store.table, _CHUNK):
        yield from _hashes(store.images[rows.to(store.images.device)])


def _hashes(images: Tensor) -> Iterator[bytes]:
    """A hash of each of the images (N, ...)."""
    prefix = f"{tuple(images.shape[1:])} {images.dtype} ".encode()
    for row in images.reshape(len(images), -1).contiguous().cpu().view(torch.uint8).numpy():
        yield hashlib.blake2b(prefix + row.tobytes(), digest_size=16).digest()


def _refuse_copies(store: Store, which: str, server_images: Mapping[bytes, str]) -> None:
    """Refuse clients' images that are among the server's, whose names are given by their hash.

    ``which`` is how the message calls the clients' images, such as ``"test "``.
    """
    digests = _digests(store)
    for client, size in enumerate(store.sizes):
        for index, digest in enumerate(islice(digests, size)):
            if digest in server_images:
                raise OptionError(
                    f"privacy: {which}image {index} of client {client} is also {server_images[digest]}: no ledger "
                    "counts what the server does with a client's image. Take such images out of the server's set, or "
                    "give another set",
                    name="privacy",
                )


# Labels of datasets that have no `targets` are found by reading every sample, up to this many; beyond, they are
# checked as they are used.
SCAN_LIMIT = 50_000
COUNT_LIMIT = 200_000
"""Numbers of samples by client and class that a run keeps, at most."""


@dataclass
class Checked:
    """What the checks found: a store for each part, and the facts about the task."""

    train: Store
    test: Store | None
    public: Store | None
    server_validation: Store | None
    num_classes: int
    classes: list[str] | None
    multilabel: bool
    image: Kind
    held_out: Sequence[Dataset[Any]] = ()
    """What each client sets aside of its training images; it is neither trained nor scored on."""

    def check_channels(self, channels: int) -> None:
        """Refuse clients' and public images that a backbone cannot take; a single uint8 channel fits any."""
        public = None if self.public is None else first_image(self.public)
        for name, found in (("training", self.image), ("public", public)):
            if found is None or len(found[0]) != 3 or found[0][0] == channels:
                continue
            if found[0][0] != 1 or found[1] != torch.uint8:
                raise ValueError(
                    f"{name} images are {found[1]} of shape {found[0]} and the backbone takes {channels} channels: "
                    f"convert them to {channels} (uint8 images of 1 are repeated), or give a network of your own for "
                    f"{found[0][0]} as backbone"
                )

    def check_overlap(self) -> None:
        """Refuse images of the server's that clients have, the same to the last byte; files are all read for it.

        A client has its training images, those that it holds out of them, and its test images: whatever the server
        does with one of them, no ledger counts it.

        Images are compared as they are stored, before they are resized or augmented, with their shape and type; grey
        uint8 images (H, W) and (1, H, W) are alike. What a dataset draws at random is drawn alike for all. A changed
        copy of an image, by as little as one pixel, is another image.

        Raises:
            ValueError: If the public or the validation set of the server holds an image of a client.
        """
        server_images: dict[bytes, str] = {}
        for name, store in (("public", self.public), ("server_validation", self.server_validation)):
            for index, digest in enumerate(_digests(store)) if store is not None else ():
                server_images.setdefault(digest, f"image {index} of the {name} set")
        if not server_images:
            return
        held_out = make_store(self.held_out) if self.held_out else None
        for which, store in (("", self.train), ("held-out ", held_out), ("test ", self.test)):
            if store is not None:
                _refuse_copies(store, which, server_images)

    def extreme_tokens(self) -> list[int]:
        """The least and the greatest token of the texts that are in memory, of each set that a model will see."""
        stores = (self.train, self.test, self.public)
        texts = [store.images for store in stores if isinstance(store, TensorStore) and len(store.images)]
        return sorted({int(token) for images in texts for token in images.aminmax()})

    def class_counts(self) -> dict[str, list[list[int]]]:
        """Samples (M, K) of each client and class by ``train`` and ``test``; with several labels, those that have each.

        A part is left out if it is too large to read every label, or for more than ``COUNT_LIMIT`` numbers.
        """
        counts = {}
        for part, store in (("train", self.train), ("test", self.test)):
            few = store is not None and len(store.sizes) * self.num_classes <= COUNT_LIMIT
            clients: Sequence[Tensor | None] = store.client_labels() if store is not None and few else [None]
            known = [labels for labels in clients if labels is not None]
            if len(known) == len(clients):
                counts[part] = [
                    (own.long().sum(0) if self.multilabel else own.bincount(minlength=self.num_classes)).tolist()
                    for own in known
                ]
        return counts


def check(data: FederatedData, num_classes: int | None = None, image_size: int | None = None) -> Checked:
    """Open the data and verify them; uint8 images are resized to ``image_size``, unless it is None.

    The number of classes K is ``num_classes``, or what the data say, or what is found in the labels. Words become
    their places in ``classes``, or in their sorted order over all clients, which then is ``classes``. The names that
    Hugging Face's datasets carry are taken over, unless ``num_classes`` is another number.

    Raises:
        ValueError: If there are no clients, a client has no samples, shapes differ, a label is out of range, the
            data say another number of classes, labels are words at some clients alone, or names of classes differ.
        TypeError: If items, images or labels are of a type that cannot be used.
    """
    if num_classes is not None and data.num_classes not in (None, num_classes):
        raise ValueError(
            f"num_classes is {num_classes} but the data has {data.num_classes} classes: make them equal, or leave "
            "num_classes out"
        )
    num_classes = num_classes or data.num_classes
    declared = num_classes is not None or data.classes is not None
    _check_counts(data)
    check_integer("num_classes", num_classes, optional=True)
    sets = {"training": data.train, "test": data.test if any(map(length, data.test)) else []}
    sets["validation"] = [] if data.server_validation is None else [data.server_validation]
    stores = {part: make_store(datasets, size=image_size) for part, datasets in sets.items() if len(datasets)}
    public = None if data.public is None else make_store([data.public], labelled=False, size=image_size)
    named = num_classes or (None if data.classes is None else len(data.classes))
    given = {part: _known_labels(part, store, named) for part, store in stores.items()}
    words = _words(given)
    warn_of_look_alikes("labels", words or ())
    classes = data.classes or words or _carried(sets, num_classes)
    numbers = {word: number for number, word in enumerate(classes or ())} if words else None
    found = {part: _numbered(store, given[part], numbers) for part, store in stores.items()}
    known = [(client, labels) for part in found.values() for client, labels in enumerate(part) if len(labels)]
    first = known[0][1]
    check_label_kinds(known)
    multilabel = first.ndim == 2
    if classes is not None:
        num_classes = num_classes or len(classes)
        class_names("the data", classes, num_classes)
        if num_classes == 1 and not multilabel:
            raise ValueError(
                f"all images are of one class ({classes[0]}), and nothing can be learned: add images of another; "
                "where an image has a label or not, give vectors of zeros and ones (a list of columns of a table)"
            )
    if multilabel:
        _warn_of_one_hot(found["training"])
    elif not declared and (num_classes is None or words):
        _check_inferred_classes(found)
    if num_classes is None:
        num_classes = first.shape[1] if multilabel else int(max(labels.max() for _, labels in known)) + 1
    if multilabel and first.shape[1] != num_classes:
        raise ValueError(
            f"labels have {first.shape[1]} entries but num_classes is {num_classes}: make the two equal, or leave "
            "num_classes out"
        )
    for part, clients in found.items():
        for client, labels in enumerate(clients):
            who = "the server" if part == "validation" else f"client {client}"
            check_labels(f"{who} has the {part} label", labels, num_classes, multilabel)
    for store in stores.values():
        if isinstance(store, MapStore) and not multilabel:
            store.classes = store.classes or range(num_classes)
    image = _common_kind(stores, image_size)
    test, validation = stores.get("test"), stores.get("validation")
    names = None if classes is None else list(classes)
    return Checked(stores["training"], test, public, validation, num_classes, names, multilabel, image)


def _check_inferred_classes(found: Mapping[str, list[Tensor]]) -> None:
    """Refuse labels from which the number of classes is inferred, where they are no numbering of classes.

    Raises:
        ValueError: If all training images are of one class, or most of the classes would have no image.
    """
    trained = torch.cat(found["training"]).unique().tolist()
    if len(trained) == 1:
        raise ValueError(
            f"all training images have the label {trained[0]}, and nothing can be learned from one class: add images "
            "of another, or set num_classes if other clients have them. Where an image has a label or not, give float "
            "vectors (1,) of zeros and ones"
        )
    used = torch.cat([labels for clients in found.values() for labels in clients]).unique().tolist()
    count = used[-1] + 1
    # Negative labels are refused later, with the client that has them.
    if used[0] >= 0 and count - len(used) > len(used):
        shown = abbreviated(list(map(str, used)))
        raise ValueError(
            f"the labels go up to {used[-1]}, which makes {count} classes, and {count - len(used)} of them have no "
            f"image (there are {shown}): number the classes from 0 without gaps, take out images whose label means "
            f"that they have none (often 255), or set num_classes={count} if this is meant"
        )


def _warn_of_one_hot(clients: Sequence[Tensor]) -> None:
    """Warn of vectors that may be one-hot classes, since they are trained as labels that do not exclude one another."""
    labels = torch.cat(list(clients))
    images, count = labels.shape
    if images > 1 and count > 1 and bool(((labels == 0) | (labels == 1)).all()) and bool((labels.sum(1) == 1).all()):
        warnings.warn(
            f"each of the {images} training images has exactly one of {count} labels, and they are trained as labels "
            "of which an image may have several: if they are one-hot classes, give the classes (labels.argmax(1))",
            stacklevel=3,
        )


def _common_kind(stores: Mapping[str, Store], size: int | None) -> Kind:
    """What all images are, by the first one of each client; tensors were compared when the store was made."""
    image = None
    for part, store in stores.items():
        for client in [0] if isinstance(store, TensorStore) else np.flatnonzero(store.sizes).tolist():
            got = first_image(store, client, size)
            check_kind(client, got, image or got, f"{part} data: ")
            image = got
    assert image is not None
    return image


def _check_counts(data: FederatedData) -> None:
    """Refuse missing clients, empty ones, and names that are not one for each."""
    if not len(data.train):
        raise ValueError("there are no clients: FederatedData.train is empty, give one dataset per client")
    if len(data.test) not in (0, len(data.train)):
        raise ValueError(
            f"there are {len(data.train)} training sets and {len(data.test)} test sets: give one of each per client, "
            "or test=[] to leave out evaluation"
        )
    for client, dataset in enumerate(data.train):
        if length(dataset) == 0:
            raise ValueError(f"client {client} has no training samples: leave the client out or give it some")
    names = data.client_names
    if names is not None and (len(names) != len(data.train) or len(set(names)) < len(names)):
        raise ValueError(
            f"client_names has {len(names)} names, {len(set(names))} of them different, for {len(data.train)} clients: "
            "give each client a name of its own, or leave them out"
        )
    for name, server_set in (("public", data.public), ("server_validation", data.server_validation)):
        if server_set is not None and length(server_set) == 0:
            raise ValueError(f"the {name} set has no samples: give some, or None")


def first_image(store: Store, client: int = 0, size: int | None = None) -> Kind:
    """Shape and type of a client's first image, once it is resized to ``size``."""
    if isinstance(store, MapStore):
        return kind(store.take(torch.tensor([client]), torch.tensor([0]))[0])
    shape, dtype = kind(store.images)
    return (shape if size is None or dtype != torch.uint8 else (*shape[:-2], size, size)), dtype


def _known_labels(part: str, store: Store, num_classes: int | None) -> list[Labels]:
    """Labels of every client, those that datasets declare, or else read sample by sample within SCAN_LIMIT."""
    if isinstance(store, TensorStore):
        return [*store.client_labels()]
    scan, found = sum(store.sizes) <= SCAN_LIMIT, list[Labels]()
    with isolated_randomness():
        for client, dataset in enumerate(store.datasets):
            labels, size = declared_labels(dataset), store.sizes[client]
            if size and labels is not None and not isinstance(resolved(dataset)[0], ImageSet):
                words = isinstance(_label(dataset, client, 0), str)
                labels = labels if words == isinstance(labels, list) else None  # not what the items have
            if labels is None:
                if not scan and num_classes is None:
                    raise ValueError(
                        f"client {client} declares no labels, and the {sum(store.sizes)} {part} samples are too many "
                        "to read them all: give num_classes, or classes where they are words, or its dataset an "
                        "attribute targets"
                    )
                read = [_label(dataset, client, index) for index in range(size if scan else min(1, size))]
                words = any(isinstance(label, str) for label in read)
                labels = read if words else torch.stack(read) if read else torch.empty(0, dtype=torch.int64)
            found.append(labels)
    return found


def _label(dataset: Dataset[Any], client: int, index: int) -> Any:  # noqa: ANN401
    """The label of a sample: a word or a tensor."""
    try:
        label = entries(read_item(dataset, index, f"client {client}"), labelled=True)[1]
        return label if isinstance(label, str) else as_labels(label, of_one_image=True)
    except TypeError as error:
        raise TypeError(f"client {client}, sample {index}: {error}") from None


def _words(found: Mapping[str, list[Labels]]) -> list[str] | None:
    """All words among the labels, sorted; None where all are numbers."""
    clients = [(part, client, one) for part, own in found.items() for client, one in enumerate(own) if len(one)]
    words = {
        label for _, _, labels in clients if isinstance(labels, list) for label in labels if isinstance(label, str)
    }
    for part, client, labels in clients if words else ():
        wrong = next((label for label in labels if not isinstance(label, str)), None)
        if wrong is not None:
            raise ValueError(
                f"client {client} has the {part} label {torch.as_tensor(wrong).tolist()}, and others are words, such "
                f"as {min(words)!r}: give words to all, or numbers to all"
            )
    return sorted(words) or None


def _carried(sets: Mapping[str, Sequence[Any]], num_classes: int | None) -> list[str] | None:
    """The names of classes that Hugging Face's datasets carry, where they are as many as there are classes."""
    found: dict[str, list[str]] = {}
    for part, datasets in sets.items():
        for client, dataset in enumerate(datasets):
            features = getattr(resolved(dataset)[0], "features", None)
            for key in LABEL_KEYS:
                feature = features.get(key) if isinstance(features, Mapping) else None
                names = getattr(feature, "names", None)
                found |= {} if names is None else {f"client {client}: the {part} set": list(names)}
    for who, names in found.items():
        first = next(iter(found))
        if names != found[first]:
            raise ValueError(
                f"{who} has the classes {names}, and {first} has {found[first]}: number them alike, or give words as "
                "labels"
            )
    names = next(iter(found.values()), None)
    return names if names and num_classes in (None, len(names)) else None


def _numbered(store: Store, given: list[Labels], numbers: dict[str, int] | None) -> list[Tensor]:
    """The labels of every client, with ``numbers`` for words; a store that reads item by item is told of both."""
    if isinstance(store, MapStore):
        store.classes = numbers
        for client, labels in enumerate(given):
            if isinstance(labels, list):
                labels = torch.stack([store.number(client, word) for word in labels])
            given[client] = labels
            store.known[client] = labels if len(labels) == store.sizes[client] else None
    return [labels for labels in given if isinstance(labels, Tensor)]


def check_labels(what: str, labels: Tensor, num_classes: int, multilabel: bool) -> None:
    """Refuse classes outside of 0..K-1, and values of vectors outside of [0, 1]; ``what`` begins the message."""
    top = 1 if multilabel else num_classes - 1
    wrong = labels[~((labels >= 0) & (labels <= top))]
    if len(wrong):
        remedy = "correct the label" + ("" if multilabel else f" or num_classes (now {num_classes})")
        raise ValueError(f"{what} {wrong[0].item()}, outside 0..{top}: {remedy}")
