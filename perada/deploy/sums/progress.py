# SPDX-License-Identifier: Apache-2.0
"""How far a secure sum is, and for how long sites remember: plain values, for which no cryptography is needed."""

from dataclasses import dataclass, field

MAX_HEARD_ROUNDS = 256
"""Rounds of which a site says what it was told."""


@dataclass
class SumState:
    """How far a sum is, which is on the server's disk before a site is told of it.

    What sites are told in a step must be the same after the server was stopped, whoever has come back meanwhile: they
    answer another message of the same step with nothing.
    """

    round: int
    of: str
    attempt: int
    adverts: list[dict[str, str]] = field(default_factory=list)
    commitments: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    there: list[str] = field(default_factory=list)  # who is told to mask; empty before that
    alive: list[str] = field(default_factory=list)  # who is in the sum
    signatures: dict[str, str] = field(default_factory=dict)  # of those who are
