# SPDX-License-Identifier: Apache-2.0
"""Clients' samples as features, which frozen layers compute from the images only once."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.states import to_device_async
from perada.data.batches.samples import Rows, Samples, TensorStore

BLOCK = 256
"""Images whose features are computed in one pass. These are always the same ones, since the last bits of a feature may
depend on the other images of the pass, and must not depend on which clients are drawn."""
BYTES_PER_FEATURE = 4  # float32


class FeatureCache:
    """Makes feature stores of as many sets as fit into a memory limit, in the order in which they are first read.

    Args:
        encode: Computes features (B, F) of images (B, ...) as they are stored.
        prepare_targets: Scales targets with images as they are stored (:meth:`.Preparation.prepare_targets`).
        num_features: Number of features F of an image.
        limit_bytes: Memory limit for all features together.
        supports: Whether ``encode`` accepts images (1, ...).
    """

    def __init__(
        self,
        encode: Callable[[Tensor], Tensor],
        prepare_targets: Callable[[Tensor, Tensor], Tensor],
        num_features: int,
        limit_bytes: int,
        supports: Callable[[Tensor], bool],
    ) -> None:
        self.encode = encode
        self.prepare_targets = prepare_targets
        self.num_features = num_features
        self.available_bytes = limit_bytes
        self.supports = supports
        self.stores: dict[int, Samples] = {}

    def __call__(self, store: TensorStore) -> Samples:
        """Return the store's features, or the store itself if they do not fit or its images are not supported."""
        if id(store) not in self.stores:
            needed_bytes = BYTES_PER_FEATURE * self.num_features * sum(store.sizes)
            if 0 < needed_bytes <= self.available_bytes and self.supports(store.images[:1]):
                self.available_bytes -= needed_bytes
                self.stores[id(store)] = FeatureStore(store, self.encode, self.prepare_targets)
            else:
                self.stores[id(store)] = store
        return self.stores[id(store)]


class FeatureStore(Samples):
    """The samples of a store with features (F,) instead of images, and targets that are scaled with the images.

    Features are computed on the device of the images when they are first read.
    """

    on_device = True

    def __init__(
        self,
        store: TensorStore,
        encode: Callable[[Tensor], Tensor],
        prepare_targets: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.store = store
        self.encode = encode
        self.prepare_targets = prepare_targets
        self.sizes = store.sizes
        self.has_classes = store.has_classes
        self._is_computed = torch.zeros(math.ceil(len(store.table) / BLOCK), dtype=torch.bool)
        self._features: Tensor | None = None

    def labels_of(self, client: int) -> Tensor:
        """Return the labels (n, ...) of a client's samples, on the CPU."""
        return self.store.labels_of(client)

    def client_labels(self) -> list[Tensor]:
        """Return the labels of every client's samples, in order."""
        return self.store.client_labels()

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Gather rows of features, after computing the blocks that are missing."""
        positions = self.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        for block in blocks[~self._is_computed[blocks]].tolist():
            self._compute_block(block)
        assert self._features is not None
        device = self._features.device
        labels = self.store.labels
        if labels is not None:
            rows = self.store.table[positions].to(labels.device)
            labels = self.prepare_targets(to_device_async(labels[rows], device), self.store.images[:1])
        return self._features[positions.to(device)], labels, {}

    def _compute_block(self, block: int) -> None:
        """Compute and store the features of a block of samples."""
        samples = slice(block * BLOCK, (block + 1) * BLOCK)
        rows = self.store.table[samples].to(self.store.images.device)
        features = self.encode(self.store.images[rows])
        if self._features is None:
            self._features = features.new_empty(len(self.store.table), features.shape[1])
        self._features[samples] = features
        self._is_computed[block] = True
