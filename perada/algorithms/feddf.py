# SPDX-License-Identifier: Apache-2.0
"""FedDF (Lin et al., NeurIPS 2020)."""

from perada.algorithms.base import Algorithm, ServerStep
from perada.core.states import State


class FedDF(Algorithm):
    """FedAvg whose average is refined by distilling the ensemble of the clients' models on public images.

    Their Algorithm 1, with the average as the student's start and the mean of the clients' logits as its teacher.
    Without distillation steps this is FedAvg.
    """

    distills = True

    def server_step(self, server: ServerStep) -> State:
        """Average, then distil."""
        return server.distill(server.mean(server.updates, server.weights), server.updates)
