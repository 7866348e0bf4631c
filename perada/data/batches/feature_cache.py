# SPDX-License-Identifier: Apache-2.0
"""Reads images as the features that a frozen part of the model makes of them, each computed once."""

from collections.abc import Callable

import torch
from torch import Tensor

from perada.data.batches.samples import Samples

BLOCK = 256
"""Images that are computed together: always the same ones, so that the bits do not depend on who is drawn."""


class FeatureCache:
    """Features of as many sets as fit into a limit, in the order in which they are first read.

    Args:
        encode: Features (B, F) of images (B, ...) as they are read.
        size: F.
        limit_bytes: Of all sets together; features count four bytes each.
        suits: Whether images (1, ...), as they are read, have the shape that features are of.
    """

    def __init__(
        self, encode: Callable[[Tensor], Tensor], size: int, limit_bytes: int, suits: Callable[[Tensor], bool]
    ) -> None:
        self.encode, self.size, self.left, self.suits = encode, size, limit_bytes, suits
        self.stores: dict[int, Samples] = {}

    def __call__(self, store: Samples) -> Samples:
        """``store`` read as features, or itself where they would not fit or its images are of another shape."""
        if id(store) not in self.stores:
            self.stores[id(store)] = store
            need = 4 * self.size * sum(store.sizes)
            if 0 < need <= self.left:
                owner = next(owner for owner, size in enumerate(store.sizes) if size)
                if self.suits(store.take(torch.tensor([owner]), torch.tensor([0]))[0]):
                    self.left -= need
                    self.stores[id(store)] = FeatureStore(store, self.encode)
        return self.stores[id(store)]


class FeatureStore:
    """Samples whose images are features (F,), computed when they are first asked for.

    Args:
        store: The images; those of a position must always be the same.
        encode: Features (B, F) of images (B, ...) as they are read, on the device where they are kept.
    """

    def __init__(self, store: Samples, encode: Callable[[Tensor], Tensor]) -> None:
        self.store, self.encode, self.sizes = store, encode, store.sizes
        self.starts = torch.tensor([0, *self.sizes]).cumsum(0)
        self._known = torch.zeros(-(-int(self.starts[-1]) // BLOCK), dtype=torch.bool)
        self._features: Tensor | None = None
        self._labels: Tensor | None = None

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather rows, with the arguments and results of :meth:`perada.data.batches.samples.TensorStore.take`."""
        positions = self.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        for block in blocks[~self._known[blocks]].tolist():
            self._fill(block)
        assert self._features is not None
        rows = positions.to(self._features.device)
        return self._features[rows], None if self._labels is None else self._labels[rows]

    def _fill(self, block: int) -> None:
        positions = torch.arange(block * BLOCK, min((block + 1) * BLOCK, int(self.starts[-1])))
        owners = torch.bucketize(positions, self.starts, right=True) - 1
        images, labels = self.store.take(owners, positions - self.starts[owners], (0, -3))
        features = self.encode(images)
        if self._features is None:
            total = int(self.starts[-1])
            self._features = features.new_empty(total, features.shape[1])
            self._labels = (
                None if labels is None else labels.new_empty(total, *labels.shape[1:], device=features.device)
            )
        rows = positions.to(features.device)
        self._features[rows] = features
        if labels is not None and self._labels is not None:
            self._labels[rows] = labels.to(features.device)
        self._known[block] = True
