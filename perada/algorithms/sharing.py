# SPDX-License-Identifier: Apache-2.0
"""Algorithms whose clients share some tensors and keep the others."""

from abc import ABC, abstractmethod
from typing import Literal, get_args

from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, Stacks, TensorNames
from perada.core.checks import check_choice, check_number
from perada.core.rounds import Phase
from perada.core.states import State, expand, partition

Split = Literal["input", "output", "adapter", "branch"]


class PartialSharing(Algorithm, ABC):
    """Clients keep some tensors and share the others; both are trained together, as in FedAvg.

    A subclass says which tensors are private.

    Attributes:
        what: What is private, in words.
        remedy: What to do where there is nothing to keep or nothing to share.
    """

    inference = "personal"
    global_model = False
    what: str = "their private part"
    remedy: str = "train more (adapter='full'), or choose another algorithm"

    @abstractmethod
    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Names of what stays on the client."""

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse a split that leaves nothing to keep or nothing to share."""
        private = self.private(tensor_names)
        for verb, part in (("keep", private), ("send", set(tensor_names.parameters) - private)):
            if not part:
                raise ValueError(
                    f"algorithm {type(self).__name__} has nothing to {verb}: clients keep {self.what} and share all "
                    f"else, but what is trained are {tensor_names.parameter_range}; {self.remedy}"
                )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """The private part of the initial state."""
        return {"personal": partition(initial, self.private(tensor_names))[0]}

    def broadcast(self, sending: Broadcast) -> State:
        """The shared part."""
        return expand(partition(sending.global_state, self.private(sending.tensor_names))[1], len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The whole model, made of both parts."""
        return {"local": received | client_state["personal"]}

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep one part, send the other."""
        private, shared = partition(trained["local"], self.private(tensor_names))
        return {"personal": private}, shared

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """The newest shared part with the client's own."""
        own_part = client_state["personal"]
        return expand(global_state, len(next(iter(own_part.values())))) | own_part


class FedBN(PartialSharing):
    """Normalisation layers stay on the client, with their statistics (Li et al., ICLR 2021, Algorithm 1)."""

    what = "normalisation layers"
    remedy = "train layers with normalisation (adapter='full' or 'bias_norm', on a backbone that has any)"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """The norms."""
        return tensor_names.norms


class LGFedAvg(PartialSharing):
    """The feature extractor stays on the client, the head is shared (Liang et al., 2020, Algorithm 1)."""

    what = "all layers but the classification head"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """All but the head."""
        return frozenset(tensor_names.keys) - tensor_names.head


class FedSim(PartialSharing):
    """A private part v and a shared part u are trained at once (Pillutla et al., ICML 2022, Algorithm 3).

    One gradient of the loss moves v at the rate of the personal role and u at that of the local role.

    Args:
        split: What is private: the ``input`` layer (the first that images pass), the ``output`` layer (the head), the
            ``adapter``, or the private ``branch`` of the adapter ``dual_lora``. Private adapters need a trained
            backbone to share (``train_backbone``).
    """

    def __init__(self, split: Split = "output") -> None:
        check_choice("split", split, get_args(Split))
        self.split = split
        self.what = {
            "input": "the input layer",
            "output": "the classification head",
            "adapter": "adapters",
            "branch": "the private branch",
        }[split]
        if split == "branch":
            self.remedy = "choose adapter='dual_lora', or another split"
        if split == "adapter":
            self.remedy = "choose an adapter that adds layers (residual, bottleneck, lora) and train_backbone=True"

    @property
    def kind(self) -> str:
        """The class and the split."""
        return f"{type(self).__name__} with the {self.split} split"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """The chosen part."""
        return {
            "input": tensor_names.input,
            "output": tensor_names.head,
            "adapter": tensor_names.adapter,
            "branch": tensor_names.private,
        }[self.split]

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse to share a backbone that is frozen."""
        backbone = set(tensor_names.parameters) - tensor_names.adapter - tensor_names.head - tensor_names.norms
        if self.split == "adapter" and tensor_names.adapter and not backbone:
            raise ValueError(
                f"{type(self).__name__}(split='adapter') shares the backbone, which is frozen; set "
                "train_backbone=True (model.train_backbone), or choose another split"
            )
        super().check(tensor_names, num_clients)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Both parts, apart."""
        return {"personal": client_state["personal"], "local": received}

    def client_step(self, step: ClientStep) -> None:
        """One gradient, one step on each part."""
        step.descend(("personal", "local"), whole_loss(step))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep v, send u."""
        return {"personal": trained["personal"]}, trained["local"]


def whole_loss(step: ClientStep) -> Tensor:
    """Task loss (C,) of the models made of both parts."""
    return step.loss(step.states["personal"] | step.states["local"], stream="local")


class FedPer(FedSim):
    """Private heads on a shared body, trained together (Arivazhagan et al., 2019): FedSim with the output split.

    The paper trains both at one rate. Here the head has that of the personal role, as in FedRep.
    """

    def __init__(self) -> None:
        super().__init__("output")


class FedAlt(FedSim):
    """v is trained with u frozen, then u with v frozen (Pillutla et al., ICML 2022, Algorithm 2).

    v is trained at the rate of the personal role, u at that of the local role. Running statistics of norms follow every
    training pass.

    Args:
        split: What is private, as in :class:`FedSim`.
        personal_epochs: Epochs on v in each round. Default: as long as on u; 0 leaves v as it is.
    """

    def __init__(self, split: Split = "output", personal_epochs: float | None = None) -> None:
        super().__init__(split)
        check_number("personal_epochs", personal_epochs, ge=0, optional=True)
        self.personal_epochs = personal_epochs

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """First v, then u."""
        own = self.personal_epochs
        second = Phase("local", epochs, steps)
        if own == 0:
            return (second,)
        return (Phase("personal", epochs, steps) if own is None else Phase("personal", own), second)

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Each phase trains the role it is named after."""
        return tensor_names.parameters if role == phase else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the part whose turn it is."""
        step.descend(step.phase, whole_loss(step))


class FedRep(FedAlt):
    """Private heads on a shared body (Collins et al., ICML 2021, Algorithm 1): FedAlt with the output split.

    In each round a client trains its head with the body frozen, then the body with the head frozen. The server
    averages the bodies.

    Args:
        head_epochs: Epochs on the head in each round. Default: as long as on the body. With 0 this is FedAvg of the
            body under each client's initial head.
    """

    def __init__(self, head_epochs: float | None = None) -> None:
        check_number("head_epochs", head_epochs, ge=0, optional=True)
        super().__init__("output", head_epochs)
        self.head_epochs = head_epochs
