# SPDX-License-Identifier: Apache-2.0
"""LoRA whose server merges into the weights W under it what means of A and B would lose: FedEx-LoRA and FLoRA.

Of s·B·A, B (``up``) and A (``down``) are named in :class:`perada.core.states.Factors`, and s is the scale. Both methods
are exact: after a round of clients m with weights p_m, the global model has W + Σ p_m s·B_m·A_m. W is a part of the
state (:attr:`Algorithm.merges_into_backbone`): the server sends it whole, since a client may take part for the first
time in any round, and the rank of all that was merged grows by that of C clients a round; after out·in / ((out +
in)·C·r) rounds its factors would be larger than W. Clients neither train W nor send it. Running statistics, the head
and whatever else is trained is averaged.
"""

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, ServerStep, Stacks, TensorNames
from perada.algorithms.lora import check_factors
from perada.core.seeding import generator
from perada.core.states import Factors, State, partition
from perada.server.aggregate import double


class _Merging(Algorithm):
    """FedAvg, but for the server's step."""

    merges_into_backbone = True

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without factors, and weights into which a product cannot be merged."""
        name = type(self).__name__
        check_factors(name, tensor_names)
        for pair in tensor_names.factors:
            if pair.base not in tensor_names.merged:
                raise ValueError(
                    f"algorithm {name} cannot merge {pair.up!r} into the weight under it, which must be that of a "
                    "linear layer or of a convolution without groups, and not trained itself; choose adapter='lora' "
                    "without train_backbone, and name other layers in target_modules"
                )

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Send all but W."""
        return {}, partition(trained["local"], tensor_names.merged)[1]


class FedExLoRA(_Merging):
    """Means of A and of B, and W takes what their product lacks (FedEx-LoRA: Singhal et al., ACL 2025).

    Of the round's clients, W ← W + s (mean(B·A) − mean(B)·mean(A)), where means have the aggregation weights; the
    paper's are uniform (arXiv 2410.09432).
    """

    def server_step(self, server: ServerStep) -> State:
        """Average, and merge the residual."""
        state = server.mean(server.updates, server.weights)
        for pair in server.tensor_names.factors:
            up, down = (double(state[key]).flatten(1) for key in (pair.up, pair.down))
            residual = _mean_product(server, pair) - pair.scale * up @ down
            state[pair.base] = _plus(server.previous[pair.base], residual)
        return state


class FLoRA(_Merging):
    """W takes all that clients trained, and new factors begin (FLoRA: Wang et al., NeurIPS 2024, arXiv 2409.05976).

    The stacked factors of the round's clients are merged, W ← W + s Σ p_m B_m·A_m. Then B is zero and A is drawn anew,
    from the seed and the round, uniformly within ±1/√n, n being the inputs of one output of A: as PEFT draws it by
    default. All clients begin with the same A; the paper lets each draw its own.
    """

    def server_step(self, server: ServerStep) -> State:
        """Merge, begin anew, and average the rest."""
        names = {key for pair in server.tensor_names.factors for key in (pair.up, pair.down)}
        others = server.updates.part(range(len(server.clients)), without=names)
        state = server.mean(others, server.weights) if others.names else {}
        for place, pair in enumerate(server.tensor_names.factors):
            state[pair.base] = _plus(server.previous[pair.base], _mean_product(server, pair))
            state[pair.up] = torch.zeros_like(server.previous[pair.up])
            down = server.previous[pair.down]
            random = generator(server.seed, "flora", server.round, place)
            drawn = 2 * torch.rand(down.shape, generator=random, dtype=torch.float64) - 1
            state[pair.down] = torch.empty_like(down).copy_(drawn / down[0].numel() ** 0.5)
        return state


def _mean_product(server: ServerStep, pair: Factors) -> Tensor:
    """The weighted mean of the clients' s·B·A, (out, in), in double precision: one product of stacked factors."""
    up, down = (double(server.updates.own[key]).flatten(2) for key in (pair.up, pair.down))
    weights = server.weights[server.updates.places].to(up).view(-1, 1, 1)
    product = pair.scale * (weights * up).transpose(0, 1).flatten(1) @ down.flatten(0, 1)
    server.updates.ranks.sum_([product])
    return product


def _plus(weight: Tensor, change: Tensor) -> Tensor:
    """A weight (out, in, ...), changed by a matrix (out, in·...)."""
    return (double(weight) + change.view(weight.shape)).to(weight.dtype)
