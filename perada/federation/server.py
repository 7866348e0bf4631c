# SPDX-License-Identifier: Apache-2.0
"""The server's half of a round: it sends the clients their states, and computes the next global state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.algorithms.dry_run import is_foreign
from perada.core.ranks import Ranks
from perada.core.rounds import Phase, RoundPlan, Shares
from perada.core.states import (
    State,
    as_matrix,
    clone,
    column_blocks,
    device_of,
    expand,
    is_finite,
    rank_axes,
    select,
    stack_size,
    to_device,
    to_device_async,
)
from perada.federation.local_trainer import LocalTrainer
from perada.federation.scores import probabilities
from perada.privacy.client_level import ClientLevel, floor_variances
from perada.privacy.client_sums import VOTE
from perada.server import Updates, client_weights
from perada.server.aggregate import UpdateSums, Weighting, double, double_dtype, names_with_change, squared_changes
from perada.server.distill import DistillationRound, Distiller, SecureTeachers, ServerData
from perada.server.low_rank import lora_residual

Progress = Callable[[Tensor], Iterable[Tensor]]
"""Wraps the steps of a distillation in a progress bar."""
OUTLIER_FACTOR = 50.0
"""A change whose norm exceeds the round's median by more than this factor, per step, is an outlier.

Changes of honest clients with two images were up to 20 times as long.
"""
PREDICTION_BATCH = 256
"""Number of the server's images in one forward pass, for rules that use predictions."""


@dataclass(frozen=True)
class RoundContext:
    """Everything that the server has for a round in addition to the updates.

    Attributes:
        plan: The round's clients and their steps.
        received: What the clients received, as the updates are divided among the ranks.
        train_sizes: Numbers of training images of all clients of the federation, for weights.
        data: Public images and the server's validation set.
        level: The account where whole clients are private.
        progress: Wraps the steps of the distillation in a progress bar.
        logit_sum: Sum of the clients' logits where sites made a secure sum themselves, empty in a round that is not
            distilled. Every row of the updates is then their mean, or that of their noisy changes with a ``level``.
    """

    plan: RoundPlan
    received: Updates
    train_sizes: Sequence[int]
    data: ServerData
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
        updates: The updates that counted; None if too few clients were left, and the global state stayed as it was.
        student: The state before the distillation; None if nothing was distilled.
        outliers: By client, how many times as long as the median its change was; only of outliers.
        diverged: Whether the distillation became NaN or infinite, and kept its starting point.
        discarded: Whether the new state was NaN or infinite, and the global state stayed as it was.
        metrics: What was measured.
    """

    updates: Updates | None = None
    student: State | None = None
    outliers: dict[int, float] = field(default_factory=dict)
    diverged: bool = False
    discarded: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundReport:
    """The results of a round, for logs and warnings.

    Attributes:
        server: Those of the server.
        broken: Clients that were left out, as their training became NaN or infinite.
        failed: Clients of whom a sample could not be read, with the reason; in a private run they train without it.
        metrics: Training losses, numbers of parameters, megabytes sent, and what the server measured.
    """

    server: ServerResult
    broken: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Server:
    """The server's states and its side of a round. It sees what clients send, never what they keep.

    Attributes:
        global_state: The state w, or a stack of several.
        server_state: Tensors that the algorithm and the server rule keep between rounds, ``{name: state}``.
        lora_ranks: LoRA's ranks of all clients; empty where they have the adapter's.

    Args:
        trainer: Whose network, settings and loss scales the server shares, for the student.
        initial: Gives the k-th random initial state; that of 0 unless there are several global models.
        ranks: The processes among which clients are divided.
    """

    def __init__(self, trainer: LocalTrainer, initial: Callable[[int], State], ranks: Ranks | None = None) -> None:
        self.engine = trainer.engine
        self.tensor_names = trainer.tensor_names
        self.settings = trainer.settings
        self.scales = trainer.scales
        self.ranks = ranks or Ranks()
        self.global_state = self.settings.algorithm.initial(initial)
        # A network of the caller's own may be random in each process: all begin with that of rank 0.
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
            losses: Losses (C, K) of K global models on the clients' images, where clients compare them.
            algorithm: Another algorithm than the run's, such as that of the fine-tuning after the last round.
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
        """Whether nothing that the run is set to do reads a single client's update, so that they may be added up."""
        settings = self.settings
        algorithm = settings.algorithm
        if settings.secure_sums is not None or settings.client_privacy is not None:
            # Both look at, or change, each client's update before it counts.
            return False
        if settings.drop_outliers or settings.diagnostics or settings.lora_ranks:
            return False
        if algorithm.uses_distillation and settings.distillation.steps > 0:
            # The teachers are the clients' models.
            return False
        if is_foreign(settings.rule) or not settings.rule.function_of_mean:
            # A rule from elsewhere may have inherited what it states.
            return False
        return algorithm.sends_updates and algorithm.mean_is_enough

    def sums(self, shares: Shares, train_sizes: Sequence[int]) -> UpdateSums | None:
        """Return what adds up the updates of a round's clients, or None if single updates are needed.

        Args:
            shares: The round's clients and who trains them.
            train_sizes: Numbers of training images of all clients of the federation.
        """
        if not self.needs_only_mean:
            return None
        weights = self._shares(shares.plan, train_sizes)
        return UpdateSums(weights, shares.places, self.tensor_names.parameters, self.ranks)

    def aggregate(self, context: RoundContext, updates: Updates | UpdateSums, valid: Sequence[int]) -> ServerResult:
        """Compute the next global state from the updates of a round. A collective: all ranks must call this alike.

        Args:
            context: Facts about the round.
            updates: What the plan's clients sent, or what adds it up.
            valid: Places in the plan of the clients whose update is finite. With privacy of whole clients all count.

        Returns:
            The updates that counted, and metrics. The states of the server are replaced, unless too few clients were
            left.
        """
        secure = self.settings.secure_sums
        algorithm = self.settings.algorithm
        clients = context.plan.clients
        accepted = self._accepted(context, updates, valid)
        outliers = accepted.outliers
        metrics = accepted.metrics
        if len(accepted.places) < self._quorum(context):
            return ServerResult(outliers=outliers, metrics=metrics)

        if isinstance(updates, UpdateSums):
            updates = updates.means(accepted.places)
        else:
            if context.level is not None:
                updates = self.privatized(context.level, updates, context)
            updates = updates.part(accepted.places)
        # The distiller runs clients' models one by one only where it adds up their logits in a secure sum.
        teachers = updates
        if secure is not None and context.level is None and not context.summed_by_sites:
            shares = self._shares(context.plan, context.train_sizes)
            updates = secure.rows(updates, [shares[place] for place in accepted.places])

        # Below this line `updates` is what the server may see: with secure sums or privacy of whole clients no row is
        # a single client's.
        distiller = self._distiller(context, teachers)
        accepted_clients = tuple(clients[place] for place in accepted.places)
        step = self._server_step(context, updates, accepted_clients, distiller)
        # The algorithm may return the tensors that it was given, such as those of an update.
        state = clone(algorithm.server_step(step))
        if context.level is not None:
            state = floor_variances(state)
        metrics = metrics | distiller.report.metrics | step.metrics
        if "lora_residual" in self.settings.diagnostics:
            models = updates.completed(step.previous) if algorithm.global_model else updates
            metrics["updates/lora_residual"] = lora_residual(self.tensor_names.factors, models, step.weights)
        finite = is_finite(state)
        if finite:
            self.global_state = self.global_state | state
            self.server_state = step.state
        if self.tensor_names.merged:
            # Whoever looks at the clients' models takes the merged weights that these were trained with.
            merged_weights = select(step.previous, self.tensor_names.merged)
            updates = updates.completed(merged_weights)
        return ServerResult(
            updates=updates,
            student=distiller.report.student,
            outliers=outliers,
            diverged=distiller.report.diverged,
            discarded=not finite,
            metrics=metrics,
        )

    def privatized(self, level: ClientLevel, updates: Updates, context: RoundContext) -> Updates:
        """Replace every client's update by their noisy mean, the only thing that the server gets to see."""
        plan = context.plan
        received = context.received.local_rows
        weights = client_weights("uniform", plan.clients)
        if level.sums is None:
            noisy = level.privatized(updates, received, plan.round, plan.clients)
            # The mean has all of the noise, a row has a share of it: nothing after this gets to see a row.
            return updates.repeat(updates.replace(noisy).mean(weights))
        if context.summed_by_sites:  # every row is the mean of the sites' noisy changes
            change = {name: value[0] for name, value in updates.local_rows.items() if value.is_floating_point()}
        else:
            change = level.mean_change(updates, received, plan.round, plan.clients)
        base = {name: received[name] for name in updates.names if name != VOTE}
        return updates.repeat(level.apply_mean_change(updates.replace(base).mean(weights), change, updates.clients))

    def _accepted(self, context: RoundContext, updates: Updates | UpdateSums, valid: Sequence[int]) -> "_Accepted":
        """Choose the clients whose updates count. A collective."""
        secure = self.settings.secure_sums
        plan = context.plan
        if isinstance(updates, UpdateSums):
            norms = updates.change_norms()[list(valid)]
            return _Accepted(places=valid, outliers=outliers_of_norms(norms, plan, valid))
        if context.level is not None:
            # All count, since who broke depends on their images.
            return _Accepted(places=range(len(plan.clients)))
        if secure is not None:
            if not context.summed_by_sites:
                valid = secure.summable(updates, self._shares(plan, context.train_sizes), valid)
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

    def _quorum(self, context: RoundContext) -> int:
        """Return how many clients must remain; with fewer the round is void."""
        secure = self.settings.secure_sums
        # Sites that made the sum have seen to it themselves.
        if secure is None or context.summed_by_sites:
            return 1
        return secure.least(len(context.plan.clients))

    def _shares(self, plan: RoundPlan, train_sizes: Sequence[int]) -> list[float]:
        """Return the weights of a plan's clients, not yet divided by their sum."""
        if self.settings.weighting == "uniform":
            return [1.0] * len(plan.clients)
        return [float(train_sizes[client]) for client in plan.clients]

    def _distiller(self, context: RoundContext, teachers: Updates) -> Distiller:
        """Return the distiller of a round, by which an algorithm's server step refines the global state."""
        secure: SecureTeachers | None = None
        # An algorithm that makes teachers itself makes them of what the server may see.
        if self.settings.secure_sums is not None and not self.settings.algorithm.builds_teachers:
            secure = SecureTeachers(self.settings.secure_sums, teachers, context.logit_sum)
        return Distiller(
            engine=self.engine,
            options=self.settings.distillation,
            parameters=self.tensor_names.parameters,
            data=context.data,
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
        settings = self.settings
        weighting: Weighting = settings.weighting
        if settings.secure_sums:
            weighting = "uniform"  # the sum is weighted already
        predict = None
        if settings.rule.needs:
            predict = partial(self._predict, context)
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

    def _predict(
        self, context: RoundContext, previous: State, models: Updates | State, images: int, labelled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Predict on the server's images. A collective where the models are updates.

        Args:
            context: The round, and the images.
            previous: State whose tensors complete the models.
            models: Models (C, ...).
            images: N, at most.
            labelled: Whether the images are those of the validation set, which have labels.

        Returns:
            Probabilities (C, N, K), and labels as 0 and 1 (N, K) or None.
        """
        task = self.settings.training.task
        local_models = models.local_rows if isinstance(models, Updates) else models
        clients = stack_size(local_models)
        # A rank may have no client. It runs the model before the round for the shape of the logits, and drops them.
        states = expand(previous, max(1, clients))
        if clients:
            states = states | local_models
        predictions = []
        labels = []
        for x, y in self._images(context, images, labelled):
            logits = self.engine.shared_logits(states, x)[:clients]
            predictions.append(probabilities(logits, task))
            if y is not None:
                labels.append(task.presence(y, logits.shape[-1]))
        all_predictions = torch.cat(predictions, 1)
        if isinstance(models, Updates):
            all_predictions = models.replace({"probabilities": all_predictions}).gathered("probabilities")
        if not labels:
            return all_predictions, None
        return all_predictions, torch.cat(labels)

    def _images(self, context: RoundContext, limit: int, labelled: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield batches of at most ``limit`` of the server's images in all, with labels or None."""
        data = context.data
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
    """The clients whose updates count.

    Attributes:
        places: Their places in the plan.
        outliers: By client, how many times as long as the median its change was; only of outliers.
        metrics: Metrics of the updates.
    """

    places: Sequence[int]
    outliers: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def mean_numel(state: State, tensor_names: TensorNames, ranks: Sequence[int]) -> dict[str, float]:
    """Count the numbers in each tensor of a state (no client axis), the mean over clients of unequal ranks.

    Args:
        state: The tensors. One that is named after a factor, behind a prefix that ends in "/", is cut like that.
        tensor_names: Names of the model's tensors.
        ranks: LoRA's ranks of the clients; empty where they have the adapter's.
    """
    axes = rank_axes(tensor_names.factors) if ranks else {}
    sizes = {}
    for name, value in state.items():
        sizes[name] = float(value.numel())
        axis = axes.get(name.rpartition("/")[2])
        if axis is not None:
            full_rank = value.shape[axis]
            sizes[name] *= sum(min(rank, full_rank) for rank in ranks) / (full_rank * len(ranks))
    return sizes


def megabytes_of_clients(state: State, tensor_names: TensorNames, ranks: Sequence[int], clients: int) -> float:
    """Compute the megabytes (10**6 bytes) of a state (no client axis) at so many clients, as of :func:`mean_numel`."""
    sizes = mean_numel(state, tensor_names, ranks)
    bytes_of_client = fsum(size * state[name].element_size() for name, size in sizes.items())
    return clients * bytes_of_client / 1e6


def parameter_counts(
    algorithm: Algorithm,
    phases: Sequence[Phase],
    tensor_names: TensorNames,
    round: int,
    opened: Stacks,
    sent: State,
    ranks: Sequence[int] = (),
) -> dict[str, float]:
    """Count the parameters that a client trains in a round and sends, as metrics.

    Args:
        algorithm: The algorithm, for the names that it trains.
        phases: The phases of the round.
        tensor_names: Names of the model's tensors.
        round: The round, counted from 0.
        opened: Stacks (C, ...) by role that the round began with.
        sent: What a client sends (no client axis). What is not a model's tensor, such as a control variate, counts too.
        ranks: LoRA's ranks of the round's clients, over which it is the mean; empty where they have the adapter's.
    """
    statistics = set(tensor_names.keys) - set(tensor_names.parameters)
    sent_numbers = {name: value for name, value in sent.items() if value.is_floating_point()}
    sent_sizes = mean_numel(sent_numbers, tensor_names, ranks)
    sizes: dict[tuple[str, str], float] = {}
    for role, stacked in opened.items():
        one_client = {name: value[0] for name, value in stacked.items()}
        for name, size in mean_numel(one_client, tensor_names, ranks).items():
            sizes[role, name] = size
    trained: set[tuple[str, str]] = set()
    for role in opened:
        for phase in phases:
            names = algorithm.trainable_keys(role, phase.name, tensor_names, round)
            trained.update((role, name) for name in names if (role, name) in sizes)
    # fsum is exact in any order: that of a set differs between processes, since it follows from hashes of names.
    return {
        "params/trained": fsum(sizes[key] for key in trained),
        "params/sent": fsum(size for name, size in sent_sizes.items() if name not in statistics),
    }


def find_outliers(
    names: Iterable[str],
    updates: Updates,
    received: State,
    plan: RoundPlan,
    places: Sequence[int],
    with_metrics: bool,
) -> tuple[dict[int, float], dict[str, float]]:
    """Find outliers (:func:`outliers_of_norms`) among updates. A collective: all ranks must call this alike.

    Args:
        names: Trained parameters. Running statistics are left out: an honest client's with two images may be far from
            all others.
        updates: What the C clients sent.
        received: What this rank's clients among them had received (c, ...).
        plan: The round's clients and their steps.
        places: Where the C clients stand in the plan.
        with_metrics: Whether to measure the round's updates, too, which moves a state between ranks.

    Returns:
        By how many times the median the changes of outliers are as long, by client, and the metrics.
    """
    norms, cosines = _norms_and_cosines(names, updates, received, with_metrics)
    outliers = outliers_of_norms(norms, plan, places)
    if cosines is None:
        return outliers, {}
    clients = [plan.clients[place] for place in places]
    # NaN, of a client that did not move, is never the largest or the smallest.
    longest = int(norms.nan_to_num(-1).argmax())
    most_opposed = int(cosines.nan_to_num(2).argmin())
    return outliers, {
        "updates/norm_median": float(norms.nanmedian()),
        "updates/norm_max": float(norms[longest]),
        "updates/norm_max_client": float(clients[longest]),
        "updates/cosine_min": float(cosines[most_opposed]),
        "updates/cosine_min_client": float(clients[most_opposed]),
    }


def outliers_of_norms(norms: Tensor, plan: RoundPlan, places: Sequence[int]) -> dict[int, float]:
    """Find clients whose change is much longer than the median.

    A client that took more steps than the median of the plan may have moved so many times as far.

    Args:
        norms: Norms (C,) of the changes, on the CPU.
        plan: The round's clients and their steps.
        places: Where the C clients stand in the plan.

    Returns:
        By how many times the median the changes of outliers are as long, by client.
    """
    median = float(norms.nanmedian())
    steps = [sum(steps_of_phases) for steps_of_phases in zip(*plan.steps, strict=True)]
    usual_steps = max(1, median_low(steps))
    outliers = {}
    for place, norm in zip(places, norms.tolist(), strict=True):
        steps_ratio = max(1, steps[place] / usual_steps)
        if median > 0 and norm > OUTLIER_FACTOR * median * steps_ratio:
            outliers[plan.clients[place]] = norm / median
    return outliers


def _norms_and_cosines(
    names: Iterable[str], updates: Updates, received: State, with_cosines: bool
) -> tuple[Tensor, Tensor | None]:
    """Measure the clients' changes. A collective: all ranks must call this alike.

    Args:
        names: Trained parameters.
        updates: What the C clients sent.
        received: What this rank's clients among them had received (c, ...).
        with_cosines: Whether to compare each change with the mean of all, too.

    Returns:
        The norms (C,) of the changes, and their cosines (C,) with the mean change or None; on the CPU.
    """
    device = torch.device("cpu")
    if received:
        device = device_of(received)
    dtype = double_dtype(device)
    squares = torch.zeros(updates.clients, dtype=dtype, device=device)
    products = torch.zeros(updates.clients, dtype=dtype, device=device)  # with the mean change
    mean_square = torch.zeros((), dtype=dtype, device=device)
    rows = to_device_async(torch.tensor(updates.places, dtype=torch.int64), device)
    if updates.local_rows:
        squares[rows] = squared_changes(names, updates.local_rows, received)
    compared: list[str] = []
    if with_cosines:
        compared = names_with_change(names, updates.local_rows, received)
    for name in compared:
        sent_rows = as_matrix(updates.local_rows[name])
        received_rows = as_matrix(received[name])
        # Block by block: changes of all clients in double precision would not fit the caches.
        blocks = list(column_blocks(sent_rows))
        mean_change = squares.new_zeros(sent_rows.shape[1])
        for block in blocks:
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            mean_change[block] = change.sum(0) / updates.clients
        # One collective for all blocks, of which ranks have different numbers.
        updates.ranks.sum_([mean_change])
        mean_square += mean_change.square().sum()
        for block in blocks:
            change = double(sent_rows[:, block]) - double(received_rows[:, block])
            products[rows] += (change * mean_change[block]).sum(1)
    table = torch.stack([squares, products])
    updates.ranks.sum_([table])  # one collective for both
    squares, products = table.cpu().double()
    mean_square = mean_square.cpu().double()
    norms = squares.sqrt()
    if not with_cosines:
        return norms, None
    return norms, products / (norms * mean_square.sqrt())
