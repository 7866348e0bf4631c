# SPDX-License-Identifier: Apache-2.0
"""The server's half of a round: what it sends, and what it makes of what came back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum
from statistics import median_low
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.algorithms import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.core.ranks import Ranks
from perada.core.rounds import Phase, RoundPlan
from perada.core.states import State, clone, expand, is_finite, partition, rank_axes, to_device, to_device_async
from perada.federation.cohort import Site
from perada.privacy.client_level import ClientLevel, floor_variances
from perada.privacy.client_sums import VOTE
from perada.server import Updates, client_weights
from perada.server.aggregate import double, double_dtype
from perada.server.distill import Distiller, ServerData
from perada.server.low_rank import lora_residual

Progress = Callable[[Tensor], Iterable[Tensor]]
"""Wraps the steps of a distillation in a progress bar."""
OUTLIER_FACTOR = 50.0
"""A change that is so many times as long as the median of the round's, step for step, is named.

Of honest clients with two images, changes were 20 times as long.
"""


@dataclass
class RoundReport:
    """What a round did; ``metrics`` are training losses, numbers of parameters, megabytes sent.

    What became NaN or infinite does not count: ``broken`` clients were left out, a distillation that ``diverged`` kept
    its starting point, and with ``broken_server`` the global state stayed as it was. ``outliers`` are clients whose
    change was so many times as long as the median. ``failed`` are those of whom a sample could not be read, and why; in
    a private run they train without it.
    """

    broken: list[int] = field(default_factory=list)
    diverged: bool = False
    broken_server: bool = False
    outliers: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Server:
    """The server's states and its side of a round. It sees what clients send, never what they keep.

    Of a ``site`` it has the network, the settings and the loss scales, which the student has too. ``initial`` gives the
    k-th random initial state; that of 0 unless there are several global models. The ``global_state`` is the state w, or
    a stack of several; ``server_state`` is what algorithm and server rule remember.
    """

    def __init__(self, site: Site, initial: Callable[[int], State], ranks: Ranks | None = None) -> None:
        self.engine, self.tensor_names, self.settings, self.scales = (
            site.engine,
            site.tensor_names,
            site.settings,
            site.scales,
        )
        self.ranks, self.global_state = ranks or Ranks(), self.settings.algorithm.initial(initial)
        self.ranks.broadcast_(self.global_state.values())  # a network of the caller's own may be random in each process
        self.server_state: dict[str, State] = {}
        self.lora_ranks = self.settings.lora_ranks  # of all clients, or none

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return next(iter(self.global_state.values())).device

    def sending(
        self, plan: RoundPlan, num_clients: int, losses: Tensor | None = None, algorithm: Algorithm | None = None
    ) -> State:
        """What each of a plan's C clients receives, (C, ...), in the run's algorithm or in another one.

        ``losses`` (C, K) are those of K global models on the clients' images, where clients compare them.
        """
        settings, algorithm = self.settings, algorithm or self.settings.algorithm
        known = plan.round, plan.clients, num_clients, settings.seed, losses, self.server_state
        return algorithm.broadcast(Broadcast(self.global_state, self.tensor_names, *known, self.ranks_of(plan.clients)))

    def ranks_of(self, clients: Sequence[int]) -> tuple[int, ...]:
        """The clients' ranks of LoRA; empty where they have the adapter's."""
        return tuple(self.lora_ranks[client] for client in clients) if self.lora_ranks else ()

    def members(self) -> State:
        """The global models (K, ...) whose outputs are averaged; usually one."""
        return self.settings.algorithm.members(self.global_state, self.server_state)

    def privatized(
        self, level: ClientLevel, updates: Updates, received: Updates, plan: RoundPlan, summed: bool = False
    ) -> Updates:
        """What the server gets to see with privacy of whole clients: their noisy mean in every row.

        Where sites ``summed`` their noisy changes, every row of the updates is the mean of these.
        """
        places, clients, weights = updates.places, updates.clients, client_weights("uniform", plan.clients)
        if level.sums is None:
            noisy = level.privatized(updates, received.own, plan.round, plan.clients)
            # The mean has all of the noise, a row has a share of it: nothing after this gets to see a row.
            mean = Updates(noisy, places, clients, self.ranks).mean(weights)
        else:
            if summed:
                change = {key: value[0] for key, value in updates.own.items() if value.is_floating_point()}
            else:
                change = level.summed(updates, received.own, plan.round, plan.clients)
            base = {key: received.own[key] for key in updates.own if key != VOTE}
            mean = level.moved(Updates(base, places, clients, self.ranks).mean(weights), change, clients)
        return Updates(expand(mean, len(updates.places)), updates.places, updates.clients, self.ranks)

    def close(
        self,
        plan: RoundPlan,
        updates: Updates,
        received: Updates,
        good: Sequence[int],
        level: ClientLevel | None,
        sizes: Sequence[int],
        data: ServerData,
        report: RoundReport,
        progress: Progress = iter,
        summed: Tensor | None = None,
    ) -> tuple[Updates, State | None] | None:
        """Make the next global state of what a plan's clients at the places ``good`` sent; all ranks do alike.

        With privacy of whole clients, of which ``level`` is the account, all count. Without, those that are far are
        named, and left out where that was asked for. The ``sizes`` of all clients' training sets are for weights.
        ``data`` are public images and the server's validation set. What is measured, and what went wrong, is written
        into the ``report``. Where sites made a secure sum, every row of the ``updates`` is their mean, or that of their
        noisy changes with a ``level``, and ``summed`` the sum of their logits, empty in a round that is not distilled.

        Returns:
            What counted, and what was distilled into as it was before, or None; nothing if none are good.
        """
        settings, round, secure = self.settings, plan.round, self.settings.secure_sums
        shares = [1.0 if settings.weighting == "uniform" else float(sizes[client]) for client in plan.clients]
        if level is not None:  # all count, since who broke depends on their images
            good = range(len(plan.clients))
        elif secure is None:
            good = self._inliers(plan, updates, received, good, report)
        elif summed is None:
            good = secure.summable(updates, shares, good)
        least = 1 if secure is None or summed is not None else secure.least(len(plan.clients))
        if len(good) < least:
            return None
        if level is not None:
            updates = self.privatized(level, updates, received, plan, summed is not None)
        updates, clients = updates.part(good), tuple(plan.clients[place] for place in good)
        own = settings.algorithm.own_teachers
        hidden = None if secure is None or own else (secure, updates)
        if secure is not None and level is None and summed is None:  # nothing after this gets to see a row
            updates = secure.rows(updates, [shares[place] for place in good])
        known = (
            self.tensor_names.parameters,
            data,
            round,
            settings.seed,
            settings.training.multilabel,
            self.ranks,
            self.scales,
        )
        total = None if own else summed
        distiller = Distiller(self.engine, settings.distillation, *known, progress, hidden, total)
        step = ServerStep(
            round,
            clients,
            len(sizes),
            self.tensor_names,
            settings.seed,
            self.global_state,
            updates,
            client_weights("uniform" if secure else settings.weighting, [sizes[client] for client in clients]),
            dict(self.server_state),
            settings.rule,
            distiller,
            partial(self._predict, data, round) if settings.rule.needs else None,
        )
        state = clone(settings.algorithm.server_step(step))
        state = state if level is None else floor_variances(state)
        report.metrics |= distiller.metrics | step.metrics
        if "lora_residual" in settings.diagnostics:
            whole = updates.whole(step.previous) if settings.algorithm.global_model else updates
            report.metrics["updates/lora_residual"] = lora_residual(self.tensor_names.factors, whole, step.weights)
        report.diverged, report.broken_server = distiller.diverged, not is_finite(state)
        if not report.broken_server:
            self.global_state, self.server_state = self.global_state | state, step.state
        if (
            self.tensor_names.merged
        ):  # whoever looks at the clients' models takes the weights that these were trained with
            updates = updates.whole(partition(step.previous, self.tensor_names.merged)[0])
        return updates, distiller.student

    def _inliers(
        self, plan: RoundPlan, updates: Updates, received: Updates, good: Sequence[int], report: RoundReport
    ) -> Sequence[int]:
        """Those of the clients at the places ``good`` that count, after the far ones are named in the report."""
        if good:
            given = self.tensor_names.parameters, updates.part(good), received.part(good).own, plan, good
            report.outliers, found = find_outliers(*given, "update_norms" in self.settings.diagnostics)
            report.metrics |= found
        return [
            place for place in good if not self.settings.drop_outliers or plan.clients[place] not in report.outliers
        ]

    def _predict(
        self,
        data: ServerData,
        round: int,
        previous: State,
        models: Mapping[str, Tensor],
        images: int,
        labelled: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Probabilities (C, N, K) of models (C, ...), whose missing names are ``previous``'s, and the labels (N, K)."""
        own = dict(models.own if isinstance(models, Updates) else models)
        clients = len(next(iter(own.values())))
        # A rank may have no client: the shape is then that of the model before.
        states = expand(previous, max(1, clients)) | (own if clients else {})
        found, targets, multilabel = [], list[Tensor](), self.settings.training.multilabel
        for x, y in self._images(data, round, images, labelled):
            logits = double(self.engine.shared_logits(states, x)[:clients])
            found.append(logits.sigmoid() if multilabel else logits.softmax(-1))
            if y is not None:
                targets.append(y if multilabel else F.one_hot(y, logits.shape[-1]))
        probabilities = torch.cat(found, 1)
        if isinstance(models, Updates):
            probabilities = Updates({"p": probabilities}, models.places, models.clients, self.ranks)["p"]
        return probabilities, torch.cat(targets) if targets else None

    def _images(
        self, data: ServerData, round: int, most: int, labelled: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches of at most so many of the server's images, with labels or None."""
        if not labelled:
            for some in data.public_indices(round, 1, most)[0].split(256):
                yield data.public_images(some, self.device), None
            return
        for x, y in data.validation_batches(self.device):
            yield x[:most], y[:most]
            most -= len(x)
            if most <= 0:
                return

    def state_dict(self) -> dict[str, Any]:
        """The states, for a checkpoint."""
        return {"global": self.global_state, "server": self.server_state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of the server whose states were saved; other entries are not looked at."""
        device = self.device
        self.global_state = to_device(saved["global"], device)
        self.server_state = {name: to_device(state, device) for name, state in saved["server"].items()}


def held(state: State, tensor_names: TensorNames, ranks: Sequence[int]) -> dict[str, float]:
    """How many numbers a client has of each tensor of a state: the mean over clients whose LoRA has ``ranks``, if any.

    A tensor that is named after a factor, behind a prefix that ends in "/", has as many as that.
    """
    axes, found = rank_axes(tensor_names.factors) if ranks else {}, {}
    for key, value in state.items():
        found[key] = float(value.numel())
        if (axis := axes.get(key.rpartition("/")[2])) is not None:
            rank = value.shape[axis]
            found[key] *= sum(min(own, rank) for own in ranks) / (rank * len(ranks))
    return found


def megabytes_held(state: State, tensor_names: TensorNames, ranks: Sequence[int], clients: int) -> float:
    """Megabytes (10**6 bytes) of a state (no client axis) at so many clients, who have of it what :func:`held` says."""
    return (
        clients
        * fsum(number * state[key].element_size() for key, number in held(state, tensor_names, ranks).items())
        / 1e6
    )


def parameter_counts(
    algorithm: Algorithm,
    phases: Sequence[Phase],
    tensor_names: TensorNames,
    round: int,
    opened: Stacks,
    sent: State,
    ranks: Sequence[int] = (),
) -> dict[str, float]:
    """Parameters that a client trains in a round, of all that it opened, (C, ...) by role, and of what it sends.

    What it sends beside a model's tensors, such as a control variate, counts as parameters. With ``ranks`` of LoRA, of
    the round's clients, these are means over them. Sums are exact: in the order of a set, whatever hashes its names,
    they would differ between processes.
    """
    statistics = set(tensor_names.keys) - set(tensor_names.parameters)
    floating = {key: value for key, value in sent.items() if value.is_floating_point()}
    own = {
        role: held({key: value[0] for key, value in state.items()}, tensor_names, ranks)
        for role, state in opened.items()
    }
    trained = {
        (role, name)
        for role, state in opened.items()
        for phase in phases
        for name in algorithm.trainable_keys(role, phase.name, tensor_names, round)
        if name in state
    }
    return {
        "params/trained": fsum(own[role][name] for role, name in trained),
        "params/sent": fsum(size for key, size in held(floating, tensor_names, ranks).items() if key not in statistics),
    }


def find_outliers(
    names: Iterable[str], updates: Updates, received: State, plan: RoundPlan, places: Sequence[int], shown: bool
) -> tuple[dict[int, float], dict[str, float]]:
    """The clients whose updates are far from the others', and the round's metrics of the updates where ``shown``.

    A client is far, by so many times, whose change is much longer than the median. One that took more steps than the
    median of the ``plan``, in which the updates' C clients stand at ``places``, may have moved so many times as far.
    This process's clients among them had ``received`` (c, ...). With metrics a state moves between processes.
    """
    device = next((value.device for value in received.values()), torch.device("cpu"))
    table = torch.zeros(2, updates.clients, dtype=double_dtype(device), device=device)
    length, rows = table.new_zeros(()), to_device_async(torch.tensor(updates.places, dtype=torch.int64), device)
    for key in names:  # not running statistics: an honest client's with two images may be far from all others
        if key not in updates or key not in received or received[key].shape != updates.own[key].shape:
            continue
        change = (double(updates.own[key]) - double(received[key])).flatten(1)
        table[0, rows] += change.square().sum(1)
        if shown:
            mean = change.sum(0) / updates.clients
            updates.ranks.sum_([mean])
            table[1, rows] += (change * mean).sum(1)
            length += mean.square().sum()
    updates.ranks.sum_([table])
    table, length = table.cpu().double(), length.cpu().double()
    norms = table[0].sqrt()
    clients, taken = [plan.clients[place] for place in places], [sum(own) for own in zip(*plan.steps, strict=True)]
    middle, usual = float(norms.nanmedian()), max(1, median_low(taken))
    outliers = {}
    for client, place, norm in zip(clients, places, norms.tolist(), strict=True):
        if middle > 0 and norm > OUTLIER_FACTOR * middle * max(1, taken[place] / usual):
            outliers[client] = norm / middle
    if not shown:
        return outliers, {}
    cosines = table[1] / (norms * length.sqrt())  # with the mean change
    longest, against = int(norms.nan_to_num(-1).argmax()), int(cosines.nan_to_num(2).argmin())
    return outliers, {
        "updates/norm_median": middle,
        "updates/norm_max": float(norms[longest]),
        "updates/norm_max_client": float(clients[longest]),
        "updates/cosine_min": float(cosines[against]),
        "updates/cosine_min_client": float(clients[against]),
    }
