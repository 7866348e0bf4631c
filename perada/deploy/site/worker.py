# SPDX-License-Identifier: Apache-2.0
"""The resident worker of a site: it answers the server's requests from its own data, and sends only what it may."""

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from perada.algorithms.base import Stacks
from perada.core.states import State, laid_out, narrowed, widened
from perada.core.text import printable
from perada.data.fingerprints import changed_content
from perada.deploy.protocol import (
    MAX_MODELS,
    SUM_KINDS,
    RejectionError,
    Request,
    Response,
    ResponseCode,
    digest_of_message,
    display_round,
    max_message_size,
    pack,
    read_header,
    spec_of,
    tensor_sizes,
    unpack,
)
from perada.deploy.scores import claimed_name, counts_of, failed_models_of, score_summands
from perada.deploy.site.budget import add_step_without_noise, explain_image_epsilon, explain_site_epsilon
from perada.deploy.site.client import Client, TrainingResult
from perada.deploy.site.file import Limits
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, SiteStore, SiteTotals, SummingState, TrainingState
from perada.federation.both_models import without_both_models
from perada.privacy.account import Account, StepCost
from perada.privacy.accounting import Ledger
from perada.privacy.protection import Protection
from perada.scores.accumulation import Scores
from perada.system.disk_errors import DiskError

if TYPE_CHECKING:
    from perada.deploy.sums.keys import SiteClaims, SumTerms
    from perada.deploy.sums.party import Party, StepReply


class SiteWorker:
    """Answers messages, one at a time.

    Args:
        store: State folder of the site.
        clients: The recipes that the site approves, with its data, by their digest.
        may_send: What of :data:`perada.deploy.protocol.MAY_SEND` may leave the site in addition to updates.
        log: Log for reasons, which never leave the site.
        party: The site among those that it hides among, for recipes with secure sums.
        resume_allow: ``images`` allows a run without privacy to continue with other images than it has trained on.

    Attributes:
        log_context: Run and round of the request that is being answered, for records of the log.

    Raises:
        ValueError: If a recipe has secure sums and there is no ``party``.
    """

    def __init__(
        self,
        store: SiteStore,
        clients: Mapping[str, Client],
        may_send: Sequence[str] = (),
        log: logging.Logger | None = None,
        party: "Party | None" = None,
        resume_allow: Sequence[str] = (),
    ) -> None:
        for client in clients.values():
            if client.settings.secure_sums is not None and party is None:
                raise ValueError(
                    "the recipe uses secure_sums, but the site's file does not list the sites to hide among; add a "
                    "section secure_sums with identity and sites (docs/secure_sums.md)"
                )
        self.store = store
        self.clients = dict(clients)
        self.may_send = set(may_send)
        self.log = log or logging.getLogger("perada.site")
        self.party = party
        self.resume_allow = set(resume_allow)
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
            sizes += [initial_size, max_message_size(template.sending)]
            if client.settings.algorithm.is_ensemble:
                sizes.append(initial_size + MAX_MODELS * (initial_size - empty_size))
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
            return _pack_response(rejection.code, message_digest)
        except DiskError:
            # No line of the audit log can be relied on now, so not even a code leaves.
            raise
        except Exception:  # no request may end the worker, and the server must not read the reason
            self.log.exception("run %s: failed", transport_run)
            return _pack_response("failed", message_digest)

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
        client = self.clients[request.recipe]
        ledger = self.store.totals.ledger
        spent: dict[str, float | None] = {}
        if client.planned:
            spent["spent"] = _finite_or_none(client.budget.epsilon(ledger.history(IMAGES_LEDGER)))
        if client.site_privacy is not None:
            spent["site"] = _finite_or_none(client.budget.epsilon(ledger.history(SITE_LEDGER)))
        if not spent:
            return None
        spent["delta"] = client.limits.delta
        return spent

    def _answer_message(self, message: bytes, message_digest: str, transport_run: str) -> bytes:
        """Return the reply to a message; raise a RejectionError if the site rejects it."""
        request = Request.read(read_header(message))
        self.log_context = {"run": request.run, "round": request.round}
        client = self.clients.get(request.recipe)
        if client is None:
            raise RejectionError(f"the recipe with the digest {request.recipe} is not approved", "unapproved")
        self.log.info("run %s (perada's %s): %s", transport_run, request.run, request)
        if request.kind == "join":
            unpack(message, {})
            sizes = self._allowed_facts("sizes", {"size": client.size, "tests": client.test_size})
            return _pack_response("ok", message_digest, sizes | {"labels": client.labels})

        stored = self.store.load(request.run)
        _check_request(request, client, stored)
        state = replace(
            stored,
            recipe=request.recipe,
            client=request.client,
            transport_run=transport_run,
            rank=request.rank,
        )
        incoming = _Incoming(message, message_digest, request)
        if request.kind in SUM_KINDS:
            return self._take_sum_step(client, request, message_digest, state)
        if request.kind == "evaluate":
            state = self._evaluate_round(client, incoming, state)
            sum_request = replace(request, of="scores", attempt=0)
            return self._offer_keys(client, sum_request, state, state.scoring.reply)
        if request.round != state.training.round:
            state = self._train_round(client, incoming, state)
        elif message_digest != state.training.request_digest:
            raise RejectionError(f"round {request.display_round} was already trained for a different message", "other")
        # A round that is requested again gets the reply that was committed: training twice would spend ε twice.
        sum_request = replace(request, of="update", attempt=0)
        return self._offer_keys(client, sum_request, state, state.training.reply)

    # Training

    def _train_round(self, client: Client, incoming: "_Incoming", run_state: RunState) -> RunState:
        """Train a round, or fine-tune, and commit the client's state, what it has spent and the reply in one step."""
        request = incoming.request
        self._check_images(client, run_state)
        received = _unpack_received(client, incoming.content, request)
        protection = client.protection(run_state.training.account, run_state.training.num_rounds)
        sampling = self._check_limits(client.limits, run_state, protection)
        ledger = deepcopy(self.store.totals.ledger)
        costs = self._affordable_costs(client, request, protection, ledger)

        result = client.train(request, received, run_state, protection)
        facts = self._allowed_facts("epsilon", _count(protection.image_account, costs, ledger))
        if client.site_privacy is None:
            # The update leaves without site-level noise; if training failed, the server learns at least that.
            add_step_without_noise(ledger, SITE_LEDGER)
        # This must follow _count(), which updates the account that is saved here.
        training = _training_after(run_state.training, client, incoming, protection, result)

        outgoing = self._outgoing_update(client, request, received, result)
        summing = run_state.summing
        sent = outgoing.update
        if client.settings.secure_sums is not None:
            # The update and the losses leave under masks only.
            summing = _with_summand(summing, request, received, outgoing)
            sent = {}
        elif outgoing.losses:
            facts["losses"] = outgoing.losses
        reply = pack(Response("ok", incoming.digest, facts), sent)
        problem = _problem_of_training(result)
        problem_of_reply = _problem_of_reply(reply, sent)
        if problem_of_reply:
            problem = problem_of_reply
        if problem:
            self.log.warning("round %d: %s", request.display_round, problem)
        if problem_of_reply or not outgoing.is_usable:
            reply = _pack_response("broken", incoming.digest)
            summing = replace(summing, update={})
        run_state = replace(run_state, training=replace(training, reply=reply), summing=summing)
        self.store.commit(run_state, SiteTotals(ledger, self.store.totals.rounds + 1, sampling))
        return run_state

    def _affordable_costs(
        self, client: Client, request: Request, protection: Protection, ledger: Ledger
    ) -> Sequence[StepCost]:
        """Return the costs of a round for the ledgers of the site's images.

        Raises:
            RejectionError: If these, or the ledger of the site as a whole, cannot afford the round, or its norm is out
                of range.
        """
        costs = client.costs(request, protection, ledger)
        if costs is None:
            raise _exhausted_images(client, ledger)
        if client.site_privacy is not None and request.kind != "tune":
            client.site_privacy.check_norm(request.norm)
            self._check_site_budget(client)
        return costs

    def _outgoing_update(
        self, client: Client, request: Request, received: State, result: TrainingResult
    ) -> "_Outgoing":
        """Return what may leave the site after a training.

        Args:
            client: The client.
            request: The request to train.
            received: The state that the server sent.
            result: The result of the training.
        """
        trained = result.trained
        tuning = request.kind == "tune"
        is_usable = bool(trained.accepted[0]) or tuning
        losses: dict[str, Any] = {}
        if is_usable and result.losses:
            losses = self._allowed_facts("losses", result.losses)
        update: State = {}
        if not tuning:
            update = {key: value[0] for key, value in trained.sent.items()}
            update = narrowed(update, _lora_factors(client, request), request.rank)
        adds_noise = client.settings.secure_sums is not None and client.site_privacy is not None
        if adds_noise and not is_usable:
            # Nobody may see that training broke: the site sends what it received, so that it adds noise only.
            update = {key: received.get(key, value) for key, value in update.items()}
            is_usable = True
        return _Outgoing(update, losses, is_usable)

    def _check_images(self, client: Client, run_state: RunState) -> None:
        """Check that a run continues on the images and labels that it has trained on here.

        Its personal state depends on them, and so do the ledgers and the noise of a private run.

        Raises:
            RejectionError: If they have changed, and the run is private or the site does not allow it.
        """
        former = run_state.training.fingerprint
        changed = changed_content(former, client.fingerprint) if former else None
        if changed is None:
            return
        loop = client.recipe.loop
        difference = f"the site's {changed} differ from those that run {run_state.run} has trained on here"
        if loop.privacy is not None or loop.client_privacy is not None:
            raise RejectionError(
                f"{difference}, and its noise and ledgers are tied to those; restore them, or take part in a new run",
                "other",
            )
        if "images" not in self.resume_allow:
            remedy = "restore them, or accept the change with resume_allow: [images] in the site's file"
            raise RejectionError(f"{difference}; {remedy}", "other")
        self.log.warning("%s; the run continues with the new ones, as resume_allow permits", difference)

    def _check_limits(self, limits: Limits, run_state: RunState, protection: Protection) -> str | None:
        """Check the site's limits of rounds and runs, and that private batches are drawn as before.

        Returns:
            How private batches of all runs are drawn; None if none was drawn.

        Raises:
            RejectionError: If a limit is reached.
        """
        totals = self.store.totals
        num_runs = len(self.store.runs)
        if limits.max_rounds is not None and totals.rounds >= limits.max_rounds:
            raise RejectionError(
                f"{totals.rounds} of max_rounds={limits.max_rounds} rounds have been trained, over all runs",
                "exhausted",
            )
        if not run_state.training.num_rounds and num_runs >= limits.max_runs:
            raise RejectionError(
                f"{num_runs} of max_runs={limits.max_runs} runs already exist, and this is a new one", "exhausted"
            )
        if protection.image_account is None:
            return totals.sampling
        sampling = protection.image_account.options.sampling
        if totals.sampling not in (None, sampling):
            # One ledger cannot account for two ways of drawing batches.
            raise RejectionError(
                f"batches were drawn with sampling={totals.sampling!r} before, but this recipe uses {sampling!r}",
                "exhausted",
            )
        return sampling

    # Scoring

    def _evaluate_round(self, client: Client, incoming: "_Incoming", run_state: RunState) -> RunState:
        """Score the models, once after each round, and keep the global one that the last round made."""
        request = incoming.request
        if _were_scored(incoming, run_state):
            return run_state
        self._check_images(client, run_state)
        models = _unpack_models(client, incoming.content, request)

        facts = self._score_models(client, request, models, run_state)
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
        )
        run_state = replace(run_state, scoring=scoring)
        self.store.commit(run_state, replace(self.store.totals, ledger=ledger))
        return run_state

    def _score_models(self, client: Client, request: Request, models: "_Models", run_state: RunState) -> dict[str, Any]:
        """Score models, and return what of it may leave the site, as facts of the response."""
        # No ledger counts scores, so a site whose privacy is protected as a whole sends none.
        if client.site_privacy is not None or not self.may_send & {"counts", "scores"}:
            return {}
        scores = client.score(request, models.shared, models.members, run_state)
        values = {name: _mean_scores(score) for name, score in scores.models.items() if score}
        counts = counts_of(scores.models, client.test_size)
        facts = self._allowed_facts("counts", counts) | self._allowed_facts("scores", {"scores": values})
        # Either kind tells whether a model has scores.
        facts |= failed_models_of(scores.models)
        if scores.typical is not None:
            # It is a score, and times the number of test images a count.
            facts["typical"] = scores.typical
        return facts

    def _allowed_facts(self, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Return facts of a kind if they may leave the site."""
        return facts if kind in self.may_send else {}

    # Secure sums

    def _offer_keys(self, client: Client, request: Request, run_state: RunState, reply: bytes) -> bytes:
        """Add the keys for the first attempt at the sum to a reply. Keys are never on disk."""
        if self.party is None or client.settings.secure_sums is None or not _has_summand(request, run_state):
            return reply
        response = Response.read(read_header(reply))
        if response.code != "ok":
            return reply
        was_sent = _masked_round(request, run_state) >= request.round
        keys = self.party.offer_keys(
            self._sum_terms(client, request, run_state), self._make_claims(request, run_state), begin=not was_sent
        )
        return pack(replace(response, sums=response.sums | keys))

    def _make_claims(self, request: Request, run_state: RunState) -> "SiteClaims":
        """Return the claims that the site sends in addition to its keys."""
        from perada.deploy.sums.keys import SiteClaims

        metrics = run_state.scoring.metrics if request.of == "scores" else run_state.summing.losses
        return SiteClaims({claimed_name(name) for name in metrics}, run_state.summing.heard)

    def _sum_terms(self, client: Client, request: Request, run_state: RunState) -> "SumTerms":
        """Return the terms of the sum that a request is about, from the site's own records."""
        from perada.deploy.sums.keys import SumTerms

        options = client.settings.secure_sums
        assert options is not None
        if request.of == "scores":
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
            options=options,
            attempt=request.attempt,
            given=digest_of_message(json.dumps(sent_by_server).encode()),
            of=request.of,
        )

    def _take_sum_step(self, client: Client, request: Request, message_digest: str, run_state: RunState) -> bytes:
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
            if request.of != "scores":
                self._check_site_budget(client)
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

        make_vector = client.scores_vector if request.of == "scores" else client.update_vector
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
        if request.of == "scores":
            summing = replace(run_state.summing, scores_round=request.round)
        else:
            summing = replace(run_state.summing, update_round=request.round)
            if client.site_privacy is not None:
                noise_multiplier, sample_rate = client.site_privacy.cost
                ledger.add(SITE_LEDGER, noise_multiplier, sample_rate, 1)
        self.store.commit(replace(run_state, summing=summing), replace(self.store.totals, ledger=ledger))

    def _check_site_budget(self, client: Client) -> None:
        """Check that the site as a whole has budget left for another sum.

        Raises:
            RejectionError: If it has none.
        """
        privacy = client.site_privacy
        ledger = self.store.totals.ledger
        if privacy is None or privacy.affords(ledger):
            return
        reason = explain_site_epsilon(ledger)
        if reason and privacy.budget.max_epsilon is not None:
            raise RejectionError(
                f"max_site_epsilon={privacy.budget.max_epsilon:g} cannot be met: {reason}", "exhausted"
            )
        raise RejectionError(
            "another noisy sum would exceed the largest ε of the entire site, over all runs (max_site_epsilon; by "
            "default that of one complete run)",
            "exhausted",
        )


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


def _lora_factors(client: Client, request: Request) -> tuple[Any, ...]:
    """Return the LoRA factors that are cut to the site's rank; none if it has the adapter's."""
    return tuple(client.module.tensor_names.factors) if request.rank else ()


@dataclass(frozen=True)
class _Incoming:
    """A message from the server.

    Attributes:
        content: The message.
        digest: Its digest, which a reply repeats.
        request: What its header requests.
    """

    content: bytes
    digest: str
    request: Request


def _unpack_received(client: Client, message: bytes, request: Request) -> State:
    """Return the state that the server sent to be trained, as it lies in the server's memory."""
    template = client.recipe.template
    tuning = request.kind == "tune"
    full = template.initial if tuning else template.sending
    # The server cuts the adapter to the site's rank during rounds, but sends it in full for fine-tuning.
    expected = full if tuning else narrowed(full, _lora_factors(client, request), request.rank)
    tensors = unpack(message, spec_of(expected)).tensors
    widened_tensors = {key: widened(value, full[key].shape) for key, value in tensors.items()}
    return _lay_out(widened_tensors, request)


def _were_scored(incoming: _Incoming, run_state: RunState) -> bool:
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
    return _Models(_lay_out(shared, request), members, _digest_for_all_sites(request, tensors))


def _digest_for_all_sites(request: Request, tensors: State) -> str:
    """Return a digest of the server's message, without the site's own number."""
    return digest_of_message(pack(replace(request, client=0), tensors))


@dataclass(frozen=True)
class _Outgoing:
    """What may leave a site after a training.

    Attributes:
        update: The update; empty after a fine-tuning.
        losses: Losses by role; empty if they may not leave.
        is_usable: Whether the server may use the update.
    """

    update: State
    losses: dict[str, Any]
    is_usable: bool


def _training_after(
    training: TrainingState,
    client: Client,
    incoming: _Incoming,
    protection: Protection,
    result: TrainingResult,
) -> TrainingState:
    """Return the state of a site's training after a round, or a fine-tuning.

    If the training broke, the client keeps its former personal state.

    Args:
        training: The state before.
        client: The client.
        incoming: The request.
        protection: The protection of the training, whose account has counted it.
        result: Its result.
    """
    request = incoming.request
    new_training = replace(
        training,
        round=request.round,
        num_rounds=training.num_rounds + 1,
        request_digest=incoming.digest,
        fingerprint=client.fingerprint,
    )
    if protection.image_account is not None:
        new_training = replace(new_training, account=protection.image_account.state_dict())
    if bool(result.trained.finite[0]):
        new_training = _with_client_state(new_training, result.trained.client_state, request.kind == "tune")
    return new_training


def _with_summand(summing: SummingState, request: Request, received: State, outgoing: _Outgoing) -> SummingState:
    """Return the state of a site's secure sums with what it is to add to the next one.

    Args:
        summing: The state before.
        request: The request to train.
        received: The state that the server sent.
        outgoing: What may leave the site under masks.
    """
    heard = {str(request.round): _digest_for_all_sites(request, received)}
    return replace(
        summing,
        update=outgoing.update,
        received=received,
        norm=request.norm,
        losses=outgoing.losses,
        heard=summing.heard | heard,
    )


def _problem_of_reply(reply: bytes, sent: State) -> str:
    """Return why the server would not accept a reply; empty if it would."""
    try:
        unpack(reply, spec_of(sent))
    except RejectionError as error:
        return f"the result of the training cannot be sent: {error}"
    return ""


def _problem_of_training(result: TrainingResult) -> str:
    """Return what went wrong while the site trained, for its log; empty if nothing did."""
    if not bool(result.trained.finite[0]):
        return f"{result.failure or 'the training became NaN or infinite'}; the personal state is unchanged"
    if result.failure:
        return f"{result.failure}; it was left out of all batches"
    return ""


def _with_client_state(training: TrainingState, client_state: Stacks, tuning: bool) -> TrainingState:
    """Return a site's training with the states (1, ...) that the client keeps, by role."""
    kept: Stacks = {}
    for role, state in client_state.items():
        # Contiguous like those in the store of a simulation: rounding depends on strides.
        kept[role] = {key: value.cpu().contiguous() for key, value in state.items()}
    if tuning:
        return replace(training, tuned_state=kept)
    return replace(training, client_state=kept)


def _check_sum_round(request: Request, run_state: RunState) -> None:
    """Raise a RejectionError unless a request is about the sum of the last round, and the site has a summand."""
    last_round = run_state.scoring.round if request.of == "scores" else run_state.training.round
    if request.round != last_round or not _has_summand(request, run_state):
        raise RejectionError(
            f"secure sum: round {request.display_round} cannot be summed; the last round was "
            f"{display_round('keys', last_round, request.of)}",
            "other",
        )


def _check_not_masked(request: Request, run_state: RunState) -> None:
    """Raise a RejectionError if the site's vector of a round was already sent under masks.

    A vector leaves once: the difference of two sums over other sites would be that of a single site.
    """
    if _masked_round(request, run_state) >= request.round:
        raise RejectionError(
            f"secure sum: the vector of round {request.display_round} was already sent under masks", "other"
        )


def _has_summand(request: Request, run_state: RunState) -> bool:
    """Return whether the site has something to add to the sum that a request is about."""
    if request.of == "scores":
        return bool(run_state.scoring.metrics)
    return bool(run_state.summing.update)


def _must_be_committed(reply: bytes, request: Request, run_state: RunState) -> bool:
    """Return whether a reply has the site's masked vector, and the state does not yet record that it leaves."""
    return bool(tensor_sizes(reply)) and _masked_round(request, run_state) < request.round


def _masked_round(request: Request, run_state: RunState) -> int:
    """Return the last round whose vector the site sent under masks."""
    return run_state.summing.scores_round if request.of == "scores" else run_state.summing.update_round


def _count(account: Account | None, costs: Sequence[StepCost], ledger: Ledger) -> dict[str, Any]:
    """Charge the cost of a round to the site's images, in the run and in the ledger of all runs.

    Returns:
        The run's ε as a fact of the response; nothing without privacy.
    """
    if account is None:
        add_step_without_noise(ledger, IMAGES_LEDGER)
        return {}
    account.spend(costs)
    for _, sigma, rate, steps, _ in costs:
        ledger.add(IMAGES_LEDGER, sigma, rate, steps)
    return {"epsilon": {name: _finite_or_none(values[0]) for name, values in account.epsilons([0]).items()}}


def _exhausted_images(client: Client, ledger: Ledger) -> RejectionError:
    """Return the error for a round that the ε of the site's images cannot afford."""
    reason = explain_image_epsilon(ledger)
    if reason and client.budget.max_epsilon is not None:
        return RejectionError(f"max_epsilon={client.budget.max_epsilon:g} cannot be met: {reason}", "exhausted")
    return RejectionError(
        "another round would exceed the largest ε that the recipe allows in this run, or the site over all runs "
        "(max_epsilon; by default that of one complete run)",
        "exhausted",
    )


def _mean_scores(image_scores: Scores) -> dict[str, float | None]:
    """Return the scores of one model by metric; those of each class as their mean."""
    return {name: _finite_or_none(float(values[0, 0])) for name, values in image_scores.means().items()}


def _lay_out(state: State, request: Request) -> State:
    """Return a state with the strides of the server's memory, on which rounding depends.

    Raises:
        RejectionError: If it cannot have them.
    """
    try:
        return laid_out(state, request.strides)
    except ValueError as error:
        raise RejectionError(str(error)) from None


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _pack_response(code: ResponseCode, message_digest: str, facts: dict[str, Any] | None = None) -> bytes:
    return pack(Response(code, message_digest, facts or {}))
