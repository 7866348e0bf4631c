# SPDX-License-Identifier: Apache-2.0
"""A site's part in one secure sum, which trusts the server with nothing but to pass messages on."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import RefusalError, refuse
from perada.deploy.sums.keys import (
    Advert,
    SiteClaims,
    SumTerms,
    add_streams,
    commitment,
    conflicting_rounds,
    digest,
    exchange_key,
    heard_digests,
    is_signed,
    pair_mask_key,
    seal,
    sealing_key,
    self_mask_key,
    share_order,
    sign,
    sum_statement,
    unseal,
)
from perada.deploy.sums.shares import SECRET_SIZE, split
from perada.deploy.sums.vector import Uint64Vector

RevealedShares = dict[str, dict[str, bytes]]
"""Shares by the name of the site: ``own`` of the own masks of those in the sum, ``gone`` of the keys of the others."""

Commitments = dict[str, tuple[str, str]]
"""Digests of two shares, of a site's own mask and of the key of its pair masks, by the name of the other site."""
PURPOSES = ("own", "masks")
"""The two secrets of which a site deals shares."""


class DealtShares(NamedTuple):
    """The shares of a site's two secrets."""

    sealed: dict[str, bytes]  # for each other site
    commitments: Commitments  # to the shares of each site, the dealer among them


class Objection(RefusalError):
    """What a site does not accept is another site's, as far as it can tell; the server decides whose fault it is."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("secure sum: " + "; ".join(reasons.values()), "other")
        self.names = sorted(reasons)


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
        terms: SumTerms,
        own: SiteClaims | None = None,
    ) -> None:
        self.name, self.terms, self._identity, self._own = name, terms, identity, own or SiteClaims()
        self._known = {**peers, name: identity.public_key()}
        self._steps = ["advertise", "share", "hold", "mask", "confirm", "reveal"]
        self._seeds = {purpose: secrets.token_bytes(SECRET_SIZE) for purpose in ("seals", "shares", "masks", "own")}
        self._keys = {purpose: exchange_key(self._seeds[purpose]) for purpose in ("seals", "shares", "masks")}
        self._adverts: dict[str, Advert] = {}
        self._order: list[str] = []
        self._about = ""  # digest of all sites' keys
        self._held: dict[str, tuple[bytes, bytes]] = {}  # shares of each site's own mask and of its key
        self._there: list[str] = []  # sites whose pair masks are in the vectors
        self._alive: list[str] = []  # those of them that are in the sum
        self._numbers = 0  # of the vectors
        self._statement: dict[str, object] = {}

    def check_step(self, step: str) -> None:
        """Refuse a step that is not the next one."""
        refuse(not self._steps or self._steps[0] != step, f"secure sum: {step} is not what comes next", "other")

    def _turn(self, step: str) -> None:
        """Begin a step; it is not begun again, whatever comes of it."""
        self.check_step(step)
        self._steps.pop(0)

    @property
    def advert(self) -> Advert:
        """The public keys that were advertised."""
        return self._adverts[self.name]

    @property
    def alive(self) -> list[str]:
        """Who is in the sum, once it was confirmed."""
        return self._alive

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
        public["identity"] = self._identity.public_key().public_bytes_raw().hex()
        own = hashlib.sha256(self._seeds["own"]).hexdigest()
        made = Advert(self.name, digest(asdict(self.terms)), **public, own=own, **self._own.texts())
        made = replace(made, signature=sign(self._identity, "advert", made.statement()))
        self._adverts = {self.name: made}
        return made

    def share(self, adverts: Sequence[Advert]) -> DealtShares:
        """Deal shares of the two secrets to all sites of the round.

        Refused, since the server may have chosen them: sites that this one does not know, or whose signature is not
        theirs, keys of another round, too few sites, one that stands there twice.

        Raises:
            Objection: If keys are not those of a site on this one's list.
        """
        self._turn("share")
        mine, order = self._adverts[self.name], share_order(adverts)
        told = heard_digests(mine)
        refuse(len({*order}) < len(order), "secure sum: a site stands in the list twice", "other")
        refuse(
            len(order) < self.terms.options.min_sites,
            f"secure sum: {len(order)} sites are too few to hide among",
            "other",
        )
        refuse(mine not in adverts, "secure sum: the list has other keys of this site, or none", "other")
        self._check_identities(adverts)
        for advert in adverts:
            refuse(advert.terms != mine.terms, f"secure sum: the keys of {advert.name!r} are for another sum", "other")
            rounds = ", ".join(str(int(round) + 1) for round in conflicting_rounds(told, advert))
            refuse(bool(rounds), f"secure sum: {advert.name!r} was told other things in round {rounds}", "other")
        self._adverts, self._order = {advert.name: advert for advert in adverts}, order
        self._about = digest([self._adverts[name].statement() for name in order])
        return self._deal()

    def _check_identities(self, adverts: Sequence[Advert]) -> None:
        """Raise an Objection to keys that a site on the list did not sign."""
        objections = {}
        for advert in adverts:
            key = self._known.get(advert.name)
            if key is None:
                objections[advert.name] = f"{advert.name!r} is not among the sites of site.yaml"
                continue
            same = key.public_bytes_raw().hex() == advert.identity
            if not same or not is_signed(key, advert.signature, "advert", advert.statement()):
                objections[advert.name] = f"the keys of {advert.name!r} are not signed by it"
        if objections:
            raise Objection(objections)

    def _deal(self) -> DealtShares:
        sealed, commitments = dict[str, bytes](), Commitments()
        own_shares = split(self._seeds["own"], self._least, len(self._order))
        key_shares = split(self._seeds["masks"], self._least, len(self._order))
        for holder, own_share, key_share in zip(self._order, own_shares, key_shares, strict=True):
            commitments[holder] = self._commitments(self.name, holder, own_share, key_share)
            if holder == self.name:
                self._held[holder] = own_share, key_share
                continue
            public = self._adverts[holder].shares
            key = sealing_key(self._keys["seals"], public, self._about, self.name, holder)
            sealed[holder] = seal(key, own_share + key_share, self._about)
        return DealtShares(sealed, commitments)

    def _commitments(self, dealer: str, holder: str, own_share: bytes, key_share: bytes) -> tuple[str, str]:
        return (
            commitment(self._about, dealer, holder, "own", own_share),
            commitment(self._about, dealer, holder, "masks", key_share),
        )

    def hold(self, sealed: Mapping[str, bytes], commitments: Mapping[str, Sequence[str]]) -> None:
        """Open the shares that other sites dealt to this one, before anything is masked.

        Args:
            sealed: Shares by the name of the dealer.
            commitments: What each dealer said of these shares.

        Raises:
            Objection: If shares do not open, or are not those that their dealer is bound to.
        """
        self._turn("hold")
        refuse(not {*sealed} <= {*self._order} - {self.name}, "secure sum: shares of an unknown site", "other")
        few = len(sealed) + 1 < self._least
        refuse(few, f"secure sum: {len(sealed) + 1} of {len(self._order)} sites sent shares, too few", "other")
        objections = {}
        for dealer, text in sealed.items():
            public = self._adverts[dealer].seals
            key = sealing_key(self._keys["shares"], public, self._about, dealer, self.name)
            try:
                self._held[dealer] = open_shares(key, text, self._about)
            except ValueError as error:
                objections[dealer] = f"of {dealer!r}: {error}"
                continue
            if self._commitments(dealer, self.name, *self._held[dealer]) != tuple(commitments[dealer]):
                del self._held[dealer]
                objections[dealer] = f"the shares of {dealer!r} are not those that it is bound to"
        if objections:
            raise Objection(objections)

    def open(self) -> bytes:
        """Return the secret by which the server opens what this site dealt; the site masks nothing in this attempt.

        The shares of both its secrets are known then. That shows nothing, since no vector is ever masked with them:
        the step of the masks cannot be taken any more, and this one not after it. Shares that others dealt to this
        site are sealed with other keys. So a server that invents disputes learns what it learns of a site that goes
        before the masks.
        """
        refuse(self._steps[:1] not in (["hold"], ["mask"]), "secure sum: nothing is to be opened now", "other")
        self._steps.clear()
        return self._seeds["seals"]

    def mask(self, there: Sequence[str], vector: Uint64Vector) -> Uint64Vector:
        """Return the vector under masks, which cancel in the sum of all sites that are there.

        Args:
            there: The sites that are in the sum with this one, and itself, as the server says.
            vector: Its numbers modulo 2⁶⁴.
        """
        self._turn("mask")
        listed = sorted({*there})
        refuse(len(listed) < len(there), "secure sum: a site stands in the list of the masks twice", "other")
        refuse(not {*listed} <= {*self._held}, "secure sum: a site is to be masked with that dealt no shares", "other")
        refuse(self.name not in listed, "secure sum: this site is said to have gone", "other")
        few = len(listed) < self._least
        refuse(few, f"secure sum: {len(listed)} of {len(self._order)} sites hold shares, too few", "other")
        self._there = listed
        added, subtracted = [self_mask_key(self._seeds["own"])], list[bytes]()
        for name in listed:
            if name == self.name:
                continue
            key = pair_mask_key(self._keys["masks"], self._adverts[name].masks, self._about, (self.name, name))
            (added if self.name < name else subtracted).append(key)
        found = vector.copy()
        add_streams(found, added, subtracted)
        self._numbers = len(vector)
        return found

    def confirm(self, alive: Sequence[str]) -> str:
        """Sign who is in the sum, as the server says; one list only."""
        self._turn("confirm")
        listed = sorted({*alive})
        refuse(len(listed) < len(alive), "secure sum: a site stands in the list of the sum twice", "other")
        refuse(not {*listed} <= {*self._there}, "secure sum: a site is to be in the sum that sent no shares", "other")
        refuse(self.name not in listed, "secure sum: this site is said to have gone", "other")
        few = len(listed) < self._least
        refuse(few, f"secure sum: {len(listed)} of {len(self._order)} sites are too few for a sum", "other")
        self._alive = listed
        self._statement = sum_statement(self._about, self._there, self._numbers, listed)
        return sign(self._identity, "alive", self._statement)

    def reveal(self, signatures: Mapping[str, str]) -> RevealedShares:
        """Shares by which the masks are taken away: of each site's own mask if it is in the sum, of its key if not.

        Never of both, whatever the server says: the two lists are one statement, which enough sites have signed. And
        nothing of a site that is in neither list, whose masks are in no vector.
        """
        self._turn("reveal")
        alive = self._alive
        signed = [name for name in signatures if name in alive and self._confirmed(name, signatures[name])]
        few = len(signed) < self._least
        refuse(few, f"secure sum: {len(signed)} sites signed the same list, and {self._least} must", "other")
        return {
            "own": {name: self._held[name][0] for name in alive},
            "gone": {name: self._held[name][1] for name in sorted({*self._there} - {*alive})},
        }

    def _confirmed(self, name: str, signature: str) -> bool:
        return is_signed(self._known[name], signature, "alive", self._statement)


def open_shares(key: bytes, sealed: bytes, about: str) -> tuple[bytes, bytes]:
    """The two shares of a sealed message; a ValueError if it cannot be opened, or does not hold two."""
    text = unseal(key, sealed, about)
    if len(text) != 2 * SECRET_SIZE:
        raise ValueError(f"its shares have {len(text)} bytes, not {2 * SECRET_SIZE}")
    return text[:SECRET_SIZE], text[SECRET_SIZE:]
