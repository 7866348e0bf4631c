# SPDX-License-Identifier: Apache-2.0
"""The state of a secure sum that the server saves. It needs no cryptography."""

from dataclasses import dataclass, field

MAX_HEARD_ROUNDS = 256
"""Number of past rounds of which a site states what it was sent."""


@dataclass
class SumState:
    """Progress of a secure sum, which is written to disk before sites learn of it.

    A restarted server must repeat the same messages, whichever sites have come back meanwhile: a site does not answer
    a second, different message of the same step.

    Attributes:
        round: Round of the sum, counted from 0.
        of: What is added up: ``update`` or ``scores``.
        attempt: Counted from 0, within the round.
        adverts: Fields of the sites' adverts.
        commitments: By dealer and holder, the digests of the two shares.
        senders: Sites that are requested to send masked vectors; empty before that step.
        survivors: Sites whose vectors are in the sum.
        signatures: Signatures of the survivors.
    """

    round: int
    of: str
    attempt: int
    adverts: list[dict[str, str]] = field(default_factory=list)
    commitments: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    senders: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    signatures: dict[str, str] = field(default_factory=dict)
