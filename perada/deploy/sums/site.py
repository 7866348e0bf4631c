# SPDX-License-Identifier: Apache-2.0
"""A site's part in one secure sum, which trusts the server with nothing but to pass messages on."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import refuse
from perada.deploy.sums.keys import (
    SECRET,
    Advert,
    Own,
    Terms,
    add_streams,
    agreed,
    differing,
    digest,
    exchange_key,
    is_signed,
    order_of,
    own_key,
    pair_key,
    seal,
    sign,
    split,
    told_in,
    unseal,
)
from perada.deploy.sums.vector import Whole

Revealed = dict[str, dict[str, bytes]]
"""Shares by the name of the site: ``own`` of the own masks of those in the sum, ``gone`` of the keys of the others."""


class SiteRound:
    """The steps of a site in one sum (Bonawitz et al., CCS 2017, section 4 and figure 4), each once and in this order.

    The keys are made for this round, here, and are in memory alone: a process that is killed is out of the round, and
    no copy of a disk, however old, leads to a key being used for a second vector.

    Args:
        name: Of the site.
        identity: Its key.
        peers: The keys of the other sites that it agrees to hide among, by name.
        terms: Of the sum.
        own: What it says of itself.
    """

    def __init__(
        self,
        name: str,
        identity: Ed25519PrivateKey,
        peers: Mapping[str, Ed25519PublicKey],
        terms: Terms,
        own: Own | None = None,
    ) -> None:
        self.name, self.terms, self._identity, self._own = name, terms, identity, own or Own()
        self._known = {**peers, name: identity.public_key()}
        self._steps = ["advertise", "share", "mask", "confirm", "reveal"]
        self._seeds = {purpose: secrets.token_bytes(SECRET) for purpose in ("shares", "masks", "own")}
        self._keys = {purpose: exchange_key(self._seeds[purpose]) for purpose in ("shares", "masks")}
        self._adverts: dict[str, Advert] = {}
        self._order: list[str] = []
        self._about = ""  # digest of all sites' keys
        self._held: dict[str, tuple[bytes, bytes]] = {}  # shares of each site's own mask and of its key
        self._statement: dict[str, object] = {}

    def check_turn(self, step: str) -> None:
        """Refuse a step that is not the next one."""
        refuse(not self._steps or self._steps[0] != step, f"secure sum: {step} is not what comes next", "other")

    def _turn(self, step: str) -> None:
        """Begin a step; it is not begun again, whatever comes of it."""
        self.check_turn(step)
        self._steps.pop(0)

    @property
    def advert(self) -> Advert:
        """The public keys that were advertised."""
        return self._adverts[self.name]

    @property
    def alive(self) -> list[str]:
        """Who is in the sum, once it was confirmed."""
        return [str(name) for name in self._statement.get("alive", [])]  # type: ignore[attr-defined]  # a list of names

    @property
    def sites(self) -> int:
        """How many sites the round has keys of."""
        return len(self._order)

    @property
    def told(self) -> set[str]:
        """Names of the numbers that so many sites have that, whoever goes, ``min_sites`` of them are in the sum.

        Of others the sum could be a single site's: the others may not say theirs, or have none.
        """
        have = Counter(name for advert in self._adverts.values() for name in {*advert.numbers.split()})
        gone = len(self._order) - self._least
        return {name for name, sites in have.items() if sites - gone >= self.terms.options.min_sites}

    @property
    def _least(self) -> int:
        return self.terms.options.least(len(self._order))

    def advertise(self) -> Advert:
        """The public keys of this round."""
        self._turn("advertise")
        public = {purpose: key.public_key().public_bytes_raw().hex() for purpose, key in self._keys.items()}
        own = hashlib.sha256(self._seeds["own"]).hexdigest()
        made = Advert(self.name, digest(asdict(self.terms)), **public, own=own, **self._own.texts())
        made = replace(made, signature=sign(self._identity, "advert", made.statement()))
        self._adverts = {self.name: made}
        return made

    def share(self, adverts: Sequence[Advert]) -> dict[str, bytes]:
        """Shares of its secrets for all sites of the round, sealed, by name.

        Refused, since the server may have chosen them: sites that this one does not know, or whose signature is not
        theirs, keys of another round, too few sites, one that stands there twice.
        """
        self._turn("share")
        mine, order = self._adverts[self.name], order_of(adverts)
        told = told_in(mine)
        refuse(len({*order}) < len(order), "secure sum: a site stands in the list twice", "other")
        refuse(
            len(order) < self.terms.options.min_sites,
            f"secure sum: {len(order)} sites are too few to hide among",
            "other",
        )
        refuse(mine not in adverts, "secure sum: the list has other keys of this site, or none", "other")
        for advert in adverts:
            key = self._known.get(advert.name)
            refuse(key is None, f"secure sum: {advert.name!r} is not among the sites of site.yaml", "other")
            assert key is not None
            signed = is_signed(key, advert.signature, "advert", advert.statement())
            refuse(not signed, f"secure sum: the keys of {advert.name!r} are not signed by it", "other")
            refuse(advert.terms != mine.terms, f"secure sum: the keys of {advert.name!r} are for another sum", "other")
            rounds = ", ".join(differing(told, advert))
            refuse(bool(rounds), f"secure sum: {advert.name!r} was told other things in round {rounds}", "other")
        self._adverts, self._order = {advert.name: advert for advert in adverts}, order
        self._about = digest([self._adverts[name].statement() for name in order])
        parts = [split(self._seeds[purpose], self._least, len(order)) for purpose in ("own", "masks")]
        held = dict(zip(order, zip(*parts, strict=True), strict=True))
        self._held[self.name] = held.pop(self.name)
        return {
            name: seal(self._shared(name, [self.name, name]), b"".join(both), self._about)
            for name, both in held.items()
        }

    def _shared(self, peer: str, direction: list[str]) -> bytes:
        """The key of what one site seals for another."""
        return agreed(self._keys["shares"], self._adverts[peer].shares, "shares", [self._about, *direction])

    def mask(self, sealed: Mapping[str, bytes], vector: Whole) -> Whole:
        """The vector under masks, which cancel in the sum of all who sent shares.

        Args:
            sealed: What the other sites sealed for this one, by name; those are in the sum with it.
            vector: Its numbers modulo 2⁶⁴.
        """
        self._turn("mask")
        self._hold(sealed)
        added, subtracted = [own_key(self._seeds["own"])], list[bytes]()
        for name in sealed:
            key = pair_key(self._keys["masks"], self._adverts[name].masks, self._about, (self.name, name))
            (added if self.name < name else subtracted).append(key)
        found = vector.copy()
        add_streams(found, added, subtracted)
        there = sorted(self._held)
        self._statement = {"about": self._about, "there": there, "numbers": len(vector)}
        return found

    def _hold(self, sealed: Mapping[str, bytes]) -> None:
        refuse(not {*sealed} <= {*self._order} - {self.name}, "secure sum: shares of an unknown site", "other")
        few = len(sealed) + 1 < self._least
        refuse(few, f"secure sum: {len(sealed) + 1} of {len(self._order)} sites sent shares, too few", "other")
        for name, text in sealed.items():
            try:
                both = unseal(self._shared(name, [name, self.name]), text, self._about)
            except ValueError as error:
                refuse(True, f"secure sum: of {name!r}: {error}", "other")
            refuse(len(both) != 2 * SECRET, f"secure sum: the shares of {name!r} have {len(both)} bytes", "other")
            self._held[name] = both[:SECRET], both[SECRET:]

    def confirm(self, alive: Sequence[str]) -> str:
        """Sign who is in the sum, as the server says; one list only."""
        self._turn("confirm")
        listed = sorted({*alive})
        refuse(len(listed) < len(alive), "secure sum: a site stands in the list of the sum twice", "other")
        refuse(not {*listed} <= {*self._held}, "secure sum: a site is to be in the sum that sent no shares", "other")
        refuse(self.name not in listed, "secure sum: this site is said to have gone", "other")
        few = len(listed) < self._least
        refuse(few, f"secure sum: {len(listed)} of {len(self._order)} sites are too few for a sum", "other")
        self._statement["alive"] = listed
        return sign(self._identity, "alive", self._statement)

    def reveal(self, signatures: Mapping[str, str]) -> Revealed:
        """Shares by which the masks are taken away: of each site's own mask if it is in the sum, of its key if not.

        Never of both, whatever the server says: the two lists are one statement, which enough sites have signed.
        """
        self._turn("reveal")
        alive = self._statement["alive"]
        assert isinstance(alive, list)
        signed = [name for name in signatures if name in alive and self._confirmed(name, signatures[name])]
        few = len(signed) < self._least
        refuse(few, f"secure sum: {len(signed)} sites signed the same list, and {self._least} must", "other")
        return {
            "own": {name: self._held[name][0] for name in alive},
            "gone": {name: self._held[name][1] for name in sorted({*self._held} - {*alive})},
        }

    def _confirmed(self, name: str, signature: str) -> bool:
        return is_signed(self._known[name], signature, "alive", self._statement)
