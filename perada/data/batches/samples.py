# SPDX-License-Identifier: Apache-2.0
"""The clients' samples.

Samples are gathered by index if the clients' datasets are tensors, and read item by item otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.seeding import derive_seed
from perada.core.states import to_device_async
from perada.core.text import abbreviated
from perada.data.batches.datasets import (
    Resolve,
    Source,
    as_labels,
    check_same_format,
    image_and_label,
    is_repeatable,
    isolated_randomness,
    location_of,
    read_item,
    resolve_subset,
    seed_all,
    size_of_targets,
    tensor_format,
    tensor_source,
)
from perada.data.batches.transforms import UnreadableImageError, check_dtype, resize_uint8, to_image
from perada.data.batches.workers import WorkerProgress
from perada.tasks.geometry import Size

Rows = tuple[Tensor, Tensor | None, dict[int, Exception]]
"""Images, labels, and the errors of those that cannot be read, by their position in the images."""
SamplesT = TypeVar("SamplesT", bound="Samples")
CLIENT = "client {client}"
"""Owner of samples in messages, if each client has some."""
PUBLIC_SET = "the public set"
"""Owner of the images of the server's distillation in messages."""


class Samples(ABC):
    """The clients' samples: client ``i`` has ``sizes[i]`` of them."""

    sizes: tuple[int, ...]
    by_item = False
    """Whether samples are read one by one, by worker processes if there are any."""
    on_device = False
    """Whether samples are on the accelerator already."""
    has_classes = True
    """Whether labels are classes, which can be counted. Set by the checks of the data."""

    @cached_property
    def starts(self) -> Tensor:
        """Position (M,) of each client's first sample among all samples."""
        return torch.tensor([0, *self.sizes]).cumsum(0)[:-1]

    def client_labels(self) -> Sequence[Tensor | None]:
        """Return the labels of every client's samples, in order; None for a client whose labels are not all known."""
        return [None for _ in self.sizes]

    def labels_of(self, client: int) -> Tensor | None:
        """Return the labels (n, ...) of a client's samples on the CPU; None if not all are known."""
        return None

    def all_labels(self) -> Tensor | None:
        """Return the labels (N,) or (N, K) of all samples by client, on the CPU; None if not all are known."""
        labels_of_clients = [labels.cpu() for labels in self.client_labels() if labels is not None]
        if len(labels_of_clients) < len(self.sizes) or len({labels.ndim for labels in labels_of_clients}) > 1:
            return None
        return torch.cat(labels_of_clients)

    @cached_property
    def class_counts(self) -> Tensor | None:
        """Number of samples (M, K) of each client and class, on the CPU; K is the largest occurring class plus one.

        None if samples have several labels or numbers, or labels are not all known.
        """
        if not self.has_classes:
            return None
        labels = self.all_labels()
        if labels is None or labels.ndim > 1:
            return None
        num_clients = len(self.sizes)
        owners = torch.arange(num_clients).repeat_interleave(torch.tensor(self.sizes))
        num_classes = int(labels.max()) + 1
        cells = owners * num_classes + labels
        return torch.bincount(cells, minlength=num_clients * num_classes).view(-1, num_classes)

    @abstractmethod
    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read samples.

        Args:
            owners: Client (N,) of each sample.
            indices: Index (N,) of each sample in its client's dataset.
            key: Key from which, with the sample, the random draws of datasets are derived. The global streams are
                restored.

        Returns:
            Images (N, ...), with zeros for those that cannot be read; labels (N,) or (N, K), or None without labels;
            and the errors of those that cannot be read.
        """

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Read samples as :meth:`read` does, but raise the error of the first that cannot be read."""
        images, labels, failed = self.read(owners, indices, key)
        for error in failed.values():
            raise error
        return images, labels


class TensorStore(Samples):
    """Samples of clients whose datasets are tensors, one source per client, as rows of one image tensor."""

    def __init__(self, sources: Sequence[Source]) -> None:
        # Clients often have Subsets of the same tensors, which are concatenated once.
        first_row_of: dict[tuple[int, int], int] = {}
        image_tensors: list[Tensor] = []
        label_tensors: list[Tensor] = []
        first_rows = []
        num_rows = 0
        for source in sources:
            base = (id(source.images), id(source.labels))
            if base not in first_row_of:
                first_row_of[base] = num_rows
                num_rows += len(source.images)
                image_tensors.append(source.images)
                if source.labels is not None:
                    label_tensors.append(as_labels(source.labels))
            first_rows.append(first_row_of[base])
        self.images = _join_tensors(image_tensors)
        if self.images.dtype == torch.uint8 and self.images.ndim == 3:
            self.images = self.images.unsqueeze(1)
        self.labels = _join_tensors(label_tensors) if label_tensors else None
        self.sizes = tuple(source.rows.numel() for source in sources)
        # One sum for all clients, of whom there may be 100,000.
        rows = torch.cat([source.rows for source in sources])
        self.table = rows + torch.tensor(first_rows).repeat_interleave(torch.tensor(self.sizes))
        """Row of ``images`` of each sample, client after client."""

    @property
    def on_device(self) -> bool:  # type: ignore[override]  # depends on the tensor
        """Whether the images are on a GPU."""
        return self.images.is_cuda

    def select(self, clients: Sequence[int]) -> "TensorStore":
        """Return a store of some of the clients, in the given order, as if there were no others."""
        rows_of_clients = torch.split(self.table, list(self.sizes))
        selected = _copy_without_caches(self)
        selected.table = torch.cat([rows_of_clients[client] for client in clients])
        selected.sizes = tuple(self.sizes[client] for client in clients)
        return selected

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Gather rows."""
        rows = to_device_async(self.table[self.starts[owners] + indices], self.images.device)
        labels = None if self.labels is None else self.labels[rows]
        return self.images[rows], labels, {}

    def all_labels(self) -> Tensor:
        """Return the labels of all samples, client after client, on the CPU."""
        assert self.labels is not None
        return self.labels[self.table.to(self.labels.device)].cpu()

    def labels_of(self, client: int) -> Tensor:
        """Return the labels (n, ...) of a client's samples, on the CPU."""
        assert self.labels is not None
        start = int(self.starts[client])
        rows = self.table[start : start + self.sizes[client]]
        return self.labels[rows.to(self.labels.device)].cpu()

    def client_labels(self) -> list[Tensor]:
        """Return the labels of every client's samples, in order."""
        assert self.labels is not None
        labels = self.labels[self.table.to(self.labels.device)]
        return list(torch.split(labels, list(self.sizes)))

    def to(self, device: torch.device, limit_bytes: int) -> None:
        """Move the tensors to ``device`` unless the images take more than ``limit_bytes``."""
        if self.images.device == device or self.images.nbytes > limit_bytes:
            return
        self.images = self.images.to(device)
        if self.labels is not None:
            self.labels = self.labels.to(device)


def _copy_without_caches(store: SamplesT) -> SamplesT:
    """Return a shallow copy of a store without what it has cached of its clients."""
    result = copy(store)
    for name, attribute in vars(Samples).items():
        if isinstance(attribute, cached_property):
            vars(result).pop(name, None)
    return result


def _join_tensors(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class MapStore(Samples):
    """Clients' samples read one by one from map-style datasets, one per client.

    Args:
        datasets: The datasets.
        labelled: Whether to read labels. If False, only the image of an item is used.
        size: Height and width to resize uint8 images to as they are read, so that they can be stacked; None keeps them.
        resolve: Finds the dataset behind a Subset, and so the number of items.
        owner: Name of the samples' owner in messages, in which ``{client}`` stands for the number of the client.

    Attributes:
        class_numbers: Number of each label, if an image has a single label. Set by the checks of the data.
        check_target: Raises a ValueError for an invalid label that is not a class, given the height and width that it
            refers to. Set by the checks of the data.
        resize_target: Scales a label with positions, such as a mask, with its image; see :meth:`.Task.resized`. Set by
            the checks of the data.
        known_labels: Labels of each client whose labels are all known, else None. Set by the checks of the data.
        client_names: Names of the clients for messages.
        progress: Where workers record what they are reading.
    """

    by_item = True

    def __init__(
        self,
        datasets: Sequence[Dataset[Any]],
        labelled: bool,
        size: int | None = None,
        resolve: Resolve = resolve_subset,
        owner: str = CLIENT,
    ) -> None:
        self.datasets = datasets
        self.labelled = labelled
        self.owner = owner
        self.size = size
        self.sizes = tuple(len(resolve(dataset).rows) for dataset in datasets)
        self.class_numbers: Mapping[str, int] | range | None = None
        self.check_target: Callable[[Tensor, Size], None] | None = None
        self.resize_target: Callable[[Tensor, Size, Size], Tensor] | None = None
        self.known_labels: list[Tensor | None] = [None] * len(datasets)
        self.client_names: Sequence[str] | None = None
        self.progress: WorkerProgress | None = None
        self._blank: tuple[Tensor, Tensor | None] | None = None  # zeros in the format of the first sample read

    def select(self, clients: Sequence[int]) -> "Store":
        """Return a store of some of the clients, in the given order, as if there were no others.

        It is a TensorStore if the datasets of these clients are tensors of one format.
        """
        datasets = [self.datasets[client] for client in clients]
        store = make_store(datasets, self.labelled, self.size, owner=self.owner)
        if isinstance(store, TensorStore):
            return store
        selected = _copy_without_caches(self)
        selected.datasets = datasets
        selected.sizes = store.sizes
        selected.known_labels = [self.known_labels[client] for client in clients]
        if self.client_names is not None:
            selected.client_names = [self.client_names[client] for client in clients]
        return selected

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether each image is the same whenever it is read, as far as its dataset promises that."""
        return all(is_repeatable(dataset) for dataset in self.datasets)

    def describe(self, owner: int, index: int) -> str:
        """Name a sample for a message."""
        name = self._owner_name(owner)
        if "{client}" in self.owner and self.client_names is not None:
            name += f" ({self.client_names[owner]!r})"
        return f"sample {index}{location_of(self.datasets[owner], index)} of {name}"

    def _owner_name(self, owner: int) -> str:
        return _named_owner(self.owner, owner)

    def item(self, owner: int, index: int, resize: bool = True) -> tuple[Tensor, Tensor | str | None]:
        """Read one sample.

        Args:
            owner: Client of the sample.
            index: Index in the client's dataset.
            resize: Whether to resize a uint8 image to the store's size.

        Returns:
            The image, and its label or None. A label is a word until the checks of the data have numbered the classes.
        """
        owner_name = self._owner_name(owner)
        item = read_item(self.datasets[owner], index, owner_name)
        try:
            stored_image, label = image_and_label(item, self.labelled)
            image = to_image(stored_image)
            if self.labelled and not isinstance(label, str):
                label = as_labels(label, of_one_image=True)
        except TypeError as error:
            raise TypeError(f"{owner_name}, sample {index}: {error}") from None
        _check_pixels(f"{owner_name}, sample {index}{location_of(self.datasets[owner], index)}", image.shape)
        if image.is_floating_point() and not image.isfinite().all():
            location = location_of(self.datasets[owner], index)
            raise UnreadableImageError(
                f"sample {index}{location}, is an image with NaN or infinity",
                remedy="fix it or leave it out",
                owner=owner_name,
            )
        if self.check_target is not None and isinstance(label, Tensor):
            label = self._checked_target(label, image, owner, index)
        if resize and self.size is not None and image.dtype == torch.uint8:
            size = _size_of(image)
            image = resize_uint8(image, self.size)
            if self.resize_target is not None and isinstance(label, Tensor):
                label = self.resize_target(label, size, _size_of(image))
        if label is not None and self.class_numbers is not None:
            label = self.class_number(owner, label)
        return image, label

    def _checked_target(self, target: Tensor, image: Tensor, owner: int, index: int) -> Tensor:
        """Return the target of an image, scaled like the image if its dataset resizes only the images.

        Raises:
            ValueError: If the target is invalid. The message names the sample.
        """
        assert self.check_target is not None
        dataset = self.datasets[owner]
        size = _size_of(image)
        own_size = size
        if self.resize_target is not None:
            own_size = size_of_targets(dataset, index) or size
        try:
            self.check_target(target, own_size)
        except ValueError as error:
            sample = f"{self._owner_name(owner)}, sample {index}{location_of(dataset, index)}"
            raise ValueError(f"{sample}: {error}") from None
        if self.resize_target is None:
            return target
        return self.resize_target(target, own_size, size)

    def class_number(self, owner: int, raw_label: Tensor | str) -> Tensor:
        """Return the number of a label's class.

        Raises:
            ValueError: If the label is not one of the classes.
        """
        assert self.class_numbers is not None
        value: Any = raw_label if isinstance(raw_label, str) else int(raw_label)
        if value not in self.class_numbers:
            allowed = f"0..{len(self.class_numbers) - 1}"
            option = "num_classes"
            if not isinstance(self.class_numbers, range):
                allowed = abbreviated([repr(name) for name in self.class_numbers])
                option = "classes"
            raise ValueError(
                f"{self._owner_name(owner)} has the label {value!r}, outside {allowed}: correct the label or {option}"
            )
        return torch.tensor(self.class_numbers[value])

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read samples one by one.

        The error of a sample is raised if no sample was read before, since the format of its replacement is unknown.
        """
        items: list[tuple[Tensor, Tensor | None] | None] = []
        error_of_row: dict[int, Exception] = {}
        expected = None if self._blank is None else tensor_format(self._blank[0], 0)
        with isolated_randomness():
            for position, (owner, index) in enumerate(zip(owners.tolist(), indices.tolist(), strict=True)):
                seed_all(self._item_seed(key, owner, index))
                if self.progress is not None:
                    self.progress.begin(owner, index)
                try:
                    image, label = self.item(owner, index)
                    assert not isinstance(label, str)
                    image_format = tensor_format(image, 0)
                    expected = expected or image_format
                    check_same_format(self._owner_name(owner), image_format, expected)
                except Exception as error:  # whatever a dataset raises concerns one client only
                    error_of_row[position] = error
                    items.append(self._blank)
                    continue
                if self._blank is None:
                    blank_label = None if label is None else torch.zeros_like(label)
                    self._blank = (torch.zeros_like(image), blank_label)
                items.append((image, label))
        if self.progress is not None:
            self.progress.end()
        complete_samples = [sample for sample in items if sample is not None]
        if len(complete_samples) < len(items):
            raise next(iter(error_of_row.values()))
        images = torch.stack([image for image, _ in complete_samples])
        labels = [label for _, label in complete_samples if label is not None]
        return images, torch.stack(labels) if labels else None, error_of_row

    def _item_seed(self, key: tuple[int, ...], owner: int, index: int) -> int:
        """Derive the seed for a dataset's random draws of one sample; the key begins with the run's seed."""
        seed, *ids = key or (0,)
        return derive_seed(seed, "items", *ids, owner, index)

    def labels_of(self, client: int) -> Tensor | None:
        """Return the labels (n, ...) of a client's samples; None if not all are known."""
        return self.known_labels[client]

    def client_labels(self) -> list[Tensor | None]:
        """Return the labels of every client's samples; None for a client whose labels are not all known."""
        return self.known_labels


Store = TensorStore | MapStore


def make_store(
    datasets: Sequence[Dataset[Any]],
    labelled: bool = True,
    size: int | None = None,
    resolve: Resolve = resolve_subset,
    owner: str = CLIENT,
) -> Store:
    """Make a TensorStore if all datasets are tensors of one format, else a MapStore, which rejects mixed formats later.

    Args:
        datasets: One dataset per client.
        labelled: Whether labels are needed.
        size: Height and width that a MapStore resizes uint8 images to; None keeps them.
        resolve: Finds the dataset behind a Subset.
        owner: Name of the samples' owner in messages, in which ``{client}`` stands for the number of the client.

    Raises:
        ValueError: If labels are needed and a dataset of tensors has none.
        TypeError: If images or labels have an unsupported type.
    """
    sources = []
    formats = set()
    checked_tensors = set()
    for client, dataset in enumerate(datasets):
        source = tensor_source(dataset, labelled, resolve)
        if source is None:
            return MapStore(datasets, labelled, size, resolve, owner)
        sources.append(source)
        # Clients often have Subsets of the same tensors, which are checked once.
        tensors = (id(source.images), id(source.labels))
        if tensors in checked_tensors:
            continue
        checked_tensors.add(tensors)
        if labelled and source.labels is None:
            raise ValueError(
                f"{_named_owner(owner, client)}: its images have no labels; use labelled images, or leave it out"
            )
        check_dtype(source.images)
        _check_pixels(_named_owner(owner, client), source.images.shape[1:])
        labels = None if source.labels is None else as_labels(source.labels)
        label_format = None if labels is None else tensor_format(labels)
        formats.add((tensor_format(source.images), label_format))
        if len(formats) > 1:
            return MapStore(datasets, labelled, size, resolve, owner)
    if not sources:
        return MapStore(datasets, labelled, size, resolve, owner)
    return TensorStore(sources)


def _size_of(image: Tensor) -> Size:
    """Return height and width of an image (Ch, H, W). Other samples, such as texts, have none: (0, 0)."""
    if image.ndim < 2:
        return 0, 0
    height, width = image.shape[-2:]
    return height, width


def _named_owner(owner: str, client: int) -> str:
    """Return the name of the owner of samples, with the number of the client if there is one of each client."""
    return owner.replace("{client}", str(client))


def _check_pixels(owner: str, shape: Sequence[int]) -> None:
    """Raise a ValueError, which begins with the owner, for images of a shape without pixels."""
    if 0 in shape:
        raise ValueError(f"{owner}: images of shape {tuple(shape)} have no pixels; leave them out, or read them again")
