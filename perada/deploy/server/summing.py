# SPDX-License-Identifier: Apache-2.0
"""The server's steps of a secure sum over a transport: which sites answer them, and the resulting sum."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from perada.core.states import State
from perada.deploy.protocol import RejectionError, RequestKind, Response
from perada.deploy.sums.keys import (
    SEALED_SIZE,
    Advert,
    SiteClaims,
    SumTerms,
    check_usable,
    conflicting_rounds,
    is_signed_by_itself,
    parse_digests,
    received_digests,
)
from perada.deploy.sums.party import from_hex, to_hex
from perada.deploy.sums.progress import SumState
from perada.deploy.sums.server import ServerRound
from perada.deploy.sums.shares import SECRET_SIZE
from perada.deploy.sums.site import DealtShares, RevealedShares
from perada.deploy.sums.vector import Uint64Vector

MAX_FAILURES = 3
"""Number of failed exchanges of keys and shares, without a site to blame, after which a sum is given up."""
LIE_CODE = "lied"
"""Code of a site that provably lied in a sum."""
DISPUTE_CODE = "disputed"
"""Code of a site that most others reject, or that rejects sites which most others accept."""
MASKED_VECTOR_NAME = "masked"
"""Name of the tensor with a masked vector."""
_DIGEST = "[0-9a-f]{64}"
ContentT = TypeVar("ContentT")

log = logging.getLogger("perada.deploy")


class AskStep(Protocol):
    """Function that requests a step of a sum from sites; see :meth:`.Coordinator._sum`."""

    def __call__(
        self,
        kind: RequestKind,
        attempt: int,
        contents: Mapping[str, dict[str, Any]],
        vector_size: int,
        /,
    ) -> dict[str, tuple[Response, State]]:
        """Request a step from some sites.

        Args:
            kind: Kind of the step.
            attempt: Number of the attempt at the sum.
            contents: Content of the request to each site, by name.
            vector_size: Length of the masked vector that each site must send; 0 for none.

        Returns:
            Response and tensors of each site that answered, by name.
        """


@dataclass(frozen=True)
class VectorSum:
    """The sum of the vectors of sites.

    Attributes:
        survivors: Names of the sites in the sum.
        total: Sum of their vectors.
    """

    survivors: list[str]
    total: Uint64Vector


@dataclass(frozen=True)
class _SharedRound:
    """A round whose sites have shares of one another, so that masked vectors can be requested.

    Attributes:
        summing_server: The server's side of the round.
        sum_state: What a restarted server needs of it, as last saved.
    """

    summing_server: ServerRound
    sum_state: SumState


class SecureSum:
    """One secure sum on the server's side.

    A site that makes the sum fail is identified if this can be proven. As long as no vector was masked, the sum is then
    restarted without it.

    Args:
        ask: Function that requests a step from sites.
        terms: Function of the number of an attempt that returns its terms.
        trained: Responses of the sites that may take part, with their keys for the first attempt.
        vector_size: Length of a vector.
        sum_state: State of the sum when the server was stopped; None if it had not begun.
        save: Function that saves the state of the sum.
        sent_digests: Digests of what the server sent in earlier rounds, by round.

    Attributes:
        failed: Codes of the sites that did not take a requested step, by name.
        lies: Proven lies, by the name of the site.
    """

    def __init__(
        self,
        ask: AskStep,
        terms: Callable[[int], SumTerms],
        trained: Mapping[str, tuple[Response, State]],
        vector_size: int,
        sum_state: SumState | None = None,
        save: Callable[[SumState], None] = lambda _: None,
        sent_digests: Mapping[str, str] | None = None,
    ) -> None:
        self._ask = ask
        self._terms = terms
        self._trained = dict(trained)
        self._vector_size = vector_size
        self._state = sum_state
        self._save = save
        # Digests are converted to the text of an advert and back, which drops old rounds as the sites do.
        self._sent_digests = parse_digests(SiteClaims(received_digests=sent_digests or {}).texts()["heard"])
        # The next attempt excludes these sites.
        self._excluded: set[str] = set()
        self.failed: dict[str, str] = {}
        self.lies: dict[str, str] = {}

    def run(self) -> VectorSum:
        """Compute the sum.

        Raises:
            RejectionError: If too few sites remain at a step. The sum can then not be decrypted.
        """
        if self._state is not None and self._state.senders:
            shared = self._resume_round(self._state)
        else:
            shared = self._exchange_shares()
        try:
            return self._finish_round(shared)
        finally:
            self._blame_liars(shared.summing_server.lies)

    def _blame_liars(self, lies: Mapping[str, str]) -> None:
        """Record proven lies, and log those that are new."""
        for name, lie in lies.items():
            if name not in self.lies:
                log.warning("secure sum: site %s lied: %s", name, lie, extra={"site": name})
            self.lies[name] = lie
            self.failed[name] = LIE_CODE

    def _exchange_shares(self) -> _SharedRound:
        """Exchange keys and shares. An attempt that fails is repeated without the sites that are to blame.

        Raises:
            RejectionError: If too few sites remain, or after :data:`MAX_FAILURES` failures without a site to blame.
        """
        attempt = 0 if self._state is None else self._state.attempt + 1
        failures = 0
        while True:
            candidates = {name: answer for name, answer in self._trained.items() if name not in self._excluded}
            self._check_candidates(candidates)
            num_excluded = len(self._excluded)
            try:
                return self._attempt_once(attempt, candidates)
            except RejectionError as rejection:
                log.warning("%s (attempt %d)", rejection, attempt + 1)
                if len(self._excluded) == num_excluded:
                    failures += 1
                if failures == MAX_FAILURES:
                    raise
            attempt += 1

    def _check_candidates(self, able_sites: Mapping[str, object]) -> None:
        """Raise a RejectionError if there are too few sites for an attempt."""
        min_sites = self._terms(0).secure_sums.min_sites
        if len(able_sites) < min_sites:
            without = ""
            if self._excluded:
                without = f"; without {', '.join(sorted(self._excluded))}"
            raise RejectionError(
                f"secure sum: {len(able_sites)} sites may take part, but {min_sites} are required{without}", "other"
            )

    def _attempt_once(self, attempt: int, replies_of_sites: Mapping[str, tuple[Response, State]]) -> _SharedRound:
        """Exchange keys and shares once, and save the state.

        Raises:
            RejectionError: If too few sites answer, or some of them object to others.
        """
        adverts = self._collect_adverts(attempt, replies_of_sites)
        terms = self._terms(attempt)
        server = ServerRound(terms, [*adverts.values()])
        advert_list = [vars(adverts[name]) for name in server.order]
        state = SumState(terms.round, terms.of, attempt, advert_list)
        # The list is saved before it is sent, since a restarted server must send the same one.
        self._save(state)
        boxes = self._collect_shares(server, attempt, advert_list)
        holders = self._deliver_shares(server, attempt, boxes)
        state.senders = server.begin(holders)
        state.commitments = {}
        for dealer, commitments in server.commitments.items():
            state.commitments[dealer] = {holder: list(pair) for holder, pair in commitments.items()}
        self._save(state)
        return _SharedRound(server, state)

    def _collect_adverts(
        self, attempt: int, replies_of_sites: Mapping[str, tuple[Response, State]]
    ) -> dict[str, Advert]:
        """Return the adverts of the sites that can be in the same list."""
        if attempt:
            answers = self._ask_same("keys", attempt, replies_of_sites, {})
        else:
            # The keys of the first attempt came with the responses to the training.
            answers = dict(replies_of_sites)
        adverts = self._read_answers(answers, _read_advert)
        # Ties go to the server's digest, whose sites come first, or one of two sites could get the other excluded.
        truthful: dict[str, Advert] = {}
        contradicting: dict[str, Advert] = {}
        for name, advert in adverts.items():
            if conflicting_rounds(self._sent_digests, advert):
                contradicting[name] = advert
            else:
                truthful[name] = advert
        return consistent_adverts(truthful | contradicting)

    def _collect_shares(
        self,
        summing_server: ServerRound,
        attempt: int,
        advert_list: list[dict[str, str]],
    ) -> dict[str, dict[str, bytes]]:
        """Send sites the list of keys.

        Returns:
            The shares that they have dealt, sorted by the site that is to receive them.
        """
        dealt = self._ask_same("shares", attempt, summing_server.adverts, {"adverts": advert_list})
        self._settle_objections(summing_server, dealt)
        return summing_server.deliver(
            self._read_answers(dealt, lambda name, content: _read_dealt(name, content, summing_server.order))
        )

    def _deliver_shares(
        self, summing_server: ServerRound, attempt: int, boxes: Mapping[str, Mapping[str, bytes]]
    ) -> list[str]:
        """Send sites the shares that were dealt to them.

        Returns:
            The sites that hold shares of one another.
        """
        contents = {}
        for name, box in boxes.items():
            commitments = {dealer: summing_server.commitments[dealer][name] for dealer in box}
            contents[name] = {"sealed": to_hex(box), "commitments": commitments}
        answers = self._ask("hold", attempt, contents, 0)
        objections = self._read_answers(answers, lambda name, content: _read_objections(content, {*boxes} - {name}))
        self._settle_disputes(summing_server, attempt, objections)
        return list(objections)

    def _ask_same(
        self,
        kind: RequestKind,
        attempt: int,
        names: Iterable[str],
        request_fields: dict[str, Any],
        vector_size: int = 0,
    ) -> dict[str, tuple[Response, State]]:
        """Ask sites for a step with the same content."""
        return self._ask(kind, attempt, dict.fromkeys(names, request_fields), vector_size)

    def _settle_objections(self, summing_server: ServerRound, dealt: Mapping[str, tuple[Response, State]]) -> None:
        """Exclude sites whose keys most others reject, and sites that reject keys which most others accept.

        All sites see the same keys, so all honest sites with complete lists accept the same ones. A single site that
        rejects the keys of another one therefore cannot have it excluded.

        Raises:
            RejectionError: If there are objections.
        """
        objecting = {name: answer for name, answer in dealt.items() if "objects" in answer[0].sums}
        objections = self._read_answers(
            objecting, lambda name, content: _read_objections(content, {*summing_server.order} - {name})
        )
        if not any(objections.values()):
            return
        excluded = {}
        for name in summing_server.order:
            objectors = [other for other, rejected in objections.items() if name in rejected]
            num_others = sum(other != name for other in dealt)
            if 2 * len(objectors) > num_others:
                excluded[name] = f"its keys were rejected by {', '.join(objectors)}"
        for name, rejected in objections.items():
            accepted_by_most = [other for other in rejected if other not in excluded]
            if accepted_by_most and name not in excluded:
                excluded[name] = f"it rejected the keys of {', '.join(accepted_by_most)}, which most sites accept"
        for name, reason in excluded.items():
            log.warning("secure sum: site %s is excluded: %s", name, reason, extra={"site": name})
            self.failed[name] = DISPUTE_CODE
        self._excluded |= excluded.keys()
        raise RejectionError(
            f"secure sum: sites reject one another's keys: excluding {', '.join(sorted(excluded))}", "other"
        )

    def _settle_disputes(
        self, summing_server: ServerRound, attempt: int, objections: Mapping[str, Collection[str]]
    ) -> None:
        """Determine who lied when a site claims that the shares sealed for it do not open.

        A claim alone does not exclude the accused site. It discloses the key of the shares that it dealt, with which
        the server checks the claim.

        Raises:
            RejectionError: If there are disputes.
        """
        accused = sorted({dealer for dealers in objections.values() for dealer in dealers})
        if not accused:
            return
        seeds = self._read_answers(self._ask_same("open", attempt, accused, {}), _read_seed)
        lies: dict[str, str] = {}
        for holder, dealers in objections.items():
            for dealer in dealers:
                if dealer not in seeds:
                    continue
                if summing_server.dealt_honestly(dealer, seeds[dealer], holder):
                    lies.setdefault(holder, f"it claims that the shares of {dealer!r} do not open, but they do")
                else:
                    lies.setdefault(dealer, f"the shares that it sealed for {holder!r} do not open")
        self._blame_liars(lies)
        silent = [name for name in accused if name not in seeds]
        for name in silent:
            log.warning("secure sum: site %s did not open the shares that it is accused of spoiling", name)
            self.failed.setdefault(name, DISPUTE_CODE)
        self._excluded |= {*lies, *silent}
        raise RejectionError(
            f"secure sum: sealed shares do not open: excluding {', '.join(sorted(self._excluded))}", "other"
        )

    def _resume_round(self, sum_state: SumState) -> _SharedRound:
        """Restore the round of a server that was stopped after it had requested masked vectors."""
        server = ServerRound(self._terms(sum_state.attempt), [Advert(**entry) for entry in sum_state.adverts])
        server.commitments = {}
        for dealer, commitments in sum_state.commitments.items():
            # JSON has lists in place of pairs.
            server.commitments[dealer] = {holder: (first, second) for holder, (first, second) in commitments.items()}
        server.begin(sum_state.senders)
        return _SharedRound(server, sum_state)

    def _finish_round(self, shared_round: _SharedRound) -> VectorSum:
        """Collect the masked vectors, and remove the masks from their sum."""
        server = shared_round.summing_server
        state = shared_round.sum_state
        state.survivors = server.take(self._collect_vectors(state))
        self._save(state)
        if not state.signatures:
            confirmed = self._ask_same("confirm", state.attempt, state.survivors, {"alive": state.survivors})
            state.signatures = server.valid_signatures(self._read_answers(confirmed, _read_signature))
            server.check_enough(state.signatures, "signed the list of sites in the sum")
            self._save(state)
        survivors = set(state.survivors)
        dropouts = set(state.senders) - survivors
        answers = self._ask_same("reveal", state.attempt, state.signatures, {"signatures": state.signatures})
        revealed = self._read_answers(answers, lambda _, content: _read_revealed(content, survivors, dropouts))
        return VectorSum(state.survivors, server.total(revealed))

    def _collect_vectors(self, sum_state: SumState) -> dict[str, Uint64Vector]:
        """Request the masked vectors, and return those that arrive.

        Raises:
            RejectionError: If the list of sites in the sum was fixed before a restart, and one of them is missing.
        """
        masked = self._ask_same(
            "mask", sum_state.attempt, sum_state.senders, {"there": sum_state.senders}, self._vector_size
        )
        vectors = {}
        for name, (_, tensors) in masked.items():
            vectors[name] = tensors[MASKED_VECTOR_NAME].numpy()
        if not sum_state.survivors:
            return vectors
        # Before the restart, sites may have signed that these are in the sum; they sign no other list.
        missing = [name for name in sum_state.survivors if name not in vectors]
        if missing:
            num_sent = len(sum_state.survivors) - len(missing)
            raise RejectionError(
                f"secure sum: {num_sent} of {len(sum_state.survivors)} sites sent their part again after the restart; "
                f"missing: {', '.join(missing)}",
                "other",
            )
        return {name: vectors[name] for name in sum_state.survivors}

    def _read_answers(
        self,
        answers: Mapping[str, tuple[Response, State]],
        read: Callable[[str, dict[str, Any]], ContentT],
    ) -> dict[str, ContentT]:
        """Read what sites sent, in the order of their names; malformed contents are left out.

        Args:
            answers: Responses and tensors by the name of the site.
            read: Reads the content of a response, given the site's name.
        """
        contents = {}
        for name in sorted(answers):
            response, _ = answers[name]
            try:
                contents[name] = read(name, response.sums)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("site %s: malformed content in a secure sum: %s (%s)", name, error, type(error).__name__)
                self.failed[name] = "malformed"
        return contents


def consistent_adverts(adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """Return the adverts that agree with most others about this sum and about each former round.

    Sites reject a list with an advert that states something else, such as that of a site that lies, or has other public
    images. Of statements that are equally common the first one wins.
    """
    # What each site states of this sum, under "", and of each former round.
    statements_of_sites = {}
    counts_by_topic: dict[str, Counter[str]] = {}
    for name, advert in adverts.items():
        statements = {"": advert.terms, **received_digests(advert)}
        statements_of_sites[name] = statements
        for topic, statement in statements.items():
            counts_by_topic.setdefault(topic, Counter())[statement] += 1
    majority = {}
    for topic, counts in counts_by_topic.items():
        # Among equally common statements, max() returns the first.
        majority[topic] = max(counts, key=lambda statement: counts[statement])

    deviating = []
    for name, statements in statements_of_sites.items():
        if any(majority[topic] != statement for topic, statement in statements.items()):
            deviating.append(name)
    if deviating:
        names = ", ".join(sorted(deviating))
        log.warning("secure sum: excluding %s: sent something different from most sites, or claiming so", names)
    return {name: advert for name, advert in adverts.items() if name not in deviating}


def _read_advert(name: str, fields: dict[str, Any]) -> Advert:
    """Read a site's keys; a ValueError if they are unusable, another site's or not signed."""
    advert = Advert(**fields["advert"])
    if advert.name != name:
        raise ValueError(f"it calls itself {advert.name[:80]!r}; its name must match that of its key at the SuperLink")
    check_usable(advert)
    if not is_signed_by_itself(advert, advert.signature, "advert", advert.statement()):
        raise ValueError("its keys are not signed by the identity that they name")
    return advert


def _read_objections(fields: dict[str, Any], others: Collection[str]) -> list[str]:
    """Read the names of the sites whose keys or shares a site does not accept."""
    objections = fields.get("objects", [])
    if not isinstance(objections, list) or not {*objections} <= {*others}:
        raise ValueError("it objects to something that is not another site")
    return objections


def _read_dealt(name: str, fields: dict[str, Any], order: Sequence[str]) -> DealtShares:
    """Read the shares that a site dealt to the sites in ``order``."""
    sealed = from_hex(fields["sealed"])
    others = {*order} - {name}
    if {*sealed} != others or any(len(text) != SEALED_SIZE for text in sealed.values()):
        raise ValueError("it did not seal its shares for all others, so some masks would not cancel")
    commitments = fields["commitments"]
    if {*commitments} != {*order}:
        raise ValueError("it did not commit to the shares of all sites")
    pairs = {}
    for holder, (first, second) in commitments.items():
        if not re.fullmatch(_DIGEST, first) or not re.fullmatch(_DIGEST, second):
            raise ValueError("a commitment is malformed")
        pairs[holder] = (first, second)
    return DealtShares(sealed, pairs)


def _read_seed(_: str, fields: dict[str, Any]) -> bytes:
    """Read the seed of the key with which a site sealed the shares that it dealt."""
    seed = bytes.fromhex(fields["seals"])
    if len(seed) != SECRET_SIZE:
        raise ValueError("a secret has the wrong length")
    return seed


def _read_signature(_: str, fields: dict[str, Any]) -> str:
    """Read a site's signature of the sum's statement."""
    signature = fields["signature"]
    if not re.fullmatch("[0-9a-f]{128}", signature):
        raise ValueError("a signature is malformed")
    return str(signature)


def _read_revealed(fields: dict[str, Any], survivors: Collection[str], dropouts: Collection[str]) -> RevealedShares:
    """Read the shares that a site reveals of the survivors and the dropouts."""
    self_mask_shares = from_hex(fields["own"])
    pair_mask_shares = from_hex(fields["gone"])
    if {*self_mask_shares} != {*survivors} or {*pair_mask_shares} != {*dropouts}:
        raise ValueError("it did not reveal its shares of all sites")
    if any(len(share) != SECRET_SIZE for share in [*self_mask_shares.values(), *pair_mask_shares.values()]):
        raise ValueError("a share has the wrong length")
    return {"own": self_mask_shares, "gone": pair_mask_shares}
