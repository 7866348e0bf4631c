# SPDX-License-Identifier: Apache-2.0
"""FedBE (Chen and Chao, ICLR 2021)."""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, ServerStep
from perada.core.checks import check_choice, check_number, check_whole
from perada.core.seeding import generator
from perada.core.states import State, expand
from perada.server import mean

Sampler = Literal["gaussian", "dirichlet"]


class FedBE(Algorithm):
    """FedAvg with a Bayesian ensemble at the server: extra models are drawn from a fit to the clients' models.

    The ensemble of the drawn models, the clients' models and their mean is distilled into the mean on public images
    (their Algorithm 1; as everywhere in perada, the teachers' logits are averaged). The result is the average of the
    student's states along the way (stochastic weight averaging). All drawn models are in memory at once. Without
    distillation, every checkpoint holds the whole ensemble.

    Args:
        sampler: ``gaussian`` draws from N(mean, diagonal of the variances) of the clients' models, ``dirichlet`` draws
            convex combinations of them (both in their Section 3).
        samples: Number of models drawn each round.
        distill: ``False`` lets the ensemble itself predict, by the mean of its probabilities.
        average_from: Share of the distillation steps after which the student's states are averaged. 1 takes the last.
    """

    def __init__(
        self, sampler: Sampler = "gaussian", samples: int = 10, distill: bool = True, average_from: float = 0.5
    ) -> None:
        check_choice("sampler", sampler, get_args(Sampler))
        check_whole("samples", samples, 0)
        check_choice("distill", distill, (True, False))
        check_number("average_from", average_from, least=0, most=1, hint="the share of the steps that are left out")
        self.sampler, self.samples, self.distill, self.average_from = sampler, samples, distill, average_from
        self.distills = distill
        self.average = "logits" if distill else "probabilities"

    def server_step(self, server: ServerStep) -> State:
        """Average, draw, and distil or remember the ensemble."""
        average = server.mean(server.updates, server.weights)
        random = generator(server.seed, "fedbe", server.round)
        drawn = sample_models(server.updates, server.weights, self.sampler, self.samples, random)
        whole = expand(average, 1)
        teachers = {key: torch.cat([drawn[key], value, whole[key]]) for key, value in server.updates.items()}
        if self.distills:
            return server.distill(average, teachers, self.average_from)
        server.state["members"] = teachers
        return average

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """The ensemble of the last round where it is not distilled, else the global model."""
        return server_state.get("members", super().members(global_state, server_state))

    @property
    def kind(self) -> str:
        """The class, and whether the ensemble is distilled."""
        return f"{type(self).__name__} {'with' if self.distill else 'without'} distillation"


def sample_models(
    updates: Mapping[str, Tensor], weights: Tensor, sampler: Sampler, samples: int, random: torch.Generator
) -> State:
    """Draw S models (S, ...) from a distribution fitted to those of C clients, a stack (C, ...).

    The weights (C,) are those of the Gaussian's mean and variances. The Dirichlet distribution is Dir(1, ..., 1).
    Counters are the clients' maximum. The Gaussian's running variances, which must not be negative, are the clients'
    mean.
    """
    center = mean(updates, weights)
    # Normalised exponential variables are distributed as Dir(1, ..., 1).
    shares = torch.empty(samples, len(weights), dtype=torch.float64).exponential_(generator=random)
    shares /= shares.sum(1, keepdim=True)
    drawn = {}
    for key, value in updates.items():
        if not value.is_floating_point() or (sampler == "gaussian" and key.endswith("running_var")):
            drawn[key] = center[key].unsqueeze(0).expand(samples, *center[key].shape)
        elif sampler == "dirichlet":
            drawn[key] = (shares.to(value).view(samples, len(weights), *[1] * (value.dim() - 1)) * value).sum(1)
        else:
            spread = mean({key: (value - center[key]).square()}, weights)[key].sqrt()
            noise = torch.randn(samples, *spread.shape, dtype=value.dtype, generator=random)
            drawn[key] = center[key] + spread * noise.to(value.device)
    return drawn
