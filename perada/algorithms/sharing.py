# SPDX-License-Identifier: Apache-2.0
"""Algorithms whose clients share some tensors and keep the others."""

from abc import ABC, abstractmethod
from typing import Literal, get_args

from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, Stacks, TensorNames
from perada.algorithms.newcomers import Joining
from perada.core.checks import check_choice, check_number
from perada.core.rounds import Phase
from perada.core.states import State, expand, select, stack_size, without

Split = Literal["input", "output", "adapter", "branch"]


class PartialSharing(Algorithm, ABC):
    """Base class of algorithms whose clients keep some tensors and share the others; all are trained as in FedAvg.

    A subclass chooses the private tensors, which are kept. The others are received, sent and averaged.

    Attributes:
        what: Description of the private tensors, for messages.
        remedy: Remedy if there is nothing to keep or nothing to share, for messages.
    """

    inference = "personal"
    global_model = False
    what: str = "their private part"
    remedy: str = "train more (adapter='full'), or choose a different algorithm"

    @abstractmethod
    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return the names of the tensors that stay on the client."""

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]]:
        """Train the private part only.

        FedAlt and FedRep have a phase for the private part. Others have one phase for both.
        """
        private_phases = tuple(phase for phase in phases if phase.name == "personal")
        return JoiningPrivatePart(self), private_phases or phases[:1]

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if there is nothing to keep or nothing to share."""
        private = self.private(tensor_names)
        shared_parameters = set(tensor_names.parameters) - private
        if not private:
            verb = "keep"
        elif not shared_parameters:
            verb = "send"
        else:
            return
        raise ValueError(
            f"algorithm {type(self).__name__} has nothing to {verb}: clients keep {self.what} and share all else, but "
            f"the trained parameters are {tensor_names.parameter_range}; {self.remedy}"
        )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the private part of the initial state."""
        private = select(initial, self.private(tensor_names))
        return {"personal": private}

    def broadcast(self, sending: Broadcast) -> State:
        """Send the shared part."""
        shared = without(sending.global_state, self.private(sending.tensor_names))
        return expand(shared, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the complete model, which consists of both parts."""
        return {"local": received | client_state["personal"]}

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the private part; send the shared one."""
        private_names = self.private(tensor_names)
        private = select(trained["local"], private_names)
        shared = without(trained["local"], private_names)
        return {"personal": private}, shared

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with the newest shared part and the client's private one."""
        private = client_state["personal"]
        return expand(global_state, stack_size(private)) | private


class FedBN(PartialSharing):
    """Normalisation layers stay on the client, with their statistics (Li et al., ICLR 2021, Algorithm 1).

    Source: [Li et al., ICLR 2021](https://arxiv.org/abs/2102.07623).
    """

    what = "normalisation layers"
    remedy = "train layers with normalisation (adapter='full' or 'bias_norm', on a backbone that has any)"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return the names of the norms."""
        return tensor_names.norms


class LGFedAvg(PartialSharing):
    """The feature extractor stays on the client, the head is shared (Liang et al., 2020, Algorithm 1).

    Source: [Liang et al., 2020](https://arxiv.org/abs/2001.01523).
    """

    what = "all layers but the classification head"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return all names but those of the head."""
        return frozenset(tensor_names.keys) - tensor_names.head


class FedSim(PartialSharing):
    """A private part v and a shared part u are trained together (Pillutla et al., ICML 2022, Algorithm 3).

    Each step uses one gradient for both, with the learning rate of the personal role for v and that of the local role
    for u.

    The input layer is the first convolution or linear layer of the network. Source: [Pillutla et al., ICML
    2022](https://arxiv.org/abs/2204.03809).

    Args:
        split: Which part is private: the ``input`` layer (the first one), the ``output`` layer (the head), the
            ``adapter``, or the private ``branch`` of the adapter ``dual_lora``. With private adapters the backbone is
            shared, and must be trained (``train_backbone``).
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
            self.remedy = "choose adapter='dual_lora', or a different split"
        if split == "adapter":
            self.remedy = "choose an adapter that adds layers (residual, bottleneck, lora) and train_backbone=True"

    @property
    def kind(self) -> str:
        """Name of the class, with the split."""
        return f"{type(self).__name__} with the {self.split} split"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return the names of the tensors in the part of the split."""
        return {
            "input": tensor_names.input,
            "output": tensor_names.head,
            "adapter": tensor_names.adapter,
            "branch": tensor_names.private,
        }[self.split]

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the backbone is frozen although it would be shared."""
        backbone = set(tensor_names.parameters) - tensor_names.adapter - tensor_names.head - tensor_names.norms
        if self.split == "adapter" and tensor_names.adapter and not backbone:
            raise ValueError(
                f"{type(self).__name__}(split='adapter') shares the backbone, which is frozen; set "
                "train_backbone=True (model.train_backbone), or choose a different split"
            )
        super().check(tensor_names, num_clients)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train v and u as two roles, so that each has its own learning rate."""
        return {"personal": client_state["personal"], "local": received}

    def client_step(self, step: ClientStep) -> None:
        """Take one step on both parts, from one backward pass."""
        step.descend(("personal", "local"), loss_of_both_parts(step))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep v; send u."""
        return {"personal": trained["personal"]}, trained["local"]


def loss_of_both_parts(step: ClientStep) -> Tensor:
    """Compute the task loss (C,) of the complete models, which consist of v and u."""
    return step.loss(step.states["personal"] | step.states["local"], stream="local")


class FedPer(FedSim):
    """Private heads on a shared body, trained together (Arivazhagan et al., 2019): FedSim with the output split.

    In the paper both have the same learning rate. Here the head has that of the personal role, as in FedRep.

    In the paper further blocks may be private. Source: [Arivazhagan et al.,
    2019](https://arxiv.org/abs/1912.00818).
    """

    def __init__(self) -> None:
        super().__init__("output")


class FedAlt(FedSim):
    """v is trained with u frozen, then u with v frozen (Pillutla et al., ICML 2022, Algorithm 2).

    v is trained with the learning rate of the personal role and u with that of the local role. Running statistics of
    norms are updated in every training pass.

    By default both phases take all local epochs or steps; ``perada compare`` divides them. Source: [Pillutla et
    al., ICML 2022](https://arxiv.org/abs/2204.03809).

    Args:
        split: Which part is private, as in :class:`FedSim`.
        personal_epochs: Number of epochs on v in each round. Default: as many as on u; with 0, v is not trained.
    """

    def __init__(self, split: Split = "output", personal_epochs: float | None = None) -> None:
        super().__init__(split)
        check_number("personal_epochs", personal_epochs, ge=0, optional=True)
        self.personal_epochs = personal_epochs

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Return a phase for v, followed by one for u."""
        phase_of_u = Phase("local", epochs, steps)
        if self.personal_epochs == 0:
            return (phase_of_u,)
        if self.personal_epochs is None:
            phase_of_v = Phase("personal", epochs, steps)
        else:
            phase_of_v = Phase("personal", self.personal_epochs)
        return (phase_of_v, phase_of_u)

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train in each phase the role with its name."""
        if role == phase:
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the role with the name of the phase."""
        step.descend(step.phase, loss_of_both_parts(step))


class FedRep(FedAlt):
    """Private heads on a shared body (Collins et al., ICML 2021, Algorithm 1): FedAlt with the output split.

    In each round a client trains its head with the body frozen, then the body with the head frozen. The server
    averages the bodies.

    Source: [Collins et al., ICML 2021](https://arxiv.org/abs/2102.07078).

    Args:
        head_epochs: Number of epochs on the head in each round. Default: as many as on the body. With 0 this is FedAvg
            of the body with each client's initial head.
    """

    def __init__(self, head_epochs: float | None = None) -> None:
        check_number("head_epochs", head_epochs, ge=0, optional=True)
        super().__init__("output", head_epochs)
        self.head_epochs = head_epochs


class JoiningPrivatePart(Joining):
    """Training of the private part with a frozen shared part, for algorithms whose clients share a part.

    Args:
        base: The algorithm of the run.
    """

    def __init__(self, base: "PartialSharing") -> None:
        super().__init__(base)
        # FedSim and its subclasses train the private part with the learning rate of the personal role. Others use that
        # of the local role, which is also that of a role without one.
        self._role = "personal" if isinstance(base, FedSim) else "own"

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the private part. The shared part is included, since each pass changes its running statistics."""
        return {self._role: client_state["personal"], "local": received}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train only the private part."""
        if role == self._role:
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the private part."""
        model = step.states[self._role] | step.states["local"]
        step.descend(self._role, step.loss(model, stream=self._role))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the private part; send nothing."""
        return {"personal": trained[self._role]}, {}
