# SPDX-License-Identifier: Apache-2.0
"""Plans of rounds (who trains, for how many steps, on which samples), and their batches.

Plans are pure functions of the run's seed and the round.

The samples of a client form a stream of permutations, which is derived from (seed, "batches", round, client). A batch
is the next B samples of the stream, so it is always full: the last batch of an epoch is filled from the next
permutation. A client with n <= B samples has batches of all n. The stream continues from one phase of the round to the
next.

Shapes: C clients, B samples per batch, K classes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.core.seeding import generator

BatchSize = int | Literal["full"]
"""Number of samples in a batch, or ``"full"`` for all samples of a client."""


@dataclass(frozen=True)
class Phase:
    """A phase of local training within a round.

    Attributes:
        name: Name of the phase, which the algorithm chooses.
        epochs: Number of passes over the client's samples, possibly a fraction; 1 by default.
        steps: Number of local steps of every client, instead of ``epochs``.

    Raises:
        ValueError: If both are set, or a number is not positive.

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
        """Return the number of steps of a client with n = ``size`` samples: ceil(epochs · n / B), or ``steps`` if set.

        >>> [Phase(epochs=2).local_steps(n, 4) for n in (3, 4, 5, 10)]
        [2, 2, 3, 5]
        """
        if self.epochs is None:
            return cast(int, self.steps)
        # Rounded before ceil(), since 0.1 · 30 is 3.0000000000000004 in floating point.
        batches = round(self.epochs * size / rows_per_batch(size, batch_size), 9)
        return max(1, math.ceil(batches))


@dataclass(frozen=True)
class RoundPlan:
    """The clients of a round and their numbers of local steps.

    Attributes:
        round: Number of the round, counted from 0.
        clients: Ids of the clients, with the largest numbers of samples first (ties by id), so that the clients that
            are active in a step are always a prefix.
        steps: Number of local steps by phase and client: ``steps[phase][i]`` for ``clients[i]``.
        clients_per_chunk: Number of clients that train together; the next chunk begins when these have finished. None
            for all clients of the round.
        min_batches: Smallest number of cohort batches, of which the last ones have no clients. All ranks must have the
            same number of batches.
    """

    round: int
    clients: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    clients_per_chunk: int | None = field(default=None, repr=False)
    min_batches: int = field(default=0, repr=False)

    @cached_property
    def chunks(self) -> list[range]:
        """Places, in the plan, of the clients that train together."""
        size = self.clients_per_chunk or max(1, len(self.clients))
        places = range(len(self.clients))
        return [places[start : start + size] for start in places[::size]]

    @property
    def num_batches(self) -> int:
        """Number of cohort batches of the round."""
        batches_of_chunks = 0
        for chunk in self.chunks:
            for steps_of_phase in self.steps:
                batches_of_chunks += max(steps_of_phase[place] for place in chunk)
        return max(self.min_batches, batches_of_chunks)

    def part(self, places: Sequence[int]) -> "RoundPlan":
        """Return the plan of some of the clients, given by their places in this plan."""
        clients = tuple(self.clients[place] for place in places)
        steps = []
        for steps_of_phase in self.steps:
            steps.append(tuple(steps_of_phase[place] for place in places))
        return RoundPlan(self.round, clients, tuple(steps), self.clients_per_chunk)


@dataclass(frozen=True)
class PrivateSampling:
    """Options for drawing batches in private training: independently for each stream, so that their costs compose.

    Attributes:
        streams: For each phase, the names of its streams of batches, such as ``("personal", "local")``.
        sampling: Poisson samples, or batches of shuffled passes.
        secure: Whether to draw from a cryptographic generator instead of deriving draws from the run's seed.
    """

    streams: tuple[tuple[str, ...], ...]
    sampling: Literal["poisson", "shuffle"] = "poisson"
    secure: bool = False


def rows_per_batch(size: int, batch_size: BatchSize) -> int:
    """Return the number of real rows in each batch of a client with ``size`` samples."""
    if batch_size == "full":
        return size
    return min(size, batch_size)


def sampling_rate(size: int, batch_size: BatchSize) -> float:
    """Return the probability q = min(1, B / n) that an image is in a Poisson batch; 1 if B is "full".

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
    """Draw the clients of a round uniformly without replacement.

    Args:
        seed: Seed of the run.
        round: Number of the round.
        num_clients: Number of clients in the federation.
        clients_per_round: Number of clients to draw; None for all.
        eligible: Function of clients that returns those that may be drawn; None if all may. A client that may not is
            replaced by the next one in the drawn order, so there are fewer only if no others are eligible.

    Returns:
        Ids of the clients, in the drawn order.

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
            reason = f"round {round + 1}: none of the {num_clients} clients may take part any more"
            raise ValueError(f"{reason}: their privacy budgets are spent; stop training, or raise max_epsilon")
    return order[:clients_per_round]


def make_plan(
    round: int,
    clients: Sequence[int],
    sizes: Sequence[int],
    phases: Sequence[Phase],
    batch_size: BatchSize,
    clients_per_chunk: int | None = None,
) -> RoundPlan:
    """Return the plan of a round: order its clients, and count their steps.

    Args:
        round: Number of the round, counted from 0.
        clients: Ids of the clients of the round.
        sizes: Number of samples of each client of the federation.
        phases: Phases of local training.
        batch_size: Batch size B.
        clients_per_chunk: Number of clients that train together; None for all.

    >>> make_plan(0, [0, 1, 2], [4, 9, 9], [Phase(epochs=1)], 4)
    RoundPlan(round=0, clients=(1, 2, 0), steps=((3, 3, 1),))
    """
    order = tuple(sorted(clients, key=lambda client: (-sizes[client], client)))
    steps = []
    for phase in phases:
        steps.append(tuple(phase.local_steps(sizes[client], batch_size) for client in order))
    return RoundPlan(round, order, tuple(steps), clients_per_chunk)


def share_out(plan: RoundPlan, ranks: int) -> list[RoundPlan]:
    """Divide the clients of a round among processes such that all have about the same work.

    Clients are assigned in descending order of their numbers of steps, each to the rank with the fewest steps so far
    (Graham, 1969); ties go to the lower rank. All ranks get as many cohort batches as the rank that needs the most,
    some of them without clients.

    Args:
        plan: Plan of the round.
        ranks: Number of processes.

    Returns:
        The plan of each rank, with its clients (possibly none) in the order of ``plan``.

    >>> [part.clients for part in share_out(RoundPlan(0, (4, 7, 1), ((5, 3, 3),)), 2)]
    [(4,), (7, 1)]
    """
    work = []
    for place in range(len(plan.clients)):
        work.append(sum(steps_of_phase[place] for steps_of_phase in plan.steps))
    loads = [0] * ranks
    shares = [list[int]() for _ in range(ranks)]
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        rank = loads.index(min(loads))
        loads[rank] += work[place]
        shares[rank].append(place)
    parts = [plan.part(sorted(places)) for places in shares]
    most_batches = max(part.num_batches for part in parts)
    return [replace(part, min_batches=most_batches) for part in parts]


@dataclass(frozen=True)
class Shares:
    """The division of a round's clients among ranks.

    Attributes:
        plan: Plan of the round.
        parts: Plan of each rank.
        rank: Number of this process.
    """

    plan: RoundPlan
    parts: tuple[RoundPlan, ...]
    rank: int = 0

    @classmethod
    def of(cls, plan: RoundPlan, ranks: int = 1, rank: int = 0) -> "Shares":
        """Divide the clients of a round among ``ranks`` processes, of which this one is number ``rank``."""
        return cls(plan, tuple(share_out(plan, ranks)), rank)

    @property
    def local_plan(self) -> RoundPlan:
        """Plan of this rank's clients, possibly none."""
        return self.parts[self.rank]

    @property
    def cohort_plan(self) -> RoundPlan:
        """Plan of this rank's clients or, without any, of the round's first client, which then takes no step here."""
        if self.local_plan.clients:
            return self.local_plan
        return self.plan.part([0])

    @property
    def places(self) -> list[int]:
        """Positions of this rank's clients in the plan of the round."""
        local_clients = set(self.local_plan.clients)
        return [place for place, client in enumerate(self.plan.clients) if client in local_clients]


def batch_indices(size: int, batch_size: BatchSize, steps: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """Split a stream of permutations of a client's samples into batches.

    Args:
        size: Number n of samples.
        batch_size: Batch size B.
        steps: Number of batches.
        seed: Seed of the run.
        purpose: Purpose of the stream, as in :func:`~perada.core.seeding.derive_seed`.
        ids: Indices such as those of the round and the client, as there.

    Returns:
        Indices (steps, min(B, n)) of the samples.

    >>> batch_indices(3, 2, 3, 0, "batches", 0, 0).flatten()[:3].sort().values.tolist()
    [0, 1, 2]
    """
    rows = rows_per_batch(size, batch_size)
    stream = generator(seed, purpose, *ids)
    num_permutations = math.ceil(steps * rows / size)
    permutations = [torch.randperm(size, generator=stream) for _ in range(num_permutations)]
    return torch.cat(permutations)[: steps * rows].view(steps, rows)


class BatchPlace(NamedTuple):
    """Place of a cohort batch in a round.

    Attributes:
        start: Place of the chunk's first client in the plan.
        phase: Index of the phase.
        step: Index of the step within the phase.
        active: Number of clients that take the step, which are the first ones of the chunk; 0 if only other ranks still
            train.
    """

    start: int
    phase: int
    step: int
    active: int


def batch_places(plan: RoundPlan) -> Iterator[BatchPlace]:
    """Yield the place of each cohort batch of a round. A chunk takes all its steps before the next one begins.

    >>> [tuple(place) for place in batch_places(RoundPlan(0, (5, 2), ((2, 1), (1, 1))))]
    [(0, 0, 0, 2), (0, 0, 1, 1), (0, 1, 0, 2)]
    """
    places = []
    for chunk in plan.chunks:
        for phase, steps in enumerate(plan.steps):
            steps_of_chunk = [steps[place] for place in chunk]
            for step in range(max(steps_of_chunk)):
                active = sum(client_steps > step for client_steps in steps_of_chunk)
                places.append(BatchPlace(chunk.start, phase, step, active))
    without_clients = BatchPlace(start=0, phase=len(plan.steps) - 1, step=0, active=0)
    yield from places
    yield from [without_clients] * (plan.num_batches - len(places))


class CohortBatch(NamedTuple):
    """One local step of clients that train at the same time, possibly none on a rank.

    Attributes:
        clients: Ids of the clients that take the step, which are those of the plan from ``start`` on.
        x: Images (C, B, ...).
        y: Classes (C, B), or labels (C, B, K) as floats.
        counts: Number of real rows of each client, which come first; the others are padding with zeros.
        phase: Index of the phase.
        step: Index of the step within the phase.
        round: Number of the round.
        failed: Clients with a sample that could not be read, and the reason.
        classes: Number (C, K) of training images of each client and class, without the last classes if no client has
            them; ``None`` if images have several labels, if some labels are unknown, or in private training.
        start: Place of the first client in the round's plan.
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
    start: int = 0

    @property
    def stop(self) -> int:
        """Place after the last client in the round's plan."""
        return self.start + len(self.clients)

    @property
    def step_ids(self) -> tuple[int, ...]:
        """Indices that distinguish the random draws of this step from those of other steps (:func:`step_ids`)."""
        return step_ids(self.phase, self.step)


def step_ids(phase: int, step: int) -> tuple[int, ...]:
    """Return indices that distinguish the random draws of a step from those of the round's other steps.

    They are the step within its phase and, unless it is the first one, the phase. The number of the step in the round
    is not used, since it depends on how long other clients train in earlier phases, which a site does not know.

    >>> step_ids(0, 4), step_ids(1, 4)
    ((4,), (4, 1))
    """
    if phase == 0:
        return (step,)
    return (step, phase)


AnyBatch = CohortBatch | dict[str, CohortBatch]
"""The batch of a step or, in private training, one batch for each stream."""


def one_of(batches: AnyBatch) -> CohortBatch:
    """Return the batch of a step, or any of several: they differ only in images, labels and counts."""
    if isinstance(batches, dict):
        return next(iter(batches.values()))
    return batches


class EvalBatch(NamedTuple):
    """A batch of test images.

    Attributes:
        x: Images (B, ...).
        y: Labels (B,) or (B, K).
        owner: Index (B,) of the client to which each image belongs.
    """

    x: Tensor
    y: Tensor
    owner: Tensor


@dataclass(frozen=True)
class ImageConfig:
    """Format of a backbone's images.

    Attributes:
        input_size: Channels, height and width.
        mean: Mean of each channel, with values in [0, 1], that is subtracted.
        std: Standard deviation of each channel, by which the result is divided.
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
