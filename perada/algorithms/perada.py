# SPDX-License-Identifier: Apache-2.0
"""PerAda (Xie et al., CVPR 2024, Algorithm 1), and Ditto, which is PerAda without distillation."""

from perada.algorithms.base import Algorithm, ClientStep
from perada.core.checks import check_choice, check_number


class PerAda(Algorithm):
    """Personal adapters pulled towards a global one, which is refined by distilling the clients' ensemble.

    ============ ================================================================================================
    personal v_m is trained on loss + λ/2 ||v_m − w||² (line 10) and kept; the client predicts with it
    local θ_m    starts from w each round, is trained on the loss (line 15) and sent to the server
    global w     is the mean of the θ_m (line 18), then distilled from the mean of their logits (line 21)
    ============ ================================================================================================

    Without distillation this is Ditto on the parameters that are trained.

    Args:
        prox_strength: λ, how strongly v_m is pulled towards w.
        distill: Whether the server distils; ``False`` is "PerAda w/o KD".
    """

    inference = "personal"
    roles = ("personal", "local")
    unsent = frozenset({"personal"})

    def __init__(self, prox_strength: float = 1.0, distill: bool = True) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        self.prox_strength = prox_strength
        check_choice("distill", distill, (True, False))
        self.distill = self.distills = distill

    def client_step(self, step: ClientStep) -> None:
        """Lines 10 and 15, on one minibatch."""
        step.descend("personal", step.loss("personal"), pull=(self.prox_strength, step.received))
        step.descend("local", step.loss("local"))


class Ditto(PerAda):
    """Ditto (Li et al., ICML 2021): PerAda without distillation, on whatever the adapter trains (usually ``full``).

    Args:
        prox_strength: λ of the pull λ/2 ||v_m − w||².
    """

    def __init__(self, prox_strength: float = 1.0) -> None:
        super().__init__(prox_strength, distill=False)
