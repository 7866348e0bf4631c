# SPDX-License-Identifier: Apache-2.0
"""What only algorithms with several global models need."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast
from perada.core.states import State, expand


class EnsembleAlgorithm(Algorithm):
    """An algorithm with K global models, whose averaged outputs predict. By itself it is FedAvg, with K = 1.

    Attributes:
        average: What is averaged: ``logits`` or ``probabilities``.
        compares: Whether clients compare the models on their own training images before each round.
        modes: Models that a round's clients are divided among.
    """

    average: Literal["logits", "probabilities"] = "logits"
    compares: bool = False
    modes: int = 1

    def initial(self, make: Callable[[int], State]) -> State:
        """The first global state; ``make(k)`` gives the k-th random initialisation, ``make(0)`` the model's own."""
        return make(0)

    def broadcast(self, sending: Broadcast, losses: Tensor | None = None) -> State:
        """What the server sends to each of C clients, (C, ...).

        ``losses`` (C, K) are the mean loss of each model on each client's training images, where clients compare them.
        """
        return super().broadcast(sending)

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """The models (K, ...)."""
        return expand(global_state, 1)


def ensemble_of(algorithm: Algorithm) -> EnsembleAlgorithm:
    """The algorithm itself or, where it has one global model, what an ensemble of one does.

    A TypeError if it has something that only an :class:`EnsembleAlgorithm` is asked for.
    """
    if isinstance(algorithm, EnsembleAlgorithm):
        return algorithm
    for name in ("average", "compares", "initial", "members", "modes"):
        if hasattr(algorithm, name):
            kind = type(algorithm).__name__
            raise TypeError(
                f"{kind}.{name} would never be used: derive {kind} from perada.algorithms.EnsembleAlgorithm"
            )
    return EnsembleAlgorithm()
