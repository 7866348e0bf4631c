# SPDX-License-Identifier: Apache-2.0
"""Cohort batches for private training: each stream draws its own, so that the costs of what it trains compose."""

import secrets

from torch import Tensor
from torch.utils.data import Dataset

from perada.core.batches import CohortBatch
from perada.core.rounds import BatchSize, PrivateSampling, RoundPlan, active_steps, rows_per_batch, sampling_rate
from perada.core.seeding import derive_seed
from perada.data.batches.loaders import cohort_batch
from perada.data.batches.samples import Samples
from perada.privacy.sampling import poisson_batches, shuffled_batches


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
