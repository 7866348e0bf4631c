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

    ``encode`` makes them, (B, F), of images (B, ...) as they are read, which must always be the same, on the device
    where they are kept.
    """

    def __init__(self, store: Samples, encode: Callable[[Tensor], Tensor]) -> None:
        self.store, self.encode, self.sizes = store, encode, store.sizes
        self.starts = torch.tensor([0, *self.sizes]).cumsum(0)
        self._known = torch.zeros(-(-int(self.starts[-1]) // BLOCK), dtype=torch.bool)
        self._kept: list[Tensor] = []  # features of all samples, and labels if there are any

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Gather rows, with the arguments and results of :meth:`perada.data.batches.samples.TensorStore.take`."""
        positions = self.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        for block in blocks[~self._known[blocks]].tolist():
            self._fill(block)
        rows = positions.to(self._kept[0].device)
        features, *labels = (kept[rows] for kept in self._kept)
        return features, labels[0] if labels else None

    def _fill(self, block: int) -> None:
        first, total = block * BLOCK, int(self.starts[-1])
        positions = torch.arange(first, min(first + BLOCK, total))
        owners = torch.bucketize(positions, self.starts, right=True) - 1
        images, labels = self.store.take(owners, positions - self.starts[owners], (0, -3))
        features = self.encode(images)
        parts = [features] if labels is None else [features, labels.to(features.device)]
        self._kept = self._kept or [part.new_empty(total, *part.shape[1:]) for part in parts]
        for kept, part in zip(self._kept, parts, strict=True):
            kept[first : first + BLOCK] = part
        self._known[block] = True
