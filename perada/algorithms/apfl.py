# SPDX-License-Identifier: Apache-2.0
"""APFL (Deng et al., 2020)."""

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, ClientStep, Slot, Stacks
from perada.core.checks import check_number
from perada.core.states import State
from perada.server.aggregate import double_dtype


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
        check_number("alpha", alpha, least=0, most=1, hint="0 is the global model, 1 the client's own")
        check_number("lr_alpha", lr_alpha, least=0, hint="0 keeps alpha fixed")
        self.alpha, self.lr_alpha = alpha, lr_alpha

    def kept(self, initial: State, slot: Slot) -> Stacks:
        """v_m, the mixture, and α."""
        some = next(iter(initial.values()))
        alpha = torch.full((), self.alpha, dtype=double_dtype(some.device), device=some.device)
        return {"personal": initial, "mixed": initial, "share": {"alpha": alpha}}

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Train v_m and w_m. α goes with them."""
        return {"personal": kept["personal"], "local": received, "share": kept["share"]}

    def client_step(self, step: ClientStep) -> None:
        """One pass of the mixture and one of w_m."""
        own, local, alpha = step.states["personal"], step.states["local"], step.states["share"]["alpha"]
        leaf = alpha.detach().clone().requires_grad_(self.lr_alpha > 0)
        trained = tuple(key for key, value in own.items() if value.requires_grad)
        step.descend("personal", step.loss(_mixture(own, local, leaf, trained), stream="personal"))
        if leaf.grad is not None:
            gradient = leaf.grad.nan_to_num(0, 0, 0)  # not finite where the step is skipped for overflow
            alpha.sub_(self.lr_alpha * gradient).clamp_(0, 1)
        step.descend("local", step.loss("local"))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep v_m, α and the mixture; send w_m."""
        mixed = _mixture(trained["personal"], trained["local"], trained["share"]["alpha"], slot.parameters)
        return {"personal": trained["personal"], "mixed": mixed, "share": trained["share"]}, trained["local"]

    def personal(self, kept: Stacks, global_state: State) -> State:
        """The mixture."""
        return kept["mixed"]


def _mixture(own: State, local: State, alpha: Tensor, parameters: tuple[str, ...]) -> State:
    """α own + (1 − α) local for ``parameters``, with α (C,) of each client. The other tensors are the client's own."""
    mixed = dict(own)
    for key in parameters:
        share = alpha.to(own[key]).view(-1, *[1] * (own[key].dim() - 1))
        mixed[key] = share * own[key] + (1 - share) * local[key].detach()
    return mixed
