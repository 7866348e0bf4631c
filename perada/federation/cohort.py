# SPDX-License-Identifier: Apache-2.0
"""Local training of the clients of one round, chunk by chunk.

The clients of a :class:`~perada.federation.chunk.Chunk` take all their steps before the next chunk begins: what they
train stays in the processor's caches, and gradients and optimisers exist for one chunk of a thread at a time. Without
threads this is the loop:

    for places in plan.chunks:
        chunk = Chunk(local_round, worker, places)
        chunk.open()                                  # copies what its clients train
        for batch in batches_of(chunk):
            chunk.step(batch)                         # one local step of all its clients
        store(chunk.close())                          # what they keep, and what they send

The loop over batches is Lightning's, so that this one is turned inside out here: :meth:`Cohort.step` gets one batch at
a time. With the first batch of a chunk it closes the chunk before and opens this one; :meth:`Cohort.finish` closes the
last one.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock

import torch
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.ranks import Ranks
from perada.core.rounds import AnyBatch, CohortBatch, Shares, busiest_lane, one_of
from perada.core.states import State, device_of, double
from perada.engine.chunk_sizes import MAX_BUSIEST_LANE, is_mostly_trained
from perada.federation.chunk import Chunk, LocalRound
from perada.federation.global_streams import GlobalStreams
from perada.federation.workers import Worker, workers_of
from perada.server.aggregate import UpdateSums


@dataclass(frozen=True)
class ClientResults:
    """Results of the local training of a round's C clients, in the plan's order.

    A process has the stacks (c, ...) of only the clients that it trained, or of a stand-in. All processes have all
    else, with tensors (C,) on the CPU.

    Attributes:
        client_state: What this process' clients keep, (c, ...) by role.
        sent: What they send, (c, ...); empty where it is only added up.
        finite_here: Whether their training stayed finite, (c,), on the device.
        finite: Whether each client's training stayed finite, (C,).
        accepted: Whether the update counts, (C,): whether the client stayed finite. Where training is private, whether
            the update is, since the server may learn nothing of what is not sent.
        broken_clients: Clients whose training became NaN or infinite.
        losses: Mean loss over a client's steps, (C,) by role; only roles that have a loss.
        skipped: Number of steps that were skipped in float16, (C,); None in other precisions.
        failed: Clients of whom a sample could not be read, with the reason.
    """

    client_state: Stacks
    sent: State
    finite_here: Tensor
    finite: Tensor
    accepted: Tensor
    broken_clients: list[int]
    losses: dict[str, Tensor]
    skipped: Tensor | None
    failed: dict[int, str]


class Cohort:
    """The plan's C clients while they train, in its order, longest first.

    Args:
        local_round: What the clients train from, and what is counted in each step.
        update_sums: Adds up what the clients send, where the server needs only their mean; by default all of it is
            kept.

    Attributes:
        local_round: As passed.
        failed: Clients of whom a sample could not be read, with the reason.
    """

    def __init__(self, local_round: LocalRound, update_sums: UpdateSums | None = None) -> None:
        self.local_round = local_round
        self.plan = local_round.plan
        self.sums = update_sums
        self.failed: dict[int, str] = {}
        self._trainer = local_round.trainer
        clients = len(self.plan.clients)
        device = device_of(local_round.received)
        # Places of the clients whose chunks have not begun.
        self._waiting = deque(self.plan.chunks)
        # Chunks that have begun and not ended, by the place of their first client.
        self._open: dict[int, Chunk] = {}
        # Results of the chunks that have ended, each in its rows. Only one worker at a time stores them.
        self._storing = Lock()
        self._new_client_state: dict[str, _ChunkedStacks] = {}
        self._sent = _ChunkedStacks(clients)
        # These chunks are still to be added to the sums, in this order; some of their updates finished early.
        self._not_summed = deque(self.plan.chunks)
        self._early_updates: dict[int, _ChunkUpdate] = {}
        self._finite = torch.zeros(clients, dtype=torch.bool, device=device)
        self._accepted = torch.zeros(clients, dtype=torch.bool, device=device)
        # Clients of whom a sample could not be read. They are not added to `broken`, which workers change at the same
        # time.
        self._unreadable = torch.zeros(clients, dtype=torch.bool, device=device)
        # The global random streams before the first step.
        self._first_streams: GlobalStreams | None = None

    @cached_property
    def _chunk_workers(self) -> list[Worker]:
        """The workers that train chunks side by side, or a single one that trains them one after another.

        They are made for the first step, since threads get copies of the network, and callbacks may still change it
        when the round begins.
        """
        engine = self._trainer.engine
        device = device_of(self.local_round.received)
        count = min(self.plan.chunks_at_a_time, len(self.plan.chunks))
        # Behind a frozen backbone, a single thread can divide its passes among all cores instead.
        if not is_mostly_trained(engine.model) and busiest_lane(self.plan) > MAX_BUSIEST_LANE:
            count = 1
        return workers_of(engine, count, device)

    def step(self, batches: AnyBatch) -> None:
        """Take one local step of the clients that a batch holds, now or later in another thread.

        A batch holds clients of one chunk. The batches come in the order of :func:`perada.core.rounds.batch_places`.

        Raises:
            ValueError: If the chunk has ended, or is not the next one.
        """
        batch = one_of(batches)
        if not batch.clients:
            # This rank has finished, and others have not.
            return
        if self._first_streams is None:
            self._first_streams = GlobalStreams()
        self._note_unreadable(batches)
        if batch.start not in self._open:
            # The host may have to wait for the device, so this does not follow their last steps directly.
            self._end_trained_chunks()
            self._open_chunk_of(batch)
        self._submit_step(self._open[batch.start], batches)

    def _note_unreadable(self, batches: AnyBatch) -> None:
        """Mark the clients of whom a sample of a batch could not be read."""
        # Where training is private, each stream of batches has its own.
        batches_of_streams = list(batches.values()) if isinstance(batches, dict) else [batches]
        for batch in batches_of_streams:
            for client, reason in batch.failed:
                # In a private run the sample is in no batch, and the client trains on.
                self._unreadable[self.plan.clients.index(client)] |= self.local_round.private is None
                self.failed.setdefault(client, reason)

    def _end_trained_chunks(self) -> None:
        """End the chunks that have taken all their steps."""
        for chunk in list(self._open.values()):
            if chunk.num_steps_left == 0:
                self._end_chunk(chunk)

    def _open_chunk_of(self, batch: CohortBatch) -> None:
        """Open the next chunk of the plan, whose clients must be those of the batch."""
        if not self._waiting or self._waiting[0].start != batch.start:
            raise ValueError(
                f"clients {batch.clients} have finished their steps, or it is not their turn; pass batches in the "
                "order of batch_places"
            )
        self._open_next()

    def _open_next(self) -> Chunk:
        """Open the next chunk of the plan, in the worker that has the fewest open ones."""
        # Threads draw from a global stream in an order that changes from run to run; a single one does not.
        workers = self._chunk_workers[:1] if self._trainer.uses_global_random else self._chunk_workers
        busy = [chunk.worker for chunk in self._open.values()]
        worker = min(workers, key=busy.count)
        chunk = Chunk(self.local_round, worker, self._waiting.popleft())
        self._open[chunk.start] = chunk
        worker.submit(chunk.open)
        return chunk

    def _submit_step(self, chunk: Chunk, batches: AnyBatch) -> None:
        """Have a chunk's next step taken."""
        chunk.num_steps_left -= 1
        step = partial(chunk.step, batches)
        if self._trainer.uses_global_random is False:
            chunk.worker.submit(step)
            return
        # The first step of a run shows whether the network draws from a global stream. If it does, this thread waits
        # for each step, since it may itself seed these streams when it reads the next images.
        streams = GlobalStreams() if self._trainer.uses_global_random is None else None
        chunk.worker.submit(step)
        chunk.worker.wait()
        if streams is not None:
            self._trainer.uses_global_random = not streams.are_unchanged()

    def drew_side_by_side(self) -> bool:
        """Return whether a global random stream was drawn from while threads trained side by side.

        Then the results depend on the threads' order: see :meth:`trained_again`. Waits for all steps so far.
        """
        self.wait()
        if self._first_streams is None or len(self._chunk_workers) == 1 or self._trainer.uses_global_random:
            return False
        return not self._first_streams.are_unchanged()

    def trained_again(self, batches: Iterable[AnyBatch], update_sums: UpdateSums | None) -> "Cohort":
        """Train the same clients again from the same states, one step after another, also in all later rounds.

        A network may begin to draw from a global random stream in any step, for example when a callback raises the
        rate of a functional dropout. No threads can be made to draw in a certain order afterwards.

        Args:
            batches: The round's batches.
            update_sums: New sums in place of :attr:`update_sums`; None if all updates are kept.

        Returns:
            The cohort that has taken all steps, to be finished in place of this one.
        """
        assert self._first_streams is not None
        self._first_streams.restore()
        self._trainer.uses_global_random = True
        former_round = self.local_round
        for worker in self._chunk_workers:
            worker.finish()
        again = Cohort(
            LocalRound.begin(
                former_round.trainer,
                former_round.plan,
                former_round.client_state,
                former_round.received,
                factor=former_round.factor,
                tuning=former_round.tuning,
            ),
            update_sums,
        )
        for batch in batches:
            again.step(batch)
        return again

    def _end_chunk(self, chunk: Chunk) -> None:
        """Have a chunk's results stored after its last step, and let go of its gradients and optimisers."""
        del self._open[chunk.start]
        chunk.worker.submit(partial(self._close_and_store, chunk))

    def _close_and_store(self, chunk: Chunk) -> None:
        """Store what a chunk's clients keep and send."""
        result = chunk.close()
        rows = slice(chunk.start, chunk.stop)
        is_readable = ~self._unreadable[rows]
        accepted = result.accepted & is_readable
        self._finite[rows] = result.finite & is_readable
        self._accepted[rows] = accepted
        with self._storing:
            for role, stacked in result.client_state.items():
                if role not in self._new_client_state:
                    self._new_client_state[role] = _ChunkedStacks(len(self.plan.clients))
                self._new_client_state[role].write(stacked, chunk.start)
            if self.sums is None:
                self._sent.write(result.update, chunk.start)
            else:
                self._early_updates[chunk.start] = _ChunkUpdate(result.update, result.received, accepted)
                self._add_up(self.sums)

    def _add_up(self, update_sums: UpdateSums) -> None:
        """Add updates to the sums in the order of the plan's chunks.

        The last bits of a sum depend on the order. A chunk that ends before an earlier one, in another thread, waits.
        """
        while self._not_summed and self._not_summed[0].start in self._early_updates:
            start = self._not_summed.popleft().start
            update = self._early_updates.pop(start)
            update_sums.add(update.sent, update.received, start, update.accepted)

    def wait(self) -> None:
        """Wait until all steps so far have been taken, in whatever thread."""
        for worker in self._chunk_workers:
            worker.wait()

    def finish(self, shares: Shares | None = None, ranks: Ranks | None = None) -> ClientResults:
        """End the round, and merge the results of the ranks. A collective: all ranks must call this alike.

        Args:
            shares: The round's clients and who trains them; by default this process trains all.
            ranks: The processes; by default one.
        """
        shares = shares or Shares.of(self.plan)
        ranks = ranks or Ranks()
        for chunk in list(self._open.values()):
            self._end_chunk(chunk)
        # Clients without steps: the stand-in of a rank without clients, or those of a round that ends early.
        while self._waiting:
            self._end_chunk(self._open_next())
        for worker in self._chunk_workers:
            worker.finish()

        scales = self.local_round.scales
        skipped = torch.zeros_like(self._finite) if scales is None else scales.skipped
        totals = self._totals_of_all(shares, ranks, skipped)
        finite = totals.finite.bool()
        losses = {}
        for role, loss in totals.losses.items():
            steps = totals.steps[role]
            if steps.any():
                losses[role] = loss / steps
        broken = []
        for client, is_finite in zip(shares.plan.clients, finite.tolist(), strict=True):
            if not is_finite:
                broken.append(client)
        failed: dict[int, str] = {}
        for failed_of_rank in ranks.gather(self.failed):
            failed |= failed_of_rank
        return ClientResults(
            client_state={role: stacks.state for role, stacks in self._new_client_state.items()},
            sent=self._sent.state,
            finite_here=self._finite,
            finite=finite,
            accepted=totals.accepted.bool(),
            broken_clients=broken,
            losses=losses,
            skipped=None if scales is None else totals.skipped,
            failed=failed,
        )

    def _totals_of_all(self, shares: Shares, ranks: Ranks, skipped: Tensor) -> "_Totals":
        """Merge per-rank numbers (c,) into those of the round's C clients, on the CPU. A collective.

        Ranks without a client contribute zeros: what they trained was a stand-in.
        """
        # One copy from the device, for which the host waits, and one collective, whatever the number of roles: a table
        # with a row of numbers of the clients for each of these, then the losses and the steps of each role.
        losses = self.local_round.losses
        num_losses = self.local_round.num_losses
        on_device = [double(row) for row in (self._finite, self._accepted, skipped, *losses.values())]
        rows = list(torch.stack(on_device).cpu().double())
        rows += [number.double() for number in num_losses.values()]
        table = torch.zeros(len(rows), len(shares.plan.clients), dtype=torch.float64)
        places = shares.places
        if places:
            table[:, places] = torch.stack(rows)[:, : len(places)]
        ranks.sum_([table])
        # Clients are in the order in which the rows were put together.
        totals = iter(table)
        return _Totals(
            finite=next(totals),
            accepted=next(totals),
            skipped=next(totals),
            losses={role: next(totals).float() for role in losses},
            steps={role: next(totals).float() for role in num_losses},
        )


class _ChunkedStacks:
    """Stacks (C, ...) that are written chunk by chunk.

    Args:
        num_clients: Number C of clients.

    Attributes:
        state: The stacks; empty before the first chunk.
    """

    def __init__(self, num_clients: int) -> None:
        self._clients = num_clients
        self.state: State = {}

    def write(self, chunk: State, start: int) -> None:
        """Write the rows (c, ...) of a chunk whose first client is at ``start``."""
        for name, value in chunk.items():
            if len(value) == self._clients:
                # All clients are in one chunk: nothing is copied.
                self.state[name] = value
                continue
            if name not in self.state:
                # Rows keep the memory layout of a client's tensor.
                self.state[name] = torch.empty_like(value[:1].expand(self._clients, *value.shape[1:]))
            self.state[name][start : start + len(value)] = value.detach()


@dataclass(frozen=True)
class _ChunkUpdate:
    """What the c clients of a chunk sent (c, ...), what they had received (c, ...), and which updates count, (c,)."""

    sent: State
    received: State
    accepted: Tensor


@dataclass(frozen=True)
class _Totals:
    """Numbers of a round's C clients, each (C,) on the CPU: flags as 0 and 1, losses and counts, by role."""

    finite: Tensor
    accepted: Tensor
    skipped: Tensor
    losses: dict[str, Tensor]
    steps: dict[str, Tensor]
