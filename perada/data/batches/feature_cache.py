# SPDX-License-Identifier: Apache-2.0
"""Reads images as the features that a frozen part of the model makes of them, each computed once."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.states import send
from perada.data.batches.samples import Samples, TensorStore

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

    def __call__(self, store: TensorStore) -> Samples:
        """``store`` read as features, or itself where they would not fit or its images are of another shape."""
        if id(store) not in self.stores:
            need = 4 * self.size * sum(store.sizes)
            fits = 0 < need <= self.left and self.suits(store.images[:1])
            self.left -= need if fits else 0
            self.stores[id(store)] = FeatureStore(store, self.encode) if fits else store
        return self.stores[id(store)]


class FeatureStore:
    """The samples of a store with features (F,) for images, computed when they are first asked for.

    ``encode`` makes them, (B, F), of images (B, ...) as they are read, on the device where they are kept.
    """

    def __init__(self, store: TensorStore, encode: Callable[[Tensor], Tensor]) -> None:
        self.store, self.encode, self.sizes = store, encode, store.sizes
        self._known = torch.zeros(math.ceil(len(store.table) / BLOCK), dtype=torch.bool)
        self._features: Tensor | None = None

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather rows, with the arguments and results of :meth:`perada.data.batches.samples.TensorStore.take`."""
        positions = self.store.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        for block in blocks[~self._known[blocks]].tolist():
            self._fill(slice(block * BLOCK, (block + 1) * BLOCK))
            self._known[block] = True
        assert self._features is not None
        device, labels = self._features.device, self.store.labels
        if labels is not None:
            labels = send(labels[self.store.table[positions].to(labels.device)], device)
        return self._features[positions.to(device)], labels

    def _fill(self, block: slice) -> None:
        features = self.encode(self.store.images[self.store.table[block].to(self.store.images.device)])
        if self._features is None:
            self._features = features.new_empty(len(self.store.table), features.shape[1])
        self._features[block] = features
