# SPDX-License-Identifier: Apache-2.0
"""Scores of the clients' models and of the global one, and their logits."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perada.core.batches import EvalBatch
from perada.core.ranks import Ranks
from perada.core.seeding import generator
from perada.core.states import send
from perada.engine.losses import ensemble
from perada.federation.federation import Federation
from perada.federation.metrics import Metric, Tally, spread
from perada.server.aggregate import double


class _Piece(NamedTuple):
    """Predictions of some models on some images, on the CPU."""

    models: tuple[int, ...]
    predictions: Tensor
    labels: Tensor
    groups: Tensor


class Scores:
    """Scores P ``models`` on G ``groups`` of images each by some metrics; labels are 0/1 per class if ``multilabel``.

    Accuracy is counted on the device, and nothing is copied from it before the end; the others have to keep all
    predictions.
    """

    def __init__(self, metrics: Sequence[Metric], multilabel: bool, models: int = 1, groups: int = 1) -> None:
        self.metrics, self.multilabel = metrics, multilabel
        self._counted = any(metric.compute is None for metric in metrics)
        self._kept = any(metric.compute is not None for metric in metrics)
        self._counts = torch.zeros(2, models, groups, dtype=torch.int64)  # right predictions, and all
        self._pieces: list[_Piece] = []

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self._pieces) or bool(self._counts.any())

    def update(
        self,
        logits: Tensor,
        y: Tensor,
        groups: Tensor | None = None,
        *,
        models: Sequence[int] | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Add a batch: logits (p, B, K) of p ``models``, by default all, and classes (B,) or labels (B, K).

        ``groups`` (B,) are those of the images, by default group 0; ``counted`` (B,) tells which count, by default all.
        """
        models = range(self._counts.shape[1]) if models is None else models
        groups = y.new_zeros(len(y), dtype=torch.int64) if groups is None else groups
        if self._counted:
            self._count(logits, y, groups, models, counted)
        if not self._kept:
            return
        # In double precision: in single, confident predictions would all be ranked alike.
        exact = logits.cpu().double()  # of a device that may have none
        predictions = exact.sigmoid() if self.multilabel else exact.softmax(-1)
        rows = slice(None) if counted is None else counted.cpu()
        self._pieces.append(_Piece(tuple(models), predictions[:, rows], y.cpu()[rows], groups.cpu()[rows]))

    def _count(self, logits: Tensor, y: Tensor, groups: Tensor, models: Sequence[int], counted: Tensor | None) -> None:
        if self.multilabel:
            right = ((logits.float().sigmoid() > 0.5) == y.long()).sum(-1)
            every = torch.full_like(right, logits.shape[-1])
        else:
            right = (logits.argmax(-1) == y).long()
            every = torch.ones_like(right)
        both = torch.stack([right, every])
        if counted is not None:
            both = both * counted
        self._counts = send(self._counts, both.device)
        sums = both.new_zeros(*both.shape[:2], self._counts.shape[2]).index_add_(2, groups, both)
        self._counts.index_add_(1, send(torch.tensor(models), both.device), sums)

    @property
    def counts(self) -> Tensor:
        """Right predictions and all, (2, P, G), on the CPU; zeros unless a metric is accuracy."""
        return self._counts.cpu()

    def merge(self, ranks: Ranks) -> None:
        """Add what the other processes counted; all of them call it, once, at the end."""
        ranks.sum_([self._counts])
        if self._kept:
            self._pieces = [piece for pieces in ranks.gather(self._pieces) for piece in pieces]

    def compute(self) -> Tensor:
        """Scores (P, G) by the first metric, on the CPU; NaN where a model has no image of a group."""
        return self.means(self.metrics[:1])[self.metrics[0].name]

    def means(self, metrics: Sequence[Metric] | None = None) -> dict[str, Tensor]:
        """Scores (P, G) by each metric; of one that scores each class, the mean of the classes that occur."""
        every = self.all(metrics)
        return {name: scores if scores.dim() == 2 else scores.nanmean(-1) for name, scores in every.items()}

    def all(self, metrics: Sequence[Metric] | None = None) -> dict[str, Tensor]:
        """Scores (P, G) by each metric, or (P, G, K) by one that scores each class, on the CPU."""
        metrics = self.metrics if metrics is None else metrics
        found = {}
        for metric in metrics:
            if metric.compute is None:
                counts = self._counts.cpu().float()
                found[metric.name] = counts[0] / counts[1]
        computed = [metric for metric in metrics if metric.compute is not None]
        return found | (self._by_group(computed) if computed else {})

    def _by_group(self, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Scores by metrics of all predictions for a group."""
        shape = self._counts.shape[1:]
        values: dict[str, dict[tuple[int, int], Tensor]] = {metric.name: {} for metric in metrics}
        for models in dict.fromkeys(piece.models for piece in self._pieces):
            own = [piece for piece in self._pieces if piece.models == models]
            predictions = torch.cat([piece.predictions for piece in own], 1)
            labels = torch.cat([piece.labels for piece in own])
            groups = torch.cat([piece.groups for piece in own])
            sizes = groups.bincount(minlength=shape[1]).tolist()
            for group, rows in enumerate(torch.split(groups.argsort(stable=True), sizes)):
                for place, model in enumerate(models if len(rows) else ()):
                    for metric in metrics:
                        assert metric.compute is not None
                        score = metric.compute(predictions[place, rows], labels[rows])
                        values[metric.name][model, group] = score.to(torch.get_default_dtype())
        found = {}
        for name, scores in values.items():
            classes = next(iter(scores.values())).shape if scores else ()
            found[name] = torch.full((*shape, *classes), torch.nan)
            for (model, group), score in scores.items():
                found[name][model, group] = score
        return found


def predictive_entropy(logits: Tensor, multilabel: bool) -> Tensor:
    """Entropies (B,) of predictions, in nats, of logits (B, K); if ``multilabel`` the mean of K Bernoulli ones.

    >>> predictive_entropy(torch.zeros(1, 4), False).exp().tolist()
    [4.0]
    """
    p = double(logits).sigmoid() if multilabel else double(logits).softmax(-1)
    terms = -torch.xlogy(p, p) - (torch.xlogy(1 - p, 1 - p) if multilabel else 0)
    return terms.mean(-1) if multilabel else terms.sum(-1)


class Evaluation:
    """Scores of the personal models, on the images of their clients and on everyone's, and of the global model.

    On several processes each runs the personal models of the clients it owns, and the global model on every so many-th
    batch. The models of the clients ``everywhere`` run on everyone's images.
    """

    def __init__(self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int]) -> None:
        self.federation, self.metrics = federation, metrics
        self.clients, self.multilabel = federation.num_clients, federation.settings.training.multilabel
        self.everywhere = list(everywhere)
        self._owned = torch.zeros(self.clients, dtype=torch.bool)
        self._owned[federation.owned()] = True
        self._local = self._scores(groups=self.clients)
        self._everyone = self._scores(models=len(self.everywhere))
        self._states = federation.members() if federation.settings.algorithm.global_model else None
        members = 1 if self._states is None else len(next(iter(self._states.values())))
        self._global = self._scores()
        self._members = Scores(metrics[:1], self.multilabel, models=members)
        self._sizes = torch.zeros(self.clients, dtype=torch.int64)
        self.per_class: dict[str, Tensor] = {}
        self._entropies: list[Tensor] = []
        self._shared_local = Scores(metrics[:1], self.multilabel, groups=self.clients)
        self._tallies = {name: Tally(self.multilabel) for name in ("personal", "global")}

    def _scores(self, models: int = 1, groups: int = 1) -> Scores:
        return Scores(self.metrics, self.multilabel, models, groups)

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch of the test set, the ``index``-th of the evaluation."""
        federation, owner = self.federation, send(batch.owner, batch.x.device)
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
            own = self._run_everywhere(batch, owner)
            if len(self.everywhere) < self.clients:
                own = own_logits(federation, batch)
            if own is not None:
                counted = None if federation.ranks.size == 1 else send(self._owned, owner.device)[owner]
                self._local.update(own.unsqueeze(0), batch.y, owner, counted=counted)
                self._tallies["personal"].update(own, batch.y, owner, counted)

    def _run_everywhere(self, batch: EvalBatch, owner: Tensor) -> Tensor | None:
        """Run personal models on a whole batch; return the logits (B, K) of each image's owner's, where that ran."""
        rows, own = torch.arange(len(owner), device=owner.device), None
        for places, clients, logits in everywhere_logits(self.federation, self.everywhere, batch.x):
            self._everyone.update(logits, batch.y, models=places)
            place = owner[:, None] == send(torch.tensor(clients), owner.device)
            theirs = logits[place.long().argmax(1), rows]
            own = theirs if own is None else torch.where(place.any(1, keepdim=True), theirs, own)
        return own

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
            home, away = f"personal/local_test{ending}", f"personal/global_test{ending}"
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
                    sizes = self._sizes if name == home else None
                    found |= spread(name, per_client[name], metric.falls, sizes)
            if self._global:
                name = f"global/global_test{ending}"
                found[name] = float(self._one(name, shared[metric.name][0, 0], 0))
        if self._members:
            members = self._members.compute()
            found |= {"global/best_mode": float(members.max()), "global/worst_mode": float(members.min())}
            entropies = [entropy.cpu() for entropy in self._entropies]
            found["global/entropy"] = float(torch.cat([one for own in ranks.gather(entropies) for one in own]).mean())
        return found, per_client

    def details(self) -> dict[str, Any]:
        """What all processes have counted besides the scores, in plain types; all of them call it, once.

        Returns:
            ``predictions``, by ``personal`` and ``global`` what :meth:`.Tally.record` gives, in a private run without
            the confusions; and ``global/local_test``, the global model's score on the test images of each client (M,),
            where clients have models of their own.
        """
        ranks, shared = self.federation.ranks, self._states is not None
        names = [name for name, there in (("personal", self.federation.personalized), ("global", shared)) if there]
        found: dict[str, Any] = {"predictions": {name: self._tallies[name].record(ranks) for name in names}}
        if self.federation.protection.private:  # their rows tell how many images of each class a client has
            for predicted in found["predictions"].values():
                predicted.pop("confusion", None)
        if len(names) == 2:
            self._shared_local.merge(ranks)
            found["global/local_test"] = self._shared_local.compute()[0].tolist()
        return found

    def _one(self, name: str, scores: Tensor, axes: int) -> Tensor:
        """Scores with so many axes; of those for each class, which are kept, the mean of the classes that occur."""
        if scores.dim() == axes:
            return scores
        self.per_class[name] = scores
        return scores.nanmean(-1)


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
    average, multilabel = federation.settings.algorithm.average, federation.settings.training.multilabel
    return ensemble(federation.engine.shared_logits(federation.members(), x), average, multilabel)


def own_logits(federation: Federation, batch: EvalBatch) -> Tensor | None:
    """Logits (B, K) of each image by its owner's personal model: each image runs once.

    Stretches of one owner's images are stacked with others that are at most twice as long. Logits are zero for images
    whose owner another process has, and ``None`` where that goes for all.
    """
    stretches = [(owner, len(list(rows))) for owner, rows in groupby(batch.owner.tolist())]
    counts = torch.tensor([count for _, count in stretches])
    starts, here = counts.cumsum(0) - counts, set(federation.owned())
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
                run = federation.engine.logits(states, batch.x[send(rows, batch.x.device)]).flatten(0, 1)
            logits = run.new_zeros(len(batch.x), *run.shape[1:]) if logits is None else logits
            logits[send(rows.flatten()[real], run.device)] = run[send(real, run.device)]
    return logits
