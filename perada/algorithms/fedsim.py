# SPDX-License-Identifier: Apache-2.0
"""FedSim (Pillutla et al., ICML 2022)."""

from typing import Literal, get_args

from torch import Tensor

from perada.algorithms.base import ClientStep, Slot, Stacks
from perada.algorithms.sharing import PartialSharing
from perada.core.checks import check_choice
from perada.core.states import State

Split = Literal["input", "output", "adapter"]


class FedSim(PartialSharing):
    """FedSim (Pillutla et al., ICML 2022, Algorithm 3): private part v and shared part u are trained at once.

    One gradient of the loss moves v at the rate of the personal role and u at that of the local role.

    Args:
        split: What is private: the ``input`` layer (the first that images pass), the ``output`` layer (the head), or
            the ``adapter``, in which case the backbone must be trained (``train_backbone``) for there to be something
            to share.

    Raises:
        ValueError: If ``split`` is unknown.
    """

    def __init__(self, split: Split = "output") -> None:
        check_choice("split", split, get_args(Split))
        self.split = split
        if split == "adapter":
            self.remedy = "choose an adapter that adds layers (residual, bottleneck, lora) and train_backbone=True"

    @property
    def kind(self) -> str:
        """The class and the split."""
        return f"{type(self).__name__} with the {self.split} split"

    def private(self, slot: Slot) -> frozenset[str]:
        """The chosen part."""
        return {"input": slot.input, "output": slot.head, "adapter": slot.adapter}[self.split]

    def check(self, slot: Slot, num_clients: int) -> None:
        """Refuse to share a backbone that is frozen."""
        if (
            self.split == "adapter"
            and slot.adapter
            and not set(slot.parameters) - slot.adapter - slot.head - slot.norms
        ):
            raise ValueError(
                f"{type(self).__name__}(split='adapter') shares the backbone, which is frozen; set "
                "train_backbone=True (model.train_backbone), or choose another split"
            )
        super().check(slot, num_clients)

    def _what(self) -> str:
        return {"input": "the input layer", "output": "the classification head", "adapter": "adapters"}[self.split]

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Both parts, apart."""
        return {"personal": kept["personal"], "local": received}

    def client_step(self, step: ClientStep) -> None:
        """One gradient, a step on both parts."""
        step.descend(("personal", "local"), whole_loss(step))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep v, send u."""
        return {"personal": trained["personal"]}, trained["local"]


def whole_loss(step: ClientStep) -> Tensor:
    """Loss (C,) of the models made of both parts."""
    return step.loss(step.states["personal"] | step.states["local"], stream="local")
