# SPDX-License-Identifier: Apache-2.0
"""The states of the server and of all clients, and what one communication round does to them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from perada.algorithms import Algorithm, ServerStep, Slot, Stacks
from perada.cohort import Cohort, LocalTraining
from perada.engine import Engine
from perada.rounds import CohortBatch, Phase, RoundPlan
from perada.server import Distillation, client_weights, ensemble_logits, mean
from perada.server.aggregate import Weighting
from perada.states import State, clone, expand, megabytes, numel
from perada.store import ClientStore


class FederationData(Protocol):
    """What a round needs of the data (:class:`perada.data.FederatedDataModule` has it)."""

    train_sizes: tuple[int, ...]

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Positions in the public set (steps, B)."""

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Prepared public images (len(indices), channels, height, width)."""

    def validation_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Prepared images and labels of the server's validation set."""


@dataclass(frozen=True)
class Settings:
    """How the rounds go.

    Attributes:
        algorithm: The algorithm.
        training: The clients' optimiser and loss.
        distillation: How the server distils, where the algorithm does.
        weighting: Aggregation weights.
        phases: The phases of local training.
        seed: The run's seed.
        clients_per_chunk: Clients in one forward and backward pass; ``None``: all of the round's.
    """

    algorithm: Algorithm
    training: LocalTraining
    distillation: Distillation
    weighting: Weighting
    phases: tuple[Phase, ...]
    seed: int
    clients_per_chunk: int | None = None


@dataclass
class RoundReport:
    """What a round did.

    Attributes:
        broken: Clients whose training became NaN or infinite and who were left out.
        diverged: The distillation became NaN or infinite, and its starting point was kept.
        metrics: Training losses, numbers of parameters, megabytes sent.
    """

    broken: list[int] = field(default_factory=list)
    diverged: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class Federation:
    """One server and M clients.

    Args:
        engine: Runs states through the one model.
        slot: Names of the trained tensors.
        initial: The state everyone starts from.
        settings: How the rounds go.
    """

    def __init__(self, engine: Engine, slot: Slot, initial: State, settings: Settings) -> None:
        self.engine, self.slot, self.settings = engine, slot, settings
        self.global_state = initial
        self.server_state: dict[str, State] = {}
        self.store = ClientStore(settings.algorithm.kept(initial, slot))
        self.tuned: ClientStore | None = None
        self.rounds_done = 0

    def open(self, plan: RoundPlan, factor: float = 1.0) -> Cohort:
        """Start a round: gather what its clients kept, and send them the global state.

        Args:
            plan: The round's clients and their numbers of local steps.
            factor: Factor of the clients' learning rates.
        """
        self.tuned = None  # what was fine-tuned from an earlier global state is outdated
        return self._cohort(
            self.settings.algorithm, self.settings.phases, plan, self.store.gather(plan.clients), factor
        )

    def _cohort(
        self, algorithm: Algorithm, phases: Sequence[Phase], plan: RoundPlan, kept: Stacks, factor: float
    ) -> Cohort:
        return Cohort(
            self.engine,
            algorithm,
            self.slot,
            plan,
            phases,
            kept,
            algorithm.broadcast(self.global_state, plan.round, plan.clients),
            self.settings.training,
            factor=factor,
            seed=self.settings.seed,
            clients_per_chunk=self.settings.clients_per_chunk,
        )

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
        kept, updates, finite = cohort.close()
        good = finite.nonzero().flatten()
        clients = [plan.clients[index] for index in good.tolist()]
        self.rounds_done = plan.round + 1
        diverged = False
        if clients:
            self.store.scatter(clients, _rows(kept, good))
            weights = client_weights(self.settings.weighting, [data.train_sizes[client] for client in clients])

            def distill(student: State, teachers: State) -> State:
                nonlocal diverged
                refined = self._distill(plan.round, data, student, teachers, progress)
                diverged = not all(bool(value.isfinite().all()) for value in refined.values())
                return student if diverged else refined

            server = ServerStep(
                plan.round,
                tuple(clients),
                len(data.train_sizes),
                self.global_state,
                {key: value[good] for key, value in updates.items()},
                weights,
                self.server_state,
                mean,
                distill,
            )
            self.global_state = clone(self.settings.algorithm.server_step(server))
            self.server_state = server.state
        broken = [client for client in plan.clients if client not in clients]
        return RoundReport(broken, diverged, self._metrics(cohort, updates, good))

    def _distill(
        self,
        round: int,
        data: FederationData,
        student: State,
        teachers: State,
        progress: Callable[[Tensor], Iterable[Tensor]],
    ) -> State:
        """Distil the ensemble of ``teachers`` into ``student``; each public image passes the teachers once."""
        options, engine, device = self.settings.distillation, self.engine, next(iter(student.values())).device
        if not options.active(round):
            return student

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            indices = data.public_indices(round, options.steps, options.batch_size)
            used, positions = torch.unique(indices, return_inverse=True)
            logits = torch.cat(
                [ensemble_logits(engine, teachers, data.public_images(part, device)) for part in used.split(256)]
            )
            for step, rows in enumerate(progress(indices)):
                yield data.public_images(rows, device), logits[positions[step].to(device)]

        def accuracy(state: State) -> float:
            right = total = 0
            for x, y in data.validation_batches(device):
                logits = engine.shared_logits(expand(state, 1), x)[0]
                hits = (logits > 0) == y.bool() if y.dim() > 1 else logits.argmax(-1) == y
                right, total = right + int(hits.sum()), total + hits.numel()
            return right / total

        with torch.enable_grad():
            return options.run(
                engine,
                student,
                self.slot.parameters,
                batches(),
                multilabel=self.settings.training.multilabel,
                validate=accuracy if options.validate_every else None,
            )

    def finetune(
        self,
        groups: Iterable[RoundPlan],
        loader: Callable[[RoundPlan], Iterable[CohortBatch]],
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
        self.tuned = ClientStore(algorithm.kept(self.global_state, self.slot))
        broken = []
        for plan in groups:
            cohort = self._cohort(algorithm, [phase], plan, self.tuned.gather(plan.clients), factor)
            for batch in loader(plan):
                cohort.step(batch)
            kept, _, finite = cohort.close()
            good = finite.nonzero().flatten()
            self.tuned.scatter([plan.clients[index] for index in good.tolist()], _rows(kept, good))
            broken += [client for client, fine in zip(plan.clients, finite.tolist(), strict=True) if not fine]
        return broken

    def personal_states(self, clients: Sequence[int]) -> State:
        """The states (C, ...) that ``clients`` predict with."""
        tuning = self.settings.algorithm.finetuning()
        if tuning and self.tuned is not None:
            return tuning[0].personal(self.tuned.gather(clients), self.global_state)
        if self.settings.algorithm.inference == "global":
            return expand(self.global_state, len(clients))
        return self.settings.algorithm.personal(self.store.gather(clients), self.global_state)

    @property
    def finetuned(self) -> bool:
        """Whether clients have fine-tuned the global state as it now is."""
        return self.tuned is not None

    @property
    def personalized(self) -> bool:
        """Whether clients predict with states of their own by now."""
        return self.settings.algorithm.inference == "personal" or self.finetuned

    def logits(self, x: Tensor, clients: int, group: int = 32) -> tuple[Tensor, Tensor | None]:
        """Logits of the clients' models and of the global one on the same images.

        Args:
            x: Images (B, channels, height, width).
            clients: Number of clients M.
            group: Clients whose states are gathered at once.

        Returns:
            (M, B, K), or (1, B, K) where all clients predict with the global state; and (1, B, K), or ``None`` where
            there is no global model.
        """
        shared = None
        if self.settings.algorithm.sends:
            shared = self.engine.shared_logits(expand(self.global_state, 1), x)
        if not self.personalized and shared is not None:
            return shared, shared
        groups = [range(start, min(start + group, clients)) for start in range(0, clients, group)]
        return torch.cat([self.engine.shared_logits(self.personal_states(part), x) for part in groups]), shared

    def _metrics(self, cohort: Cohort, updates: State, good: Tensor) -> dict[str, float]:
        """Training loss, and what one client trains and all of them send."""
        algorithm, settings = self.settings.algorithm, self.settings
        full = cohort.chunks[0].full
        received = sum(megabytes(chunk.received) for chunk in cohort.chunks)
        names = {
            (role, name)
            for role in full
            for phase in settings.phases
            for name in algorithm.trained(role, phase.name, self.slot)
        }
        sent = {key: value[0] for key, value in updates.items()}
        metrics = {
            "params/trained": float(sum(full[role][name][0].numel() for role, name in names)),
            "params/sent": float(numel({key: value for key, value in sent.items() if key in self.slot.parameters})),
            "comm/up_mb": megabytes(updates),
            "comm/down_mb": received if algorithm.sends else 0.0,
        }
        for role, losses in cohort.mean_losses().items():
            metrics[f"train/{role}_loss"] = float(losses[good].mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All that a later session needs to go on, in types that ``torch.load(weights_only=True)`` takes."""
        return {
            "global": self.global_state,
            "server": self.server_state,
            "clients": self.store.state_dict(),
            "tuned": None if self.tuned is None else self.tuned.state_dict(),
            "rounds_done": self.rounds_done,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of the federation that wrote ``saved``."""
        device = next(iter(self.global_state.values())).device
        self.global_state = _to(saved["global"], device)
        self.server_state = {name: _to(state, device) for name, state in saved["server"].items()}
        self.store.load_state_dict(saved["clients"], device)
        self.tuned = None
        if saved["tuned"] is not None:
            tuning = self.settings.algorithm.finetuning()
            assert tuning is not None
            self.tuned = ClientStore(tuning[0].kept(self.global_state, self.slot))
            self.tuned.load_state_dict(saved["tuned"], device)
        self.rounds_done = saved["rounds_done"]


def _rows(stacks: Stacks, rows: Tensor) -> Stacks:
    return {role: {key: value[rows] for key, value in state.items()} for role, state in stacks.items()}


def _to(state: State, device: torch.device) -> State:
    return {key: value.to(device) for key, value in state.items()}
