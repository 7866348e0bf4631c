# SPDX-License-Identifier: Apache-2.0
"""Loaders of a round's local steps and of test images: who takes part, and which rows a step sees."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perada.core.batches import CohortBatch, EvalBatch, no_batch
from perada.core.checks import check_whole
from perada.core.rounds import (
    BatchSize,
    Phase,
    PrivateSampling,
    RoundPlan,
    active_steps,
    batch_indices,
    make_plan,
    rows_per_batch,
    sample_cohort,
    sampling_rate,
)
from perada.core.seeding import derive_seed, generator
from perada.core.states import send
from perada.data.batches.corrupted import CorruptedStore
from perada.data.batches.feature_cache import FeatureStore
from perada.data.batches.samples import MapStore, Samples, TensorStore
from perada.privacy.sampling import poisson_batches, shuffled_batches


@dataclass(frozen=True)
class Schedule:
    """What all rounds have in common: the options of :meth:`perada.data.FederatedDataModule.configure_rounds`.

    Raises:
        ValueError: If there are no phases, or ``private`` is for another number of them.
    """

    clients_per_round: int | None = None
    phases: tuple[Phase, ...] = (Phase(),)
    private: PrivateSampling | None = None
    eligible: Callable[[Sequence[int]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("there are no phases of local training; give at least one")
        if self.private is not None and len(self.private.streams) != len(self.phases):
            raise ValueError(
                f"private names the streams of {len(self.private.streams)} phases, and there are {len(self.phases)}; "
                "name those of each phase"
            )

    def check_clients(self, num_clients: int) -> None:
        """Refuse to draw more clients than there are."""
        hint = f"there are {num_clients} clients"
        check_whole("clients_per_round", self.clients_per_round, most=num_clients, optional=True, hint=hint)

    def plan(self, seed: int, round: int, sizes: Sequence[int], batch_size: BatchSize) -> RoundPlan:
        """Draw the clients of a round by the run's seed, and count their steps; refused if none may take part."""
        clients = sample_cohort(seed, round, len(sizes), self.clients_per_round, self.eligible)
        return make_plan(round, clients, sizes, self.phases, batch_size)


class PrivateRoundBatches(Dataset[dict[str, CohortBatch]]):
    """The cohort batches of one private round: an item has one of them for each stream of its phase, by name.

    A client's batches depend on the stream, the seed, the round and the client, not on the cohort; with
    ``sampling.secure`` on nothing but a cryptographic generator. So do the datasets' random transforms, which go by an
    image's place: if they were known, removing an image would visibly change those of all images after it. All batches
    are drawn when the dataset is made, so every worker serves the same ones. A stream continues from one of its phases
    to the next, and does not advance in phases without it: a shuffled stream begins as few passes as its steps need.

    The arguments are those of :class:`.RoundBatches`, and how each phase of the plan draws. B is the mean number of
    rows where batches are Poisson samples, the largest where passes are shuffled. A batch may hold no image of a
    client: its count is then 0. The rows (C, B, ...) are as wide as the largest count, and at least 1.

    Raises:
        ValueError: If the plan has another number of phases than ``sampling``.
    """

    def __init__(
        self, store: Samples, plan: RoundPlan, batch_size: BatchSize, seed: int, sampling: PrivateSampling
    ) -> None:
        if len(sampling.streams) != len(plan.steps):
            raise ValueError(
                f"streams={sampling.streams} are for {len(sampling.streams)} phases and the plan has "
                f"{len(plan.steps)}: name the streams of each phase"
            )
        self.store, self.plan, self.batch_size, self.seed, self.sampling = store, plan, batch_size, seed, sampling
        self._items = secrets.randbits(256) if sampling.secure else seed
        self.walk = list(active_steps(plan))
        names = {name for phase in sampling.streams for name in phase}
        drawn = {name: [iter(self._draw(name, row)) for row in range(len(plan.clients))] for name in names}
        self.indices = [  # of each step, by stream and active client
            {name: list(map(next, drawn[name][:active])) for name in sampling.streams[phase]}
            for phase, _, active in self.walk
        ]

    def __len__(self) -> int:
        return len(self.walk)

    def __getitem__(self, step: int) -> dict[str, CohortBatch]:
        return {name: self._batch(name, step) for name in self.indices[step]}

    def _draw(self, name: str, row: int) -> list[Tensor]:
        """All batches of a stream for the plan's client in ``row``: indices into its images."""
        taken = (
            own[row] for own, streams in zip(self.plan.steps, self.sampling.streams, strict=True) if name in streams
        )
        client, steps = self.plan.clients[row], sum(taken)
        size, seed, round, secure = self.store.sizes[client], self.seed, self.plan.round, self.sampling.secure
        if self.sampling.sampling == "poisson":
            rate = sampling_rate(size, self.batch_size)
            return poisson_batches(size, rate, steps, seed=seed, role=name, round=round, client=client, secure=secure)
        rows = rows_per_batch(size, self.batch_size)
        return shuffled_batches(size, rows, steps, seed=seed, role=name, round=round, client=client, secure=secure)

    def _batch(self, name: str, step: int) -> CohortBatch:
        key = self._items, self.plan.round, step, derive_seed(self._items, f"stream/{name}")
        return cohort_batch(self.store, self.plan, self.walk[step][0], step, self.indices[step][name], key, True)


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
