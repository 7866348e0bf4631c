# SPDX-License-Identifier: Apache-2.0
"""LoRA whose server merges what averaging A and B would lose into the weights W: FedEx-LoRA and FLoRA.

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
from perada.algorithms.lora import check_model_factors
from perada.core.seeding import generator
from perada.core.states import Factors, State, double, without


class _Merging(Algorithm):
    """FedAvg whose state includes the weights W under LoRA, which no client trains. Clients keep nothing."""

    merges_into_backbone = True

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no LoRA factors, or if a product cannot be merged into its weight."""
        name = type(self).__name__
        check_model_factors(name, tensor_names)
        for pair in tensor_names.factors:
            if pair.base not in tensor_names.merged:
                raise ValueError(
                    f"algorithm {name} cannot merge {pair.up!r} into the weight under it, which must belong to a "
                    "linear layer or a convolution without groups, and must not be trained; choose adapter='lora' "
                    "without train_backbone, and name other layers in target_modules"
                )

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing; send all tensors but W."""
        update = without(trained["local"], tensor_names.merged)
        return {}, update


class FedExLoRA(_Merging):
    """Average A and B, and add the residual of their product to W (FedEx-LoRA: Singhal et al., ACL 2025).

    W ← W + s (mean(B·A) − mean(B)·mean(A)), where the means are over the clients of the round with their aggregation
    weights; those of the paper are uniform (arXiv 2410.09432).

    The server sends the corrected weights W, not the factors of the correction, since a client may first take part
    in any round. Source: [Singhal et al., ACL 2025](https://arxiv.org/abs/2410.09432).
    """

    def server_step(self, server: ServerStep) -> State:
        """Average A and B, and add the residual s (mean(B·A) − mean(B)·mean(A)) to W."""
        state = server.mean(server.updates, server.weights)
        for pair in server.tensor_names.factors:
            mean_up = double(state[pair.up]).flatten(1)
            mean_down = double(state[pair.down]).flatten(1)
            product_of_means = pair.scale * mean_up @ mean_down
            residual = _mean_product(server, pair) - product_of_means
            state[pair.base] = _add_to_weight(server.previous[pair.base], residual)
        return state


class FLoRA(_Merging):
    """Merge the clients' products into W and reinitialise the factors (FLoRA: Wang et al., NeurIPS 2024).

    W ← W + s Σ p_m B_m·A_m over the clients of the round (arXiv 2409.05976). Then B is set to zero, and A is drawn from
    the uniform distribution within ±1/√n, where n is the number of inputs of an output of A, like PEFT's default. It is
    derived from the seed and the round, so all clients start from the same A; in the paper each draws its own.

    The server sends the merged weights W, since a client may first take part in any round. Source: [Wang et al.,
    NeurIPS 2024](https://arxiv.org/abs/2409.05976).
    """

    def server_step(self, server: ServerStep) -> State:
        """Add s Σ p_m B_m·A_m to W, reinitialise the factors, and average all other tensors."""
        factor_names = set[str]()
        for pair in server.tensor_names.factors:
            factor_names.add(pair.up)
            factor_names.add(pair.down)
        all_clients = range(len(server.clients))
        others = server.updates.part(all_clients, without=factor_names)
        state: State = {}
        if others.names:
            state = server.mean(others, server.weights)
        for layer, pair in enumerate(server.tensor_names.factors):
            mean_product = _mean_product(server, pair)
            state[pair.base] = _add_to_weight(server.previous[pair.base], mean_product)
            state[pair.up] = torch.zeros_like(server.previous[pair.up])

            previous_down = server.previous[pair.down]
            # The numbers are drawn on the CPU and in double precision, so that they are the same for all devices and
            # dtypes.
            random = generator(server.seed, "flora", server.round, layer)
            from_zero_to_one = torch.rand(previous_down.shape, generator=random, dtype=torch.float64)
            from_minus_one_to_one = 2 * from_zero_to_one - 1
            num_inputs = previous_down[0].numel()
            new_down = torch.empty_like(previous_down)
            new_down.copy_(from_minus_one_to_one / num_inputs**0.5)
            state[pair.down] = new_down
        return state


def _mean_product(server: ServerStep, pair: Factors) -> Tensor:
    """Compute the weighted mean (out, in) of the clients' products s·B·A, in double precision. A collective.

    It is one product of concatenated factors: all p_m B_m next to one another, (out, C·r), times all A_m below one
    another, (C·r, in).
    """
    updates = server.updates
    up = double(updates.local_rows[pair.up]).flatten(2)  # (c, out, r) of this rank's clients
    down = double(updates.local_rows[pair.down]).flatten(2)  # (c, r, in)
    weights = server.weights[updates.places].to(up).view(-1, 1, 1)
    weighted_up = weights * up
    up_side_by_side = weighted_up.transpose(0, 1).flatten(1)  # (out, c·r)
    down_below_each_other = down.flatten(0, 1)  # (c·r, in)
    product = pair.scale * up_side_by_side @ down_below_each_other
    updates.ranks.sum_([product])
    return product


def _add_to_weight(weight: Tensor, change: Tensor) -> Tensor:
    """Add a matrix (out, in·...) to a weight (out, in, ...), in double precision."""
    total = double(weight) + change.view(weight.shape)
    return total.to(weight.dtype)
