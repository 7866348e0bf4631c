# SPDX-License-Identifier: Apache-2.0
"""MOON (Li et al., CVPR 2021): FedAvg whose clients contrast the models' representations of an image."""

import torch
import torch.nn.functional as F

from perada.algorithms.base import Algorithm, ClientStep, Stacks, TensorNames
from perada.core.checks import check_number
from perada.core.states import State


class Moon(Algorithm):
    """Model-contrastive federated learning (their Algorithm 1): loss + μ · ℓ_con, averaged over the images.

    ℓ_con = −log( exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)) ) with the cosine similarity
    sim. z is the representation of an image in the trained model, z_glob that in the received model, and z_prev that in
    the model that the client trained when it last took part, or in the initial model before.

    A representation is the input of the classification head. The paper adds a projection head, which is left out here
    so that networks do not change. The paper leaves open in which mode z_glob and z_prev are computed; here it is
    evaluation mode.

    A local step takes three passes, one of them with gradients. Private training of single images rejects it.
    Source: [Li et al., CVPR 2021](https://arxiv.org/abs/2103.16257).

    Args:
        mu: Weight μ of the contrastive loss. With 0 this is FedAvg.
        tau: Temperature τ, > 0.
    """

    def __init__(self, mu: float = 1.0, tau: float = 0.5) -> None:
        check_number("mu", mu, ge=0, hint="0 does not contrast")
        check_number("tau", tau, gt=0, hint="similarities are divided by it")
        self.mu = mu
        self.tau = tau

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if no head is trained, since representations are then undefined."""
        if not tensor_names.head_module:
            raise ValueError(
                "algorithm Moon contrasts the input of the classification head, but no head is trained; choose an "
                "adapter that trains it, such as adapter='full', or a different algorithm"
            )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the initial model as the previous one."""
        return {"previous": initial}

    def client_step(self, step: ClientStep) -> None:
        """Take a step on loss + μ · ℓ_con."""
        logits, z = step.outputs("local")
        with torch.no_grad():
            _, z_glob = step.outputs(step.received, training=False)
            _, z_prev = step.outputs(step.client_state["previous"], training=False)
        sim_prev = F.cosine_similarity(z, z_prev, dim=-1)
        sim_glob = F.cosine_similarity(z, z_glob, dim=-1)
        # −log(exp a / (exp a + exp b)) is softplus(b − a), which does not overflow.
        difference = sim_prev - sim_glob
        contrast = step.mean(F.softplus(difference / self.tau))
        task_loss = step.loss(logits)
        step.descend("local", task_loss + self.mu * contrast)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the trained model as the previous one, and send it."""
        return {"previous": trained["local"]}, trained["local"]
