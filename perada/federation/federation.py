# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Slot, ensemble_of
from perada.core.batches import one_of
from perada.core.ranks import Ranks
from perada.core.rounds import Phase, RoundPlan, Shares
from perada.core.states import State, clone, expand, is_finite, stack, to_device, unstack
from perada.engine.engine import Engine
from perada.engine.ensembles import compare
from perada.engine.loss_scaling import KeptScales
from perada.federation.changes import look_at
from perada.federation.cohort import Cohort
from perada.federation.diagnostics import Measuring, gradient_norms
from perada.federation.round_report import RoundReport, gather_outcomes, round_metrics
from perada.federation.settings import FederationData, Loader, Settings
from perada.federation.store.rows import renumbered
from perada.federation.store.shared import SharedStore
from perada.privacy.client_level import floor_variances
from perada.privacy.protection import Protection
from perada.privacy.training import PrivateRound
from perada.server import Updates, client_weights
from perada.server.distill import Distiller


class Federation:
    """One server and M clients.

    ``initial`` gives the k-th random initial state; everyone starts from that of 0 unless there are several models. The
    ``cohort`` is that of this rank's clients in the round that is open; ``None`` between rounds.
    """

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        initial: Callable[[int], State],
        settings: Settings,
        num_clients: int,
        ranks: Ranks | None = None,
        protection: Protection | None = None,
    ) -> None:
        self.ranks, self.protection = ranks or Ranks(), protection or Protection()
        self.engine, self.slot, self.settings, self.num_clients = engine, slot, settings, num_clients
        self.global_state = ensemble_of(settings.algorithm).initial(initial)
        self.ranks.broadcast_(self.global_state.values())  # a network of the caller's own may be random in each process
        self.server_state: dict[str, State] = {}
        self.store = self._store(settings.algorithm)
        self.tuned: SharedStore | None = None
        self.rounds_done = 0
        self.scales = KeptScales(settings.loss_scaling)
        self.cohort: Cohort | None = None
        self._shares = Shares.of(RoundPlan(0, (), ()))
        self._gradients: dict[str, float] = {}

    def _store(self, algorithm: Algorithm, tuned: bool = False) -> SharedStore:
        """Room for what an algorithm's clients keep: those drawn, or all where they are tuned."""
        storage = replace(self.settings.storage, clients=self.num_clients) if tuned else self.settings.storage
        name = "tuned" if tuned else ""
        return SharedStore(storage.open(algorithm.kept(self.global_state, self.slot), name), self.ranks)

    def open(self, shares: Shares, factor: float = 1.0, loader: Loader | None = None) -> Cohort:
        """Start a round: gather what its clients kept, and send them the global state.

        ``factor`` is that of the clients' learning rates; ``loader`` gives their training images, where they compare
        the global models on them or full gradients are measured. What comes back are the clients that this rank trains,
        or a stand-in.
        """
        self._shares, self.tuned = shares, None  # what was tuned from an earlier global state is outdated
        self.store.bring(shares.parts)
        settings, own, losses = self.settings, shares.trained, None
        if loader and ensemble_of(settings.algorithm).compares:
            multilabel = settings.training.multilabel
            losses = compare(self.engine, self.members(), map(one_of, loader(own)), len(own.clients), multilabel)
        self.protection.spend(shares.plan, self.ranks)
        private = self.protection.open(own)
        self.cohort = self._cohort(settings.algorithm, settings.phases, own, self.store, factor, private, losses)
        if loader and "gradient_norms" in settings.diagnostics:
            images, known = map(one_of, loader(own)), (self.cohort.received, self.cohort.kept)
            names, places, clients = self.slot.parameters, shares.places, len(shares.plan.clients)
            self._gradients = gradient_norms(self.engine, settings, names, *known, images, places, clients, self.ranks)
        return self.cohort

    @property
    def _device(self) -> torch.device:
        return next(iter(self.global_state.values())).device

    def _cohort(
        self,
        algorithm: Algorithm,
        phases: Sequence[Phase],
        plan: RoundPlan,
        store: SharedStore,
        factor: float,
        private: PrivateRound | None,
        losses: Tensor | None = None,
    ) -> Cohort:
        seed = self.settings.seed
        sending = Broadcast(self.global_state, self.slot, plan.round, plan.clients, self.num_clients, seed)
        received = algorithm.broadcast(sending) if losses is None else ensemble_of(algorithm).broadcast(sending, losses)
        return Cohort(
            self.engine,
            algorithm,
            self.slot,
            plan,
            phases,
            store.local.gather(plan.clients),
            received,
            self.settings.training,
            factor=factor,
            seed=seed,
            clients_per_chunk=self.settings.clients_per_chunk,
            private=private,
            scales=self.scales.open("clients", len(plan.clients), self._device),
        )

    def members(self) -> State:
        """The global models (K, ...) whose outputs are averaged; usually one."""
        return ensemble_of(self.settings.algorithm).members(self.global_state, self.server_state)

    def close(self, data: FederationData, progress: Callable[[Tensor], Iterable[Tensor]] = iter) -> RoundReport:
        """End the round: clients store what they keep, the server aggregates what the finite ones sent and distils.

        The distillation's steps are drawn through ``progress``, such as a progress bar.
        """
        cohort, shares, settings, self.cohort = self.cohort, self._shares, self.settings, None
        assert cohort is not None
        trained = cohort.close()
        outcomes = gather_outcomes(cohort, trained, shares, self.ranks)
        real = torch.arange(len(trained.finite), device=trained.finite.device) < len(shares.places)  # no stand-in
        self.scales.close("clients", cohort.scales, trained.finite & real, self.ranks)
        report = RoundReport(outcomes.broken(shares.plan), failed=self._failed(cohort))
        report.metrics = round_metrics(settings, self.slot, self.global_state, cohort, trained.sent, outcomes)
        self.store.scatter(shares.parts, report.broken, trained.kept)
        self.rounds_done = shares.plan.round + 1
        sent = {key: value[: len(shares.places)] for key, value in trained.sent.items()}  # without a stand-in's
        good = outcomes.counts.nonzero().flatten().tolist()
        if self.protection.clients is not None:  # all are counted, since who broke depends on their images
            sent, good = self._privatized(sent, cohort.received), list(range(len(shares.plan.clients)))
        if good:
            if self.protection.clients is None:
                shown = "update_norms" in settings.diagnostics
                names, received = self.slot.parameters, cohort.received
                report.far, found = look_at(names, sent, received, shares, good, self.ranks, shown)
                report.metrics |= found
            if settings.refuse_far:
                good = [place for place in good if shares.plan.clients[place] not in report.far]
            updates = Updates(sent, shares.places, len(shares.plan.clients), self.ranks).part(good)
            self._server_step([shares.plan.clients[place] for place in good], updates, data, progress, report)
        report.metrics |= self._gradients | self.protection.metrics()
        if report.broken and not settings.private:  # who fails depends on the images
            report.metrics |= {"clients/drawn": len(shares.plan.clients), "clients/failed": len(report.broken)}
        return report

    def _failed(self, cohort: Cohort) -> dict[int, str]:
        """The clients of all ranks of whom a sample could not be read, and why."""
        return {client: reason for own in self.ranks.gather(cohort.failed) for client, reason in own.items()}

    def _privatized(self, sent: State, received: State) -> State:
        """What the server gets to see with privacy of whole clients: their noisy mean in every row (c, ...)."""
        plan, places = self._shares.plan, self._shares.places
        clients = range(len(plan.clients))
        assert self.protection.clients is not None
        received = {key: value[: len(places)] for key, value in received.items()}
        noisy = self.protection.clients.privatized(sent, received, plan.round, plan.clients, places, self.ranks)
        # The mean has all of the noise, a row has a share of it: nothing after this gets to see a row.
        mean = Updates(noisy, places, len(clients), self.ranks).mean(client_weights("uniform", clients))
        return expand(mean, len(places))

    def _server_step(
        self,
        clients: Sequence[int],
        updates: Updates,
        data: FederationData,
        progress: Callable[[Tensor], Iterable[Tensor]],
        report: RoundReport,
    ) -> None:
        """Let the algorithm make the next global state of what ``clients`` sent; all ranks do alike."""
        settings, round = self.settings, self._shares.plan.round
        distiller = Distiller(
            self.engine,
            settings.distillation,
            self.slot.parameters,
            data,
            round,
            settings.seed,
            settings.training.multilabel,
            self.ranks,
            self.scales,
            progress,
        )
        step = ServerStep(
            round,
            tuple(clients),
            self.num_clients,
            self.slot,
            settings.seed,
            self.global_state,
            updates,
            client_weights(settings.weighting, [data.train_sizes[client] for client in clients]),
            dict(self.server_state),
            settings.rule,
            distiller,
        )
        state = clone(settings.algorithm.server_step(step))
        if self.protection.clients is not None:
            state = floor_variances(state)
        report.metrics |= distiller.metrics
        report.diverged, report.broken_server = distiller.diverged, not is_finite(state)
        if not report.broken_server:
            self.global_state, self.server_state = self.global_state | state, step.state
        if settings.diagnostics:
            report.metrics |= self._diagnostics(updates, data, distiller.student)

    def _diagnostics(self, updates: Updates, data: FederationData, student: State | None) -> dict[str, float]:
        """The round's diagnostics but for gradients; ``student`` is what was distilled into, if anything was."""
        names, shares = self.settings.diagnostics, self._shares
        own = shares.own.clients if "personal_distance" in names else ()
        measuring = Measuring(
            self.engine,
            data,
            {key: value for key, value in updates.own.items() if key in self.global_state},
            updates.clients,
            stack([self.global_state] if student is None else [student, self.global_state]),
            self.personal_states(own) if own else {},
            self.settings.training.multilabel,
            self.ranks,
        )
        return measuring.measure(names, shares.places if own else (), len(shares.plan.clients))

    def personalize(
        self, groups: Iterable[RoundPlan], loader: Loader, factor: float = 1.0
    ) -> tuple[list[int], dict[int, str]]:
        """Let every client, once in the ``groups``, fine-tune the final global state alone, as the algorithm ends.

        The clients whose training failed are returned, who keep the global state, and why samples could not be read.
        """
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        algorithm, phase = tuning
        self.tuned = self._store(algorithm, tuned=True)
        broken: list[int] = []
        failed: dict[int, str] = {}
        for plan in groups:
            shares = Shares.of(plan, self.ranks.size, self.ranks.rank)
            self.protection.spend(plan, self.ranks, tuning=True)
            private = self.protection.open(shares.trained, tuning=True)
            cohort = self._cohort(algorithm, [phase], shares.trained, self.tuned, factor, private)
            for batch in loader(shares.own):
                cohort.step(batch)
            trained = cohort.close()
            outcomes = gather_outcomes(cohort, trained, shares, self.ranks)
            self.tuned.scatter(shares.parts, outcomes.broken(plan), trained.kept)
            broken += outcomes.broken(plan)
            failed |= self._failed(cohort)
        return broken, failed

    def personal_states(self, clients: Sequence[int]) -> State:
        """The states (C, ...) that ``clients`` predict with."""
        tuning = self.settings.algorithm.personalization()
        if tuning and self.tuned is not None:
            return tuning[0].personal(self.tuned.gather(clients), self.global_state)
        if self.settings.algorithm.inference == "global":
            return expand(self.global_state, len(clients))
        return self.settings.algorithm.personal(self.store.gather(clients), self.global_state)

    def owned(self) -> list[int]:
        """The clients whose personal states this process holds, in order; each client has one owner."""
        store = self.store if self.tuned is None else self.tuned
        return [client for client in range(self.num_clients) if store.holder(client) == self.ranks.rank]

    def collect(self) -> None:
        """Bring all clients' states to rank 0; all ranks call it."""
        for store in filter(None, (self.store, self.tuned)):
            store.collect()

    @property
    def personalized(self) -> bool:
        """Whether clients predict with states of their own by now."""
        return self.settings.algorithm.inference == "personal" or self.tuned is not None

    def global_models(self) -> list[State]:
        """The states whose averaged outputs are the global model's; usually one."""
        return unstack(clone(self.members()))

    def state_dict(self) -> dict[str, Any]:
        """All that a later session needs to resume, in types that ``torch.load(weights_only=True)`` takes."""
        return {
            "global": self.global_state,
            "server": self.server_state,
            "clients": self.store.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
            "rounds_done": self.rounds_done,
            "loss_scales": self.scales.state_dict(),
            "privacy": self.protection.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of the federation that wrote ``saved``."""
        self.rounds_done = saved["rounds_done"]
        self.protection.load_state_dict(saved.get("privacy"), self.rounds_done, saved["tuned"] is not None)
        device = self._device
        self.global_state = to_device(saved["global"], device)
        self.server_state = {name: to_device(state, device) for name, state in saved["server"].items()}
        numbers = saved.get("numbers")  # of the former clients, where a run goes on with more
        if numbers is None:
            self.store.load_state_dict(saved["clients"])
        else:
            self.store.load_state_dict(renumbered(saved["clients"], numbers, self.store.local.layout))
            others = sorted({*range(self.num_clients)} - {*numbers})
            self.store.begin(others, self.settings.algorithm.kept(self.global_state, self.slot))
        self.tuned = None
        if saved["tuned"] is not None:
            tuning = self.settings.algorithm.personalization()
            assert tuning is not None
            self.tuned = self._store(tuning[0], tuned=True)
            self.tuned.load_state_dict(saved["tuned"])
        self.scales.load_state_dict(saved.get("loss_scales", {}))
