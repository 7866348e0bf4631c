# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Slot, Stacks
from perada.cohort import Cohort
from perada.engine import Engine
from perada.loss_scaling import KeptScales
from perada.privacy.client_level import floor_variances
from perada.privacy.training import PrivateRound
from perada.ranks import Ranks
from perada.refinement import compare, refine
from perada.round_report import RoundReport, round_metrics
from perada.rounds import Phase, RoundPlan, one_of
from perada.server import client_weights
from perada.settings import FederationData, Loader, Settings
from perada.states import State, clone, expand, to_device, unstack
from perada.store import ClientStore


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
        self.global_state = settings.algorithm.initial(initial)
        self.server_state: dict[str, State] = {}
        self.store = settings.storage.open(settings.algorithm.kept(self.global_state, slot))
        self.tuned: ClientStore | None = None
        self.rounds_done = 0
        self.scales = KeptScales(settings.loss_scaling)

    def open(self, plan: RoundPlan, factor: float = 1.0, loader: Loader | None = None) -> Cohort:
        """Start a round: gather what its clients kept, and send them the global state.

        Args:
            plan: The round's clients and their numbers of local steps.
            factor: Factor of the clients' learning rates.
            loader: Gives the clients' training images, where they compare the global models on them.
        """
        self.tuned = None  # what was fine-tuned from an earlier global state is outdated
        settings, kept, losses = self.settings, self.store.gather(plan.clients), None
        if loader and settings.algorithm.compares:
            multilabel = settings.training.multilabel
            batches = map(one_of, loader(plan))
            losses = compare(self.engine, self.members(), batches, len(plan.clients), multilabel)
        private = settings.protection.open(plan, self._device)
        return self._cohort(settings.algorithm, settings.phases, plan, kept, factor, private, losses)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.global_state.values())).device

    def _cohort(
        self,
        algorithm: Algorithm,
        phases: Sequence[Phase],
        plan: RoundPlan,
        kept: Stacks,
        factor: float,
        private: PrivateRound | None,
        losses: Tensor | None = None,
    ) -> Cohort:
        seed = self.settings.seed
        sending = Broadcast(self.global_state, self.slot, plan.round, plan.clients, self.num_clients, seed, losses)
        return Cohort(
            self.engine,
            algorithm,
            self.slot,
            plan,
            phases,
            kept,
            algorithm.broadcast(sending),
            self.settings.training,
            factor=factor,
            seed=seed,
            clients_per_chunk=self.settings.clients_per_chunk,
            private=private,
            scales=self.scales.open("clients", len(plan.clients), self._device),
        )

    def members(self) -> State:
        """The global models (K, ...) whose outputs are averaged; usually one."""
        return self.settings.algorithm.members(self.global_state, self.server_state)

    def close(
        self, cohort: Cohort, data: FederationData, progress: Callable[[Tensor], Iterable[Tensor]] = iter
    ) -> RoundReport:
        """End a round: clients store what they keep, the server aggregates what the finite ones sent and distils.

        Args:
            cohort: The round's clients after their last local step.
            data: For the clients' sizes and the public images.
            progress: Wraps the distillation's steps in a progress bar.
        """
        plan = cohort.plan
        protection = self.settings.protection
        kept, updates, finite, counts = cohort.close()
        protection.spend(plan)
        self.scales.close("clients", cohort.scales, finite, self.ranks)
        good = finite.nonzero().flatten()
        clients = [plan.clients[index] for index in good.tolist()]
        metrics = round_metrics(self.settings, self.slot, self.global_state, cohort, updates, good)
        broken = [client for client in plan.clients if client not in clients]
        if clients:
            self.store.scatter(clients, _rows(kept, good))
        self.rounds_done = plan.round + 1
        diverged = broken_server = False
        good = counts.nonzero().flatten()
        clients = [plan.clients[index] for index in good.tolist()]
        if protection.clients is not None:  # all are counted, since who broke depends on their images
            updates = protection.clients.apply(updates, cohort.received, plan.round, plan.clients)
            clients, good = list(plan.clients), torch.arange(len(plan.clients), device=good.device)
        if clients:
            weights = client_weights(self.settings.weighting, [data.train_sizes[client] for client in clients])

            def distill(student: State, teachers: State, average_from: float | None = None) -> State:
                nonlocal diverged
                options, multilabel = self.settings.distillation, self.settings.training.multilabel
                parameters, scales = self.slot.parameters, self.scales.open("student", 1, self._device)
                refined = refine(
                    self.engine,
                    options,
                    data,
                    plan.round,
                    student,
                    teachers,
                    parameters,
                    multilabel=multilabel,
                    average_from=average_from,
                    progress=progress,
                    scales=scales,
                )
                if scales is not None:
                    self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
                    skipped = metrics.get("server/skipped_steps", 0.0) + float(scales.skipped)
                    metrics["server/skipped_steps"] = skipped
                finite = all(bool(value.isfinite().all()) for value in refined.values())
                diverged |= not finite
                return refined if finite else student

            server = ServerStep(
                plan.round,
                tuple(clients),
                self.num_clients,
                self.slot,
                self.settings.seed,
                self.global_state,
                {key: value[good] for key, value in updates.items()},
                weights,
                dict(self.server_state),
                self.settings.rule,
                distill,
            )
            state = clone(self.settings.algorithm.server_step(server))
            if protection.clients is not None:
                state = floor_variances(state)
            if all(bool(value.isfinite().all()) for value in state.values()):
                self.global_state, self.server_state = self.global_state | state, server.state
            else:
                broken_server = True
        return RoundReport(broken, diverged, broken_server, metrics | protection.metrics())

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
        tuning = self.settings.algorithm.finetuning()
        assert tuning is not None
        algorithm, phase = tuning
        self.tuned = self._tuned_store(algorithm)
        broken = []
        for plan in groups:
            protection = self.settings.protection
            private = protection.open(plan, self._device, tuning=True)
            cohort = self._cohort(algorithm, [phase], plan, self.tuned.gather(plan.clients), factor, private)
            for batch in loader(plan):
                cohort.step(batch)
            kept, _, finite, _ = cohort.close()
            protection.spend(plan, tuning=True)
            good = finite.nonzero().flatten()
            self.tuned.scatter([plan.clients[index] for index in good.tolist()], _rows(kept, good))
            broken += [client for client, fine in zip(plan.clients, finite.tolist(), strict=True) if not fine]
        return broken

    def _tuned_store(self, algorithm: Algorithm) -> ClientStore:
        storage = replace(self.settings.storage, clients=self.num_clients)
        return storage.open(algorithm.kept(self.global_state, self.slot), "tuned")

    def personal_states(self, clients: Sequence[int]) -> State:
        """The states (C, ...) that ``clients`` predict with."""
        tuning = self.settings.algorithm.finetuning()
        if tuning and self.tuned is not None:
            return tuning[0].personal(self.tuned.gather(clients), self.global_state)
        if self.settings.algorithm.inference == "global":
            return expand(self.global_state, len(clients))
        return self.settings.algorithm.personal(self.store.gather(clients), self.global_state)

    def owned(self) -> list[int]:
        """The clients whose personal states this process holds, in order; each client has one owner."""
        return list(range(self.ranks.rank, self.num_clients, self.ranks.size))

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
            tuning = self.settings.algorithm.finetuning()
            assert tuning is not None
            self.tuned = self._tuned_store(tuning[0])
            self.tuned.load_state_dict(saved["tuned"])
        self.rounds_done = saved["rounds_done"]
        self.scales.load_state_dict(saved.get("loss_scales", {}))


def _rows(stacks: Stacks, rows: Tensor) -> Stacks:
    return {role: {key: value[rows] for key, value in state.items()} for role, state in stacks.items()}
