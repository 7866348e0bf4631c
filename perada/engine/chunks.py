# SPDX-License-Identifier: Apache-2.0
"""The number of clients that train at the same time on a processor."""

from torch import nn

from perada.core.states import parameter_keys

CACHE_BYTES = 16 * 2**20
"""Size of weights, gradients and optimiser states of several clients up to which they stay in a processor's caches."""
COPIES_OF_WEIGHTS = 3
"""Numbers stored for each weight: itself, its gradient and its momentum."""


def clients_in_cache(model: nn.Module) -> int | None:
    """Return how many clients' trained weights fit the processor's caches while the clients take their local steps.

    This limits the speed if most of the model is trained: a step reads and writes all weights of each client, and its
    matrix products, one for each client, gain nothing from more clients. If most of the model is frozen, and shared by
    all clients, more clients in a pass are faster.

    Returns:
        The number of clients, at least 1; None for no limit, if most of the model is frozen.
    """
    # parameter_keys leaves out weights that only the server merges into, which are frozen in local training.
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
