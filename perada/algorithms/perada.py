# SPDX-License-Identifier: Apache-2.0
"""Algorithms in which a client trains a personal model in addition to the global one, or pulled towards it."""

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Stacks, TensorNames, moved_towards
from perada.core.checks import check_choice, check_integer, check_number
from perada.core.rounds import Phase
from perada.core.states import State, device_of, double_dtype, per_client, select


class PerAda(Algorithm):
    """Personal adapters regularised towards a global one, which is refined by distilling the clients' ensemble.

    Xie et al. (CVPR 2024), with the lines of their Algorithm 1:

    ============ ================================================================================================
    personal v_m is trained on loss + λ/2 ||v_m − w||² (line 10) and kept; the client predicts with it
    local θ_m    starts from w each round, is trained on the loss (line 15) and sent to the server
    global w     is the mean of the θ_m (line 18), then distilled from the mean of their logits (line 21)
    ============ ================================================================================================

    Without distillation this is Ditto on the parameters that are trained.

    Source: [Xie et al., CVPR 2024](https://arxiv.org/abs/2302.06637).

    Args:
        prox_strength: Strength λ with which v_m is pulled towards w.
        distill: Whether the server distils; without, this is the paper's "PerAda w/o KD".
    """

    inference = "personal"
    roles = ("personal", "local")
    unsent = frozenset({"personal"})

    def __init__(self, prox_strength: float = 1.0, distill: bool = True) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength
        check_choice("distill", distill, (True, False))
        self.distill = distill
        self.uses_distillation = distill

    @property
    def personal_pull(self) -> float:  # type: ignore[override]  # it follows from the option
        """Strength of the pull of the personal state."""
        return self.prox_strength

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]] | None:
        """Train the personal adapter on loss + λ/2 ||v − w||², without the part that is sent.

        A subclass that overrides the step trains something else, and continues with that.
        """
        if type(self).client_step is not PerAda.client_step:
            return None
        return MTL(self.prox_strength), phases

    def client_step(self, step: ClientStep) -> None:
        """Take a step on v_m (line 10) and one on θ_m (line 15), on the same minibatch."""
        w = step.received
        personal_loss = step.loss("personal")
        step.descend("personal", personal_loss, pull=(self.prox_strength, w))
        local_loss = step.loss("local")
        step.descend("local", local_loss)


class Ditto(PerAda):
    """Ditto (Li et al., ICML 2021): PerAda without distillation, on all trained parameters (usually ``full``).

    Source: [Li et al., ICML 2021](https://arxiv.org/abs/2012.04221).

    Args:
        prox_strength: Strength λ of the pull λ/2 ||v_m − w||².
    """

    def __init__(self, prox_strength: float = 1.0) -> None:
        super().__init__(prox_strength, distill=False)


class MTL(Algorithm):
    """Personal models pulled towards their mean: v_m minimises loss + λ/2 ||v_m − v̄||².

    A client keeps v_m and trains it. The global model v̄ is the mean of the v_m of all M clients: a client sends v̄ plus
    the change of its v_m, and the server moves v̄ by the mean of these changes. This is the mean-regularised multi-task
    learning of Evgeniou and Pontil (KDD 2004), which the authors of Ditto use instead of MOCHA for non-convex models
    (Li et al., ICML 2021).

    Source: [Smith et al., NeurIPS 2017](https://arxiv.org/abs/1705.10467).

    Args:
        prox_strength: Strength λ of the pull. With 0 the personal models are those of standalone training.
    """

    inference = "personal"
    roles = ("personal",)

    def __init__(self, prox_strength: float = 1.0) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        self.prox_strength = prox_strength

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the client's loss and the pull towards v̄."""
        v_mean = step.received
        loss = step.loss("personal")
        step.descend("personal", loss, pull=(self.prox_strength, v_mean))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep v_m; send v̄ plus the change of v_m. Integer counters are those of v_m."""
        v_before = client_state["personal"]
        v_after = trained["personal"]
        moved_mean = {}
        for key, value in v_after.items():
            if value.is_floating_point():
                change = value - v_before[key]
                moved_mean[key] = received[key] + change
            else:
                moved_mean[key] = value
        return {"personal": v_after}, moved_mean

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change of the round's clients, times their share of all M clients."""
        # v̄ is the mean of all v_m with equal weights, whatever the aggregation weights are.
        num_clients = len(server.clients)
        uniform = torch.full_like(server.weights, 1 / num_clients)
        mean_of_round = server.mean(server.updates, uniform)
        # Clients that were not drawn have not changed.
        participation = num_clients / server.num_clients
        return moved_towards(server.previous, mean_of_round, participation)


class PFedMe(Algorithm):
    """Federated learning of Moreau envelopes (T. Dinh et al., NeurIPS 2020, their Algorithm 1).

    1. For each minibatch a client approximates θ ≈ argmin loss(θ) + λ/2 ||θ − w_m||² by ``inner_steps`` steps with the
       learning rate of the personal role.
    2. Then w_m ← w_m − η λ (w_m − θ), where η is the learning rate of the local role. w_m starts from the received w,
       and is sent.
    3. The server sets w ← (1 − β) w + β mean(w_m).

    The last θ is the personal model, which is kept. There is one copy of the running statistics of norms, which the
    passes of θ update and which is sent with w_m. If η λ is 2 or more, the steps of w_m overshoot.

    Algorithm 1 leaves open where θ starts on a minibatch. Here, as in the authors' code, it continues from the last
    minibatch. If it were restarted from w_m, K steps with learning rate η_p would leave (1 − η_p λ)^K of the inner
    problem's gradient: 61 % for η_p = 0.01, λ = 15 and K = 3. Without restarts, 11 % of a constant gradient are left
    after a few minibatches (η = 0.005).

    Source: [T. Dinh et al., NeurIPS 2020](https://arxiv.org/abs/2006.08848).

    Args:
        prox_strength: Strength λ of the pull.
        inner_steps: Number K of steps of the inner problem on each minibatch.
        beta: Share β of the clients' mean in the new global model; with 1 it is the mean.
        restart: Whether θ, and the optimiser of the inner problem, are restarted from w_m on each minibatch.
    """

    inference = "personal"
    mean_is_enough = True

    def __init__(
        self,
        prox_strength: float = 15.0,
        inner_steps: int = 3,
        beta: float = 1.0,
        restart: bool = False,
    ) -> None:
        check_number("prox_strength", prox_strength, ge=0, hint="0 does not pull")
        check_integer("inner_steps", inner_steps)
        check_number("beta", beta, gt=0, le=1, hint="it is the share of the clients' mean")
        check_choice("restart", restart, (True, False))
        self.prox_strength = prox_strength
        self.inner_steps = inner_steps
        self.beta = beta
        self.restart = restart

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]] | None:
        """Train the personal adapter as :meth:`PerAda.joining` does."""
        if type(self).client_step is not PFedMe.client_step:
            return None
        return MTL(self.prox_strength), phases

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Start θ and w_m from the received state."""
        return {"personal": received, "local": received}

    def client_step(self, step: ClientStep) -> None:
        """Take K steps on θ towards the minimum of loss(θ) + λ/2 ||θ − w_m||², then one on w_m towards θ."""
        theta = step.states["personal"]
        w = step.states["local"]
        if self.restart:
            step.restart("personal", w)
        for _ in range(self.inner_steps):
            loss = step.loss("personal")
            step.descend("personal", loss, pull=(self.prox_strength, w))
        # Step 2: the gradient of λ/2 ||w_m − θ||² is λ (w_m − θ).
        step.descend("local", pull=(self.prox_strength, theta))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep θ; send w_m with the running statistics of θ, since w_m has no passes of its own."""
        theta = trained["personal"]
        w = select(trained["local"], tensor_names.parameters)
        update = theta | w
        return {"personal": theta}, update

    def server_step(self, server: ServerStep) -> State:
        """Return (1 − β) w + β mean(w_m). Integer counters are those of the mean."""
        average = server.mean(server.updates, server.weights)
        if self.beta == 1:
            return average
        mixed = {}
        for key, value in average.items():
            if value.is_floating_point():
                mixed[key] = (1 - self.beta) * server.previous[key] + self.beta * value
            else:
                mixed[key] = value
        return mixed


class APFL(Algorithm):
    """Adaptive personalised federated learning: a client mixes a personal model with the global one.

    Deng, Kamani and Mahdavi (2020, arXiv 2003.13461), Algorithm 1. w_m is received, trained as in FedAvg, and sent. v_m
    is kept by the client and trained on the loss of the mixture α v_m + (1 − α) w_m, with both as they were before the
    step. The personal model is the mixture with the client's last w_m. Running statistics are not mixed: the passes of
    the mixture update those of v_m.

    Source: [Deng et al., 2020](https://arxiv.org/abs/2003.13461).

    Args:
        alpha: Initial α of every client. With 1 the personal models are those of standalone training.
        lr_alpha: Learning rate of α, which each client adapts between 0 and 1 by its gradient after every minibatch
            (the paper's adaptive variant). With 0, α is fixed.
    """

    inference = "personal"
    unsent = frozenset({"personal"})

    def __init__(self, alpha: float = 0.5, lr_alpha: float = 0.0) -> None:
        check_number("alpha", alpha, ge=0, le=1, hint="0 is the global model, 1 the personal one")
        check_number("lr_alpha", lr_alpha, ge=0, hint="0 keeps alpha fixed")
        self.alpha = alpha
        self.lr_alpha = lr_alpha

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep v_m, the mixture, and α."""
        device = device_of(initial)
        alpha = torch.full((), self.alpha, dtype=double_dtype(device), device=device)
        return {"personal": initial, "mixed": initial, "share": {"alpha": alpha}}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train v_m and w_m. α is included, since it is adapted after every step."""
        return {"personal": client_state["personal"], "local": received, "share": client_state["share"]}

    def client_step(self, step: ClientStep) -> None:
        """Take a step on v_m and α from the loss of the mixture, and one on w_m from its own."""
        v = step.states["personal"]
        w = step.states["local"]
        alpha = step.states["share"]["alpha"]
        # A copy whose gradient is computed in the same backward pass as that of v_m.
        alpha_leaf = alpha.detach().clone().requires_grad_(self.lr_alpha > 0)
        trained_names = tuple(key for key, value in v.items() if value.requires_grad)
        mixture = _mix_stacks(v, w, alpha_leaf, trained_names)
        mixture_loss = step.loss(mixture, stream="personal")
        step.descend("personal", mixture_loss)
        if alpha_leaf.grad is not None:
            # In float16 it is not finite for a client whose step is skipped because of overflow.
            gradient = alpha_leaf.grad.nan_to_num(0, 0, 0)
            alpha.sub_(self.lr_alpha * gradient).clamp_(0, 1)
        local_loss = step.loss("local")
        step.descend("local", local_loss)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep v_m, α and the mixture; send w_m."""
        v = trained["personal"]
        w = trained["local"]
        mixture = _mix_stacks(v, w, trained["share"]["alpha"], tensor_names.parameters)
        return {"personal": v, "mixed": mixture, "share": trained["share"]}, w

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with the mixture."""
        return client_state["mixed"]


def _mix_stacks(v: State, w: State, alpha: Tensor, parameters: tuple[str, ...]) -> State:
    """Mix the parameters of two stacks.

    Args:
        v: Personal states v_m (C, ...).
        w: States w_m (C, ...), to which no gradient flows.
        alpha: α (C,) of each client.
        parameters: Names of the tensors to mix; the others are those of v_m.

    Returns:
        α v_m + (1 − α) w_m, (C, ...).
    """
    mixed = dict(v)
    for key in parameters:
        share = per_client(alpha.to(v[key]), v[key])
        mixed[key] = share * v[key] + (1 - share) * w[key].detach()
    return mixed
