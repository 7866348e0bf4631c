# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Slot, ensemble_of
from perada.core.batches import one_of
from perada.core.ranks import Ranks
from perada.core.rounds import Phase, RoundPlan, share_out
from perada.core.states import State, clone, expand, to_device, unstack
from perada.engine.engine import Engine
from perada.engine.ensembles import compare
from perada.engine.loss_scaling import KeptScales
from perada.federation.cohort import Cohort
from perada.federation.round_report import RoundReport, gather_outcomes, round_metrics
from perada.federation.settings import FederationData, Loader, Settings
from perada.federation.store import Storage
from perada.federation.store.shared import SharedStore
from perada.privacy.client_level import floor_variances
from perada.privacy.training import PrivateRound
from perada.server import Updates, client_weights
from perada.server.distill import refine


class Federation:
    """One server and M clients.

    Args:
        engine: Runs states through the one model.
        slot: Names of the trained tensors.
        initial: Gives the k-th random initial state; everyone starts from that of 0 unless there are several models.
        settings: How the rounds go.
        num_clients: M.
        ranks: The processes that share the work.
    """

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        initial: Callable[[int], State],
        settings: Settings,
        num_clients: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.engine, self.slot, self.settings, self.num_clients = engine, slot, settings, num_clients
        self.global_state = ensemble_of(settings.algorithm).initial(initial)
        self.ranks.broadcast_(self.global_state.values())  # a network of the caller's own may be random in each process
        self.server_state: dict[str, State] = {}
        self.store = self._store(settings.algorithm, settings.storage)
        self.tuned: SharedStore | None = None
        self.rounds_done = 0
        self.scales = KeptScales(settings.loss_scaling)
        self.plan = RoundPlan(0, (), ())

    def _store(self, algorithm: Algorithm, storage: Storage, name: str = "") -> SharedStore:
        """Room for what an algorithm's clients keep, before they keep anything."""
        return SharedStore(storage.open(algorithm.kept(self.global_state, self.slot), name), self.ranks)

    def _share(self, plan: RoundPlan) -> RoundPlan:
        """This rank's clients of a round, or the round's first as a stand-in that takes no step."""
        own = share_out(plan, self.ranks.size)[self.ranks.rank]
        return own if own.clients else share_out(plan, len(plan.clients))[0]

    def _places(self, plan: RoundPlan) -> list[int]:
        """Where this rank's clients stand in a round."""
        own = {*share_out(plan, self.ranks.size)[self.ranks.rank].clients}
        return [place for place, client in enumerate(plan.clients) if client in own]

    def open(self, plan: RoundPlan, factor: float = 1.0, loader: Loader | None = None) -> Cohort:
        """Start a round: gather what its clients kept, and send them the global state.

        Args:
            plan: All of the round's clients and their numbers of local steps.
            factor: Factor of the clients' learning rates.
            loader: Gives the clients' training images, where they compare the global models on them.

        Returns:
            The clients that this rank trains.
        """
        self.plan, self.tuned = plan, None  # what was fine-tuned from an earlier global state is outdated
        self.store.bring(share_out(plan, self.ranks.size))
        settings, own, losses = self.settings, self._share(plan), None
        if loader and ensemble_of(settings.algorithm).compares:
            multilabel = settings.training.multilabel
            losses = compare(self.engine, self.members(), map(one_of, loader(own)), len(own.clients), multilabel)
        settings.protection.spend(plan, self.ranks)
        private = settings.protection.open(own, self._device)
        return self._cohort(settings.algorithm, settings.phases, own, self.store, factor, private, losses)

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

    def close(
        self, cohort: Cohort, data: FederationData, progress: Callable[[Tensor], Iterable[Tensor]] = iter
    ) -> RoundReport:
        """End a round: clients store what they keep, the server aggregates what the finite ones sent and distils.

        Args:
            cohort: The round's clients after their last local step.
            data: For the clients' sizes and the public images.
            progress: Wraps the distillation's steps in a progress bar.
        """
        plan, protection, ranks = self.plan, self.settings.protection, self.ranks
        shares, places = share_out(plan, ranks.size), self._places(plan)
        kept, updates, finite, counts = cohort.close()
        outcomes = gather_outcomes(cohort, finite, counts, places, len(plan.clients), ranks)
        sound = finite & (torch.arange(len(finite), device=finite.device) < len(places))  # without a stand-in
        self.scales.close("clients", cohort.scales, sound, ranks)
        metrics = round_metrics(self.settings, self.slot, self.global_state, cohort, updates, outcomes)
        report = RoundReport(outcomes.broken(plan))
        self.store.scatter(shares, report.broken, kept)
        self.rounds_done = plan.round + 1
        own = {key: value[: len(places)] for key, value in updates.items()}  # without a stand-in's
        good = outcomes.counts.nonzero().flatten().tolist()
        if protection.clients is not None:  # all are counted, since who broke depends on their images
            received = {key: value[: len(places)] for key, value in cohort.received.items()}
            own = protection.clients.privatized(own, received, plan.round, plan.clients, places, ranks)
            good = list(range(len(plan.clients)))
            # The mean has all of the noise, a row has a share of it: nothing after this gets to see a row.
            mean = Updates(own, places, len(good), ranks).mean(client_weights("uniform", good))
            own = expand(mean, len(places))
        if good:
            sent = Updates(own, places, len(plan.clients), ranks).part(good)
            turn = ServerTurn(self.engine, self.slot, self.settings, data, ranks, self.scales, progress)
            clients = [plan.clients[place] for place in good]
            state, kept_by_server = turn(
                plan.round, clients, self.num_clients, sent, self.global_state, self.server_state
            )
            metrics |= turn.metrics
            report.diverged, report.broken_server = turn.diverged, not is_finite(state)
            if not report.broken_server:
                self.global_state, self.server_state = self.global_state | state, kept_by_server
        report.metrics = metrics | protection.metrics()
        return report

    def finetune(
        self,
        groups: Iterable[RoundPlan],
        loader: Loader,
        factor: float = 1.0,
    ) -> list[int]:
        """Let every client fine-tune the final global state alone, where the algorithm ends so.

        Args:
            groups: Plans that together hold every client once.
            loader: The prepared local steps of a plan.
            factor: Factor of the clients' learning rates.

        Returns:
            The clients whose training became NaN or infinite; they keep the global state.
        """
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        algorithm, phase = tuning
        self.tuned = self._tuned_store(algorithm)
        broken: list[int] = []
        for plan in groups:
            protection, shares, own = self.settings.protection, share_out(plan, self.ranks.size), self._share(plan)
            protection.spend(plan, self.ranks, tuning=True)
            private = protection.open(own, self._device, tuning=True)
            cohort = self._cohort(algorithm, [phase], own, self.tuned, factor, private)
            for batch in loader(shares[self.ranks.rank]):
                cohort.step(batch)
            kept, _, finite, counts = cohort.close()
            outcomes = gather_outcomes(cohort, finite, counts, self._places(plan), len(plan.clients), self.ranks)
            self.tuned.scatter(shares, outcomes.broken(plan), kept)
            broken += outcomes.broken(plan)
        return broken

    def _tuned_store(self, algorithm: Algorithm) -> SharedStore:
        return self._store(algorithm, replace(self.settings.storage, clients=self.num_clients), "tuned")

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
    def finetuned(self) -> bool:
        """Whether clients have fine-tuned the global state as it now is."""
        return self.tuned is not None

    @property
    def personalized(self) -> bool:
        """Whether clients predict with states of their own by now."""
        return self.settings.algorithm.inference == "personal" or self.finetuned

    def global_models(self) -> list[State]:
        """The states whose averaged outputs are the global model's; usually one."""
        return unstack(clone(self.members()))

    def state_dict(self) -> dict[str, Any]:
        """All that a later session needs to go on, in types that ``torch.load(weights_only=True)`` takes."""
        return {
            "global": self.global_state,
            "server": self.server_state,
            "clients": self.store.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
            "rounds_done": self.rounds_done,
            "loss_scales": self.scales.state_dict(),
            "privacy": self.settings.protection.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of the federation that wrote ``saved``."""
        tuned, done = saved["tuned"] is not None, saved["rounds_done"]
        self.settings.protection.load_state_dict(saved.get("privacy"), done, tuned)
        device = self._device
        self.global_state = to_device(saved["global"], device)
        self.server_state = {name: to_device(state, device) for name, state in saved["server"].items()}
        self.store.load_state_dict(saved["clients"])
        self.tuned = None
        if saved["tuned"] is not None:
            tuning = self.settings.algorithm.personalization()
            assert tuning is not None
            self.tuned = self._tuned_store(tuning[0])
            self.tuned.load_state_dict(saved["tuned"])
        self.rounds_done = saved["rounds_done"]
        self.scales.load_state_dict(saved.get("loss_scales", {}))


@dataclass
class ServerTurn:
    """Lets the algorithm make the next global state of what the clients sent. All ranks take it alike.

    Attributes:
        engine: Runs the states.
        slot: Names of the trained tensors.
        settings: How the rounds go.
        data: For the clients' sizes and the public images.
        ranks: The processes.
        scales: The student's loss scale.
        progress: Wraps the distillation's steps in a progress bar.
        diverged: Whether a distillation became NaN or infinite, and its starting point was kept.
        metrics: What was measured.
    """

    engine: Engine
    slot: Slot
    settings: Settings
    data: FederationData
    ranks: Ranks
    scales: KeptScales
    progress: Callable[[Tensor], Iterable[Tensor]]
    diverged: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __call__(
        self,
        round: int,
        clients: Sequence[int],
        num_clients: int,
        updates: Updates,
        previous: State,
        kept: dict[str, State],
    ) -> tuple[State, dict[str, State]]:
        """Take the turn.

        Args:
            round: Counted from 0.
            clients: Who sent the updates.
            num_clients: M.
            updates: What they sent.
            previous: Global state before the round.
            kept: The server's own tensors.

        Returns:
            What changes of the global state, and the server's own tensors from now on.
        """
        settings = self.settings

        def distill(student: State, teachers: Mapping[str, Tensor], average_from: float | None = None) -> State:
            device = next(iter(student.values())).device
            scales = self.scales.open("student", 1, device)
            refined = refine(
                self.engine,
                settings.distillation,
                self.data,
                round,
                student,
                teachers,
                self.slot.parameters,
                multilabel=settings.training.multilabel,
                ranks=self.ranks,
                average_from=average_from,
                progress=self.progress,
                scales=scales,
            )
            if scales is not None:
                self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
                skipped = self.metrics.get("server/skipped_steps", 0.0) + float(scales.skipped)
                self.metrics["server/skipped_steps"] = skipped
            finite = is_finite(refined)
            self.diverged |= not finite
            return refined if finite else student

        server = ServerStep(
            round,
            tuple(clients),
            num_clients,
            self.slot,
            settings.seed,
            previous,
            updates,
            client_weights(settings.weighting, [self.data.train_sizes[client] for client in clients]),
            dict(kept),
            settings.rule,
            distill,
        )
        state = clone(settings.algorithm.server_step(server))
        if settings.protection.clients is not None:
            state = floor_variances(state)
        return state, server.state


def is_finite(state: State) -> bool:
    """Whether there is neither a NaN nor an infinity in a state."""
    return all(bool(value.isfinite().all()) for value in state.values())
