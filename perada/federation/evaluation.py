# SPDX-License-Identifier: Apache-2.0
"""Scores of the clients' models and of the global one, on their own test sets and on shifted ones, and their logits."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from perada.core.rounds import EvalBatch
from perada.core.seeding import generator
from perada.core.states import to_device_async
from perada.engine.engine import ensemble
from perada.federation.federation import Federation
from perada.federation.metrics import Metric, spread
from perada.federation.scores import Scores, Tally, probabilities


def predictive_entropy(logits: Tensor, multilabel: bool) -> Tensor:
    """Entropies (B,) of predictions, in nats, of logits (B, K); if ``multilabel`` the mean of K Bernoulli ones.

    >>> predictive_entropy(torch.zeros(1, 4), False).exp().tolist()
    [4.0]
    """
    p = probabilities(logits, multilabel)
    terms = -torch.xlogy(p, p) - (torch.xlogy(1 - p, 1 - p) if multilabel else 0)
    return terms.mean(-1) if multilabel else terms.sum(-1)


class Evaluation:
    """Scores of the personal models, on the images of their clients and on everyone's, and of the global model.

    On several processes each runs the personal models of the clients it owns, and the global model on every so many-th
    batch. The models of the clients ``everywhere`` run on everyone's images.
    """

    def __init__(self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int]) -> None:
        self.federation = federation
        self.metrics = metrics
        self.clients = federation.num_clients
        self.multilabel = federation.settings.training.multilabel
        self.everywhere = list(everywhere)
        self._owned = torch.zeros(self.clients, dtype=torch.bool)
        self._owned[federation.owned()] = True
        self._local = Scores(metrics, self.multilabel, groups=self.clients)
        self._everyone = Scores(metrics, self.multilabel, models=len(self.everywhere))
        self._global = Scores(metrics, self.multilabel)
        self._states = federation.server.members() if federation.settings.algorithm.global_model else None
        members = 1 if self._states is None else len(next(iter(self._states.values())))
        self._members = Scores(metrics[:1], self.multilabel, models=members)
        self._shared_local = Scores(metrics[:1], self.multilabel, groups=self.clients)
        self._sizes = torch.zeros(self.clients, dtype=torch.int64)
        # Before the first round nobody took part, and there is no such mean.
        self._recent = federation.participation.recent if federation.rounds_done else None
        self._entropies: list[Tensor] = []
        self._tallies = {name: Tally(self.multilabel) for name in ("personal", "global")}
        self.per_class: dict[str, Tensor] = {}

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch of the test set, the ``index``-th of the evaluation."""
        federation = self.federation
        owner = to_device_async(batch.owner, batch.x.device)
        self._sizes += batch.owner.cpu().bincount(minlength=self.clients)
        if self._states is not None and index % federation.ranks.size == federation.ranks.rank:
            members = federation.engine.shared_logits(self._states, batch.x)
            shared = ensemble(members, federation.settings.algorithm.average, self.multilabel)
            self._global.update(shared.unsqueeze(0), batch.y)
            self._tallies["global"].update(shared, batch.y, owner)
            if len(members) > 1:
                self._members.update(members, batch.y)
                self._entropies.append(predictive_entropy(shared, self.multilabel))
            of_clients = self._shared_local if federation.personalized else self._local
            of_clients.update(shared.unsqueeze(0), batch.y, owner)
        if federation.personalized:
            rows = torch.arange(len(owner), device=owner.device)
            own = None
            for places, clients, logits in everywhere_logits(federation, self.everywhere, batch.x):
                self._everyone.update(logits, batch.y, models=places)
                place = owner[:, None] == to_device_async(torch.tensor(clients), owner.device)
                theirs = logits[place.long().argmax(1), rows]  # of the images' owners, where those are among them
                own = theirs if own is None else torch.where(place.any(1, keepdim=True), theirs, own)
            if len(self.everywhere) < self.clients:
                own = own_logits(federation, batch)
            if own is not None:
                counted = None if federation.ranks.size == 1 else to_device_async(self._owned, owner.device)[owner]
                self._local.update(own.unsqueeze(0), batch.y, owner, counted=counted)
                self._tallies["personal"].update(own, batch.y, owner, counted)

    def result(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """What all processes have counted: scores by name, and those of each client (M,), NaN where it has none.

        The first metric has the plain names. What scores each class is in ``per_class`` too, (M, K) or (K,).
        """
        ranks = self.federation.ranks
        for counted in (self._local, self._everyone, self._global, self._members):
            counted.merge(ranks)
        found: dict[str, float] = {}
        per_client: dict[str, Tensor] = {}
        local, shared, everyone = (one.all() for one in (self._local, self._global, self._everyone))
        for place, metric in enumerate(self.metrics):
            ending = f"_{metric.name}" if place else ""
            home = f"personal/local_test{ending}"
            away = f"personal/global_test{ending}"
            per_client[home] = self._one(home, local[metric.name][0], 1)
            if not self.federation.personalized:
                per_client[away] = self._one(away, shared[metric.name][0, 0], 0).expand(self.clients)
            elif self.everywhere:
                scores = everyone[metric.name][:, 0]
                known = scores.new_full((self.clients, *scores.shape[1:]), torch.nan)  # whatever torch's default is
                known[self.everywhere] = scores
                per_client[away] = self._one(away, known, 1)
            for name in (home, away):
                if name in per_client:
                    if name == home:
                        found |= spread(name, per_client[name], metric.lower_is_better, self._sizes, self._recent)
                    else:
                        found |= spread(name, per_client[name], metric.lower_is_better)
            if self._global:
                name = f"global/global_test{ending}"
                found[name] = float(self._one(name, shared[metric.name][0, 0], 0))
        if self._members:
            (members,) = self._members.means().values()
            found |= {"global/best_mode": float(members.max()), "global/worst_mode": float(members.min())}
            entropies = [entropy.cpu() for entropy in self._entropies]
            found["global/entropy"] = float(torch.cat([one for own in ranks.gather(entropies) for one in own]).mean())
        return found, per_client

    def details(self) -> dict[str, Any]:
        """What all processes have counted besides the scores, in plain types; all of them call it, once.

        That are ``test_images``, the numbers of images that each client is scored on (M,); ``predictions``, by
        ``personal`` and ``global`` a :meth:`.Tally.record`; ``global/local_test``, the global model's score on the
        test images of each client (M,), where clients have models of their own; and ``per_class``, scores of each
        class. A private run has neither confusions nor scores of classes.
        """
        ranks = self.federation.ranks
        shared = self._states is not None
        names = [name for name, there in (("personal", self.federation.personalized), ("global", shared)) if there]
        found: dict[str, Any] = {
            "test_images": self._sizes.tolist(),
            "predictions": {name: self._tallies[name].record(ranks) for name in names},
        }
        if self.federation.protection.private:  # their rows tell how many images of each class a client has
            for predicted in found["predictions"].values():
                predicted.pop("confusion", None)
        else:  # scores of one class show how few images of it a client has
            found["per_class"] = {name: scores.tolist() for name, scores in self.per_class.items()}
        if len(names) == 2:
            self._shared_local.merge(ranks)
            (scores,) = self._shared_local.means().values()
            found["global/local_test"] = scores[0].tolist()
        return found

    def _one(self, name: str, scores: Tensor, axes: int) -> Tensor:
        """Scores with so many axes; of those for each class, which are kept, the mean of the classes that occur."""
        if scores.dim() == axes:
            return scores
        self.per_class[name] = scores
        return scores.nanmean(-1)


class ShiftedEvaluation:
    """Scores of the personal models, and of the global one, on the same images, each of which is read once.

    Several processes share the work as in :class:`Evaluation`. With ``others`` a client's model is scored on the images
    of the other clients alone, and the global model as if it were each client's, mean over clients.
    """

    def __init__(
        self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int], others: bool = False
    ) -> None:
        self.federation = federation
        self.everywhere = everywhere
        self.others = others
        multilabel = federation.settings.training.multilabel
        self._personal = Scores(metrics, multilabel, models=len(everywhere))
        self._shared = Scores(metrics, multilabel, models=federation.num_clients if others else 1)

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch, the ``index``-th of the evaluation."""
        federation = self.federation
        engine = self.federation.engine
        x = batch.x
        if engine.trunk is not None and tuple(x.shape[1:]) == tuple(engine.trunk.image):
            x = engine.features(x)  # once, not for each model
        if federation.settings.algorithm.global_model and index % federation.ranks.size == federation.ranks.rank:
            each = range(federation.num_clients if self.others else 1)
            self._update(self._shared, shared_logits(federation, x).expand(len(each), -1, -1), batch, each, each)
        if federation.personalized:
            for places, clients, logits in everywhere_logits(federation, self.everywhere, x):
                self._update(self._personal, logits, batch, places, clients)

    def _update(
        self, scores: Scores, logits: Tensor, batch: EvalBatch, places: Sequence[int], clients: Sequence[int]
    ) -> None:
        if not self.others:
            scores.update(logits, batch.y, models=places)
            return
        owner = to_device_async(batch.owner, batch.y.device)
        for place, client, own in zip(places, clients, logits, strict=True):
            scores.update(own.unsqueeze(0), batch.y, models=[place], counted=owner != client)

    def result(self) -> dict[str, tuple[Tensor, float]]:
        """What all processes have counted, by metric; all of them call it. Scores of classes are their mean.

        Each personal model's score (M,), NaN where it was not run, and the global one's, NaN where there is none.
        """
        clients = self.federation.num_clients
        for scores in (self._personal, self._shared):
            scores.merge(self.federation.ranks)
        found = {}
        personal = self._personal.means()
        for name, values in self._shared.means().items():
            own = values[:, 0].expand(clients)
            if self.federation.personalized:
                own = values.new_full((clients,), torch.nan)
                own[list(self.everywhere)] = personal[name][:, 0]
            found[name] = own, float(values[:, 0].nanmean())
        return found


def sample_clients(clients: int, count: int | None, seed: int) -> list[int]:
    """Clients whose models run on everyone's images, in order: all, or so many drawn from the run's seed.

    >>> sample_clients(3, None, 0), len(sample_clients(9, 4, 0)), sample_clients(9, 0, 0)
    ([0, 1, 2], 4, [])
    """
    if count is None or count >= clients:
        return list(range(clients))
    return sorted(torch.randperm(clients, generator=generator(seed, "global test"))[:count].tolist())


GROUP = 32
"""Clients whose states are gathered at once."""


def everywhere_logits(
    federation: Federation, everywhere: Sequence[int], x: Tensor
) -> Iterator[tuple[Sequence[int], Sequence[int], Tensor]]:
    """Run personal models of this process on the same images, some at a time.

    Yields:
        Places in ``everywhere``, the clients there, and the logits (p, B, K) of their models.
    """
    owned = set(federation.owned())
    running = [(place, client) for place, client in enumerate(everywhere) if client in owned]
    for start in range(0, len(running), GROUP):
        places, clients = zip(*running[start : start + GROUP], strict=True)
        yield places, clients, federation.engine.shared_logits(federation.personal_states(clients), x)


def shared_logits(federation: Federation, x: Tensor) -> Tensor:
    """Logits (B, K) of the global model."""
    average = federation.settings.algorithm.average
    multilabel = federation.settings.training.multilabel
    return ensemble(federation.engine.shared_logits(federation.server.members(), x), average, multilabel)


def own_logits(federation: Federation, batch: EvalBatch) -> Tensor | None:
    """Logits (B, K) of each image by its owner's personal model: each image runs once.

    Stretches of one owner's images are stacked with others that are at most twice as long. Logits are zero for images
    whose owner another process has, and ``None`` where that goes for all.
    """
    stretches = [(owner, len(list(rows))) for owner, rows in groupby(batch.owner.tolist())]
    counts = torch.tensor([count for _, count in stretches])
    starts = counts.cumsum(0) - counts
    here = set(federation.owned())
    alike: dict[int, list[int]] = {}
    for place, (owner, count) in enumerate(stretches):
        if owner in here:
            alike.setdefault(count.bit_length(), []).append(place)
    logits = None
    for places in alike.values():
        for begin in range(0, len(places), GROUP):
            part = places[begin : begin + GROUP]
            step = torch.arange(int(counts[part].max()))
            rows = starts[part, None] + step.minimum(counts[part, None] - 1)  # the last image fills what is too short
            real = (step < counts[part, None]).flatten().nonzero().flatten()
            states = federation.personal_states([stretches[place][0] for place in part])
            with torch.no_grad():
                run = federation.engine.logits(states, batch.x[to_device_async(rows, batch.x.device)]).flatten(0, 1)
            logits = run.new_zeros(len(batch.x), *run.shape[1:]) if logits is None else logits
            logits[to_device_async(rows.flatten()[real], run.device)] = run[to_device_async(real, run.device)]
    return logits
