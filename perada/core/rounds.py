# SPDX-License-Identifier: Apache-2.0
"""Who trains in a round, for how many steps, on which samples, and the batches that come of it.

The former are pure functions of the run's seed and the round.

The samples of a client form a stream of permutations, derived from (seed, "batches", round, client). A batch takes the
next B samples of the stream, so it is always full: what an epoch lacks for its last batch comes from the next
permutation. A client with n <= B samples has batches of n, each a whole permutation. The stream runs on from one phase
of the round to the next. Shape suffixes: C clients, B batch, K classes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.core.seeding import generator

BatchSize = int | Literal["full"]


@dataclass(frozen=True)
class Phase:
    """One stretch of local training within a round, by the name that the algorithm gives it.

    It takes ``epochs`` passes over the client's samples, fractions allowed, 1 by default, or the same number of local
    ``steps`` for every client; a ValueError if both are given, or the one given is not positive.

    >>> Phase("local").epochs, Phase("local", steps=5).epochs
    (1.0, None)
    """

    name: str = "train"
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"phase {self.name!r} has epochs={self.epochs} and steps={self.steps}; leave one out")
        check_integer(f"phase {self.name!r}: steps", self.steps, optional=True)
        check_number(f"phase {self.name!r}: epochs", self.epochs, gt=0, optional=True)
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1.0)

    def local_steps(self, size: int, batch_size: BatchSize) -> int:
        """Number of steps of a client with ``size`` samples: ceil(epochs · n / B), or the phase's own ``steps``.

        >>> [Phase(epochs=2).local_steps(n, 4) for n in (3, 4, 5, 10)]
        [2, 2, 3, 5]
        """
        if self.epochs is None:
            return cast(int, self.steps)
        # Rounded first: 0.1 · 30 is 3.0000000000000004 in floating point, and means 3.
        return max(1, math.ceil(round(self.epochs * size / rows_per_batch(size, batch_size), 9)))


@dataclass(frozen=True)
class RoundPlan:
    """The clients of a round and their numbers of local steps.

    The clients stand by number of samples with the largest first (ties by id), so that those that are active in any
    step are a prefix. ``steps[phase][i]`` are the local steps of ``clients[i]``, ``lengths`` the steps of each phase,
    where the longest clients are in another part of the round.
    """

    round: int
    clients: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.lengths:
            object.__setattr__(self, "lengths", tuple(max(phase) for phase in self.steps))

    def part(self, places: Sequence[int]) -> "RoundPlan":
        """The plan of the clients that stand at ``places``."""
        clients = tuple(self.clients[place] for place in places)
        steps = tuple(tuple(phase[place] for place in places) for phase in self.steps)
        return RoundPlan(self.round, clients, steps, self.lengths)


@dataclass(frozen=True)
class PrivateSampling:
    """How batches are drawn where training is private: anew for each stream, so that their costs compose.

    ``streams`` are what draws batches of its own in each phase, such as ``("personal", "local")``; ``secure`` draws
    come from the operating system's cryptographic generator instead of the run's seed.
    """

    streams: tuple[tuple[str, ...], ...]
    sampling: Literal["poisson", "shuffle"] = "poisson"
    secure: bool = False


def rows_per_batch(size: int, batch_size: BatchSize) -> int:
    """Real rows in each batch of a client with ``size`` samples."""
    return size if batch_size == "full" else min(size, batch_size)


def sampling_rate(size: int, batch_size: BatchSize) -> float:
    """Probability q = min(1, B / n) of an image to be in a Poisson batch; 1 where B is "full".

    >>> [sampling_rate(8, batch_size) for batch_size in (2, 16, "full")]
    [0.25, 1.0, 1.0]
    """
    return rows_per_batch(size, batch_size) / size


def sample_cohort(
    seed: int,
    round: int,
    num_clients: int,
    clients_per_round: int | None,
    eligible: Callable[[Sequence[int]], Sequence[int]] | None = None,
) -> list[int]:
    """Draw ``clients_per_round`` of a round's clients uniformly without replacement; None takes all.

    ``eligible`` gives those of the given clients that may be drawn; None where all may. The place of one that may not
    goes to the next in the order that was drawn, so there are fewer only where no more are eligible.

    Raises:
        ValueError: If no client is eligible.

    >>> sample_cohort(0, 3, 10, 4) == sample_cohort(0, 3, 10, 4) and len(set(sample_cohort(0, 3, 10, 4))) == 4
    True
    """
    order = list(range(num_clients))
    if clients_per_round is not None:
        order = torch.randperm(num_clients, generator=generator(seed, "cohort", round)).tolist()
    if eligible is not None:
        allowed = set(eligible(order))
        order = [client for client in order if client in allowed]
        if not order:
            reason = f"round {round + 1}: none of the {num_clients} clients may still take part"
            raise ValueError(f"{reason}; stop training, or raise the budget (max_epsilon) that they have spent")
    return order[:clients_per_round]


def make_plan(
    round: int, clients: Sequence[int], sizes: Sequence[int], phases: Sequence[Phase], batch_size: BatchSize
) -> RoundPlan:
    """Order the ``clients``, longest first, and count their steps; ``sizes[id]`` is a client's number of samples.

    >>> make_plan(0, [0, 1, 2], [4, 9, 9], [Phase(epochs=1)], 4)
    RoundPlan(round=0, clients=(1, 2, 0), steps=((3, 3, 1),))
    """
    order = tuple(sorted(clients, key=lambda client: (-sizes[client], client)))
    steps = tuple(tuple(phase.local_steps(sizes[client], batch_size) for client in order) for phase in phases)
    return RoundPlan(round, order, steps)


def share_out(plan: RoundPlan, ranks: int) -> list[RoundPlan]:
    """Divide the clients of a round among processes, so that all have about the same work.

    The client with the most steps left to give goes to the rank with the fewest so far (Graham, 1969), ties to the
    lower rank. Each rank's clients, if any, stand in the order of ``plan``. All ranks have as many cohort batches as
    the whole round, some of them without clients.

    >>> [own.clients for own in share_out(RoundPlan(0, (4, 7, 1), ((5, 3, 3),)), 2)]
    [(4,), (7, 1)]
    """
    work = [sum(phase[place] for phase in plan.steps) for place in range(len(plan.clients))]
    loads = [0] * ranks
    shares = [list[int]() for _ in range(ranks)]
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        rank = loads.index(min(loads))
        loads[rank] += work[place]
        shares[rank].append(place)
    return [plan.part(sorted(places)) for places in shares]


@dataclass(frozen=True)
class Shares:
    """A round's clients and who trains them: the whole plan, and the part of each rank."""

    plan: RoundPlan
    parts: tuple[RoundPlan, ...]
    rank: int = 0

    @classmethod
    def of(cls, plan: RoundPlan, ranks: int = 1, rank: int = 0) -> "Shares":
        """Divide a round among so many processes."""
        return cls(plan, tuple(share_out(plan, ranks)), rank)

    @property
    def own(self) -> RoundPlan:
        """This rank's clients; it may have none."""
        return self.parts[self.rank]

    @property
    def trained(self) -> RoundPlan:
        """This rank's clients, or the round's first as a stand-in that takes no step."""
        return self.own if self.own.clients else self.plan.part([0])

    @property
    def places(self) -> list[int]:
        """Where this rank's clients stand in the round."""
        own = set(self.own.clients)
        return [place for place, client in enumerate(self.plan.clients) if client in own]


def batch_indices(size: int, batch_size: BatchSize, steps: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """Cut a stream of permutations of ``range(size)`` into ``steps`` batches: indices (steps, min(B, n)).

    The seed, the purpose and the ids tell streams apart, as in :func:`~perada.core.seeding.derive_seed`.

    >>> batch_indices(3, 2, 3, 0, "batches", 0, 0).flatten()[:3].sort().values.tolist()
    [0, 1, 2]
    """
    rows = rows_per_batch(size, batch_size)
    stream = generator(seed, purpose, *ids)
    permutations = [torch.randperm(size, generator=stream) for _ in range(math.ceil(steps * rows / size))]
    return torch.cat(permutations)[: steps * rows].view(steps, rows)


def active_steps(plan: RoundPlan) -> Iterator[tuple[int, int, int]]:
    """Walk through the round: (phase, step within the phase, number of active clients) for every cohort batch.

    >>> list(active_steps(RoundPlan(0, (5, 2), ((2, 1), (1, 1)))))
    [(0, 0, 2), (0, 1, 1), (1, 0, 2)]
    """
    for phase, (steps, length) in enumerate(zip(plan.steps, plan.lengths, strict=True)):
        for step in range(length):
            yield phase, step, sum(own > step for own in steps)


class CohortBatch(NamedTuple):
    """One local step of every active client, of whom :func:`share_out` may leave none.

    ``x`` is (C, B, ...), ``y`` (C, B) integers or (C, B, K) floats. Client ``clients[i]`` has ``counts[i]`` real rows;
    the others are zero padding at the end. ``step`` is the index within the phase. ``failed`` are clients of whom a
    sample could not be read, and why. ``classes`` (C, K) are the numbers of each client's training images of each
    class, without the last classes if nobody has them; ``None`` where images have several labels, labels are not all
    known, or training is private.
    """

    clients: tuple[int, ...]
    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    phase: int
    step: int
    round: int = 0
    failed: tuple[tuple[int, str], ...] = ()
    classes: Tensor | None = None

    @property
    def step_ids(self) -> tuple[int, ...]:
        """What tells the draws of this step from those of the round's other steps, whoever else trains in it."""
        return step_ids(self.phase, self.step)


def step_ids(phase: int, step: int) -> tuple[int, ...]:
    """Indices that tell a step's draws apart: the step within its phase, and the phase unless it is the first.

    A step's place in the whole round would not do: it depends on how long the other clients train in earlier phases,
    which a site does not know.

    >>> step_ids(0, 4), step_ids(1, 4)
    ((4,), (4, 1))
    """
    return (step, phase) if phase else (step,)


AnyBatch = CohortBatch | dict[str, CohortBatch]
"""A step's batch, or one for each stream where training is private."""


def one_of(batches: AnyBatch) -> CohortBatch:
    """The batch, or any of them: they agree in all but images, labels and counts."""
    return next(iter(batches.values())) if isinstance(batches, dict) else batches


class EvalBatch(NamedTuple):
    """Test images: ``x`` is (B, ...), ``y`` (B,) or (B, K), ``owner`` (B,) the index of the client each belongs to."""

    x: Tensor
    y: Tensor
    owner: Tensor


@dataclass(frozen=True)
class ImageConfig:
    """Images of a backbone: (channels, height, width), each channel in [0, 1] normalised by ``mean`` and ``std``."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
