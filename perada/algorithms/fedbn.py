# SPDX-License-Identifier: Apache-2.0
"""FedBN (Li et al., ICLR 2021)."""

from perada.algorithms.base import Slot
from perada.algorithms.sharing import PartialSharing


class FedBN(PartialSharing):
    """FedAvg except for normalisation layers, whose weights and statistics stay on the client (their Algorithm 1)."""

    def private(self, slot: Slot) -> frozenset[str]:
        """The norms."""
        return slot.norms

    def _what(self) -> str:
        return "normalisation layers"
