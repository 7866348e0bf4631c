# SPDX-License-Identifier: Apache-2.0
"""The part of a site's worker in secure sums: it answers the orders of a sum's steps."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import Order, Refused, refuse
from perada.deploy.sums.keys import Advert, Own, Terms
from perada.deploy.sums.site import SiteRound
from perada.deploy.sums.vector import Whole


class Party:
    """A site among those that it agrees to hide among. It is in one sum at a time, whose keys are in memory alone.

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
        self._terms: Terms | None = None
        self._round: SiteRound
        self._replies: dict[str, bytes] = {}

    @property
    def alive(self) -> list[str]:
        """The sites of the current sum, this one among them, once the server has said who."""
        return self._round.alive

    def replied(self, terms: Terms, message: str) -> bytes | None:
        """What was answered to a message of this sum before, if it was."""
        return self._replies.get(message) if terms == self._terms else None

    def keep(self, message: str, reply: bytes) -> None:
        """Remember what is answered to a message, by its digest."""
        self._replies[message] = reply

    def offered(self, terms: Terms, own: Own, begin: bool) -> dict[str, Any]:
        """The keys for the first attempt at a sum, the same whenever asked; ``own`` as of :meth:`step`.

        Nothing if a later attempt was begun, or, unless it may ``begin``, if there are none yet.
        """
        if self._terms is not None and replace(self._terms, attempt=terms.attempt) == terms:
            return {"advert": vars(self._round.advert)} if self._terms == terms else {}
        return self._begun(terms, own) if begin else {}

    def _begun(self, terms: Terms, own: Own) -> dict[str, Any]:
        self._terms, self._replies = terms, {}
        self._round = SiteRound(self.name, self._identity, self.peers, terms, own)
        return {"advert": vars(self._round.advertise())}

    def step(
        self,
        order: Order,
        terms: Terms,
        own: Own,
        vector: Callable[[int, Collection[str]], Whole],
    ) -> tuple[dict[str, Any], Whole | None]:
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
            before = self._terms
            same = before is not None and replace(before, attempt=terms.attempt) == terms
            refuse(
                same and before is not None and terms.attempt <= before.attempt,
                f"secure sum: keys for attempt {terms.attempt} again, or after a later one",
                "other",
            )
            return self._begun(terms, own), None
        refuse(
            terms != self._terms, "secure sum: this site has no keys for it, which are gone with its process", "other"
        )
        try:
            return self._later(order, vector)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(f"secure sum: {order.kind}: {type(error).__name__}: {error}") from None

    def _later(
        self, order: Order, vector: Callable[[int, Collection[str]], Whole]
    ) -> tuple[dict[str, Any], Whole | None]:
        given = order.sums
        match order.kind:
            case "shares":
                dealt = self._round.share([Advert(**entry) for entry in given["adverts"]])
                return {"sealed": in_text(dealt.sealed), "commitments": dealt.commitments}, None
            case "hold":
                self._round.hold(in_bytes(given["sealed"]), given["commitments"])
                return {}, None
            case "open":
                return {"seals": self._round.open().hex()}, None
            case "mask":
                self._round.check_turn("mask")
                return {}, self._round.mask(given["there"], vector(self._round.sites, self._round.told))
            case "confirm":
                return {"signature": self._round.confirm(given["alive"])}, None
            case _:
                revealed = self._round.reveal(given["signatures"])
                return {kind: in_text(shares) for kind, shares in revealed.items()}, None


def in_text(found: Mapping[str, bytes]) -> dict[str, str]:
    """Bytes by name as hexadecimal digits."""
    return {name: value.hex() for name, value in found.items()}


def in_bytes(found: Mapping[str, str]) -> dict[str, bytes]:
    """What :func:`in_text` wrote; a ValueError, TypeError or AttributeError if it is something else."""
    return {name: bytes.fromhex(value) for name, value in found.items()}
