# SPDX-License-Identifier: Apache-2.0
"""Loaders of batches, which are read in this process or by workers."""

from collections.abc import Iterator
from copy import copy
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from perada.core.rounds import AnyBatch, EvalBatch
from perada.core.seeding import generator
from perada.data.batches.round_batches import Batches
from perada.data.batches.samples import MapStore, Samples
from perada.data.batches.workers import WorkerPool, WorkerProgress, worker_loader

T = TypeVar("T")


class _Reader(Dataset[Any]):
    """Reads the batches of requests from a store, in a worker."""

    def __init__(self, store: Samples) -> None:
        self.store = store

    def __getitem__(self, request: Batches) -> AnyBatch | EvalBatch:
        return request.answer(self.store)


class _RequestsOf:
    """The requests of batches, which are made one by one as workers need them."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batches]:
        return map(self.batches.request, range(len(self)))


class PooledLoader:
    """Serves batches in order, read by workers that serve other batches of the same store before and after.

    Args:
        batches: The batches.
        pool: The workers.
    """

    def __init__(self, batches: Batches, pool: WorkerPool) -> None:
        self.batches = batches
        self.pool = pool

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self.pool.answers(_RequestsOf(self.batches))


BatchLoader = DataLoader[Any] | PooledLoader
"""What serves the batches of a round or of an evaluation."""


class WorkerPools:
    """The workers of each store that is read item by item, from the first time that they are needed."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], tuple[Samples, WorkerPool]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Copies and other processes start their own.
        return {"_pools": {}}

    def loader(self, batches: Batches, store: Samples, num_workers: int) -> BatchLoader:
        """Serve batches in order; see :func:`loader`."""
        if not num_workers or not isinstance(store, MapStore):
            return loader(batches, store, num_workers)
        key = (id(store), num_workers)
        if key not in self._pools:
            options = _loader_options(store, num_workers)
            # The store is kept with its workers, so that no other one gets its id.
            self._pools[key] = (store, WorkerPool(_Reader(store), **options))
        _, pool = self._pools[key]
        return PooledLoader(batches, pool)

    def close(self) -> None:
        """End all workers that are not in the middle of a pass."""
        self._pools.clear()


def loader(batches: Dataset[T], store: Samples, num_workers: int) -> DataLoader[T]:
    """Serve batches in order. Tensors are gathered in this process, since workers would only slow that down."""
    return worker_loader(batches, **_loader_options(store, num_workers))


def _loader_options(store: Samples, num_workers: int) -> dict[str, Any]:
    """Return the options of loaders of a store's batches."""
    workers = num_workers if store.by_item else 0
    progress = None
    if workers and isinstance(store, MapStore):
        progress = WorkerProgress(workers, store.describe)
        store.progress = progress
    return {
        "num_workers": workers,
        "progress": progress,
        # A batch is copied as it is: torch's default would turn tuples into lists.
        "collate_fn": copy,
        # With its own generator, an iterator does not draw a number from the global stream.
        "generator": generator(0, "loader"),
        # Pinned memory lets the copy to a GPU run without a wait.
        "pin_memory": torch.cuda.is_initialized() and not store.on_device,
    }
