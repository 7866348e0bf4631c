# SPDX-License-Identifier: Apache-2.0
"""How a set is divided: among clients and server, and into training and validation images."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import Dataset, Subset

from perada.core.checks import check_choice, check_number, check_whole
from perada.core.seeding import derive_seed
from perada.data.batches.datasets import length
from perada.data.federated import FederatedData
from perada.data.partitions.base import Partition, Split, divide
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
            check_number(name, getattr(self, name), least=0, below=1, hint="a share of the training images")
        if self.public_fraction + self.validation_fraction >= 1:
            raise ValueError(
                f"public_fraction={self.public_fraction} and validation_fraction={self.validation_fraction} leave "
                "the clients nothing: lower one of them"
            )
        if self.public is not None and self.public_fraction:
            raise ValueError(f"public and public_fraction={self.public_fraction} are both given: leave one out")
        for name in ("train_limit", "test_limit", "public_limit"):
            check_whole(name, getattr(self, name), optional=True, hint="by default all images are used")

    def download(self) -> None:
        """Fetch missing files if that was asked for."""
        self.dataset.download()
        if self.public is not None:
            self.public.download()

    def share_out(self) -> tuple[FederatedData, dict[str, Any]]:
        """Read the set and divide it.

        Returns:
            The clients' data, and the record for ``partition.json``: positions in the two splits.

        Raises:
            ValueError: If the set has no labels or cannot be divided so; for example, a client gets no sample.
        """
        parts = self.dataset.with_split(True), self.dataset.with_split(False)
        if parts[0].labels is None:
            raise ValueError(f"{self.dataset!r} has no labels: it can be the public set only, give another as dataset")
        used = self._sample("train", len(parts[0]), self.train_limit)
        public, validation, train = (used[rows] for rows in self._hold_out(groups_of(parts[0], used)))
        test = self._sample("test", len(parts[1]), self.test_limit)
        shown = _split(parts[0], train)
        division = divide(self.partition, shown, _split(parts[1], test), self.seed)
        names = self.partition.client_names(shown)
        train_of, test_of = (
            [np.sort(index[rows]).tolist() for rows in clients]
            for index, clients in zip((train, test), division, strict=True)
        )
        record = {
            "num_clients": len(train_of),
            "dataset": repr(self.dataset),
            "partition": repr(self.partition),
            "seed": self.seed,
            "train": train_of,
            "test": test_of,
            "public": public.tolist() if self.public_fraction else repr(self.public),
            "server_validation": validation.tolist(),
        } | ({"clients": list(names)} if names else {})
        return FederatedData(
            train=[Subset(parts[0], own) for own in train_of],
            test=[Subset(parts[1], own) for own in test_of],
            public=self.public_images(parts[0], public.tolist()),
            server_validation=Subset(parts[0], validation.tolist()) if len(validation) else None,
            num_classes=parts[0].num_classes,
            classes=class_names(split_of(parts[0]), parts[0].classes, parts[0].num_classes),
            client_names=names,
        ), record

    def _sample(self, part: str, total: int, limit: int | None) -> Array:
        """Positions of at most ``limit`` of ``total`` images, ascending."""
        if limit is None or limit >= total:
            return np.arange(total)
        rng = np.random.default_rng(derive_seed(self.seed, f"{part}_limit"))
        return np.sort(rng.permutation(total)[:limit])

    def _hold_out(self, groups: Array) -> list[Array]:
        """Divide the training rows, of ``groups``, into the server's public ones, its validation ones, the clients'."""
        counts = [round(len(groups) * share) for share in (self.public_fraction, self.validation_fraction)]
        return whole_groups(groups, counts, np.random.default_rng(derive_seed(self.seed, "hold_out")))

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


def identities_of(dataset: Dataset[Any], index: Array) -> Array | None:
    """What the images at ``index`` are set aside by, where this is not their position; see ImageSet.identities."""
    if type(dataset) is Subset:
        return identities_of(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[index])
    found = dataset.identities if isinstance(dataset, ImageSet) else None
    return None if found is None else found[index]


def groups_of(dataset: Dataset[Any], index: Array) -> Array:
    """The groups (N,) of the images at ``index`` that stay together where images are set aside.

    Each image is a group by itself, unless the dataset, or what it is a Subset of, is an image set that names a column.

    Raises:
        ValueError: If there is no such column.
    """
    if type(dataset) is Subset:
        return groups_of(dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)[index])
    if not isinstance(dataset, ImageSet) or dataset.group_column is None:
        return np.arange(len(index))
    columns = checked_columns(split_of(dataset), dataset.columns, len(dataset))
    if dataset.group_column not in columns:
        raise ValueError(
            f"{split_of(dataset)}: group_column is {dataset.group_column!r}, and there is no such column among "
            f"{sorted(columns) or 'none'}; let columns give it, or set group_column to None"
        )
    return columns[dataset.group_column][index]


EvaluateOn = Literal["test", "validation"]


def check_holdout(share: float, evaluate_on: str) -> None:
    """Refuse what is not a share, or would leave nothing to evaluate on."""
    check_number("client_validation", share, least=0, below=1, hint="a share of each client's training images")
    check_choice("evaluate_on", evaluate_on, get_args(EvaluateOn))
    if evaluate_on == "validation" and not share:
        raise ValueError(
            "evaluate_on is 'validation' and client_validation is 0: say what share of their training images clients "
            "hold out, for example client_validation=0.2"
        )


def held_out(
    groups: Sequence[Array], share: float, seed: int, identities: Sequence[Array | None] | None = None
) -> list[tuple[Array, Array]]:
    """Draw each client's held-out images: about ``share`` of them, but at least one and never all.

    Each client's draw is its own, whatever the others have. Images of one group, such as a patient's, are all held out
    or all trained on; where each image is a group, the share is rounded to whole images. Images of one's own are chosen
    by what they are, and not by their number (:func:`.hashed_share`).

    Args:
        groups: Of each client, the group of each of its images.
        share: From above 0 to below 1.
        seed: What the draws follow from.
        identities: Of each client, a word that stands for each image or its group; None for positions.

    Returns:
        For each client the rows that it trains on and those held out, ascending.

    Raises:
        ValueError: If clients have fewer than two images, or images of one group alone; they are named.

    >>> [(len(kept), len(held)) for kept, held in held_out([np.arange(10), np.arange(2)], 0.3, seed=0)]
    [(7, 3), (1, 1)]
    """
    names = identities or [None] * len(groups)
    groups = [own if known is None else known for own, known in zip(groups, names, strict=True)]
    single = [len(own) > 1 and len(np.unique(own)) < 2 for own in groups]
    _refuse([client for client, own in enumerate(groups) if len(own) < 2], share, "fewer than 2")
    _refuse([client for client, alone in enumerate(single) if alone], share, "those of one group alone, as one patient")
    parts = []
    for client, own in enumerate(groups):
        if names[client] is not None:
            alone: list[list[str]] = [[]] * len(own)
            held = hashed_share(own.tolist(), [client] * len(own), alone, share, derive_seed(seed, "client_validation"))
            parts.append((np.setdiff1d(np.arange(len(own)), held), held))
            continue
        rng = np.random.default_rng(derive_seed(seed, "client_validation", client))
        held, kept = whole_groups(own, [round(len(own) * share)], rng, least=1)
        parts.append((kept, held))
    return parts


def _refuse(clients: Sequence[int], share: float, what: str) -> None:
    """Name the clients that cannot hold out images, if there are any."""
    if clients:
        names = ", ".join(map(str, clients[:10])) + (f" and {len(clients) - 10} more" if len(clients) > 10 else "")
        raise ValueError(
            f"client_validation={share} asks every client for a validation image and one to train on, and "
            f"client{'s' * (len(clients) > 1)} {names} {'have' if len(clients) > 1 else 'has'} {what}: give them "
            "more (min_per_client of Dirichlet), leave them out, or set client_validation to 0"
        )


def hold_out(
    data: FederatedData, record: dict[str, Any], share: float, seed: int, evaluate_on: EvaluateOn
) -> tuple[FederatedData, dict[str, Any]]:
    """Take the validation images out of the clients' training sets; see :func:`held_out`.

    ``record`` is what ``partition.json`` holds: positions, or nothing where the data were given and not divided. With
    ``evaluate_on="validation"`` the held-out images take the place of the test images.
    """
    groups = [groups_of(dataset, np.arange(length(dataset))) for dataset in data.train]
    identities = [identities_of(dataset, np.arange(length(dataset))) for dataset in data.train]
    parts = held_out(groups, share, seed, identities)
    train, validation = (
        [Subset(dataset, rows[part].tolist()) for dataset, rows in zip(data.train, parts, strict=True)]
        for part in (0, 1)
    )
    if not record:
        record = {"client_validation_sizes": [len(held) for _, held in parts]}
    else:
        positions = [np.asarray(own) for own in record["train"]]
        kept, held = ([own[rows[part]].tolist() for own, rows in zip(positions, parts, strict=True)] for part in (0, 1))
        record = {**record, "train": kept, "client_validation": held}
    return replace(data, train=train, test=validation if evaluate_on == "validation" else data.test), record
