# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from perada.algorithms import Algorithm, Slot
from perada.core.batches import one_of
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares
from perada.core.states import State, clone, expand, stack, unstack
from perada.engine.engine import Engine
from perada.engine.losses import compare
from perada.federation.cohort import Cohort
from perada.federation.diagnostics import Measuring, gradient_norms
from perada.federation.round_report import RoundReport, gather_outcomes, look_at, round_metrics
from perada.federation.server import Progress, Server
from perada.federation.settings import FederationData, Loader, Settings
from perada.federation.site import Site
from perada.federation.store.kinds import SharedStore
from perada.federation.store.rows import renumbered
from perada.privacy.protection import Protection
from perada.server import Updates


class Federation:
    """One server and M clients: a :class:`Server`, a :class:`Site` where this rank's clients train, what all keep.

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
        self.site = Site(engine, slot, settings, self.protection)
        self.scales = self.site.scales
        self.server = Server(engine, slot, initial, settings, self.ranks, self.scales)
        self.store = self._store(settings.algorithm)
        self.tuned: SharedStore | None = None
        self.rounds_done = 0
        self.cohort: Cohort | None = None
        self._shares = Shares.of(RoundPlan(0, (), ()))
        self._gradients: dict[str, float] = {}

    @property
    def global_state(self) -> State:
        """The global state w, or a stack of several."""
        return self.server.global_state

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
        if loader and settings.algorithm.compares:
            multilabel = settings.training.multilabel
            losses = compare(self.engine, self.members(), map(one_of, loader(own)), len(own.clients), multilabel)
        self.protection.spend(shares.plan, self.ranks)
        received = self.server.sending(own, self.num_clients, losses)
        self.cohort = self.site.open(own, self.store.local.gather(own.clients), received, factor)
        if loader and "gradient_norms" in settings.diagnostics:
            images, known = map(one_of, loader(own)), (self.cohort.received, self.cohort.kept)
            names, places, clients = self.slot.parameters, shares.places, len(shares.plan.clients)
            self._gradients = gradient_norms(self.engine, settings, names, *known, images, places, clients, self.ranks)
        return self.cohort

    def members(self) -> State:
        """The global models (K, ...) whose outputs are averaged; usually one."""
        return self.server.members()

    def close(self, data: FederationData, progress: Progress = iter) -> RoundReport:
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
        received = {key: value[: len(shares.places)] for key, value in cohort.received.items()}
        level = self.protection.clients
        if level is not None:  # all are counted, since who broke depends on their images
            sent = self.server.privatized(level, sent, received, shares.plan, shares.places)
            good = list(range(len(shares.plan.clients)))
        if good:
            if level is None:
                shown, names = "update_norms" in settings.diagnostics, self.slot.parameters
                report.far, found = look_at(names, sent, received, shares, good, self.ranks, shown)
                report.metrics |= found
            if settings.refuse_far:
                good = [place for place in good if shares.plan.clients[place] not in report.far]
            updates = Updates(sent, shares.places, len(shares.plan.clients), self.ranks).part(good)
            clients = [shares.plan.clients[place] for place in good]
            samples = [data.train_sizes[client] for client in clients]
            given = shares.plan.round, clients, self.num_clients, updates, samples, data, report
            student = self.server.close(*given, progress, noisy=level is not None)
            if self.settings.diagnostics:
                report.metrics |= self._diagnostics(updates, data, student)
        report.metrics |= self._gradients | self.protection.metrics()
        if report.broken and not settings.private:  # who fails depends on the images
            report.metrics |= {"clients/drawn": len(shares.plan.clients), "clients/failed": len(report.broken)}
        return report

    def _failed(self, cohort: Cohort) -> dict[int, str]:
        """The clients of all ranks of whom a sample could not be read, and why."""
        return {client: reason for own in self.ranks.gather(cohort.failed) for client, reason in own.items()}

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
        self.tuned = self._store(tuning[0], tuned=True)
        broken: list[int] = []
        failed: dict[int, str] = {}
        for plan in groups:
            shares = Shares.of(plan, self.ranks.size, self.ranks.rank)
            self.protection.spend(plan, self.ranks, tuning=True)
            own = shares.trained
            received = self.server.sending(own, self.num_clients, algorithm=tuning[0])
            cohort = self.site.open_tuning(own, self.tuned.local.gather(own.clients), received, factor)
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
            **self.server.state_dict(),
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
        self.server.load_state_dict(saved)
        numbers = saved.get("numbers")  # of the former clients, where a run resumes with more
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
