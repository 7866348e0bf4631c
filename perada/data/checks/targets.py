# SPDX-License-Identifier: Apache-2.0
"""Checks of targets that are read during training, or that are positions in images."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import OptionError
from perada.data.batches.datasets import Resolve, format_text, tensor_format
from perada.data.batches.samples import MapStore, Store, TensorStore
from perada.data.checks.classes import check_labels
from perada.data.sets.base import ImageSet
from perada.data.sets.derived import DerivedSet
from perada.tasks import Task
from perada.tasks.geometry import Size


def set_up_checks_on_use(store: Store, task: Task, num_classes: int) -> None:
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


def check_own_positions(
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
