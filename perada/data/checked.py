# SPDX-License-Identifier: Apache-2.0
"""Checks of the clients' and the server's datasets, and the facts collected on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError, check_integer
from perada.core.text import dtype_name
from perada.data.batches.datasets import (
    Resolve,
    TensorFormat,
    check_label_formats,
    check_same_format,
    resized_format,
    resolve_subset,
    tensor_format,
)
from perada.data.batches.samples import PUBLIC_SET, MapStore, Store, TensorStore, make_store
from perada.data.checks.classes import (
    add_absent_classes,
    check_classes,
    check_stray_labels,
    choose_task,
    fit_task,
    warn_of_unknown_labels,
)
from perada.data.checks.clients import compare_clients
from perada.data.checks.copies import check_no_copies, image_hashes
from perada.data.checks.float_images import warn_of_raw_floats
from perada.data.checks.targets import check_own_positions, set_up_checks_on_use
from perada.data.federated import FederatedData, warn_of_look_alikes
from perada.data.labels import (
    VALIDATION_SET,
    check_word_labels,
    collect_words,
    hugging_face_classes,
    known_labels,
    name_owner,
    replace_words,
)
from perada.tasks import Task
from perada.tasks.geometry import Size

COUNT_LIMIT = 200_000
"""Numbers of samples by client and class that a run keeps, at most."""


@dataclass
class CheckedData:
    """The checked data: a store for each part, and the facts about the task."""

    train: Store
    test: Store | None
    public: Store | None
    server_validation: Store | None
    num_classes: int
    classes: list[str] | None
    task: Task
    image_format: TensorFormat
    held_out: Sequence[Dataset[Any]] = ()
    """Training images that each client holds out, and that it neither trains nor is scored on."""

    @property
    def prepared_size(self) -> Size | None:
        """Height and width of the prepared images; None for texts and other samples that are not images."""
        # The option image_size may differ from it, since only uint8 images are resized.
        shape = self.image_format[0]
        if len(shape) != 3:
            return None
        return shape[1], shape[2]

    def check_channels(self, channels: int) -> None:
        """Raise a ValueError for images that do not fit the backbone's channels; a uint8 channel can be repeated."""
        formats = {"training": self.image_format}
        if self.public is not None:
            formats["public"] = first_image_format(self.public)
        for name, (shape, dtype) in formats.items():
            if len(shape) != 3 or shape[0] == channels:
                continue
            if shape[0] != 1 or dtype != torch.uint8:
                raise ValueError(
                    f"{name} images are {dtype_name(dtype)} of shape {shape}, but the backbone takes {channels} "
                    f"channels: convert them to {channels} (a single uint8 channel is repeated), or pass your own "
                    f"network for {shape[0]} as backbone"
                )

    def check_overlap(self, privacy_options: str) -> None:
        """Raise if the server has an image that is byte-identical to a client's. Reads all images.

        A client's images are its training images, those that it holds out of them, and its test images: the ledgers do
        not account for what the server does with them.

        Images are compared as they are stored, before they are resized or augmented, with their shape and dtype; grey
        uint8 images (H, W) and (1, H, W) are equal. Datasets that draw at random draw the same for all images. A copy
        that differs by a single pixel is another image.

        Args:
            privacy_options: The options that request privacy, for the message.

        Raises:
            OptionError: If the public or the validation set of the server has an image of a client.
        """
        server_images: dict[bytes, str] = {}
        for name, store in ((PUBLIC_SET, self.public), (VALIDATION_SET, self.server_validation)):
            if store is None:
                continue
            for index, image_hash in enumerate(image_hashes(store)):
                server_images.setdefault(image_hash, f"image {index} of {name}")
        if not server_images:
            return
        check_no_copies(self.train, "", server_images, privacy_options)
        if self.held_out:
            check_no_copies(make_store(self.held_out), "held-out ", server_images, privacy_options)
        if self.test is not None:
            check_no_copies(self.test, "test ", server_images, privacy_options)

    def extreme_tokens(self) -> list[int]:
        """Return the smallest and largest tokens of the texts in memory, of each set that a model will see."""
        extremes = set()
        for store in (self.train, self.test, self.public):
            if isinstance(store, TensorStore) and len(store.images):
                smallest, largest = store.images.aminmax()
                extremes |= {int(smallest), int(largest)}
        return sorted(extremes)

    def class_counts(self) -> dict[str, list[list[int]]]:
        """Count the samples (M, K) of each client and class, or with several labels, the samples that have each.

        Returns:
            The counts of ``train`` and ``test``, without a part whose labels are not all known or that would take more
            than ``COUNT_LIMIT`` numbers.
        """
        counts_of_parts: dict[str, list[list[int]]] = {}
        if not self.task.has_classes:
            return counts_of_parts
        for part, store in (("train", self.train), ("test", self.test)):
            if store is None or len(store.sizes) * self.num_classes > COUNT_LIMIT:
                continue
            known_labels = [labels for labels in store.client_labels() if labels is not None]
            if len(known_labels) == len(store.sizes):
                counts_of_parts[part] = [self._count_classes(labels) for labels in known_labels]
        return counts_of_parts

    def _count_classes(self, labels: Tensor) -> list[int]:
        """Count the samples (K,) of each class in labels (N,), or of each label in (N, K)."""
        class_counts: list[int] = self.task.class_counts(labels, self.num_classes).tolist()
        return class_counts


def check(
    data: FederatedData,
    num_classes: int | None = None,
    image_size: int | None = None,
    resolve: Resolve = resolve_subset,
    task: Task | None = None,
    network_outputs: int | None = None,
) -> CheckedData:
    """Open and check the data.

    Word labels become their index in ``data.classes``. If these are not given, the classes are the sorted words of all
    clients. The class names of Hugging Face's datasets are used unless ``num_classes`` is another number.

    Args:
        data: The data.
        num_classes: Number of classes K; None for that of the data, or else for what the labels show.
        image_size: Height and width to resize uint8 images to; None keeps them.
        resolve: Finds the dataset behind a Subset.
        task: What is learnt from the labels; None to choose it from the labels.
        network_outputs: Number of outputs of the network. If the number of classes is inferred from labels, and at
            least half of the outputs have one, the other outputs are classes too.

    Raises:
        ValueError: If there are no clients, a client has no samples, shapes differ, a label is out of range, the
            data have another number of classes, only some clients have words as labels, or class names differ.
        TypeError: If items, images or labels have an unsupported type.
    """
    if num_classes is not None and data.num_classes not in (None, num_classes):
        raise ValueError(
            f"num_classes is {num_classes} but the data has {data.num_classes} classes: make them equal, or leave "
            "num_classes out"
        )
    num_classes = num_classes or data.num_classes
    is_declared = num_classes is not None or data.classes is not None
    _check_counts(data, resolve)
    check_integer("num_classes", num_classes, optional=True)
    sets = _labelled_sets(data, resolve)
    stores: dict[str, Store] = {}
    for part, datasets in sets.items():
        stores[part] = make_store(datasets, size=image_size, resolve=resolve, owner=name_owner(part, "{client}"))
    public = None
    if data.public is not None:
        public = make_store([data.public], labelled=False, size=image_size, resolve=resolve, owner=PUBLIC_SET)

    declared_count = num_classes
    if not num_classes and data.classes is not None:
        declared_count = len(data.classes)
    raw_labels = {part: known_labels(part, store, declared_count, resolve) for part, store in stores.items()}
    words = collect_words(raw_labels)
    warn_of_look_alikes("labels", words or ())
    if words and data.classes is None:
        check_word_labels(raw_labels, data.client_names)
    classes = data.classes or words or hugging_face_classes(sets, num_classes, resolve)
    class_numbers = None
    if words:
        class_numbers = {word: number for number, word in enumerate(classes or ())}
    labels_of_parts = {}
    for part, store in stores.items():
        labels_of_parts[part] = replace_words(store, raw_labels[part], class_numbers)
    task = choose_task(task, _first_labels(labels_of_parts))
    names_are_known = is_declared or classes is not None
    compare_clients(labels_of_parts, stores, task, data, resolve, is_declared, names_are_known)
    # Class names of Hugging Face fix the number of classes; labels that are words do not.
    infers_classes = not is_declared and (classes is None or words is not None)
    # A network may have outputs for classes that no label shows.
    compared_outputs = None
    if infers_classes and task.exclusive and words is None:
        compared_outputs = network_outputs
    if compared_outputs is not None:
        check_stray_labels(labels_of_parts, compared_outputs, task, sets)
    num_classes = check_classes(labels_of_parts, classes, num_classes, task, infers_classes, sets)
    if compared_outputs is not None:
        num_classes = add_absent_classes(num_classes, compared_outputs)
    task = fit_task(task, labels_of_parts, num_classes, sum(stores["training"].sizes))
    warn_of_unknown_labels(task, labels_of_parts["training"], classes)
    check_own_positions(stores, sets, task, resolve)
    for store in stores.values():
        set_up_checks_on_use(store, task, num_classes)
    warn_of_raw_floats({**stores, "public": public})
    checked = CheckedData(
        train=stores["training"],
        test=stores.get("test"),
        public=public,
        server_validation=stores.get("validation"),
        num_classes=num_classes,
        classes=None if classes is None else list(classes),
        task=task,
        image_format=_common_format(stores, image_size),
    )
    _check_prepared_size(checked)
    return checked


def _labelled_sets(data: FederatedData, resolve: Resolve) -> dict[str, Sequence[Dataset[Any]]]:
    """Return the datasets of each part of the data that has labels, without parts that have no images."""
    sets = {"training": data.train}
    if any(len(resolve(dataset).rows) for dataset in data.test):
        sets["test"] = data.test
    if data.server_validation is not None:
        sets["validation"] = [data.server_validation]
    return sets


def _check_prepared_size(checked: CheckedData) -> None:
    """Raise an OptionError if a task of positions gets samples without a size, or of another size than it needs."""
    task = checked.task
    if not task.has_positions:
        return
    if checked.prepared_size is None:
        shape, _ = checked.image_format
        raise OptionError(
            f"task={task} predicts positions in images (channels, height, width), but the samples have the shape "
            f"{shape}; choose another task",
            name="task",
            value=task,
        )
    task.check_prepared_size(checked.prepared_size)


def _first_labels(labels_of_parts: Mapping[str, list[Tensor]]) -> Tensor:
    """Return the labels (N, ...) of the first client that has some, after checking that all have the same format."""
    nonempty = []
    for labels_of_clients in labels_of_parts.values():
        # size() is several times faster than len(), which torch wraps in Python.
        nonempty += [(client, labels) for client, labels in enumerate(labels_of_clients) if labels.size(0)]
    check_label_formats(nonempty)
    _, first_labels = nonempty[0]
    return first_labels


def _common_format(stores: Mapping[str, Store], size: int | None) -> TensorFormat:
    """Check that the first images of all clients have the same format, and return it."""
    common = None
    for part, store in stores.items():
        # The tensors of all clients were compared when the store was made.
        clients = [0]
        if isinstance(store, MapStore):
            clients = np.flatnonzero(store.sizes).tolist()
        for client in clients:
            image_format = first_image_format(store, client, size)
            check_same_format(name_owner(part, client), image_format, common or image_format)
            common = image_format
    assert common is not None
    return common


def _check_counts(data: FederatedData, resolve: Resolve) -> None:
    """Raise a ValueError for missing or empty clients, or names that do not match the clients."""
    if not len(data.train):
        raise ValueError("there are no clients: FederatedData.train is empty; pass one dataset per client")
    if len(data.test) not in (0, len(data.train)):
        raise ValueError(
            f"there are {len(data.train)} training sets and {len(data.test)} test sets: pass one of each per client, "
            "or test=[] to skip evaluation"
        )
    for client, dataset in enumerate(data.train):
        if len(resolve(dataset).rows) == 0:
            raise ValueError(f"client {client} has no training samples: leave the client out or add some")
    names = data.client_names
    if names is not None and (len(names) != len(data.train) or len(set(names)) < len(names)):
        raise ValueError(
            f"client_names has {len(names)} names, {len(set(names))} of them distinct, for {len(data.train)} clients: "
            "pass a unique name for each client, or leave client_names out"
        )
    for name, server_set in ((PUBLIC_SET, data.public), (VALIDATION_SET, data.server_validation)):
        if server_set is not None and len(resolve(server_set).rows) == 0:
            raise ValueError(f"{name} has no samples: add some, or pass None")


def first_image_format(store: Store, client: int = 0, size: int | None = None) -> TensorFormat:
    """Return the format of a client's first image after it is resized to ``size``."""
    if isinstance(store, MapStore):
        image, _ = store.take(torch.tensor([client]), torch.tensor([0]))
        return tensor_format(image)
    return resized_format(tensor_format(store.images), size)
