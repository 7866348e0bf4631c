# SPDX-License-Identifier: Apache-2.0
"""FedProx (Li et al., MLSys 2020)."""

from perada.algorithms.base import Algorithm, ClientStep
from perada.core.checks import check_number


class FedProx(Algorithm):
    """FedAvg whose clients minimise loss + μ/2 ||w_m − w||², where w is what they received (their Equation 2).

    Args:
        prox_strength: μ. With 0 this is FedAvg.
    """

    def __init__(self, prox_strength: float = 0.1) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """A step on the loss and the pull towards the received state."""
        step.descend("local", step.loss("local"), pull=(self.prox_strength, step.received))
