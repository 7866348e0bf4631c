# SPDX-License-Identifier: Apache-2.0
"""Clients' samples as features, which frozen layers compute from the images only once."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from perada.core.states import to_device_async
from perada.data.batches.samples import MapStore, Rows, Samples, Store

BLOCK = 256
"""Images whose features are computed in one pass. These are always the same ones, since the last bits of a feature may
depend on the other images of the pass, and must not depend on which clients are drawn."""
BYTES_PER_FEATURE = 4  # float32


class Sized(Protocol):
    """Something of which the size in memory is known."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


KeptT = TypeVar("KeptT", bound=Sized)


@dataclass
class SharedFeatures:
    """Features that several runs of one process share, from the first run that computes them.

    Attributes:
        limit_bytes: Memory limit for all of them together.
    """

    limit_bytes: int
    _blocks: dict[str, Any] = field(default_factory=dict)
    _num_bytes: int = 0

    def get_or_compute(self, key: str, compute: Callable[[], KeptT]) -> KeptT:
        """Return what is kept under a key, or compute it, and keep it if it fits.

        Args:
            key: Digest of everything that the features depend on.
            compute: Computes the features, an object with their size as ``nbytes``.
        """
        if key in self._blocks:
            kept: KeptT = self._blocks[key]
            return kept
        computed = compute()
        if self._num_bytes + computed.nbytes <= self.limit_bytes:
            self._num_bytes += computed.nbytes
            self._blocks[key] = computed
        return computed


_shared: list[SharedFeatures] = []


@contextmanager
def sharing_features(shared_features: SharedFeatures) -> Iterator[None]:
    """Let runs that are set up in the ``with`` block take features from other runs, and keep theirs for others."""
    _shared.append(shared_features)
    try:
        yield
    finally:
        _shared.pop()


def current_shared_features() -> SharedFeatures | None:
    """Return the features that runs share; None outside :func:`sharing_features`."""
    return _shared[-1] if _shared else None


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

    def __call__(self, store: Store) -> Samples:
        """Return the store's features, or the store itself if they do not fit or its images are not supported."""
        if id(store) not in self.stores:
            needed_bytes = BYTES_PER_FEATURE * self.num_features * sum(store.sizes)
            if 0 < needed_bytes <= self.available_bytes and self._supports_store(store):
                self.available_bytes -= needed_bytes
                self.stores[id(store)] = FeatureStore(store, self.encode, self.prepare_targets)
            else:
                self.stores[id(store)] = store
        return self.stores[id(store)]

    def _supports_store(self, store: Store) -> bool:
        """Return whether the images of a store, by its first one, are supported."""
        if isinstance(store, MapStore):
            first_client = next(client for client, size in enumerate(store.sizes) if size)
            image, _ = store.item(first_client, 0)
            return self.supports(image.unsqueeze(0))
        return self.supports(store.images[:1])


class FeatureStore(Samples):
    """The samples of a store with features (F,) instead of images, and targets that are scaled with the images.

    Features are computed on the device of the images, or of the model if these are read from files, when they are first
    needed. A store that reads its images one by one must be :attr:`repeatable <.MapStore.is_repeatable>`.
    """

    on_device = True

    def __init__(
        self,
        store: Store,
        encode: Callable[[Tensor], Tensor],
        prepare_targets: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.store = store
        self.encode = encode
        self.prepare_targets = prepare_targets
        self.sizes = store.sizes
        self.has_classes = store.has_classes
        self._num_samples = sum(store.sizes)
        self._is_computed = torch.zeros(math.ceil(self._num_samples / BLOCK), dtype=torch.bool)
        self._features: Tensor | None = None
        self._labels: Tensor | None = None

    def labels_of(self, client: int) -> Tensor | None:
        """Return the labels (n, ...) of a client's samples, on the CPU; None if not all are known."""
        return self.store.labels_of(client)

    def client_labels(self) -> Sequence[Tensor | None]:
        """Return the labels of every client's samples, in order; None for a client whose labels are not all known."""
        return self.store.client_labels()

    def read(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> Rows:
        """Gather rows of features, after computing the blocks that are missing."""
        positions = self.starts[owners] + indices
        blocks = torch.unique(positions // BLOCK)
        error_of_position: dict[int, Exception] = {}
        for block in blocks[~self._is_computed[blocks]].tolist():
            error_of_position |= self._compute_block(block)
        assert self._features is not None
        device = self._features.device
        labels = self._read_labels(positions, device)
        errors = {}
        if error_of_position:
            for row, position in enumerate(positions.tolist()):
                if position in error_of_position:
                    errors[row] = error_of_position[position]
        return self._features[positions.to(device)], labels, errors

    def _read_labels(self, positions: Tensor, device: torch.device) -> Tensor | None:
        """Return the labels (N, ...) at positions (N,), scaled with their images; None without labels."""
        if isinstance(self.store, MapStore):
            return None if self._labels is None else self._labels[positions.to(device)]
        labels = self.store.labels
        if labels is None:
            return None
        rows = self.store.table[positions].to(labels.device)
        return self.prepare_targets(to_device_async(labels[rows], device), self.store.images[:1])

    def _compute_block(self, block: int) -> dict[int, Exception]:
        """Compute and store the features of a block of samples.

        Returns:
            The errors of images that cannot be read, by the position of the sample. Their block is computed again when
            it is needed next, since a file may be out of reach only for a while.
        """
        positions = torch.arange(block * BLOCK, min((block + 1) * BLOCK, self._num_samples))
        owners = torch.searchsorted(self.starts, positions, right=True) - 1
        images, labels, errors = self.store.read(owners, positions - self.starts[owners])
        features = self.encode(images)
        if self._features is None:
            self._features = features.new_empty(self._num_samples, features.shape[1])
        self._features[positions] = features
        if labels is not None and isinstance(self.store, MapStore):
            # Reading them again would read the images, too.
            targets = self.prepare_targets(to_device_async(labels, features.device), images[:1])
            if self._labels is None:
                self._labels = targets.new_empty(self._num_samples, *targets.shape[1:])
            self._labels[positions] = targets
        self._is_computed[block] = not errors
        return {int(positions[row]): error for row, error in errors.items()}
