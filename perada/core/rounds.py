# SPDX-License-Identifier: Apache-2.0
"""Plans of rounds (who trains, for how many steps, on which samples), and their batches.

Plans are pure functions of the run's seed and the round.

The samples of a client form a stream of permutations, derived from (seed, "batches", round, client). A batch takes the
next B samples of the stream, so it is always full: what an epoch lacks for its last batch comes from the next
permutation. A client with n <= B samples has batches of n, each a whole permutation. The stream runs on from one phase
of the round to the next. Shape suffixes: C clients, B batch, K classes.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.core.seeding import generator

BatchSize = int | Literal["full"]
Sampling = Literal["uniform", "balanced"]
"""How the samples of a client's steps are drawn in ordinary training."""


@dataclass(frozen=True)
class Phase:
    """A phase of local training within a round.

    Attributes:
        name: Name that the algorithm gives it.
        epochs: Passes over the client's samples, fractions allowed; 1 by default.
        steps: Instead of epochs: number of local steps of every client.

    Raises:
        ValueError: If both are given, or a number is not positive.

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
        """Return the steps of a client with ``size`` samples: ceil(epochs · n / B), or the phase's ``steps``.

        >>> [Phase(epochs=2).local_steps(n, 4) for n in (3, 4, 5, 10)]
        [2, 2, 3, 5]
        """
        if self.epochs is None:
            return cast(int, self.steps)
        # The product is rounded first: 0.1 · 30 is 3.0000000000000004 in floating point, and means 3.
        batches = round(self.epochs * size / rows_per_batch(size, batch_size), 9)
        return max(1, math.ceil(batches))


@dataclass(frozen=True)
class RoundPlan:
    """The clients of a round and their numbers of local steps.

    Attributes:
        round: Number of the round, counted from 0.
        clients: Sorted by number of samples, the largest first (ties by id), so that the clients that are active in a
            step are always a prefix.
        steps: ``steps[phase][i]`` are the local steps of ``clients[i]``.
        clients_per_chunk: Number of clients that train together; the next ones begin when these have finished. None for
            all of the round.
        min_batches: Number of cohort batches to serve at least, the last ones without clients: all ranks serve as many.
        chunks_at_a_time: Number of chunks that take their steps in turns. Each of them may train in its own thread.
    """

    round: int
    clients: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    clients_per_chunk: int | None = field(default=None, repr=False)
    min_batches: int = field(default=0, repr=False)
    chunks_at_a_time: int = field(default=1, repr=False)

    @cached_property
    def chunks(self) -> list[range]:
        """Places of the clients that train together."""
        size = self.clients_per_chunk or max(1, len(self.clients))
        places = range(len(self.clients))
        return [places[start : start + size] for start in range(0, len(places), size)]

    @property
    def num_batches(self) -> int:
        """Number of cohort batches of the round."""
        return max(self.min_batches, sum(steps_of_chunk(self, chunk) for chunk in self.chunks))

    def part(self, places: Sequence[int]) -> "RoundPlan":
        """Return the plan for the clients at ``places``."""
        clients = tuple(self.clients[place] for place in places)
        steps = []
        for steps_of_phase in self.steps:
            steps.append(tuple(steps_of_phase[place] for place in places))
        return replace(self, clients=clients, steps=tuple(steps), min_batches=0)


def steps_of_chunk(plan: RoundPlan, chunk: range) -> int:
    """Return the number of local steps of a chunk, in all phases: those of its client with the most."""
    return sum(max(steps_of_phase[place] for place in chunk) for steps_of_phase in plan.steps)


@dataclass(frozen=True)
class PrivateSampling:
    """How batches are drawn in private training: independently for each stream, so that their costs compose.

    Attributes:
        streams: Names of the streams with batches of their own in each phase, such as ``("personal", "local")``.
        sampling: How a batch is drawn.
        secure: Draw from the operating system's cryptographic generator instead of the run's seed.
    """

    streams: tuple[tuple[str, ...], ...]
    sampling: Literal["poisson", "shuffle"] = "poisson"
    secure: bool = False


def rows_per_batch(num_samples: int, batch_size: BatchSize) -> int:
    """Return the number of real rows in each batch of a client with ``num_samples`` samples."""
    return num_samples if batch_size == "full" else min(num_samples, batch_size)


def sampling_rate(num_samples: int, batch_size: BatchSize) -> float:
    """Return the probability q = min(1, B / n) of an image to be in a Poisson batch; 1 if B is "full".

    >>> [sampling_rate(8, batch_size) for batch_size in (2, 16, "full")]
    [0.25, 1.0, 1.0]
    """
    return rows_per_batch(num_samples, batch_size) / num_samples


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
        clients_per_round: How many to draw; None for all.
        eligible: Returns those of some clients that may be drawn; None if all may. The next client in the drawn order
            takes the place of one that may not, so there are fewer only if no more are eligible.

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
    chunks_at_a_time: int = 1,
) -> RoundPlan:
    """Order the ``clients``, longest first, and count their steps; ``sizes[id]`` is a client's number of samples.

    >>> make_plan(0, [0, 1, 2], [4, 9, 9], [Phase(epochs=1)], 4)
    RoundPlan(round=0, clients=(1, 2, 0), steps=((3, 3, 1),))
    """
    order = tuple(sorted(clients, key=lambda client: (-sizes[client], client)))
    steps = []
    for phase in phases:
        steps.append(tuple(phase.local_steps(sizes[client], batch_size) for client in order))
    return RoundPlan(round, order, tuple(steps), clients_per_chunk, chunks_at_a_time=chunks_at_a_time)


def share_out(plan: RoundPlan, num_ranks: int) -> list[RoundPlan]:
    """Divide the clients of a round among processes, so that all have about the same work.

    Clients are assigned by their number of steps, the largest first, each to the rank with the fewest steps so far
    (Graham, 1969), ties to the lower rank. Each rank's clients, if any, have the order of ``plan``. All ranks have as
    many cohort batches as the rank that needs the most, some of them without clients.

    >>> [part.clients for part in share_out(RoundPlan(0, (4, 7, 1), ((5, 3, 3),)), 2)]
    [(4,), (7, 1)]
    """
    work = []
    for place in range(len(plan.clients)):
        work.append(sum(steps_of_phase[place] for steps_of_phase in plan.steps))
    loads = [0] * num_ranks
    shares = [list[int]() for _ in range(num_ranks)]
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        rank = loads.index(min(loads))
        loads[rank] += work[place]
        shares[rank].append(place)
    parts = [plan.part(sorted(places)) for places in shares]
    most_batches = max(part.num_batches for part in parts)
    return [replace(part, min_batches=most_batches) for part in parts]


@dataclass(frozen=True)
class Shares:
    """A round's clients, and the ranks that train them.

    Attributes:
        plan: The plan of the round.
        parts: The plan of each rank.
        rank: This process.
    """

    plan: RoundPlan
    parts: tuple[RoundPlan, ...]
    rank: int = 0

    @classmethod
    def of(cls, plan: RoundPlan, num_ranks: int = 1, rank: int = 0) -> "Shares":
        """Divide a round among ``num_ranks`` processes."""
        return cls(plan, tuple(share_out(plan, num_ranks)), rank)

    @property
    def local_plan(self) -> RoundPlan:
        """This rank's clients, possibly none."""
        return self.parts[self.rank]

    @property
    def cohort_plan(self) -> RoundPlan:
        """This rank's clients or, without any, the round's first client as a stand-in that takes no step."""
        if self.local_plan.clients:
            return self.local_plan
        return self.plan.part([0])

    @property
    def places(self) -> list[int]:
        """Positions of this rank's clients in the plan of the round."""
        local_clients = set(self.local_plan.clients)
        return [place for place, client in enumerate(self.plan.clients) if client in local_clients]


def batch_indices(num_samples: int, batch_size: BatchSize, steps: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """Cut a stream of permutations of ``range(num_samples)`` into ``steps`` batches: indices (steps, min(B, n)).

    The seed, the purpose and the ids distinguish streams, as in :func:`~perada.core.seeding.derive_seed`.

    >>> batch_indices(3, 2, 3, 0, "batches", 0, 0).flatten()[:3].sort().values.tolist()
    [0, 1, 2]
    """
    rows = rows_per_batch(num_samples, batch_size)
    stream = generator(seed, purpose, *ids)
    num_permutations = math.ceil(steps * rows / num_samples)
    permutations = [torch.randperm(num_samples, generator=stream) for _ in range(num_permutations)]
    return torch.cat(permutations)[: steps * rows].view(steps, rows)


def balanced_indices(labels: Tensor, batch_size: BatchSize, steps: int, seed: int, purpose: str, *ids: int) -> Tensor:
    """Draw ``steps`` batches of a client with replacement, each of its classes equally likely.

    A sample is drawn uniformly from those of its class. The seed, the purpose and the ids distinguish streams, as in
    :func:`~perada.core.seeding.derive_seed`. More steps extend the stream of fewer.

    Args:
        labels: Class (N,) of each of the client's samples.
        batch_size: Rows B of a batch, or "full" for N.
        steps: Number of batches.
        seed: Seed of the run.
        purpose: What the stream is for.
        *ids: Further indices.

    Returns:
        Indices (steps, min(B, N)).

    >>> labels = torch.tensor([0, 0, 0, 0, 0, 0, 0, 2])
    >>> drawn = labels[balanced_indices(labels, 8, 1000, 0, "batches", 0, 0)]
    >>> round((drawn == 2).double().mean().item(), 1)
    0.5
    """
    rows = rows_per_batch(len(labels), batch_size)
    # Classes that the client does not have take no part.
    classes_of_samples = torch.searchsorted(labels.unique(), labels)
    class_sizes = classes_of_samples.bincount()
    samples_by_class = classes_of_samples.argsort(stable=True)
    first_places = class_sizes.cumsum(0) - class_sizes
    # Two numbers in [0, 1) for each row, so that a longer stream begins like a shorter one.
    draws = torch.rand(steps * rows, 2, dtype=torch.float64, generator=generator(seed, purpose, *ids))
    drawn_classes = (draws[:, 0] * len(class_sizes)).long()
    places_in_class = (draws[:, 1] * class_sizes[drawn_classes]).long()
    return samples_by_class[first_places[drawn_classes] + places_in_class].view(steps, rows)


class BatchPlace(NamedTuple):
    """Where a cohort batch stands in a round.

    Attributes:
        start: Place in the plan of its chunk's first client.
        phase: Index of the phase.
        step: Index of the step within the phase.
        active: Number of clients that take the step, the chunk's first ones; 0 while only other ranks train.
    """

    start: int
    phase: int
    step: int
    active: int


@dataclass(order=True)
class _Lane:
    """A row of chunks that train one after another, as on one thread. The smallest lane has the least work.

    Attributes:
        work: Number of steps that its clients have taken.
        number: Decides between lanes with equal work.
        places: Places of the batches that are left of its current chunk.
    """

    work: int
    number: int
    places: Iterator[BatchPlace] = field(default_factory=lambda: iter(()), compare=False)


def batch_places(plan: RoundPlan) -> Iterator[BatchPlace]:
    """Yield the place of every cohort batch of a round.

    A chunk takes all its steps before the next one begins. If several chunks train at a time, each in its own lane, the
    next batch is one of the lane whose clients have taken the fewest steps.

    >>> [tuple(place) for place in batch_places(RoundPlan(0, (5, 2), ((2, 1), (1, 1))))]
    [(0, 0, 0, 2), (0, 0, 1, 1), (0, 1, 0, 2)]
    >>> plan = RoundPlan(0, (5, 2, 7), ((2, 2, 1),), clients_per_chunk=1, chunks_at_a_time=2)
    >>> [(place.start, place.step) for place in batch_places(plan)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]
    """
    waiting = deque(plan.chunks)
    # A heap, so that the next batch is one of the lane with the least work.
    lanes = [_Lane(work=0, number=number) for number in range(plan.chunks_at_a_time)]
    num_batches = 0
    while lanes:
        lane = heapq.heappop(lanes)
        place = next(lane.places, None)
        while place is None and waiting:
            lane.places = _places_of_chunk(plan, waiting.popleft())
            place = next(lane.places, None)
        if place is None:
            # No chunk is left for this lane.
            continue
        yield place
        num_batches += 1
        lane.work += place.active
        heapq.heappush(lanes, lane)
    without_clients = BatchPlace(start=0, phase=len(plan.steps) - 1, step=0, active=0)
    yield from [without_clients] * (plan.num_batches - num_batches)


def _places_of_chunk(plan: RoundPlan, chunk: range) -> Iterator[BatchPlace]:
    """Yield the places of a chunk's batches, phase by phase."""
    for phase, steps in enumerate(plan.steps):
        client_steps_of_phase = [steps[place] for place in chunk]
        for step in range(max(client_steps_of_phase)):
            active = sum(client_steps > step for client_steps in client_steps_of_phase)
            yield BatchPlace(chunk.start, phase, step, active)


def busiest_lane(plan: RoundPlan) -> float:
    """Return the work of the busiest of the lanes in which chunks train at a time, relative to the mean of all lanes.

    >>> busiest_lane(RoundPlan(0, (5, 2, 7), ((2, 2, 2),), clients_per_chunk=1, chunks_at_a_time=2))
    1.3333333333333333
    """
    loads = [0] * plan.chunks_at_a_time
    for chunk in plan.chunks:
        # Lanes are filled as in batch_places: a chunk begins in the lane that is the first to end its earlier ones.
        lane = loads.index(min(loads))
        loads[lane] += sum(steps_of_phase[place] for place in chunk for steps_of_phase in plan.steps)
    return max(loads) * len(loads) / max(1, sum(loads))


class CohortBatch(NamedTuple):
    """One local step of clients that train at the same time, possibly none on a rank.

    Attributes:
        clients: The clients that take the step: those of the plan from ``start`` on.
        x: Images (C, B, ...).
        y: Classes (C, B), or labels (C, B, K) as floats.
        counts: Number of real rows of each client; the others are zero padding at the end.
        phase: Index of the phase.
        step: Index of the step within the phase.
        round: Number of the round.
        failed: Clients of whom a sample could not be read, and why.
        class_counts: Number (C, K) of each client's training images of each class, without the last classes if no
            client has them; ``None`` if images have several labels, labels are not all known, or training is private.
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
    class_counts: Tensor | None = None
    start: int = 0

    @property
    def stop(self) -> int:
        """Place after the last client in the round's plan."""
        return self.start + len(self.clients)

    @property
    def step_ids(self) -> tuple[int, ...]:
        """Indices that distinguish the draws of this step from those of the round's other steps (:func:`step_ids`)."""
        return step_ids(self.phase, self.step)


def step_ids(phase: int, step: int) -> tuple[int, ...]:
    """Return indices that distinguish a step's draws: the step within its phase, and the phase unless it is the first.

    The number of the step in the round would depend on how long other clients train in earlier phases, which a site
    does not know.

    >>> step_ids(0, 4), step_ids(1, 4)
    ((4,), (4, 1))
    """
    return (step, phase) if phase else (step,)


AnyBatch = CohortBatch | dict[str, CohortBatch]
"""A step's batch, or one for each stream in private training."""


def one_of(batches: AnyBatch) -> CohortBatch:
    """Return the batch, or any one of several, which differ only in images, labels and counts."""
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
    """Images of a backbone: (channels, height, width), each channel in [0, 1] normalised by ``mean`` and ``std``."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
