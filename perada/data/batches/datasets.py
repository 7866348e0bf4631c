# SPDX-License-Identifier: Apache-2.0
"""What a map-style dataset holds: the tensors behind it, its items, of which some are dicts, and its labels."""

import random
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.core.seeding import derive_seed, seed_global
from perada.data.batches.transforms import MissingImageError, UnreadableImageError
from perada.data.sets.base import ImageSet

Kind = tuple[tuple[int, ...], torch.dtype]  # shape and number format of one image
IMAGE_KEYS = ("image", "img", "pixel_values")
LABEL_KEYS = ("label", "labels")


class Source(NamedTuple):
    """A dataset that is tensors: all ``images`` and ``labels`` of its base, and which ``rows`` of them it has."""

    images: Tensor
    labels: Tensor | None
    rows: Tensor


def length(dataset: Dataset[Any]) -> int:
    """Number of items of a map-style dataset."""
    return len(cast(Sized, dataset))


def resolved(dataset: Any) -> tuple[Any, np.ndarray[Any, Any]]:  # noqa: ANN401
    """What a dataset is a Subset of, or itself, and the items (N,) of it that are meant.

    Raises:
        IndexError: If a Subset has an item that its dataset lacks.
    """
    rows = np.arange(length(dataset))
    while type(dataset) is Subset:
        rows = np.asarray(dataset.indices, dtype=np.int64)[rows]
        dataset, size = dataset.dataset, length(dataset.dataset)
        wrong = rows[(rows < -size) | (rows >= size)]
        if len(wrong):
            raise IndexError(f"a Subset has item {wrong[0]} of a dataset of {size}; correct its indices")
        rows = np.where(rows < 0, rows + size, rows)
    return dataset, rows


def tensor_source(dataset: Dataset[Any], labelled: bool) -> Source | None:
    """Find the tensors behind a TensorDataset, an ImageSet or a Subset of one; None if there are none.

    Labels are read where they are needed alone (``labelled``).
    """
    base, rows = resolved(dataset)
    if type(base) is TensorDataset and len(base.tensors) >= 1 + labelled:
        return Source(base.tensors[0], base.tensors[1] if labelled else None, torch.from_numpy(rows))
    if isinstance(base, ImageSet) and base.images is not None:
        return Source(base.images, base.labels if labelled else None, torch.from_numpy(rows))
    return None


def as_labels(values: object, of_one_image: bool = False) -> Tensor:
    """Turn labels into int64 classes (N,), or float32 vectors (N, K) of a multi-label task.

    Classes may have further axes of length 1, as in MedMNIST's (N, 1), which are dropped.

    Args:
        values: Labels of N images, or of one.
        of_one_image: Whether they are the label of one image, a class () or a vector (K,).

    Raises:
        TypeError: If they are neither.

    >>> as_labels([1, 2]).dtype, as_labels(torch.ones(2, 5).double()).dtype
    (torch.int64, torch.float32)
    >>> as_labels([[1], [2]]).tolist(), as_labels([2], of_one_image=True).tolist()
    ([1, 2], 2)
    """
    remedy = "give integer classes, or float vectors (K,) of several labels"
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # None, words, lists of unequal lengths
        raise TypeError(f"labels are {reprlib.repr(values)}: {remedy}") from None
    if labels.is_floating_point() and labels.ndim > 0:
        return labels.float()
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels are {labels.dtype}: {remedy}")
    axes = 0 if of_one_image else 1
    while labels.ndim > axes and labels.shape[-1] == 1:
        labels = labels.squeeze(-1)
    if labels.ndim > axes:
        raise TypeError(
            f"labels are whole numbers of shape {tuple(labels.shape)}, which may be one-hot, or several labels each: "
            "give the classes of one-hot vectors (labels.argmax(-1)), or several labels as floats (labels.float())"
        )
    return labels.long()


def declared_labels(dataset: Dataset[Any]) -> Tensor | list[Any] | None:
    """The labels a dataset declares without an image, a list if the first is a word; None if it declares none.

    Image sets and torchvision's have ``targets``, Hugging Face's a column.
    """
    base, rows = resolved(dataset)
    targets = base.labels if isinstance(base, ImageSet) else getattr(base, "targets", None)
    column = [key for key in LABEL_KEYS if key in (getattr(base, "column_names", None) or ())]
    if (
        column and getattr(base, "format", {"type": "custom"})["type"] != "custom"
    ):  # a function that makes the items may make the labels too
        targets = base[column[0]][:]
    if targets is None or getattr(base, "target_transform", None) is not None or len(targets) != length(base):
        return None
    words = list(targets) if isinstance(next(iter(targets), None), str) else None
    if words is not None:
        return [words[row] for row in rows.tolist()]
    try:
        return as_labels(targets)[torch.from_numpy(rows)]
    except TypeError:
        return None  # the items may have them in another form; if not, the message names the item


def entries(item: Any, labelled: bool) -> tuple[Any, Any]:  # noqa: ANN401
    """The image of an item, and its label or None: of a pair, or of a dict that has one of the usual keys for each.

    Raises:
        TypeError: If the item is neither.
    """
    if isinstance(item, Mapping):
        return _entry(item, "image", IMAGE_KEYS), _entry(item, "label", LABEL_KEYS) if labelled else None
    if not labelled:
        return (item[0] if isinstance(item, tuple | list) else item), None
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2:
        what = f"{type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
        raise TypeError(f"the item is a {what}: give (image, label), or a dict of both")
    return item[0], item[1]


def _entry(item: Mapping[str, Any], what: str, usual: Sequence[str]) -> Any:  # noqa: ANN401
    here = [key for key in usual if key in item]
    if len(here) != 1:
        has = f"more than one {what}, {' and '.join(map(repr, here))}" if here else f"no {what}"
        raise TypeError(
            f"the item is a dict with the keys {', '.join(map(repr, item)) or 'none'}, which has {has}: name one entry "
            f"{', '.join(usual[:-1])} or {usual[-1]}"
        )
    return item[here[0]]


def read_item(dataset: Dataset[Any], index: int, who: str) -> Any:  # noqa: ANN401
    """An item as the dataset has it; a ValueError says whose it is and where, if it cannot be read."""
    try:
        return dataset[index]
    except (UnreadableImageError, MissingImageError):  # which say where it is
        raise
    except Exception as error:  # whatever a dataset raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UnreadableImageError(
            f"{who}, sample {index}{place(dataset, index)}, cannot be read ({reason}): fix it or leave it out"
        ) from error


def place(dataset: Any, index: int) -> str:  # noqa: ANN401
    """Where a dataset says that an item is, as torchvision's folders do, to follow its number; or nothing."""
    if isinstance(dataset, Subset):
        return place(dataset.dataset, dataset.indices[index])
    for name in ("samples", "imgs", "paths", "files"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, list | tuple) and index < len(listed):
            entry = listed[index][0] if isinstance(listed[index], tuple | list) and listed[index] else listed[index]
            return f" ({str(entry)!r})" if isinstance(entry, str | Path) else ""
    return place(dataset.dataset, index) if hasattr(dataset, "dataset") else ""


def kind(images: Tensor, skip: int = 1) -> Kind:
    """Shape without the first ``skip`` axes, and number format."""
    return tuple(images.shape[skip:]), images.dtype


def check_kind(client: int, got: Kind, expected: Kind, part: str = "") -> None:
    """Refuse images that cannot be batched together; the message begins with ``part``."""
    if got == expected:
        return
    (shape, dtype), (expected_shape, expected_dtype) = got, expected
    remedies = []
    if dtype != expected_dtype:
        remedies.append("give all images one type")
    if len(shape) == len(expected_shape) == 3 and shape[0] != expected_shape[0]:
        if {shape[0], expected_shape[0]} == {1, 3}:
            remedies.append(
                "give grey images three channels too (image.convert('RGB') of a PIL image, image.expand(3, -1, -1) of "
                "a tensor (1, H, W))"
            )
        else:
            remedies.append("give all images as many channels, such as image.convert('RGB') of a PIL image")
    if len(shape) != len(expected_shape):
        remedies.append("give all clients images of one shape")
    elif shape[-2:] != expected_shape[-2:]:
        remedies.append("give all clients one shape and type, or set image_size to have uint8 images resized")
    raise ValueError(f"{part}client {client}: an image is {got}, others are {expected}: {'; and '.join(remedies)}")


def check_label_kinds(known: Sequence[tuple[int, Tensor]]) -> None:
    """Refuse, by a ValueError, labels of clients that are not all integers, or all vectors of one length."""
    first = known[0][1]
    for client, labels in known:
        if labels.ndim > 2 or kind(labels) != kind(first):
            raise ValueError(
                f"client {client}: a label is {kind(labels)}, an earlier client's is {kind(first)}: give all an "
                "integer, or all a float vector of K labels"
            )


@contextmanager
def isolated_randomness() -> Iterator[None]:
    """Set the global random streams of Python, NumPy and torch by :func:`seed_all` of 0, and put them back on exit."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        seed_all(0)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def seed_all(seed: int) -> None:
    """Seed the global streams of Python, NumPy and torch (on the CPU): datasets' transforms draw from these."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(np.frombuffer(derive_seed(seed, "numpy").to_bytes(16, "little"), dtype=np.uint32))
    seed_global(seed, "torch")
