# SPDX-License-Identifier: Apache-2.0
"""Mean-regularised multi-task learning (after Smith et al., NeurIPS 2017, as Ditto's authors compare with it)."""

import torch

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Slot, Stacks
from perada.core.checks import check_number
from perada.core.states import State


class MTL(Algorithm):
    """Personal models pulled towards their mean: v_m minimises loss + λ/2 ||v_m − v̄||².

    v̄, the global model, is the mean of the v_m of all M clients. The server updates it by the changes that the clients
    of a round send. This is the mean-regularised form of Evgeniou and Pontil (KDD 2004), with which Ditto's authors
    replace MOCHA where models are not convex (Li et al., ICML 2021).

    Args:
        prox_strength: λ. With 0 the personal models are Standalone's.
    """

    inference = "personal"
    roles = ("personal",)

    def __init__(self, prox_strength: float = 1.0) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """A step on the client's own loss and the pull towards the mean."""
        step.descend("personal", step.loss("personal"), pull=(self.prox_strength, step.received))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep v_m, send v̄ moved by its change."""
        before, after = kept["personal"], trained["personal"]
        moved = {
            key: received[key] + (value - before[key]) if value.is_floating_point() else value
            for key, value in after.items()
        }
        return {"personal": after}, moved

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change, times the clients' share of the federation. Weights do not count."""
        clients = len(server.clients)
        uniform, share = torch.full_like(server.weights, 1 / clients), clients / server.num_clients
        average = server.mean(server.updates, uniform)
        return {
            key: server.previous[key] + share * (value - server.previous[key]) if value.is_floating_point() else value
            for key, value in average.items()
        }
