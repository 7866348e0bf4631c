# SPDX-License-Identifier: Apache-2.0
"""Datasets of the clients and the server, and the checks of what they hold."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from perada.core.checks import check_whole
from perada.data.batches.samples import (
    Kind,
    MapStore,
    Store,
    TensorStore,
    as_labels,
    check_kind,
    check_label_kind,
    isolated_randomness,
    kind,
    length,
    make_store,
)
from perada.data.sets.base import ImageSet, class_names

_CHUNK = 4096  # images of a tensor gathered at a time


def public_overlap(train: Store, public: Store) -> tuple[int, int, int] | None:
    """Find the first training image that is in the public set too, the same to the last byte.

    Images are compared as they are stored, before they are resized or augmented, with their shape and type; grey uint8
    images (H, W) and (1, H, W) are alike. What a dataset draws at random is drawn alike for all. A changed copy of an
    image, by as little as one pixel, is another image.

    Args:
        train: The clients' images.
        public: The server's images.

    Returns:
        The client, the index among its images, and the index among the public ones; None if no image is in both.
    """
    known: dict[bytes, int] = {}
    for index, digest in enumerate(_digests(public)):
        known.setdefault(digest, index)
    digests = _digests(train)
    for client, size in enumerate(train.sizes):
        for index, digest in enumerate(islice(digests, size)):
            if digest in known:
                return client, index, known[digest]
    return None


def check_overlap(train: Store, public: Store, name: str = "public") -> None:
    """Refuse a set of the server's that holds a training image."""
    found = public_overlap(train, public)
    if found is not None:
        client, index, other = found
        raise ValueError(
            f"image {index} of client {client} is also image {other} of the {name} set: the server would distil by a "
            f"private image, which the ledgers do not count. Take such images out of the {name} set; where it is a "
            f"fraction of a dataset that holds an image twice, give another set as {name}"
        )


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
    kind = f"{tuple(images.shape[1:])} {images.dtype} ".encode()
    for row in images.reshape(len(images), -1).contiguous().cpu().view(torch.uint8).numpy():
        yield hashlib.blake2b(kind + row.tobytes(), digest_size=16).digest()


# Labels of datasets that have no `targets` are found by reading every sample, up to this many; beyond, they are
# checked as they are used.
SCAN_LIMIT = 50_000
COUNT_LIMIT = 200_000
"""Numbers of samples by client and class that a run keeps, at most."""


@dataclass
class FederatedData:
    """One dataset per client, and what the server has.

    Args:
        train: One map-style dataset per client, items (image, label). Images are uint8 (Ch, H, W) or (H, W), PIL, or
            floating point that is ready for the model; texts are int64 tokens (L,). Labels are classes, or float
            vectors (K,) for several labels. Items may be dicts instead, with ``image``, ``img`` or ``pixel_values`` and
            ``label`` or ``labels``, and labels words, which are numbered in sorted order over all clients.
        test: One per client, or an empty list for no evaluation. A client's test set may be empty.
        public: Images without labels, for the server. Of items (image, anything) the second part is never looked at.
        server_validation: Labelled data on the server, for an optional early stop of the distillation.
        num_classes: Inferred from the labels when None.
        classes: Names of the classes, in the order of their numbers; None takes labels that are words.
        client_names: Names of the clients, in the order of ``train``.
    """

    train: Sequence[Dataset[Any]]
    test: Sequence[Dataset[Any]] = field(default_factory=list)
    public: Dataset[Any] | None = None
    server_validation: Dataset[Any] | None = None
    num_classes: int | None = None
    classes: Sequence[str] | None = None
    client_names: Sequence[str] | None = None


@dataclass
class Checked:
    """What the checks found: a store for each part, and the facts about the task."""

    train: Store
    test: Store | None
    public: Store | None
    server_validation: Store | None
    num_classes: int
    multilabel: bool
    image: Kind

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
        """Refuse images of the server's that clients train on."""
        for name, store in (("public", self.public), ("server_validation", self.server_validation)):
            if store is not None:
                check_overlap(self.train, store, name)

    def extreme_tokens(self) -> list[int]:
        """The least and the greatest token of the texts that are in memory, of each set that a model will see."""
        stores = (self.train, self.test, self.public)
        texts = [store.images for store in stores if isinstance(store, TensorStore) and len(store.images)]
        return sorted({int(token) for images in texts for token in images.aminmax()})

    def class_counts(self) -> dict[str, list[list[int]]]:
        """Images (M, K) of each client and class by ``train`` and ``test``, where no image must be read to know."""
        stores = {"train": self.train, "test": self.test}
        counts = {part: store and class_counts(store, self.num_classes) for part, store in stores.items()}
        return {part: rows for part, rows in counts.items() if rows}


def check(data: FederatedData, num_classes: int | None = None, image_size: int | None = None) -> Checked:
    """Open the data and verify them; uint8 images are resized to ``image_size``, unless it is None.

    The number of classes K is ``num_classes``, or what the data say, or what is found in the labels.

    Raises:
        ValueError: If there are no clients, a client has no samples, shapes differ, a label is out of range, or the
            data say another number of classes.
        TypeError: If images or labels are of a type that cannot be used.
    """
    if num_classes is not None and data.num_classes not in (None, num_classes):
        raise ValueError(
            f"num_classes is {num_classes} but the data has {data.num_classes} classes: make them equal, or leave "
            "num_classes out"
        )
    num_classes = num_classes or data.num_classes
    _check_counts(data)
    check_whole("num_classes", num_classes, optional=True)
    train = make_store(data.train, size=image_size)
    test = make_store(data.test, size=image_size) if any(map(length, data.test)) else None
    validation = None if data.server_validation is None else make_store([data.server_validation], size=image_size)
    public = None if data.public is None else make_store([data.public], labelled=False, size=image_size)
    parts = {"training": train, "test": test, "validation": validation}
    image, found = None, {}
    for part, store in parts.items():
        if store is not None:
            image = _check_shapes(part, store, image, image_size)
            found[part] = _known_labels(part, store, num_classes)
    assert image is not None
    multilabel = _is_multilabel(found)
    if data.classes is not None:
        num_classes = num_classes or len(data.classes)
        class_names("the data", data.classes, num_classes)
        if num_classes == 1 and not multilabel:
            raise ValueError(
                f"all images are of one class ({data.classes[0]}), and nothing can be learned: add images of another; "
                "where an image has a label or not, give vectors of zeros and ones (a list of columns of a table)"
            )
    if num_classes is None:
        known = [labels for clients in found.values() for labels in clients if len(labels)]
        num_classes = known[0].shape[1] if multilabel else int(max(labels.max() for labels in known)) + 1
    for part, labels in found.items():
        _check_labels(part, labels, num_classes, multilabel)
    for store in parts.values():
        if isinstance(store, MapStore) and not multilabel:
            store.num_classes = num_classes
    return Checked(train, test, public, validation, num_classes, multilabel, image)


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


def _check_shapes(part: str, store: Store, expected: Kind | None, size: int | None) -> Kind | None:
    """Compare the first image of every client; tensors were compared when the store was made."""
    clients = [0] if isinstance(store, TensorStore) else np.flatnonzero(store.sizes).tolist()
    for client in clients:
        got = first_image(store, client, size)
        check_kind(client, got, expected or got, f"{part} data: ")
        expected = got
    return expected


def _known_labels(part: str, store: Store, num_classes: int | None) -> list[Tensor]:
    """Labels of every client, read from the sets' tensors or ``targets``, else sample by sample within SCAN_LIMIT."""
    if isinstance(store, TensorStore):
        return store.client_labels()
    scan = sum(store.sizes) <= SCAN_LIMIT
    labels = []
    with isolated_randomness():
        for client, dataset in enumerate(store.datasets):
            known = _targets(dataset)
            if known is None:
                if not scan and num_classes is None:
                    raise ValueError(
                        f"client {client} declares no labels, and the {sum(store.sizes)} {part} samples are too many "
                        "to read them all: give num_classes, or its dataset an attribute targets"
                    )
                count = store.sizes[client] if scan else min(1, store.sizes[client])
                read = [label for index in range(count) if (label := store.item(client, index)[1]) is not None]
                known = torch.stack(read) if read else torch.empty(0, dtype=torch.int64)
            labels.append(known)
    return labels


def class_counts(store: Store, num_classes: int) -> list[list[int]] | None:
    """Samples (M, K) of each client and class; with several labels a sample, those that have each.

    None where no sample's label is known before it is read, or where these would be more than ``COUNT_LIMIT`` numbers.
    """
    if len(store.sizes) * num_classes > COUNT_LIMIT:
        return None
    clients = store.client_labels() if isinstance(store, TensorStore) else list(map(_targets, store.datasets))
    counts = []
    for labels in clients:
        if labels is None:
            return None
        one = labels.long().sum(0) if labels.ndim > 1 else labels.bincount(minlength=num_classes)
        counts.append(one.tolist())
    return counts


def _targets(dataset: Dataset[Any]) -> Tensor | None:
    """The labels a dataset declares, as torchvision's and image sets do, without an image; None if it declares none."""
    if type(dataset) is Subset:
        inner = _targets(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    targets = dataset.labels if isinstance(dataset, ImageSet) else getattr(dataset, "targets", None)
    if targets is None or getattr(dataset, "target_transform", None) is not None:
        return None
    labels = as_labels(targets)
    return labels if len(labels) == length(dataset) else None


def _is_multilabel(found: dict[str, list[Tensor]]) -> bool:
    """Whether labels are vectors, for all clients alike."""
    first = found["training"][0]
    for clients in found.values():
        for client, labels in enumerate(clients):
            if len(labels):
                check_label_kind(client, labels, first)
    return first.ndim == 2


def _check_labels(part: str, clients: list[Tensor], num_classes: int, multilabel: bool) -> None:
    """Refuse classes outside 0..K-1, and multi-label vectors of another width or with values outside [0, 1]."""
    if multilabel and clients[0].shape[1] != num_classes:
        raise ValueError(
            f"{part} labels have {clients[0].shape[1]} entries but num_classes is {num_classes}: "
            "make the two equal, or leave num_classes out"
        )
    top = 1 if multilabel else num_classes - 1
    for client, labels in enumerate(clients):
        wrong = ~((labels >= 0) & (labels <= top))
        if wrong.any():
            who = "the server" if part == "validation" else f"client {client}"
            raise ValueError(
                f"{who} has the {part} label {labels[wrong][0].item()}, outside 0..{top}: "
                "correct the label" + ("" if multilabel else f" or num_classes (now {num_classes})")
            )
