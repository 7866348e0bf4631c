# SPDX-License-Identifier: Apache-2.0
"""Images of a client that joins a finished run, prepared as that run's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from perada.core.checks import check_known
from perada.core.text import abbreviated, dtype_name
from perada.data.batches.datasets import as_labels, image_and_label, length, location_of, read_item
from perada.data.broken_images import check_datasets
from perada.data.federated import FederatedData
from perada.data.preprocessing import Preprocessing
from perada.tasks import Task


def joining_data(
    data: FederatedData,
    name: str | None,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    num_classes: int,
    task: Task,
) -> FederatedData:
    """Read a joining client's images into memory, stored and labelled like the run's images.

    Args:
        data: The data of this client only, or of several clients.
        name: Name of the client; None for the only client of the data.
        preprocessing: The run's preprocessing.
        classes: The run's class names, if it has any.
        num_classes: The run's number of classes K.
        task: What the run's network predicts.

    Raises:
        ValueError: If the client, a class or the kind of labels is unknown to the run, or there are no images.
    """
    check_datasets(data)
    client, name = data.find(name)
    class_numbers = _numbers_in_run(data, classes, num_classes)
    # Labels that are words are numbered as the classes of the data or, without these, of the run.
    words = list(data.classes or classes or ())
    train = _read_samples(data.train[client], preprocessing, class_numbers, words, num_classes, task)
    if train is None:
        raise ValueError(f"client {name!r} has no training images; add some")
    test = None
    if data.test:
        test = _read_samples(data.test[client], preprocessing, class_numbers, words, num_classes, task)
    test_sets = [] if test is None else [test]
    return FederatedData([train], test_sets, num_classes=num_classes, classes=classes, client_names=[name])


def _numbers_in_run(data: FederatedData, classes: Sequence[str] | None, num_classes: int) -> list[int]:
    """Return the number that each class of the data has in the run."""
    if data.classes is None:
        if data.num_classes not in (None, num_classes):
            raise ValueError(
                f"the data have {data.num_classes} classes without names, but the run has {num_classes}; name the "
                "data's classes (classes=), or pass data with the run's"
            )
        return list(range(num_classes))
    names_in_run = [str(number) for number in range(num_classes)]
    if classes is not None:
        names_in_run = list(classes)
    for name in data.classes:
        check_known("the data: class", name, names_in_run)
    return [names_in_run.index(name) for name in data.classes]


def _number_of_word(label: str, words: Sequence[str]) -> int:
    """Return the number of a label that is a word.

    Raises:
        TypeError: If it is not the name of a class.
    """
    if label in words:
        return words.index(label)
    remedy = f"use one of {abbreviated(words)}"
    if not words:
        remedy = "the run has no names of classes: use numbers"
    raise TypeError(f"the label is {label!r}; {remedy}")


def _read_samples(
    dataset: Dataset[Any],
    preprocessing: Preprocessing,
    class_numbers: Sequence[int],
    words: Sequence[str],
    num_classes: int,
    task: Task,
) -> TensorDataset | None:
    """Read a dataset into memory, with its labels numbered as the run's; None if it is empty.

    Args:
        dataset: The dataset.
        preprocessing: The run's preprocessing.
        class_numbers: The run's number of each class of the data.
        words: The classes of labels that are words.
        num_classes: The run's number of classes K.
        task: What the run's network predicts.
    """
    images_in_memory = []
    labels_in_memory = []
    for index in range(length(dataset)):
        owner = "the client"
        item = read_item(dataset, index, owner)
        try:
            image, label = image_and_label(item, labelled=True)
            if isinstance(label, str):
                label = _number_of_word(label, words)
            labels_in_memory.append(as_labels(label, of_one_image=True))
            images_in_memory.append(preprocessing.stored(image))
        except TypeError as error:
            raise TypeError(f"{owner}, sample {index}{location_of(dataset, index)}: {error}") from None
    if not images_in_memory:
        return None
    images = torch.stack(images_in_memory)
    labels = torch.stack(labels_in_memory)
    known_classes = len(class_numbers)
    if not task.fits(labels, known_classes) or len(task.out_of_range(labels, known_classes)):
        expected = task.describe_targets(num_classes)
        raise ValueError(
            f"the labels of the images, {dtype_name(labels.dtype)} {tuple(labels.shape)} from {labels.min()} to "
            f"{labels.max()}, do not match those of the run, {expected}; correct them"
        )
    return TensorDataset(images, task.renumber(labels, class_numbers, num_classes))
