# SPDX-License-Identifier: Apache-2.0
"""Private local training: what stands in the place of a client's loss."""

from collections import Counter
from functools import cached_property

import torch
from torch import Tensor

from perada.core.batches import CohortBatch, one_of
from perada.core.rounds import PrivateSampling, RoundPlan
from perada.core.seeding import Streams, generator
from perada.core.states import State
from perada.engine.engine import Engine
from perada.privacy.account import Account
from perada.privacy.gradients import NoisyGradients, Query, make_gradients
from perada.privacy.sampling import expected_batch_size


class PrivateTraining:
    """Gives local steps losses whose value is 0 and whose gradient is private."""

    def __init__(self, account: Account, engine: Engine, multilabel: bool, seed: int) -> None:
        self.account, self.seed, self._engine, self._multilabel = account, seed, engine, multilabel

    @cached_property
    def gradients(self) -> NoisyGradients:
        """What answers queries; made when it is first asked, as by then features may stand for images."""
        return make_gradients(self.account.options, self._engine, self._multilabel)

    def sampling(self, tuning: bool = False) -> PrivateSampling:
        """How batches are drawn."""
        options, queries = self.account.options, self.account.training(tuning).queries
        return PrivateSampling(tuple(map(tuple, queries)), options.sampling, options.secure_rng)


class PrivateRound:
    """The noise of one round, or of the fine-tuning after the last: a stream for each client and stream of batches."""

    def __init__(self, training: PrivateTraining, plan: RoundPlan, tuning: bool) -> None:
        self.training, self.plan, self.tuning = training, plan, tuning
        self._queries = training.account.training(tuning).queries
        self._asked: Counter[tuple[int, str, int]] = Counter()
        self._noise: dict[str, list[torch.Generator]] = {}
        if not training.account.options.secure_rng:
            purpose = "tuning-noise" if tuning else "noise"
            for stream in {stream for asked in self._queries for stream in asked}:
                self._noise[stream] = [
                    generator(training.seed, f"{purpose}-{stream}", plan.round, client) for client in plan.clients
                ]

    @property
    def secure(self) -> bool:
        """Whether draws must be as unknown as the noise: also dropout's masks, which go by place in the batch."""
        return self.training.account.options.secure_rng

    def loss(
        self, stream: str, states: State, batches: dict[str, CohortBatch], rows: slice, dropout: Streams
    ) -> Tensor:
        """Losses (C,) that are 0, and whose gradient by ``states`` (C, ...) is the noisy one on a stream's batch.

        The clients are those of the round in ``rows``; ``dropout`` are their random streams. A RuntimeError if more
        gradients are asked for than the ledgers count.
        """
        account, batch = self.training.account, one_of(batches)
        self._asked[batch.step, stream, rows.start] += 1
        if self._asked[batch.step, stream, rows.start] > self._queries[batch.phase].get(stream, 0):
            raise RuntimeError(
                f"a local step asked for more gradients of {stream!r} than its rehearsal, which the ledgers count; an "
                "algorithm must ask for the same number in every step"
            )
        batch = batches[stream]
        clients, counts = self.plan.clients[rows], batch.counts[rows]
        width = max(1, *counts)
        noise = self._noise[stream][rows] if self._noise else None
        sigmas = [account.noise_multipliers[client] for client in clients]
        expected = [expected_batch_size(account.sizes[client], account.rate(client)) for client in clients]
        x, y = batch.x[rows, :width], batch.y[rows, :width]
        total = torch.zeros(len(counts), device=batch.x.device)
        query = Query(states, x, y, counts, dropout, noise, sigmas, expected)
        for key, value in self.training.gradients(query).items():
            total = total + (states[key] * value).flatten(1).sum(1)
        return total - total.detach()
