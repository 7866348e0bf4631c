# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from perada.algorithms import Algorithm, Stacks, TensorNames
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares, one_of
from perada.core.states import State, cut_ranks, expand, prefix, stack
from perada.engine.engine import Engine, compare
from perada.federation.cohort import Cohort, Outcomes, Site
from perada.federation.diagnostics import DiagnosticsPass, gradient_norms
from perada.federation.participation import Participation
from perada.federation.server import Progress, RoundReport, Server, megabytes_held, parameter_counts
from perada.federation.settings import FederationData, Loader, Settings
from perada.federation.shared_store import SharedStore
from perada.privacy.protection import Protection
from perada.server import Updates


class Federation(Site):
    """One server and M clients: a :class:`Server`, the site where this rank's clients train, and what all keep.

    ``initial`` gives the k-th random initial state; everyone starts from that of 0 unless there are several models. The
    ``cohort`` is that of this rank's clients in the round that is open; ``None`` between rounds.
    """

    def __init__(
        self,
        engine: Engine,
        tensor_names: TensorNames,
        initial: Callable[[int], State],
        settings: Settings,
        num_clients: int,
        ranks: Ranks | None = None,
        protection: Protection | None = None,
    ) -> None:
        super().__init__(engine, tensor_names, settings, protection)
        self.ranks, self.num_clients = ranks or Ranks(), num_clients
        self.server = Server(self, initial, self.ranks)
        self.store = self._store(settings.algorithm)
        self.tuned: SharedStore | None = None
        self.rounds_done = 0
        self.last_rounds = [0] * num_clients  # counted from 1; 0 for a client that never took part
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
        return SharedStore(
            storage.open(algorithm.initial_client_state(self.global_state, self.tensor_names), name), self.ranks
        )

    def open(self, shares: Shares, factor: float = 1.0, loader: Loader | None = None) -> Cohort:
        """Start a round: gather what its clients kept, and send them the global state.

        ``factor`` is that of the clients' learning rates; ``loader`` gives their training images, where they compare
        the global models on them or full gradients are measured. What comes back are the clients that this rank trains,
        or a stand-in.
        """
        self._shares, self.tuned = shares, None  # what was tuned from an earlier global state is outdated
        self.store.bring(shares.parts)
        settings, own, losses = self.settings, shares.trained, None
        if loader and settings.algorithm.compares_models:
            multilabel = settings.training.multilabel
            losses = compare(self.engine, self.server.members(), map(one_of, loader(own)), len(own.clients), multilabel)
        self.protection.spend(shares.plan, self.ranks)
        received = self.server.sending(own, self.num_clients, losses)
        self.cohort = Cohort(self, own, self.store.local.gather(own.clients), received, factor)
        if loader and "gradient_norms" in settings.diagnostics:
            whole = expand(self.global_state, len(own.clients)) | received  # names that are not sent
            self._gradients = gradient_norms(self.cohort, whole, settings, map(one_of, loader(own)), shares, self.ranks)
        return self.cohort

    def close(self, data: FederationData, progress: Progress = iter) -> RoundReport:
        """End the round: clients store what they keep, the server aggregates what the finite ones sent and distils.

        The distillation's steps are drawn through ``progress``, such as a progress bar.
        """
        cohort, plan, places, self.cohort = self.cohort, self._shares.plan, self._shares.places, None
        assert cohort is not None
        opened, trained = cohort.chunks[0].full, cohort.close()
        outcomes = cohort.outcomes(trained, self._shares, self.ranks)
        real = torch.arange(len(trained.finite), device=trained.finite.device) < len(places)  # no stand-in
        self.scales.close("clients", cohort.scales, trained.finite & real, self.ranks)
        report = RoundReport(outcomes.broken, failed=outcomes.failed)
        report.metrics = self._round_metrics(opened, cohort.received, trained.sent, outcomes)
        self.store.scatter(self._shares.parts, report.broken, trained.kept)
        self.rounds_done = plan.round + 1
        # Who failed depends on the images, and no ledger of a private run counts it: there all that were drawn count.
        absent = set[int]() if self.settings.private else set(report.broken)
        for client in plan.clients:
            if client not in absent:
                self.last_rounds[client] = self.rounds_done
        sent, received = prefix(trained.sent, len(places)), prefix(cohort.received, len(places))
        good = outcomes.counts.nonzero().flatten().tolist()
        among = places, len(plan.clients), self.ranks
        both = Updates(sent, *among), Updates(received, *among)
        level, sizes = self.protection.clients, data.train_sizes
        counted = self.server.close(plan, *both, good, level, sizes, data, report, progress)
        if counted and self.settings.diagnostics:
            updates, student = counted
            report.metrics |= self._diagnostics(updates, data, student)
        report.metrics |= self._gradients | self.protection.metrics()
        if report.broken and not self.settings.private:  # who fails depends on the images
            report.metrics |= {"clients/drawn": len(plan.clients), "clients/failed": len(report.broken)}
        return report

    def _round_metrics(self, opened: Stacks, received: State, sent: State, outcomes: Outcomes) -> dict[str, float]:
        """Training losses, and what a client trains and all send; the states are of some of them."""
        settings, clients = self.settings, len(outcomes.finite)
        # Every client is sent all models where it compares them, and takes one.
        many = settings.algorithm.compares_models
        received = self.global_state if many else {key: value[0] for key, value in received.items()}
        sent = {key: value[0] for key, value in sent.items()}
        plan, known = self._shares.plan, (settings.algorithm, settings.phases, self.tensor_names)
        ranks = self.server.ranks_of(plan.clients)
        metrics = parameter_counts(*known, plan.round, opened, sent, ranks) | {
            "comm/up_mb": megabytes_held(sent, self.tensor_names, ranks, clients),
            "comm/down_mb": megabytes_held(received, self.tensor_names, ranks, clients)
            if settings.algorithm.sends_updates
            else 0.0,
        }
        if outcomes.skipped is not None:
            metrics["train/skipped_steps"] = float(outcomes.skipped.sum())
        shown = {} if settings.client_privacy is not None else outcomes.losses  # no ledger counts them
        return metrics | {f"train/{role}_loss": float(losses[outcomes.finite].mean()) for role, losses in shown.items()}

    def _diagnostics(self, updates: Updates, data: FederationData, student: State | None) -> dict[str, float]:
        """The round's diagnostics but for gradients; ``student`` is what was distilled into, if anything was."""
        shares, models = self._shares, stack([self.global_state] if student is None else [student, self.global_state])
        own = shares.own.clients if "personal_distance" in self.settings.diagnostics else ()
        personal, places = (self.personal_states(own), shares.places) if own else ({}, [])
        given = personal, places, len(shares.plan.clients), self.settings.training.multilabel
        return DiagnosticsPass(self.engine, data, updates.whole(self.global_state), models, *given).measure(
            self.settings.diagnostics
        )

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
            cohort = Cohort(self, own, self.tuned.local.gather(own.clients), received, factor, tuning=True)
            for batch in loader(shares.own):
                cohort.step(batch)
            trained = cohort.close()
            outcomes = cohort.outcomes(trained, shares, self.ranks)
            self.tuned.scatter(shares.parts, outcomes.broken, trained.kept)
            broken += outcomes.broken
            failed |= outcomes.failed
        return broken, failed

    def personal_states(self, clients: Sequence[int]) -> State:
        """The states (C, ...) that ``clients`` predict with."""
        tuning, ranks = self.settings.algorithm.personalization(), self.server.ranks_of(clients)
        if tuning and self.tuned is not None:
            states = tuning[0].personal(self.tuned.gather(clients), self.global_state)
        elif self.settings.algorithm.inference == "global":
            states = expand(self.global_state, len(clients))
        else:
            states = self.settings.algorithm.personal(self.store.gather(clients), self.global_state)
        return cut_ranks(states, self.tensor_names.factors, torch.tensor(ranks)) if ranks else states

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
        return self.settings.algorithm.inference == "personal" or self.tuned is not None or bool(self.server.lora_ranks)

    @property
    def participation(self) -> Participation:
        """When clients took part last."""
        return Participation(self.last_rounds, self.rounds_done, self.settings.clients_per_round)

    @property
    def keeps_personal_models(self) -> bool:
        """Whether clients predict with models that change only in rounds in which they take part."""
        return self.settings.algorithm.inference == "personal" and self.tuned is None

    def state_dict(self) -> dict[str, Any]:
        """All that a later session needs to resume, in types that ``torch.load(weights_only=True)`` takes."""
        return {
            **self.server.state_dict(),
            "clients": self.store.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
            "rounds_done": self.rounds_done,
            "last_rounds": list(self.last_rounds),
            "loss_scales": self.scales.state_dict(),
            "privacy": self.protection.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of the federation that wrote ``saved``."""
        self.rounds_done = saved["rounds_done"]
        self.protection.load_state_dict(saved.get("privacy"), self.rounds_done, saved["tuned"] is not None)
        self.server.load_state_dict(saved)
        numbers = saved.get("numbers")  # of the former clients, where a run resumes with more
        self.last_rounds = [0] * self.num_clients
        for client, last in enumerate(saved["last_rounds"]):
            self.last_rounds[client if numbers is None else numbers[client]] = last
        if numbers is None:
            self.store.load_state_dict(saved["clients"])
        else:
            others = sorted({*range(self.num_clients)} - {*numbers})
            kept = self.settings.algorithm.initial_client_state(self.global_state, self.tensor_names)
            self.store.grow(saved["clients"], numbers, others, kept)
        self.tuned = None
        if saved["tuned"] is not None:
            tuning = self.settings.algorithm.personalization()
            if tuning is None:
                raise ValueError(
                    "the checkpoint holds what was fine-tuned after the last round, which "
                    f"{self.settings.algorithm.kind} does not do; resume with the configuration that wrote it"
                )
            self.tuned = self._store(tuning[0], tuned=True)
            self.tuned.load_state_dict(saved["tuned"])
        self.scales.load_state_dict(saved.get("loss_scales", {}))
