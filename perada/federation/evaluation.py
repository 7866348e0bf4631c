# SPDX-License-Identifier: Apache-2.0
"""Scores and logits of the clients' models and of the global one, on the clients' test sets and on shifted ones."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from perada.core.ranks import Ranks
from perada.core.rounds import EvalBatch
from perada.core.seeding import generator
from perada.core.states import State, stack_size, to_device_async
from perada.federation.both_models import BothModels
from perada.federation.federation import Federation
from perada.scores.accumulation import Scores, Tally, probabilities
from perada.scores.failed_outputs import FailedOutputs
from perada.scores.metrics import Metric, by_suffix, spread
from perada.scores.number_counts import NumberCounts


@dataclass(frozen=True)
class _SharedOutputs:
    """What is computed of a batch once for all clients that predict with both models.

    Attributes:
        logits: Logits (B, K) of the global model.
        statistics: Statistics (B, D) of the images.
    """

    logits: Tensor
    statistics: Tensor


class EvaluationPass:
    """Scores of the personal models, on the images of their clients and on everyone's, and of the global model.

    With R processes each runs the personal models of the clients that it owns, and the global model on every R-th
    batch.

    Args:
        federation: Whose models are scored.
        metrics: The metrics; names of scores of the first one have no suffix.
        everywhere: Clients whose models run on everyone's images.
        both_models: Predicts with both models of a client, which is then scored too; None not to.

    Attributes:
        per_class: Scores of classes by name, (M, K) or (K,); filled by :meth:`result`.
    """

    def __init__(
        self,
        federation: Federation,
        metrics: Sequence[Metric],
        everywhere: Sequence[int],
        both_models: BothModels | None = None,
    ) -> None:
        self.federation = federation
        self.metrics = metrics
        self.num_clients = federation.num_clients
        self.task = federation.settings.training.task
        self.everywhere = list(everywhere)
        self._owned = torch.zeros(self.num_clients, dtype=torch.bool)
        self._owned[federation.owned()] = True
        self._members: State | None = None
        num_members = 1
        if federation.settings.algorithm.global_model:
            self._members = federation.server.members()
            num_members = stack_size(self._members)

        # These are scores of the models with which clients predict, each on its client's images.
        self._client_scores = Scores(metrics, self.task, num_groups=self.num_clients)
        # Personal models and the global model are scored on everyone's images.
        self._everywhere_scores = Scores(metrics, self.task, num_models=len(self.everywhere))
        self._global_scores = Scores(metrics, self.task)
        # The global model is also scored on each client's images, beside the personal ones.
        self._global_client_scores = Scores(metrics[:1], self.task, num_groups=self.num_clients)
        # Single members of an ensemble have scores, too.
        self._member_scores = Scores(metrics[:1], self.task, num_models=num_members)
        self._entropies: list[Tensor] = []

        # Clients that have one model predict with it.
        has_both_models = federation.personalized and self._members is not None
        self._both = both_models if has_both_models else None
        # Predictions with both models are scored on their client's images and on everyone's.
        self._both_client_scores = Scores(metrics, self.task, num_groups=self.num_clients)
        self._both_everywhere_scores = Scores(metrics, self.task, num_models=len(self.everywhere))
        # The number of images that are typical of each client: of its own, and of everyone's.
        self._num_typical = torch.zeros(self.num_clients, dtype=torch.int64)
        self._num_typical_everywhere = torch.zeros(self.num_clients, dtype=torch.int64)

        self._sizes = torch.zeros(self.num_clients, dtype=torch.int64)
        self._recent: Sequence[bool] | None = None
        if federation.rounds_done:
            # Before the first round no client has taken part, and there is no mean over recent clients.
            self._recent = federation.participation.recent
        self._tallies: dict[str, Tally | NumberCounts] = {}
        for model in ("personal", "global", "both"):
            self._tallies[model] = Tally(self.task) if self.task.has_classes else NumberCounts(self.task)
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
        # All processes have the global model, and share its batches among them.
        is_batch_of_rank = index % ranks.size == ranks.rank
        shared_outputs: _SharedOutputs | None = None
        if self._members is not None and (is_batch_of_rank or self._both is not None):
            logits_of_members = self.federation.engine.shared_logits(self._members, batch.x)
            logits = self.task.ensemble(logits_of_members, self.federation.settings.algorithm.average)
            if is_batch_of_rank:
                self._score_global_model(logits_of_members, logits, batch, owner)
            if self._both is not None:
                shared_outputs = _SharedOutputs(logits, self._both.statistics(batch.x))
        if self.federation.personalized:
            self._score_personal_models(batch, owner, shared_outputs)

    def _score_global_model(self, logits_of_members: Tensor, logits: Tensor, batch: EvalBatch, owner: Tensor) -> None:
        """Score the global model on a batch.

        Args:
            logits_of_members: Logits (N, B, K) of each member of an ensemble, or of the single model.
            logits: Logits (B, K) of the ensemble.
            batch: The batch.
            owner: The client (B,) of each image.
        """
        federation = self.federation
        one_model = logits.unsqueeze(0)
        self._global_scores.update(one_model, batch.y)
        self._tallies["global"].update(logits, batch.y, owner)
        if len(logits_of_members) > 1:
            self._member_scores.update(logits_of_members, batch.y)
            if self.task.has_classes:
                self._entropies.append(self.task.entropy(probabilities(logits, self.task)))
        if federation.personalized:
            self._global_client_scores.update(one_model, batch.y, owner)
        else:
            # Without personal models, clients predict with the global one.
            self._client_scores.update(one_model, batch.y, owner)

    def _score_personal_models(self, batch: EvalBatch, owner: Tensor, shared_outputs: _SharedOutputs | None) -> None:
        """Score personal models on everyone's images, and the model of the owner (B,) on each image.

        With ``shared_outputs``, predictions with both models are scored too.
        """
        owner_logits = self._score_everywhere(batch, owner, shared_outputs)
        if len(self.everywhere) < self.num_clients:
            # The models of some owners did not run on everyone's images.
            owner_logits = own_logits(self.federation, batch)
        if owner_logits is None:
            return
        counted: Tensor | None = None
        if self.federation.ranks.size > 1:
            # Each process counts the images whose owner's model it has.
            counted = to_device_async(self._owned, owner.device)[owner]
        self._client_scores.update(owner_logits.unsqueeze(0), batch.y, owner, counted=counted)
        self._tallies["personal"].update(owner_logits, batch.y, owner, counted)
        if shared_outputs is not None:
            self._score_both_models(batch, owner_logits, shared_outputs, counted)

    def _score_both_models(
        self, batch: EvalBatch, owner_logits: Tensor, shared_outputs: _SharedOutputs, counted: Tensor | None
    ) -> None:
        """Score the prediction with both models of each image's owner.

        Args:
            batch: The batch.
            owner_logits: Logits (B, K) of the owners' personal models.
            shared_outputs: The other outputs.
            counted: Mask (B,) of the images whose owner's model this process has; None for all.
        """
        assert self._both is not None
        owners = batch.owner.cpu()
        is_typical = self._both.typical_of_owners(owners, shared_outputs.statistics)
        weights = self._both.weights(owners.tolist(), owner_logits.device)
        logits = self._both.logits(owner_logits, shared_outputs.logits, is_typical, weights)
        owner = to_device_async(batch.owner, logits.device)
        self._both_client_scores.update(logits.unsqueeze(0), batch.y, owner, counted=counted)
        self._tallies["both"].update(logits, batch.y, owner, counted)
        if counted is not None:
            is_typical = is_typical & counted
        typical_owners = owners[is_typical.cpu()]
        self._num_typical += typical_owners.bincount(minlength=self.num_clients)

    def _score_everywhere(
        self, batch: EvalBatch, owner: Tensor, shared_outputs: _SharedOutputs | None
    ) -> Tensor | None:
        """Score the models that run on everyone's images, and predictions with both models if they have outputs.

        Returns:
            The logits (B, K) of the model of each image's owner (B,), from the same passes; those of another model
            where the owner's did not run here. None if no model ran.
        """
        rows = torch.arange(len(owner), device=owner.device)
        owner_logits: Tensor | None = None
        for run in everywhere_logits(self.federation, self.everywhere, batch.x):
            self._everywhere_scores.update(run.logits, batch.y, models=run.places)
            if self._both is not None and shared_outputs is not None:
                is_typical = self._both.typical(run.clients, shared_outputs.statistics)
                weights = self._both.weights(run.clients, run.logits.device).of_batches()
                logits_of_both = self._both.logits(run.logits, shared_outputs.logits, is_typical, weights)
                self._both_everywhere_scores.update(logits_of_both, batch.y, models=run.places)
                self._num_typical_everywhere[run.clients] += is_typical.sum(1).cpu()
            clients = to_device_async(torch.tensor(run.clients), owner.device)
            is_owner = owner.unsqueeze(1) == clients  # (B, p)
            # argmax() selects the first of the p models if none is the owner's.
            owner_model = is_owner.long().argmax(1)
            logits = run.logits[owner_model, rows]
            if owner_logits is None:
                owner_logits = logits
            else:
                has_owner = is_owner.any(1).view(-1, *[1] * (logits.dim() - 1))
                owner_logits = torch.where(has_owner, logits, owner_logits)
        return owner_logits

    def result(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Merge the counts of all processes. A collective: all of them must call this, once.

        Returns:
            Scores by name, and scores (M,) of the clients by name, NaN if a client has none. Names of the first metric
            have no suffix. Scores of classes are in ``per_class`` too, (M, K) or (K,).
        """
        ranks = self.federation.ranks
        # The order of these collectives must be the same on all ranks.
        self._client_scores.merge(ranks)
        self._everywhere_scores.merge(ranks)
        self._global_scores.merge(ranks)
        self._member_scores.merge(ranks)
        self._global_client_scores.merge(ranks)
        self._both_client_scores.merge(ranks)
        self._both_everywhere_scores.merge(ranks)
        ranks.sum_([self._num_typical, self._num_typical_everywhere])

        own_failed = self._client_scores.failed_images[0] > 0
        everywhere_failed = self._failed_on_everyone()
        results: dict[str, float] = {}
        per_client: dict[str, Tensor] = {}
        client_scores = self._client_scores.all()
        global_scores = self._global_scores.all()
        everywhere_scores = self._everywhere_scores.all()
        for suffix, metric in by_suffix(self.metrics).items():
            name = f"personal/local_test{suffix}"
            local_test = self._mean_of_classes(name, client_scores[metric.name][0], 1)
            per_client[name] = local_test
            results |= spread(name, local_test, metric.lower_is_better, self._sizes, self._recent, own_failed)

            name = f"personal/global_test{suffix}"
            global_score = global_scores[metric.name][0, 0]
            global_test = self._on_everyone(name, everywhere_scores[metric.name][:, 0], global_score)
            if global_test is not None:
                per_client[name] = global_test
                results |= spread(name, global_test, metric.lower_is_better, is_failed=everywhere_failed)

            if self._global_scores:
                name = f"global/global_test{suffix}"
                results[name] = float(self._mean_of_classes(name, global_score, 0))
        if self._both is not None:
            results |= self._results_of_both(per_client)
        if self._member_scores:
            results |= self._member_results(ranks)
        return results, per_client

    def _results_of_both(self, per_client: dict[str, Tensor]) -> dict[str, float]:
        """Return the scores of predictions with both models.

        Args:
            per_client: Receives the scores (M,) of the clients by name. ``typical/local_test`` is the share of each
                client's test images that are typical of it, ``typical/global_test`` that of everyone's test images.
        """
        results: dict[str, float] = {}
        own_failed = self._both_client_scores.failed_images[0] > 0
        everywhere_failed = torch.zeros(self.num_clients, dtype=torch.bool)
        everywhere_failed[self.everywhere] = self._both_everywhere_scores.failed_images[:, 0] > 0
        client_scores = self._both_client_scores.all()
        everywhere_scores = self._both_everywhere_scores.all()
        for suffix, metric in by_suffix(self.metrics).items():
            name = f"both/local_test{suffix}"
            local_test = self._mean_of_classes(name, client_scores[metric.name][0], 1)
            per_client[name] = local_test
            results |= spread(name, local_test, metric.lower_is_better, self._sizes, self._recent, own_failed)
            if self.everywhere:
                name = f"both/global_test{suffix}"
                global_test = self._spread_to_clients(name, everywhere_scores[metric.name][:, 0])
                per_client[name] = global_test
                results |= spread(name, global_test, metric.lower_is_better, is_failed=everywhere_failed)
        per_client["typical/local_test"] = self._num_typical.double() / self._sizes
        results["typical/local_test"] = float(per_client["typical/local_test"].nanmean())
        if self.everywhere:
            shares = torch.full((self.num_clients,), torch.nan, dtype=torch.float64)
            shares[self.everywhere] = self._num_typical_everywhere[self.everywhere].double() / self._sizes.sum()
            per_client["typical/global_test"] = shares
            results["typical/global_test"] = float(shares.nanmean())
        return results

    def _failed_on_everyone(self) -> Tensor:
        """Return a mask (M,) of the clients whose model has outputs that are NaN or infinite on anyone's images."""
        if not self.federation.personalized:
            return (self._global_scores.failed_images[0, 0] > 0).expand(self.num_clients)
        failed = torch.zeros(self.num_clients, dtype=torch.bool)
        failed[self.everywhere] = self._everywhere_scores.failed_images[:, 0] > 0
        return failed

    def failed_outputs(self) -> list[FailedOutputs]:
        """Return the models whose outputs are NaN or infinite for some images. Call :meth:`result` before."""
        images_of_own_model = self._client_scores.failed_images[0]
        images_of_global_model = self._global_client_scores.failed_images[0]
        if not self.federation.personalized:
            images_of_global_model = images_of_own_model
            images_of_own_model = torch.zeros_like(images_of_own_model)
        else:
            # Everyone's images include the client's own.
            images = self._everywhere_scores.failed_images[:, 0]
            images_of_own_model[self.everywhere] = torch.maximum(images_of_own_model[self.everywhere], images)
        rounds = self.federation.rounds_done
        failed: list[FailedOutputs] = []
        for client, count in enumerate(images_of_own_model.tolist()):
            if count:
                failed.append(FailedOutputs("personal", client, count, rounds))
        for client, count in enumerate(images_of_global_model.tolist()):
            if count:
                failed.append(FailedOutputs("global", client, count, rounds))
        return failed

    def _on_everyone(self, name: str, sampled_scores: Tensor, global_score: Tensor) -> Tensor | None:
        """Return the scores (M,) on everyone's images of the models that clients predict with.

        Args:
            name: Name of the scores.
            sampled_scores: Scores of the personal models that ran on everyone's images, (p,) or (p, K).
            global_score: That of the global model, a number or (K,).

        Returns:
            NaN for clients whose model did not run; None if no model of a client did.
        """
        if not self.federation.personalized:
            # All clients predict with the global model.
            return self._mean_of_classes(name, global_score, 0).expand(self.num_clients)
        if not self.everywhere:
            return None
        return self._spread_to_clients(name, sampled_scores)

    def _spread_to_clients(self, name: str, sampled_scores: Tensor) -> Tensor:
        """Return scores (M,) of all clients, NaN for those that do not run on everyone's images.

        Args:
            name: Name of the scores.
            sampled_scores: Scores of the others, (p,) or (p, K).
        """
        scores = sampled_scores.new_full((self.num_clients, *sampled_scores.shape[1:]), torch.nan)
        scores[self.everywhere] = sampled_scores
        return self._mean_of_classes(name, scores, 1)

    def _member_results(self, ranks: Ranks) -> dict[str, float]:
        """Score the best and the worst member of an ensemble, and the mean entropy of its predictions. A collective.

        Predictions that are numbers have no entropy.
        """
        # Members are scored by one metric.
        (scores,) = self._member_scores.means().values()
        entropies_of_rank = [entropy.cpu() for entropy in self._entropies]
        entropies: list[Tensor] = []
        for batches_of_rank in ranks.gather(entropies_of_rank):
            entropies += batches_of_rank
        best = scores.max()
        worst = scores.min()
        if self.metrics[0].lower_is_better:
            best = scores.min()
            worst = scores.max()
        results = {"global/best_mode": float(best), "global/worst_mode": float(worst)}
        if entropies:
            results["global/entropy"] = float(torch.cat(entropies).mean())
        return results

    def details(self) -> dict[str, Any]:
        """Return all other counts of all processes. A collective: all of them must call this, once.

        Returns:
            Entries in plain types:

            - ``test_images``: the number of images that each client is scored on (M,);
            - ``predictions``: by model (``personal``, ``global``, ``both``), a record of its :class:`.Tally` or counts;
            - ``global/local_test``: the global model's score on each client's test images (M,), with personal models;
            - ``per_class``: scores of each class.

            A private run has neither confusions nor scores of classes, nor counts of predicted numbers.
        """
        ranks = self.federation.ranks
        names = []
        if self.federation.personalized:
            names.append("personal")
        if self._members is not None:
            names.append("global")
        if self._both is not None:
            names.append("both")
        predictions = {}
        for name in names:
            predictions[name] = self._tallies[name].record(ranks)
        details: dict[str, Any] = {"test_images": self._sizes.tolist(), "predictions": predictions}
        if self.federation.protection.private:
            # Rows of a confusion matrix tell how many images of each class a client has.
            for record in predictions.values():
                record.pop("confusion", None)
                # The bins of numbers begin and end near the targets of single images.
                record.pop("numbers", None)
        else:
            # Scores of one class show how few images of it a client has.
            details["per_class"] = {name: scores.tolist() for name, scores in self.per_class.items()}
        if self.federation.personalized and self._members is not None:
            # The global model is scored by one metric here.
            (scores,) = self._global_client_scores.means().values()
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


@dataclass(frozen=True)
class ClientScores:
    """Scores of the clients' predictions on one set of images.

    Attributes:
        scores: Score (M,) of each client, NaN for those that were not scored.
        has_failed: Mask (M,) of the clients with outputs that are NaN or infinite.
    """

    scores: Tensor
    has_failed: Tensor


@dataclass(frozen=True)
class ModelScores:
    """Scores of a federation's models on one set of images.

    Attributes:
        personal: Scores of the personal models.
        global_score: Score of the global model; NaN if there is none.
        both: Scores of predictions with both models of each client; None if clients do not predict so.
    """

    personal: ClientScores
    global_score: float
    both: ClientScores | None = None


class ShiftedEvaluation:
    """Scores of the personal models, and of the global one, on the same images, each of which is read once.

    Several processes share the work as in :class:`EvaluationPass`.

    Args:
        federation: Whose models are scored.
        metrics: The metrics.
        everywhere: Clients whose models are scored.
        of_other_clients: Whether a client's model is scored only on the images of the other clients, and the global
            model as if it were each client's, mean over clients.
        both_models: Predicts with both models of a client, which is then scored too; None not to.

    Attributes:
        typical_shares: The share (M,) of the images that look like the client's own, NaN for clients that were not
            scored; filled by :meth:`result`. None if clients do not predict with both models.
    """

    def __init__(
        self,
        federation: Federation,
        metrics: Sequence[Metric],
        everywhere: Sequence[int],
        of_other_clients: bool = False,
        both_models: BothModels | None = None,
    ) -> None:
        self.federation = federation
        self.everywhere = everywhere
        self.others = of_other_clients
        task = federation.settings.training.task
        # The global model is scored once, or as the model of each client.
        self._global_places = range(federation.num_clients if of_other_clients else 1)
        self._personal = Scores(metrics, task, num_models=len(everywhere))
        self._global = Scores(metrics, task, num_models=len(self._global_places))

        # Clients that have one model predict with it.
        has_both_models = federation.personalized and federation.settings.algorithm.global_model
        self._both = both_models if has_both_models else None
        self._both_scores = Scores(metrics, task, num_models=len(everywhere))
        # Numbers of images on which each client was scored, and of those that are typical of it.
        self._num_images = torch.zeros(federation.num_clients, dtype=torch.int64)
        self._num_typical = torch.zeros(federation.num_clients, dtype=torch.int64)
        self.typical_shares: Tensor | None = None

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch, the ``index``-th of the evaluation."""
        federation = self.federation
        engine = self.federation.engine
        x = batch.x
        if engine.trunk is not None and tuple(x.shape[1:]) == tuple(engine.trunk.image):
            # Features are computed once, and not for each model.
            x = engine.features(x)
        # All processes have the global model, and share its batches among them.
        is_batch_of_rank = index % federation.ranks.size == federation.ranks.rank
        shared_outputs: _SharedOutputs | None = None
        if federation.settings.algorithm.global_model and (is_batch_of_rank or self._both is not None):
            logits = shared_logits(federation, x)
            if is_batch_of_rank:
                logits_of_places = logits.expand(len(self._global_places), *logits.shape)
                self._update_scores(self._global, logits_of_places, batch, self._global_places, self._global_places)
            if self._both is not None:
                shared_outputs = _SharedOutputs(logits, self._both.statistics(x))
        if federation.personalized:
            for run in everywhere_logits(federation, self.everywhere, x):
                self._update_scores(self._personal, run.logits, batch, run.places, run.clients)
                if shared_outputs is not None:
                    self._score_both_models(run, batch, shared_outputs)

    def _update_scores(
        self, scores: Scores, logits: Tensor, batch: EvalBatch, places: Sequence[int], clients: Sequence[int]
    ) -> None:
        """Add the logits (p, B, K) of the models of ``clients``, whose positions in ``scores`` are ``places``."""
        if not self.others:
            scores.update(logits, batch.y, models=places)
            return
        owner = to_device_async(batch.owner, batch.y.device)
        for place, client, client_logits in zip(places, clients, logits, strict=True):
            is_of_others = owner != client
            scores.update(client_logits.unsqueeze(0), batch.y, models=[place], counted=is_of_others)

    def _score_both_models(self, models_run: "ModelsRun", batch: EvalBatch, shared_outputs: _SharedOutputs) -> None:
        """Score predictions with both models of the p clients whose personal models ran on a batch."""
        assert self._both is not None
        is_typical = self._both.typical(models_run.clients, shared_outputs.statistics)  # (p, B)
        weights = self._both.weights(models_run.clients, models_run.logits.device).of_batches()
        logits = self._both.logits(models_run.logits, shared_outputs.logits, is_typical, weights)
        self._update_scores(self._both_scores, logits, batch, models_run.places, models_run.clients)

        is_scored = torch.ones(len(models_run.clients), len(batch.owner), dtype=torch.bool)
        if self.others:
            is_scored = batch.owner.cpu() != torch.tensor(models_run.clients).unsqueeze(1)
        clients = list(models_run.clients)
        self._num_images[clients] += is_scored.sum(1)
        self._num_typical[clients] += (is_typical.cpu() & is_scored).sum(1)

    def result(self) -> dict[str, ModelScores]:
        """Merge the counts of all processes. A collective: all of them must call this, once.

        Returns:
            The scores by metric. Scores of classes are averaged.
        """
        num_clients = self.federation.num_clients
        # The order of these collectives must be the same on all ranks.
        self._personal.merge(self.federation.ranks)
        self._global.merge(self.federation.ranks)
        if self._both is not None:
            self._both_scores.merge(self.federation.ranks)
            self.federation.ranks.sum_([self._num_images, self._num_typical])
            self.typical_shares = self._num_typical.double() / self._num_images

        global_failed = self._global.failed_images[:, 0] > 0
        personal_of_metrics = self._compute_client_scores(self._personal)
        both_of_metrics = self._compute_client_scores(self._both_scores)
        results = {}
        for name, scores in self._global.means().items():
            global_scores = scores[:, 0]
            global_score = math.nan if global_failed.any() else float(global_scores.nanmean())
            personal = personal_of_metrics[name]
            if not self.federation.personalized:
                # All clients predict with the global model.
                personal = ClientScores(global_scores.expand(num_clients), global_failed.expand(num_clients))
            both_scores = None if self._both is None else both_of_metrics[name]
            results[name] = ModelScores(personal, global_score, both_scores)
        return results

    def _compute_client_scores(self, merged_scores: Scores) -> dict[str, ClientScores]:
        """Return the merged scores of the models of ``everywhere``, by metric, as scores of all clients."""
        clients = list(self.everywhere)
        failed = torch.zeros(self.federation.num_clients, dtype=torch.bool)
        failed[clients] = merged_scores.failed_images[:, 0] > 0
        scores_of_metrics: dict[str, ClientScores] = {}
        for name, means in merged_scores.means().items():
            client_scores = means.new_full((self.federation.num_clients,), torch.nan)
            client_scores[clients] = means[:, 0]
            scores_of_metrics[name] = ClientScores(client_scores, failed)
        return scores_of_metrics


EVERYWHERE_LIMIT = 10**7
"""Forward passes of personal models on everyone's images in an evaluation, above which only some models are drawn."""
MIN_EVERYWHERE = 10
"""Number of models that are drawn at least."""


def count_everywhere(num_clients: int, num_images: int, requested: int | None) -> int:
    """Return the number of clients whose models run on everyone's images.

    Args:
        num_clients: Number of all clients.
        num_images: Number of all their test images.
        requested: The option ``global_test_clients``. None for all clients or, where they would take more than
            :data:`EVERYWHERE_LIMIT` forward passes, as many as stay below it, but at least :data:`MIN_EVERYWHERE`.

    >>> count_everywhere(100, 10_000, None), count_everywhere(10_000, 200_000, None)
    (100, 50)
    >>> count_everywhere(10_000, 200_000, 10_000)
    10000
    """
    if requested is not None:
        return min(requested, num_clients)
    if num_clients * num_images <= EVERYWHERE_LIMIT:
        return num_clients
    return min(num_clients, max(MIN_EVERYWHERE, EVERYWHERE_LIMIT // num_images))


def sample_clients(num_clients: int, count: int, seed: int) -> list[int]:
    """Choose the clients whose models run on everyone's images, in order.

    Args:
        num_clients: Number of all clients.
        count: Number of clients to draw; all if there are no more.
        seed: Seed of the run.

    >>> sample_clients(3, 3, 0), len(sample_clients(9, 4, 0)), sample_clients(9, 0, 0)
    ([0, 1, 2], 4, [])
    """
    if count >= num_clients:
        return list(range(num_clients))
    permutation = torch.randperm(num_clients, generator=generator(seed, "global test"))
    return sorted(permutation[:count].tolist())


CLIENTS_AT_ONCE = 32
"""Largest number of clients whose states are gathered at once."""
PIXELS_AT_ONCE = 2**24
"""Largest number of pixels whose logits are computed at once for several models: 256 images of 256×256."""


@dataclass(frozen=True)
class ModelsRun:
    """A pass of p clients' models on the same images.

    Attributes:
        places: Places of the p clients among all whose models run.
        clients: The p clients.
        logits: Logits (p, B, K).
    """

    places: Sequence[int]
    clients: Sequence[int]
    logits: Tensor


def everywhere_logits(federation: Federation, everywhere: Sequence[int], x: Tensor) -> Iterator[ModelsRun]:
    """Run the personal models of this process on the same images, in groups whose states fit in memory.

    Args:
        federation: Whose models are run.
        everywhere: Clients whose models run, some of them in other processes.
        x: The images (B, ...).
    """
    owned = _owned_among(federation, everywhere)
    owned_places = [place for place, client in enumerate(everywhere) if client in owned]
    clients_at_once = _clients_at_once(federation, x)
    for start in range(0, len(owned_places), clients_at_once):
        places = owned_places[start : start + clients_at_once]
        clients = [everywhere[place] for place in places]
        states = federation.personal_states(clients)
        yield ModelsRun(places, clients, federation.engine.shared_logits(states, x))


def _clients_at_once(federation: Federation, x: Tensor) -> int:
    """Return how many models run at once on images (B, ...), whose logits must fit in memory."""
    engine = federation.engine
    if not engine.per_pixel:
        return CLIENTS_AT_ONCE
    height, width = x.shape[-2:]
    if x.dim() == 2:
        # Features of the images.
        assert engine.trunk is not None
        height, width = engine.trunk.image[-2:]
    return max(1, min(CLIENTS_AT_ONCE, PIXELS_AT_ONCE // (len(x) * height * width)))


def _owned_among(federation: Federation, client_ids: Iterable[int]) -> set[int]:
    """Return those of some clients whose personal states this process holds.

    A batch has images of a few clients: unlike :meth:`.Federation.owned`, this does not look at all of the federation.
    """
    store = federation.store if federation.tuned is None else federation.tuned
    return {client for client in client_ids if store.holder(client) == federation.ranks.rank}


def shared_logits(federation: Federation, x: Tensor) -> Tensor:
    """Compute the logits (B, K) of the global model."""
    settings = federation.settings
    logits_of_members = federation.engine.shared_logits(federation.server.members(), x)
    return settings.training.task.ensemble(logits_of_members, settings.algorithm.average)


@dataclass(frozen=True)
class _Stretch:
    """Images of one client that follow one another in a batch.

    Attributes:
        owner: The client.
        start: The first image's row in the batch.
        length: The number of images.
    """

    owner: int
    start: int
    length: int


def _stretches_of_owners(owners: Sequence[int]) -> list[_Stretch]:
    """Divide a batch into stretches of images of one owner."""
    stretches = []
    start = 0
    for owner, rows in groupby(owners):
        length = len(list(rows))
        stretches.append(_Stretch(owner, start, length))
        start += length
    return stretches


def _of_similar_lengths(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """Yield groups of at most :data:`CLIENTS_AT_ONCE` stretches, the longest less than twice the shortest."""
    stretches_by_digits: dict[int, list[_Stretch]] = {}
    for stretch in stretches:
        # Numbers with as many binary digits differ by less than a factor of two.
        digits = stretch.length.bit_length()
        stretches_by_digits.setdefault(digits, []).append(stretch)
    for similar in stretches_by_digits.values():
        for begin in range(0, len(similar), CLIENTS_AT_ONCE):
            yield similar[begin : begin + CLIENTS_AT_ONCE]


@dataclass(frozen=True)
class _PaddedRows:
    """Rows of a batch that p models run on at once, L rows each.

    Attributes:
        rows: Rows (p, L) of the batch. A shorter stretch is filled up with its last image.
        is_real: Mask (p, L) of the rows that are not padding.
    """

    rows: Tensor
    is_real: Tensor

    @classmethod
    def of(cls, stretches: Sequence[_Stretch]) -> "_PaddedRows":
        """Return the rows of p stretches, as many of each as the longest one has."""
        starts = torch.tensor([stretch.start for stretch in stretches]).unsqueeze(1)
        lengths = torch.tensor([stretch.length for stretch in stretches]).unsqueeze(1)
        offsets = torch.arange(int(lengths.max()))
        return cls(rows=starts + offsets.minimum(lengths - 1), is_real=offsets < lengths)


def own_logits(federation: Federation, batch: EvalBatch) -> Tensor | None:
    """Run each image through its owner's personal model, once.

    Images of a client follow one another in a batch, but clients have unequal numbers. A stack of models needs equal
    numbers of images, so an owner's images are stacked with those of owners that have up to twice as many.

    Returns:
        Logits (B, K), zero for images whose owner another process has; None where that holds for all.
    """
    all_stretches = _stretches_of_owners(batch.owner.tolist())
    owned = _owned_among(federation, [stretch.owner for stretch in all_stretches])
    logits: Tensor | None = None
    for stretches in _of_similar_lengths([stretch for stretch in all_stretches if stretch.owner in owned]):
        padded = _PaddedRows.of(stretches)
        states = federation.personal_states([stretch.owner for stretch in stretches])
        with torch.no_grad():
            x = batch.x[to_device_async(padded.rows, batch.x.device)]
            outputs = federation.engine.logits(states, x).flatten(0, 1)
        if logits is None:
            logits = outputs.new_zeros(len(batch.x), *outputs.shape[1:])
        # The outputs of padding are left out.
        places = padded.is_real.flatten().nonzero().flatten()
        rows = padded.rows.flatten()[places]
        logits[to_device_async(rows, outputs.device)] = outputs[to_device_async(places, outputs.device)]
    return logits
