# SPDX-License-Identifier: Apache-2.0
"""Ditto (Li et al., ICML 2021): FedAvg beside personal models pulled towards the global one."""

from perada.algorithms.perada import PerAda


class Ditto(PerAda):
    """Ditto: PerAda's client and server without distillation, on whatever the adapter trains (usually ``full``).

    Args:
        prox_strength: λ of the pull λ/2 ||v_m − w||².
    """

    def __init__(self, prox_strength: float = 1.0) -> None:
        super().__init__(prox_strength, distill=False)
