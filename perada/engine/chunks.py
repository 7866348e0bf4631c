# SPDX-License-Identifier: Apache-2.0
"""The number of clients that train at the same time on a processor."""

from torch import nn

from perada.core.states import parameter_keys

CACHE_BYTES = 48 * 2**20
"""Size of states, gradients and optimiser states of several clients that train together.

Fewer clients stay closer to the core, in smaller caches, but take more steps, each with the training loop's own time.
With 600,000 parameters on two cores, 4 to 16 clients (28 to 112 MB) took about as long, and 2 half as long again.
"""
COPIES_WHILE_TRAINED = 2
"""Numbers stored for each weight that is trained, besides itself: its gradient and its momentum."""


def is_mostly_trained(model: nn.Module) -> bool:
    """Return whether most bytes of a model are trained, so that few clients should train at a time on a processor.

    A step then reads and writes all weights of each client, and its matrix products, one for each client, gain nothing
    from more clients. If most of the model is frozen, and shared by all clients, more clients in a pass are faster.
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
    return trained_bytes > frozen_bytes


def clients_in_cache(state_bytes: int, trained_bytes: int) -> int:
    """Return how many clients fit the processor's caches while they take their local steps, at least 1.

    Args:
        state_bytes: Bytes of all states that a client has in a round: of each model, if it trains several.
        trained_bytes: Bytes of the parameters that it trains in the same steps.
    """
    client_bytes = state_bytes + COPIES_WHILE_TRAINED * trained_bytes
    return max(1, CACHE_BYTES // max(1, client_bytes))
