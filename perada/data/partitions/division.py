# SPDX-License-Identifier: Apache-2.0
"""Divide an image set among the clients and the server, and hold out validation images at the clients."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from perada.core.checks import OptionError, check_integer, check_number, invalid_option, use_plain_numbers
from perada.core.seeding import derive_seed
from perada.core.text import abbreviated, quoted, value_text
from perada.data.batches.datasets import Resolve, image_and_label, isolated_randomness, read_item, resolve_subset
from perada.data.batches.transforms import to_image
from perada.data.federated import FederatedData
from perada.data.partitions import Assignment, Partition, Split
from perada.data.partitions.shares import Array, hashed_share, split_by_group
from perada.data.sets.base import ImageSet, checked_columns, class_names, split_of


@dataclass(frozen=True)
class Division:
    """Divides an image set among the clients and the server.

    The options are described at :class:`perada.data.FederatedDataModule`.
    """

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
        use_plain_numbers(self)
        for name in ("public_fraction", "validation_fraction"):
            check_number(name, getattr(self, name), ge=0, lt=1, hint="it is a share of the training images")
        if self.public_fraction + self.validation_fraction >= 1:
            raise OptionError(
                f"public_fraction={self.public_fraction} and validation_fraction={self.validation_fraction} leave "
                "the clients nothing: lower one of them",
                name="public_fraction",
                value=self.public_fraction,
            )
        if self.public is not None and self.public_fraction:
            raise ValueError(f"public and public_fraction={self.public_fraction} are mutually exclusive: leave one out")
        for name in ("train_limit", "test_limit", "public_limit"):
            check_integer(name, getattr(self, name), optional=True, hint="by default all images are used")

    def download(self) -> None:
        """Download missing files of the datasets that allow it."""
        self.dataset.download()
        if self.public is not None:
            self.public.download()

    def share_out(self) -> FederatedData:
        """Read the set and divide it.

        Raises:
            ValueError: If the set has no labels or cannot be divided this way, such as if a client gets no sample.
        """
        train_set = self.dataset.with_split(True)
        test_set = self.dataset.with_split(False)
        if train_set.labels is None:
            raise ValueError(
                f"{self.dataset!r} has no labels: use it only as the public set, and a different one as dataset"
            )

        # The server's shares are drawn from the limited training set, before the clients get the others.
        limited_index = self._sample_positions("train", len(train_set), self.train_limit)
        server_counts = []
        for name in ("public_fraction", "validation_fraction"):
            share = getattr(self, name)
            count = round(len(limited_index) * share)
            if share and not count:
                raise invalid_option(name, share, f"a share of at least one of {len(limited_index)} training images")
            server_counts.append(count)
        rng = np.random.default_rng(derive_seed(self.seed, "hold_out"))
        groups = groups_of_images(Subset(train_set, limited_index.tolist()))
        public_rows, validation_rows, client_rows = split_by_group(groups, server_counts, rng)
        train_index = limited_index[client_rows]
        test_index = self._sample_positions("test", len(test_set), self.test_limit)

        train_split = _as_split(train_set, train_index)
        test_split = _as_split(test_set, test_index)
        train_rows, test_rows = divide(self.partition, train_split, test_split, self.seed)
        server_validation = None
        if len(validation_rows):
            server_validation = Subset(train_set, limited_index[validation_rows].tolist())
        return FederatedData(
            train=[Subset(train_set, np.sort(train_index[rows]).tolist()) for rows in train_rows],
            test=[Subset(test_set, np.sort(test_index[rows]).tolist()) for rows in test_rows],
            public=self.public_images(train_set, limited_index[public_rows].tolist()),
            server_validation=server_validation,
            num_classes=train_set.num_classes,
            classes=class_names(split_of(train_set), train_set.classes, train_set.num_classes),
            client_names=self.partition.client_names(train_split),
        )

    def record(
        self, data: FederatedData, held_out: Sequence[Dataset[Any]], resolve: Resolve = resolve_subset
    ) -> dict[str, Any]:
        """Return the content of ``partition.json``, with images as positions in their split.

        Args:
            data: The divided data.
            held_out: Validation images of each client; empty for none.
            resolve: Finds the dataset behind a Subset.
        """
        record: dict[str, Any] = {
            "num_clients": len(data.train),
            "dataset": repr(self.dataset),
            "partition": repr(self.partition),
            "seed": self.seed,
            "train": [positions(dataset, resolve) for dataset in data.train],
            "test": [positions(dataset, resolve) for dataset in data.test],
            "public": repr(self.public),
            "server_validation": [],
        }
        if self.public_fraction:
            record["public"] = [] if data.public is None else positions(data.public)
        if data.server_validation is not None:
            record["server_validation"] = positions(data.server_validation)
        if data.client_names:
            record["clients"] = list(data.client_names)
        if held_out:
            record["client_validation"] = [positions(dataset, resolve) for dataset in held_out]
        return record

    def _sample_positions(self, purpose: str, total: int, limit: int | None) -> Array:
        """Draw the positions of at most ``limit`` of ``total`` images, ascending."""
        if limit is None or limit >= total:
            return np.arange(total)
        rng = np.random.default_rng(derive_seed(self.seed, f"{purpose}_limit"))
        return np.sort(rng.permutation(total)[:limit])

    def public_images(self, train_set: ImageSet, held_out: list[int]) -> Dataset[Any] | None:
        """Return the public set: ``public`` up to its limit, else the held-out training images, or None."""
        if self.public is None:
            return Subset(train_set, held_out) if held_out else None
        limited_index = self._sample_positions("public", len(self.public), self.public_limit)
        if len(limited_index) == len(self.public):
            return self.public
        return Subset(self.public, limited_index.tolist())


def _as_split(image_set: ImageSet, index: Array) -> Split:
    """Return the view that a partition gets of the images at ``index``."""
    assert image_set.labels is not None
    columns = checked_columns(split_of(image_set), image_set.columns, len(image_set))
    chosen_columns = {name: column[index] for name, column in columns.items()}
    return Split(image_set.labels.numpy()[index], index, chosen_columns, type(image_set).__name__)


def divide(partition: Partition, train: Split, test: Split, seed: int) -> Assignment:
    """Call the partition, which may be user code, and check what it returns.

    Returns:
        The rows of ``train`` and of ``test`` of each client.

    Raises:
        ValueError: If ``split`` takes other arguments, rejects the data, or does not return rows for each client, each
            existing row at most once.
    """
    name = f"{type(partition).__name__}.split"
    try:
        inspect.signature(partition.split).bind(train, test, seed)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with train, test and seed: {error}; define split(self, train, test, seed)"
        ) from None
    assignment: Any = partition.split(train, test, seed)
    if not isinstance(assignment, tuple | list):
        raise _invalid_split(name, value_text(assignment))
    if len(assignment) != 2:
        raise _invalid_split(name, f"{len(assignment)} values")
    train_rows = _checked_rows(name, "training", assignment[0], len(train))
    test_rows = _checked_rows(name, "test", assignment[1], len(test))
    if len(test_rows) not in (0, len(train_rows)):
        sizes = f"rows of {len(train_rows)} clients for training and of {len(test_rows)} for testing"
        raise _invalid_split(name, sizes)
    return train_rows, test_rows


def _invalid_split(name: str, returned: str) -> ValueError:
    """Return the error for a split function whose result has the wrong form."""
    return ValueError(
        f"{name} returned {returned}; return two lists, the clients' training rows and test rows, each with one "
        "integer array per client of positions in train.labels or test.labels; each row must occur only once"
    )


def _checked_rows(name: str, part: str, rows_of_clients: Any, num_rows: int) -> list[Array]:  # noqa: ANN401  # from users
    """Return the rows of each client as int64 arrays, after checking them against the ``num_rows`` of the split."""
    if not isinstance(rows_of_clients, Sequence | np.ndarray) or isinstance(rows_of_clients, str):
        raise _invalid_split(name, f"the {part} rows as {value_text(rows_of_clients)}")
    arrays = [_as_array(rows) for rows in rows_of_clients]
    if not _are_disjoint_rows(arrays, num_rows):
        raise _invalid_split(name, _first_invalid_rows(part, arrays, num_rows))
    return [rows.astype(np.int64) for rows in arrays]


def _as_array(rows_of_client: object) -> Array:
    """Return rows as an array; lists of unequal lengths within rows as an array of objects, which is rejected."""
    try:
        return np.asarray(rows_of_client)
    except ValueError:
        return np.empty((), dtype=object)


def _is_row_array(array: Array) -> bool:
    """Return whether an array is a list of integers, or empty: numpy converts an empty list to floats."""
    return array.ndim == 1 and (len(array) == 0 or np.issubdtype(array.dtype, np.integer))


def _are_disjoint_rows(rows_of_clients: Sequence[Array], num_rows: int) -> bool:
    """Return whether clients have rows of a split of ``num_rows``, each at most once."""
    if not all(_is_row_array(rows) for rows in rows_of_clients):
        return False
    nonempty = [rows.astype(np.int64) for rows in rows_of_clients if len(rows)]
    if not nonempty:
        return True
    # All rows are checked at once, since there may be 100,000 clients and millions of rows.
    all_rows = np.concatenate(nonempty)
    if all_rows.min() < 0 or all_rows.max() >= num_rows:
        return False
    return bool(np.bincount(all_rows).max() == 1)


def _first_invalid_rows(part: str, rows_of_clients: Sequence[Array], num_rows: int) -> str:
    """Describe the first invalid rows of a client for a message; the rows must not pass :func:`_are_disjoint_rows`."""
    owner_of_row: dict[int, int] = {}
    for client, rows in enumerate(rows_of_clients):
        if not _is_row_array(rows):
            hint = " (np.flatnonzero makes rows of a mask)" if rows.dtype == bool else ""
            return f"an array {rows.shape} of {rows.dtype}{hint} as the {part} rows of client {client}"
        for row in rows.tolist():
            if not 0 <= row < num_rows:
                return f"the {part} row {row} for client {client}, outside 0..{num_rows - 1}"
            if row in owner_of_row:
                return f"the {part} row {row} for the clients {owner_of_row[row]} and {client}"
            owner_of_row[row] = client
    raise AssertionError("all rows are valid")


def positions(dataset: Dataset[Any], resolve: Resolve = resolve_subset) -> list[int]:
    """Return the positions of a dataset's items in the dataset that it is a Subset of."""
    item_positions: list[int] = resolve(dataset).rows.tolist()
    return item_positions


def identities_of(dataset: Dataset[Any]) -> Array | None:
    """Return :attr:`.ImageSet.identities` of the dataset's images; None if they are held out by position."""
    base, rows = resolve_subset(dataset)
    if not isinstance(base, ImageSet):
        return None
    # The property is read once, since a set of files may compute it from all of its files.
    identities = base.identities
    if identities is None:
        return None
    if len(identities) != len(base):
        raise ValueError(
            f"{split_of(base)}: identities has {len(identities)} entries for {len(base)} images; give each image one"
        )
    identities_of_rows: Array = np.asarray(identities)[rows]
    return identities_of_rows


def groups_of_images(dataset: Dataset[Any]) -> Array:
    """Return the group (N,) of each image. Images of a group stay together when images are held out.

    Each image is a group by itself, unless the dataset, or what it is a Subset of, is an image set with a group column.

    Raises:
        ValueError: If the set does not have its group column.
    """
    base, rows = resolve_subset(dataset)
    if not isinstance(base, ImageSet) or base.group_column is None:
        return np.arange(len(rows))
    columns = checked_columns(split_of(base), base.columns, len(base))
    if base.group_column not in columns:
        raise ValueError(
            f"{split_of(base)}: group_column={base.group_column!r} is not among the columns "
            f"{quoted(sorted(columns))}; add it to columns, or set group_column to None"
        )
    groups: Array = columns[base.group_column][rows]
    return groups


def _hash_first_image(dataset: Dataset[Any]) -> int:
    """Return a hash of a client's first image. It distinguishes most clients and needs only one read."""
    # A dataset that draws at random returns the same image at every call.
    with isolated_randomness():
        item = read_item(dataset, 0, "a client")
        stored, _ = image_and_label(item, labelled=False)
        image = to_image(stored)
    description = f"{tuple(image.shape)} {image.dtype}".encode()
    content = image.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(description + content, digest_size=16).digest(), "little")


def hold_out(
    datasets: Sequence[Dataset[Any]],
    share: float,
    seed: int,
) -> tuple[list[Dataset[Any]], list[Dataset[Any]]]:
    """Draw each client's validation images: about ``share`` of its training images, but at least one and never all.

    A draw depends on the seed and on the client's own images, never on its place among the datasets: a site, which has
    the data of one client only, holds out the images that the client holds out in a simulation. Images of one group,
    such as a patient's, are all held out or all trained on. Where each image is a group, the share is rounded to whole
    images. Images with identities are chosen by these and not by their position (:func:`.hashed_share`).

    Returns:
        The images that each client trains on, and those that it holds out, in their former order.

    Raises:
        OptionError: If clients have fewer than two images or groups; it names them.
    """
    identities = [identities_of(dataset) for dataset in datasets]
    groups = []
    for dataset, known_identities in zip(datasets, identities, strict=True):
        groups.append(groups_of_images(dataset) if known_identities is None else known_identities)
    too_few = [str(client) for client, client_groups in enumerate(groups) if len(np.unique(client_groups)) < 2]
    if too_few:
        subject = f"client {too_few[0]} has"
        if len(too_few) > 1:
            subject = f"clients {abbreviated(too_few, 10)} have"
        raise OptionError(
            f"client_validation={share} needs a validation image and a training image of every client, but {subject} "
            "fewer than 2 images, or images of only one group, such as one patient: add more (min_per_client of "
            "Dirichlet), leave such clients out, or set client_validation to 0",
            name="client_validation",
            value=share,
        )
    train_sets: list[Dataset[Any]] = []
    validation: list[Dataset[Any]] = []
    for client, (dataset, client_groups) in enumerate(zip(datasets, groups, strict=True)):
        size = len(client_groups)
        if identities[client] is None:
            rng = np.random.default_rng(derive_seed(seed, "client_validation", _hash_first_image(dataset)))
            held_out, _ = split_by_group(client_groups, [round(size * share)], rng, min_groups=1)
        else:
            held_out = hashed_share(
                client_groups.tolist(),
                clients_of_rows=[client] * size,
                classes_of_rows=[[]] * size,
                share=share,
                seed=derive_seed(seed, "client_validation"),
            )
        trained = np.setdiff1d(np.arange(size), held_out)
        train_sets.append(Subset(dataset, trained.tolist()))
        validation.append(Subset(dataset, held_out.tolist()))
    return train_sets, validation
