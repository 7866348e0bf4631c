# SPDX-License-Identifier: Apache-2.0
"""The resident worker of a site: it answers the server's requests from its own data, and sends only what it may."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perada.core.text import printable
from perada.deploy.protocol import (
    MAX_MODELS,
    SUM_KINDS,
    RejectionError,
    Request,
    digest_of_message,
    max_message_size,
    read_header,
    unpack,
)
from perada.deploy.site.budget import explain_image_epsilon, explain_site_epsilon
from perada.deploy.site.client import Client
from perada.deploy.site.incoming import Incoming, finite_or_none, pack_response
from perada.deploy.site.jobs import JobHandler, SiteJob
from perada.deploy.site.permissions import Permissions
from perada.deploy.site.scoring import ScoringHandler
from perada.deploy.site.sum_steps import SumHandler
from perada.deploy.site.training import TrainingHandler
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, SiteStore
from perada.federation.both_models import without_both_models
from perada.system.disk_errors import DiskError

if TYPE_CHECKING:
    from perada.deploy.sums.party import Party


class SiteWorker:
    """Answers messages, one at a time.

    Args:
        store: State folder of the site.
        clients_by_recipe: The recipes that the site approves, with its data, by their digest.
        may_send: What of :data:`perada.deploy.protocol.MAY_SEND` may leave the site in addition to updates.
        log: Log for reasons, which never leave the site.
        party: The site among those that it hides among, for recipes with secure sums.
        resume_allow: ``images`` allows a run without privacy to continue with other images than it has trained on.
        jobs: The jobs without training that the site approves, by their digest.

    Attributes:
        permissions: What the site allows.
        trainer: Handler of requests to train.
        scorer: Handler of requests to score models.
        sums: Handler of requests for steps of secure sums.
        job_handler: Handler of requests for jobs without training.
        log_context: Run and round of the request that is being answered, for records of the log.

    Raises:
        ValueError: If a recipe or a job has secure sums and there is no ``party``.
    """

    def __init__(
        self,
        store: SiteStore,
        clients_by_recipe: Mapping[str, Client],
        may_send: Sequence[str] = (),
        log: logging.Logger | None = None,
        party: "Party | None" = None,
        resume_allow: Sequence[str] = (),
        jobs: Mapping[str, SiteJob] | None = None,
    ) -> None:
        self.jobs = dict(jobs or {})
        uses_sums = [client.settings.secure_sums is not None for client in clients_by_recipe.values()]
        if any(uses_sums) or self.jobs:
            if party is None:
                raise ValueError(
                    "the recipe uses secure_sums, but the site's file does not list the sites to hide among; add a "
                    "section secure_sums with identity and sites (docs/secure_sums.md)"
                )
        self.store = store
        self.clients = dict(clients_by_recipe)
        self.permissions = Permissions(set(may_send), set(resume_allow))
        self.log = log or logging.getLogger("perada.site")
        self.trainer = TrainingHandler(store, self.permissions, self.log)
        self.scorer = ScoringHandler(store, self.permissions, self.log)
        self.sums = SumHandler(store, party, self.log)
        self.job_handler = JobHandler(store, self.permissions, party, self.log)
        self.log_context: dict[str, object] = {}
        self._answering = threading.Lock()
        for client in self.clients.values():
            # It reads all files, which the deadline of the first round should not wait for.
            _ = client.fingerprint
            self._warn_of_infinite_epsilon(client)
            no_effect = without_both_models(client.settings, client.recipe.loop.evaluation.prediction)
            if no_effect is not None:
                self.log.info("recipe %.8s: %s", client.recipe.digest, no_effect)

    @property
    def max_bytes(self) -> int:
        """Largest size of a message. Some ensembles have as many models as there are sites."""
        empty_size = max_message_size({})
        sizes = [empty_size]
        for client in self.clients.values():
            template = client.recipe.template
            initial_size = max_message_size(template.initial)
            sizes += [initial_size, max_message_size(template.received)]
            if client.settings.algorithm.is_ensemble:
                sizes.append(initial_size + MAX_MODELS * (initial_size - empty_size))
        for site_job in self.jobs.values():
            # The sum comes back, in 8 bytes a number.
            sizes.append(empty_size + 8 * site_job.job.size)
        return max(sizes)

    def answer(self, message: bytes, transport_run: str) -> bytes:
        """Return the reply to a message, after it was written to the audit log.

        What goes wrong becomes a code; its reason is in the log.

        Args:
            message: Message as it came.
            transport_run: What the transport calls the run, which is used in logs only.

        Raises:
            DiskError: If the state or the audit log cannot be read or written: nothing leaves then. The reason is in
                the log, and the same message may be answered later.
            OSError: If the audit log is not the one that this worker wrote: nothing leaves either.
            ValueError: Likewise.
        """
        message_digest = digest_of_message(message)
        transport_run = printable(transport_run)
        with self._answering:
            self.log_context = {}
            try:
                self.store.check_disk()
                reply = self._answer_with_code(message, message_digest, transport_run)
                self.store.log(message, reply, self._spent_epsilon)
            except DiskError as error:
                self.log.error("run %s: nothing leaves this site: %s; the server asks again", transport_run, error)
                raise
        return reply

    def _answer_with_code(self, message: bytes, message_digest: str, transport_run: str) -> bytes:
        """Return the reply to a message, or the code of what went wrong, whose reason is in the log."""
        try:
            return self._answer_message(message, message_digest, transport_run)
        except RejectionError as rejection:
            self.log.warning("run %s: rejected (%s): %s", transport_run, rejection.code, rejection)
            return pack_response(rejection.code, message_digest)
        except DiskError:
            # No line of the audit log can be relied on now, so not even a code leaves.
            raise
        except Exception:  # no request may end the worker, and the server must not read the reason
            self.log.exception("run %s: failed", transport_run)
            return pack_response("failed", message_digest)

    def _warn_of_infinite_epsilon(self, client: Client) -> None:
        """Warn about guarantees of a recipe that the site has already lost; requests may be rejected."""
        ledger = self.store.totals.ledger
        reasons = []
        if client.planned:
            reasons.append(explain_image_epsilon(ledger))
        if client.site_privacy is not None:
            reasons.append(explain_site_epsilon(ledger))
        for reason in reasons:
            if reason:
                self.log.warning("recipe %.8s: %s", client.recipe.digest, reason)

    def _spent_epsilon(self, request: Request) -> dict[str, float | None] | None:
        """Return the ε of all that the site has trained and masked, by its own δ; None without privacy.

        An ε of None is infinite.
        """
        if request.recipe in self.jobs:
            return self.job_handler.spent(self.jobs[request.recipe])
        client = self.clients[request.recipe]
        ledger = self.store.totals.ledger
        spent: dict[str, float | None] = {}
        if client.planned:
            spent["spent"] = finite_or_none(client.budget.epsilon(ledger.history(IMAGES_LEDGER)))
        if client.site_privacy is not None:
            spent["site"] = finite_or_none(client.budget.epsilon(ledger.history(SITE_LEDGER)))
        if not spent:
            return None
        spent["delta"] = client.limits.delta
        return spent

    def _answer_message(self, message: bytes, message_digest: str, transport_run: str) -> bytes:
        """Return the reply to a message; raise a RejectionError if the site rejects it."""
        request = Request.read(read_header(message))
        self.log_context = {"run": request.run, "round": request.round}
        client = self.clients.get(request.recipe)
        site_job = self.jobs.get(request.recipe)
        if site_job is not None:
            self.log.info("run %s (%s of perada): %s", transport_run, request.run, request)
            return self.job_handler.answer(site_job, request, message, message_digest)
        if client is None:
            raise RejectionError(f"the recipe with the digest {request.recipe} is not approved", "unapproved")
        self.log.info("run %s (%s of perada): %s", transport_run, request.run, request)
        if request.job is not None or request.kind in ("count", "compare"):
            raise RejectionError(f"{request} was requested of a recipe that trains", "other")
        if request.kind == "join":
            unpack(message, {})
            sizes = self.permissions.allowed_facts("sizes", {"size": client.size, "tests": client.test_size})
            return pack_response("ok", message_digest, sizes | {"labels": client.labels})

        stored = self.store.load(request.run)
        _check_request(request, client, stored)
        state = replace(
            stored,
            recipe=request.recipe,
            client=request.client,
            transport_run=transport_run,
            rank=request.rank,
        )
        incoming = Incoming(message, message_digest, request)
        if request.kind in SUM_KINDS:
            return self.sums.take_step(client, request, message_digest, state)
        if request.kind == "evaluate":
            state = self.scorer.evaluate(client, incoming, state)
            sum_request = replace(request, of="scores", attempt=0)
            return self.sums.offer_keys(client, sum_request, state, state.scoring.reply)
        if request.round != state.training.round:
            state = self.trainer.train(client, incoming, state)
        elif message_digest != state.training.request_digest:
            raise RejectionError(f"round {request.display_round} was already trained for a different message", "other")
        # A round that is requested again gets the reply that was committed: training twice would spend ε twice.
        sum_request = replace(request, of="update", attempt=0)
        return self.sums.offer_keys(client, sum_request, state, state.training.reply)


def _check_request(request: Request, client: Client, run_state: RunState) -> None:
    """Raise if a request does not fit the site's progress in the run.

    Raises:
        RejectionError: If it is not.
    """
    rounds = client.recipe.rounds
    trained_round = run_state.training.round
    if run_state.client not in (None, request.client) or run_state.recipe not in ("", request.recipe):
        raise RejectionError(
            f"in run {request.run} the site is client {run_state.client} of recipe {run_state.recipe}", "other"
        )
    if request.round > rounds or (request.kind == "train" and request.round == rounds):
        raise RejectionError(
            f"the recipe has {rounds} rounds, but round {request.display_round} was requested", "future"
        )
    has_tuning = client.settings.algorithm.personalization()
    if request.kind == "tune" and (request.round < rounds or not has_tuning):
        raise RejectionError("the recipe has no fine-tuning at this point", "other")
    if request.round < trained_round:
        raise RejectionError(f"round {request.display_round} was requested after round {trained_round + 1}", "past")
    if request.kind == "evaluate" and not run_state.training.num_rounds:
        # Otherwise a server could invent runs to have any model scored.
        raise RejectionError(f"models are to be scored, but nothing was trained in run {request.run}", "other")
