# SPDX-License-Identifier: Apache-2.0
"""Requests for the steps of secure sums."""

import json
import logging
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from perada.core.states import State
from perada.deploy.protocol import (
    RejectionError,
    Request,
    Response,
    digest_of_message,
    display_round,
    pack,
    read_header,
    tensor_sizes,
)
from perada.deploy.scores import claimed_name
from perada.deploy.site.client import Client
from perada.deploy.state import SITE_LEDGER, RunState, SiteStore

if TYPE_CHECKING:
    from perada.deploy.sums.keys import SiteClaims, SumTerms
    from perada.deploy.sums.party import Party, StepReply


@dataclass
class SumHandler:
    """Takes the site's steps of secure sums.

    Attributes:
        store: State folder of the site.
        party: The site among those that it hides among; None without secure sums.
        log: Log for reasons, which never leave the site.
    """

    store: SiteStore
    party: "Party | None"
    log: logging.Logger

    def offer_keys(self, client: Client, request: Request, run_state: RunState, reply: bytes) -> bytes:
        """Add the keys for the first attempt at the sum to a reply. Keys are never on disk."""
        record = _find_record(request, run_state)
        if self.party is None or client.settings.secure_sums is None or not record.is_available:
            return reply
        response = Response.read(read_header(reply))
        if response.code != "ok":
            return reply
        was_sent = record.masked_round >= request.round
        keys = self.party.offer_keys(
            self._sum_terms(client, request, run_state), self._make_claims(request, run_state), begin=not was_sent
        )
        return pack(replace(response, sums=response.sums | keys))

    def _make_claims(self, request: Request, run_state: RunState) -> "SiteClaims":
        """Return the claims that the site sends in addition to its keys."""
        from perada.deploy.sums.keys import SiteClaims

        record = _find_record(request, run_state)
        return SiteClaims(
            metric_names={claimed_name(name) for name in record.metric_names},
            received_digests=run_state.summing.heard,
        )

    def _sum_terms(self, client: Client, request: Request, run_state: RunState) -> "SumTerms":
        """Return the terms of the sum that a request is about, from the site's own records."""
        from perada.deploy.sums.keys import SumTerms

        options = client.settings.secure_sums
        assert options is not None
        if request.sums_scores:
            sent_by_server = [run_state.scoring.models_digest]
        else:
            sent_by_server = [
                run_state.summing.heard[str(run_state.training.round)],
                client.public_images_digest(request.round),
            ]
        return SumTerms(
            run=request.run,
            round=request.round,
            recipe=request.recipe,
            secure_sums=options,
            attempt=request.attempt,
            given=digest_of_message(json.dumps(sent_by_server).encode()),
            of=request.of,
        )

    def take_step(self, client: Client, request: Request, message_digest: str, run_state: RunState) -> bytes:
        """Take a step of the secure sum of the last round's updates, or of the last scores."""
        party = self.party
        if client.settings.secure_sums is None or party is None:
            raise RejectionError("the recipe has no secure sums", "other")
        _check_sum_round(request, run_state)
        terms = self._sum_terms(client, request, run_state)
        reply = party.saved_reply(terms, message_digest)
        if reply is not None and not _must_be_committed(reply, request, run_state):
            return reply
        if request.kind in ("keys", "mask"):
            _check_not_masked(request, run_state)
            if not request.sums_scores and client.site_privacy is not None:
                client.site_privacy.check_budget(self.store.totals.ledger)
        if reply is None:
            reply = self._make_sum_reply(party, client, request, terms, message_digest, run_state)
            # The reply is made before the commit, which may fail: a step is taken once, so its reply is made once.
            party.save_reply(terms, message_digest, reply)
        if _must_be_committed(reply, request, run_state):
            # The commit precedes sending: after a crash the vector must not be masked a second time.
            self._commit_masked(client, request, run_state)
        return reply

    def _make_sum_reply(
        self,
        party: "Party",
        client: Client,
        request: Request,
        terms: "SumTerms",
        message_digest: str,
        run_state: RunState,
    ) -> bytes:
        """Take a step of a secure sum, and return the reply, which has tensors only if it has the masked vector."""
        step_reply = self._step_of_party(party, client, request, terms, run_state)
        tensors: State = {}
        if step_reply.masked_vector is not None:
            tensors = {"masked": torch.from_numpy(step_reply.masked_vector)}
        if request.kind == "reveal":
            names = ", ".join(party.survivors(terms))
            self.log.info("round %d: sites in the sum: %s", request.display_round, names)
        return pack(Response("ok", message_digest, sums=step_reply.content), tensors)

    def _step_of_party(
        self, party: "Party", client: Client, request: Request, terms: "SumTerms", run_state: RunState
    ) -> "StepReply":
        """Take a step of the secure sum with the other sites, or object to some of them."""
        from perada.deploy.sums.party import StepReply
        from perada.deploy.sums.site import Objection

        make_vector = client.scores_vector if request.sums_scores else client.update_vector
        claims = self._make_claims(request, run_state)
        try:
            return party.step(request, terms, claims, partial(make_vector, run_state))
        except Objection as objection:
            # The server learns which sites are objected to, and not why.
            self.log.warning("run %s: %s", request.run, objection)
            return StepReply({"objects": objection.names})

    def _commit_masked(self, client: Client, request: Request, run_state: RunState) -> None:
        """Commit that the site's vector of a round is about to leave under masks, and its cost."""
        ledger = deepcopy(self.store.totals.ledger)
        if request.sums_scores:
            summing = replace(run_state.summing, scores_round=request.round)
        else:
            summing = replace(run_state.summing, update_round=request.round)
            if client.site_privacy is not None:
                noise_multiplier, sample_rate = client.site_privacy.cost
                ledger.add(SITE_LEDGER, noise_multiplier, sample_rate, 1)
        self.store.commit(replace(run_state, summing=summing), replace(self.store.totals, ledger=ledger))


@dataclass(frozen=True)
class _SummandRecord:
    """What the site's state records of its summand: its last update, or its last scores.

    Attributes:
        is_available: Whether the site has a summand.
        metric_names: Names of the metrics that are part of it.
        round: Round of the summand.
        masked_round: Last round whose vector the site sent under masks.
    """

    is_available: bool
    metric_names: Collection[str]
    round: int
    masked_round: int


def _find_record(request: Request, run_state: RunState) -> _SummandRecord:
    """Return the record of the summand of the sum that a request is about."""
    summing = run_state.summing
    if request.sums_scores:
        scoring = run_state.scoring
        return _SummandRecord(
            is_available=bool(scoring.metrics),
            metric_names=scoring.metrics,
            round=scoring.round,
            masked_round=summing.scores_round,
        )
    return _SummandRecord(
        is_available=bool(summing.update),
        metric_names=summing.losses,
        round=run_state.training.round,
        masked_round=summing.update_round,
    )


def _check_sum_round(request: Request, run_state: RunState) -> None:
    """Raise a RejectionError unless a request is about the sum of the last round, and the site has a summand."""
    record = _find_record(request, run_state)
    if request.round != record.round or not record.is_available:
        raise RejectionError(
            f"secure sum: round {request.display_round} cannot be summed; the last round was "
            f"{display_round('keys', record.round, request.of)}",
            "other",
        )


def _check_not_masked(request: Request, run_state: RunState) -> None:
    """Raise a RejectionError if the site's vector of a round was already sent under masks.

    A vector leaves once: the difference of two sums over other sites would be that of a single site.
    """
    if _find_record(request, run_state).masked_round >= request.round:
        raise RejectionError(
            f"secure sum: the vector of round {request.display_round} was already sent under masks", "other"
        )


def _must_be_committed(reply: bytes, request: Request, run_state: RunState) -> bool:
    """Return whether a reply has the site's masked vector, and the state does not yet record that it leaves."""
    return bool(tensor_sizes(reply)) and _find_record(request, run_state).masked_round < request.round
