# SPDX-License-Identifier: Apache-2.0
"""From an image set and a partition to the clients' data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from perada.core.checks import check_number, check_whole
from perada.core.seeding import derive_seed
from perada.data.federated import FederatedData
from perada.data.partitions.apportion import Array
from perada.data.partitions.base import Partition, Split
from perada.data.sets.images import ImageSet


@dataclass(frozen=True)
class Division:
    """How an image set is shared out.

    Args:
        dataset: The set whose training and test splits the clients get.
        partition: Who gets what.
        public: The server's unlabelled images, or None.
        public_fraction: Share of the training images that the server gets instead, without their labels.
        validation_fraction: Share of the training images that the server gets with their labels.
        train_limit: Training images used in all, drawn at random; None for all.
        test_limit: Test images, likewise.
        public_limit: Images of ``public``, likewise.
        seed: Where all that is drawn here comes from.
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
        used = [
            self._sample("train", len(parts[0]), self.train_limit),
            self._sample("test", len(parts[1]), self.test_limit),
        ]
        public, validation, used[0] = self._hold_out(used[0])
        samples = [_split(part, index) for part, index in zip(parts, used, strict=True)]
        division = self.partition.split(samples[0], samples[1], self.seed)
        positions = [[np.sort(index[rows]) for rows in clients] for index, clients in zip(used, division, strict=True)]
        clients = [
            [Subset(part, own.tolist()) for own in chosen] for part, chosen in zip(parts, positions, strict=True)
        ]
        record = {
            "num_clients": len(positions[0]),
            "dataset": repr(self.dataset),
            "partition": repr(self.partition),
            "seed": self.seed,
            "train": [own.tolist() for own in positions[0]],
            "test": [own.tolist() for own in positions[1]],
            "public": public.tolist() if self.public_fraction else repr(self.public),
            "server_validation": validation.tolist(),
        }
        return FederatedData(
            train=clients[0],
            test=clients[1],
            public=self._public(parts[0], public),
            server_validation=Subset(parts[0], validation.tolist()) if len(validation) else None,
            num_classes=parts[0].num_classes,
        ), record

    def _sample(self, part: str, total: int, limit: int | None) -> Array:
        """Positions of at most ``limit`` of ``total`` images, ascending."""
        if limit is None or limit >= total:
            return np.arange(total)
        rng = np.random.default_rng(derive_seed(self.seed, f"{part}_limit"))
        return np.sort(rng.permutation(total)[:limit])

    def _hold_out(self, train: Array) -> tuple[Array, Array, Array]:
        """Divide the training positions into the server's public ones, its validation ones, and the clients'."""
        order = np.random.default_rng(derive_seed(self.seed, "hold_out")).permutation(train)
        cut = round(len(train) * self.public_fraction)
        second = cut + round(len(train) * self.validation_fraction)
        return np.sort(order[:cut]), np.sort(order[cut:second]), np.sort(order[second:])

    def _public(self, train: ImageSet, held_out: Array) -> Dataset[Any] | None:
        """The public set: held-out training images, another set or some of it, or None."""
        if self.public is None:
            return Subset(train, held_out.tolist()) if len(held_out) else None
        chosen = self._sample("public", len(self.public), self.public_limit)
        return self.public if len(chosen) == len(self.public) else Subset(self.public, chosen.tolist())


def _split(images: ImageSet, index: Array) -> Split:
    """What the partition sees of the images at ``index``."""
    assert images.labels is not None
    columns = {name: np.asarray(column)[index] for name, column in images.columns.items()}
    return Split(images.labels.numpy()[index], index, columns)
