# SPDX-License-Identifier: Apache-2.0
"""Local training of the clients of one chunk, which share each forward and backward pass.

Clients are ordered by their number of local steps, longest first, so that those of a chunk that still train are a
prefix, and a prefix of a stacked tensor is a view. Shape suffixes: C clients of the round, c of the chunk.
"""

import secrets
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.algorithms.base import Algorithm, Stacks
from perada.algorithms.client_steps import add_terms, no_counts, no_logits
from perada.core.rounds import AnyBatch, Phase, RoundPlan, one_of, steps_of_chunk
from perada.core.seeding import Streams
from perada.core.states import (
    State,
    as_matrix,
    clone,
    device_of,
    finite_rows,
    per_client,
    select,
    without,
    without_autocast,
)
from perada.engine.engine import client_losses, client_means
from perada.engine.loss_scaling import LossScales, MaskedOptimizer
from perada.federation.local_trainer import LocalTrainer
from perada.federation.workers import Worker
from perada.privacy.protection import PrivateRound


@dataclass(frozen=True)
class LocalRound:
    """What all chunks of a round's C clients have in common: what they train from, and what is counted in each step.

    Chunks read their rows of the states, and write only their rows of ``is_broken``, ``losses`` and ``num_losses``, so
    that several threads need no lock.

    Attributes:
        trainer: What the clients train with.
        plan: The clients and their steps.
        algorithm: Takes the local steps.
        phases: Phases of the local training.
        client_state: What the clients kept, (C, ...) by role.
        received: What the server sent them, (C, ...).
        opened: The stacks (C, ...) by role that the round begins with.
        factor: Factor of their learning rates.
        tuning: Whether this is the fine-tuning that follows the last round.
        private: Noisy gradients, where training is private.
        scales: Loss scales, in float16.
        streams: Random streams (C,) of dropout, by role.
        is_broken: Whether a client's loss became NaN or infinite, (C,), on the device.
        losses: Sums of losses over steps, (C,) by role, on the device.
        num_losses: Numbers of these losses, (C,) by role, on the CPU.
    """

    trainer: LocalTrainer
    plan: RoundPlan
    algorithm: Algorithm
    phases: tuple[Phase, ...]
    client_state: Stacks
    received: State
    opened: Stacks
    factor: float
    tuning: bool
    private: PrivateRound | None
    scales: LossScales | None
    streams: dict[str, Streams]
    is_broken: Tensor
    losses: dict[str, Tensor]
    num_losses: dict[str, Tensor]

    @classmethod
    def begin(
        cls,
        trainer: LocalTrainer,
        plan: RoundPlan,
        client_state: Stacks,
        received: State,
        *,
        factor: float = 1.0,
        tuning: bool = False,
    ) -> "LocalRound":
        """Begin a round.

        Args:
            trainer: What the clients train with.
            plan: The C clients and their steps.
            client_state: What the clients kept, (C, ...) by role.
            received: What the server sent them, (C, ...).
            factor: Factor of their learning rates.
            tuning: Whether this is the fine-tuning that follows the last round.
        """
        settings = trainer.settings
        clients = len(plan.clients)
        device = device_of(received)
        algorithm: Algorithm = settings.algorithm
        phases: tuple[Phase, ...] = settings.phases
        if tuning:
            personalization = settings.algorithm.personalization()
            if personalization is not None:
                algorithm, phase = personalization
                phases = (phase,)
        private: PrivateRound | None = None
        if trainer.protection.image_account is not None:
            private = PrivateRound(trainer.protection.image_account, trainer.gradients, settings.seed, plan, tuning)
        opened = algorithm.begin_round(client_state, received, trainer.tensor_names)

        # In a private run nobody may know which units dropout leaves out.
        seed = settings.seed
        if private is not None and private.secure:
            seed = secrets.randbits(256)
        streams: dict[str, Streams] = {}
        losses: dict[str, Tensor] = {}
        num_losses: dict[str, Tensor] = {}
        for role in opened:
            streams[role] = Streams.derived(seed, f"dropout-{role}", plan.round, clients=plan.clients, device=device)
            losses[role] = torch.zeros(clients, device=device, dtype=torch.float32)
            num_losses[role] = torch.zeros(clients)
        return cls(
            trainer=trainer,
            plan=plan,
            algorithm=algorithm,
            phases=phases,
            client_state=client_state,
            received=received,
            opened=opened,
            factor=factor,
            tuning=tuning,
            private=private,
            scales=trainer.scales.open("clients", clients, device),
            streams=streams,
            is_broken=torch.zeros(clients, dtype=torch.bool, device=device),
            losses=losses,
            num_losses=num_losses,
        )


@dataclass(frozen=True)
class ChunkResult:
    """Results of the local training of c clients.

    Attributes:
        client_state: What they keep, (c, ...) by role.
        update: What they send, (c, ...).
        received: What the server had sent them, (c, ...).
        finite: Whether their training stayed finite, (c,).
        accepted: Whether their updates count, (c,): whether the client stayed finite. Where training is private,
            whether the update is, since the server may learn nothing of what is not sent.
    """

    client_state: Stacks
    update: State
    received: State
    finite: Tensor
    accepted: Tensor


class Chunk:
    """Some clients of a round, and their local steps as :class:`perada.algorithms.base.ClientStep`.

    :meth:`open`, :meth:`step` for each batch, and :meth:`close` train them. The chunk holds the complete stacks of its
    clients, and the leaves and optimisers of the ``active`` ones, which are still training: a prefix, whose tensors are
    views of the stacks, so that steps change the stacks in place.

    Args:
        local_round: The round, with the rows of all clients.
        worker: Runs everything that the chunk does, with its engine.
        places: Places of its clients in the round's plan.

    Attributes:
        start: Place of the first client.
        stop: Place after the last client.
        full: The stacks (c, ...) by role, once the chunk is open.
        num_steps_left: Number of local steps that have not begun. Counted by the owner of the chunk, which may queue
            steps for another thread.
    """

    def __init__(self, local_round: LocalRound, worker: Worker, places: range) -> None:
        self.worker = worker
        self.start = places.start
        self.stop = places.stop
        self.round = local_round.plan.round
        self.tensor_names = local_round.trainer.tensor_names
        self.num_steps_left = steps_of_chunk(local_round.plan, places)
        self.full: Stacks = {}
        self.states: Stacks = {}
        self._local_round = local_round
        self._engine = worker.engine
        self._training = local_round.trainer.settings.training
        self._phase_index = -1  # none has begun
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def open(self) -> None:
        """Copy the stacks that the chunk trains."""
        for role, opened in self._local_round.opened.items():
            rows = _slice_rows(opened, self.start, self.stop)
            # Weights that the server merges into are not trained, and may be views of one tensor.
            merged = select(rows, self.tensor_names.merged)
            self.full[role] = clone(without(rows, self.tensor_names.merged)) | merged

    def step(self, batches: AnyBatch) -> None:
        """Take a local step of the active clients, whose batch this is."""
        batch = one_of(batches)
        if batch.phase != self._phase_index:
            self._begin_phase(batch.phase)
        if len(batch.clients) < self.active:
            self._keep_first_clients(len(batch.clients))
        self._set_inputs(batches)
        self._local_round.algorithm.client_step(self)

    def close(self) -> ChunkResult:
        """Return what the clients keep and send, computed while their states are still in the processor's caches."""
        local_round = self._local_round
        finite = ~local_round.is_broken[self.start : self.stop]
        checked: set[int] = set()
        for stacked in self.full.values():
            # Weights that the server merges into are not trained.
            trained = without(stacked, self.tensor_names.merged)
            finite = _all_finite(finite, trained)
            checked.update(id(value) for value in trained.values())

        received = _slice_rows(local_round.received, self.start, self.stop)
        client_state = _rows_of_roles(local_round.client_state, self.start, self.stop)
        # Steps may run under autocast, which would round products of states in half precision.
        with without_autocast(finite.device):
            new_client_state, update = local_round.algorithm.end_round(
                self.full, client_state, received, self.tensor_names
            )
        # end_round() may turn finite states into NaN.
        if local_round.private is not None:
            accepted = _all_finite(torch.ones_like(finite), update)
        else:
            for state in (update, *new_client_state.values()):
                finite = _all_finite(finite, _without_checked(state, checked))
            accepted = finite
        return ChunkResult(
            client_state=new_client_state, update=update, received=received, finite=finite, accepted=accepted
        )

    def _begin_phase(self, phase_index: int) -> None:
        """Start a phase: leaves for all clients of the chunk and fresh optimisers."""
        local_round = self._local_round
        phase = local_round.phases[phase_index].name
        self._phase_index = phase_index
        self.phase = phase
        self.active = self.stop - self.start
        self._optimizers = {}
        for role, stacked in self.full.items():
            leaves = {}
            for key in local_round.algorithm.trainable_keys(role, phase, self.tensor_names, self.round):
                if key in stacked:
                    # detach() gives a leaf with the same memory.
                    leaves[key] = stacked[key].detach().requires_grad_()
            self.states[role] = stacked | leaves
            if leaves:
                self._optimizers[role] = self._training.make(
                    role,
                    list(leaves.values()),
                    local_round.factor,
                    # In float16 some clients skip a step, of which only masked optimisers are capable.
                    masked=local_round.scales is not None,
                )

    def _keep_first_clients(self, active: int) -> None:
        """Continue with the first ``active`` clients only; tensors and optimiser states become views."""
        before = self.active
        self.active = active
        for role, stacked in self.states.items():
            views = {}
            for key, value in stacked.items():
                views[key] = value.detach()[:active].requires_grad_(value.requires_grad)
            if role in self._optimizers:
                view_of = {id(value): views[key] for key, value in stacked.items()}
                _replace_parameters(self._optimizers[role], view_of, before)
            self.states[role] = views

    def _set_inputs(self, batches: AnyBatch) -> None:
        """Set what the algorithm reads in a step: the batch, and the active clients' rows of what the round has."""
        local_round = self._local_round
        batch = one_of(batches)
        stop = self.start + self.active
        # These are rows of the round's C clients.
        self._rows = slice(self.start, stop)
        self._batches = batches
        self._counts = batch.counts
        # The batch may have rows of padding for clients of another chunk.
        width = max(self._counts)
        self._x = batch.x[:, :width]
        self._y = batch.y[:, :width]
        self._class_counts = batch.class_counts
        self.received = _slice_rows(local_round.received, self.start, stop)
        self.client_state = _rows_of_roles(local_round.client_state, self.start, stop)
        self._finite = torch.ones_like(local_round.is_broken[self._rows])
        # The passes of this step that drew from each random stream are counted.
        self._num_passes: Counter[str] = Counter()

    # What the algorithm calls in a step follows, as perada.algorithms.base.ClientStep describes it.

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Compute logits (c, B, K) of the step's images."""
        local_round = self._local_round
        state = self._forward_state(states)
        streams = self._pass_streams(self._stream_name(states, stream))
        logits = self._engine.logits(state, self._x, training=True, counts=self._counts, streams=streams)
        if local_round.scales is not None:
            logits = local_round.scales.leave(logits, self._rows)
        return logits

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Compute logits (c, B, K), and the representations (c, B, F) that the head receives."""
        local_round = self._local_round
        state = self._forward_state(states)
        streams = self._pass_streams(self._stream_name(states, stream))
        logits, representations = self._engine.outputs(
            state, self._x, self.tensor_names.head_module, training=training, counts=self._counts, streams=streams
        )
        if local_round.scales is not None:
            logits = local_round.scales.leave(logits, self._rows)
            representations = local_round.scales.leave(representations, self._rows)
        return logits, representations

    def _forward_state(self, states: str | State) -> State:
        """Return the state of a pass that is not private."""
        local_round = self._local_round
        if local_round.private is not None:
            raise no_logits(local_round.algorithm)
        state = self._stack_of(states)
        if local_round.scales is not None:
            state = local_round.scales.enter(state, self._rows)
        return state

    def class_counts(self, num_classes: int) -> Tensor:
        """Return the number of training images (c, K) of each client and class."""
        counts = self._class_counts
        if counts is None:
            raise no_counts(self._local_round.algorithm)
        # The last classes are missing where no client has them.
        missing = num_classes - counts.shape[1]
        return F.pad(counts, (0, missing))

    @property
    def labels(self) -> Tensor:
        """Labels of the step's images, (c, B) or (c, B, K)."""
        if self._local_round.private is not None:
            raise no_logits(self._local_round.algorithm)
        return self._y

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean (c, ...) of values (c, B, ...) over each client's images."""
        return client_means(values, self._counts)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Compute each client's task loss (c,)."""
        private = self._local_round.private
        if isinstance(states, Tensor):
            logits = states
        elif private is not None and isinstance(self._batches, dict):
            # The gradients of single images are clipped before they are added up, so the logits do not suffice.
            stream_name = self._stream_name(states, stream)
            streams = self._pass_streams(stream_name)
            return private.loss(stream_name, self._stack_of(states), self._batches, self._rows, streams)
        else:
            logits = self.logits(states, stream)
        return client_losses(logits, self._y, self._counts, self._training.task, self._class_counts)

    def _pass_streams(self, stream: str) -> Streams:
        """Random streams of the step's next pass that draws from ``stream``."""
        self._num_passes[stream] += 1
        batch = one_of(self._batches)
        streams = self._local_round.streams[stream][self._rows]
        # Steps are counted anew in each phase. The first phase has no name of its own in the streams.
        if batch.phase:
            streams = streams.fork("phase", batch.phase)
        return streams.fork("step", batch.step).fork("pass", self._num_passes[stream])

    def _stack_of(self, states: str | State) -> State:
        """Return the stack of a role, or the one that the algorithm passes itself."""
        if isinstance(states, str):
            return self.states[states]
        return states

    def _stream_name(self, states: str | State, stream: str | None) -> str:
        """Return the random stream that a pass draws from: by default that of its role, or of the first role."""
        if stream is not None:
            return stream
        if isinstance(states, str):
            return states
        return next(iter(self._local_round.streams))

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start`` (c, ...), and reset the state of its optimiser."""
        with torch.no_grad():
            for key, leaf in self._trained_leaves(role).items():
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
        """Take one optimiser step on the parameters of a role, or of several roles from one backward pass."""
        roles = (role,) if isinstance(role, str) else role
        leaves_of_roles = [self._trained_leaves(name) for name in roles]
        # A role of which the phase trains nothing has no optimiser.
        optimizers = [self._optimizers[name] for name in roles if name in self._optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if loss is not None:
            self._observe_losses(roles, loss.detach())
            # Clients share no parameters, so the gradient of the sum is that of each client's own loss.
            loss.sum().backward()
            self._update_scales(leaves_of_roles)
        clip_norm = self._training.clip_norm
        for leaves in leaves_of_roles:
            add_terms(leaves, pull, slope)
            # Gradients are clipped with these terms added, separately for each role.
            gradients = _gradients_of(leaves)
            if gradients and clip_norm is not None:
                _clip_gradients(gradients, clip_norm)

        for optimizer in optimizers:
            if isinstance(optimizer, MaskedOptimizer):
                optimizer.step_rows(self._finite)
            else:
                optimizer.step()

    def _update_scales(self, leaves_of_roles: list[State]) -> None:
        """In float16, adjust the loss scales, and find the clients whose gradient is not finite: they take no step.

        Only gradients of the loss are scaled, so those of pulls and slopes are added later.
        """
        scales = self._local_round.scales
        if scales is None:
            return
        gradients: list[Tensor] = []
        for leaves in leaves_of_roles:
            gradients += _gradients_of(leaves)
        self._finite = scales.update(gradients, self._rows)

    def _trained_leaves(self, role: str) -> State:
        """Return what the phase trains in a role, (c, ...)."""
        return {key: value for key, value in self.states[role].items() if value.requires_grad}

    def _observe_losses(self, roles: tuple[str, ...], losses: Tensor) -> None:
        """Add the losses (c,) of the step to those of the round, and mark clients whose loss is not finite."""
        local_round = self._local_round
        local_round.is_broken[self._rows] |= ~losses.isfinite()
        if local_round.private is not None:
            # No ledger counts a loss on private images.
            return
        for role in roles:
            local_round.losses[role][self._rows] += losses
            local_round.num_losses[role][self._rows] += 1


def _gradients_of(leaves: State) -> list[Tensor]:
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


def _slice_rows(stacked: State, start: int, stop: int) -> State:
    return {key: value[start:stop] for key, value in stacked.items()}


def _rows_of_roles(stacks: Stacks, start: int, stop: int) -> Stacks:
    return {role: _slice_rows(stacked, start, stop) for role, stacked in stacks.items()}


def _all_finite(is_candidate: Tensor, *stacks: State) -> Tensor:
    """Return which of the clients that ``is_candidate`` (C,) marks have only finite values in the stacks (C, ...)."""
    for stacked in stacks:
        for value in stacked.values():
            is_candidate = is_candidate & finite_rows(value)
    return is_candidate


def _without_checked(state: State, checked: set[int]) -> State:
    """Return the tensors of a state whose ids are not among those that were checked before."""
    return {name: value for name, value in state.items() if id(value) not in checked}


def _clip_gradients(gradients: list[Tensor], norm: float) -> None:
    """Scale each client's gradients (C, ...) down to a joint norm of at most ``norm``, in place.

    The same arithmetic as ``torch.nn.utils.clip_grad_norm_``, client by client.
    """
    total = torch.stack([as_matrix(gradient).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(per_client(scale, gradient))
