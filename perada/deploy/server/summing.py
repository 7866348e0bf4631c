# SPDX-License-Identifier: Apache-2.0
"""The server's steps of a secure sum over a transport: who answers them, and what the sum is."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from perada.core.states import State
from perada.deploy.protocol import Answer, Kind, Refused
from perada.deploy.sums.keys import SEALED, SECRET, Advert, Terms, check_usable, told_in
from perada.deploy.sums.party import in_bytes, in_text
from perada.deploy.sums.server import ServerRound
from perada.deploy.sums.site import Revealed
from perada.deploy.sums.vector import Whole

ATTEMPTS = 3
"""How often a sum is begun in a round; after numbers under masks were sent, never again."""
MASKED = "masked"
"""Name of the tensor of numbers under masks."""
ReadT = TypeVar("ReadT")

log = logging.getLogger("perada.deploy")


class Asking(Protocol):
    """Asks sites for a step; see :meth:`.Coordinator.step_of_sum`."""

    def __call__(
        self, kind: Kind, attempt: int, said: Mapping[str, dict[str, Any]], numbers: int, /
    ) -> dict[str, tuple[Answer, State]]:
        """What came of the sites in ``said``; with ``numbers`` a tensor of so many is expected."""


def secure_sum(
    ask: Asking, terms: Callable[[int], Terms], trained: Mapping[str, tuple[Answer, State]], numbers: int
) -> tuple[list[str], Whole]:
    """Who is in the sum of the sites' vectors, each of so many numbers, and the sum.

    Args:
        ask: Asks sites.
        terms: Of an attempt.
        trained: Answers of the sites that may take part, with their keys for the first attempt.
        numbers: Of a vector.

    Raises:
        Refused: If too few are there at a step. Nothing can be read then.
    """
    least = terms(0).options.min_sites
    if len(trained) < least:
        raise Refused(f"secure sum: {len(trained)} sites may take part, and {least} must", "other")
    for attempt in range(ATTEMPTS):
        try:
            server, masks = _begun(ask, terms(attempt), trained)
            break
        except Refused as refusal:
            log.warning("%s (attempt %d of %d)", refusal, attempt + 1, ATTEMPTS)
            if attempt + 1 == ATTEMPTS:
                raise
    taken = ask("mask", attempt, {name: {"sealed": in_text(box)} for name, box in masks.items()}, numbers)
    alive = server.take({name: tensors[MASKED].numpy() for name, (_, tensors) in taken.items()})
    del taken  # as large as all sites' vectors
    signed = _read(ask("confirm", attempt, {name: {"alive": alive} for name in alive}, 0), _signature)
    server.enough(signed, "signed who is in the sum")
    revealed = _read(ask("reveal", attempt, {name: {"signatures": signed} for name in signed}, 0), _revealed)
    return alive, server.total(revealed)


def _begun(
    ask: Asking, terms: Terms, trained: Mapping[str, tuple[Answer, State]]
) -> tuple[ServerRound, dict[str, dict[str, bytes]]]:
    """The round after keys and shares were exchanged, and what each site is to be given of the shares."""
    adverts = _read(
        ask("keys", terms.attempt, {name: {} for name in trained}, 0) if terms.attempt else trained, _advert
    )
    adverts = agreeing(adverts)
    server = ServerRound(terms, [*adverts.values()])
    listed = [vars(adverts[name]) for name in server.order]
    shared = ask("shares", terms.attempt, {name: {"adverts": listed} for name in adverts}, 0)
    sealed = _read(shared, lambda name, said: _sealed(name, said, server.order))
    return server, server.deliver(sealed)


def agreeing(adverts: Mapping[str, Advert]) -> dict[str, Advert]:
    """The keys of those that say of this sum, and of each round before, what most say.

    Sites refuse a list in which one says something else, as a site that lies does, or has other public images.
    """
    said = {name: {"": advert.terms, **told_in(advert)} for name, advert in adverts.items()}
    most = {
        about: Counter(one[about] for one in said.values() if about in one).most_common(1)[0][0]
        for about in {about for one in said.values() for about in one}
    }
    alone = [name for name, one in said.items() if any(most[about] != told for about, told in one.items())]
    if alone:
        log.warning("secure sum: without %s, who were told other things than most, or say so", ", ".join(alone))
    return {name: advert for name, advert in adverts.items() if name not in alone}


def _read(found: Mapping[str, tuple[Answer, State]], read: Callable[[str, dict[str, Any]], ReadT]) -> dict[str, ReadT]:
    """What sites said, in the order of their names; without those who said something else."""
    good = {}
    for name in sorted(found):
        try:
            good[name] = read(name, found[name][0].sums)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("site %s: malformed in a secure sum: %s (%s)", name, error, type(error).__name__)
    return good


def _advert(name: str, said: dict[str, Any]) -> Advert:
    advert = Advert(**said["advert"])
    if advert.name != name:
        raise ValueError(f"it calls itself {advert.name[:80]!r}; its name must be that of its key at the SuperLink")
    check_usable(advert)
    return advert


def _sealed(name: str, said: dict[str, Any], order: Sequence[str]) -> dict[str, bytes]:
    sealed = in_bytes(said["sealed"])
    if {*sealed} != {*order} - {name} or any(len(text) != SEALED for text in sealed.values()):
        raise ValueError("it has not sealed its shares for all others; the masks of some would not cancel")
    return sealed


def _signature(_: str, said: dict[str, Any]) -> str:
    signature = said["signature"]
    if not re.fullmatch("[0-9a-f]{128}", signature):
        raise ValueError("a signature of another form")
    return str(signature)


def _revealed(_: str, said: dict[str, Any]) -> Revealed:
    revealed = {kind: in_bytes(said[kind]) for kind in ("own", "gone")}
    if any(len(share) != SECRET for shares in revealed.values() for share in shares.values()):
        raise ValueError("a share of another length")
    return revealed
