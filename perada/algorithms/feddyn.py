# SPDX-License-Identifier: Apache-2.0
"""FedDyn (Acar et al., ICLR 2021)."""

import torch

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Slot, Stacks
from perada.core.checks import check_number
from perada.core.states import State


class FedDyn(Algorithm):
    """FedAvg with a dynamic regulariser that makes the clients' optima agree with the server's (their Algorithm 1).

    A client minimises loss − <h_m, w_m> + α/2 ||w_m − w||², then takes h_m ← h_m − α (w_m − w). The server takes
    h ← h − α/M Σ (w_m − w) over the round's clients, then w ← mean(w_m) − h/α. Running statistics of norms are
    averaged.

    Args:
        alpha: α, above 0.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        check_number("alpha", alpha, above=0, hint="the server divides by it")
        self.alpha = alpha

    def kept(self, initial: State, slot: Slot) -> Stacks:
        """h_m, zero at first."""
        return {"gradient": {key: torch.zeros_like(initial[key]) for key in slot.parameters}}

    def client_step(self, step: ClientStep) -> None:
        """A step on the regularised loss."""
        slope = {key: -value for key, value in step.kept["gradient"].items()}
        step.descend("local", step.loss("local"), pull=(self.alpha, step.received), slope=slope)

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Update h_m, send w_m."""
        local = trained["local"]
        gradient = {key: h - self.alpha * (local[key] - received[key]) for key, h in kept["gradient"].items()}
        return {"gradient": gradient}, local

    def server_step(self, server: ServerStep) -> State:
        """Update h, and correct the mean by it."""
        average, alpha = server.mean(server.updates, server.weights), self.alpha
        before = server.state.get("gradient", {})
        gradient = {}
        for key in server.slot.parameters:
            moved = (server.updates[key] - server.previous[key]).sum(0)
            gradient[key] = before.get(key, torch.zeros_like(moved)) - alpha / server.num_clients * moved
        server.state["gradient"] = gradient
        return average | {key: average[key] - h / alpha for key, h in gradient.items()}
