# SPDX-License-Identifier: Apache-2.0
"""Federated LoRA factors: one of A and B is averaged while the other is common to all, so that the mean is exact.

LoRA adds s·B·A to a frozen weight. B (``up``), A (``down``) and the scale s of a layer are those of
:class:`perada.core.states.Factors`. The product of two means is not the mean of the products,
mean(B_m)·mean(A_m) ≠ mean(B_m·A_m), unless all clients m have the same A, or the same B.
"""

from dataclasses import replace

import torch

from perada.algorithms.base import (
    Algorithm,
    AlgorithmWrapper,
    Broadcast,
    ServerStep,
    Stacks,
    TensorNames,
    check_outermost,
)
from perada.algorithms.fedavg import FedAvg
from perada.algorithms.sharing import PartialSharing
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import State, device_of, expand, stack_size, without


def check_factors(name: str, tensor_names: TensorNames) -> None:
    """Raise if the model lacks the LoRA factors that the algorithm ``name`` requires."""
    if not tensor_names.factors:
        raise ValueError(
            f"algorithm {name} requires LoRA factors A and B, but the trained parameters contain none "
            f"({tensor_names.parameter_range}); choose adapter='lora', without DoRA, on linear layers and convolutions"
        )


def downs(tensor_names: TensorNames) -> frozenset[str]:
    """Return the names of all A."""
    return frozenset(pair.down for pair in tensor_names.factors)


def ups(tensor_names: TensorNames) -> frozenset[str]:
    """Return the names of all B and of their biases."""
    modules = {_module_of(pair.up) for pair in tensor_names.factors}
    return frozenset(key for key in tensor_names.keys if _module_of(key) in modules)


def _module_of(key: str) -> str:
    return key.rpartition(".")[0]


class FFALoRA(AlgorithmWrapper):
    """Any algorithm, with every LoRA A frozen at its initial value (FFA-LoRA: Sun et al., ICLR 2024, arXiv 2403.12313).

    Clients train and send B (and the head, and all else that is trained); A is the same for all of them, so that
    mean(B_m)·A is the mean of the B_m·A, and half of LoRA's numbers are sent. Noise of differential privacy is added to
    B only: with σ its standard deviation, s·B·A gets s·σ·ξ_B·A, which is linear in the noise, where LoRA gets
    s·σ (ξ_B·A + B·ξ_A) + s·σ²·ξ_B·ξ_A.

    The base works as if A were a part of the frozen backbone: its clients neither train, pull nor send A, and a
    distillation does not train it. Clients receive A with everything else, since one may take part for the first time
    in any round. Several global models have an A each.

    Args:
        base: What clients do with B, the head and all else that is trained. Default: FedAvg, as in the paper.
    """

    def __init__(self, base: Algorithm | None = None) -> None:
        super().__init__(base or FedAvg())
        check_outermost(self)
        if isinstance(self.base, FFALoRA | FedSALoRA | RoLoRA) or self.base.merges_into_backbone:
            base_name = type(self.base).__name__
            raise OptionError(
                f"base={base_name} already determines how A is trained; choose a different base, such as FedAvg",
                name="base",
                value=base_name,
            )

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the adapter has no LoRA factors, or the base does not support a frozen A."""
        check_factors(type(self).__name__, tensor_names)
        self.base.check(_without_a(tensor_names), num_clients)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep what clients of the base keep. A complete personal model includes its A."""
        return self.base.initial_client_state(initial, _without_a(tensor_names))

    def broadcast(self, sending: Broadcast) -> State:
        """Send what the base sends; A is in the global state."""
        return self.base.broadcast(replace(sending, tensor_names=_without_a(sending.tensor_names)))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the stacks of the base."""
        return self.base.begin_round(client_state, received, _without_a(tensor_names))

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train what the base trains, without A."""
        return self.base.trainable_keys(role, phase, _without_a(tensor_names), round)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep what clients of the base keep, and send what they send without A."""
        new_client_state, update = self.base.end_round(trained, client_state, received, _without_a(tensor_names))
        update_without_a = without(update, downs(tensor_names))
        return new_client_state, update_without_a

    def server_step(self, server: ServerStep) -> State:
        """Take the base's server step, which leaves A unchanged."""
        return self.base.server_step(replace(server, tensor_names=_without_a(server.tensor_names)))

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the base's global models (K, ...), completed by A."""
        members = self.base.members(global_state, server_state)
        not_in_members = without(global_state, members)
        return expand(not_in_members, stack_size(members)) | members

    def personalization(self) -> tuple[Algorithm, Phase] | None:
        """Return what clients of the base train after the last round, with A frozen."""
        tuning = self.base.personalization()
        if tuning is None:
            return None
        algorithm, phase = tuning
        return FFALoRA(algorithm), phase


def _without_a(tensor_names: TensorNames) -> TensorNames:
    """Return the names without those of A, and without pairs of factors, as if A were not trained."""
    frozen = downs(tensor_names)
    return replace(
        tensor_names,
        keys=tuple(key for key in tensor_names.keys if key not in frozen),
        parameters=tuple(key for key in tensor_names.parameters if key not in frozen),
        input=tensor_names.input - frozen,
        adapter=tensor_names.adapter - frozen,
        shared=tensor_names.shared - frozen,
        private=tensor_names.private - frozen,
        factors=(),
    )


class FedSALoRA(PartialSharing):
    """Every LoRA A is shared, every B stays at its client (FedSA-LoRA: Guo et al., ICLR 2025, arXiv 2410.01463).

    A client keeps B, sends A, and trains both at once. The mean of A is of a single matrix, and so is exact. The
    classification head stays at the client too, as in the settings that the authors publish; the paper's text is only
    about A and B. Whatever else is trained, such as norms, is shared.
    """

    what = "LoRA's B and the classification head"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return all B, and the head."""
        return ups(tensor_names) | tensor_names.head

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the adapter has no LoRA factors."""
        check_factors(type(self).__name__, tensor_names)
        super().check(tensor_names, num_clients)


A_IS_TRAINED = "lora/turn"
"""Name of a flag that travels with what a client receives: whether A is trained in the round, and B is not."""


class RoLoRA(Algorithm):
    """FedAvg that trains LoRA's B and A in alternating rounds (RoLoRA: Chen et al., NeurIPS 2025, arXiv 2502.01755).

    In odd rounds, of which the first is one, clients train B and send it, with A as it is at the server; in even rounds
    A, with B as it is. So one factor is the same for all clients, and the mean of the other one is exact. B comes
    first, which is zero at first: A would have no gradient. The head and all else is trained and sent in each round.
    Clients keep nothing. They receive both factors, since one may not have been there when the other factor was
    trained.
    """

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the adapter has no LoRA factors."""
        check_factors(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global state, and which factor is trained."""
        flag = torch.tensor(_trains_a(sending.round), device=device_of(sending.global_state))
        return expand(sending.global_state | {A_IS_TRAINED: flag}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the global state."""
        global_state = without(received, {A_IS_TRAINED})
        return {"local": global_state}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all but the factor that is frozen in this round."""
        frozen = _frozen(tensor_names, _trains_a(round))
        return tuple(key for key in tensor_names.parameters if key not in frozen)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing, send what was trained."""
        frozen = _frozen(tensor_names, bool(received[A_IS_TRAINED][0]))
        update = without(trained["local"], frozen)
        return {}, update


def _trains_a(round: int) -> bool:
    """Return whether A rather than B is trained in a round, counted from 0."""
    return round % 2 == 1


def _frozen(tensor_names: TensorNames, a_is_trained: bool) -> frozenset[str]:
    """Return the names of the factor that is not trained."""
    if a_is_trained:
        return ups(tensor_names)
    return downs(tensor_names)
