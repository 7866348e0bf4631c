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
    """A private part v and a shared part u are trained at once (their Algorithm 3).

    One gradient of the loss moves v at the rate of the personal role and u at that of the local role.

    Args:
        split: What is private: the ``input`` layer (the first that images pass), the ``output`` layer (the head), or
            the ``adapter``. Private adapters need a trained backbone to share (``train_backbone``).
    """

    def __init__(self, split: Split = "output") -> None:
        check_choice("split", split, get_args(Split))
        self.split = split
        self.what = {"input": "the input layer", "output": "the classification head", "adapter": "adapters"}[split]
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
        backbone = set(slot.parameters) - slot.adapter - slot.head - slot.norms
        if self.split == "adapter" and slot.adapter and not backbone:
            raise ValueError(
                f"{type(self).__name__}(split='adapter') shares the backbone, which is frozen; set "
                "train_backbone=True (model.train_backbone), or choose another split"
            )
        super().check(slot, num_clients)

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Both parts, apart."""
        return {"personal": kept["personal"], "local": received}

    def client_step(self, step: ClientStep) -> None:
        """One gradient, one step on each part."""
        step.descend(("personal", "local"), whole_loss(step))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep v, send u."""
        return {"personal": trained["personal"]}, trained["local"]


def whole_loss(step: ClientStep) -> Tensor:
    """Task loss (C,) of the models made of both parts."""
    return step.loss(step.states["personal"] | step.states["local"], stream="local")
