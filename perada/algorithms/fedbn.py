# SPDX-License-Identifier: Apache-2.0
"""FedBN (Li et al., ICLR 2021)."""

from perada.algorithms.base import Slot
from perada.algorithms.sharing import PartialSharing


class FedBN(PartialSharing):
    """FedAvg except for normalisation layers, whose weights and statistics stay on the client (their Algorithm 1)."""

    what = "normalisation layers"
    remedy = "train layers with normalisation (adapter='full' or 'bias_norm', on a backbone that has any)"

    def private(self, slot: Slot) -> frozenset[str]:
        """The norms."""
        return slot.norms
