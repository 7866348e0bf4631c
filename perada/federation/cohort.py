# SPDX-License-Identifier: Apache-2.0
"""Local training of the clients of one round, all at once.

Clients are ordered by their number of local steps, longest first, so those still training are a prefix, and a prefix of
a stacked tensor is a view. Chunks of clients bound the memory of one forward and backward pass.
"""

import secrets
from collections import Counter
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.algorithms.base import Stacks, TensorNames
from perada.algorithms.dry_run import no_counts, no_logits
from perada.core.ranks import Ranks
from perada.core.rounds import AnyBatch, RoundPlan, Shares, one_of
from perada.core.seeding import Streams
from perada.core.states import State, clone, partition
from perada.engine.engine import Engine, client_losses, client_means
from perada.engine.loss_scaling import KeptScales, MaskedOptimizer
from perada.federation.settings import Settings
from perada.privacy.gradients import SampleGradients
from perada.privacy.protection import PrivateRound, Protection
from perada.server.aggregate import double


class Site:
    """Where clients train: all those of a simulation, or the one client of a site.

    Nothing here knows the server's state. The ``protection`` is that of the clients' images, ``scales`` are their loss
    scales, in float16.
    """

    def __init__(
        self, engine: Engine, tensor_names: TensorNames, settings: Settings, protection: Protection | None = None
    ) -> None:
        self.engine, self.tensor_names, self.settings, self.protection = (
            engine,
            tensor_names,
            settings,
            protection or Protection(),
        )
        self.scales = KeptScales(settings.loss_scaling)

    @cached_property
    def gradients(self) -> SampleGradients:
        """What private training asks; made for the first round, as by then features may stand for images."""
        assert self.protection.images is not None
        return SampleGradients(self.protection.images.options, self.engine, self.settings.training.multilabel)


class _Chunk:
    """Clients ``start … stop`` of a cohort and their local steps, as :class:`perada.algorithms.base.ClientStep`.

    It has the full stacks, the leaves of the ``active`` clients, those still training, and their optimisers. A cohort
    that is closed lets go of its chunks, which hold it.
    """

    def __init__(self, cohort: "Cohort", opened: Stacks, start: int, stop: int) -> None:
        self._cohort, self.start, self.stop, self.round = cohort, start, stop, cohort.plan.round
        self.tensor_names = cohort.tensor_names
        parts = {
            role: partition(_rows(state, start, stop), cohort.tensor_names.merged) for role, state in opened.items()
        }
        self.full = {role: merged | clone(rest) for role, (merged, rest) in parts.items()}
        self.states: Stacks = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}

    def begin(self, phase: str) -> None:
        """Start a phase: leaves for all clients of the chunk and fresh optimisers."""
        cohort = self._cohort
        self.phase, self.active, self._optimizers = phase, self.stop - self.start, {}
        for role, state in self.full.items():
            trained = cohort.algorithm.trainable_keys(role, phase, cohort.tensor_names, self.round)
            leaves = {key: state[key].detach().requires_grad_() for key in trained if key in state}
            self.states[role] = {**state, **leaves}
            if leaves:
                made = cohort.training.make(role, list(leaves.values()), cohort.factor, cohort.scales is not None)
                self._optimizers[role] = made

    def narrow(self, active: int) -> None:
        """Continue with the first ``active`` clients only; tensors and optimiser states become views."""
        before, self.active = self.active, active
        for role, state in self.states.items():
            views = {key: v.detach()[:active].requires_grad_(v.requires_grad) for key, v in state.items()}
            if role in self._optimizers:
                _replace(self._optimizers[role], {id(state[key]): views[key] for key in state}, before)
            self.states[role] = views

    def step(self, batches: AnyBatch) -> None:
        """Take a local step of the active clients."""
        cohort, batch, stop = self._cohort, one_of(batches), self.start + self.active
        self._rows, self._batches, self._passes = slice(self.start, stop), batches, Counter[str]()
        self._counts = batch.counts[self._rows]
        width = max(self._counts)
        self._x, self._y = batch.x[self._rows, :width], batch.y[self._rows, :width]
        self.received = _rows(cohort.received, self.start, stop)
        self.kept = {role: _rows(state, self.start, stop) for role, state in cohort.kept.items()}
        self._finite = torch.ones_like(cohort.broken[self._rows])
        cohort.algorithm.client_step(self)

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        cohort, (states, streams) = self._cohort, self._entered(states, stream)
        logits = cohort.engine.logits(states, self._x, training=True, counts=self._counts, streams=streams)
        return logits if cohort.scales is None else cohort.scales.leave(logits, self._rows)

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        cohort, (states, streams) = self._cohort, self._entered(states, stream)
        logits, found = cohort.engine.outputs(
            states, self._x, cohort.tensor_names.head_module, training=training, counts=self._counts, streams=streams
        )
        if cohort.scales is None:
            return logits, found
        return cohort.scales.leave(logits, self._rows), cohort.scales.leave(found, self._rows)

    def _entered(self, states: str | State, stream: str | None) -> tuple[State, Streams]:
        """What a pass that is not private is given."""
        cohort = self._cohort
        if cohort.private is not None:
            raise no_logits(cohort.algorithm)
        states, stream = self._named(states, stream)
        states = states if cohort.scales is None else cohort.scales.enter(states, self._rows)
        return states, self._streams(stream)

    def class_counts(self, classes: int) -> Tensor:
        found = one_of(self._batches).classes
        if found is None:
            raise no_counts(self._cohort.algorithm)
        return F.pad(found[self._rows], (0, classes - found.shape[1]))

    @property
    def labels(self) -> Tensor:
        if self._cohort.private is not None:
            raise no_logits(self._cohort.algorithm)
        return self._y

    def mean(self, values: Tensor) -> Tensor:
        return client_means(values, self._counts)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        private, multilabel = self._cohort.private, self._cohort.training.multilabel
        if isinstance(states, Tensor):
            return client_losses(states, self._y, self._counts, multilabel)
        if private is None or not isinstance(self._batches, dict):
            return client_losses(self.logits(states, stream), self._y, self._counts, multilabel)
        states, stream = self._named(states, stream)
        return private.loss(stream, states, self._batches, self._rows, self._streams(stream))

    def _streams(self, stream: str) -> Streams:
        """Random streams of the step's next pass that draws from ``stream``."""
        self._passes[stream] += 1
        batch, streams = one_of(self._batches), self._cohort.streams[stream][self._rows]
        if batch.phase:
            streams = streams.fork("phase", batch.phase)
        return streams.fork("step", batch.step).fork("pass", self._passes[stream])

    def _named(self, states: str | State, stream: str | None) -> tuple[State, str]:
        """The stack that is meant, and the stream that it draws from."""
        if isinstance(states, str):
            return self.states[states], stream or states
        return states, stream or next(iter(self._cohort.streams))

    def restart(self, role: str, start: State) -> None:
        with torch.no_grad():
            for key, value in self.states[role].items():
                if value.requires_grad:
                    value.copy_(start[key])
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
            loss.sum().backward()
        trained = [{key: value for key, value in self.states[name].items() if value.requires_grad} for name in roles]
        scales = self._cohort.scales
        if scales is not None and loss is not None:  # clients whose last gradient was not finite take no step
            leaves = [leaf for state in trained for leaf in state.values()]
            self._finite = scales.update([leaf.grad for leaf in leaves if leaf.grad is not None], self._rows)
        for state in trained:
            for key, value in state.items():
                if pull is not None:
                    _add_gradient(value, value.detach() - pull[1][key].detach(), pull[0])
                if slope is not None:
                    _add_gradient(value, slope[key])
            gradients = [value.grad for value in state.values() if value.grad is not None]
            if gradients and self._cohort.training.clip_norm is not None:
                _clip(gradients, self._cohort.training.clip_norm)
        for optimizer in optimizers:
            if isinstance(optimizer, MaskedOptimizer):
                optimizer.step_rows(self._finite)
            else:
                optimizer.step()

    def _observe(self, roles: tuple[str, ...], losses: Tensor) -> None:
        """Note the losses of the step for the round's report."""
        cohort = self._cohort
        cohort.broken[self._rows] |= ~losses.isfinite()
        for role in roles if cohort.private is None else ():  # a loss on private images is not for free
            cohort.losses[role][self._rows] += losses
            cohort.descents[role][self._rows] += 1


def _replace(optimizer: torch.optim.Optimizer, views: dict[int, Tensor], before: int) -> None:
    """Put shorter views in the place of an optimiser's parameters of ``before`` clients, and cut its state alike."""
    for group in optimizer.param_groups:
        shorter = [views[id(parameter)] for parameter in group["params"]]
        for old, new in zip(group["params"], shorter, strict=True):
            state = optimizer.state.pop(old, {})
            optimizer.state[new] = {
                name: value[: len(new)] if isinstance(value, Tensor) and value.shape[:1] == (before,) else value
                for name, value in state.items()
            }
        group["params"] = shorter


def _rows(state: State, start: int, stop: int) -> State:
    return {key: value[start:stop] for key, value in state.items()}


class Trained(NamedTuple):
    """What came of a round's C clients, in the plan's order.

    An update counts if the client stayed finite or, where training is private, the update did, for the server may learn
    nothing of what is not sent.
    """

    kept: Stacks  # (C, ...)
    sent: State  # (C, ...)
    finite: Tensor  # (C,) whose training stayed finite
    counts: Tensor  # (C,) whose update counts


class Outcomes(NamedTuple):
    """What became of the C clients of a round, known to all ranks; every tensor is (C,), on the CPU."""

    broken: list[int]  # clients whose training became NaN or infinite
    finite: Tensor  # whose training stayed finite
    counts: Tensor  # whose update counts
    losses: dict[str, Tensor]  # mean over a client's steps, by role, where the role has one
    skipped: Tensor | None  # steps that were, in float16
    failed: dict[int, str]  # clients of whom a sample could not be read, and why


class Cohort:
    """The plan's C clients while they train at a ``site``, in its order, longest first.

    They train in a round, or in the fine-tuning (``tuning``) that follows the last one. What they ``kept`` and
    ``received`` from the server is (C, ...); ``factor`` is that of their learning rates.
    """

    def __init__(
        self, site: Site, plan: RoundPlan, kept: Stacks, received: State, factor: float = 1.0, tuning: bool = False
    ) -> None:
        engine, settings, clients = site.engine, site.settings, len(plan.clients)
        tuned = settings.algorithm.personalization() if tuning else None
        self.algorithm, self.phases = (settings.algorithm, settings.phases) if tuned is None else (tuned[0], tuned[1:])
        self.engine, self.tensor_names, self.training = engine, site.tensor_names, settings.training
        self.plan, self.kept, self.received, self.factor = plan, kept, received, factor
        self.private: PrivateRound | None = None
        if site.protection.images is not None:
            self.private = PrivateRound(site.protection.images, site.gradients, settings.seed, plan, tuning)
        device = next(iter(received.values())).device
        self.scales = site.scales.open("clients", clients, device)
        size = 1 if engine.kind == "loop" else settings.clients_per_chunk or clients
        opened = self.algorithm.begin_round(kept, received, site.tensor_names)
        self._merged = {role: partition(state, site.tensor_names.merged)[0] for role, state in opened.items()}
        bounds = [(start, min(start + size, clients)) for start in range(0, clients, size)]
        self.chunks = [_Chunk(self, opened, start, stop) for start, stop in bounds]
        own = secrets.randbits(256) if self.private is not None and self.private.secure else settings.seed
        self.streams = {
            role: Streams.derived(own, f"dropout-{role}", plan.round, clients=plan.clients, device=device)
            for role in opened
        }
        self.broken = torch.zeros(clients, dtype=torch.bool, device=device)
        self.failed: dict[int, str] = {}  # clients of whom a sample could not be read, and why
        self.losses = {role: torch.zeros(clients, device=device, dtype=torch.float32) for role in opened}
        self.descents = {role: torch.zeros(clients) for role in opened}
        self._phase = -1

    def step(self, batches: AnyBatch) -> None:
        """Take one local step of the clients that a batch holds: a prefix of the plan's, or none."""
        batch = one_of(batches)
        if not batch.clients:
            return
        for one in batches.values() if isinstance(batches, dict) else (batches,):
            for client, reason in one.failed:
                self.broken[one.clients.index(client)] |= self.private is None  # else the sample is in no batch
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

    def close(self) -> Trained:
        """Finish the round."""
        merged = self.tensor_names.merged
        trained = {
            role: {
                key: torch.cat([chunk.full[role][key] for chunk in self.chunks]) for key in state if key not in merged
            }
            for role, state in self.chunks[0].full.items()
        }
        self.chunks = []
        finite = _all_finite(~self.broken, *trained.values())
        trained = {role: state | self._merged[role] for role, state in trained.items()}
        kept, update = self.algorithm.end_round(trained, self.kept, self.received, self.tensor_names)
        sent = _all_finite(torch.ones_like(finite), update)  # an algorithm may make what is not finite of what is
        if self.private is not None:
            return Trained(kept, update, finite, sent)
        finite = _all_finite(finite & sent, *kept.values())
        return Trained(kept, update, finite, finite)

    def mean_losses(self) -> dict[str, Tensor]:
        """Mean training loss (C,) of each client over the steps it took on a role, for the roles that have a loss."""
        return {
            role: total / self.descents[role].to(total)
            for role, total in self.losses.items()
            if self.descents[role].any()
        }

    def outcomes(self, trained: Trained, shares: Shares, ranks: Ranks) -> Outcomes:
        """Put together what the ranks know of their clients, or of a stand-in where one has none."""
        places, roles = shares.places, len(self.losses)
        skipped = torch.zeros_like(trained.finite) if self.scales is None else self.scales.skipped
        found = torch.stack([*map(double, (trained.finite, trained.counts, skipped, *self.losses.values()))])
        rows = torch.cat([found.cpu().double(), *(row.double()[None] for row in self.descents.values())])
        table = torch.zeros(len(rows), len(shares.plan.clients), dtype=torch.float64)
        if places:
            table[:, places] = rows[:, : len(places)]
        ranks.sum_([table])
        losses = zip(self.losses, table[3 : 3 + roles].float(), table[3 + roles :].float(), strict=True)
        finite = table[0].bool()
        return Outcomes(
            [client for client, fine in zip(shares.plan.clients, finite.tolist(), strict=True) if not fine],
            finite,
            table[1].bool(),
            {role: total / steps for role, total, steps in losses if steps.any()},
            None if self.scales is None else table[2],
            {client: reason for own in ranks.gather(self.failed) for client, reason in own.items()},
        )


def _all_finite(clients: Tensor, *stacks: State) -> Tensor:
    """Those of ``clients`` (C,) of whom the stacks (C, ...) hold neither a NaN nor an infinity."""
    for value in chain.from_iterable(stack.values() for stack in stacks):
        clients = clients & value.reshape(len(value), -1).isfinite().all(1)
    return clients


def _add_gradient(leaf: Tensor, gradient: Tensor, factor: float = 1.0) -> None:
    leaf.grad = gradient * factor if leaf.grad is None else leaf.grad.add_(gradient, alpha=factor)


def _clip(gradients: list[Tensor], norm: float) -> None:
    """Scale each client's gradients (C, ...) down to a joint norm of at most ``norm``, in place.

    The same arithmetic as ``torch.nn.utils.clip_grad_norm_``, client by client.
    """
    total = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    scale = (norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
