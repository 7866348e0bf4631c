# SPDX-License-Identifier: Apache-2.0
"""The resident worker of a site: it answers the server's messages from its own data, and says no more than it may."""

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from perada.core.states import State, laid_out, narrowed, widened
from perada.core.text import printable
from perada.data.fingerprints import changed_content
from perada.deploy.protocol import (
    MODELS,
    SUM_KINDS,
    RefusalError,
    Request,
    Response,
    ResponseCode,
    digest,
    display_round,
    max_message_size,
    pack,
    read_header,
    refuse,
    spec_of,
    unpack,
)
from perada.deploy.scores import score_summands
from perada.deploy.site.budget import WITHOUT_NOISE, explain_image_epsilon, explain_site_epsilon
from perada.deploy.site.client import Client
from perada.deploy.site.file import Limits
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER, RunState, SiteStore
from perada.federation.scores import Scores
from perada.privacy.account import Account, Row
from perada.privacy.accounting import Ledger
from perada.privacy.protection import Protection

if TYPE_CHECKING:
    from perada.deploy.sums.keys import SiteClaims, SumTerms
    from perada.deploy.sums.party import Party


class SiteWorker:
    """Answers messages, one at a time.

    Args:
        book: The site's state folder.
        clients: The recipes that the site approves, by digest, with its data.
        may_send: What of :data:`perada.deploy.protocol.MAY_SEND` may leave the site beside updates.
        log: Where reasons go; they never leave the site.
        party: The site among those that it hides among, for recipes with secure sums.
        resume_allow: ``images`` lets a run without privacy go on with other images than it has trained on here.

    Raises:
        ValueError: If a recipe has secure sums and there is no ``party``.
    """

    def __init__(
        self,
        book: SiteStore,
        clients: Mapping[str, Client],
        may_send: Sequence[str] = (),
        log: logging.Logger | None = None,
        party: "Party | None" = None,
        resume_allow: Sequence[str] = (),
    ) -> None:
        for client in clients.values():
            if client.settings.secure_sums is not None and party is None:
                raise ValueError(
                    "the recipe has secure_sums, and the site's file does not say among whom; give it a section "
                    "secure_sums with identity and sites (docs/secure_sums.md)"
                )
        self.party = party
        self.resume_allow = set(resume_allow)
        self.book, self.clients, self.may_send = book, dict(clients), set(may_send)
        self.log = log or logging.getLogger("perada.site")
        self.about: dict[str, object] = {}  # the run and round of the order that is being answered
        self._turn = threading.Lock()
        for client in self.clients.values():
            _ = client.fingerprint  # files are read for it, which the first round's deadline should not wait for
            self._warn_of_infinite_epsilon(client)

    @property
    def most(self) -> int:
        """Bytes that a message may have. Some ensembles have as many models as there are sites."""
        sizes = [max_message_size({})]
        for client in self.clients.values():
            template = client.recipe.template
            sizes += [max_message_size(state) for state in (template.initial, template.sending)]
            if client.settings.algorithm.is_ensemble:
                sizes.append(sizes[-2] + MODELS * (max_message_size(template.initial) - max_message_size({})))
        return max(sizes)

    def answer(self, message: bytes, run: str) -> bytes:
        """The reply to a message, which is in the audit log. What goes wrong is a code, and its reason is in the log.

        Args:
            message: As it came.
            run: What the transport calls the run; it is written to the log alone.

        Raises:
            OSError: If the audit log cannot be written: nothing leaves then.
        """
        answers, run = digest(message), printable(run)
        with self._turn:
            self.about = {}
            try:
                reply = self._answer(message, answers, run)
            except RefusalError as refusal:
                self.log.warning("run %s: refused (%s): %s", run, refusal.code, refusal)
                reply = _reply(refusal.code, answers)
            except Exception:
                self.log.exception("run %s: failed", run)
                reply = _reply("failed", answers)
            self.book.note(message, reply, self._spent)
        return reply

    def _warn_of_infinite_epsilon(self, client: Client) -> None:
        """Say at the start which of a recipe's guarantees the site has lost before; its orders may be refused."""
        total = self.book.total
        if client.planned and (reason := explain_image_epsilon(total)):
            self.log.warning("recipe %.8s: %s", client.recipe.digest, reason)
        if client.level is not None and (reason := explain_site_epsilon(total)):
            self.log.warning("recipe %.8s: %s", client.recipe.digest, reason)

    def _spent(self, order: Request) -> dict[str, float | None] | None:
        """The ε of all that was trained and masked here, in the site's measure (None is ∞); None without privacy."""
        client, ledger = self.clients[order.recipe], self.book.total
        owners = {"spent": IMAGES_LEDGER} if client.planned else {}
        owners |= {} if client.level is None else {"site": SITE_LEDGER}
        found = {name: _finite(client.budget.epsilon(ledger.history(owner))) for name, owner in owners.items()}
        return found | {"delta": client.limits.delta} if found else None

    def _answer(self, message: bytes, answers: str, run: str) -> bytes:
        order = Request.read(read_header(message))
        self.about = {"run": order.run, "round": order.round}
        client = self.clients.get(order.recipe)
        if client is None:
            raise RefusalError(
                f"the recipe with the digest {order.recipe} is not among the approved ones", "unapproved"
            )
        self.log.info("run %s (perada's %s): %s", run, order.run, order)
        if order.kind == "join":
            unpack(message, {})
            sizes = self._allowed(sizes={"size": client.size, "tests": client.tests})
            return _reply("ok", answers, sizes | {"labels": client.labels})
        state, rounds, tune = self.book.load(order.run), client.recipe.rounds, order.kind == "tune"
        other = state.client not in (None, order.client) or state.recipe not in ("", order.recipe)
        refuse(other, f"in run {order.run} the site is client {state.client} of recipe {state.recipe}", "other")
        late = order.round > rounds or (order.kind == "train" and order.round == rounds)
        refuse(late, f"the recipe has {rounds} rounds, and round {order.display_round} was asked for", "future")
        untuned = tune and (order.round < rounds or not client.settings.algorithm.personalization())
        refuse(untuned, "the recipe has no fine-tuning then", "other")
        refuse(order.round < state.round, f"round {order.display_round} after round {state.round + 1}", "past")
        state.client, state.recipe, state.transport, state.rank = order.client, order.recipe, run, order.rank
        if order.kind in SUM_KINDS:
            return self._sum(client, order, answers, state)
        if order.kind == "evaluate":  # not untrained: or a server makes runs of its own, to have any model scored
            refuse(not state.trained, f"nothing was trained in run {order.run}, and models are to be scored", "other")
            self._evaluate(client, message, order, answers, state)
            return self._with_keys(client, replace(order, of="scores", attempt=0), state, state.scores)
        if order.round == state.round:
            refuse(answers != state.message, f"round {order.display_round} was trained for another message", "other")
        else:
            self._train(client, message, order, answers, state)
        return self._with_keys(client, replace(order, of="update", attempt=0), state, state.reply)

    def _train(self, client: Client, message: bytes, order: Request, answers: str, state: RunState) -> None:
        """Train, and commit what is kept, what it cost and the reply together."""
        book, template, tune = self.book, client.recipe.template, order.kind == "tune"
        self._check_images(client, state)
        state.data = client.fingerprint
        factors = client.module.slot.factors if order.rank else ()
        whole = template.initial if tune else template.sending
        _, given = unpack(message, spec_of(whole if tune else narrowed(whole, factors, order.rank)))
        given = _laid_out({key: widened(value, whole[key].shape) for key, value in given.items()}, order)
        protection, total = client.protection(state.account, state.trained), deepcopy(book.total)
        sampling = self._check_limits(client.limits, state, protection)
        costs = client.costs(order, protection, total)
        if costs is None:
            reason = explain_image_epsilon(total)
            if reason and client.budget.own is not None:
                raise RefusalError(f"max_epsilon={client.budget.own:g} cannot be kept: {reason}", "exhausted")
            limits = "the largest ε that the recipe allows in this run, or the site in all runs together"
            raise RefusalError(
                f"another round would pass {limits} (max_epsilon; by default a whole run's)", "exhausted"
            )
        if client.level is not None and not tune:
            client.level.check_norm(order.norm)
            self._check_sum(client)
        trained, losses, failed = client.train(order, given, state, protection)
        facts = self._count(protection.images, costs, total, state)
        if client.level is None:  # the update leaves without the site's noise, or at least whether the training broke
            total.add(SITE_LEDGER, *WITHOUT_NOISE, 1)
        counts = bool(trained.counts[0]) or tune
        if counts and losses:
            facts |= self._allowed(losses={"losses": losses})
        if bool(trained.finite[0]):
            kept = {role: {key: value.cpu() for key, value in part.items()} for role, part in trained.kept.items()}
            setattr(state, "tuned" if tune else "kept", kept)
            outcome = f"{failed}; it is in no batch" if failed else ""
        else:
            outcome = f"{failed or 'the training became NaN or infinite'}; the personal state stays"
        sent = {} if tune else {key: value[0] for key, value in trained.sent.items()}
        sent = narrowed(sent, factors, order.rank)
        if client.settings.secure_sums is not None:
            state.losses = facts.pop("losses", {})  # they, too, leave in the sum alone, and only if they may
            if client.level is not None and not counts:  # nobody is to see that it broke: it adds noise alone
                sent, counts = {key: given.get(key, value) for key, value in sent.items()}, True
            state.update, state.shown, state.norm = sent, given, order.norm
            state.received = digest(pack(replace(order, client=0), given))
            state.heard[str(order.round)] = state.received
            sent = {}  # it leaves under masks alone
        reply = pack(Response("ok", answers, facts), sent)
        try:
            unpack(reply, spec_of(sent))  # as the server will
        except RefusalError as error:
            outcome, counts = f"what came of the training cannot be sent: {error}", False
        if outcome:
            self.log.warning("round %d: %s", order.display_round, outcome)
        if not counts:  # nothing to add up: perhaps what the server sent, which it knows
            reply, state.update = _reply("broken", answers), {}
        state.round, state.trained, state.message, state.reply = order.round, state.trained + 1, answers, reply
        book.commit(state, total, book.rounds + 1, sampling)

    def _count(self, account: Account | None, costs: Sequence[Row], total: Ledger, state: RunState) -> dict[str, Any]:
        """Count what a round cost, in the run and in ``total``, and return what of it may leave the site."""
        if account is None:
            total.add(IMAGES_LEDGER, *WITHOUT_NOISE, 1)
            return {}
        account.spend(costs)
        for _, sigma, rate, steps, _ in costs:
            total.add(IMAGES_LEDGER, sigma, rate, steps)
        state.account = account.state_dict()
        spent = {name: _finite(values[0]) for name, values in account.epsilons([0]).items()}
        return self._allowed(epsilon={"epsilon": spent})

    def _with_keys(self, client: Client, order: Request, state: RunState, reply: bytes) -> bytes:
        """A reply with the keys for the first attempt at the sum of what was made; they are never on the disk."""
        there, left = self._left(order, state)
        if self.party is None or client.settings.secure_sums is None or not there:
            return reply
        answer = Response.read(read_header(reply))
        if answer.code != "ok":
            return reply
        own = self._own(order, state)
        offered = self.party.offered(self._terms(client, order, state), own, begin=left < order.round)
        return pack(replace(answer, sums=answer.sums | offered))

    def _left(self, order: Request, state: RunState) -> tuple[Mapping[str, Any], int]:
        """What there is to add up of the last round, and the last round of which it left under masks."""
        return (state.numbers, state.counted) if order.of == "scores" else (state.update, state.summed)

    def _own(self, order: Request, state: RunState) -> "SiteClaims":
        """What the site says of itself in a sum."""
        from perada.deploy.sums.keys import SiteClaims

        return SiteClaims([*(state.numbers if order.of == "scores" else state.losses)], state.heard)

    def _terms(self, client: Client, order: Request, state: RunState) -> "SumTerms":
        """Those of the sum that an order is about, as the site knows them."""
        from perada.deploy.sums.keys import SumTerms

        secure = client.settings.secure_sums
        assert secure is not None
        shown = [state.asked] if order.of == "scores" else [state.received, client.digest_of_public(order.round)]
        given = digest(json.dumps(shown).encode())
        return SumTerms(order.run, order.round, order.recipe, secure, order.attempt, given, order.of)

    def _sum(self, client: Client, order: Request, answers: str, state: RunState) -> bytes:
        """Take a step of the secure sum of the round that was trained last."""
        party, scores = self.party, order.of == "scores"
        if client.settings.secure_sums is None or party is None:
            raise RefusalError("the recipe has no secure sums", "other")
        there, left = self._left(order, state)
        last = state.scored if order.of == "scores" else state.round
        other = order.round != last or not there
        shown_last = display_round("keys", last, order.of)
        refuse(
            other,
            f"secure sum: nothing of round {order.display_round} may be added up; the last one was {shown_last}",
            "other",
        )
        terms = self._terms(client, order, state)
        if (reply := party.replied(terms, answers)) is not None:
            return reply
        # A vector leaves once: of two sums with other sites in them the difference would be a single site's.
        gone = order.kind in ("keys", "mask") and left >= order.round
        refuse(gone, f"secure sum: what round {order.display_round} made has left under masks before", "other")
        if order.kind in ("keys", "mask") and not scores:
            self._check_sum(client)
        part = client.scores_of_sum if scores else client.part_of_sum
        own = self._own(order, state)
        from perada.deploy.sums.site import Objection

        try:
            said, masked = party.step(order, terms, own, lambda sites, told: part(state, sites, told))
        except Objection as objection:  # the server is told to whom, not why
            self.log.warning("run %s: %s", order.run, objection)
            said, masked = {"objects": objection.names}, None
        if masked is not None:
            total = deepcopy(self.book.total)
            if scores:
                state.counted = order.round
            else:
                state.summed = order.round
                if client.level is not None:
                    total.add(SITE_LEDGER, *client.level.cost, 1)
            self.book.commit(state, total, self.book.rounds, self.book.sampling)
        tensors = {} if masked is None else {"masked": torch.from_numpy(masked)}
        if order.kind == "reveal":
            self.log.info("round %d: in the sum are %s", order.display_round, ", ".join(party.alive(terms)))
        reply = pack(Response("ok", answers, sums=said), tensors)
        party.keep(terms, answers, reply)
        return reply

    def _check_sum(self, client: Client) -> None:
        """Refuse what the site as a whole has no budget for any more."""
        level = client.level
        if level is None or level.affords(self.book.total):
            return
        reason = explain_site_epsilon(self.book.total)
        if reason and level.budget.own is not None:
            raise RefusalError(f"max_site_epsilon={level.budget.own:g} cannot be kept: {reason}", "exhausted")
        over = "another noisy sum would pass the largest ε of the site as a whole, in all runs together"
        raise RefusalError(f"{over} (max_site_epsilon; by default a whole run's)", "exhausted")

    def _check_images(self, client: Client, state: RunState) -> None:
        """Refuse to go on with a run on other images or labels than those that it has trained on here.

        The personal state is of the former ones, and so are the ledgers and the noise of a private run.
        """
        changed = changed_content(state.data, client.fingerprint) if state.data else None
        if changed is None:
            return
        loop = client.recipe.loop
        difference = f"the site's {changed} are not those that run {state.run} has trained on here"
        if loop.privacy is not None or loop.client_privacy is not None:
            raise RefusalError(
                f"{difference}, and its noise and its ledgers are of those; put them back, or take part in a new run",
                "other",
            )
        if "images" not in self.resume_allow:
            remedy = "put them back, or accept the change by resume_allow: [images] in the site's file"
            raise RefusalError(f"{difference}; {remedy}", "other")
        self.log.warning("%s; the run goes on with them, as resume_allow says", difference)

    def _check_limits(self, limits: Limits, state: RunState, protection: Protection) -> str | None:
        """Refuse what the site does not allow, or its budget not any more; else how private batches are drawn."""
        rounds, runs, sampling = self.book.rounds, self.book.runs, self.book.sampling
        spent = limits.max_rounds is not None and rounds >= limits.max_rounds
        refuse(spent, f"{rounds} rounds of max_rounds={limits.max_rounds} are trained, all runs together", "exhausted")
        full = not state.trained and len(runs) >= limits.max_runs
        refuse(full, f"{len(runs)} runs of max_runs={limits.max_runs} are there; this is another", "exhausted")
        if protection.images is not None:
            drawn = protection.images.options.sampling
            mixed = sampling not in (None, drawn)
            refuse(mixed, f"batches were drawn with sampling={sampling!r} before, now with {drawn!r}", "exhausted")
            sampling = drawn
        return sampling

    def _evaluate(self, client: Client, message: bytes, order: Request, answers: str, state: RunState) -> None:
        """Score the models, once a round, and remember the global one that the last round made."""
        last = state.scored
        refuse(
            order.round < last, f"scores after round {order.display_round}, and those after {last} were sent", "past"
        )
        if order.round == last:  # not others: or the server tries models of its own making on the site's images
            refuse(answers != state.score, f"other models were scored after round {order.display_round}", "other")
            return
        self._check_images(client, state)
        template = client.recipe.template
        expected = {f"shared/{key}": entry for key, entry in spec_of(template.initial).items()}
        for key, (kind, shape) in spec_of(template.initial).items() if order.models else ():
            expected[f"members/{key}"] = kind, (order.models, *shape)
        _, given = unpack(message, expected)
        shared = {key[7:]: value for key, value in given.items() if key.startswith("shared/")}
        shared = _laid_out(shared, order)
        members = {key[8:]: value for key, value in given.items() if key.startswith("members/")}
        facts, state.numbers = dict[str, Any](), {}
        if self.may_send & {"counts", "scores"} and client.level is None:  # no ledger counts them
            scores = client.score(order, shared, members, state)
            counts = {name: found.counts[:, 0, 0].tolist() for name, found in scores.items() if found.counts.any()}
            values = {name: _values(found) for name, found in scores.items() if found}
            facts = self._allowed(counts={"counts": counts}, scores={"scores": values})
        if client.settings.secure_sums is not None:
            state.numbers, facts = score_summands(client.module.metrics, facts), {}
            state.asked = digest(pack(replace(order, client=0), given))
        total = self.book.total
        if client.level is None and (facts or state.numbers):  # they leave without noise, now or in a sum
            total = deepcopy(total)
            total.add(SITE_LEDGER, *WITHOUT_NOISE, 1)
        if order.round == client.recipe.rounds:
            state.shared = shared
        sums = {"adds": True} if state.numbers else {}
        reply = pack(Response("ok", answers, facts, sums))
        state.scored, state.score, state.scores = order.round, answers, reply
        self.book.commit(state, total, self.book.rounds, self.book.sampling)

    def _allowed(self, **facts: dict[str, Any]) -> dict[str, Any]:
        """Those of the facts, by what they are, that may leave the site."""
        return {key: value for name, part in facts.items() if name in self.may_send for key, value in part.items()}


def _values(scores: Scores) -> dict[str, float | None]:
    """The scores of one model, by metric; those of each class as their mean."""
    return {name: _finite(float(values[0, 0])) for name, values in scores.means().items()}


def _laid_out(state: State, order: Request) -> State:
    """A state that came with an order, as it lies in the server's memory; Refused if it cannot."""
    try:
        return laid_out(state, order.strides)
    except ValueError as error:
        raise RefusalError(str(error)) from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _reply(code: ResponseCode, answers: str, facts: dict[str, Any] | None = None) -> bytes:
    return pack(Response(code, answers, facts or {}))
