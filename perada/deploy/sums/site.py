# SPDX-License-Identifier: Apache-2.0
"""A site's side of one secure sum. The server is trusted with nothing but relaying messages."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import RejectionError
from perada.deploy.sums.keys import (
    Advert,
    SiteClaims,
    SumTerms,
    add_streams,
    commitment,
    conflicting_rounds,
    digest_of_json,
    exchange_key,
    is_signed,
    pair_mask_key,
    received_digests,
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
"""Shares by the name of the site: ``own`` of the survivors' self masks, ``gone`` of the dropouts' pairwise masks."""
Commitments = dict[str, tuple[str, str]]
"""Digests of the two shares that a site dealt, in the order of `PURPOSES`, by the name of their holder."""
PURPOSES = ("own", "masks")
"""The two secrets that each site shares: that of its self mask, and the seed of its pairwise masks."""


class DealtShares(NamedTuple):
    """The shares of a site's two secrets.

    Attributes:
        sealed: Both shares of each other site, encrypted for it.
        commitments: Commitments to the shares of each site, the dealer among them.
    """

    sealed: dict[str, bytes]
    commitments: Commitments


class Objection(RejectionError):
    """Raised if a site rejects other sites' keys or shares; the server decides whose fault that is.

    Attributes:
        names: The sites that are objected to.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("secure sum: " + "; ".join(reasons.values()), "other")
        self.names = sorted(reasons)


def _require_condition(condition: bool, violation: str) -> None:
    """Raise a RejectionError unless a condition of the protocol holds."""
    if not condition:
        raise RejectionError(f"secure sum: {violation}", "other")


class SiteRound:
    """The steps of a site in one sum (Bonawitz et al., CCS 2017, section 4 and figure 4), each once and in this order.

    Keys are made here for this round and are in memory only: a process that is killed is out of the round, and no copy
    of a disk, however old, makes a key mask a second vector.

    Args:
        name: Name of the site.
        identity: Its private key.
        peers: Public keys, by name, of the other sites that it agrees to hide among.
        terms: Terms of the sum.
        claims: What it states beside its keys.

    Attributes:
        survivors: The sites in the sum; empty before :meth:`confirm`.
    """

    def __init__(
        self,
        name: str,
        identity: Ed25519PrivateKey,
        peers: Mapping[str, Ed25519PublicKey],
        terms: SumTerms,
        claims: SiteClaims | None = None,
    ) -> None:
        self.name = name
        self.terms = terms
        self.survivors: list[str] = []
        self._identity = identity
        self._claims = claims or SiteClaims()
        self._identities = {**peers, name: identity.public_key()}
        self._remaining_steps = ["advertise", "share", "hold", "mask", "confirm", "reveal"]
        self._seeds = {purpose: secrets.token_bytes(SECRET_SIZE) for purpose in ("seals", "shares", "masks", "own")}
        self._keys = {purpose: exchange_key(self._seeds[purpose]) for purpose in ("seals", "shares", "masks")}
        self._adverts: dict[str, Advert] = {}
        self._order: list[str] = []
        # Digest of all sites' adverts.
        self._keys_digest = ""
        # The two shares that each dealer gave this site.
        self._received: dict[str, tuple[bytes, bytes]] = {}
        self._senders: list[str] = []
        self._vector_size = 0
        self._statement: dict[str, object] = {}

    def check_step(self, step: str) -> None:
        """Raise if a step does not come next."""
        _require_condition(self._remaining_steps[:1] == [step], f"{step} is not the next step")

    def _begin_step(self, step: str) -> None:
        """Begin a step. Whatever its outcome, it cannot be repeated."""
        self.check_step(step)
        self._remaining_steps.pop(0)

    @property
    def advert(self) -> Advert:
        """The public keys that this site advertised."""
        return self._adverts[self.name]

    @property
    def num_sites(self) -> int:
        """Number of sites whose keys this site has accepted."""
        return len(self._order)

    @property
    def shared_metric_names(self) -> set[str]:
        """Names of the metrics that may be added up.

        A metric may be added up if, whichever sites drop out, at least ``min_sites`` of the sites that have it remain.
        Otherwise its sum could be that of a single site.
        """
        num_owners = Counter(name for advert in self._adverts.values() for name in {*advert.numbers.split()})
        max_dropouts = self.num_sites - self._min_survivors
        min_sites = self.terms.secure_sums.min_sites
        return {name for name, owners in num_owners.items() if owners - max_dropouts >= min_sites}

    @property
    def _min_survivors(self) -> int:
        """Number of sites that must remain until the end, which is also the threshold of the secret sharing."""
        return self.terms.secure_sums.least(self.num_sites)

    def advertise(self) -> Advert:
        """Return the signed public keys of this round."""
        self._begin_step("advertise")
        public_keys = {purpose: key.public_key().public_bytes_raw().hex() for purpose, key in self._keys.items()}
        unsigned = Advert(
            name=self.name,
            terms=digest_of_json(asdict(self.terms)),
            identity=self._identity.public_key().public_bytes_raw().hex(),
            own=hashlib.sha256(self._seeds["own"]).hexdigest(),
            **public_keys,
            **self._claims.texts(),
        )
        advert = replace(unsigned, signature=sign(self._identity, "advert", unsigned.statement()))
        self._adverts = {self.name: advert}
        return advert

    def share(self, adverts: Sequence[Advert]) -> DealtShares:
        """Deal shares of the two secrets to all sites of the round.

        The server may have forged the list. A list is rejected if it has unknown sites, wrong signatures, keys of a
        different sum, a site twice, or too few sites.

        Raises:
            RejectionError: If the list cannot be that of honest sites.
            Objection: If keys are not those of a site on this one's list.
        """
        self._begin_step("share")
        own_advert = self.advert
        order = share_order(adverts)
        _require_condition(len({*order}) == len(order), "the list names a site twice")
        _require_condition(
            len(order) >= self.terms.secure_sums.min_sites, f"{len(order)} sites are too few to hide among"
        )
        _require_condition(own_advert in adverts, "the list has different keys for this site, or none")
        self._check_identities(adverts)
        own_digests = received_digests(own_advert)
        for advert in adverts:
            _require_condition(advert.terms == own_advert.terms, f"the keys of {advert.name!r} are for a different sum")
            rounds = ", ".join(str(int(round) + 1) for round in conflicting_rounds(own_digests, advert))
            _require_condition(not rounds, f"{advert.name!r} was sent something different in round {rounds}")
        self._adverts = {advert.name: advert for advert in adverts}
        self._order = order
        self._keys_digest = digest_of_json([self._adverts[name].statement() for name in order])
        return self._deal_shares()

    def _check_identities(self, adverts: Sequence[Advert]) -> None:
        """Raise an Objection to keys that were not signed by a site on this one's list."""
        objections = {}
        for advert in adverts:
            key = self._identities.get(advert.name)
            if key is None:
                objections[advert.name] = f"{advert.name!r} is not among the sites of site.yaml"
                continue
            same_identity = key.public_bytes_raw().hex() == advert.identity
            if not same_identity or not is_signed(key, advert.signature, "advert", advert.statement()):
                objections[advert.name] = f"the keys of {advert.name!r} are not signed by it"
        if objections:
            raise Objection(objections)

    def _deal_shares(self) -> DealtShares:
        """Split both secrets among all sites, and seal each one's shares for it."""
        sealed: dict[str, bytes] = {}
        commitments: Commitments = {}
        self_mask_shares = split(self._seeds["own"], self._min_survivors, self.num_sites)
        pair_mask_shares = split(self._seeds["masks"], self._min_survivors, self.num_sites)
        for holder, self_mask_share, pair_mask_share in zip(
            self._order, self_mask_shares, pair_mask_shares, strict=True
        ):
            commitments[holder] = self._commitments_of_dealer(self.name, holder, self_mask_share, pair_mask_share)
            if holder == self.name:
                self._received[holder] = (self_mask_share, pair_mask_share)
                continue
            key = sealing_key(self._keys["seals"], self._adverts[holder].shares, self._keys_digest, self.name, holder)
            sealed[holder] = seal(key, self_mask_share + pair_mask_share, self._keys_digest)
        return DealtShares(sealed, commitments)

    def _commitments_of_dealer(
        self, dealer: str, holder: str, self_mask_share: bytes, pair_mask_share: bytes
    ) -> tuple[str, str]:
        """Return the commitments of a dealer to the two shares of a holder."""
        return (
            commitment(self._keys_digest, dealer, holder, "own", self_mask_share),
            commitment(self._keys_digest, dealer, holder, "masks", pair_mask_share),
        )

    def hold(self, sealed: Mapping[str, bytes], commitments: Mapping[str, Sequence[str]]) -> None:
        """Open the shares that other sites dealt to this one, before anything is masked.

        Args:
            sealed: Shares by the name of the dealer.
            commitments: Each dealer's commitments to these shares.

        Raises:
            RejectionError: If too few sites sent shares, or an unknown one.
            Objection: If shares do not open, or are not those that their dealer committed to.
        """
        self._begin_step("hold")
        _require_condition({*sealed} <= {*self._order} - {self.name}, "shares of an unknown site")
        # This site is a dealer, too.
        num_dealers = len(sealed) + 1
        _require_condition(
            num_dealers >= self._min_survivors,
            f"only {num_dealers} of {self.num_sites} sites sent shares, which is too few",
        )
        objections = {}
        for dealer, text in sealed.items():
            key = sealing_key(self._keys["shares"], self._adverts[dealer].seals, self._keys_digest, dealer, self.name)
            try:
                self_mask_share, pair_mask_share = open_shares(key, text, self._keys_digest)
            except ValueError as error:
                objections[dealer] = f"of {dealer!r}: {error}"
                continue
            expected = self._commitments_of_dealer(dealer, self.name, self_mask_share, pair_mask_share)
            if tuple(commitments[dealer]) != expected:
                objections[dealer] = f"the shares of {dealer!r} do not match its commitments"
                continue
            self._received[dealer] = (self_mask_share, pair_mask_share)
        if objections:
            raise Objection(objections)

    def open(self) -> bytes:
        """Disclose the seed with which the server opens what this site dealt; nothing is masked in this attempt.

        The server then has the shares of both secrets. They reveal nothing, since no vector is ever masked with these
        secrets: after this step the masks cannot be made any more, and after the masks this step cannot be taken.
        Shares that others dealt to this site are sealed with other keys. So a server that invents a dispute learns no
        more than it does of a site that drops out before the masks.
        """
        _require_condition(self._remaining_steps[:1] in (["hold"], ["mask"]), "there is nothing to open now")
        self._remaining_steps.clear()
        return self._seeds["seals"]

    def mask(self, senders: Sequence[str], vector: Uint64Vector) -> Uint64Vector:
        """Return the vector under masks, which cancel in the sum over all senders.

        Args:
            senders: The sites in the sum according to the server, this one among them.
            vector: The site's numbers modulo 2⁶⁴.
        """
        self._begin_step("mask")
        listed = sorted({*senders})
        _require_condition(len(listed) == len(senders), "the list of senders names a site twice")
        _require_condition({*listed} <= {*self._received}, "the list of senders names a site that dealt no shares")
        _require_condition(self.name in listed, "this site is missing from the list of senders")
        _require_condition(
            len(listed) >= self._min_survivors,
            f"only {len(listed)} of {self.num_sites} sites hold shares, which is too few",
        )
        self._senders = listed
        added = [self_mask_key(self._seeds["own"])]
        subtracted: list[bytes] = []
        for name in listed:
            if name == self.name:
                continue
            key = pair_mask_key(self._keys["masks"], self._adverts[name].masks, self._keys_digest, (self.name, name))
            # Of each pair the first site by name adds the mask, and the other one subtracts it.
            if self.name < name:
                added.append(key)
            else:
                subtracted.append(key)
        masked = vector.copy()
        add_streams(masked, added, subtracted)
        self._vector_size = len(vector)
        return masked

    def confirm(self, survivors: Sequence[str]) -> str:
        """Sign the server's list of the sites in the sum. A site signs only one list.

        Args:
            survivors: The sites whose vectors the server has received, this one among them.
        """
        self._begin_step("confirm")
        listed = sorted({*survivors})
        _require_condition(len(listed) == len(survivors), "the list of survivors names a site twice")
        _require_condition({*listed} <= {*self._senders}, "the list of survivors names a site that was not a sender")
        _require_condition(self.name in listed, "this site is missing from the list of survivors")
        _require_condition(
            len(listed) >= self._min_survivors, f"{len(listed)} of {self.num_sites} sites are too few for a sum"
        )
        self.survivors = listed
        self._statement = sum_statement(self._keys_digest, self._senders, self._vector_size, listed)
        return sign(self._identity, "alive", self._statement)

    def reveal(self, signatures: Mapping[str, str]) -> RevealedShares:
        """Return the shares that remove the masks: of a survivor's self mask, of a dropout's pairwise masks.

        Never both of one site, whatever the server sends: both lists follow from one statement, which enough sites have
        signed. Nothing is revealed of a site that is in neither list, since its masks are in no vector.

        Args:
            signatures: Signatures of the sum's statement by the name of the site.
        """
        self._begin_step("reveal")
        signers = [name for name in signatures if name in self.survivors and self._has_signed(name, signatures[name])]
        _require_condition(
            len(signers) >= self._min_survivors,
            f"{len(signers)} sites signed the same list, but {self._min_survivors} are required",
        )
        dropouts = sorted({*self._senders} - {*self.survivors})
        self_mask_shares = {}
        pair_mask_shares = {}
        for name in self.survivors:
            self_mask_shares[name], _ = self._received[name]
        for name in dropouts:
            _, pair_mask_shares[name] = self._received[name]
        return {"own": self_mask_shares, "gone": pair_mask_shares}

    def _has_signed(self, name: str, signature: str) -> bool:
        return is_signed(self._identities[name], signature, "alive", self._statement)


def open_shares(key: bytes, sealed: bytes, keys_digest: str) -> tuple[bytes, bytes]:
    """Decrypt the two shares of a sealed message.

    Raises:
        ValueError: If it cannot be opened, or does not hold two shares.
    """
    shares = unseal(key, sealed, keys_digest)
    if len(shares) != 2 * SECRET_SIZE:
        raise ValueError(f"its shares have {len(shares)} bytes, expected {2 * SECRET_SIZE}")
    return shares[:SECRET_SIZE], shares[SECRET_SIZE:]
