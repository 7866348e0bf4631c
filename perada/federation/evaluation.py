# SPDX-License-Identifier: Apache-2.0
"""Scores and logits of the clients' models and of the global one, on the clients' test sets and on shifted ones."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.rounds import EvalBatch
from perada.core.seeding import generator
from perada.core.states import State, stack_size, to_device_async
from perada.engine.engine import ensemble
from perada.federation.federation import Federation
from perada.federation.metrics import Metric, spread
from perada.federation.scores import Scores, Tally, probabilities


def predictive_entropy(logits: Tensor, multilabel: bool) -> Tensor:
    """Compute the entropies (B,) of predictions, in nats, from logits (B, K).

    With several labels an image it is the mean over K Bernoulli distributions.

    >>> predictive_entropy(torch.zeros(1, 4), False).exp().tolist()
    [4.0]
    """
    p = probabilities(logits, multilabel)
    if multilabel:
        return (-torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)).mean(-1)
    return -torch.xlogy(p, p).sum(-1)


class EvaluationPass:
    """Scores of the personal models, on the images of their clients and on everyone's, and of the global model.

    With R processes each runs the personal models of the clients that it owns, and the global model on every R-th
    batch.

    Args:
        federation: Whose models are scored.
        metrics: The metrics; the first one has the plain names.
        everywhere: Clients whose models run on everyone's images.

    Attributes:
        per_class: Scores of classes by name, (M, K) or (K,); filled by :meth:`result`.
    """

    def __init__(self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int]) -> None:
        self.federation = federation
        self.metrics = metrics
        self.num_clients = federation.num_clients
        self.multilabel = federation.settings.training.multilabel
        self.everywhere = list(everywhere)
        self._owned = torch.zeros(self.num_clients, dtype=torch.bool)
        self._owned[federation.owned()] = True
        self._members: State | None = None
        num_members = 1
        if federation.settings.algorithm.global_model:
            self._members = federation.server.members()
            num_members = stack_size(self._members)

        # Of the models with which clients predict, each on its client's images.
        self._local = Scores(metrics, self.multilabel, groups=self.num_clients)
        # Of the personal models on everyone's images, and of the global model on these.
        self._everyone = Scores(metrics, self.multilabel, models=len(self.everywhere))
        self._global = Scores(metrics, self.multilabel)
        # Of the global model on each client's images, beside the personal ones.
        self._global_local = Scores(metrics[:1], self.multilabel, groups=self.num_clients)
        # Of single members of an ensemble.
        self._of_members = Scores(metrics[:1], self.multilabel, models=num_members)
        self._entropies: list[Tensor] = []

        self._sizes = torch.zeros(self.num_clients, dtype=torch.int64)
        # Before the first round nobody took part, and there is no such mean.
        self._recent = federation.participation.recent if federation.rounds_done else None
        self._tallies = {name: Tally(self.multilabel) for name in ("personal", "global")}
        self.per_class: dict[str, Tensor] = {}

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch of the test set.

        Args:
            batch: The batch.
            index: Its place in the evaluation, by which processes share the runs of the global model.
        """
        ranks = self.federation.ranks
        owner = to_device_async(batch.owner, batch.x.device)
        self._sizes += batch.owner.cpu().bincount(minlength=self.num_clients)
        if self._members is not None and index % ranks.size == ranks.rank:
            self._score_global_model(self._members, batch, owner)
        if self.federation.personalized:
            self._score_personal_models(batch, owner)

    def _score_global_model(self, members: State, batch: EvalBatch, owner: Tensor) -> None:
        """Score the global model, or the ensemble of ``members`` (K, ...), on a batch."""
        federation = self.federation
        logits_of_members = federation.engine.shared_logits(members, batch.x)
        logits = ensemble(logits_of_members, federation.settings.algorithm.average, self.multilabel)
        self._global.update(logits.unsqueeze(0), batch.y)
        self._tallies["global"].update(logits, batch.y, owner)
        if len(logits_of_members) > 1:
            self._of_members.update(logits_of_members, batch.y)
            self._entropies.append(predictive_entropy(logits, self.multilabel))
        # Without personal models, clients predict with the global one.
        of_clients = self._global_local if federation.personalized else self._local
        of_clients.update(logits.unsqueeze(0), batch.y, owner)

    def _score_personal_models(self, batch: EvalBatch, owner: Tensor) -> None:
        """Score personal models on everyone's images, and the model of the owner (B,) on each image."""
        federation = self.federation
        rows = torch.arange(len(owner), device=owner.device)
        by_owner: Tensor | None = None
        for places, clients, logits in everywhere_logits(federation, self.everywhere, batch.x):
            self._everyone.update(logits, batch.y, models=places)
            # Logits of the images' owners are taken from the same pass, where they are among these clients.
            is_owner = owner[:, None] == to_device_async(torch.tensor(clients), owner.device)
            of_owners = logits[is_owner.long().argmax(1), rows]
            if by_owner is None:
                by_owner = of_owners
            else:
                by_owner = torch.where(is_owner.any(1, keepdim=True), of_owners, by_owner)
        if len(self.everywhere) < self.num_clients:
            by_owner = own_logits(federation, batch)
        if by_owner is None:
            return
        counted: Tensor | None = None
        if federation.ranks.size > 1:
            # Each process counts the images whose owner's model it has.
            counted = to_device_async(self._owned, owner.device)[owner]
        self._local.update(by_owner.unsqueeze(0), batch.y, owner, counted=counted)
        self._tallies["personal"].update(by_owner, batch.y, owner, counted)

    def result(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Merge the counts of all processes. A collective: all of them must call this, once.

        Returns:
            Scores by name, and those of each client (M,), NaN where it has none. The first metric has the plain names.
            Scores of classes are in ``per_class`` too, (M, K) or (K,).
        """
        ranks = self.federation.ranks
        for scores in (self._local, self._everyone, self._global, self._of_members):
            scores.merge(ranks)
        results: dict[str, float] = {}
        per_client: dict[str, Tensor] = {}
        local = self._local.all()
        of_global_model = self._global.all()
        everyone = self._everyone.all()
        for place, metric in enumerate(self.metrics):
            ending = f"_{metric.name}" if place else ""
            on_local = f"personal/local_test{ending}"
            on_global = f"personal/global_test{ending}"
            global_score = of_global_model[metric.name][0, 0]
            per_client[on_local] = self._mean_of_classes(on_local, local[metric.name][0], 1)
            results |= spread(on_local, per_client[on_local], metric.lower_is_better, self._sizes, self._recent)
            on_everyone = self._on_everyone(on_global, everyone[metric.name][:, 0], global_score)
            if on_everyone is not None:
                per_client[on_global] = on_everyone
                results |= spread(on_global, on_everyone, metric.lower_is_better)
            if self._global:
                name = f"global/global_test{ending}"
                results[name] = float(self._mean_of_classes(name, global_score, 0))
        if self._of_members:
            results |= self._member_results(ranks)
        return results, per_client

    def _on_everyone(self, name: str, of_sampled: Tensor, global_score: Tensor) -> Tensor | None:
        """Return the scores (M,) on everyone's images of the models that clients predict with.

        Args:
            name: Name of the scores.
            of_sampled: Scores of the personal models that ran on everyone's images, (p,) or (p, K).
            global_score: That of the global model, a number or (K,).

        Returns:
            NaN for clients whose model did not run; None if no model of a client did.
        """
        if not self.federation.personalized:
            # All clients predict with the global model.
            return self._mean_of_classes(name, global_score, 0).expand(self.num_clients)
        if not self.everywhere:
            return None
        of_all = of_sampled.new_full((self.num_clients, *of_sampled.shape[1:]), torch.nan)
        of_all[self.everywhere] = of_sampled
        return self._mean_of_classes(name, of_all, 1)

    def _member_results(self, ranks: Ranks) -> dict[str, float]:
        """Score the best and the worst member of an ensemble, and the mean entropy of its predictions. A collective."""
        (scores,) = self._of_members.means().values()
        entropies: list[Tensor] = []
        for of_rank in ranks.gather([entropy.cpu() for entropy in self._entropies]):
            entropies += of_rank
        return {
            "global/best_mode": float(scores.max()),
            "global/worst_mode": float(scores.min()),
            "global/entropy": float(torch.cat(entropies).mean()),
        }

    def details(self) -> dict[str, Any]:
        """Return all other counts of all processes. A collective: all of them must call this, once.

        Returns:
            Entries in plain types:

            - ``test_images``: the number of images that each client is scored on (M,);
            - ``predictions``: by ``personal`` and ``global``, a :meth:`.Tally.record`;
            - ``global/local_test``: the global model's score on each client's test images (M,), with personal models;
            - ``per_class``: scores of each class.

            A private run has neither confusions nor scores of classes.
        """
        ranks = self.federation.ranks
        names = []
        if self.federation.personalized:
            names.append("personal")
        if self._members is not None:
            names.append("global")
        details: dict[str, Any] = {
            "test_images": self._sizes.tolist(),
            "predictions": {name: self._tallies[name].record(ranks) for name in names},
        }
        if self.federation.protection.private:  # their rows tell how many images of each class a client has
            for predictions in details["predictions"].values():
                predictions.pop("confusion", None)
        else:  # scores of one class show how few images of it a client has
            details["per_class"] = {name: scores.tolist() for name, scores in self.per_class.items()}
        if len(names) == 2:
            self._global_local.merge(ranks)
            (scores,) = self._global_local.means().values()
            details["global/local_test"] = scores[0].tolist()
        return details

    def _mean_of_classes(self, name: str, scores: Tensor, axes: int) -> Tensor:
        """Average scores of classes over the classes that occur, and remember them in ``per_class``.

        Args:
            name: Name of the scores.
            scores: Scores with ``axes`` axes, which are returned as they are, or with one more for classes.
            axes: 0 for a number, 1 for scores (M,) of clients.
        """
        if scores.dim() == axes:
            return scores
        self.per_class[name] = scores
        return scores.nanmean(-1)


class ShiftedEvaluation:
    """Scores of the personal models, and of the global one, on the same images, each of which is read once.

    Several processes share the work as in :class:`EvaluationPass`.

    Args:
        federation: Whose models are scored.
        metrics: The metrics.
        everywhere: Clients whose models are scored.
        others: Whether a client's model is scored only on the images of the other clients, and the global model as if
            it were each client's, mean over clients.
    """

    def __init__(
        self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int], others: bool = False
    ) -> None:
        self.federation = federation
        self.everywhere = everywhere
        self.others = others
        multilabel = federation.settings.training.multilabel
        # How often the global model is scored: once, or as the model of each client.
        self._global_places = range(federation.num_clients if others else 1)
        self._personal = Scores(metrics, multilabel, models=len(everywhere))
        self._global = Scores(metrics, multilabel, models=len(self._global_places))

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch, the ``index``-th of the evaluation."""
        federation = self.federation
        engine = self.federation.engine
        x = batch.x
        if engine.trunk is not None and tuple(x.shape[1:]) == tuple(engine.trunk.image):
            x = engine.features(x)  # once, not for each model
        if federation.settings.algorithm.global_model and index % federation.ranks.size == federation.ranks.rank:
            logits = shared_logits(federation, x).expand(len(self._global_places), -1, -1)
            self._update(self._global, logits, batch, self._global_places, self._global_places)
        if federation.personalized:
            for places, clients, logits in everywhere_logits(federation, self.everywhere, x):
                self._update(self._personal, logits, batch, places, clients)

    def _update(
        self, scores: Scores, logits: Tensor, batch: EvalBatch, places: Sequence[int], clients: Sequence[int]
    ) -> None:
        """Add the logits (p, B, K) of the models of ``clients``, whose positions in ``scores`` are ``places``."""
        if not self.others:
            scores.update(logits, batch.y, models=places)
            return
        owner = to_device_async(batch.owner, batch.y.device)
        for place, client, of_client in zip(places, clients, logits, strict=True):
            scores.update(of_client.unsqueeze(0), batch.y, models=[place], counted=owner != client)

    def result(self) -> dict[str, tuple[Tensor, float]]:
        """Merge the counts of all processes. A collective: all of them must call this.

        Returns:
            By metric each personal model's score (M,), NaN where it was not run, and the global one's, NaN where there
            is none. Scores of classes are their mean.
        """
        clients = self.federation.num_clients
        for scores in (self._personal, self._global):
            scores.merge(self.federation.ranks)
        results = {}
        personal = self._personal.means()
        for name, values in self._global.means().items():
            per_client = values[:, 0].expand(clients)
            if self.federation.personalized:
                per_client = values.new_full((clients,), torch.nan)
                per_client[list(self.everywhere)] = personal[name][:, 0]
            results[name] = per_client, float(values[:, 0].nanmean())
        return results


def sample_clients(clients: int, count: int | None, seed: int) -> list[int]:
    """Choose the clients whose models run on everyone's images, in order.

    Args:
        clients: Number of all clients.
        count: How many are drawn; None for all.
        seed: The run's.

    >>> sample_clients(3, None, 0), len(sample_clients(9, 4, 0)), sample_clients(9, 0, 0)
    ([0, 1, 2], 4, [])
    """
    if count is None or count >= clients:
        return list(range(clients))
    return sorted(torch.randperm(clients, generator=generator(seed, "global test"))[:count].tolist())


CLIENTS_AT_ONCE = 32
"""Largest number of clients whose states are gathered at once."""


def everywhere_logits(
    federation: Federation, everywhere: Sequence[int], x: Tensor
) -> Iterator[tuple[Sequence[int], Sequence[int], Tensor]]:
    """Run the personal models of this process on the same images, in groups whose states fit in memory.

    Yields:
        Places in ``everywhere``, the clients there, and the logits (p, B, K) of their models.
    """
    owned = set(federation.owned())
    owned_places = [place for place, client in enumerate(everywhere) if client in owned]
    for start in range(0, len(owned_places), CLIENTS_AT_ONCE):
        places = owned_places[start : start + CLIENTS_AT_ONCE]
        clients = [everywhere[place] for place in places]
        states = federation.personal_states(clients)
        yield places, clients, federation.engine.shared_logits(states, x)


def shared_logits(federation: Federation, x: Tensor) -> Tensor:
    """Compute the logits (B, K) of the global model."""
    settings = federation.settings
    logits_of_members = federation.engine.shared_logits(federation.server.members(), x)
    return ensemble(logits_of_members, settings.algorithm.average, settings.training.multilabel)


def own_logits(federation: Federation, batch: EvalBatch) -> Tensor | None:
    """Run each image through its owner's personal model, once.

    Images of a client follow one another in a batch, but clients have unequal numbers. A stack of models takes as many
    images of each, so stretches of one owner's images are stacked with others that are at most twice as long.

    Returns:
        Logits (B, K), zero for images whose owner another process has; None where that holds for all.
    """
    owners: list[int] = []
    lengths: list[int] = []
    for owner, rows_of_stretch in groupby(batch.owner.tolist()):
        owners.append(owner)
        lengths.append(len(list(rows_of_stretch)))
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts
    owned = set(federation.owned())
    # Lengths of one number of binary digits: the longest is less than twice the shortest.
    stretches_by_digits: dict[int, list[int]] = {}
    for stretch, (owner, count) in enumerate(zip(owners, lengths, strict=True)):
        if owner in owned:
            stretches_by_digits.setdefault(count.bit_length(), []).append(stretch)
    logits: Tensor | None = None
    for stretches in stretches_by_digits.values():
        for begin in range(0, len(stretches), CLIENTS_AT_ONCE):
            part = stretches[begin : begin + CLIENTS_AT_ONCE]
            step = torch.arange(int(counts[part].max()))
            # The last image of a stretch fills it up to the length of the longest; what it gives twice is left out.
            rows = starts[part, None] + step.minimum(counts[part, None] - 1)
            real = (step < counts[part, None]).flatten().nonzero().flatten()
            states = federation.personal_states([owners[stretch] for stretch in part])
            with torch.no_grad():
                x = batch.x[to_device_async(rows, batch.x.device)]
                outputs = federation.engine.logits(states, x).flatten(0, 1)
            if logits is None:
                logits = outputs.new_zeros(len(batch.x), *outputs.shape[1:])
            real_rows = to_device_async(rows.flatten()[real], outputs.device)
            logits[real_rows] = outputs[to_device_async(real, outputs.device)]
    return logits
