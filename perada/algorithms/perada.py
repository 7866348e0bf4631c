# SPDX-License-Identifier: Apache-2.0
"""Algorithms in which a client trains a model of its own beside the global one, or pulled towards it."""

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Stacks, TensorNames
from perada.core.checks import check_choice, check_integer, check_number
from perada.core.states import State
from perada.server.aggregate import double_dtype


class PerAda(Algorithm):
    """Personal adapters pulled towards a global one, which is refined by distilling the clients' ensemble.

    ============ ================================================================================================
    personal v_m is trained on loss + λ/2 ||v_m − w||² (line 10) and kept; the client predicts with it
    local θ_m    starts from w each round, is trained on the loss (line 15) and sent to the server
    global w     is the mean of the θ_m (line 18), then distilled from the mean of their logits (line 21)
    ============ ================================================================================================

    Without distillation this is Ditto on the parameters that are trained.

    Args:
        prox_strength: λ, how strongly v_m is pulled towards w.
        distill: Whether the server distils; ``False`` is "PerAda w/o KD".
    """

    inference = "personal"
    roles = ("personal", "local")
    unsent = frozenset({"personal"})

    def __init__(self, prox_strength: float = 1.0, distill: bool = True) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength
        check_choice("distill", distill, (True, False))
        self.distill = self.uses_distillation = distill

    def client_step(self, step: ClientStep) -> None:
        """Lines 10 and 15, on one minibatch."""
        step.descend("personal", step.loss("personal"), pull=(self.prox_strength, step.received))
        step.descend("local", step.loss("local"))


class Ditto(PerAda):
    """Ditto (Li et al., ICML 2021): PerAda without distillation, on whatever the adapter trains (usually ``full``).

    Args:
        prox_strength: λ of the pull λ/2 ||v_m − w||².
    """

    def __init__(self, prox_strength: float = 1.0) -> None:
        super().__init__(prox_strength, distill=False)


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
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """A step on the client's own loss and the pull towards the mean."""
        step.descend("personal", step.loss("personal"), pull=(self.prox_strength, step.received))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep v_m, send v̄ moved by its change."""
        before = client_state["personal"]
        after = trained["personal"]
        moved = {
            key: received[key] + (value - before[key]) if value.is_floating_point() else value
            for key, value in after.items()
        }
        return {"personal": after}, moved

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change, times the clients' share of the federation. Weights do not count."""
        clients = len(server.clients)
        uniform = torch.full_like(server.weights, 1 / clients)
        share = clients / server.num_clients
        average = server.mean(server.updates, uniform)
        return {
            key: server.previous[key] + share * (value - server.previous[key]) if value.is_floating_point() else value
            for key, value in average.items()
        }


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
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        check_integer("inner_steps", inner_steps)
        check_number("beta", beta, gt=0, le=1, hint="it is the share of the clients' mean")
        check_choice("restart", restart, (True, False))
        self.prox_strength = prox_strength
        self.inner_steps = inner_steps
        self.beta = beta
        self.restart = restart

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Both start from what was received."""
        return {"personal": received, "local": received}

    def client_step(self, step: ClientStep) -> None:
        """Solve the inner problem, then move towards its solution."""
        theta = step.states["personal"]
        local = step.states["local"]
        if self.restart:
            step.restart("personal", local)
        for _ in range(self.inner_steps):
            step.descend("personal", step.loss("personal"), pull=(self.prox_strength, local))
        step.descend("local", pull=(self.prox_strength, theta))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep θ, send w_m."""
        parameters = {key: trained["local"][key] for key in tensor_names.parameters}
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


class APFL(Algorithm):
    """Adaptive personalised federated learning: a client mixes a model of its own with the global one.

    w_m is trained by FedAvg. The client's own v_m is trained on the loss of the mixture α v_m + (1 − α) w_m, with both
    as they were before the step (their Algorithm 1). The personal model is the mixture with the client's last w_m.
    Running statistics are not mixed: those of the mixture's passes stay with v_m.

    Args:
        alpha: α of every client at first. With 1 the personal models are Standalone's.
        lr_alpha: Learning rate of α, which each client adapts by its own gradient after every minibatch, between 0 and
            1 (the paper's adaptive variant). 0 keeps it fixed.
    """

    inference = "personal"
    unsent = frozenset({"personal"})

    def __init__(self, alpha: float = 0.5, lr_alpha: float = 0.0) -> None:
        check_number("alpha", alpha, ge=0, le=1, hint="0 is the global model, 1 the client's own")
        check_number("lr_alpha", lr_alpha, ge=0, hint="0 keeps alpha fixed")
        self.alpha = alpha
        self.lr_alpha = lr_alpha

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """v_m, the mixture, and α."""
        example = next(iter(initial.values()))
        alpha = torch.full((), self.alpha, dtype=double_dtype(example.device), device=example.device)
        return {"personal": initial, "mixed": initial, "share": {"alpha": alpha}}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train v_m and w_m. α goes with them."""
        return {"personal": client_state["personal"], "local": received, "share": client_state["share"]}

    def client_step(self, step: ClientStep) -> None:
        """One pass of the mixture and one of w_m."""
        personal = step.states["personal"]
        local = step.states["local"]
        alpha = step.states["share"]["alpha"]
        leaf = alpha.detach().clone().requires_grad_(self.lr_alpha > 0)
        trained = tuple(key for key, value in personal.items() if value.requires_grad)
        step.descend("personal", step.loss(_mixture(personal, local, leaf, trained), stream="personal"))
        if leaf.grad is not None:
            gradient = leaf.grad.nan_to_num(0, 0, 0)  # not finite where the step is skipped for overflow
            alpha.sub_(self.lr_alpha * gradient).clamp_(0, 1)
        step.descend("local", step.loss("local"))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep v_m, α and the mixture; send w_m."""
        mixed = _mixture(trained["personal"], trained["local"], trained["share"]["alpha"], tensor_names.parameters)
        return {"personal": trained["personal"], "mixed": mixed, "share": trained["share"]}, trained["local"]

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """The mixture."""
        return client_state["mixed"]


def _mixture(personal: State, local: State, alpha: Tensor, parameters: tuple[str, ...]) -> State:
    """α own + (1 − α) local for ``parameters``, with α (C,) of each client. The other tensors are the client's own."""
    mixed = dict(personal)
    for key in parameters:
        share = alpha.to(personal[key]).view(-1, *[1] * (personal[key].dim() - 1))
        mixed[key] = share * personal[key] + (1 - share) * local[key].detach()
    return mixed
