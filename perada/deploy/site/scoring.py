# SPDX-License-Identifier: Apache-2.0
"""Requests to score models on the site's test images."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from perada.core.states import State
from perada.deploy.protocol import (
    RejectionError,
    Request,
    Response,
    pack,
    spec_of,
    unpack,
)
from perada.deploy.scores import counts_of, failed_models_of, score_summands
from perada.deploy.site.budget import add_step_without_noise
from perada.deploy.site.client import Client, SiteScores
from perada.deploy.site.handler import ImageHandler
from perada.deploy.site.incoming import Incoming, digest_for_all_sites, finite_or_none, lay_out
from perada.deploy.state import SITE_LEDGER, OwnScores, RunState
from perada.scores.accumulation import Scores


@dataclass(frozen=True)
class _Models:
    """Models to score.

    Attributes:
        shared: The global state.
        members: The models (models, ...) of an ensemble; empty without one.
        digest: A digest of both.
    """

    shared: State
    members: State
    digest: str


class ScoringHandler(ImageHandler):
    """Scores models, once after each round."""

    def evaluate(self, client: Client, incoming: Incoming, run_state: RunState) -> RunState:
        """Score the models, once after each round, and keep the global one that the last round made."""
        request = incoming.request
        if _were_scored(incoming, run_state):
            return run_state
        self.permissions.check_images(client, run_state, self.log)
        models = _unpack_models(client, incoming.content, request)

        site_scores = self._score_models(client, request, models, run_state)
        facts = {} if site_scores is None else self._facts_of(client, site_scores)
        metrics: dict[str, float] = {}
        secure_sums = client.settings.secure_sums
        if secure_sums is not None:
            limit = secure_sums.limit(request.clients)
            metrics = score_summands(client.module.metrics, facts, limit, client.recipe.predicts_with_both)
            facts = {}
        ledger = self.store.totals.ledger
        if client.site_privacy is None and (facts or metrics):
            # They leave without noise, now or in a sum.
            ledger = deepcopy(ledger)
            add_step_without_noise(ledger, SITE_LEDGER)
        reply = pack(Response("ok", incoming.digest, facts, {"adds": True} if metrics else {}))
        scoring = replace(
            run_state.scoring,
            round=request.round,
            request_digest=incoming.digest,
            reply=reply,
            models_digest=models.digest,
            metrics=metrics,
            # Every scored round is kept, so that a run that is stopped can be exported, too.
            global_state=models.shared,
            own=OwnScores() if site_scores is None else _own_scores(client, site_scores),
        )
        run_state = replace(run_state, scoring=scoring)
        self.store.commit(run_state, replace(self.store.totals, ledger=ledger))
        return run_state

    def _score_models(
        self, client: Client, request: Request, models_to_score: _Models, run_state: RunState
    ) -> SiteScores | None:
        """Return the scores of models; None if they cannot be computed, and none of them may leave the site."""
        try:
            return client.score(request, models_to_score.shared, models_to_score.members, run_state)
        except Exception:
            if self._may_send_scores(client):
                raise
            # The server must not learn of the test images that something is wrong with one of them.
            self.log.exception(
                "round %d: the site's own test images could not be scored; the server does not learn this",
                request.display_round,
            )
            return None

    def _may_send_scores(self, client: Client) -> bool:
        """Return whether any scores may leave the site."""
        # No ledger counts scores, so a site whose privacy is protected as a whole sends none.
        return client.site_privacy is None and bool(self.permissions.may_send & {"counts", "scores"})

    def _facts_of(self, client: Client, site_scores: SiteScores) -> dict[str, Any]:
        """Return what may leave the site of its scores, as facts of the response."""
        if not self._may_send_scores(client):
            return {}
        counts = counts_of(site_scores.models, client.test_size)
        facts = self.permissions.allowed_facts("counts", counts)
        facts |= self.permissions.allowed_facts("scores", {"scores": _scores_of_models(site_scores)})
        # Either kind tells whether a model has scores.
        facts |= failed_models_of(site_scores.models)
        if site_scores.typical is not None:
            # It is a score, and times the number of test images a count.
            facts["typical"] = site_scores.typical
        return facts


def _were_scored(incoming: Incoming, run_state: RunState) -> bool:
    """Return whether the models of a request were scored before, so that the site repeats its reply.

    Raises:
        RejectionError: If scores of other models were already sent in this round or a later one.
    """
    request = incoming.request
    last_round = run_state.scoring.round
    if request.round > last_round:
        return False
    if request.round < last_round:
        raise RejectionError(
            f"scores after round {request.display_round} were requested, but those after round {last_round} were "
            "already sent",
            "past",
        )
    # Otherwise the server could try models of its own making on the site's images.
    if incoming.digest != run_state.scoring.request_digest:
        raise RejectionError(f"different models were already scored after round {request.display_round}", "other")
    return True


def _unpack_models(client: Client, message: bytes, request: Request) -> _Models:
    """Return the models that the server sent to be scored."""
    spec = spec_of(client.recipe.template.initial)
    expected = {f"shared/{key}": entry for key, entry in spec.items()}
    if request.models:
        for key, (dtype, shape) in spec.items():
            expected[f"members/{key}"] = dtype, (request.models, *shape)
    tensors = unpack(message, expected).tensors
    shared: State = {}
    members: State = {}
    for name, value in tensors.items():
        group, _, key = name.partition("/")
        if group == "shared":
            shared[key] = value
        else:
            members[key] = value
    return _Models(lay_out(shared, request), members, digest_for_all_sites(request, tensors))


def _own_scores(client: Client, site_scores: SiteScores) -> OwnScores:
    """Return the scores that a site keeps for itself."""
    return OwnScores(
        num_images=client.test_size,
        scores=_scores_of_models(site_scores),
        has_classes=client.module.task.has_classes,
    )


def _scores_of_models(site_scores: SiteScores) -> dict[str, dict[str, float | None]]:
    """Return the scores of each model by metric, without models that have scored no image."""
    return {name: _mean_scores(score) for name, score in site_scores.models.items() if score}


def _mean_scores(image_scores: Scores) -> dict[str, float | None]:
    """Return the scores of one model by metric; those of each class as their mean."""
    return {name: finite_or_none(float(values[0, 0])) for name, values in image_scores.means().items()}
