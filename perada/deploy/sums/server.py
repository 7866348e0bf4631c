# SPDX-License-Identifier: Apache-2.0
"""The server's part in a secure sum: it passes messages on, and takes away the masks of the sum alone."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from perada.deploy.protocol import Refused
from perada.deploy.sums.keys import (
    Advert,
    Terms,
    add_streams,
    combined,
    digest,
    exchange_key,
    order_of,
    own_key,
    pair_key,
)
from perada.deploy.sums.site import Revealed
from perada.deploy.sums.vector import Whole


class ServerRound:
    """What the server holds of one sum; each set of messages is of the sites that sent theirs in time.

    Args:
        terms: Of the sum.
        adverts: The sites' keys.

    Raises:
        Refused: If too few are left at any step: the round is void, and nothing of it can be read.
    """

    def __init__(self, terms: Terms, adverts: Sequence[Advert]) -> None:
        self.terms, self.adverts = terms, {advert.name: advert for advert in adverts}
        self.order = order_of(adverts)
        self.about = digest([self.adverts[name].statement() for name in self.order])
        self.least = terms.options.least(len(self.order))
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._names: list[str] = []
        self._masked = np.zeros(0, np.uint64)
        self.enough(self.order, "sent their keys")

    def enough(self, names: Sequence[str] | Mapping[str, object], did: str) -> None:
        """Refuse to continue without enough sites that ``did`` something."""
        if len(names) < self.least:
            raise Refused(f"secure sum: {len(names)} of {len(self.order)} sites {did}, and {self.least} must", "other")

    def deliver(self, sealed: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """What each site is to be given of what all sites sealed, by sender."""
        self.enough(sealed, "sent shares")
        self._sealed = dict(sealed)
        return {
            name: {sender: texts[name] for sender, texts in sealed.items() if sender != name and name in texts}
            for name in sealed
        }

    def take(self, masked: Mapping[str, Whole]) -> list[str]:
        """Take the masked vectors, of which their sum is kept; the sites that are in the sum."""
        self.enough(masked, "sent their part")
        self._names, (first, *others) = sorted(masked), masked.values()
        self._masked = first.copy()
        for vector in others:
            self._masked += vector
        return self._names

    def total(self, revealed: Mapping[str, Revealed]) -> Whole:
        """The sum of the vectors of the sites that are in it."""
        self.enough(revealed, "revealed shares")
        added, subtracted = list[bytes](), list[bytes]()
        for name in self._names:
            secret = self._secret(name, "own", revealed)
            if hashlib.sha256(secret).hexdigest() != self.adverts[name].own:
                raise Refused(f"secure sum: the shares of the own mask of {name!r} are not of its secret", "other")
            subtracted.append(own_key(secret))
        for name in self._sealed.keys() - {*self._names}:
            key = exchange_key(self._secret(name, "gone", revealed))
            if key.public_key().public_bytes_raw().hex() != self.adverts[name].masks:
                raise Refused(f"secure sum: the shares of the key of {name!r} are not of its key", "other")
            for other in self._names:
                # The other one added its mask, if its name comes first, or subtracted it.
                masks = subtracted if other < name else added
                masks.append(pair_key(key, self.adverts[other].masks, self.about, (name, other)))
        found = self._masked.copy()
        add_streams(found, added, subtracted)
        return found

    def _secret(self, name: str, kind: str, revealed: Mapping[str, Revealed]) -> bytes:
        shares = {
            self.order.index(holder): own[kind][name] for holder, own in revealed.items() if name in own.get(kind, {})
        }
        try:
            return combined(shares, self.least)
        except ValueError as error:
            raise Refused(f"secure sum: {name!r}: {error}", "other") from None
