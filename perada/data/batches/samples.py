# SPDX-License-Identifier: Apache-2.0
"""The clients' samples, and the batches of them that a step of local training, or of evaluation, sees.

Samples are gathered by index where the clients' datasets are tensors, and read item by item otherwise.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perada.core.rounds import (
    AnyBatch,
    BatchSize,
    CohortBatch,
    EvalBatch,
    PrivateSampling,
    RoundPlan,
    active_steps,
    batch_indices,
    rows_per_batch,
    sampling_rate,
    step_ids,
)
from perada.core.seeding import derive_seed, generator
from perada.core.states import to_device_async
from perada.core.text import abbreviated
from perada.data.batches.datasets import (
    Kind,
    Source,
    as_labels,
    check_kind,
    entries,
    isolated_randomness,
    kind,
    length,
    place,
    read_item,
    seed_all,
    tensor_source,
)
from perada.data.batches.transforms import UnreadableImageError, check_dtype, pad, resize_uint8, to_image
from perada.data.batches.workers import Reading, worker_loader
from perada.privacy.sampling import poisson_batches, shuffled_batches

Rows = tuple[Tensor, Tensor | None, dict[int, Exception]]  # images, labels, and why some cannot be read, by their place
T = TypeVar("T")


class Samples(ABC):
    """Clients' samples: each of ``sizes`` is a client's number of them."""

    sizes: tuple[int, ...]
    by_item = False  # read one by one, by worker processes if there are any
    on_device = False  # where training is on a GPU, they are there already

    @cached_property
    def starts(self) -> Tensor:
        """Place of each client's first sample among all of them."""
        return torch.tensor([0, *self.sizes]).cumsum(0)[:-1]

    def client_labels(self) -> Sequence[Tensor | None]:
        """Labels of every client's samples, in order, where all are known."""
        return [None for _ in self.sizes]

    @cached_property
    def class_counts(self) -> Tensor | None:
        """Number of samples of each client and class (M, K), on the CPU, K the largest class that anyone has, and one.

        None where samples have several labels, or labels are not all known.
        """
        known = [labels.cpu() for labels in self.client_labels() if labels is not None]
        if len(known) < len(self.sizes) or any(labels.ndim > 1 for labels in known):
            return None
        labels = torch.cat(known)
        owners, classes = torch.arange(len(known)).repeat_interleave(torch.tensor(self.sizes)), int(labels.max()) + 1
        return torch.bincount(owners * classes + labels, minlength=len(known) * classes).view(-1, classes)

    @abstractmethod
    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read the rows ``indices`` (N,) of the datasets of ``owners`` (N,).

        What datasets draw at random is derived from ``key`` and the sample, and leaves the global streams alone.

        Returns:
            Images (N, ...), with zeros for those that cannot be read; labels (N,) or (N, K), None if unlabelled; and
            why some cannot be read.
        """

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Read rows as :meth:`read`; the first that cannot be read raises its error."""
        images, labels, failed = self.read(owners, indices, key)
        for error in failed.values():
            raise error
        return images, labels


class TensorStore(Samples):
    """Clients' samples as rows of one image tensor, of one source a client; images and labels are of one kind."""

    def __init__(self, sources: Sequence[Source]) -> None:
        bases: dict[tuple[int, int], int] = {}  # of images and labels by id -> their first row in the concatenation
        images, labels, places = list[Tensor](), list[Tensor](), []
        for source in sources:
            base = id(source.images), id(source.labels)
            if base not in bases:
                bases[base] = sum(map(len, images))
                images.append(source.images)
                labels += [] if source.labels is None else [as_labels(source.labels)]
            places.append(source.rows + bases[base])
        self.images = images[0] if len(images) == 1 else torch.cat(images)
        if self.images.dtype == torch.uint8 and self.images.ndim == 3:
            self.images = self.images.unsqueeze(1)
        self.labels = (labels[0] if len(labels) == 1 else torch.cat(labels)) if labels else None
        self.sizes = tuple(len(source.rows) for source in sources)
        self.table = torch.cat(places)

    @property
    def on_device(self) -> bool:  # type: ignore[override]  # known from the tensor
        """Whether the images are on a GPU."""
        return self.images.is_cuda

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Gather rows."""
        rows = to_device_async(self.table[self.starts[owners] + indices], self.images.device)
        return self.images[rows], None if self.labels is None else self.labels[rows], {}

    def client_labels(self) -> list[Tensor]:
        """Labels of every client's samples, in order."""
        assert self.labels is not None
        return list(torch.split(self.labels[self.table.to(self.labels.device)], list(self.sizes)))

    def to(self, device: torch.device, limit_bytes: int) -> None:
        """Move the tensors to ``device`` unless they take more than ``limit_bytes``."""
        if self.images.device != device and self.images.numel() * self.images.element_size() <= limit_bytes:
            self.images = self.images.to(device)
            self.labels = None if self.labels is None else self.labels.to(device)


class MapStore(Samples):
    """Clients' samples read one by one from map-style datasets, one a client.

    Of items that are not ``labelled`` only the image is looked at. uint8 images are resized to ``size`` as they are
    read, so that they can be stacked. The checks of the data say what they find: the number of each label, if an image
    has one alone (``classes``), and the labels of every client of which all are known (``known``).
    """

    by_item = True

    def __init__(self, datasets: Sequence[Dataset[Any]], labelled: bool, size: int | None = None) -> None:
        self.datasets, self.labelled, self.size = datasets, labelled, size
        self.sizes = tuple(length(dataset) for dataset in datasets)
        self.classes: Mapping[str, int] | range | None = None
        self.known: list[Tensor | None] = [None] * len(datasets)
        self.client_names: Sequence[str] | None = None
        self.reading: Reading | None = None  # where workers note what they read
        self._blank: tuple[Tensor, Tensor | None] | None = None  # a sample of zeros

    def named(self, owner: int, index: int) -> str:
        """Name a sample for a message."""
        who = f"client {owner}" if self.labelled else "the public set"
        if self.labelled and self.client_names is not None:
            who += f" ({self.client_names[owner]!r})"
        return f"sample {index}{place(self.datasets[owner], index)} of {who}"

    def item(self, owner: int, index: int, resize: bool = True) -> tuple[Tensor, Tensor | str | None]:
        """Read one sample: image, in the store's size or as the dataset has it, and label or None."""
        who = f"client {owner}" if self.labelled else "the public set"
        item = read_item(self.datasets[owner], index, who)
        try:
            given, label = entries(item, self.labelled)
            image = to_image(given)
            if self.labelled and not isinstance(label, str):
                label = as_labels(label, of_one_image=True)
        except TypeError as error:
            raise TypeError(f"{who}, sample {index}: {error}") from None
        if image.is_floating_point() and not image.isfinite().all():
            where = place(self.datasets[owner], index)
            raise UnreadableImageError(
                f"{who}, sample {index}{where}, is an image with NaN or infinity: fix it or leave it out"
            )
        if resize and self.size is not None and image.dtype == torch.uint8:
            image = resize_uint8(image, self.size)
        return image, label if label is None or self.classes is None else self.number(owner, label)

    def number(self, owner: int, label: Tensor | str) -> Tensor:
        """The class of a label; a ValueError if it is none of those known."""
        value: Any = label if isinstance(label, str) else int(label)
        assert self.classes is not None
        if value not in self.classes:
            words = not isinstance(self.classes, range)
            known = abbreviated(list(map(repr, self.classes))) if words else f"0..{len(self.classes) - 1}"
            raise ValueError(
                f"client {owner} has the label {value!r}, outside {known}: correct the label or "
                f"{'classes' if words else 'num_classes'}"
            )
        return torch.tensor(self.classes[value])

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Read rows; a store of which nothing was read yet raises the reason why the first cannot be read."""
        rows: list[tuple[Tensor, Tensor | None] | None] = []
        failed: dict[int, Exception] = {}
        first: Kind | None = None if self._blank is None else kind(self._blank[0], 0)
        with isolated_randomness():
            for row, (owner, index) in enumerate(zip(owners.tolist(), indices.tolist(), strict=True)):
                seed_all(derive_seed(key[0] if key else 0, "items", *key[1:], owner, index))
                if self.reading is not None:
                    self.reading.begin(owner, index)
                try:
                    image, label = self.item(owner, index)
                    assert not isinstance(label, str)
                    first = first or kind(image, 0)
                    check_kind(owner, kind(image, 0), first)
                except Exception as error:  # of one client, whom the others need not share it with
                    failed[row] = error
                    rows.append(self._blank)
                    continue
                blank = None if label is None else torch.zeros_like(label)
                self._blank = self._blank or (torch.zeros_like(image), blank)
                rows.append((image, label))
        if self.reading is not None:
            self.reading.end()
        if None in rows:
            raise next(iter(failed.values()))
        known = [row for row in rows if row is not None]
        labels = [label for _, label in known if label is not None]
        return torch.stack([image for image, _ in known]), torch.stack(labels) if labels else None, failed

    def client_labels(self) -> list[Tensor | None]:
        """Labels of every client's samples, where all are known."""
        return self.known


Store = TensorStore | MapStore


def make_store(datasets: Sequence[Dataset[Any]], labelled: bool = True, size: int | None = None) -> Store:
    """Choose the fast store if all datasets are tensors of one kind; others are read item by item, or refused then.

    Raises:
        ValueError: If images have no labels, and need them.
        TypeError: If images or labels are of a type that cannot be used.
    """
    found, kinds = [], set()
    for client, dataset in enumerate(datasets):
        source = tensor_source(dataset, labelled)
        if source is None:
            return MapStore(datasets, labelled, size)
        found.append(source)
        if labelled and source.labels is None:
            raise ValueError(f"client {client}: its images have no labels; give labelled ones, or leave the client out")
        check_dtype(source.images)
        one = None if source.labels is None else as_labels(source.labels)
        kinds.add((kind(source.images), one if one is None else kind(one)))
        floating = one is not None and one.ndim == 1 and one.is_floating_point()
        if floating or len(kinds) > 1:
            return MapStore(datasets, labelled, size)
    return TensorStore(found) if found else MapStore(datasets, labelled, size)


class RoundBatches(Dataset[AnyBatch]):
    """The cohort batches of one round: who trains for how long is in ``plan``; B rows, or all where it is "full".

    A client's batches depend on the seed, the round and the client, not on the cohort. All are drawn when the dataset
    is made, so every worker serves the same ones. With ``private`` an item is a dict of one batch for each stream of
    its phase, by name, and batches depend on the stream too; with ``private.secure`` on nothing but a cryptographic
    generator. So do the datasets' random transforms, which go by an image's place: if they were known, removing an
    image would visibly change those of all images after it. A stream continues from one of its phases to the next, and
    does not advance in phases without it: a shuffled stream begins as few passes as its steps need.

    B is the mean number of rows where batches are Poisson samples, the largest where passes are shuffled. A batch may
    then hold no image of a client: its count is 0. The rows (C, B, ...) are as wide as the largest count, at least 1.

    Raises:
        ValueError: If the plan has another number of phases than ``private`` has streams for.
    """

    def __init__(
        self,
        store: Samples,
        plan: RoundPlan,
        batch_size: BatchSize,
        seed: int,
        private: PrivateSampling | None = None,
    ) -> None:
        self.store, self.plan, self.batch_size, self.seed, self.private = store, plan, batch_size, seed, private
        streams = (("",),) * len(plan.steps) if private is None else private.streams
        if len(streams) != len(plan.steps):
            raise ValueError(f"private names the streams of {len(streams)} phases, not of {len(plan.steps)}; name all")
        self._items = secrets.randbits(256) if private is not None and private.secure else seed
        self.walk = list(active_steps(plan))
        drawn = {}
        for name in {name for phase in streams for name in phase}:
            steps = [own for own, named in zip(plan.steps, streams, strict=True) if name in named]
            totals = map(sum, zip(*steps, strict=True))
            drawn[name] = [iter(self._draw(name, *one)) for one in zip(plan.clients, totals, strict=True)]
        self.indices = [  # of each step, by stream and active client
            {name: list(map(next, drawn[name][:active])) for name in streams[phase]} for phase, _, active in self.walk
        ]

    def __len__(self) -> int:
        return len(self.walk)

    def __getitem__(self, step: int) -> AnyBatch:
        batches = {name: self._batch(name, step) for name in self.indices[step]}
        return batches[""] if self.private is None else batches

    def _draw(self, name: str, client: int, steps: int) -> Sequence[Tensor]:
        """All batches of a stream for a client: indices into its images."""
        size, seed, round = self.store.sizes[client], self.seed, self.plan.round
        if self.private is None:
            return batch_indices(size, self.batch_size, steps, seed, "batches", round, client).unbind()
        secure = self.private.secure
        if self.private.sampling == "poisson":
            rate = sampling_rate(size, self.batch_size)
            return poisson_batches(size, rate, steps, seed=seed, role=name, round=round, client=client, secure=secure)
        rows = rows_per_batch(size, self.batch_size)
        return shuffled_batches(size, rows, steps, seed=seed, role=name, round=round, client=client, secure=secure)

    def _batch(self, name: str, step: int) -> CohortBatch:
        """A stream's batch in a step of the round.

        Samples that cannot be read are zeros, or, in a private round, not in it.
        """
        indices, round = self.indices[step][name], self.plan.round
        phase, step, _ = self.walk[step]
        clients, counts = self.plan.clients[: len(indices)], tuple(map(len, indices))
        if not clients:
            return CohortBatch((), torch.empty(0), torch.empty(0), (), phase, step, round)
        owners, rows = torch.tensor(clients).repeat_interleave(torch.tensor(counts)), torch.cat(list(indices))
        if not len(rows):  # an image is read for its shape, and dropped
            owners, rows = torch.tensor(clients[:1]), torch.zeros(1, dtype=torch.int64)
        stream = () if self.private is None else (derive_seed(self._items, f"stream/{name}"),)
        x, y, reasons = self.store.read(owners, rows, (self._items, round, *step_ids(phase, step), *stream))
        assert y is not None
        failed = {int(owners[row]): str(error) for row, error in reasons.items()}
        failed |= {who: f"client {who}: {text}" for who, text in failed.items() if f"client {who}" not in text}
        kept = [row for row in range(sum(counts)) if self.private is None or row not in reasons]
        if len(kept) < len(x):
            x, y, left = x[kept], y[kept], owners[kept].tolist()
            counts = tuple(left.count(client) for client in clients)
        table = self.store.class_counts if self.private is None else None
        classes = None if table is None else table[list(clients)]
        rows_of = pad(x, counts), pad(y, counts), counts
        return CohortBatch(clients, *rows_of, phase, step, round, tuple(failed.items()), classes)


class EvalBatches(Dataset[EvalBatch]):
    """All samples of all clients, each once, in order of client; the last batch may have fewer than B rows.

    The run's seed is for datasets that draw.
    """

    def __init__(self, store: Samples, batch_size: int, seed: int) -> None:
        self.store, self.batch_size, self.seed = store, batch_size, seed
        self.owners = torch.arange(len(store.sizes)).repeat_interleave(torch.tensor(store.sizes))
        self.indices = torch.arange(len(self.owners)) - store.starts[self.owners]

    def __len__(self) -> int:
        return -(-len(self.owners) // self.batch_size)

    def __getitem__(self, step: int) -> EvalBatch:
        rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
        # No step among the indices: which one an image is in depends on how many images other clients have.
        x, y = self.store.take(self.owners[rows], self.indices[rows], (self.seed, -1))
        assert y is not None
        return EvalBatch(x, y, self.owners[rows])


def loader(batches: Dataset[T], store: Samples, num_workers: int) -> DataLoader[T]:
    """Serve batches in order. Tensors are gathered in this process: workers would only slow that down."""
    workers = num_workers if store.by_item else 0
    # Its own generator, or each iterator would take a number from the global stream.
    own = generator(0, "loader")
    # Where training is on a GPU, what the host reads is copied there without a wait.
    pin = torch.cuda.is_initialized() and not store.on_device
    # A batch is copied as it is: the default would turn tuples into lists.
    reading = None
    if workers and isinstance(store, MapStore):
        store.reading = reading = Reading(workers, store.named)
    return worker_loader(batches, workers, reading, collate_fn=copy, generator=own, pin_memory=pin)
