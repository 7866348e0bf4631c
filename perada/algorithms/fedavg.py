# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al., AISTATS 2017), and three algorithms that add one thing to it."""

from perada.algorithms.base import Algorithm, ClientStep
from perada.algorithms.standalone import Standalone
from perada.core.checks import check_number
from perada.core.rounds import Phase


class FedAvg(Algorithm):
    """Clients train the received global state; the server averages the results. Clients keep nothing."""


class FedAvgFT(Algorithm):
    """FedAvg+FT: after the last round of FedAvg, every client fine-tunes the global state and keeps the result.

    Args:
        finetune_epochs: Epochs of that fine-tuning, above 0.
    """

    def __init__(self, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, above=0, hint="FedAvg does without")
        self.finetune_epochs = finetune_epochs

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Standalone training that starts from the global state."""
        return Standalone(), Phase("personalize", self.finetune_epochs)


class FedProx(Algorithm):
    """FedAvg whose clients minimise loss + μ/2 ||w_m − w||², with w as received (Li et al., MLSys 2020, Equation 2).

    Args:
        prox_strength: μ. With 0 this is FedAvg.
    """

    def __init__(self, prox_strength: float = 0.1) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """A step on the loss and the pull towards the received state."""
        step.descend("local", step.loss("local"), pull=(self.prox_strength, step.received))


class FedDF(Algorithm):
    """FedAvg, then the ensemble of the clients' models is distilled into the average on public images.

    Lin et al. (NeurIPS 2020), Algorithm 1: the student starts as the average, and its teacher is the mean of the
    clients' logits. Without distillation steps this is FedAvg.
    """

    distills = True
