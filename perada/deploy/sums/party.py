# SPDX-License-Identifier: Apache-2.0
"""A site's side of secure sums: it answers the requests of a sum's steps."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from perada.deploy.protocol import RejectionError, Request
from perada.deploy.sums.keys import Advert, SiteClaims, SumTerms
from perada.deploy.sums.site import SiteRound
from perada.deploy.sums.vector import Uint64Vector

MAX_RUNS = 8
"""How many runs a site sums in at once. It keeps the last replies of each, a masked vector among them."""
MakeVector = Callable[[int, Collection[str]], Uint64Vector]
"""Makes a site's vector, given the number of sites in the sum and the names of the metrics to include."""


@dataclass(frozen=True)
class StepReply:
    """A site's reply in a step of a sum.

    Attributes:
        content: Fields of the reply.
        masked_vector: Its vector with the masks, in the step ``mask``; else None.
    """

    content: dict[str, Any]
    masked_vector: Uint64Vector | None = None


@dataclass
class _ActiveSum:
    """A site's part in the last sum of a run."""

    terms: SumTerms
    round: SiteRound
    # Each reply is stored by the digest of its message.
    replies: dict[str, bytes] = field(default_factory=dict)


class Party:
    """A site as a participant in secure sums.

    A site may serve several runs, and takes part in one sum of each run at a time. Keys are kept only in memory.

    Args:
        name: Name of this site in the list of sites.
        identity: Its private key.
        peers: Public keys of the other sites by name; this site may be among them.

    Raises:
        ValueError: If the list has another key under this site's name, or its key under another name.
    """

    def __init__(self, name: str, identity: Ed25519PrivateKey, peers: Mapping[str, Ed25519PublicKey]) -> None:
        public_bytes = identity.public_key().public_bytes_raw()
        if name in peers and peers[name].public_bytes_raw() != public_bytes:
            raise ValueError(f"the list of sites has a different key under this site's name, {name!r}")
        self.name = name
        self._identity = identity
        self.peers = {other: key for other, key in peers.items() if other != name}
        for other, key in self.peers.items():
            if key.public_bytes_raw() == public_bytes:
                raise ValueError(f"the list of sites has the key of this site, {name!r}, under the name {other!r}")
        # The sums are stored by run, in the order in which they were begun.
        self._sums: dict[str, _ActiveSum] = {}

    def survivors(self, terms: SumTerms) -> list[str]:
        """Return the sites in a sum, including this one; empty before the server has announced them."""
        current = self._find_sum(terms)
        if current is None:
            return []
        return current.round.survivors

    def saved_reply(self, terms: SumTerms, message_digest: str) -> bytes | None:
        """Return the reply to an earlier message of this sum; None if it was not answered before."""
        current = self._find_sum(terms)
        if current is None:
            return None
        return current.replies.get(message_digest)

    def save_reply(self, terms: SumTerms, message_digest: str, reply: bytes) -> None:
        """Save the reply to a message of a sum, in case the server asks again."""
        self._sums[terms.run].replies[message_digest] = reply

    def offer_keys(self, terms: SumTerms, claims: SiteClaims, begin: bool) -> dict[str, Any]:
        """Return the public keys for the first attempt at a sum, which are the same in every call.

        Args:
            terms: Terms of the sum.
            claims: Claims of the site in addition to its keys.
            begin: Whether to create keys if there are none yet.

        Returns:
            The advert; empty if a later attempt was begun, or if there are no keys.
        """
        last = self._sums.get(terms.run)
        if last is not None and _is_same_sum(last.terms, terms):
            if last.terms != terms:
                # A later attempt was begun already.
                return {}
            return {"advert": vars(last.round.advert)}
        if not begin:
            return {}
        return self._begin_sum(terms, claims)

    def _find_sum(self, terms: SumTerms) -> "_ActiveSum | None":
        """Return the sum with these terms; None if the run now has another sum, or none."""
        last = self._sums.get(terms.run)
        if last is None or last.terms != terms:
            return None
        return last

    def _begin_sum(self, terms: SumTerms, claims: SiteClaims) -> dict[str, Any]:
        """Create the keys of a sum, which replaces the previous sum of its run."""
        self._sums.pop(terms.run, None)
        while len(self._sums) >= MAX_RUNS:
            oldest_run = next(iter(self._sums))
            del self._sums[oldest_run]
        round = SiteRound(self.name, self._identity, self.peers, terms, claims)
        self._sums[terms.run] = _ActiveSum(terms, round)
        return {"advert": vars(round.advertise())}

    def step(self, request: Request, terms: SumTerms, claims: SiteClaims, make_vector: MakeVector) -> StepReply:
        """Take a step of a sum.

        Args:
            request: Request of the server.
            terms: Terms of the sum at this site.
            claims: Claims of the site in addition to its keys.
            make_vector: Function that computes the vector, once the sites of the sum are known.

        Raises:
            RejectionError: If the step does not come next, or its reply would reveal secrets to the server.
        """
        if request.kind == "keys":
            last = self._sums.get(terms.run)
            # Keys are created only once for an attempt, whatever the server requests.
            if last is not None and _is_same_sum(last.terms, terms) and terms.attempt <= last.terms.attempt:
                raise RejectionError(
                    f"secure sum: keys for attempt {terms.attempt} were requested again, or after a later attempt",
                    "other",
                )
            return StepReply(self._begin_sum(terms, claims))
        current = self._find_sum(terms)
        if current is None:
            raise RejectionError(
                "secure sum: this site no longer has its keys: it was restarted, or has since begun sums of "
                f"{MAX_RUNS} other runs",
                "other",
            )
        try:
            return self._later_step(current.round, request, make_vector)
        except RejectionError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # a malformed request
            raise RejectionError(f"secure sum: {request.kind}: {type(error).__name__}: {error}") from None

    @staticmethod
    def _later_step(round: SiteRound, request: Request, make_vector: MakeVector) -> StepReply:
        """Take a step after that of the keys. A malformed request may raise any error."""
        content = request.sums
        match request.kind:
            case "shares":
                adverts = [Advert(**entry) for entry in content["adverts"]]
                dealt = round.share(adverts)
                return StepReply({"sealed": to_hex(dealt.sealed), "commitments": dealt.commitments})
            case "hold":
                round.hold(from_hex(content["sealed"]), content["commitments"])
                return StepReply({})
            case "open":
                seals = round.open()
                return StepReply({"seals": seals.hex()})
            case "mask":
                # The list is checked before the vector is computed, which takes passes over the public images.
                round.check_step("mask")
                vector = make_vector(round.num_sites, round.shared_metric_names)
                masked_vector = round.mask(content["there"], vector)
                return StepReply({}, masked_vector)
            case "confirm":
                signature = round.confirm(content["alive"])
                return StepReply({"signature": signature})
            case _:
                revealed = round.reveal(content["signatures"])
                shares_by_kind = {kind: to_hex(shares) for kind, shares in revealed.items()}
                return StepReply(shares_by_kind)


def _is_same_sum(terms: SumTerms, other_terms: SumTerms) -> bool:
    """Return whether two terms are of the same sum, whatever their attempts."""
    return replace(terms, attempt=other_terms.attempt) == other_terms


def to_hex(contents: Mapping[str, bytes]) -> dict[str, str]:
    """Encode bytes by name as hexadecimal digits."""
    return {name: value.hex() for name, value in contents.items()}


def from_hex(texts: Mapping[str, str]) -> dict[str, bytes]:
    """Decode the result of :func:`to_hex`; anything else raises a ValueError, TypeError or AttributeError."""
    return {name: bytes.fromhex(text) for name, text in texts.items()}
