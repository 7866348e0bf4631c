# SPDX-License-Identifier: Apache-2.0
"""The evaluation of all models on images that are no client's, or are the other clients'."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perada.core.batches import EvalBatch
from perada.core.states import send
from perada.federation.evaluation import Scores, everywhere_logits, shared_logits
from perada.federation.federation import Federation
from perada.federation.metrics import Metric


class ShiftedScores(NamedTuple):
    """What the models score on shifted images.

    Attributes:
        personal: Of each client's personal model (M,), NaN where it was not run.
        shared: Of the global model; NaN where the algorithm has none.
    """

    personal: Tensor
    shared: float


class ShiftedEvaluation:
    """Scores of the personal models, and of the global one, on the same images, each of which is read once.

    Several processes share the work as in :class:`.Evaluation`.

    Args:
        federation: The states.
        metrics: How predictions are scored.
        everywhere: The clients whose personal models run, where they have models of their own.
        others: Score a client's model on the images of the other clients alone, and the global model as if it were each
            client's, mean over clients.
    """

    def __init__(
        self, federation: Federation, metrics: Sequence[Metric], everywhere: Sequence[int], others: bool = False
    ) -> None:
        self.federation, self.everywhere, self.others = federation, everywhere, others
        multilabel = federation.settings.training.multilabel
        self._personal = Scores(metrics, multilabel, models=len(everywhere))
        self._shared = Scores(metrics, multilabel, models=federation.num_clients if others else 1)

    def step(self, batch: EvalBatch, index: int) -> None:
        """Run the models on a batch, the ``index``-th of the evaluation."""
        federation, engine, x = self.federation, self.federation.engine, batch.x
        if engine.prefix is not None and tuple(x.shape[1:]) == tuple(engine.prefix.image):
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
        owner = send(batch.owner, batch.y.device)
        for place, client, own in zip(places, clients, logits, strict=True):
            scores.update(own.unsqueeze(0), batch.y, models=[place], counted=owner != client)

    def result(self) -> dict[str, ShiftedScores]:
        """What all processes have counted, by metric; all of them call it. Scores of classes are their mean."""
        federation, clients = self.federation, self.federation.num_clients
        for scores in (self._personal, self._shared):
            scores.merge(federation.ranks)
        found, personal = {}, self._personal.means()
        for name, values in self._shared.means().items():
            shared = values[:, 0]
            own = shared.expand(clients)
            if federation.personalized:
                own = shared.new_full((clients,), torch.nan)
                own[list(self.everywhere)] = personal[name][:, 0]
            found[name] = ShiftedScores(own, float(shared.nanmean()))
        return found
