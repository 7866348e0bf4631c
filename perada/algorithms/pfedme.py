# SPDX-License-Identifier: Apache-2.0
"""pFedMe (T. Dinh et al., NeurIPS 2020)."""

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Slot, Stacks
from perada.core.checks import check_choice, check_number, check_whole
from perada.core.states import State


class PFedMe(Algorithm):
    """Federated learning of Moreau envelopes (their Algorithm 1).

    For each minibatch a client looks for θ ≈ argmin loss(θ) + λ/2 ||θ − w_m||², by ``inner_steps`` steps at the rate of
    the personal role; then w_m ← w_m − η λ (w_m − θ), with η the rate of the local role. The server takes
    w ← (1 − β) w + β mean(w_m). The last θ is the personal model. There is one copy of the running statistics of norms:
    those of the passes of θ, which also travel with w_m. With η λ of 2 or more, steps of w_m overshoot.

    Algorithm 1 does not say where θ starts on a minibatch. Here, as in the authors' code, it stays where the last
    minibatch left it. Restarted from w_m, K steps at rate η_p leave (1 − η_p λ)^K of the inner problem's gradient: 61 %
    with η_p = 0.01, λ = 15 and K = 3. Kept, 11 % of a constant gradient is left after a few minibatches (η = 0.005).

    Args:
        prox_strength: λ.
        inner_steps: Steps K of the inner problem on each minibatch.
        beta: β; 1 takes the mean.
        restart: Whether θ, and the optimiser of the inner problem, start afresh from w_m on each minibatch.
    """

    inference = "personal"

    def __init__(
        self, prox_strength: float = 15.0, inner_steps: int = 3, beta: float = 1.0, restart: bool = False
    ) -> None:
        check_number("prox_strength", prox_strength, least=0, hint="0 does not pull")
        check_whole("inner_steps", inner_steps)
        check_number("beta", beta, above=0, most=1, hint="the share of the clients' mean")
        check_choice("restart", restart, (True, False))
        self.prox_strength, self.inner_steps, self.beta, self.restart = prox_strength, inner_steps, beta, restart

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Both start from what was received."""
        return {"personal": received, "local": received}

    def client_step(self, step: ClientStep) -> None:
        """Solve the inner problem, then move towards its solution."""
        theta, local = step.states["personal"], step.states["local"]
        if self.restart:
            step.restart("personal", local)
        for _ in range(self.inner_steps):
            step.descend("personal", step.loss("personal"), pull=(self.prox_strength, local))
        step.descend("local", pull=(self.prox_strength, theta))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep θ, send w_m."""
        parameters = {key: trained["local"][key] for key in slot.parameters}
        return {"personal": trained["personal"]}, trained["personal"] | parameters

    def server_step(self, server: ServerStep) -> State:
        """Move towards the mean."""
        average = server.mean(server.updates, server.weights)
        if self.beta == 1:
            return average
        return {
            key: (1 - self.beta) * server.previous[key] + self.beta * value if value.is_floating_point() else value
            for key, value in average.items()
        }
