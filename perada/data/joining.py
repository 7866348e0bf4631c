# SPDX-License-Identifier: Apache-2.0
"""The images of a client that joins a finished run, with the run's classes and as its training had images."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from perada.core.text import some
from perada.data.batches.datasets import as_labels, length
from perada.data.federated import FederatedData
from perada.data.preprocessing import Preprocessing


def joining_data(
    data: FederatedData,
    name: str | None,
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    num_classes: int,
    multilabel: bool,
) -> FederatedData:
    """One client's images in memory, prepared as those of a run were, their labels numbered as the run's.

    Args:
        data: The client alone or, among others, the client called ``name``.
        name: What the client is to be called; by default what the data call it.
        preprocessing: Of the run.
        classes: Names of the run's classes, if they have any.
        num_classes: The run's number of classes K, or of labels.
        multilabel: Whether the run's images may have several labels.

    Raises:
        ValueError: If the client, a class or the kind of labels is not known to the run, or there are no images.
    """
    place, name = _chosen(data, name)
    numbers = class_numbers(data, classes, num_classes)
    parts = [data.train[place]] + ([data.test[place]] if data.test else [])
    train, *test = (_read(part, preprocessing, numbers, num_classes, multilabel) for part in parts)
    if train is None:
        raise ValueError(f"client {name!r} has no training images; give some")
    return FederatedData(
        [train],
        [part for part in test if part is not None],
        num_classes=num_classes,
        classes=classes,
        client_names=[name],
    )


def _chosen(data: FederatedData, name: str | None) -> tuple[int, str]:
    """Whose images are meant, and the name."""
    names = None if data.client_names is None else list(data.client_names)
    if len(data.train) == 1:
        name = name or (names[0] if names else None)
        if not name:
            raise ValueError("the client has no name; give one (name=, --client)")
        return 0, name
    if names is None or name not in names:
        count = f"the data are of {len(data.train)} clients"
        if names is None:
            raise ValueError(f"{count} without names; give the images of one")
        which = "none is named" if name is None else f"{name!r} is none of them"
        raise ValueError(f"{count}, and {which}; name one of {some(names)}, or give the images of one alone")
    return names.index(name), str(name)


def class_numbers(data: FederatedData, classes: Sequence[str] | None, num_classes: int) -> list[int]:
    """The run's number of each class of the data.

    Raises:
        ValueError: If a class is unknown to the run or, without names, the run has another number of classes.
    """
    if data.classes is None:
        if data.num_classes not in (None, num_classes):
            raise ValueError(
                f"the data have {data.num_classes} classes without names, and the run has {num_classes}; name the "
                "data's classes (classes=), or give data with the run's"
            )
        return list(range(num_classes))
    own = list(map(str, range(num_classes))) if classes is None else list(classes)
    for one in data.classes:
        if one not in own:
            close = get_close_matches(one, own, 1)
            some = ", ".join(own[:10]) + (" …" if len(own) > 10 else "")
            hint = f"did you mean {close[0]!r}?" if close else f"the run's classes are {some}"
            raise ValueError(f"class {one!r} is unknown to the run; {hint}")
    return [own.index(one) for one in data.classes]


def _read(
    part: Dataset[Any], preprocessing: Preprocessing, numbers: list[int], num_classes: int, multilabel: bool
) -> TensorDataset | None:
    """The samples of a set, all at once; None if there are none."""
    samples = [part[index] for index in range(length(part))]
    if not samples:
        return None
    labels = as_labels(torch.stack([torch.as_tensor(label) for _, label in samples]))
    if (labels.ndim == 2) != multilabel:
        kinds = ("one label", "several labels")
        raise ValueError(
            f"the images have {kinds[labels.ndim == 2]} each, and those of the run have {kinds[multilabel]}; "
            "give labels of the run's kind"
        )
    images = torch.stack([preprocessing.stored(image) for image, _ in samples])
    return TensorDataset(images, _renumbered(labels, numbers, num_classes))


def _renumbered(labels: Tensor, numbers: list[int], num_classes: int) -> Tensor:
    """Labels (N,) or (N, K') with the run's numbers of classes; a ValueError if there is no such class."""
    most = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    least = 0 if labels.ndim == 2 else int(labels.min())
    if most > len(numbers) or least < 0 or (labels.ndim == 2 and most < len(numbers)):
        wrong = f"are of {most} classes" if labels.ndim == 2 else f"go from {least} to {most - 1}"
        raise ValueError(f"the labels {wrong}, and the run has {num_classes} classes; correct them")
    if labels.ndim == 1:
        return torch.tensor(numbers)[labels]
    found = labels.new_zeros(len(labels), num_classes)
    found[:, numbers] = labels
    return found
