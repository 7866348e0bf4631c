# SPDX-License-Identifier: Apache-2.0
"""The part of a site's worker in secure sums: it answers the orders of a sum's steps."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import RefusalError, Request, refuse
from perada.deploy.sums.keys import Advert, SiteClaims, SumTerms
from perada.deploy.sums.site import SiteRound
from perada.deploy.sums.vector import Uint64Vector

RUNS = 8
"""Of how many runs at once a site is in a sum. It keeps the last replies of each, a masked vector among them."""


@dataclass
class _Sum:
    """A site's part in the sum that a run is at."""

    terms: SumTerms
    round: SiteRound
    replies: dict[str, bytes] = field(default_factory=dict)  # by the digest of the message


class Party:
    """A site among those that it agrees to hide among.

    It is in one sum of each run at a time, since several runs may be served at once. The keys are in memory alone.

    Args:
        name: Of the site, by which the others know it.
        identity: Its key.
        peers: The other sites' keys by name; the site itself may be among them.

    Raises:
        ValueError: If the list has another key under the site's own name, or its key under another name.
    """

    def __init__(self, name: str, identity: Ed25519PrivateKey, peers: Mapping[str, Ed25519PublicKey]) -> None:
        own = identity.public_key()
        listed = peers.get(name, own)
        if listed.public_bytes_raw() != own.public_bytes_raw():
            raise ValueError(f"the list of sites has another key under the name {name!r}, which is this site's own")
        self.name, self._identity = name, identity
        self.peers = {other: key for other, key in peers.items() if other != name}
        same = [other for other, key in self.peers.items() if key.public_bytes_raw() == own.public_bytes_raw()]
        if same:
            raise ValueError(f"the list of sites has this site's key, of {name!r}, under the name {same[0]!r}")
        self._sums: dict[str, _Sum] = {}  # the last sum of each run, the one that was begun last at the end

    def alive(self, terms: SumTerms) -> list[str]:
        """The sites of a sum, this one among them, once the server has said who; none if it is not known."""
        current = self._current(terms)
        return [] if current is None else current.round.alive

    def replied(self, terms: SumTerms, message: str) -> bytes | None:
        """What was answered to a message of this sum before, if it was."""
        current = self._current(terms)
        return None if current is None else current.replies.get(message)

    def keep(self, terms: SumTerms, message: str, reply: bytes) -> None:
        """Remember what is answered to a message of a sum, by its digest."""
        self._sums[terms.run].replies[message] = reply

    def offered(self, terms: SumTerms, own: SiteClaims, begin: bool) -> dict[str, Any]:
        """The keys for the first attempt at a sum, the same whenever asked; ``own`` as of :meth:`step`.

        Nothing if a later attempt was begun, or, unless it may ``begin``, if there are none yet.
        """
        last = self._sums.get(terms.run)
        if last is not None and replace(last.terms, attempt=terms.attempt) == terms:
            return {"advert": vars(last.round.advert)} if last.terms == terms else {}
        return self._begun(terms, own) if begin else {}

    def _current(self, terms: SumTerms) -> "_Sum | None":
        """The sum with these terms; None if its run has another one now, or none."""
        last = self._sums.get(terms.run)
        return last if last is not None and last.terms == terms else None

    def _begun(self, terms: SumTerms, own: SiteClaims) -> dict[str, Any]:
        self._sums.pop(terms.run, None)
        while len(self._sums) >= RUNS:
            del self._sums[next(iter(self._sums))]
        made = _Sum(terms, SiteRound(self.name, self._identity, self.peers, terms, own))
        self._sums[terms.run] = made
        return {"advert": vars(made.round.advertise())}

    def step(
        self,
        order: Request,
        terms: SumTerms,
        own: SiteClaims,
        vector: Callable[[int, Collection[str]], Uint64Vector],
    ) -> tuple[dict[str, Any], Uint64Vector | None]:
        """Take the step of a sum that an order asks for.

        Args:
            order: What is asked.
            terms: Of the sum, as this site knows them.
            own: What the site says of itself.
            vector: Makes the vector for a sum over so many sites, with those of its numbers that may be in it.

        Returns:
            What the site says, and numbers under masks.

        Raises:
            Refused: If it is not the step that comes next, or the server asks for what it must not be told.
        """
        if order.kind == "keys":
            last = self._sums.get(terms.run)
            before = None if last is None else last.terms
            same = before is not None and replace(before, attempt=terms.attempt) == terms
            refuse(
                same and before is not None and terms.attempt <= before.attempt,
                f"secure sum: keys for attempt {terms.attempt} again, or after a later one",
                "other",
            )
            return self._begun(terms, own), None
        current = self._current(terms)
        if current is None:
            raise RefusalError(
                f"secure sum: this site has no keys for it: it was started again since, or has begun sums of {RUNS} "
                "other runs",
                "other",
            )
        try:
            return self._later(current.round, order, vector)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, RefusalError):
                raise
            raise RefusalError(f"secure sum: {order.kind}: {type(error).__name__}: {error}") from None

    @staticmethod
    def _later(
        round: SiteRound, order: Request, vector: Callable[[int, Collection[str]], Uint64Vector]
    ) -> tuple[dict[str, Any], Uint64Vector | None]:
        given = order.sums
        match order.kind:
            case "shares":
                dealt = round.share([Advert(**entry) for entry in given["adverts"]])
                return {"sealed": to_hex(dealt.sealed), "commitments": dealt.commitments}, None
            case "hold":
                round.hold(from_hex(given["sealed"]), given["commitments"])
                return {}, None
            case "open":
                return {"seals": round.open().hex()}, None
            case "mask":
                round.check_step("mask")
                return {}, round.mask(given["there"], vector(round.sites, round.told))
            case "confirm":
                return {"signature": round.confirm(given["alive"])}, None
            case _:
                revealed = round.reveal(given["signatures"])
                return {kind: to_hex(shares) for kind, shares in revealed.items()}, None


def to_hex(found: Mapping[str, bytes]) -> dict[str, str]:
    """Bytes by name as hexadecimal digits."""
    return {name: value.hex() for name, value in found.items()}


def from_hex(found: Mapping[str, str]) -> dict[str, bytes]:
    """What :func:`to_hex` wrote; a ValueError, TypeError or AttributeError if it is something else."""
    return {name: bytes.fromhex(value) for name, value in found.items()}
