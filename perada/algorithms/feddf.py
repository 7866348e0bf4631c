# SPDX-License-Identifier: Apache-2.0
"""FedDF (Lin et al., NeurIPS 2020)."""

from perada.algorithms.base import Algorithm


class FedDF(Algorithm):
    """FedAvg, then the ensemble of the clients' models is distilled into the average on public images.

    Their Algorithm 1: the student starts as the average, and its teacher is the mean of the clients' logits. Without
    distillation steps this is FedAvg.
    """

    distills = True
