# SPDX-License-Identifier: Apache-2.0
"""The server's side of a secure sum: it relays messages between sites and removes the masks of the sum only."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from perada.deploy.protocol import RejectionError
from perada.deploy.sums.keys import (
    Advert,
    SumTerms,
    add_streams,
    commitment,
    digest_of_json,
    exchange_key,
    is_signed_by_itself,
    pair_mask_key,
    sealing_key,
    self_mask_key,
    share_order,
    sum_statement,
)
from perada.deploy.sums.shares import recover
from perada.deploy.sums.site import PURPOSES, Commitments, DealtShares, RevealedShares, open_shares
from perada.deploy.sums.vector import Uint64Vector

_PURPOSE_OF_REVEALED = {"own": "own", "gone": "masks"}
"""Which secret the shares are of that sites reveal: the self mask of a survivor, the pairwise masks of a dropout."""


class ServerRound:
    """The server's state in one sum. Each step takes the messages of the sites that sent theirs in time.

    Args:
        terms: Terms of the sum.
        adverts: The sites' keys.

    Attributes:
        commitments: Each site's commitments to the shares that it dealt, by its name.
        senders: The sites whose pairwise masks are in the vectors.
        lies: Proven lies by the name of the site: each follows from what the site itself sent.

    Raises:
        RejectionError: If too few sites remain at any step: the sum is void, and nothing of it can be read.
    """

    def __init__(self, terms: SumTerms, adverts: Sequence[Advert]) -> None:
        self.terms = terms
        self.adverts = {advert.name: advert for advert in adverts}
        self.order = share_order(adverts)
        self._keys_digest = digest_of_json([self.adverts[name].statement() for name in self.order])
        self._min_sites = terms.secure_sums.least(len(self.order))
        self.commitments: dict[str, Commitments] = {}
        self.senders: list[str] = []
        self.lies: dict[str, str] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._survivors: list[str] = []
        self._masked_sum = np.zeros(0, np.uint64)
        self.check_enough(self.order, "sent their keys")

    def check_enough(self, names: Collection[str], action: str) -> None:
        """Raise unless enough sites took an action, such as ``sent shares``."""
        if len(names) < self._min_sites:
            raise RejectionError(
                f"secure sum: {len(names)} of {len(self.order)} sites {action}, but {self._min_sites} are required",
                "other",
            )

    def deliver(self, dealt: Mapping[str, DealtShares]) -> dict[str, dict[str, bytes]]:
        """Sort the sealed shares of all dealers by the site that is to receive them.

        Returns:
            For each site, the shares sealed for it by the name of their dealer.
        """
        self.check_enough(dealt, "sent shares")
        self._sealed = {name: shares.sealed for name, shares in dealt.items()}
        self.commitments = {name: shares.commitments for name, shares in dealt.items()}
        boxes: dict[str, dict[str, bytes]] = {}
        for holder in dealt:
            boxes[holder] = {
                dealer: sealed[holder]
                for dealer, sealed in self._sealed.items()
                if dealer != holder and holder in sealed
            }
        return boxes

    def dealt_honestly(self, dealer: str, seed: bytes, holder: str) -> bool:
        """Return whether shares open, and are those that their dealer committed to.

        Args:
            dealer: Site that sealed them.
            seed: Seed of the dealer's key ``seals``, which it has disclosed.
            holder: Site that they were sealed for, which objects to them.
        """
        private = exchange_key(seed)
        if private.public_key().public_bytes_raw().hex() != self.adverts[dealer].seals:
            return False
        key = sealing_key(private, self.adverts[holder].shares, self._keys_digest, dealer, holder)
        try:
            shares = open_shares(key, self._sealed[dealer][holder], self._keys_digest)
        except ValueError:
            return False
        return all(
            self._matches_commitment(dealer, holder, purpose, share)
            for purpose, share in zip(PURPOSES, shares, strict=True)
        )

    def _matches_commitment(self, dealer: str, holder: str, purpose: str, share: bytes) -> bool:
        """Return whether a share is the one that its dealer committed to."""
        committed = dict(zip(PURPOSES, self.commitments[dealer][holder], strict=True))
        return commitment(self._keys_digest, dealer, holder, purpose, share) == committed[purpose]

    def begin(self, senders: Collection[str]) -> list[str]:
        """Set the sites that hold shares of one another, and will mask for one another.

        Returns:
            Their names in order, as they are sent to the sites.
        """
        self.check_enough(senders, "hold shares")
        self.senders = sorted(senders)
        return self.senders

    def take(self, masked: Mapping[str, Uint64Vector]) -> list[str]:
        """Add up the masked vectors.

        Returns:
            The names of the sites in the sum.
        """
        self.check_enough(masked, "sent their part")
        self._survivors = sorted(masked)
        first, *others = masked.values()
        self._masked_sum = first.copy()
        for vector in others:
            self._masked_sum += vector
        return self._survivors

    def valid_signatures(self, signatures: Mapping[str, str]) -> dict[str, str]:
        """Return the signatures of the sum's statement that are valid; a site with another one has lied."""
        statement = sum_statement(self._keys_digest, self.senders, len(self._masked_sum), self._survivors)
        valid = {}
        for name, signature in signatures.items():
            if is_signed_by_itself(self.adverts[name], signature, "alive", statement):
                valid[name] = signature
            else:
                self.lies[name] = "its signature of the list of sites in the sum is invalid"
        return valid

    def total(self, revealed: Mapping[str, RevealedShares]) -> Uint64Vector:
        """Return the sum of the survivors' vectors, from the shares that sites have revealed."""
        self.check_enough(revealed, "revealed shares")
        added: list[bytes] = []
        subtracted: list[bytes] = []
        for name in self._survivors:
            is_secret = partial(_is_self_mask_secret, self.adverts[name])
            secret = self._recover_secret(name, "own", revealed, is_secret)
            subtracted.append(self_mask_key(secret))
        for dropout in sorted({*self.senders} - {*self._survivors}):
            is_secret = partial(_is_pair_mask_secret, self.adverts[dropout])
            private = exchange_key(self._recover_secret(dropout, "gone", revealed, is_secret))
            for survivor in self._survivors:
                key = pair_mask_key(private, self.adverts[survivor].masks, self._keys_digest, (dropout, survivor))
                # The survivor added the mask of the pair if its name comes first, and subtracted it otherwise.
                if survivor < dropout:
                    subtracted.append(key)
                else:
                    added.append(key)
        total = self._masked_sum.copy()
        add_streams(total, added, subtracted)
        return total

    def _recover_secret(
        self,
        dealer: str,
        kind: str,
        revealed: Mapping[str, RevealedShares],
        is_secret: Callable[[bytes], bool],
    ) -> bytes:
        """Recover a secret from the revealed shares that its dealer committed to.

        A site that reveals another share lies: it had the right one, or would have objected before anything was
        masked. If the right shares do not yield the secret that the dealer advertised, the dealer lies.
        """
        purpose = _PURPOSE_OF_REVEALED[kind]
        shares = {}
        for holder, shares_by_kind in revealed.items():
            share = shares_by_kind[kind].get(dealer)
            if share is None:
                continue
            if self._matches_commitment(dealer, holder, purpose, share):
                shares[self.order.index(holder)] = share
            else:
                self.lies.setdefault(holder, f"it revealed a different share of {dealer!r} than it was dealt")
        if len(shares) < self._min_sites:
            liars = f"; {', '.join(self.lies)} lied" if self.lies else ""
            raise RejectionError(
                f"secure sum: {len(shares)} correct shares of a secret of {dealer!r} were revealed, but "
                f"{self._min_sites} are required{liars}",
                "other",
            )
        secret = recover(shares, self._min_sites, is_secret)
        if secret is None:
            self.lies[dealer] = "the shares that it dealt do not match its secret"
            raise RejectionError(f"secure sum: the shares that {dealer!r} dealt do not match its secret", "other")
        return secret


def _is_self_mask_secret(advert: Advert, secret: bytes) -> bool:
    """Return whether this is the secret of a site's self mask."""
    return hashlib.sha256(secret).hexdigest() == advert.own


def _is_pair_mask_secret(advert: Advert, secret: bytes) -> bool:
    """Return whether this is the seed of a site's pairwise masks."""
    public: bytes = exchange_key(secret).public_key().public_bytes_raw()
    return public.hex() == advert.masks
