# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg (Liang et al., 2020)."""

from perada.algorithms.base import Slot
from perada.algorithms.sharing import PartialSharing


class LGFedAvg(PartialSharing):
    """The feature extractor stays on the client, the classification head is shared and averaged (their Algorithm 1)."""

    what = "all layers but the classification head"

    def private(self, slot: Slot) -> frozenset[str]:
        """All but the head."""
        return frozenset(slot.keys) - slot.head
