# SPDX-License-Identifier: Apache-2.0
"""The server's steps of a secure sum over a transport: who answers them, and what the sum is."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perada.core.states import State
from perada.deploy.protocol import RefusalError, RequestKind, Response
from perada.deploy.sums.keys import (
    SEALED_SIZE,
    Advert,
    SiteClaims,
    SumTerms,
    check_usable,
    conflicting_rounds,
    heard_digests,
    is_signed_by_itself,
    parse_heard,
)
from perada.deploy.sums.party import from_hex, to_hex
from perada.deploy.sums.progress import SumState
from perada.deploy.sums.server import ServerRound
from perada.deploy.sums.shares import SECRET_SIZE
from perada.deploy.sums.site import DealtShares, RevealedShares
from perada.deploy.sums.vector import Uint64Vector

ATTEMPTS = 3
"""How often a sum fails in a round without showing which site is to blame; after masks were sent, it is over."""
LIED, DISPUTED = "lied", "disputed"
"""Codes of sites that provably lied in a sum, and of those that others do not accept, or that do not accept them."""
MASKED = "masked"
"""Name of the tensor of numbers under masks."""
ReadT = TypeVar("ReadT")

log = logging.getLogger("perada.deploy")


class AskStep(Protocol):
    """Asks sites for a step; see :meth:`.Coordinator.step_of_sum`."""

    def __call__(
        self, kind: RequestKind, attempt: int, said: Mapping[str, dict[str, Any]], numbers: int, /
    ) -> dict[str, tuple[Response, State]]:
        """What came of the sites in ``said``; with ``numbers`` a tensor of so many is expected."""


class SecureSum:
    """One secure sum, as the server has sites make it.

    A site that voids it by what it says is found, where that can be proven, and the sum is begun again without it as
    long as nothing was masked.

    Args:
        ask: Asks sites.
        terms: Of an attempt.
        trained: Answers of the sites that may take part, with their keys for the first attempt.
        numbers: Of a vector.
        state: How far the sum was before the server was stopped; None if it was not begun.
        save: Writes how far it is.
        truth: Digests of what the server told sites in former rounds, as they say it.

    Attributes:
        failed: Codes of sites that did not do what they were asked.
        lied: What sites did that no honest one does, by name.
    """

    def __init__(
        self,
        ask: AskStep,
        terms: Callable[[int], SumTerms],
        trained: Mapping[str, tuple[Response, State]],
        numbers: int,
        state: SumState | None = None,
        save: Callable[[SumState], None] = lambda _: None,
        truth: Mapping[str, str] | None = None,
    ) -> None:
        self._ask, self._terms, self._trained, self._numbers = ask, terms, dict(trained), numbers
        self._state, self._save = state, save
        self._truth = parse_heard(SiteClaims(heard=truth or {}).texts()["heard"])  # as sites write it
        self._out: set[str] = set()  # sites without which the next attempt is begun
        self.failed: dict[str, str] = {}
        self.lied: dict[str, str] = {}

    def run(self) -> tuple[list[str], Uint64Vector]:
        """Return who is in the sum of the sites' vectors, and the sum.

        Raises:
            Refused: If too few are there at a step. Nothing can be read then.
        """
        server, state = self._resumed() if self._state and self._state.there else self._begun()
        try:
            return self._finish(server, state)
        finally:
            self._blame(server.lied)

    def _blame(self, lied: Mapping[str, str]) -> None:
        for name, reason in lied.items():
            if name not in self.lied:
                log.warning("secure sum: site %s lied: %s", name, reason, extra={"site": name})
            self.lied[name], self.failed[name] = reason, LIED

    def _begun(self) -> tuple[ServerRound, SumState]:
        """Have keys and shares exchanged, in as many attempts as sites are found that prevent it, and a few more."""
        attempt = 0 if self._state is None else self._state.attempt + 1
        failures = 0
        while True:
            candidates = {name: one for name, one in self._trained.items() if name not in self._out}
            self._check_candidates(candidates)
            out = len(self._out)
            try:
                return self._attempt(attempt, candidates)
            except RefusalError as refusal:
                log.warning("%s (attempt %d)", refusal, attempt + 1)
                failures += len(self._out) == out
                if failures == ATTEMPTS:
                    raise
            attempt += 1

    def _check_candidates(self, candidates: Mapping[str, object]) -> None:
        """Refuse to begin among too few."""
        least = self._terms(0).options.min_sites
        if len(candidates) < least:
            without = f"; without {', '.join(sorted(self._out))}" if self._out else ""
            raise RefusalError(f"secure sum: {len(candidates)} sites may take part, and {least} must{without}", "other")

    def _attempt(self, attempt: int, candidates: Mapping[str, tuple[Response, State]]) -> tuple[ServerRound, SumState]:
        """The round once all sites that are there hold shares of one another."""
        terms = self._terms(attempt)
        found = self._ask("keys", attempt, {name: {} for name in candidates}, 0) if attempt else candidates
        adverts = self._read(found, _advert)
        # Where as many sites say one thing of a former round as another, those are right who come first here. Else a
        # site could put out another one with which it was alone in a round.
        truthful_first = sorted(adverts, key=lambda name: bool(conflicting_rounds(self._truth, adverts[name])))
        adverts = consistent_adverts({name: adverts[name] for name in truthful_first})
        server = ServerRound(terms, [*adverts.values()])
        listed = [vars(adverts[name]) for name in server.order]
        state = SumState(terms.round, terms.of, attempt, listed)
        self._save(state)
        shared = self._ask("shares", attempt, {name: {"adverts": listed} for name in adverts}, 0)
        self._settle_objections(server, shared)
        boxes = server.deliver(self._read(shared, lambda name, said: _dealt(name, said, server.order)))
        holding = {
            name: {
                "sealed": to_hex(box),
                "commitments": {dealer: server.commitments[dealer][name] for dealer in box},
            }
            for name, box in boxes.items()
        }
        held = self._ask("hold", attempt, holding, 0)
        objections = self._read(held, lambda name, said: _objects(said, {*boxes} - {name}))
        self._settle_disputes(server, attempt, objections)
        state.there = server.begin(objections)
        state.commitments = {
            name: {other: list(pair) for other, pair in one.items()} for name, one in server.commitments.items()
        }
        self._save(state)
        return server, state

    def _settle_objections(self, server: ServerRound, shared: Mapping[str, tuple[Response, State]]) -> None:
        """Leave out of the next attempt sites whose keys most others do not accept, and others that do not accept some.

        All sites see the same keys, so that all honest ones whose lists are complete say the same of them: a site
        that alone does not accept another one's keys cannot put that one out.
        """
        objecting = {name: one for name, one in shared.items() if "objects" in one[0].sums}
        objections = self._read(objecting, lambda name, said: _objects(said, {*server.order} - {name}))
        if not any(objections.values()):
            return
        out = {}
        for name in server.order:
            objectors = [other for other, names in objections.items() if name in names]
            others = [other for other in shared if other != name]
            if 2 * len(objectors) > len(others):
                out[name] = f"its keys are not accepted by {', '.join(objectors)}"
        for name, names in objections.items():
            rest = [other for other in names if other not in out]
            if rest and name not in out:
                out[name] = f"it does not accept the keys of {', '.join(rest)}, which most sites do"
        for name, reason in out.items():
            log.warning("secure sum: without site %s: %s", name, reason, extra={"site": name})
            self.failed[name] = DISPUTED
        self._out |= out.keys()
        raise RefusalError(f"secure sum: sites do not accept one another: without {', '.join(sorted(out))}", "other")

    def _settle_disputes(self, server: ServerRound, attempt: int, objections: Mapping[str, Collection[str]]) -> None:
        """Find out who lies where a site says that what another one sealed for it does not open.

        The word of one site is not enough to leave another out. The accused ones open what they dealt, and the server
        sees who is right.
        """
        accused = sorted({dealer for names in objections.values() for dealer in names})
        if not accused:
            return
        opened = self._read(self._ask("open", attempt, {name: {} for name in accused}, 0), _seals)
        lied = dict[str, str]()
        for holder, dealers in objections.items():
            for dealer in dealers:
                if dealer not in opened:
                    continue
                if server.dealt_honestly(dealer, opened[dealer], holder):
                    lied.setdefault(holder, f"the shares of {dealer!r} open, of which it says that they do not")
                else:
                    lied.setdefault(dealer, f"the shares that it sealed for {holder!r} do not open")
        self._blame(lied)
        silent = [name for name in accused if name not in opened]
        for name in silent:
            log.warning("secure sum: site %s did not open the shares that it is said to have spoiled", name)
            self.failed.setdefault(name, DISPUTED)
        self._out |= {*lied, *silent}
        raise RefusalError(f"secure sum: sealed shares do not open: without {', '.join(sorted(self._out))}", "other")

    def _resumed(self) -> tuple[ServerRound, SumState]:
        """The round as it was when sites had been told to mask, before the server was stopped."""
        state = self._state
        assert state is not None
        server = ServerRound(self._terms(state.attempt), [Advert(**entry) for entry in state.adverts])
        server.commitments = {
            name: {other: (pair[0], pair[1]) for other, pair in one.items()} for name, one in state.commitments.items()
        }
        server.begin(state.there)
        return server, state

    def _finish(self, server: ServerRound, state: SumState) -> tuple[list[str], Uint64Vector]:
        """Take the masked vectors, and the masks away from their sum."""
        attempt, there = state.attempt, state.there
        taken = self._ask("mask", attempt, {name: {"there": there} for name in there}, self._numbers)
        vectors = {name: tensors[MASKED].numpy() for name, (_, tensors) in taken.items()}
        del taken  # as large as all sites' vectors
        if state.alive:  # sites may have signed that these are in the sum, and sign no other list
            lost = [name for name in state.alive if name not in vectors]
            if lost:
                came = len(state.alive) - len(lost)
                raise RefusalError(
                    f"secure sum: {came} of {len(state.alive)} sites sent their part again after the restart; without "
                    f"{', '.join(lost)}",
                    "other",
                )
            vectors = {name: vectors[name] for name in state.alive}
        state.alive = server.take(vectors)
        self._save(state)
        if not state.signatures:
            confirmed = self._ask("confirm", attempt, {name: {"alive": state.alive} for name in state.alive}, 0)
            state.signatures = server.signed(self._read(confirmed, _signature))
            server.enough(state.signatures, "signed who is in the sum")
            self._save(state)
        signatures = {name: {"signatures": state.signatures} for name in state.signatures}
        gone = {*there} - {*state.alive}
        found = self._ask("reveal", attempt, signatures, 0)
        revealed = self._read(found, lambda _, said: _revealed(said, {*state.alive}, gone))
        return state.alive, server.total(revealed)

    def _read(
        self, found: Mapping[str, tuple[Response, State]], read: Callable[[str, dict[str, Any]], ReadT]
    ) -> dict[str, ReadT]:
        """What sites said, in the order of their names; without those who said something else."""
        good = {}
        for name in sorted(found):
            try:
                good[name] = read(name, found[name][0].sums)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("site %s: malformed in a secure sum: %s (%s)", name, error, type(error).__name__)
                self.failed[name] = "malformed"
        return good


def consistent_adverts(adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """The keys of those that say of this sum, and of each round before, what most say; of as many, the first ones.

    Sites refuse a list in which one says something else, as a site that lies does, or has other public images.
    """
    said = {name: {"": advert.terms, **heard_digests(advert)} for name, advert in adverts.items()}
    most = {
        about: Counter(one[about] for one in said.values() if about in one).most_common(1)[0][0]
        for about in {about for one in said.values() for about in one}
    }
    alone = [name for name, one in said.items() if any(most[about] != told for about, told in one.items())]
    if alone:
        log.warning("secure sum: without %s, who were told other things than most, or say so", ", ".join(sorted(alone)))
    return {name: advert for name, advert in adverts.items() if name not in alone}


def _advert(name: str, said: dict[str, Any]) -> Advert:
    advert = Advert(**said["advert"])
    if advert.name != name:
        raise ValueError(f"it calls itself {advert.name[:80]!r}; its name must be that of its key at the SuperLink")
    check_usable(advert)
    if not is_signed_by_itself(advert, advert.signature, "advert", advert.statement()):
        raise ValueError("its keys are not signed by the identity that they name")
    return advert


def _objects(said: dict[str, Any], others: Collection[str]) -> list[str]:
    """Names of the sites whose keys or shares a site does not accept."""
    objects = said.get("objects", [])
    if not isinstance(objects, list) or not {*objects} <= {*others}:
        raise ValueError("it objects to what is not another site")
    return objects


def _dealt(name: str, said: dict[str, Any], order: Sequence[str]) -> DealtShares:
    sealed, commitments = from_hex(said["sealed"]), said["commitments"]
    if {*sealed} != {*order} - {name} or any(len(text) != SEALED_SIZE for text in sealed.values()):
        raise ValueError("it has not sealed its shares for all others; the masks of some would not cancel")
    if {*commitments} != {*order}:
        raise ValueError("it has not committed itself to the shares of all sites")
    for pair in commitments.values():
        if len(pair) != 2 or not all(re.fullmatch("[0-9a-f]{64}", one) for one in pair):
            raise ValueError("a commitment of another form")
    return DealtShares(sealed, {holder: (pair[0], pair[1]) for holder, pair in commitments.items()})


def _seals(_: str, said: dict[str, Any]) -> bytes:
    """The secret by which a site opens what it dealt."""
    seals = bytes.fromhex(said["seals"])
    if len(seals) != SECRET_SIZE:
        raise ValueError("a secret of another length")
    return seals


def _signature(_: str, said: dict[str, Any]) -> str:
    signature = said["signature"]
    if not re.fullmatch("[0-9a-f]{128}", signature):
        raise ValueError("a signature of another form")
    return str(signature)


def _revealed(said: dict[str, Any], alive: Collection[str], gone: Collection[str]) -> RevealedShares:
    revealed = {kind: from_hex(said[kind]) for kind in ("own", "gone")}
    if {*revealed["own"]} != {*alive} or {*revealed["gone"]} != {*gone}:
        raise ValueError("it has not revealed its shares of all sites")
    if any(len(share) != SECRET_SIZE for shares in revealed.values() for share in shares.values()):
        raise ValueError("a share of another length")
    return revealed
