# SPDX-License-Identifier: Apache-2.0
"""Local training of the clients of one round, chunk by chunk.

The clients of a chunk share each forward and backward pass, and take all their steps before the next chunk begins: what
they train stays in the processor's caches, and gradients and optimisers exist for one chunk of a thread at a time.
Clients are ordered by their number of local steps, longest first, so that those of a chunk that still train are a
prefix, and a prefix of a stacked tensor is a view.
"""

import secrets
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.algorithms.base import Algorithm, Stacks, TensorNames
from perada.algorithms.dry_run import no_counts, no_logits
from perada.core.ranks import Ranks
from perada.core.rounds import AnyBatch, Phase, RoundPlan, Shares, busiest_lane, one_of, steps_of_chunk
from perada.core.seeding import Streams
from perada.core.states import State, as_matrix, clone, device_of, finite_rows, per_client, select, without
from perada.engine.chunks import MAX_BUSIEST_LANE, is_mostly_trained
from perada.engine.engine import Engine, client_losses, client_means
from perada.engine.loss_scaling import KeptScales, MaskedOptimizer
from perada.engine.step_graphs import StepGraph, StepGraphs, open_graphs
from perada.federation.settings import Settings
from perada.federation.workers import Worker, workers_of
from perada.privacy.gradients import SampleGradients
from perada.privacy.protection import PrivateRound, Protection
from perada.server.aggregate import UpdateSums, double


class LocalTrainer:
    """The components with which clients train: all clients of a simulation, or the single client of a site.

    Nothing here depends on the server's state.

    Attributes:
        engine: Runs the states of several clients through the network.
        tensor_names: Names of the states' tensors.
        settings: Options of the run.
        protection: Privacy of the clients' images; by default none.
        scales: Loss scales, in float16.
        uses_global_random: Whether a step draws from torch's global random generator, as the network of a caller may;
            None before the first step. Several threads would draw in an order that changes from run to run.
    """

    def __init__(
        self, engine: Engine, tensor_names: TensorNames, settings: Settings, protection: Protection | None = None
    ) -> None:
        self.engine = engine
        self.tensor_names = tensor_names
        self.settings = settings
        self.protection = protection or Protection()
        self.scales = KeptScales(settings.loss_scaling)
        self.uses_global_random: bool | None = None
        self._graphs: StepGraphs | None = None

    @cached_property
    def gradients(self) -> SampleGradients:
        """Computes the gradients of private training; created in the first round, when features may replace images."""
        assert self.protection.images is not None
        return SampleGradients(self.protection.images.options, self.engine, self.settings.training.task)

    def step_graphs(self, device: torch.device) -> StepGraphs | None:
        """Return the CUDA graphs of local steps on a device; None if the option is off."""
        if not self.settings.training.cuda_graphs:
            return None
        if self._graphs is None:
            self._graphs = open_graphs(
                device,
                private=self.protection.images is not None,
                scaled=self.scales.options is not None,
                compiled=self.engine.is_compiled,
            )
        return self._graphs


@dataclass(frozen=True)
class StepRecord:
    """What a local step did on the host, which a captured step does not do again.

    Attributes:
        passes: Number of passes that drew from each random stream.
        losses: Number of losses that each role descended by.
    """

    passes: Counter[str]
    losses: Counter[str]


class _Chunk:
    """Some clients of a cohort, and their local steps as :class:`perada.algorithms.base.ClientStep`.

    A chunk holds the complete stacks of its clients, and the leaves and optimisers of the ``active`` ones, which are
    still training: a prefix, whose tensors are views of the stacks, so that steps change the stacks in place.

    Args:
        cohort: The cohort, which lets go of its chunks at the end: they refer to it.
        worker: Runs everything that the chunk does.
        places: Places of its clients in the cohort.

    Attributes:
        full: The stacks (c, ...) by role, once the chunk is open.
        num_steps_left: Number of local steps that have not been submitted to the worker.
    """

    def __init__(self, cohort: "Cohort", worker: Worker, places: range) -> None:
        self._cohort = cohort
        self.worker = worker
        self.start = places.start
        self.stop = places.stop
        self.round = cohort.plan.round
        self.tensor_names = cohort.tensor_names
        self.phase_index = -1  # none has begun
        self.num_steps_left = steps_of_chunk(cohort.plan, places)
        self.full: Stacks = {}
        self.states: Stacks = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        # By the shapes of images and labels. Each refers to the leaves and moments of the active clients.
        self._graphs: dict[tuple[torch.Size, torch.Size], StepGraph[StepRecord]] = {}

    def open(self) -> None:
        """Copy the stacks that the chunk trains."""
        cohort = self._cohort
        for role, opened in cohort.opened.items():
            rows = _rows(opened, self.start, self.stop)
            # Weights that the server merges into are not trained, and may be views of one tensor.
            merged = select(rows, cohort.tensor_names.merged)
            self.full[role] = clone(without(rows, cohort.tensor_names.merged)) | merged

    def begin(self, phase_index: int) -> None:
        """Start a phase: leaves for all clients of the chunk and fresh optimisers."""
        cohort = self._cohort
        phase = cohort.phases[phase_index].name
        self.phase_index = phase_index
        self.phase = phase
        self.active = self.stop - self.start
        self._optimizers = {}
        self._graphs = {}
        for role, stacked in self.full.items():
            leaves = {}
            for key in cohort.algorithm.trainable_keys(role, phase, cohort.tensor_names, self.round):
                if key in stacked:
                    # detach() gives a leaf with the same memory.
                    leaves[key] = stacked[key].detach().requires_grad_()
            self.states[role] = stacked | leaves
            if leaves:
                parameters = list(leaves.values())
                # In float16 some clients skip a step, of which only masked optimisers are capable.
                masked = cohort.scales is not None
                capturable = cohort.graphs is not None and cohort.graphs.capture is not None
                self._optimizers[role] = cohort.training.make(
                    role, parameters, cohort.factor, masked=masked, capturable=capturable
                )

    def narrow(self, active: int) -> None:
        """Continue with the first ``active`` clients only; tensors and optimiser states become views."""
        before = self.active
        self.active = active
        self._graphs = {}
        for role, stacked in self.states.items():
            views = {}
            for key, value in stacked.items():
                views[key] = value.detach()[:active].requires_grad_(value.requires_grad)
            if role in self._optimizers:
                view_of = {id(value): views[key] for key, value in stacked.items()}
                _replace_parameters(self._optimizers[role], view_of, before)
            self.states[role] = views

    def step(self, batches: AnyBatch) -> None:
        """Take a local step of the active clients, whose batch this is."""
        cohort = self._cohort
        batch = one_of(batches)
        if batch.phase != self.phase_index:
            self.begin(batch.phase)
        if len(batch.clients) < self.active:
            self.narrow(len(batch.clients))
        stop = self.start + self.active
        # Of the cohort's C clients.
        self._rows = slice(self.start, stop)
        self._batches = batches
        self._counts = batch.counts
        # The batch may have rows of padding for clients of another chunk.
        width = max(self._counts)
        self._x = batch.x[:, :width]
        self._y = batch.y[:, :width]
        self._class_counts = batch.classes
        self.received = _rows(cohort.received, self.start, stop)
        self.client_state = {role: _rows(stacked, self.start, stop) for role, stacked in cohort.client_state.items()}
        self._finite = torch.ones_like(cohort.broken[self._rows])
        self._buffered_streams: dict[tuple[str, int], Streams] = {}
        graph = self._graph()
        if graph is None:
            record = self._take_step()
        else:
            self._use_buffers(graph)
            record = graph.step(self._take_step)
        for role, number in record.losses.items():
            cohort.descents[role][self._rows] += number

    def _take_step(self) -> StepRecord:
        """Take the step of the algorithm. All that it does on the host, and that lasts, is in the record."""
        self._record = StepRecord(passes=Counter(), losses=Counter())
        self._cohort.algorithm.client_step(self)
        return self._record

    def _graph(self) -> StepGraph[StepRecord] | None:
        """Return the graph of steps with batches such as the present one; None if it is not captured."""
        graphs = self._cohort.graphs
        if graphs is None or graphs.capture is None:
            return None
        width = self._x.shape[1]
        if any(count != width for count in self._counts):
            # The step copies the counts of a padded batch to the device, and a graph would keep those of the first.
            return None
        shapes = (self._x.shape, self._y.shape)
        if shapes not in self._graphs:
            self._graphs[shapes] = StepGraph(graphs)
        return self._graphs[shapes]

    def _use_buffers(self, graph: StepGraph[StepRecord]) -> None:
        """Replace all inputs of the step that differ from those of other steps by the buffers of a graph."""
        self._x = graph.buffer("x", self._x)
        self._y = graph.buffer("y", self._y)
        if self._class_counts is not None:
            self._class_counts = graph.buffer("class counts", self._class_counts)
        if graph.last_result is None:
            # The first step shows which passes draw; it is not captured.
            return
        for stream, passes in graph.last_result.passes.items():
            for number in range(1, passes + 1):
                streams = self._streams_of_pass(stream, number)
                self._buffered_streams[stream, number] = Streams(
                    graph.buffer(f"seeds of {stream} {number}", streams.seeds),
                    graph.buffer(f"gammas of {stream} {number}", streams.gammas),
                )

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        cohort = self._cohort
        state, streams = self._forward_inputs(states, stream)
        logits = self.worker.engine.logits(state, self._x, training=True, counts=self._counts, streams=streams)
        if cohort.scales is not None:
            logits = cohort.scales.leave(logits, self._rows)
        return logits

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        cohort = self._cohort
        state, streams = self._forward_inputs(states, stream)
        logits, representations = self.worker.engine.outputs(
            state, self._x, cohort.tensor_names.head_module, training=training, counts=self._counts, streams=streams
        )
        if cohort.scales is not None:
            logits = cohort.scales.leave(logits, self._rows)
            representations = cohort.scales.leave(representations, self._rows)
        return logits, representations

    def _forward_inputs(self, states: str | State, stream: str | None) -> tuple[State, Streams]:
        """Return the state and the random streams of a pass that is not private."""
        cohort = self._cohort
        if cohort.private is not None:
            raise no_logits(cohort.algorithm)
        state, stream = self._resolve(states, stream)
        if cohort.scales is not None:
            state = cohort.scales.enter(state, self._rows)
        return state, self._streams(stream)

    def class_counts(self, classes: int) -> Tensor:
        counts = self._class_counts
        if counts is None:
            raise no_counts(self._cohort.algorithm)
        # The last classes are missing where no client has them.
        missing = classes - counts.shape[1]
        return F.pad(counts, (0, missing))

    @property
    def labels(self) -> Tensor:
        if self._cohort.private is not None:
            raise no_logits(self._cohort.algorithm)
        return self._y

    def mean(self, values: Tensor) -> Tensor:
        return client_means(values, self._counts)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        private = self._cohort.private
        task = self._cohort.training.task
        if isinstance(states, Tensor):
            return client_losses(states, self._y, self._counts, task, self._class_counts)
        if private is None or not isinstance(self._batches, dict):
            return client_losses(self.logits(states, stream), self._y, self._counts, task, self._class_counts)
        state, stream = self._resolve(states, stream)
        return private.loss(stream, state, self._batches, self._rows, self._streams(stream))

    def _streams(self, stream: str) -> Streams:
        """Random streams of the step's next pass that draws from ``stream``."""
        self._record.passes[stream] += 1
        number = self._record.passes[stream]
        if (stream, number) in self._buffered_streams:
            return self._buffered_streams[stream, number]
        return self._streams_of_pass(stream, number)

    def _streams_of_pass(self, stream: str, number: int) -> Streams:
        """Random streams of the step's pass with a number, counted from 1, among those that draw from ``stream``."""
        batch = one_of(self._batches)
        streams = self._cohort.streams[stream][self._rows]
        # Steps are counted anew in each phase. The first phase has no name of its own in the streams.
        if batch.phase:
            streams = streams.fork("phase", batch.phase)
        return streams.fork("step", batch.step).fork("pass", number)

    def _resolve(self, states: str | State, stream: str | None) -> tuple[State, str]:
        """Look up the stack of a role, and the random stream that it draws from."""
        if isinstance(states, str):
            return self.states[states], stream or states
        first_role = next(iter(self._cohort.streams))
        return states, stream or first_role

    def restart(self, role: str, start: State) -> None:
        with torch.no_grad():
            for key, leaf in self._leaves(role).items():
                leaf.copy_(start[key])
        if role in self._optimizers:
            self._optimizers[role].state.clear()

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        roles = (role,) if isinstance(role, str) else role
        optimizers = [self._optimizers[name] for name in roles if name in self._optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if loss is not None:
            self._observe(roles, loss.detach())
            # Clients share no parameters, so the gradient of the sum is that of each client's own loss.
            loss.sum().backward()
        leaves_of_roles = [self._leaves(name) for name in roles]

        scales = self._cohort.scales
        if scales is not None and loss is not None:
            # Clients whose last gradient was not finite take no step. Before pulls and slopes, which are finite.
            gradients_of_loss: list[Tensor] = []
            for leaves in leaves_of_roles:
                gradients_of_loss += _gradients(leaves)
            self._finite = scales.update(gradients_of_loss, self._rows)

        clip_norm = self._cohort.training.clip_norm
        for leaves in leaves_of_roles:
            for key, leaf in leaves.items():
                if pull is not None:
                    strength, anchor = pull
                    _add_gradient(leaf, leaf.detach() - anchor[key].detach(), strength)
                if slope is not None:
                    _add_gradient(leaf, slope[key])
            # Clipped with these terms in them, each role for itself.
            gradients = _gradients(leaves)
            if gradients and clip_norm is not None:
                _clip(gradients, clip_norm)

        for optimizer in optimizers:
            if isinstance(optimizer, MaskedOptimizer):
                optimizer.step_rows(self._finite)
            else:
                optimizer.step()

    def _leaves(self, role: str) -> State:
        """Return what the phase trains in a role, (c, ...)."""
        return {key: value for key, value in self.states[role].items() if value.requires_grad}

    def _observe(self, roles: tuple[str, ...], losses: Tensor) -> None:
        """Add the losses (c,) of the step to those of the round, and mark clients whose loss is not finite."""
        cohort = self._cohort
        cohort.broken[self._rows] |= ~losses.isfinite()
        if cohort.private is not None:
            # No ledger counts a loss on private images.
            return
        for role in roles:
            cohort.losses[role][self._rows] += losses
            self._record.losses[role] += 1


def _gradients(leaves: State) -> list[Tensor]:
    return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def _replace_parameters(optimizer: torch.optim.Optimizer, view_of: dict[int, Tensor], before: int) -> None:
    """Replace an optimiser's parameters by shorter views, and cut its state accordingly.

    Args:
        optimizer: The optimiser.
        view_of: The view by the id of the parameter.
        before: Number of clients that the parameters have.
    """
    for group in optimizer.param_groups:
        shorter = [view_of[id(parameter)] for parameter in group["params"]]
        for old, new in zip(group["params"], shorter, strict=True):
            state = optimizer.state.pop(old, {})
            for name, value in state.items():
                # Moments have a row for each client, step counters have none.
                if isinstance(value, Tensor) and value.shape[:1] == (before,):
                    state[name] = value[: len(new)]
            optimizer.state[new] = state
        group["params"] = shorter


def _rows(stacked: State, start: int, stop: int) -> State:
    return {key: value[start:stop] for key, value in stacked.items()}


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
        broken: Clients whose training became NaN or infinite.
        losses: Mean loss over a client's steps, (C,) by role; only roles that have a loss.
        skipped: Number of steps that were skipped in float16, (C,); None in other precisions.
        failed: Clients of whom a sample could not be read, with the reason.
    """

    client_state: Stacks
    sent: State
    finite_here: Tensor
    finite: Tensor
    accepted: Tensor
    broken: list[int]
    losses: dict[str, Tensor]
    skipped: Tensor | None
    failed: dict[int, str]


class Cohort:
    """The plan's C clients while they train, in its order, longest first.

    Args:
        trainer: What they train with.
        plan: The clients and their steps.
        client_state: What the clients kept, (C, ...) by role.
        received: What the server sent them, (C, ...).
        factor: Factor of their learning rates.
        tuning: Whether this is the fine-tuning that follows the last round.
        sums: Adds up what the clients send, where the server needs only their mean; by default all of it is kept.

    Attributes:
        opened: The stacks (C, ...) by role that the round begins with.
        broken: Whether a client's loss became NaN or infinite, (C,), on the device.
        failed: Clients of whom a sample could not be read, with the reason.
        losses: Sums of losses over steps, (C,) by role, on the device.
        descents: Numbers of these steps, (C,) by role.
    """

    def __init__(
        self,
        trainer: LocalTrainer,
        plan: RoundPlan,
        client_state: Stacks,
        received: State,
        *,
        factor: float = 1.0,
        tuning: bool = False,
        sums: UpdateSums | None = None,
    ) -> None:
        settings = trainer.settings
        clients = len(plan.clients)
        device = device_of(received)
        self.algorithm: Algorithm = settings.algorithm
        self.phases: tuple[Phase, ...] = settings.phases
        if tuning:
            personalization = settings.algorithm.personalization()
            if personalization is not None:
                self.algorithm, phase = personalization
                self.phases = (phase,)
        self.engine = trainer.engine
        self.tensor_names = trainer.tensor_names
        self.training = settings.training
        self.graphs = trainer.step_graphs(device)
        self.plan = plan
        self.client_state = client_state
        self.received = received
        self.factor = factor
        self.private: PrivateRound | None = None
        if trainer.protection.images is not None:
            self.private = PrivateRound(trainer.protection.images, trainer.gradients, settings.seed, plan, tuning)
        self.scales = trainer.scales.open("clients", clients, device)
        self.sums = sums
        self.opened = self.algorithm.begin_round(client_state, received, self.tensor_names)
        # Chunks that have begun and not finished, by the place of their first client.
        self._open_chunks: dict[int, _Chunk] = {}
        self._trainer = trainer
        self._workers = self._make_workers(device)
        # Number of the plan's chunks that have been opened, in their order.
        self._num_opened = 0
        # Results of the chunks that have finished, each in its rows.
        self._new_client_state: dict[str, _ChunkedStacks] = {}
        self._sent = _ChunkedStacks(clients)
        # Only one worker at a time stores results.
        self._storing = Lock()
        # In a private run nobody may know which units dropout leaves out.
        seed = settings.seed
        if self.private is not None and self.private.secure:
            seed = secrets.randbits(256)
        self.streams: dict[str, Streams] = {}
        self.losses: dict[str, Tensor] = {}
        self.descents: dict[str, Tensor] = {}
        for role in self.opened:
            self.streams[role] = Streams.derived(
                seed, f"dropout-{role}", plan.round, clients=plan.clients, device=device
            )
            self.losses[role] = torch.zeros(clients, device=device, dtype=torch.float32)
            self.descents[role] = torch.zeros(clients)
        self.broken = torch.zeros(clients, dtype=torch.bool, device=device)
        # Clients of whom a sample could not be read. Not in `broken`, which workers change at the same time.
        self._unreadable = torch.zeros(clients, dtype=torch.bool, device=device)
        self._finite = torch.zeros(clients, dtype=torch.bool, device=device)
        self._accepted = torch.zeros(clients, dtype=torch.bool, device=device)
        self.failed: dict[int, str] = {}

    def _make_workers(self, device: torch.device) -> list[Worker]:
        """Return the workers that train chunks side by side, or a single one that trains them one after another."""
        count = min(self.plan.chunks_at_a_time, len(self.plan.chunks))
        # Behind a frozen backbone, a single thread can divide its passes among all cores instead.
        if not is_mostly_trained(self.engine.model) and busiest_lane(self.plan) > MAX_BUSIEST_LANE:
            count = 1
        return workers_of(self.engine, count, device)

    def step(self, batches: AnyBatch) -> None:
        """Take one local step of the clients that a batch holds, now or later in another thread.

        A batch holds clients of one chunk. The batches come in the order of :func:`perada.core.rounds.batch_places`.
        """
        batch = one_of(batches)
        if not batch.clients:
            return
        # Where training is private, each stream of batches has its own.
        batches_of_streams = list(batches.values()) if isinstance(batches, dict) else [batches]
        for batch_of_stream in batches_of_streams:
            for client, reason in batch_of_stream.failed:
                # In a private run the sample is in no batch, and the client trains on.
                self._unreadable[self.plan.clients.index(client)] |= self.private is None
                self.failed.setdefault(client, reason)
        chunk = self._chunk_at(batch.start)
        chunk.num_steps_left -= 1
        if self._trainer.uses_global_random is None:
            self._take_first_step(chunk, batches)
        else:
            chunk.worker.submit(partial(chunk.step, batches))

    def _take_first_step(self, chunk: _Chunk, batches: AnyBatch) -> None:
        """Take the first step of a run, which shows whether the network draws from the global generator."""
        random_state = torch.get_rng_state()
        chunk.worker.submit(partial(chunk.step, batches))
        chunk.worker.wait()
        self._trainer.uses_global_random = not torch.equal(random_state, torch.get_rng_state())

    def _chunk_at(self, start: int) -> _Chunk:
        """Return the chunk whose first client is at a place, and begin to train it if it has not begun.

        Raises:
            ValueError: If the chunk has trained before, in another order than that of ``batch_places``.
        """
        if start in self._open_chunks:
            return self._open_chunks[start]
        if start < self._next_start():
            chunk_places = next(chunk for chunk in self.plan.chunks if start in chunk)
            finished = self.plan.clients[chunk_places.start : chunk_places.stop]
            raise ValueError(f"clients {finished} have finished their steps; pass batches in the order of batch_places")
        for chunk in list(self._open_chunks.values()):
            if chunk.num_steps_left == 0:
                self._submit_end(chunk)
        self._skip_chunks(start)
        return self._next_chunk()

    def _next_start(self) -> int:
        """Return the place of the first client whose chunk has not been opened yet."""
        if self._num_opened == len(self.plan.chunks):
            return len(self.plan.clients)
        return self.plan.chunks[self._num_opened].start

    def _next_chunk(self) -> _Chunk:
        """Open the next chunk of the plan, in the worker that has the fewest open ones."""
        # Threads draw from one generator in an order that changes from run to run; a single one does not.
        workers = self._workers[:1] if self._trainer.uses_global_random else self._workers
        busy = [chunk.worker for chunk in self._open_chunks.values()]
        worker = min(workers, key=busy.count)
        chunk = _Chunk(self, worker, self.plan.chunks[self._num_opened])
        self._num_opened += 1
        self._open_chunks[chunk.start] = chunk
        worker.submit(chunk.open)
        return chunk

    def _submit_end(self, chunk: _Chunk) -> None:
        """Have a chunk's results stored after its last step."""
        chunk.worker.submit(partial(self._finish_chunk, chunk))
        # With its gradients and optimisers.
        del self._open_chunks[chunk.start]

    def _skip_chunks(self, stop: int) -> None:
        """Open and finish the chunks before a place that have not begun: their clients take no steps."""
        while self._next_start() < stop:
            self._submit_end(self._next_chunk())

    def _finish_chunk(self, chunk: _Chunk) -> None:
        """Store what a chunk's clients keep and send, while it is still in the processor's caches."""
        rows = slice(chunk.start, chunk.stop)
        finite = ~(self.broken[rows] | self._unreadable[rows])
        checked: set[int] = set()
        for stacked in chunk.full.values():
            # Weights that the server merges into are not trained.
            trained = without(stacked, self.tensor_names.merged)
            finite = _all_finite(finite, trained)
            checked.update(id(value) for value in trained.values())
        client_state = {role: _rows(stacked, rows.start, rows.stop) for role, stacked in self.client_state.items()}
        received = _rows(self.received, rows.start, rows.stop)
        new_client_state, update = self.algorithm.end_round(chunk.full, client_state, received, self.tensor_names)
        # An algorithm may make what is not finite of what is.
        if self.private is not None:
            accepted = _all_finite(torch.ones_like(finite), update)
        else:
            for state in (update, *new_client_state.values()):
                finite = _all_finite(finite, _without_checked(state, checked))
            accepted = finite
        self._finite[rows] = finite
        self._accepted[rows] = accepted

        with self._storing:
            for role, stacked in new_client_state.items():
                if role not in self._new_client_state:
                    self._new_client_state[role] = _ChunkedStacks(len(self.plan.clients))
                self._new_client_state[role].write(stacked, chunk.start)
            if self.sums is None:
                self._sent.write(update, chunk.start)
            else:
                self.sums.add(update, received, chunk.start, accepted)

    def finish(self, shares: Shares | None = None, ranks: Ranks | None = None) -> ClientResults:
        """End the round, and merge the results of the ranks. A collective: all ranks must call this alike.

        Args:
            shares: The round's clients and who trains them; by default this process trains all.
            ranks: The processes; by default one.
        """
        shares = shares or Shares.of(self.plan)
        ranks = ranks or Ranks()
        for chunk in list(self._open_chunks.values()):
            self._submit_end(chunk)
        self._skip_chunks(len(self.plan.clients))
        for worker in self._workers:
            worker.finish()
        finite_here = self._finite
        accepted = self._accepted
        skipped = torch.zeros_like(finite_here) if self.scales is None else self.scales.skipped
        totals = self._totals_of_all(shares, ranks, finite_here, accepted, skipped)
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
            finite_here=finite_here,
            finite=finite,
            accepted=totals.accepted.bool(),
            broken=broken,
            losses=losses,
            skipped=None if self.scales is None else totals.skipped,
            failed=failed,
        )

    def _totals_of_all(
        self, shares: Shares, ranks: Ranks, finite: Tensor, accepted: Tensor, skipped: Tensor
    ) -> "_Totals":
        """Merge per-rank numbers (c,) into those of the round's C clients, on the CPU. A collective.

        Ranks without a client contribute zeros: what they trained was a stand-in.
        """
        # One copy from the device, for which the host waits, and one collective, whatever the number of roles: a table
        # with a row of numbers of the clients for each of these, then the losses and the steps of each role.
        on_device = [double(row) for row in (finite, accepted, skipped, *self.losses.values())]
        rows = list(torch.stack(on_device).cpu().double())
        rows += [steps.double() for steps in self.descents.values()]
        table = torch.zeros(len(rows), len(shares.plan.clients), dtype=torch.float64)
        places = shares.places
        if places:
            table[:, places] = torch.stack(rows)[:, : len(places)]
        ranks.sum_([table])
        # In the order in which the rows were put together.
        totals = iter(table)
        return _Totals(
            finite=next(totals),
            accepted=next(totals),
            skipped=next(totals),
            losses={role: next(totals).float() for role in self.losses},
            steps={role: next(totals).float() for role in self.descents},
        )


class _ChunkedStacks:
    """Stacks (C, ...) that are written chunk by chunk.

    Args:
        clients: Number C of clients.

    Attributes:
        state: The stacks; empty before the first chunk.
    """

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self.state: State = {}

    def write(self, chunk: State, start: int) -> None:
        """Write the rows (c, ...) of a chunk whose first client is at ``start``."""
        for name, value in chunk.items():
            if len(value) == self._clients:
                # All clients are in one chunk: nothing is copied.
                self.state[name] = value
                continue
            if name not in self.state:
                # In the memory layout of a client's tensor.
                self.state[name] = torch.empty_like(value[:1].expand(self._clients, *value.shape[1:]))
            self.state[name][start : start + len(value)] = value.detach()


@dataclass(frozen=True)
class _Totals:
    """Numbers of a round's C clients, each (C,) on the CPU: flags as 0 and 1, losses and counts, by role."""

    finite: Tensor
    accepted: Tensor
    skipped: Tensor
    losses: dict[str, Tensor]
    steps: dict[str, Tensor]


def _all_finite(clients: Tensor, *stacks: State) -> Tensor:
    """Return which of ``clients`` (C,) have only finite values in the stacks (C, ...)."""
    for stacked in stacks:
        for value in stacked.values():
            clients = clients & finite_rows(value)
    return clients


def _without_checked(state: State, checked: set[int]) -> State:
    """Return the tensors of a state whose ids are not among those that were checked before."""
    return {name: value for name, value in state.items() if id(value) not in checked}


def _add_gradient(leaf: Tensor, gradient: Tensor, factor: float = 1.0) -> None:
    """Add ``factor`` times a gradient to the gradient of a leaf, which may have none yet."""
    if leaf.grad is None:
        leaf.grad = gradient * factor
    else:
        leaf.grad.add_(gradient, alpha=factor)


def _clip(gradients: list[Tensor], norm: float) -> None:
    """Scale each client's gradients (C, ...) down to a joint norm of at most ``norm``, in place.

    The same arithmetic as ``torch.nn.utils.clip_grad_norm_``, client by client.
    """
    total = torch.stack([as_matrix(gradient).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(per_client(scale, gradient))
