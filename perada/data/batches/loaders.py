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
from perada.data.batches.feature_cache import FeatureStore
from perada.data.batches.samples import MapStore, Samples, TensorStore

T = TypeVar("T")


class RoundBatches(Dataset[CohortBatch]):
    """The cohort batches of one round.

    Args:
        store: The clients' training sets.
        plan: Who trains for how long.
        batch_size: Rows B, or "full".
        seed: The run's seed.
    """

    def __init__(self, store: Samples, plan: RoundPlan, batch_size: BatchSize, seed: int) -> None:
        self.store, self.plan, self.seed = store, plan, seed
        self.walk = list(active_steps(plan))
        totals = [sum(phase[i] for phase in plan.steps) for i in range(len(plan.clients))]
        self.batches = [
            batch_indices(store.sizes[client], batch_size, total, seed, "batches", plan.round, client)
            for client, total in zip(plan.clients, totals, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.walk)

    def __getitem__(self, step: int) -> CohortBatch:
        phase, within, active = self.walk[step]
        if not active:
            return no_batch(phase, step, self.plan.round)
        clients = self.plan.clients[:active]
        before = [sum(steps[i] for steps in self.plan.steps[:phase]) for i in range(active)]
        indices = [self.batches[i][before[i] + within] for i in range(active)]
        counts = tuple(len(rows) for rows in indices)
        owners = torch.tensor(clients).repeat_interleave(torch.tensor(counts))
        x, y = self.store.take(owners, torch.cat(indices), (self.seed, self.plan.round, step))
        assert y is not None
        return CohortBatch(clients, pad(x, counts), pad(y, counts), counts, phase, step, self.plan.round)


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
    """All samples of all clients, each once, in order of client.

    Args:
        store: The clients' test sets.
        batch_size: Rows B of a batch; the last one may have fewer.
        seed: The run's seed, for datasets that draw.
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
    workers = num_workers if isinstance(store, MapStore) else 0
    # Its own generator, or each iterator would take a number from the global stream.
    own = generator(0, "loader")
    # Where training is on a GPU, what the host reads is copied there without a wait.
    there = isinstance(store, FeatureStore) or (isinstance(store, TensorStore) and store.images.is_cuda)
    pin = torch.cuda.is_initialized() and not there  # type: ignore[no-untyped-call]  # torch has no types there
    return DataLoader(batches, batch_size=None, num_workers=workers, collate_fn=_as_is, generator=own, pin_memory=pin)


def _as_is(batch: Any) -> Any:  # noqa: ANN401 - the default would turn tuples into lists
    return batch
