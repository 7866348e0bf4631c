# SPDX-License-Identifier: Apache-2.0
"""Local training of the clients of one round, all at once.

Clients are ordered by their number of local steps, longest first, so those still training are a prefix, and a prefix of
a stacked tensor is a view. Chunks of clients bound the memory of one forward and backward pass.
"""

import secrets
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.algorithms.base import Algorithm, Stacks, TensorNames
from perada.algorithms.dry_run import no_counts, no_logits
from perada.core.ranks import Ranks
from perada.core.rounds import AnyBatch, Phase, RoundPlan, Shares, one_of
from perada.core.seeding import Streams
from perada.core.states import State, clone, per_client, select, without
from perada.engine.engine import Engine, client_losses, client_means
from perada.engine.loss_scaling import KeptScales, MaskedOptimizer
from perada.federation.settings import Settings
from perada.privacy.gradients import SampleGradients
from perada.privacy.protection import PrivateRound, Protection
from perada.server.aggregate import double


class LocalTrainer:
    """The components with which clients train: all clients of a simulation, or the single client of a site.

    Nothing here knows the server's state.

    Attributes:
        engine: Runs the states of several clients through the network.
        tensor_names: Names of the states' tensors.
        settings: Options of the run.
        protection: Privacy of the clients' images; by default none.
        scales: Loss scales, in float16.
    """

    def __init__(
        self, engine: Engine, tensor_names: TensorNames, settings: Settings, protection: Protection | None = None
    ) -> None:
        self.engine = engine
        self.tensor_names = tensor_names
        self.settings = settings
        self.protection = protection or Protection()
        self.scales = KeptScales(settings.loss_scaling)

    @cached_property
    def gradients(self) -> SampleGradients:
        """Computes the gradients of private training; created in the first round, when features may replace images."""
        assert self.protection.images is not None
        return SampleGradients(self.protection.images.options, self.engine, self.settings.training.multilabel)


class _Chunk:
    """Clients ``start … stop`` of a cohort, and their local steps as :class:`perada.algorithms.base.ClientStep`.

    A chunk holds the complete stacks of its clients, and the leaves and optimisers of the ``active`` ones, which are
    still training: a prefix, whose tensors are views of the stacks, so that steps change the stacks in place.

    Args:
        cohort: The cohort, which lets go of its chunks at the end: they refer to it.
        opened: The stacks (C, ...) by role that the cohort's round began with.
        start: Place of the first client in the cohort.
        stop: Place behind the last.
    """

    def __init__(self, cohort: "Cohort", opened: Stacks, start: int, stop: int) -> None:
        self._cohort = cohort
        self.start = start
        self.stop = stop
        self.round = cohort.plan.round
        self.tensor_names = cohort.tensor_names
        self.full: Stacks = {}
        for role, stacked in opened.items():
            # Weights that the server merges into stay as they are, and may be views of one tensor: no copies of them.
            rows = _rows(stacked, start, stop)
            unmerged = clone(without(rows, cohort.tensor_names.merged))
            self.full[role] = select(rows, cohort.tensor_names.merged) | unmerged
        self.states: Stacks = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def begin(self, phase: str) -> None:
        """Start a phase: leaves for all clients of the chunk and fresh optimisers."""
        cohort = self._cohort
        self.phase = phase
        self.active = self.stop - self.start
        self._optimizers = {}
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
                self._optimizers[role] = cohort.training.make(role, parameters, cohort.factor, masked=masked)

    def narrow(self, active: int) -> None:
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

    def step(self, batches: AnyBatch) -> None:
        """Take a local step of the active clients."""
        cohort = self._cohort
        batch = one_of(batches)
        stop = self.start + self.active
        # Of the cohort's C clients.
        self._rows = slice(self.start, stop)
        self._batches = batches
        # By stream, how many passes have drawn from it.
        self._passes = Counter[str]()
        self._counts = batch.counts[self._rows]
        # A chunk of clients with few images needs no rows of padding for clients elsewhere.
        width = max(self._counts)
        self._x = batch.x[self._rows, :width]
        self._y = batch.y[self._rows, :width]
        self.received = _rows(cohort.received, self.start, stop)
        self.client_state = {role: _rows(stacked, self.start, stop) for role, stacked in cohort.client_state.items()}
        self._finite = torch.ones_like(cohort.broken[self._rows])
        cohort.algorithm.client_step(self)

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        cohort = self._cohort
        state, streams = self._forward_inputs(states, stream)
        logits = cohort.engine.logits(state, self._x, training=True, counts=self._counts, streams=streams)
        if cohort.scales is not None:
            logits = cohort.scales.leave(logits, self._rows)
        return logits

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        cohort = self._cohort
        state, streams = self._forward_inputs(states, stream)
        logits, representations = cohort.engine.outputs(
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
        counts = one_of(self._batches).classes
        if counts is None:
            raise no_counts(self._cohort.algorithm)
        # The last classes are missing where no client has them.
        missing = classes - counts.shape[1]
        return F.pad(counts[self._rows], (0, missing))

    @property
    def labels(self) -> Tensor:
        if self._cohort.private is not None:
            raise no_logits(self._cohort.algorithm)
        return self._y

    def mean(self, values: Tensor) -> Tensor:
        return client_means(values, self._counts)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        private = self._cohort.private
        multilabel = self._cohort.training.multilabel
        if isinstance(states, Tensor):
            return client_losses(states, self._y, self._counts, multilabel)
        if private is None or not isinstance(self._batches, dict):
            return client_losses(self.logits(states, stream), self._y, self._counts, multilabel)
        state, stream = self._resolve(states, stream)
        return private.loss(stream, state, self._batches, self._rows, self._streams(stream))

    def _streams(self, stream: str) -> Streams:
        """Random streams of the step's next pass that draws from ``stream``."""
        self._passes[stream] += 1
        batch = one_of(self._batches)
        streams = self._cohort.streams[stream][self._rows]
        # Steps are counted anew in each phase. The first phase has no name of its own in the streams.
        if batch.phase:
            streams = streams.fork("phase", batch.phase)
        return streams.fork("step", batch.step).fork("pass", self._passes[stream])

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
            cohort.descents[role][self._rows] += 1


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
        sent: What they send, (c, ...).
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

    Attributes:
        chunks: The clients, divided into those that share a forward and backward pass.
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
        factor: float = 1.0,
        tuning: bool = False,
    ) -> None:
        settings = trainer.settings
        clients = len(plan.clients)
        device = next(iter(received.values())).device
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
        self.plan = plan
        self.client_state = client_state
        self.received = received
        self.factor = factor
        self.private: PrivateRound | None = None
        if trainer.protection.images is not None:
            self.private = PrivateRound(trainer.protection.images, trainer.gradients, settings.seed, plan, tuning)
        self.scales = trainer.scales.open("clients", clients, device)
        opened = self.algorithm.begin_round(client_state, received, self.tensor_names)
        # Weights that the server merges into are not trained: they need no copies, and come back as they were.
        self._merged: Stacks = {}
        for role, stacked in opened.items():
            self._merged[role] = select(stacked, self.tensor_names.merged)
        clients_per_chunk = settings.clients_per_chunk or clients
        if self.engine.kind == "loop":
            clients_per_chunk = 1
        self.chunks: list[_Chunk] = []
        for start in range(0, clients, clients_per_chunk):
            self.chunks.append(_Chunk(self, opened, start, min(start + clients_per_chunk, clients)))
        # In a private run nobody may know which units dropout leaves out.
        seed = settings.seed
        if self.private is not None and self.private.secure:
            seed = secrets.randbits(256)
        self.streams: dict[str, Streams] = {}
        self.losses: dict[str, Tensor] = {}
        self.descents: dict[str, Tensor] = {}
        for role in opened:
            self.streams[role] = Streams.derived(
                seed, f"dropout-{role}", plan.round, clients=plan.clients, device=device
            )
            self.losses[role] = torch.zeros(clients, device=device, dtype=torch.float32)
            self.descents[role] = torch.zeros(clients)
        self.broken = torch.zeros(clients, dtype=torch.bool, device=device)
        self.failed: dict[int, str] = {}
        # None has begun.
        self._phase = -1

    @property
    def example_states(self) -> Stacks:
        """Stacks (c, ...) by role of some clients, for names and shapes. There are none after :meth:`finish`."""
        return self.chunks[0].full

    def step(self, batches: AnyBatch) -> None:
        """Take one local step of the clients that a batch holds: a prefix of the plan's, or none."""
        batch = one_of(batches)
        if not batch.clients:
            return
        # Where training is private, each stream of batches has its own.
        batches_of_streams = list(batches.values()) if isinstance(batches, dict) else [batches]
        for batch_of_stream in batches_of_streams:
            for client, reason in batch_of_stream.failed:
                # In a private run the sample is in no batch, and the client trains on.
                self.broken[batch_of_stream.clients.index(client)] |= self.private is None
                self.failed.setdefault(client, reason)
        if batch.phase != self._phase:
            self._phase = batch.phase
            for chunk in self.chunks:
                chunk.begin(self.phases[batch.phase].name)
        for chunk in self.chunks:
            active = min(len(batch.clients), chunk.stop) - chunk.start
            if active > 0:
                if active < chunk.active:
                    chunk.narrow(active)
                chunk.step(batches)

    def finish(self, shares: Shares | None = None, ranks: Ranks | None = None) -> ClientResults:
        """End the round, and merge the results of the ranks. A collective: all ranks must call this alike.

        Args:
            shares: The round's clients and who trains them; by default this process trains all.
            ranks: The processes; by default one.
        """
        shares = shares or Shares.of(self.plan)
        ranks = ranks or Ranks()
        trained = self._trained()
        finite_here = _all_finite(~self.broken, *trained.values())
        for role in trained:
            trained[role] = trained[role] | self._merged[role]
        client_state, sent = self.algorithm.end_round(trained, self.client_state, self.received, self.tensor_names)
        # An algorithm may make what is not finite of what is.
        sent_is_finite = _all_finite(torch.ones_like(finite_here), sent)
        if self.private is not None:
            accepted = sent_is_finite
        else:
            finite_here = _all_finite(finite_here & sent_is_finite, *client_state.values())
            accepted = finite_here

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
            client_state=client_state,
            sent=sent,
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
        roles = list(self.losses)
        on_device = [double(row) for row in (finite, accepted, skipped, *self.losses.values())]
        rows = list(torch.stack(on_device).cpu().double())
        rows += [steps.double() for steps in self.descents.values()]
        table = torch.zeros(len(rows), len(shares.plan.clients), dtype=torch.float64)
        places = shares.places
        if places:
            table[:, places] = torch.stack(rows)[:, : len(places)]
        ranks.sum_([table])
        losses = table[3 : 3 + len(roles)].float()
        steps = table[3 + len(roles) :].float()
        return _Totals(
            finite=table[0],
            accepted=table[1],
            skipped=table[2],
            losses=dict(zip(roles, losses, strict=True)),
            steps=dict(zip(roles, steps, strict=True)),
        )

    def _trained(self) -> Stacks:
        """Concatenate the chunks' stacks, without the merged weights, and release the chunks."""
        trained: Stacks = {}
        for role, stacked in self.chunks[0].full.items():
            trained[role] = {}
            for name in stacked:
                if name not in self.tensor_names.merged:
                    trained[role][name] = torch.cat([chunk.full[role][name] for chunk in self.chunks])
        self.chunks = []
        return trained


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
            clients = clients & value.reshape(len(value), -1).isfinite().all(1)
    return clients


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
    total = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(per_client(scale, gradient))
