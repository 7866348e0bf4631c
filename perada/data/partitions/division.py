# SPDX-License-Identifier: Apache-2.0
"""How a set is divided: among clients and server, and into training and validation images."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from perada.core.checks import OptionError, check_integer, check_number
from perada.core.seeding import derive_seed
from perada.core.text import abbreviated
from perada.data.batches.datasets import entries, isolated_randomness, read_item, resolved
from perada.data.batches.transforms import to_image
from perada.data.federated import FederatedData
from perada.data.partitions import Assignment, Partition, Split
from perada.data.partitions.shares import Array, hashed_share, whole_groups
from perada.data.sets.base import ImageSet, checked_columns, class_names, split_of


@dataclass(frozen=True)
class Division:
    """How an image set is shared out: the options of :class:`perada.data.FederatedDataModule`."""

    dataset: ImageSet
    partition: Partition
    public: ImageSet | None = None
    public_fraction: float = 0.0
    validation_fraction: float = 0.0
    train_limit: int | None = None
    test_limit: int | None = None
    public_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("public_fraction", "validation_fraction"):
            check_number(name, getattr(self, name), ge=0, lt=1, hint="a share of the training images")
        if self.public_fraction + self.validation_fraction >= 1:
            raise OptionError(
                f"public_fraction={self.public_fraction} and validation_fraction={self.validation_fraction} leave "
                "the clients nothing: lower one of them",
                name="public_fraction",
                value=self.public_fraction,
            )
        if self.public is not None and self.public_fraction:
            raise ValueError(f"public and public_fraction={self.public_fraction} are both given: leave one out")
        for name in ("train_limit", "test_limit", "public_limit"):
            check_integer(name, getattr(self, name), optional=True, hint="by default all images are used")

    def download(self) -> None:
        """Fetch missing files if that was asked for."""
        self.dataset.download()
        if self.public is not None:
            self.public.download()

    def share_out(self) -> FederatedData:
        """Read the set and divide it.

        Raises:
            ValueError: If the set has no labels or cannot be divided so; for example, a client gets no sample.
        """
        parts = self.dataset.with_split(True), self.dataset.with_split(False)
        if parts[0].labels is None:
            raise ValueError(f"{self.dataset!r} has no labels: it can be the public set only, give another as dataset")
        used = self._sample("train", len(parts[0]), self.train_limit)
        counts = [round(len(used) * share) for share in (self.public_fraction, self.validation_fraction)]
        drawn = np.random.default_rng(derive_seed(self.seed, "hold_out"))
        held_out = whole_groups(groups_of(Subset(parts[0], used.tolist())), counts, drawn)
        public, validation, train = (used[rows] for rows in held_out)
        index = train, self._sample("test", len(parts[1]), self.test_limit)
        shown = [_split(part, rows) for part, rows in zip(parts, index, strict=True)]
        division = divide(self.partition, shown[0], shown[1], self.seed)
        train_of, test_of = (
            [Subset(part, np.sort(rows[own]).tolist()) for own in clients]
            for part, rows, clients in zip(parts, index, division, strict=True)
        )
        return FederatedData(
            train=train_of,
            test=test_of,
            public=self.public_images(parts[0], public.tolist()),
            server_validation=Subset(parts[0], validation.tolist()) if len(validation) else None,
            num_classes=parts[0].num_classes,
            classes=class_names(split_of(parts[0]), parts[0].classes, parts[0].num_classes),
            client_names=self.partition.client_names(shown[0]),
        )

    def record(self, data: FederatedData, held: Sequence[Dataset[Any]]) -> dict[str, Any]:
        """What ``partition.json`` holds of the divided data, and of what clients hold out: positions in the splits."""
        named = {"clients": list(data.client_names)} if data.client_names else {}
        server = [[] if one is None else positions(one) for one in (data.public, data.server_validation)]
        return {
            "num_clients": len(data.train),
            "dataset": repr(self.dataset),
            "partition": repr(self.partition),
            "seed": self.seed,
            "train": list(map(positions, data.train)),
            "test": list(map(positions, data.test)),
            "public": server[0] if self.public_fraction else repr(self.public),
            "server_validation": server[1],
            **named,
        } | ({"client_validation": list(map(positions, held))} if held else {})

    def _sample(self, part: str, total: int, limit: int | None) -> Array:
        """Positions of at most ``limit`` of ``total`` images, ascending."""
        if limit is None or limit >= total:
            return np.arange(total)
        rng = np.random.default_rng(derive_seed(self.seed, f"{part}_limit"))
        return np.sort(rng.permutation(total)[:limit])

    def public_images(self, train: ImageSet, held_out: list[int]) -> Dataset[Any] | None:
        """The public set: held-out training images, another set or some of it, or None."""
        if self.public is None:
            return Subset(train, held_out) if held_out else None
        chosen = self._sample("public", len(self.public), self.public_limit)
        return self.public if len(chosen) == len(self.public) else Subset(self.public, chosen.tolist())


def _split(images: ImageSet, index: Array) -> Split:
    """What the partition sees of the images at ``index``."""
    assert images.labels is not None
    columns = checked_columns(split_of(images), images.columns, len(images))
    rows = {name: column[index] for name, column in columns.items()}
    return Split(images.labels.numpy()[index], index, rows, type(images).__name__)


def divide(partition: Partition, train: Split, test: Split, seed: int) -> Assignment:
    """Each client's rows of both splits, as ``partition`` gives them.

    Raises:
        ValueError: If ``split`` takes other arguments, returns something else than rows for each client, a row that
            there is not, or one twice; or if it refuses the data.
    """
    who = f"{type(partition).__name__}.split"
    try:
        inspect.signature(partition.split).bind(train, test, seed)
    except TypeError as error:
        raise ValueError(
            f"{who} is called with train, test and seed: {error}; define split(self, train, test, seed)"
        ) from None
    given = partition.split(train, test, seed)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise _wrong(who, f"{len(given)} values" if isinstance(given, tuple | list) else f"one {type(given).__name__}")
    rows = _rows(who, "training", given[0], len(train)), _rows(who, "test", given[1], len(test))
    if len(rows[1]) not in (0, len(rows[0])):
        raise _wrong(who, f"rows of {len(rows[0])} clients for training and of {len(rows[1])} for testing")
    return rows


def _wrong(who: str, what: str) -> ValueError:
    return ValueError(
        f"{who} returned {what}; return two lists, of the clients' training rows and of their test rows, each with one "
        "integer array a client, of positions in train.labels or test.labels; a row belongs to one client, once"
    )


def _rows(who: str, part: str, given: Any, size: int) -> list[Array]:  # noqa: ANN401  # whatever a partition gives
    """The rows of each client, of which there are ``size``."""
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise _wrong(who, f"the {part} rows as {type(given).__name__}")
    clients, owner_of = list(map(np.asarray, given)), dict[int, int]()
    for client, own in enumerate(clients):
        if own.ndim != 1 or (len(own) and not np.issubdtype(own.dtype, np.integer)):
            what = f"array {own.shape} of {own.dtype}" + " (np.flatnonzero makes rows of a mask)" * (own.dtype == bool)
            raise _wrong(who, f"an {what} as the {part} rows of client {client}")
        for row in own.tolist():
            if not 0 <= row < size:
                raise _wrong(who, f"the {part} row {row} for client {client}, and there are {size}, from 0")
            if row in owner_of:
                raise _wrong(who, f"the {part} row {row} for the clients {owner_of[row]} and {client}")
            owner_of[row] = client
    return [own.astype(np.int64) for own in clients]


def positions(dataset: Dataset[Any]) -> list[int]:
    """Where the items of a dataset are in what it is a Subset of."""
    found: list[int] = resolved(dataset)[1].tolist()
    return found


def identities_of(dataset: Dataset[Any]) -> Array | None:
    """What images are set aside by, where this is not their position; see :attr:`.ImageSet.identities`."""
    base, rows = resolved(dataset)
    found = base.identities if isinstance(base, ImageSet) else None
    return None if found is None else found[rows]


def groups_of(dataset: Dataset[Any]) -> Array:
    """The groups (N,) of the images that stay together where images are set aside.

    Each image is a group by itself, unless the dataset, or what it is a Subset of, is an image set that names a column.

    Raises:
        ValueError: If there is no such column.
    """
    base, rows = resolved(dataset)
    if not isinstance(base, ImageSet) or base.group_column is None:
        return np.arange(len(rows))
    columns = checked_columns(split_of(base), base.columns, len(base))
    if base.group_column not in columns:
        raise ValueError(
            f"{split_of(base)}: group_column is {base.group_column!r}, and there is no such column among "
            f"{sorted(columns) or 'none'}; let columns give it, or set group_column to None"
        )
    groups: Array = columns[base.group_column][rows]
    return groups


def _fingerprint(dataset: Dataset[Any]) -> int:
    """A number that tells a client from most others: a hash of its first image, which one read gives."""
    with isolated_randomness():  # a dataset may draw, and then draws the same at every call
        item = read_item(dataset, 0, "a client")
        image = to_image(entries(item, labelled=False)[0])
    description = f"{tuple(image.shape)} {image.dtype}".encode()
    content = image.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(description + content, digest_size=16).digest(), "little")


def hold_out(
    datasets: Sequence[Dataset[Any]], share: float, seed: int
) -> tuple[list[Dataset[Any]], list[Dataset[Any]]]:
    """Draw each client's validation images: about ``share`` of its training images, but at least one and never all.

    A client's draw follows from the seed and from its own images, never from its place among the datasets: a site,
    which has the data of one client only, holds out the images that the client holds out in a simulation. Images of one
    group, such as a patient's, are all held out or all trained on; where each image is a group, the share is rounded to
    whole images. Images of one's own are chosen by what they are, and not by their number (:func:`.hashed_share`).

    Returns:
        What each client trains on, and what it holds out, in the order that they had.

    Raises:
        ValueError: If clients have fewer than two images, or images of one group alone; they are named.
    """
    identities = list(map(identities_of, datasets))
    pairs = zip(datasets, identities, strict=True)
    groups = [groups_of(dataset) if known is None else known for dataset, known in pairs]
    few = [str(client) for client, own in enumerate(groups) if len(np.unique(own)) < 2]
    if few:
        raise OptionError(
            f"client_validation={share} asks every client for a validation image and one to train on, and "
            f"client{'s' * (len(few) > 1)} {abbreviated(few, 10)} {'have' if len(few) > 1 else 'has'} fewer than 2, or "
            "those "
            "of one group alone, as one patient: give them more (min_per_client of Dirichlet), leave them out, or set "
            "client_validation to 0",
            name="client_validation",
            value=share,
        )
    train, validation = list[Dataset[Any]](), list[Dataset[Any]]()
    for client, (dataset, own) in enumerate(zip(datasets, groups, strict=True)):
        if identities[client] is None:
            rng = np.random.default_rng(derive_seed(seed, "client_validation", _fingerprint(dataset)))
            held = whole_groups(own, [round(len(own) * share)], rng, least=1)[0]
        else:
            alike: list[list[str]] = [[]] * len(own)
            drawn = derive_seed(seed, "client_validation")
            held = hashed_share(own.tolist(), [client] * len(own), alike, share, drawn)
        train.append(Subset(dataset, np.setdiff1d(np.arange(len(own)), held).tolist()))
        validation.append(Subset(dataset, held.tolist()))
    return train, validation
