# SPDX-License-Identifier: Apache-2.0
"""The server's part in a secure sum: it passes messages on, and takes away the masks of the sum alone."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np

from perada.deploy.protocol import RefusalError
from perada.deploy.sums.keys import (
    Advert,
    SumTerms,
    add_streams,
    commitment,
    digest,
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


class ServerRound:
    """What the server holds of one sum; each set of messages is of the sites that sent theirs in time.

    Args:
        terms: Of the sum.
        adverts: The sites' keys.

    Attributes:
        commitments: What each site said of the shares that it dealt, by its name.
        there: The sites whose pair masks are in the vectors.
        lied: What sites did that no honest one does, by name: each is proven by what they said themselves.

    Raises:
        Refused: If too few are left at any step: the round is void, and nothing of it can be read.
    """

    def __init__(self, terms: SumTerms, adverts: Sequence[Advert]) -> None:
        self.terms, self.adverts = terms, {advert.name: advert for advert in adverts}
        self.order = share_order(adverts)
        self.about = digest([self.adverts[name].statement() for name in self.order])
        self.least = terms.options.least(len(self.order))
        self.commitments: dict[str, Commitments] = {}
        self.there: list[str] = []
        self.lied: dict[str, str] = {}
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._names: list[str] = []
        self._masked = np.zeros(0, np.uint64)
        self.enough(self.order, "sent their keys")

    def enough(self, names: Collection[str], did: str) -> None:
        """Refuse to continue without enough sites that ``did`` something."""
        if len(names) < self.least:
            raise RefusalError(
                f"secure sum: {len(names)} of {len(self.order)} sites {did}, and {self.least} must", "other"
            )

    def deliver(self, dealt: Mapping[str, DealtShares]) -> dict[str, dict[str, bytes]]:
        """What each site is to be given of what all sites sealed, by sender."""
        self.enough(dealt, "sent shares")
        self._sealed = {name: parts.sealed for name, parts in dealt.items()}
        self.commitments = {name: parts.commitments for name, parts in dealt.items()}
        return {
            name: {sender: texts[name] for sender, texts in self._sealed.items() if sender != name and name in texts}
            for name in dealt
        }

    def dealt_honestly(self, dealer: str, seals: bytes, holder: str) -> bool:
        """Decide whether shares open, given the secret of the key by which their dealer sealed them.

        Args:
            dealer: Who sealed them.
            seals: The secret, as the dealer opens it.
            holder: For whom they were sealed, who says that they do not open, or are not those of the commitments.
        """
        key = exchange_key(seals)
        if key.public_key().public_bytes_raw().hex() != self.adverts[dealer].seals:
            return False
        shared = sealing_key(key, self.adverts[holder].shares, self.about, dealer, holder)
        try:
            shares = open_shares(shared, self._sealed[dealer][holder], self.about)
        except ValueError:
            return False
        return all(
            self._is_bound(dealer, holder, purpose, share) for purpose, share in zip(PURPOSES, shares, strict=True)
        )

    def _is_bound(self, dealer: str, holder: str, purpose: str, share: bytes) -> bool:
        """Whether a share is the one that its dealer committed itself to."""
        said = dict(zip(PURPOSES, self.commitments[dealer][holder], strict=True))
        return commitment(self.about, dealer, holder, purpose, share) == said[purpose]

    def begin(self, there: Collection[str]) -> list[str]:
        """Note the sites that hold shares of one another; their names are for the masks."""
        self.enough(there, "hold shares")
        self.there = sorted(there)
        return self.there

    def take(self, masked: Mapping[str, Uint64Vector]) -> list[str]:
        """Take the masked vectors, of which their sum is kept; the sites that are in the sum."""
        self.enough(masked, "sent their part")
        self._names, (first, *others) = sorted(masked), masked.values()
        self._masked = first.copy()
        for vector in others:
            self._masked += vector
        return self._names

    def signed(self, signatures: Mapping[str, str]) -> dict[str, str]:
        """Those of the signatures of who is in the sum that are their sites' own."""
        statement = sum_statement(self.about, self.there, len(self._masked), self._names)
        valid = {}
        for name, signature in signatures.items():
            if is_signed_by_itself(self.adverts[name], signature, "alive", statement):
                valid[name] = signature
            else:
                self.lied[name] = "its signature of who is in the sum is not its own"
        return valid

    def total(self, revealed: Mapping[str, RevealedShares]) -> Uint64Vector:
        """The sum of the vectors of the sites that are in it."""
        self.enough(revealed, "revealed shares")
        added, subtracted = list[bytes](), list[bytes]()
        for name in self._names:
            is_secret = partial(_is_own_secret, self.adverts[name])
            subtracted.append(self_mask_key(self._secret(name, "own", revealed, is_secret)))
        for name in sorted({*self.there} - {*self._names}):
            is_secret = partial(_is_mask_secret, self.adverts[name])
            key = exchange_key(self._secret(name, "gone", revealed, is_secret))
            for other in self._names:
                # The other one added its mask, if its name comes first, or subtracted it.
                masks = subtracted if other < name else added
                masks.append(pair_mask_key(key, self.adverts[other].masks, self.about, (name, other)))
        found = self._masked.copy()
        add_streams(found, added, subtracted)
        return found

    def _secret(
        self, dealer: str, kind: str, revealed: Mapping[str, RevealedShares], is_secret: Callable[[bytes], bool]
    ) -> bytes:
        """Put a secret together from those shares that its dealer committed itself to.

        Who reveals another share lies: it had the right one, or would have objected before anything was masked. If
        the right shares do not give the secret that is public, who dealt them lies.
        """
        purpose = {"own": "own", "gone": "masks"}[kind]
        shares = {}
        for holder, parts in revealed.items():
            share = parts[kind].get(dealer)
            if share is None:
                continue
            if self._is_bound(dealer, holder, purpose, share):
                shares[self.order.index(holder)] = share
            else:
                self.lied.setdefault(holder, f"it revealed another share of {dealer!r} than it was dealt")
        if len(shares) < self.least:
            liars = f"; {', '.join(self.lied)} lied" if self.lied else ""
            raise RefusalError(
                f"secure sum: {len(shares)} right shares of a secret of {dealer!r} are there, and {self.least} are "
                f"needed{liars}",
                "other",
            )
        secret = recover(shares, self.least, is_secret)
        if secret is None:
            self.lied[dealer] = "the shares that it dealt are not of its secret"
            raise RefusalError(f"secure sum: the shares that {dealer!r} dealt are not of its secret", "other")
        return secret


def _is_own_secret(advert: Advert, secret: bytes) -> bool:
    """Whether this is the secret of a site's own mask."""
    return hashlib.sha256(secret).hexdigest() == advert.own


def _is_mask_secret(advert: Advert, secret: bytes) -> bool:
    """Whether this is the secret of the key of a site's pair masks."""
    public: bytes = exchange_key(secret).public_key().public_bytes_raw()
    return public.hex() == advert.masks
