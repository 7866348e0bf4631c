# SPDX-License-Identifier: Apache-2.0
"""Batches of a round's clients, and of evaluation."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.one_core import on_one_core
from perada.core.rounds import (
    AnyBatch,
    BatchSize,
    CohortBatch,
    EvalBatch,
    PrivateSampling,
    RoundPlan,
    Sampling,
    balanced_indices,
    batch_indices,
    batch_places,
    rows_per_batch,
    sampling_rate,
    step_ids,
)
from perada.core.seeding import derive_seed
from perada.data.batches.samples import Samples
from perada.data.batches.transforms import pad
from perada.privacy.sampling import poisson_batches, shuffled_batches


class RoundBatches(Dataset[AnyBatch]):
    """The cohort batches of one round.

    All batches are drawn when the dataset is made, so every worker serves the same ones. A client's batches depend on
    the seed, the round and the client, not on the cohort. The rows (C, B, ...) of a batch are as wide as the largest
    count of a client, at least 1.

    With ``private`` an item is a dict with one batch for each stream of its phase, by name, and batches depend on the
    stream too. B is then the mean number of rows if batches are Poisson samples, and the largest if passes are
    shuffled. A batch may hold no image of a client, whose count is then 0. A stream continues from one of its phases to
    the next, and does not advance in phases without it: a shuffled stream begins as few passes as its steps need.

    With ``private.secure`` batches are drawn from a cryptographic generator, which also seeds the datasets' random
    transforms. These are derived from an image's position in its batch: if they were known, removing an image would
    visibly change the images after it.

    Args:
        store: The clients' samples.
        plan: The clients of the round, and their numbers of steps.
        batch_size: Rows B of a batch, or "full" for all of a client's samples.
        seed: The run's seed.
        private: How batches are drawn in private training; None for ordinary training.
        sampling: How batches are drawn in ordinary training: passes over all samples of a client, or ``balanced``
            (:func:`.balanced_indices`), for which all labels must be known.

    Raises:
        ValueError: If ``private`` does not name the streams of each phase of the plan.
    """

    def __init__(
        self,
        store: Samples,
        plan: RoundPlan,
        batch_size: BatchSize,
        seed: int,
        private: PrivateSampling | None = None,
        sampling: Sampling = "uniform",
    ) -> None:
        self.store = store
        self.plan = plan
        self.batch_size = batch_size
        self.seed = seed
        self.private = private
        self.sampling = sampling
        streams_of_phases = (("",),) * len(plan.steps) if private is None else private.streams
        if len(streams_of_phases) != len(plan.steps):
            raise ValueError(
                f"private must name the streams of all {len(plan.steps)} phases, got {len(streams_of_phases)}"
            )
        self._items_seed = seed
        if private is not None and private.secure:
            self._items_seed = secrets.randbits(256)
        self.schedule = list(batch_places(plan))
        """Where each batch stands in the round."""
        batches_of_stream = {}
        for stream in {stream for streams in streams_of_phases for stream in streams}:
            phases = [phase for phase, streams in enumerate(streams_of_phases) if stream in streams]
            batches_of_stream[stream] = [
                iter(self._draw_batches(stream, client, sum(plan.steps[phase][position] for phase in phases)))
                for position, client in enumerate(plan.clients)
            ]
        self.indices: list[dict[str, list[Tensor]]] = []
        """Indices of the rows of each step, by stream and active client."""
        for place in self.schedule:
            indices_of_step = {}
            for stream in streams_of_phases[place.phase]:
                active_clients = batches_of_stream[stream][place.start : place.start + place.active]
                indices_of_step[stream] = [next(batches) for batches in active_clients]
            self.indices.append(indices_of_step)

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, step: int) -> AnyBatch:
        # Chunks that train side by side have one core each.
        cores = on_one_core() if self.plan.chunks_at_a_time > 1 else nullcontext()
        with cores:
            batches = {stream: self._read_batch(stream, step) for stream in self.indices[step]}
        return batches[""] if self.private is None else batches

    def request(self, step: int) -> "RoundBatches":
        """Return what a worker that has the store needs to know to read a batch: the same object for one step."""
        request = copy(self)
        del request.store
        request.schedule = [self.schedule[step]]
        # Tensors would be sent in shared memory, one file for each.
        arrays_of_streams: Any = {}
        for stream, rows_of_clients in self.indices[step].items():
            arrays_of_streams[stream] = [rows.numpy() for rows in rows_of_clients]
        request.indices = [arrays_of_streams]
        return request

    def answer(self, store: Samples) -> AnyBatch:
        """Read the batch of a :meth:`request`."""
        batches = copy(self)
        batches.store = store
        indices = {}
        for stream, rows_of_clients in self.indices[0].items():
            indices[stream] = [torch.as_tensor(rows) for rows in rows_of_clients]
        batches.indices = [indices]
        return batches[0]

    def _draw_batches(self, stream: str, client: int, steps: int) -> Sequence[Tensor]:
        """Draw all batches of a stream for one client, as indices into its samples."""
        size = self.store.sizes[client]
        round = self.plan.round
        if self.private is None and self.sampling == "balanced":
            labels = self.store.labels_of(client)
            assert labels is not None
            return balanced_indices(labels, self.batch_size, steps, self.seed, "balanced", round, client).unbind()
        if self.private is None:
            return batch_indices(size, self.batch_size, steps, self.seed, "batches", round, client).unbind()
        if self.private.sampling == "poisson":
            return poisson_batches(
                size,
                sampling_rate(size, self.batch_size),
                steps,
                seed=self.seed,
                role=stream,
                round=round,
                client=client,
                secure=self.private.secure,
            )
        return shuffled_batches(
            size,
            rows_per_batch(size, self.batch_size),
            steps,
            seed=self.seed,
            role=stream,
            round=round,
            client=client,
            secure=self.private.secure,
        )

    def _read_batch(self, stream: str, index: int) -> CohortBatch:
        """Read a stream's batch in a step of the round.

        Samples that cannot be read are zeros in ordinary training, and left out in private training.
        """
        indices = self.indices[index][stream]
        place = self.schedule[index]
        clients = self.plan.clients[place.start : place.start + place.active]
        counts = tuple(len(rows) for rows in indices)
        round = self.plan.round
        if not clients:
            return CohortBatch((), torch.empty(0), torch.empty(0), (), place.phase, place.step, round)
        owners = torch.tensor(clients).repeat_interleave(torch.tensor(counts))
        rows = torch.cat(indices)
        if not len(rows):
            # An empty batch has the shape of the others: one sample is read for it, and dropped below.
            owners = torch.tensor(clients[:1])
            rows = torch.zeros(1, dtype=torch.int64)
        key = (self._items_seed, round, *step_ids(place.phase, place.step))
        if self.private is not None:
            key = (*key, derive_seed(self._items_seed, f"stream/{stream}"))
        x, y, errors = self.store.read(owners, rows, key)
        assert y is not None
        failed = _messages_of_clients(errors, owners)
        # Private training goes on without samples that cannot be read; otherwise their client fails.
        complete_rows = [row for row in range(sum(counts)) if self.private is None or row not in errors]
        if len(complete_rows) < len(x):
            x = x[complete_rows]
            y = y[complete_rows]
            remaining_owners = owners[complete_rows].tolist()
            counts = tuple(remaining_owners.count(client) for client in clients)
        # Private training must not know how many images of a class a client has.
        class_counts = self.store.class_counts if self.private is None else None
        return CohortBatch(
            clients,
            pad(x, counts),
            pad(y, counts),
            counts,
            place.phase,
            place.step,
            round,
            failed=tuple(failed.items()),
            class_counts=None if class_counts is None else class_counts[list(clients)],
            start=place.start,
        )


def _messages_of_clients(errors: Mapping[int, Exception], owners: Tensor) -> dict[int, str]:
    """Return the last error of each client as a message that names the client.

    Args:
        errors: Errors by row.
        owners: Client (N,) of each row.
    """
    messages = {}
    for row, error in errors.items():
        client = int(owners[row])
        message = str(error)
        if f"client {client}" not in message:
            message = f"client {client}: {message}"
        messages[client] = message
    return messages


class EvalBatches(Dataset[EvalBatch]):
    """All samples of all clients, each once, in order of client; the last batch may have fewer than B rows.

    Args:
        store: The clients' samples.
        batch_size: Rows B of a batch.
        seed: The run's seed, for datasets that draw at random.
    """

    def __init__(self, store: Samples, batch_size: int, seed: int) -> None:
        self.store = store
        self.batch_size = batch_size
        self.seed = seed
        self.owners = torch.arange(len(store.sizes)).repeat_interleave(torch.tensor(store.sizes))
        self.indices = torch.arange(len(self.owners)) - store.starts[self.owners]

    def __len__(self) -> int:
        return -(-len(self.owners) // self.batch_size)

    def __getitem__(self, step: int) -> EvalBatch:
        rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
        # The step is not part of the key: the step of an image depends on how many images other clients have.
        x, y = self.store.take(self.owners[rows], self.indices[rows], (self.seed, -1))
        assert y is not None
        return EvalBatch(x, y, self.owners[rows])

    def request(self, step: int) -> "EvalBatches":
        """Return what a worker that has the store needs to know to read a batch: the same object for one step."""
        request = copy(self)
        del request.store
        rows = slice(step * self.batch_size, (step + 1) * self.batch_size)
        request.owners = self.owners[rows].clone()
        request.indices = self.indices[rows].clone()
        return request

    def answer(self, store: Samples) -> EvalBatch:
        """Read the batch of a :meth:`request`."""
        batches = copy(self)
        batches.store = store
        return batches[0]


Batches = RoundBatches | EvalBatches
