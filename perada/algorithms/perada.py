# SPDX-License-Identifier: Apache-2.0
"""PerAda (Xie et al., CVPR 2024, Algorithm 1), with and without distillation."""

from perada.algorithms.base import Algorithm, ClientStep, Slot, Stacks
from perada.core.checks import check_choice, check_number
from perada.core.states import State


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
    unsent = frozenset({"personal"})

    def __init__(self, prox_strength: float = 1.0, distill: bool = True) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        self.prox_strength = prox_strength
        check_choice("distill", distill, (True, False))
        self.distill = self.distills = distill

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Train what the client kept, and a copy of what it received."""
        return {"personal": kept["personal"], "local": received}

    def client_step(self, step: ClientStep) -> None:
        """Lines 10 and 15, on one minibatch."""
        step.descend("personal", step.loss("personal"), pull=(self.prox_strength, step.received))
        step.descend("local", step.loss("local"))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep v_m, send θ_m."""
        return {"personal": trained["personal"]}, trained["local"]
