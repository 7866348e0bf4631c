# SPDX-License-Identifier: Apache-2.0
"""FedAvg (McMahan et al., AISTATS 2017), and FedAvg with fine-tuning on every client at the end."""

from perada.algorithms.base import Algorithm
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
