# SPDX-License-Identifier: Apache-2.0
"""Checks of the clients' and the server's datasets, and the facts collected on the way."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError, check_integer
from perada.core.states import bytes_of
from perada.core.text import abbreviated, dtype_name
from perada.data.batches.datasets import (
    Resolve,
    TensorFormat,
    check_label_formats,
    check_same_format,
    format_text,
    isolated_randomness,
    location_of,
    resized_format,
    resolve_subset,
    tensor_format,
)
from perada.data.batches.samples import PUBLIC_SET, MapStore, Store, TensorStore, make_store
from perada.data.federated import FederatedData, warn_of_look_alikes
from perada.data.float_images import warn_of_raw_floats
from perada.data.labels import (
    SCAN_LIMIT,
    VALIDATION_SET,
    check_word_labels,
    collect_words,
    hugging_face_classes,
    known_labels,
    name_owner,
    read_label,
    replace_words,
)
from perada.data.mask_checks import MaskCounter, MaskValues, check_masks_of_clients, find_suspects
from perada.data.sets.base import ImageSet, class_names
from perada.data.sets.derived import DerivedSet
from perada.data.sets.label_numbers import find_shift
from perada.data.value_hashes import hash_of_content
from perada.tasks import Task, describe_labels, task_of_labels
from perada.tasks.geometry import Size

MASKS_COMPARED = 20
"""Masks of a client that are compared with those of others, if they are read one by one."""
COUNT_LIMIT = 200_000
"""Numbers of samples by client and class that a run keeps, at most."""
_CHUNK = 4096  # images of a tensor that are gathered at once


def _image_hashes(store: Store) -> Iterator[bytes]:
    """Yield a hash (128 bits) of each image, client after client."""
    if isinstance(store, MapStore):
        for client, size in enumerate(store.sizes):
            for index in range(size):
                with isolated_randomness():
                    image, _ = store.item(client, index, resize=False)
                yield from _hash_each(image.unsqueeze(0))
        return
    for rows in torch.split(store.table, _CHUNK):
        yield from _hash_each(store.images[rows.to(store.images.device)])


def _hash_each(images: Tensor) -> Iterator[bytes]:
    """Yield a hash of each of the images (N, ...), which covers shape and dtype."""
    if not len(images):
        return
    shape = tuple(images.shape[1:])
    content = bytes_of(images)
    bytes_per_image = content.nbytes // len(images)
    for start in range(0, content.nbytes, bytes_per_image):
        yield hash_of_content(shape, images.dtype, content[start : start + bytes_per_image]).digest()


def _check_no_copies(store: Store, split_name: str, server_images: Mapping[bytes, str], options: str) -> None:
    """Raise an OptionError if the server has one of the clients' images.

    Args:
        store: The clients' images.
        split_name: Their name in the message, such as ``"test "``.
        server_images: Names of the server's images by their hash.
        options: The options that request privacy, for the message.
    """
    hashes = _image_hashes(store)
    for client, size in enumerate(store.sizes):
        for index, image_hash in enumerate(islice(hashes, size)):
            if image_hash in server_images:
                raise OptionError(
                    f"{options}: {split_name}image {index} of client {client} is also {server_images[image_hash]}: the "
                    "ledgers do not account for what the server does with a client's image. Remove such images from "
                    "the server's set, or use a different set",
                    name=options,
                )


@dataclass
class Checked:
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

    def check_overlap(self, options: str) -> None:
        """Raise if the server has an image that is byte-identical to a client's. Reads all images.

        A client's images are its training images, those that it holds out of them, and its test images: the ledgers do
        not account for what the server does with them.

        Images are compared as they are stored, before they are resized or augmented, with their shape and dtype; grey
        uint8 images (H, W) and (1, H, W) are equal. Datasets that draw at random draw the same for all images. A copy
        that differs by a single pixel is another image.

        Args:
            options: The options that request privacy, for the message.

        Raises:
            OptionError: If the public or the validation set of the server has an image of a client.
        """
        server_images: dict[bytes, str] = {}
        for name, store in ((PUBLIC_SET, self.public), (VALIDATION_SET, self.server_validation)):
            if store is None:
                continue
            for index, image_hash in enumerate(_image_hashes(store)):
                server_images.setdefault(image_hash, f"image {index} of {name}")
        if not server_images:
            return
        _check_no_copies(self.train, "", server_images, options)
        if self.held_out:
            _check_no_copies(make_store(self.held_out), "held-out ", server_images, options)
        if self.test is not None:
            _check_no_copies(self.test, "test ", server_images, options)

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
) -> Checked:
    """Open and check the data.

    Labels that are words become their index in ``data.classes``, or in the sorted words of all clients, which then are
    the classes. The class names of Hugging Face's datasets are used unless ``num_classes`` is another number.

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
    nonempty = []
    for labels_of_clients in labels_of_parts.values():
        # size() is several times faster than len(), which torch wraps in Python.
        nonempty += [(client, labels) for client, labels in enumerate(labels_of_clients) if labels.size(0)]
    check_label_formats(nonempty)
    _, first_labels = nonempty[0]
    task = _checked_task(task, first_labels)
    names_are_known = is_declared or classes is not None
    _compare_clients(labels_of_parts, stores, task, data, resolve, is_declared, names_are_known)
    # Class names of Hugging Face fix the number of classes; labels that are words do not.
    infers_classes = not is_declared and (classes is None or words is not None)
    if infers_classes and task.exclusive and words is None and network_outputs is not None:
        _check_stray_labels(labels_of_parts, network_outputs, task, sets)
    num_classes = _check_classes(labels_of_parts, classes, num_classes, task, infers_classes, sets)
    if infers_classes and task.exclusive and words is None and network_outputs is not None:
        num_classes = _with_absent_classes(num_classes, network_outputs)
    task = _fitted_task(task, labels_of_parts, num_classes, sum(stores["training"].sizes))
    _warn_of_unknown_labels(task, labels_of_parts["training"], classes)
    _check_own_positions(stores, sets, task, resolve)
    for store in stores.values():
        _set_up_checks_on_use(store, task, num_classes)
    warn_of_raw_floats({**stores, "public": public})
    checked = Checked(
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


def _check_classes(
    labels_of_parts: Mapping[str, list[Tensor]],
    classes: Sequence[str] | None,
    num_classes: int | None,
    task: Task,
    infers_classes: bool,
    sets: Mapping[str, Sequence[Dataset[Any]]],
) -> int:
    """Check that the labels are of the classes, and return the number of classes K.

    Args:
        labels_of_parts: Labels of each client by part of the data.
        classes: Names of the classes, if there are any.
        num_classes: Number of classes; None for the number of names, or else for what the labels show.
        task: What is learnt from the labels.
        infers_classes: Whether the labels are all that is known of the classes.
        sets: Datasets of each client by part of the data.

    Raises:
        ValueError: If the classes, their number and the labels do not match.
    """
    if classes is not None:
        num_classes = num_classes or len(classes)
        class_names("the data", classes, num_classes)
        if num_classes == 1 and task.exclusive:
            raise ValueError(
                f"all images are of one class ({classes[0]}), so nothing can be learned: add images of a second class; "
                "if the label is either present or absent, use vectors of zeros and ones (a list of columns of a table)"
            )
    if infers_classes and (task.exclusive or task.per_pixel):
        _check_inferred_classes(labels_of_parts, task)
    elif task.has_classes and not task.exclusive and not task.per_pixel:
        _warn_of_one_hot(labels_of_parts["training"])
    # The labels of all clients at once, since there may be 100,000 clients.
    merged_labels: dict[str, Tensor] = {}
    for part, labels_of_clients in labels_of_parts.items():
        nonempty = [labels for labels in labels_of_clients if labels.size(0)]
        if nonempty:
            merged_labels[part] = torch.cat(nonempty)
    training_labels = merged_labels["training"]
    if num_classes is None:
        num_classes = max(task.count_classes(labels) for labels in merged_labels.values())
    if not task.fits(training_labels, num_classes):
        num_entries = task.count_classes(training_labels)
        raise ValueError(
            f"{type(task).__name__}: labels have {num_entries} entries but num_classes is {num_classes}: make the two "
            "equal, leave num_classes out, or choose a different task"
        )
    for part, labels in merged_labels.items():
        if len(task.out_of_range(labels, num_classes)):
            _raise_for_owner(part, labels_of_parts[part], num_classes, task, sets[part])
    return num_classes


def _compare_clients(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    data: FederatedData,
    resolve: Resolve,
    is_declared: bool,
    names_are_known: bool,
) -> None:
    """Reject or warn of clients that seem to use other numbers for the same classes.

    Args:
        labels_of_parts: Labels or masks of each client by part of the data.
        stores: The data by part.
        task: What is learnt from them.
        data: The data.
        resolve: Finds the dataset behind a Subset.
        is_declared: Whether the number of classes is declared.
        names_are_known: Whether it is, or the classes have names.
    """
    bases = [resolve(dataset).base for dataset in data.train]
    if task.per_pixel:
        _compare_masks(labels_of_parts, stores, task, data.client_names, is_declared, bases)
    elif task.exclusive and not names_are_known:
        _compare_numbers(labels_of_parts["training"], task, data.client_names, bases)


def _compare_masks(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    client_names: Sequence[str] | None,
    is_declared: bool,
    bases: Sequence[Dataset[Any]],
) -> None:
    """Compare the values of the clients' masks; see :func:`.check_masks_of_clients`.

    Args:
        labels_of_parts: Masks of each client by part of the data, of some datasets only the first one.
        stores: The data by part.
        task: What is learnt from the masks.
        client_names: Names of the clients, if they have any.
        is_declared: Whether the number of classes is declared.
        bases: The sets of the training masks.
    """
    values_of_clients = _read_mask_values(labels_of_parts, stores, task, client_names, MASKS_COMPARED)
    if find_suspects(values_of_clients):
        # Masks that were not read yet may have the missing classes.
        values_of_clients = _read_mask_values(labels_of_parts, stores, task, client_names, SCAN_LIMIT)
    check_masks_of_clients(values_of_clients, bases, is_declared)


def _compare_numbers(
    labels_of_clients: Sequence[Tensor],
    task: Task,
    client_names: Sequence[str] | None,
    bases: Sequence[Dataset[Any]],
) -> None:
    """Warn of clients whose classes are numbers from 1, where those of others are numbers from 0.

    Args:
        labels_of_clients: Training labels of each client.
        task: What is learnt from the labels.
        client_names: Names of the clients, if they have any.
        bases: The sets of the training images. Labels of a single set are numbered alike.
    """
    if len({id(base) for base in bases}) == 1:
        return
    numbers_of_clients: dict[str, set[int]] = {}
    for client, labels in enumerate(labels_of_clients):
        name = f"client {client}" if client_names is None else repr(client_names[client])
        numbers_of_clients[name] = {*labels[task.known(labels)].unique().tolist()}
    shift = find_shift(numbers_of_clients)
    if shift is not None:
        num_classes = shift.higher_numbers[-1] + 1
        warnings.warn(shift.describe(f"set num_classes={num_classes}"), stacklevel=4)


def _read_mask_values(
    labels_of_parts: Mapping[str, list[Tensor]],
    stores: Mapping[str, Store],
    task: Task,
    client_names: Sequence[str] | None,
    limit: int,
) -> list[MaskValues]:
    """Return the values of each client's masks in each part; see :func:`_compare_masks`.

    Args:
        labels_of_parts: Masks of each client by part of the data, of some datasets only the first one.
        stores: The data by part.
        task: What is learnt from the masks.
        client_names: Names of the clients, if they have any.
        limit: Number of masks of a client and part that are read, if they are not in memory.
    """
    values_of_clients: list[MaskValues] = []
    for part, labels_of_clients in labels_of_parts.items():
        store = stores[part]
        for client, masks in enumerate(labels_of_clients):
            num_masks = store.sizes[client]
            if not num_masks:
                continue
            owner = "the server" if part == "validation" else f"client {client}"
            if client_names is not None and part != "validation":
                owner += f" ({client_names[client]!r})"
            counts = MaskCounter(task.border_target)
            if len(masks) == num_masks:
                counts.add(masks)
            else:
                assert isinstance(store, MapStore)
                with isolated_randomness():
                    for index in range(min(num_masks, limit)):
                        mask = read_label(store.datasets[client], owner, index)
                        assert isinstance(mask, Tensor)
                        counts.add(mask.unsqueeze(0))
            values_of_clients.append(MaskValues(owner, part, counts))
    return values_of_clients


def _check_stray_labels(
    labels_of_parts: Mapping[str, list[Tensor]],
    network_outputs: int,
    task: Task,
    sets: Mapping[str, Sequence[Dataset[Any]]],
) -> None:
    """Raise a ValueError that names the client of a label beyond the network's outputs, if it looks like a mistake.

    It does if no image has the label that would need the next output. Otherwise the network has too few outputs, or
    they were counted wrongly, which is checked when it is built.
    """
    labels = torch.cat([labels for labels in labels_of_parts["training"] if labels.size(0)])
    if task.count_classes(labels) > network_outputs and not (labels == network_outputs).any():
        _raise_for_owner("training", labels_of_parts["training"], network_outputs, task, sets["training"])


def _with_absent_classes(num_classes: int, network_outputs: int) -> int:
    """Return the number of classes, with those that no label shows but the network has an output for.

    A network with more than twice as many outputs as labels was probably built for other data, and is rejected later.
    """
    if not num_classes < network_outputs <= 2 * num_classes:
        return num_classes
    warnings.warn(
        f"labels up to {num_classes - 1} imply {num_classes} classes, but the network has {network_outputs} outputs, "
        f"so {network_outputs} classes are assumed: set num_classes={network_outputs} if the labels do not show all "
        f"classes, or build the network with {num_classes} outputs",
        stacklevel=4,
    )
    return network_outputs


def _fitted_task(
    task: Task, labels_of_parts: Mapping[str, list[Tensor]], num_classes: int, training_images: int
) -> Task:
    """Check the task's options and the unknown labels, and compute the options that depend on the training labels.

    Of large data whose labels are not declared, only some labels are known before training.

    Raises:
        ValueError: If an option does not match the number of classes, no training label is known, or the server's
            labelled images have unknown labels.
    """
    task.check_classes(num_classes)
    server_labels = labels_of_parts.get("validation", [])
    if not task.per_pixel and not all(bool(task.known(labels).all()) for labels in server_labels):
        raise ValueError(
            "the server's validation images have unknown labels (NaN or -1), and each of them is needed; fill them in, "
            "or take these images out"
        )
    training_labels = torch.cat([labels for labels in labels_of_parts["training"] if labels.size(0)])
    if len(training_labels) < training_images:
        if task.uses_all_targets or task.uses_client_counts:
            raise ValueError(
                f"task={task}: weights cannot be balanced, since the labels of the {training_images} training images "
                "are not known before training; give numbers, or data that declare their labels (targets=)"
            )
        return task
    if task.per_pixel:
        classes_of_pixels = training_labels[task.known(training_labels)].unique().tolist()
        if len(classes_of_pixels) < 2:
            raise _one_class_of_pixels(classes_of_pixels)
    elif not bool(task.known(training_labels).any()):
        raise ValueError("all training labels are unknown (NaN or -1), so nothing can be learned; add known labels")
    fitted_task = task.fitted_to(training_labels, num_classes)
    fitted_task.check_targets(training_labels)
    return fitted_task


def _warn_of_unknown_labels(task: Task, labels_of_clients: Sequence[Tensor], classes: Sequence[str] | None) -> None:
    """Warn about labels that are unknown in more than half of the training images."""
    nonempty = [labels for labels in labels_of_clients if labels.size(0)]
    if nonempty[0].ndim != 2:
        return
    is_known = task.known(torch.cat(nonempty))
    num_images, num_labels = is_known.shape
    names = classes or range(num_labels)
    descriptions = []
    for name, num_known in zip(names, is_known.sum(0).tolist(), strict=True):
        if 2 * num_known < num_images:
            descriptions.append(f"{name} ({num_images - num_known})")
    if descriptions:
        remedy = ""
        if task.has_classes:
            remedy = (
                ". If a blank cell of a table means that the label is absent, set blank=absent "
                "(docs/tasks.md#unknown-labels)"
            )
        warnings.warn(
            f"labels are unknown in more than half of the {num_images} training images: {abbreviated(descriptions)}; "
            f"they are learned from the others only{remedy}",
            stacklevel=4,
        )


def _one_class_of_pixels(class_indices: Sequence[int]) -> ValueError:
    """Return the error for training masks whose pixels have no class, or only one."""
    problem = "are ignored"
    if class_indices:
        problem = f"that count have the class {class_indices[0]}"
    return ValueError(
        f"all pixels of the training masks {problem}, so nothing can be learned; if a value of the masks that stands "
        "for a class is ignored, such as 255, list the values in mask_values, or set another ignore_index of the task"
    )


def _raise_for_owner(
    part: str, labels_of_clients: Sequence[Tensor], num_classes: int, task: Task, datasets: Sequence[Dataset[Any]]
) -> None:
    """Raise a ValueError that names the first client with a label out of range, and the first such mask."""
    for client, labels in enumerate(labels_of_clients):
        owner = "the server" if part == "validation" else f"client {client}"
        if not task.per_pixel:
            check_labels(f"{owner} has the {part} label", labels, num_classes, task)
            continue
        for index, mask in enumerate(labels):
            location = location_of(datasets[client], index)
            prefix = f"{owner}: the mask of {part} image {index}{location} has the class"
            check_labels(prefix, mask, num_classes, task)


def _check_inferred_classes(labels_of_parts: Mapping[str, list[Tensor]], task: Task) -> None:
    """Check that labels from which the number of classes is inferred number the classes.

    Raises:
        ValueError: If all training images are of one class, or most of the classes would have no image.

    Warns:
        UserWarning: If some of the classes would have no image, such as class 0 if the labels begin with 1.
    """
    values_of_parts = {}
    for part, labels_of_clients in labels_of_parts.items():
        labels = torch.cat([labels for labels in labels_of_clients if labels.size(0)])
        values_of_parts[part] = labels[task.known(labels)].unique()
    trained = values_of_parts["training"].tolist()
    if task.per_pixel and len(trained) < 2:
        raise _one_class_of_pixels(trained)
    if len(trained) == 1:
        raise ValueError(
            f"all training images have the label {trained[0]}, and nothing can be learned from one class: add images "
            "of a second class, or set num_classes if other clients have them. If the label is either present or "
            "absent, use float vectors (1,) of zeros and ones"
        )
    labels_in_use = torch.cat(list(values_of_parts.values())).unique().tolist()
    num_classes = labels_in_use[-1] + 1
    num_unused = num_classes - len(labels_in_use)
    # Negative labels are rejected later, with the client that has them.
    if labels_in_use[0] >= 0 and num_unused > len(labels_in_use):
        present_labels = abbreviated([str(label) for label in labels_in_use])
        raise ValueError(
            f"the labels go up to {labels_in_use[-1]}, which implies {num_classes} classes, but {num_unused} of them "
            f"have no image (those used are {present_labels}): number the classes from 0 without gaps, remove images "
            f"whose label marks them as unlabelled (often 255), or set num_classes={num_classes} if this is intended"
        )
    # Gaps in the numbers of masks are warned of with the clients' values side by side.
    if labels_in_use[0] >= 0 and num_unused and not task.per_pixel:
        _warn_of_unused_numbers(labels_in_use, num_classes)


def _warn_of_unused_numbers(labels_in_use: Sequence[int], num_classes: int) -> None:
    """Warn about classes that no image has, and which the network gets an output for.

    Args:
        labels_in_use: All labels, ascending.
        num_classes: Number of classes that the labels imply, one more than the largest.
    """
    unused = [str(label) for label in sorted({*range(num_classes)} - {*labels_in_use})]
    noun = "label" if len(unused) == 1 else "labels"
    remedy = "number the classes from 0 without gaps"
    if labels_in_use[0] > 0:
        remedy += f", here by subtracting {labels_in_use[0]} from each label"
    warnings.warn(
        f"no image has the {noun} {abbreviated(unused)}, but labels up to {labels_in_use[-1]} imply {num_classes} "
        f"classes, so the network gets {num_classes} outputs for {len(labels_in_use)} classes: {remedy}, or set "
        f"num_classes={num_classes} if this is intended",
        stacklevel=5,
    )


def _checked_task(task: Task | None, labels: Tensor) -> Task:
    """Return the task, by default that of the labels (N, ...) of a client.

    Raises:
        OptionError: If the labels are not those of the task.
        TypeError: If no task is chosen, and none is the default of the labels.
    """
    if task is None:
        return task_of_labels(labels)
    if not task.fits(labels):
        raise OptionError(
            f"task={task} needs {task.labels_per_image}, but the labels are {_describe_labels(labels)}; choose another "
            "task, or leave it out",
            name="task",
            value=task,
        )
    return task


def _describe_labels(labels: Tensor) -> str:
    """Describe labels (N, ...) for messages."""
    try:
        return task_of_labels(labels).labels_per_image
    except TypeError:
        return describe_labels(labels)


def _set_up_checks_on_use(store: Store, task: Task, num_classes: int) -> None:
    """Have a store check labels that are read during training, and check positions of labels that are in memory."""
    store.has_classes = task.has_classes
    if isinstance(store, MapStore):
        if task.exclusive:
            store.class_numbers = store.class_numbers or range(num_classes)
        if task.has_positions or not task.has_classes:
            store.check_target = partial(_check_target, task, num_classes)
        if task.has_positions:
            store.resize_target = task.resized
        return
    if not task.has_positions or store.images.ndim < 3:
        return
    assert store.labels is not None
    height, width = store.images.shape[-2:]
    task.check_positions(store.labels, (height, width))


def _check_own_positions(
    stores: Mapping[str, Store], sets: Mapping[str, Sequence[Dataset[Any]]], task: Task, resolve: Resolve
) -> None:
    """Raise an OptionError if a set resizes its images when they are read, and its coordinates cannot follow.

    They can where a store reads images one by one, and so knows the size of each file.

    Args:
        stores: The data by part.
        sets: The datasets of each client by part.
        task: What is learnt from them.
        resolve: Finds the dataset behind a Subset.
    """
    if not task.has_positions:
        return
    for part, store in stores.items():
        for base in [resolve(dataset).base for dataset in sets[part]]:
            keeps_size = isinstance(store, TensorStore) or isinstance(base, DerivedSet)
            if isinstance(base, ImageSet) and base.resizes_images_only and keeps_size:
                raise OptionError(
                    f"{type(base).__name__} resizes its images in memory, but not the coordinates to predict: use the "
                    "set of files itself, with in_memory: false",
                    name="in_memory",
                    value=True,
                )


def _check_prepared_size(checked: Checked) -> None:
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


def _check_target(task: Task, num_classes: int, target: Tensor, size: Size) -> None:
    """Raise a ValueError if the target (...) of an image of this height and width is not what the task needs."""
    if not task.fits(target.unsqueeze(0), num_classes):
        raise ValueError(
            f"the label is {format_text(tensor_format(target, 0))}; use {task.describe_targets(num_classes)}"
        )
    if task.has_positions:
        task.check_positions(target.unsqueeze(0), size)
    prefix = "the mask has the class" if task.per_pixel else "the label is"
    check_labels(prefix, target, num_classes, task)


def _warn_of_one_hot(labels_of_clients: Sequence[Tensor]) -> None:
    """Warn about vectors that may be one-hot classes, since they are trained as independent labels."""
    labels = torch.cat(list(labels_of_clients))
    num_images, num_labels = labels.shape
    if num_images < 2 or num_labels < 2:
        return
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    if is_binary and bool((labels.sum(1) == 1).all()):
        warnings.warn(
            f"each of the {num_images} training images has exactly one of {num_labels} labels, but they are trained as "
            "independent labels: if they are one-hot classes, pass the classes (labels.argmax(1))",
            stacklevel=4,
        )


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


def check_labels(prefix: str, labels: Tensor, num_classes: int, task: Task) -> None:
    """Raise a ValueError that begins with ``prefix`` for classes outside 0..K-1, or vectors outside [0, 1]."""
    out_of_range = task.out_of_range(labels, num_classes)
    if len(out_of_range):
        remedy = "correct the label"
        if task.has_classes and not (task.exclusive or task.per_pixel):
            remedy += ", or set task=Regression() to predict numbers"
        if task.exclusive or task.per_pixel:
            remedy += f" or num_classes (now {num_classes})"
        if task.per_pixel:
            remedy += ", or set ignore_index of the task Segmentation to the value of pixels without a class"
        raise ValueError(f"{prefix} {out_of_range[0].item()}, outside {task.describe_range(num_classes)}: {remedy}")
