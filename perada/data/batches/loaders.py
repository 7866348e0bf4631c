# SPDX-License-Identifier: Apache-2.0
"""Datasets whose items are whole batches, so that any number of workers yields the same ones in the same order."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perada.core.batches import CohortBatch, EvalBatch, no_batch
from perada.core.rounds import BatchSize, RoundPlan, active_steps, batch_indices
from perada.core.seeding import generator
from perada.core.states import send
from perada.data.batches.corrupted import CorruptedStore
from perada.data.batches.feature_cache import FeatureStore
from perada.data.batches.samples import MapStore, Samples, TensorStore

T = TypeVar("T")


class RoundBatches(Dataset[CohortBatch]):
    """The cohort batches of one round: who trains for how long is in ``plan``; B rows, or all where it is "full"."""

    def __init__(self, store: Samples, plan: RoundPlan, batch_size: BatchSize, seed: int) -> None:
        self.store, self.plan, self.seed = store, plan, seed
        self.walk = list(active_steps(plan))
        self.batches = []  # of each client, by phase
        for client, *steps in zip(plan.clients, *plan.steps, strict=True):
            own = batch_indices(store.sizes[client], batch_size, sum(steps), seed, "batches", plan.round, client)
            self.batches.append(torch.split(own, steps))

    def __len__(self) -> int:
        return len(self.walk)

    def __getitem__(self, step: int) -> CohortBatch:
        phase, within, active = self.walk[step]
        indices = [own[phase][within] for own in self.batches[:active]]
        return cohort_batch(self.store, self.plan, phase, step, indices, (self.seed, self.plan.round, step))


def cohort_batch(
    store: Samples,
    plan: RoundPlan,
    phase: int,
    step: int,
    indices: list[Tensor],
    key: tuple[int, ...],
    shrink: bool = False,
) -> CohortBatch:
    """One step of the first clients of a plan, on the samples at ``indices`` of each.

    Samples that cannot be read are zeros, or, to ``shrink`` the batch, are not in it.
    """
    clients, counts = plan.clients[: len(indices)], tuple(map(len, indices))
    if not clients:
        return no_batch(phase, step, plan.round)
    owners, rows = torch.tensor(clients).repeat_interleave(torch.tensor(counts)), torch.cat(indices)
    if not len(rows):  # an image is read for its shape, and dropped
        owners, rows = torch.tensor(clients[:1]), torch.zeros(1, dtype=torch.int64)
    reasons: dict[int, Exception] = {}
    if isinstance(store, MapStore):
        x, y, reasons = store.read(owners, rows, key)
    else:
        x, y = store.take(owners, rows, key)
    assert y is not None
    failed = {int(owners[place]): _reason(error, int(owners[place])) for place, error in reasons.items()}
    kept = [place for place in range(sum(counts)) if not (shrink and place in reasons)]
    if len(kept) < len(x):
        x, y, left = x[kept], y[kept], owners[kept].tolist()
        counts = tuple(left.count(client) for client in clients)
    x, y = pad(x, counts), pad(y, counts)
    return CohortBatch(clients, x, y, counts, phase, step, plan.round, tuple(failed.items()))


def _reason(error: Exception, client: int) -> str:
    """Why a client's sample cannot be read; the client is named."""
    return str(error) if f"client {client}" in str(error) else f"client {client}: {error}"


def pad(rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Lay out the clients' rows as (C, B, ...), zeros at the end of the shorter ones; B is at least 1.

    >>> pad(torch.tensor([1, 2, 3]), (2, 1)).tolist()
    [[1, 2], [3, 0]]
    """
    longest = max(1, *counts)
    if min(counts) == longest:
        return rows.view(len(counts), longest, *rows.shape[1:])
    padded = rows.new_zeros(len(counts), longest, *rows.shape[1:])
    places = torch.cat([torch.arange(count) + client * longest for client, count in enumerate(counts)])
    padded.flatten(0, 1).index_copy_(0, send(places, rows.device), rows)
    return padded


class EvalBatches(Dataset[EvalBatch]):
    """All samples of all clients, each once, in order of client; the last batch may have fewer than B rows.

    The run's seed is for datasets that draw.
    """

    def __init__(self, store: Samples, batch_size: int, seed: int) -> None:
        self.store, self.batch_size, self.seed = store, batch_size, seed
        sizes = torch.tensor(store.sizes)
        self.owners = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.indices = torch.arange(len(self.owners)) - (sizes.cumsum(0) - sizes)[self.owners]

    def __len__(self) -> int:
        return -(-len(self.owners) // self.batch_size)

    def __getitem__(self, step: int) -> EvalBatch:
        rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
        x, y = self.store.take(self.owners[rows], self.indices[rows], (self.seed, -1, step))
        assert y is not None
        return EvalBatch(x, y, self.owners[rows])


def loader(batches: Dataset[T], store: Samples, num_workers: int) -> DataLoader[T]:
    """Serve batches in order. Tensors are gathered in this process: workers would only slow that down."""
    workers = num_workers if isinstance(store, MapStore | CorruptedStore) else 0
    # Its own generator, or each iterator would take a number from the global stream.
    own = generator(0, "loader")
    # Where training is on a GPU, what the host reads is copied there without a wait.
    there = isinstance(store, FeatureStore) or (isinstance(store, TensorStore) and store.images.is_cuda)
    pin = torch.cuda.is_initialized() and not there
    return DataLoader(batches, batch_size=None, num_workers=workers, collate_fn=_as_is, generator=own, pin_memory=pin)


def _as_is(batch: Any) -> Any:  # noqa: ANN401 - the default would turn tuples into lists
    return batch
