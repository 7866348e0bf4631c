# SPDX-License-Identifier: Apache-2.0
"""The server's half of a round: it sends the clients their states, and computes the next global state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.algorithms.dry_run import is_foreign
from perada.core.ranks import Ranks
from perada.core.rounds import Phase, RoundPlan, Shares
from perada.core.states import (
    State,
    clone,
    device_of,
    expand,
    is_finite,
    rank_axes,
    select,
    stack_size,
    to_device,
)
from perada.federation.local_trainer import LocalTrainer
from perada.federation.outliers import find_outliers, outliers_of_norms
from perada.privacy.client_level import ClientLevel, floor_variances
from perada.privacy.client_sums import VOTE
from perada.scores.accumulation import probabilities
from perada.server import Updates, client_weights
from perada.server.aggregate import UpdateSums, Weighting
from perada.server.distill import DistillationRound, Distiller, SecureTeachers, ServerData
from perada.server.low_rank import lora_residual

Progress = Callable[[Tensor], Iterable[Tensor]]
"""Wraps the steps of a distillation in a progress bar."""

PREDICTION_BATCH = 256
"""Number of the server's images in one forward pass, for rules that use predictions."""


@dataclass(frozen=True)
class RoundContext:
    """Everything that the server has for a round in addition to the updates.

    Attributes:
        plan: The round's clients and their steps.
        received: States (C, ...) that the clients received, divided among the ranks like the updates.
        train_sizes: Numbers of training images of all clients of the federation, for weights.
        server_data: Public images and the server's validation set.
        level: Account of the client-level privacy; None without it.
        progress: Wraps the steps of the distillation in a progress bar.
        logit_sum: Sum of the clients' logits, if the sites of a deployment have made a secure sum; empty in a round
            without distillation. Every row of the updates is then the mean over the sites or, with a ``level``, the
            mean of their noisy changes.
    """

    plan: RoundPlan
    received: Updates
    train_sizes: Sequence[int]
    server_data: ServerData
    level: ClientLevel | None = None
    progress: Progress = iter
    logit_sum: Tensor | None = None

    @property
    def summed_by_sites(self) -> bool:
        """Whether the updates come from a secure sum."""
        return self.logit_sum is not None


@dataclass(frozen=True)
class ServerResult:
    """The server's results of a round.

    Attributes:
        updates: The updates that were aggregated; None if too few clients were left, so that the global state was kept.
        student: The state before the distillation; None if nothing was distilled.
        outliers: For each outlier, by client, its change's norm divided by the median norm.
        diverged: Whether the distillation became NaN or infinite, so that its starting point was kept.
        failed_teachers: As in :class:`perada.server.distill.DistillationReport`.
        discarded: Whether the new state was NaN or infinite, so that the global state was kept.
        metrics: Metrics of the round.
    """

    updates: Updates | None = None
    student: State | None = None
    outliers: dict[int, float] = field(default_factory=dict)
    diverged: bool = False
    failed_teachers: list[int | None] = field(default_factory=list)
    discarded: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundReport:
    """The results of a round, for logs and warnings.

    Attributes:
        server_result: Results of the server.
        broken_clients: Clients that were left out because their training became NaN or infinite.
        failed: Clients of whom a sample could not be read, with the reason; in a private run they train without it.
        metrics: Training losses, numbers of parameters, megabytes sent, and what the server measured.
    """

    server_result: ServerResult
    broken_clients: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Server:
    """The server's states and its side of a round. It sees what clients send, never what they keep.

    Attributes:
        global_state: The state w, or a stack of several.
        server_state: Tensors that the algorithm and the server rule keep between rounds, ``{name: state}``.
        lora_ranks: LoRA rank of each client; empty if all have the adapter's rank.

    Args:
        trainer: Trainer whose network, settings and loss scales the server shares.
        initial: Function that returns the k-th random initial state; with a single global model, k is 0.
        ranks: The processes among which clients are divided.
    """

    def __init__(self, trainer: LocalTrainer, initial: Callable[[int], State], ranks: Ranks | None = None) -> None:
        self.engine = trainer.engine
        self.tensor_names = trainer.tensor_names
        self.settings = trainer.settings
        self.scales = trainer.scales
        self.ranks = ranks or Ranks()
        self.global_state = self.settings.algorithm.initial(initial)
        # A custom network may be initialised differently in each process; all start from that of rank 0.
        self.ranks.broadcast_(self.global_state.values())
        self.server_state: dict[str, State] = {}
        self.lora_ranks = self.settings.lora_ranks

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return device_of(self.global_state)

    def broadcast(
        self, plan: RoundPlan, num_clients: int, losses: Tensor | None = None, algorithm: Algorithm | None = None
    ) -> State:
        """Return the states (C, ...) that a plan's C clients receive.

        Args:
            plan: The round's clients.
            num_clients: Number of all clients of the federation.
            losses: Losses (C, K) of K global models on the clients' images, if clients compare them.
            algorithm: Algorithm to use instead of the run's, such as that of the fine-tuning after the last round.
        """
        algorithm = algorithm or self.settings.algorithm
        return algorithm.broadcast(
            Broadcast(
                global_state=self.global_state,
                tensor_names=self.tensor_names,
                round=plan.round,
                clients=plan.clients,
                num_clients=num_clients,
                seed=self.settings.seed,
                losses=losses,
                state=self.server_state,
                lora_ranks=self.ranks_of(plan.clients),
            )
        )

    def ranks_of(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Return the LoRA ranks of some clients; empty if they have the adapter's rank."""
        if not self.lora_ranks:
            return ()
        return tuple(self.lora_ranks[client] for client in clients)

    def members(self) -> State:
        """Return the global models (K, ...) whose outputs are averaged; usually one."""
        return self.settings.algorithm.members(self.global_state, self.server_state)

    @property
    def needs_only_mean(self) -> bool:
        """Whether no option of the run requires single updates, so that only their sum must be kept."""
        settings = self.settings
        algorithm = settings.algorithm
        if settings.secure_sums is not None or settings.client_privacy is not None:
            # Both process each client's update before it is aggregated.
            return False
        if settings.drop_outliers or settings.diagnostics or settings.lora_ranks:
            return False
        if algorithm.uses_distillation and settings.distillation.steps > 0:
            # The teachers are the clients' models.
            return False
        if is_foreign(settings.rule) or not settings.rule.function_of_mean:
            # A custom rule may have inherited function_of_mean from one of perada's.
            return False
        return algorithm.sends_updates and algorithm.mean_is_enough

    def sums(self, shares: Shares, train_sizes: Sequence[int]) -> UpdateSums | None:
        """Return an accumulator for the updates of a round's clients, or None if single updates are needed.

        Args:
            shares: The round's clients and the ranks that train them.
            train_sizes: Numbers of training images of all clients of the federation.
        """
        if not self.needs_only_mean:
            return None
        weights = self._weights_of_plan(shares.plan, train_sizes)
        return UpdateSums(weights, shares.places, self.tensor_names.parameters, self.ranks)

    def aggregate(self, context: RoundContext, updates: Updates | UpdateSums, valid: Sequence[int]) -> ServerResult:
        """Compute the next global state from the updates of a round, and keep it if it is finite. A collective.

        Args:
            context: Facts about the round.
            updates: Updates of the plan's clients, or their sums.
            valid: Places in the plan of the clients whose update is finite. With client-level privacy all are accepted.

        Returns:
            The aggregated updates and metrics.
        """
        algorithm = self.settings.algorithm
        plan = context.plan
        accepted = self._choose_accepted_clients(context, updates, valid)
        if len(accepted.places) < self._required_clients(context):
            return ServerResult(outliers=accepted.outliers, metrics=accepted.metrics)
        teachers = self._accepted_updates(context, updates, accepted.places)

        # With secure sums or client-level privacy, no row of `visible` is the update of a single client. Everything
        # below sees only this, except for the distiller, which then runs the teachers inside a secure sum of logits.
        visible = self._visible_updates(context, teachers, accepted.places)
        distiller = self._make_distiller(context, teachers)
        accepted_clients = tuple(plan.clients[place] for place in accepted.places)
        step = self._server_step(context, visible, accepted_clients, distiller)
        # Tensors are cloned, since the algorithm may return some that it was given, such as those of an update.
        state = clone(algorithm.server_step(step))
        if context.level is not None:
            state = floor_variances(state)
        metrics = accepted.metrics | distiller.report.metrics | step.metrics
        if "lora_residual" in self.settings.diagnostics:
            models = visible.completed(step.previous) if algorithm.global_model else visible
            metrics["updates/lora_residual"] = lora_residual(self.tensor_names.factors, models, step.weights)
        finite = is_finite(state)
        if finite:
            self.global_state = self.global_state | state
            self.server_state = step.state
        if self.tensor_names.merged:
            # Clients trained with the merged weights from before the round, which complete their models.
            merged_weights = select(step.previous, self.tensor_names.merged)
            visible = visible.completed(merged_weights)
        return ServerResult(
            updates=visible,
            student=distiller.report.student,
            outliers=accepted.outliers,
            diverged=distiller.report.diverged,
            failed_teachers=distiller.report.failed_teachers,
            discarded=not finite,
            metrics=metrics,
        )

    def _accepted_updates(self, context: RoundContext, updates: Updates | UpdateSums, places: Sequence[int]) -> Updates:
        """Return the updates of the accepted clients, which are at ``places`` in the plan. A collective.

        With client-level privacy every row is the noisy mean; if only sums were kept, every row is the mean.
        """
        if isinstance(updates, UpdateSums):
            return updates.means(places)
        if context.level is not None:
            updates = self.privatized(context.level, updates, context)
        return updates.part(places)

    def _visible_updates(self, context: RoundContext, updates: Updates, places: Sequence[int]) -> Updates:
        """Return what the server sees of the updates: with secure sums, their mean in every row. A collective."""
        secure = self.settings.secure_sums
        # The noisy mean of client-level privacy, and a sum that sites have made, are no longer single updates.
        is_mean = context.level is not None or context.summed_by_sites
        if secure is None or is_mean:
            return updates
        shares = self._weights_of_plan(context.plan, context.train_sizes)
        return secure.rows(updates, [shares[place] for place in places])

    def privatized(self, level: ClientLevel, updates: Updates, context: RoundContext) -> Updates:
        """Replace every client's update by their noisy mean, which is all that the server sees."""
        plan = context.plan
        received = context.received.local_rows
        weights = client_weights("uniform", plan.clients)
        if level.sums is None:
            noisy = level.privatized(updates, received, plan.round, plan.clients)
            # Each row has only a share of the noise, so only the mean is returned.
            return updates.repeat(updates.replace(noisy).mean(weights))
        if context.summed_by_sites:
            # Every row is the mean of the sites' noisy changes.
            change = {name: value[0] for name, value in updates.local_rows.items() if value.is_floating_point()}
        else:
            change = level.mean_change(updates, received, plan.round, plan.clients)
        base = {name: received[name] for name in updates.names if name != VOTE}
        mean_before = updates.replace(base).mean(weights)
        return updates.repeat(level.apply_mean_change(mean_before, change, updates.num_clients))

    def _choose_accepted_clients(
        self, context: RoundContext, updates: Updates | UpdateSums, valid: Sequence[int]
    ) -> "_Accepted":
        """Choose the clients whose updates are aggregated. A collective.

        Args:
            context: Facts about the round.
            updates: Updates of the plan's clients, or their sums.
            valid: Places in the plan of the clients whose update is finite.
        """
        secure = self.settings.secure_sums
        plan = context.plan
        if isinstance(updates, UpdateSums):
            norms = updates.change_norms()[list(valid)]
            return _Accepted(places=valid, outliers=outliers_of_norms(norms, plan, valid))
        if context.level is not None:
            # All are accepted, since whose training broke depends on their images.
            return _Accepted(places=range(len(plan.clients)))
        if secure is not None:
            if not context.summed_by_sites:
                valid = secure.summable(updates, self._weights_of_plan(plan, context.train_sizes), valid)
            return _Accepted(places=valid)
        if not valid:
            return _Accepted(places=valid)
        outliers, metrics = find_outliers(
            self.tensor_names.parameters,
            updates.part(valid),
            context.received.part(valid).local_rows,
            plan,
            valid,
            with_metrics="update_norms" in self.settings.diagnostics,
        )
        if self.settings.drop_outliers:
            valid = [place for place in valid if plan.clients[place] not in outliers]
        return _Accepted(places=valid, outliers=outliers, metrics=metrics)

    def _required_clients(self, context: RoundContext) -> int:
        """Return how many clients must remain; with fewer, the global state is kept."""
        secure = self.settings.secure_sums
        # Sites that have made the sum themselves have checked their number.
        if secure is None or context.summed_by_sites:
            return 1
        return secure.least(len(context.plan.clients))

    def _weights_of_plan(self, plan: RoundPlan, train_sizes: Sequence[int]) -> list[float]:
        """Return the weights of a plan's clients, which need not sum to one."""
        if self.settings.weighting == "uniform":
            return [1.0] * len(plan.clients)
        return [float(train_sizes[client]) for client in plan.clients]

    def _make_distiller(self, context: RoundContext, teachers: Updates) -> Distiller:
        """Return the distiller of a round, which the algorithm's server step may call."""
        secure: SecureTeachers | None = None
        # An algorithm that builds its own teachers builds them from what the server sees.
        if self.settings.secure_sums is not None and not self.settings.algorithm.builds_teachers:
            secure = SecureTeachers(self.settings.secure_sums, teachers, context.logit_sum)
        return Distiller(
            engine=self.engine,
            distillation=self.settings.distillation,
            parameters=self.tensor_names.parameters,
            server_data=context.server_data,
            round=DistillationRound(
                index=context.plan.round,
                seed=self.settings.seed,
                progress=context.progress,
                secure=secure,
            ),
            task=self.settings.training.task,
            ranks=self.ranks,
            scales=self.scales,
        )

    def _server_step(
        self, context: RoundContext, updates: Updates, clients: tuple[int, ...], distiller: Distiller
    ) -> ServerStep:
        """Return the argument of the algorithm's server step.

        Args:
            context: Facts about the round.
            updates: What the server sees of the updates.
            clients: Ids of the clients that have sent them.
            distiller: Distiller of the round.
        """
        settings = self.settings
        weighting: Weighting = settings.weighting
        if settings.secure_sums:
            # The rows are a weighted mean already.
            weighting = "uniform"
        predict = None
        if settings.rule.needs:
            predict = partial(self._predict_images, context)
        return ServerStep(
            round=context.plan.round,
            clients=clients,
            num_clients=len(context.train_sizes),
            tensor_names=self.tensor_names,
            seed=settings.seed,
            previous=self.global_state,
            updates=updates,
            weights=client_weights(weighting, [context.train_sizes[client] for client in clients]),
            state=dict(self.server_state),
            rule=settings.rule,
            distiller=distiller,
            predict=predict,
        )

    def _predict_images(
        self, context: RoundContext, previous: State, model_states: Updates | State, num_images: int, labelled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Predict on the server's images. A collective if the models are :class:`Updates`.

        Args:
            context: The round, with the server's images.
            previous: State with the tensors that the models lack.
            model_states: Models (C, ...).
            num_images: Largest number N of images.
            labelled: Whether to use the validation set, which has labels, rather than public images.

        Returns:
            Probabilities (C, N, K), and labels as 0 and 1 (N, K) or None.
        """
        task = self.settings.training.task
        local_models = model_states.local_rows if isinstance(model_states, Updates) else model_states
        clients = stack_size(local_models)
        # A rank without clients runs the former global model for the shape of the logits, which are then dropped.
        states = expand(previous, max(1, clients))
        if clients:
            states = states | local_models
        predictions = []
        labels = []
        for x, y in self._iterate_images(context, num_images, labelled):
            logits = self.engine.shared_logits(states, x)[:clients]
            predictions.append(probabilities(logits, task))
            if y is not None:
                labels.append(task.presence(y, logits.shape[-1]))
        all_predictions = torch.cat(predictions, 1)
        if isinstance(model_states, Updates):
            all_predictions = model_states.replace({"probabilities": all_predictions}).gathered("probabilities")
        if not labels:
            return all_predictions, None
        return all_predictions, torch.cat(labels)

    def _iterate_images(
        self, context: RoundContext, limit: int, labelled: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield batches of the server's images, with labels or None; no more than ``limit`` images in total."""
        data = context.server_data
        if not labelled:
            for indices in data.public_indices(context.plan.round, 1, limit)[0].split(PREDICTION_BATCH):
                yield data.public_images(indices, self.device), None
            return
        for x, y in data.validation_batches(self.device):
            yield x[:limit], y[:limit]
            limit -= len(x)
            if limit <= 0:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the states, for a checkpoint."""
        return {"global": self.global_state, "server": self.server_state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from the saved states of a server; other entries are ignored."""
        device = self.device
        self.global_state = to_device(saved["global"], device)
        self.server_state = {name: to_device(state, device) for name, state in saved["server"].items()}


@dataclass(frozen=True)
class _Accepted:
    """The clients whose updates are aggregated.

    Attributes:
        places: Their places in the plan.
        outliers: As in :class:`ServerResult`.
        metrics: Metrics of the updates.
    """

    places: Sequence[int]
    outliers: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def mean_numel(state: State, tensor_names: TensorNames, lora_ranks: Sequence[int]) -> dict[str, float]:
    """Count the elements of each tensor of a state (no client axis), averaged over clients with different LoRA ranks.

    Args:
        state: The tensors. A factor's name may have a prefix that ends in "/".
        tensor_names: Names of the model's tensors.
        lora_ranks: LoRA ranks of the clients; empty if all have the adapter's rank.
    """
    axes = rank_axes(tensor_names.factors) if lora_ranks else {}
    sizes = {}
    for name, value in state.items():
        sizes[name] = float(value.numel())
        axis = axes.get(name.rpartition("/")[2])
        if axis is not None:
            full_rank = value.shape[axis]
            sizes[name] *= sum(min(rank, full_rank) for rank in lora_ranks) / (full_rank * len(lora_ranks))
    return sizes


def megabytes_of_clients(state: State, tensor_names: TensorNames, lora_ranks: Sequence[int], num_clients: int) -> float:
    """Compute the megabytes (10**6 bytes) of a state (no client axis) times ``num_clients``; see :func:`mean_numel`."""
    sizes = mean_numel(state, tensor_names, lora_ranks)
    bytes_of_client = fsum(size * state[name].element_size() for name, size in sizes.items())
    return num_clients * bytes_of_client / 1e6


def parameter_counts(
    algorithm: Algorithm,
    phases: Sequence[Phase],
    tensor_names: TensorNames,
    round: int,
    opened: Stacks,
    sent: State,
    lora_ranks: Sequence[int] = (),
) -> dict[str, float]:
    """Count the parameters that a client trains in a round, and those that it sends, as metrics.

    Args:
        algorithm: The algorithm, which determines the trained parameters.
        phases: The phases of the round.
        tensor_names: Names of the model's tensors.
        round: Number of the round, counted from 0.
        opened: Stacks (C, ...) by role that the round began with.
        sent: Update of a client (no client axis). Tensors that are not the model's count too, such as control variates.
        lora_ranks: LoRA ranks of the round's clients, over which counts are averaged; empty if all have the adapter's
            rank.
    """
    statistics = set(tensor_names.keys) - set(tensor_names.parameters)
    sent_numbers = {name: value for name, value in sent.items() if value.is_floating_point()}
    sent_sizes = mean_numel(sent_numbers, tensor_names, lora_ranks)
    size_of_tensor: dict[tuple[str, str], float] = {}
    for role, stacked in opened.items():
        one_client = {name: value[0] for name, value in stacked.items()}
        for name, size in mean_numel(one_client, tensor_names, lora_ranks).items():
            size_of_tensor[role, name] = size
    trained: set[tuple[str, str]] = set()
    for role in opened:
        for phase in phases:
            names = algorithm.trainable_keys(role, phase.name, tensor_names, round)
            trained.update((role, name) for name in names if (role, name) in size_of_tensor)
    # fsum is exact in any order. The order of a set of strings differs between processes.
    return {
        "params/trained": fsum(size_of_tensor[key] for key in trained),
        "params/sent": fsum(size for name, size in sent_sizes.items() if name not in statistics),
    }
