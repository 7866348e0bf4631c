# SPDX-License-Identifier: Apache-2.0
"""How many clients train at the same time on a processor."""

from torch import nn

from perada.core.states import parameter_keys

CACHE_BYTES = 16 * 2**20
"""Weights, gradients and optimiser states that clients may have together, if they are to stay in the caches."""
COPIES_OF_WEIGHTS = 3
"""A weight, its gradient and its momentum."""


def clients_in_cache(model: nn.Module) -> int | None:
    """Return how many clients' trained weights fit the processor's caches while they take their local steps.

    It matters where most of the model is trained: a step then reads and writes all weights of each client, and its
    products of matrices, one for each client, gain nothing from more clients. After a frozen backbone, whose weights
    serve all clients, more clients in a pass are faster.

    Returns:
        At least 1; None, for any number, if most of the model is frozen.
    """
    # Without weights that only the server merges into: they are frozen in local training.
    trained = set(parameter_keys(model))
    trained_bytes = 0
    frozen_bytes = 0
    for name, parameter in model.named_parameters():
        if name in trained:
            trained_bytes += parameter.nbytes
        else:
            frozen_bytes += parameter.nbytes
    if trained_bytes <= frozen_bytes:
        return None
    return max(1, CACHE_BYTES // (COPIES_OF_WEIGHTS * trained_bytes))
