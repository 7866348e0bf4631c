# SPDX-License-Identifier: Apache-2.0
"""Reads rows of the clients' datasets: by one gather where they are tensors, item by item otherwise."""

import random
import reprlib
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.core.seeding import derive_seed, seed_global
from perada.core.states import send
from perada.data.batches.transforms import (
    MissingImageError,
    UnreadableImageError,
    UnreadableSampleError,
    check_dtype,
    resize_uint8,
    to_image,
)
from perada.data.sets.base import ImageSet

Kind = tuple[tuple[int, ...], torch.dtype]  # shape and number format of one image


class Source(NamedTuple):
    """A dataset that is tensors: all ``images`` and ``labels`` of its base, and which ``rows`` of them it has."""

    images: Tensor
    labels: Tensor | None
    rows: Tensor


def length(dataset: Dataset[Any]) -> int:
    """Number of items of a map-style dataset."""
    return len(cast(Sized, dataset))


def as_labels(values: Any) -> Tensor:  # noqa: ANN401 - whatever a dataset gives
    """Turn labels into int64 classes, or float32 vectors of a multi-label task.

    Raises:
        TypeError: If they are neither.

    >>> as_labels([1, 2]).dtype, as_labels(torch.ones(2, 5).double()).dtype
    (torch.int64, torch.float32)
    """
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # None, words, lists of unequal lengths
        raise TypeError(
            f"labels are {reprlib.repr(values)}: give integer classes, or float vectors (K,) of several labels"
        ) from None
    if labels.is_floating_point() and labels.ndim > 0:
        return labels.float()
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels are {labels.dtype}: give integer classes, or float vectors (K,) of several labels")
    return labels.long()


def tensor_source(dataset: Dataset[Any], labelled: bool, rows: np.ndarray | None = None) -> Source | None:
    """Find the tensors behind a TensorDataset, an ImageSet or a Subset of one; None if there are none.

    Labels are read where they are needed alone (``labelled``). ``rows`` are the items that are meant; None for all. An
    IndexError if a Subset has an item that its dataset lacks.
    """
    if type(dataset) is Subset:  # the rows of thousands of these are looked up without listing those of their base
        own = np.asarray(dataset.indices, dtype=np.int64)
        return tensor_source(dataset.dataset, labelled, own if rows is None else own[rows])
    if type(dataset) is TensorDataset and len(dataset.tensors) >= 1 + labelled:
        images, labels = dataset.tensors[0], dataset.tensors[1] if labelled else None
    elif isinstance(dataset, ImageSet) and dataset.images is not None:
        images, labels = dataset.images, dataset.labels if labelled else None
    else:
        return None
    if rows is None:
        return Source(images, labels, torch.arange(len(images)))
    low, high = (rows.min(), rows.max()) if len(rows) else (0, 0)
    if low < -len(images) or high >= len(images):
        wrong = high if high >= len(images) else low
        raise IndexError(f"a Subset has item {wrong} of a dataset of {len(images)}; correct its indices")
    return Source(images, labels, torch.as_tensor(rows if low >= 0 else np.where(rows < 0, rows + len(images), rows)))


class Samples(Protocol):
    """Clients' samples."""

    sizes: tuple[int, ...]

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather rows; see :meth:`TensorStore.take`."""


class TensorStore:
    """Clients' samples as rows of one image tensor, of one source a client.

    Raises:
        ValueError: If a client's images have another shape or type than the first one's.
        TypeError: If they are neither uint8 nor floating point nor int64 tokens.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        bases: dict[tuple[int, int], int] = {}  # of images and labels by id -> their first row in the concatenation
        unique: list[Source] = []
        places = []
        total = 0
        for client, source in enumerate(sources):
            check_dtype(source.images)
            base = id(source.images), id(source.labels)
            if base not in bases:
                check_kind(client, kind(source.images), kind(sources[0].images))
                if source.labels is not None and sources[0].labels is not None:
                    check_label_kind(client, as_labels(source.labels), as_labels(sources[0].labels))
                bases[base] = total
                unique.append(source)
                total += len(source.images)
            places.append(source.rows + bases[base])
        images = unique[0].images if len(unique) == 1 else torch.cat([source.images for source in unique])
        self.images = images.unsqueeze(1) if images.dtype == torch.uint8 and images.ndim == 3 else images
        labels = [as_labels(source.labels) for source in unique if source.labels is not None]
        self.labels = (labels[0] if len(labels) == 1 else torch.cat(labels)) if labels else None
        self.sizes = tuple(len(source.rows) for source in sources)
        self.starts = torch.tensor([0, *self.sizes]).cumsum(0)[:-1]
        self.table = torch.cat(places)

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather the rows ``indices`` (N,) of the datasets of ``owners`` (N,); nothing is drawn here by ``key``.

        Returns:
            Images (N, ...) and labels (N,) or (N, K), None if unlabelled.
        """
        rows = send(self.table[self.starts[owners] + indices], self.images.device)
        return self.images[rows], None if self.labels is None else self.labels[rows]

    def client_labels(self) -> list[Tensor]:
        """Labels of every client's samples, in order."""
        assert self.labels is not None
        return list(torch.split(self.labels[self.table.to(self.labels.device)], list(self.sizes)))

    def to(self, device: torch.device, limit_bytes: int) -> None:
        """Move the tensors to ``device`` unless they take more than ``limit_bytes``."""
        if self.images.device != device and self.images.numel() * self.images.element_size() <= limit_bytes:
            self.images = self.images.to(device)
            self.labels = None if self.labels is None else self.labels.to(device)


class MapStore:
    """Clients' samples read one by one from map-style datasets, one a client.

    Of items that are not ``labelled`` only the image is looked at. uint8 images are resized to ``size`` as they are
    read, so that they can be stacked.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], labelled: bool, size: int | None = None) -> None:
        self.datasets, self.labelled, self.size = datasets, labelled, size
        self.sizes = tuple(length(dataset) for dataset in datasets)
        self.num_classes: int | None = None  # classes that labels are checked against as they are read
        self._blank: tuple[Tensor, Tensor | None] | None = None  # a sample of zeros

    def item(self, owner: int, index: int, resize: bool = True) -> tuple[Tensor, Tensor | None]:
        """Read one sample: image, in the store's size or as the dataset has it, and label or None."""
        who = f"client {owner}" if self.labelled else "the public set"
        item = read_item(self.datasets[owner], index, who)
        try:
            image = to_image(item[0] if self.labelled or isinstance(item, tuple | list) else item)
            label = as_labels(item[1]) if self.labelled else None
        except TypeError as error:
            raise TypeError(f"{who}, sample {index}: {error}") from None
        if image.is_floating_point() and not image.isfinite().all():
            raise UnreadableSampleError(
                f"{who}, sample {index}{_place(self.datasets[owner], index)}, is an image with NaN or infinity: fix "
                "it or leave it out"
            )
        if label is not None and self.num_classes is not None and not 0 <= label < self.num_classes:
            raise ValueError(
                f"client {owner} has the label {int(label)}, outside 0..{self.num_classes - 1}: correct the label or "
                "num_classes"
            )
        if resize and self.size is not None and image.dtype == torch.uint8:
            image = resize_uint8(image, self.size)
        return image, label

    def read(
        self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None, dict[int, Exception]]:
        """Read rows as :meth:`take`, with zeros for those that cannot be read, and why, by their places.

        A store of which nothing was read yet raises the reason.
        """
        rows: list[tuple[Tensor, Tensor | None] | None] = []
        failed: dict[int, Exception] = {}
        first: Kind | None = None if self._blank is None else kind(self._blank[0], 0)
        with isolated_randomness():
            for place, (owner, index) in enumerate(zip(owners.tolist(), indices.tolist(), strict=True)):
                seed_all(derive_seed(key[0] if key else 0, "items", *key[1:], owner, index))
                try:
                    image, label = self.item(owner, index)
                    first = first or kind(image, 0)
                    check_kind(owner, kind(image, 0), first)
                except Exception as error:  # of one client, whom the others need not share it with
                    failed[place] = error
                    rows.append(self._blank)
                    continue
                self._blank = self._blank or (
                    torch.zeros_like(image),
                    None if label is None else torch.zeros_like(label),
                )
                rows.append((image, label))
        if None in rows:
            raise next(iter(failed.values()))
        known = [row for row in rows if row is not None]
        labels = [label for _, label in known if label is not None]
        return torch.stack([image for image, _ in known]), torch.stack(labels) if labels else None, failed

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Read rows, with the arguments and results of :meth:`TensorStore.take`.

        What the datasets draw at random is derived from ``key`` and the sample, and leaves the global streams alone.
        """
        images, labels, failed = self.read(owners, indices, key)
        for error in failed.values():
            raise error
        return images, labels


def read_item(dataset: Dataset[Any], index: int, who: str) -> Any:  # noqa: ANN401
    """An item as the dataset has it; a ValueError says whose it is and where, if it cannot be read."""
    try:
        return dataset[index]
    except (UnreadableImageError, MissingImageError, UnreadableSampleError):  # which say where it is
        raise
    except Exception as error:  # whatever a dataset raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UnreadableSampleError(
            f"{who}, sample {index}{_place(dataset, index)}, cannot be read ({reason}): fix it or leave it out"
        ) from error


def _place(dataset: Any, index: int) -> str:  # noqa: ANN401
    """Where a dataset says that an item is, as torchvision's folders do, to follow its number; or nothing."""
    if isinstance(dataset, Subset):
        return _place(dataset.dataset, dataset.indices[index])
    for name in ("samples", "imgs", "paths", "files"):
        listed = getattr(dataset, name, None)
        if isinstance(listed, list | tuple) and index < len(listed):
            entry = listed[index][0] if isinstance(listed[index], tuple | list) and listed[index] else listed[index]
            return f" ({str(entry)!r})" if isinstance(entry, str | Path) else ""
    return _place(dataset.dataset, index) if hasattr(dataset, "dataset") else ""


Store = TensorStore | MapStore


def make_store(datasets: Sequence[Dataset[Any]], labelled: bool = True, size: int | None = None) -> Store:
    """Choose the fast store if every dataset is tensors."""
    sources = [tensor_source(dataset, labelled) for dataset in datasets]
    found = [source for source in sources if source is not None]
    for client, source in enumerate(sources):
        if labelled and source is not None and source.labels is None:
            raise ValueError(f"client {client}: its images have no labels; give labelled ones, or leave the client out")
        if (
            source is not None
            and source.labels is not None
            and source.labels.ndim == 1
            and source.labels.is_floating_point()
        ):
            raise TypeError(
                f"client {client}: labels are {source.labels.dtype} {tuple(source.labels.shape)}, of no vectors; give "
                "whole numbers (N,), a class for each image, or floats (N, K) of several labels each"
            )
    return TensorStore(found) if found and len(found) == len(sources) else MapStore(datasets, labelled, size)


def check_kind(client: int, got: Kind, expected: Kind, part: str = "") -> None:
    """Refuse images that cannot be batched together; the message begins with ``part``."""
    if got != expected:
        raise ValueError(
            f"{part}client {client}: an image is {got}, others are {expected}: give all clients one shape and type, "
            "or set image_size to have uint8 images resized"
        )


def check_label_kind(client: int, labels: Tensor, first: Tensor) -> None:
    """Refuse labels of another kind than the first client's: all are classes, or all are vectors of one length."""
    if labels.ndim > 2 or labels.shape[1:] != first.shape[1:] or labels.dtype != first.dtype:
        raise ValueError(
            f"client {client}: a label is {labels.dtype} {tuple(labels.shape[1:])}, an earlier client's is "
            f"{first.dtype} {tuple(first.shape[1:])}: give all an integer, or all a float vector of K labels"
        )


def kind(images: Tensor, skip: int = 1) -> Kind:
    """Shape without the first ``skip`` axes, and number format."""
    return tuple(images.shape[skip:]), images.dtype


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
