# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and the communication rounds that change them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Stacks, TensorNames
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan, Shares, one_of
from perada.core.states import State, cut_ranks, expand, prefix, stack
from perada.engine.engine import Engine, losses_of_members
from perada.federation.chunk import LocalRound
from perada.federation.cohort import ClientResults, Cohort
from perada.federation.diagnostics import DiagnosticsPass, gradient_norms
from perada.federation.local_trainer import LocalTrainer
from perada.federation.participation import Participation
from perada.federation.server import (
    Progress,
    RoundContext,
    RoundReport,
    Server,
    megabytes_of_clients,
    parameter_counts,
)
from perada.federation.settings import FederationData, Loader, Settings
from perada.federation.shared_store import SharedStore
from perada.privacy.protection import Protection
from perada.server import Updates
from perada.server.aggregate import UpdateSums


class Federation:
    """One server and M clients.

    Args:
        engine: Engine that runs the states of several clients through the network.
        tensor_names: Names of the states' tensors.
        initial: Function that returns the k-th random initial state; with a single global model, k is 0.
        settings: Options of the run.
        num_clients: Number M of clients.
        ranks: The processes among which the clients are divided; by default a single one.
        protection: Privacy of the clients' images; by default none.

    Attributes:
        trainer: Trainer of this rank's clients.
        server: The server.
        store: States that clients keep between rounds.
        tuned: States that clients keep of the fine-tuning after the last round; None before.
        rounds_done: Number of completed rounds.
        last_rounds: The last round of each client, counted from 1; 0 for a client that never took part.
        cohort: This rank's clients in the current round; None between rounds.
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
        self.trainer = LocalTrainer(engine, tensor_names, settings, protection)
        self.engine = engine
        self.tensor_names = tensor_names
        self.settings = settings
        self.protection = self.trainer.protection
        self.num_clients = num_clients
        self.ranks = ranks or Ranks()
        self.server = Server(self.trainer, initial, self.ranks)
        self.store = self._make_store(settings.algorithm)
        self.tuned: SharedStore | None = None
        self.rounds_done = 0
        self.last_rounds = [0] * num_clients
        self.cohort: Cohort | None = None
        # These belong to the current round.
        self._shares = Shares.of(RoundPlan(0, (), ()))
        self._gradient_norms: dict[str, float] = {}

    @property
    def global_state(self) -> State:
        """The global state w, or a stack of several."""
        return self.server.global_state

    def _make_store(self, algorithm: Algorithm, tuned: bool = False) -> SharedStore:
        """Create a store for the states that an algorithm's clients keep."""
        storage = self.settings.storage
        name = ""
        if tuned:
            # All clients are fine-tuned, but fewer may take part in rounds.
            storage = replace(storage, num_clients=self.num_clients)
            name = "tuned"
        initial = algorithm.initial_client_state(self.global_state, self.tensor_names)
        return SharedStore(storage.open(initial, name), self.ranks)

    def begin_round(
        self,
        shares: Shares,
        factor: float = 1.0,
        loader: Loader | None = None,
        train_sizes: Sequence[int] | None = None,
    ) -> Cohort:
        """Start a round: gather the states that its clients kept, and send them the global state. A collective.

        Args:
            shares: The round's clients and the ranks that train them.
            factor: Factor of the clients' learning rates.
            loader: Loads their training images, if they compare the global models or full gradients are measured.
            train_sizes: Numbers of training images of all clients. With them, updates are added up as soon as clients
                finish if the server needs only their mean. None to keep all updates until the end of the round.

        Returns:
            The clients that this rank trains, or a stand-in for a rank without clients.
        """
        settings = self.settings
        self._shares = shares
        # States that were fine-tuned from an earlier global state are outdated.
        self.tuned = None
        self.store.bring(shares.parts)
        cohort_plan = shares.cohort_plan
        losses: Tensor | None = None
        if loader and settings.algorithm.compares_models:
            losses = self._compare_models(cohort_plan, loader)
        # The costs are counted before any training, since an interrupted round has spent its budget too.
        self.protection.spend(shares.plan, self.ranks)
        received = self.server.broadcast(cohort_plan, self.num_clients, losses)
        client_state = self.store.local.gather(cohort_plan.clients)
        update_sums: UpdateSums | None = None
        if train_sizes is not None:
            update_sums = self.server.sums(shares, train_sizes)
        local_round = LocalRound.begin(self.trainer, cohort_plan, client_state, received, factor=factor)
        self.cohort = Cohort(local_round, update_sums)
        if loader and "gradient_norms" in settings.diagnostics:
            # Models also have the names that are not sent.
            models = expand(self.global_state, len(cohort_plan.clients)) | received
            batches = map(one_of, loader(cohort_plan))
            self._gradient_norms = gradient_norms(
                self.cohort.local_round, models, settings, batches, shares, self.ranks
            )
        return self.cohort

    def _compare_models(self, plan: RoundPlan, loader: Loader) -> Tensor:
        """Compute the losses (C, K) of the K global models on the training images of a plan's clients."""
        batches = map(one_of, loader(plan))
        task = self.settings.training.task
        return losses_of_members(self.engine, self.server.members(), batches, len(plan.clients), task)

    def end_round(self, federation_data: FederationData, steps: Loader, progress: Progress = iter) -> RoundReport:
        """End the round: store the clients' states, aggregate the finite updates, and distil. A collective.

        Args:
            federation_data: Numbers of training images, public images, and the server's validation set.
            steps: Loads the batches of a plan again, in case that the network began to draw from a global random
                stream while threads trained side by side.
            progress: Wraps the steps of the distillation in a progress bar.
        """
        cohort = self.cohort
        assert cohort is not None
        self.cohort = None
        shares = self._shares
        if cohort.drew_side_by_side():
            new_sums = None if cohort.sums is None else self.server.sums(shares, federation_data.train_sizes)
            cohort = cohort.trained_again(steps(shares.local_plan), new_sums)
        local_round = cohort.local_round
        plan = shares.plan
        places = shares.places
        results = cohort.finish(shares, self.ranks)
        # A rank without clients trained a stand-in, whose loss scale and rows are left out.
        is_client = torch.arange(len(results.finite_here), device=results.finite_here.device) < len(places)
        self.trainer.scales.close("clients", local_round.scales, results.finite_here & is_client, self.ranks)
        received = Updates(prefix(local_round.received, len(places)), places, len(plan.clients), self.ranks)
        updates: Updates | UpdateSums
        if cohort.sums is None:
            updates = received.replace(prefix(results.sent, len(places)))
            sent_by_one = {name: value[0] for name, value in results.sent.items()}
        else:
            updates = cohort.sums
            sent_by_one = cohort.sums.example
        metrics = self._round_metrics(local_round.opened, local_round.received, sent_by_one, results)
        self.store.scatter(shares.parts, results.broken_clients, results.client_state)
        self._note_participation(plan, results.broken_clients)

        context = RoundContext(
            plan=plan,
            received=received,
            train_sizes=federation_data.train_sizes,
            server_data=federation_data,
            level=self.protection.client_level,
            progress=progress,
        )
        valid = results.accepted.nonzero().flatten().tolist()
        server = self.server.aggregate(context, updates, valid)
        metrics |= server.metrics
        if server.updates is not None and self.settings.diagnostics:
            metrics |= self._measure_diagnostics(server.updates, federation_data, server.student)
        metrics |= self._gradient_norms | self.protection.metrics()
        # Whose training fails depends on the images, so a private run logs no number of failures.
        if results.broken_clients and not self.settings.private:
            metrics |= {"clients/drawn": len(plan.clients), "clients/failed": len(results.broken_clients)}
        return RoundReport(
            server_result=server, broken_clients=results.broken_clients, failed=results.failed, metrics=metrics
        )

    def _note_participation(self, plan: RoundPlan, broken_clients: Sequence[int]) -> None:
        """Count a round, and record which clients took part.

        Args:
            plan: The plan of the round.
            broken_clients: Clients whose training failed. In a private run they are recorded too: which ones these are
                depends on the images, and no ledger accounts for that.
        """
        self.rounds_done = plan.round + 1
        for client in plan.clients:
            if self.settings.private or client not in broken_clients:
                self.last_rounds[client] = self.rounds_done

    def _round_metrics(
        self, opened: Stacks, received: State, sent_by_one: State, client_results: ClientResults
    ) -> dict[str, float]:
        """Compute training losses, numbers of parameters, and megabytes that all clients send and receive."""
        settings = self.settings
        algorithm = settings.algorithm
        plan = self._shares.plan
        clients = len(plan.clients)
        ranks = self.server.ranks_of(plan.clients)
        metrics = parameter_counts(
            algorithm, settings.phases, self.tensor_names, plan.round, opened, sent_by_one, ranks
        )
        metrics["comm/up_mb"] = megabytes_of_clients(sent_by_one, self.tensor_names, ranks, clients)
        metrics["comm/down_mb"] = 0.0
        if algorithm.sends_updates:
            received_by_one = {name: value[0] for name, value in received.items()}
            if algorithm.compares_models:
                # Every client receives all global models, and chooses one.
                received_by_one = self.global_state
            metrics["comm/down_mb"] = megabytes_of_clients(received_by_one, self.tensor_names, ranks, clients)
        if client_results.skipped is not None:
            metrics["train/skipped_steps"] = float(client_results.skipped.sum())
        # No ledger accounts for losses.
        if settings.client_privacy is None:
            for role, losses in client_results.losses.items():
                metrics[f"train/{role}_loss"] = float(losses[client_results.finite].mean())
        return metrics

    def _measure_diagnostics(
        self, updates: Updates, federation_data: FederationData, student: State | None
    ) -> dict[str, float]:
        """Measure the round's diagnostics, without those of gradients.

        Args:
            updates: The aggregated updates.
            federation_data: Public and test images.
            student: State before the distillation; None if nothing was distilled.
        """
        shares = self._shares
        models = [self.global_state]
        if student is not None:
            models = [student, self.global_state]
        personal: State = {}
        places: list[int] = []
        if "personal_distance" in self.settings.diagnostics and shares.local_plan.clients:
            personal = self.personal_states(shares.local_plan.clients)
            places = shares.places
        diagnostics = DiagnosticsPass(
            engine=self.engine,
            federation_data=federation_data,
            updates=updates.completed(self.global_state),
            globals=stack(models),
            personal=personal,
            places=places,
            num_clients=len(shares.plan.clients),
            task=self.settings.training.task,
        )
        return diagnostics.measure(self.settings.diagnostics)

    def personalize(
        self, plans: Iterable[RoundPlan], loader: Loader, factor: float = 1.0
    ) -> tuple[list[int], dict[int, str]]:
        """Fine-tune the final global state for every client separately, as the algorithm requires. A collective.

        Args:
            plans: Plans of clients that train together; every client is in exactly one.
            loader: Loads their training images.
            factor: Factor of their learning rates.

        Returns:
            The clients whose training failed, which keep the global state, and the clients of whom a sample could not
            be read, with the reason.
        """
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        algorithm, _ = tuning
        self.tuned = self._make_store(algorithm, tuned=True)
        broken_clients: list[int] = []
        failed: dict[int, str] = {}
        for plan in plans:
            shares = Shares.of(plan, self.ranks.size, self.ranks.rank)
            self.protection.spend(plan, self.ranks, tuning=True)
            cohort_plan = shares.cohort_plan
            received = self.server.broadcast(cohort_plan, self.num_clients, algorithm=algorithm)
            client_state = self.tuned.local.gather(cohort_plan.clients)
            cohort = Cohort(
                LocalRound.begin(self.trainer, cohort_plan, client_state, received, factor=factor, tuning=True)
            )
            for batch in loader(shares.local_plan):
                cohort.step(batch)
            if cohort.drew_side_by_side():
                cohort = cohort.trained_again(loader(shares.local_plan), None)
            results = cohort.finish(shares, self.ranks)
            self.tuned.scatter(shares.parts, results.broken_clients, results.client_state)
            broken_clients += results.broken_clients
            failed |= results.failed
        return broken_clients, failed

    def personal_states(self, clients: Sequence[int]) -> State:
        """Return the states (C, ...) that ``clients`` predict with."""
        algorithm = self.settings.algorithm
        tuning = algorithm.personalization()
        if tuning and self.tuned is not None:
            tuned_algorithm, _ = tuning
            states = tuned_algorithm.personal(self.tuned.gather(clients), self.global_state)
        elif algorithm.inference == "global":
            states = expand(self.global_state, len(clients))
        else:
            states = algorithm.personal(self.store.gather(clients), self.global_state)
        ranks = self.server.ranks_of(clients)
        if ranks:
            states = cut_ranks(states, self.tensor_names.factors, torch.tensor(ranks))
        return states

    def owned(self) -> list[int]:
        """Return the clients whose personal states this process holds, in order; each client has one owner."""
        store = self.store if self.tuned is None else self.tuned
        return [client for client in range(self.num_clients) if store.holder(client) == self.ranks.rank]

    def collect(self) -> None:
        """Move all clients' states to rank 0. A collective."""
        self.store.collect()
        if self.tuned is not None:
            self.tuned.collect()

    @property
    def personalized(self) -> bool:
        """Whether clients now predict with personal states."""
        return self.settings.algorithm.inference == "personal" or self.tuned is not None or bool(self.server.lora_ranks)

    @property
    def participation(self) -> Participation:
        """The last round of each client, and statistics derived from it."""
        return Participation(self.last_rounds, self.rounds_done, self.settings.clients_per_round)

    @property
    def keeps_personal_models(self) -> bool:
        """Whether clients predict with models that change only in rounds in which they take part."""
        return self.settings.algorithm.inference == "personal" and self.tuned is None

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, in types that ``torch.load(weights_only=True)`` accepts."""
        return {
            **self.server.state_dict(),
            "clients": self.store.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
            "rounds_done": self.rounds_done,
            "last_rounds": list(self.last_rounds),
            "loss_scales": self.trainer.scales.state_dict(),
            "privacy": self.protection.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from the state ``saved`` of an earlier federation."""
        self.rounds_done = saved["rounds_done"]
        self.protection.load_state_dict(saved.get("privacy"), self.rounds_done, saved["tuned"] is not None)
        self.server.load_state_dict(saved)
        # Numbers of the former clients, if a run resumes with more clients.
        numbers = saved.get("numbers")
        self.last_rounds = [0] * self.num_clients
        for former_client, last_round in enumerate(saved["last_rounds"]):
            client = former_client if numbers is None else numbers[former_client]
            self.last_rounds[client] = last_round
        if numbers is None:
            self.store.load_state_dict(saved["clients"])
        else:
            new_clients = sorted(set(range(self.num_clients)) - set(numbers))
            client_state = self.settings.algorithm.initial_client_state(self.global_state, self.tensor_names)
            self.store.grow(saved["clients"], numbers, new_clients, client_state)
        self.tuned = None
        if saved["tuned"] is not None:
            self.tuned = self._load_tuned(saved["tuned"])
        self.trainer.scales.load_state_dict(saved.get("loss_scales", {}))

    def _load_tuned(self, saved: dict[str, Any]) -> SharedStore:
        """Load the states that were fine-tuned after the last round.

        Raises:
            ValueError: If the algorithm does not fine-tune.
        """
        tuning = self.settings.algorithm.personalization()
        if tuning is None:
            raise ValueError(
                f"the checkpoint holds states fine-tuned after the last round, but {self.settings.algorithm.kind} "
                "does no fine-tuning; resume with the configuration that wrote it"
            )
        algorithm, _ = tuning
        tuned = self._make_store(algorithm, tuned=True)
        tuned.load_state_dict(saved)
        return tuned
