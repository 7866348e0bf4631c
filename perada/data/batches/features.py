# SPDX-License-Identifier: Apache-2.0
"""Clients' samples with features in the place of images, which frozen layers make of them once."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.states import to_device_async
from perada.data.batches.samples import Rows, Samples, TensorStore

BLOCK = 256
"""Images whose features are computed together: always the same ones, so that bits do not depend on who is drawn."""


class FeatureCache:
    """Features of as many sets as fit into a limit of bytes, four each, in the order in which they are first read.

    ``encode`` makes features (B, F), of F = ``size``, of images (B, ...) as they are read, if these ``suit``.
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


class FeatureStore(Samples):
    """The samples of a store with features (F,) for images, computed where these are when they are first asked for."""

    on_device = True

    def __init__(self, store: TensorStore, encode: Callable[[Tensor], Tensor]) -> None:
        self.store, self.encode, self.sizes = store, encode, store.sizes
        self._known = torch.zeros(math.ceil(len(store.table) / BLOCK), dtype=torch.bool)
        self._features: Tensor | None = None

    def client_labels(self) -> list[Tensor]:
        """Those of the store."""
        return self.store.client_labels()

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Gather rows, and compute the blocks of those that are not known yet."""
        positions = self.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        for block in blocks[~self._known[blocks]].tolist():
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            features = self.encode(self.store.images[self.store.table[rows].to(self.store.images.device)])
            if self._features is None:
                self._features = features.new_empty(len(self.store.table), features.shape[1])
            self._features[rows] = features
            self._known[block] = True
        assert self._features is not None
        device, labels = self._features.device, self.store.labels
        if labels is not None:
            labels = to_device_async(labels[self.store.table[positions].to(labels.device)], device)
        return self._features[positions.to(device)], labels, {}
