# SPDX-License-Identifier: Apache-2.0
"""Federated LoRA in which one of A and B is averaged and the other is common to all clients, so the mean is exact.

LoRA adds s·B·A to a frozen weight, where B is called ``up`` and A ``down`` (:class:`perada.core.states.Factors`). The
product of two means is not the mean of the products, mean(B_m)·mean(A_m) ≠ mean(B_m·A_m), unless all clients m have the
same A, or the same B.
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
from perada.algorithms.newcomers import joining
from perada.algorithms.sharing import PartialSharing
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import State, device_of, expand, stack_size, without


def check_model_factors(name: str, tensor_names: TensorNames) -> None:
    """Raise a ValueError if the model lacks the LoRA factors that the algorithm ``name`` requires."""
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
    """Return the name of the module that has a tensor."""
    return key.rpartition(".")[0]


class FFALoRA(AlgorithmWrapper):
    """Any algorithm, with every LoRA A frozen at its initial value (FFA-LoRA: Sun et al., ICLR 2024, arXiv 2403.12313).

    Clients train and send B, the head and all other trained tensors. A is the same for all of them, so that mean(B_m)·A
    is the mean of the products B_m·A, and half of LoRA's numbers are sent. The noise of differential privacy is added
    to B only. With its standard deviation σ, the product s·B·A changes by s·σ·ξ_B·A, which is linear in the noise; for
    LoRA it changes by s·σ (ξ_B·A + B·ξ_A) + s·σ²·ξ_B·ξ_A.

    To the base, A is a part of the frozen backbone: it is neither trained, pulled, sent nor distilled. Clients receive
    A in every round, since any round may be a client's first. Each of several global models has its own A.

    Source: [Sun et al., ICLR 2024](https://arxiv.org/abs/2403.12313).

    Args:
        base: Algorithm for B, the head and all other trained tensors. Default: FedAvg, as in the paper.
    """

    def __init__(self, base: Algorithm | None = None) -> None:
        super().__init__(FedAvg() if base is None else base)
        check_outermost(self)
        if isinstance(self.base, FFALoRA | FedSALoRA | RoLoRA) or self.base.merges_into_backbone:
            base_name = type(self.base).__name__
            raise OptionError(
                f"base={base_name} already determines how A is trained; choose a different base, such as FedAvg",
                name="base",
                value=base_name,
            )

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no LoRA factors, or if the base does not support a frozen A."""
        check_model_factors(type(self).__name__, tensor_names)
        self.base.check(_without_a(tensor_names), num_clients)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the states of the base. A complete personal model includes A."""
        return self.base.initial_client_state(initial, _without_a(tensor_names))

    def broadcast(self, sending: Broadcast) -> State:
        """Send the states of the base, which include A as a part of the global state."""
        return self.base.broadcast(replace(sending, tensor_names=_without_a(sending.tensor_names)))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the states of the base."""
        return self.base.begin_round(client_state, received, _without_a(tensor_names))

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train the parameters of the base, without A."""
        return self.base.trainable_keys(role, phase, _without_a(tensor_names), round)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the states of the base; send its updates without A."""
        new_client_state, update = self.base.end_round(trained, client_state, received, _without_a(tensor_names))
        update_without_a = without(update, downs(tensor_names))
        return new_client_state, update_without_a

    def server_step(self, server: ServerStep) -> State:
        """Take the base's server step, which leaves A unchanged."""
        return self.base.server_step(replace(server, tensor_names=_without_a(server.tensor_names)))

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Return the global models (K, ...) of the base, completed by A."""
        members = self.base.members(global_state, server_state)
        not_in_members = without(global_state, members)
        return expand(not_in_members, stack_size(members)) | members

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]]:
        """Train as a client that joins a run of the base, with A frozen."""
        base, phases = joining(self.base, phases)
        return FFALoRA(base), phases

    def personalization(self) -> tuple[Algorithm, Phase] | None:
        """Return the base's training after the last round, with A frozen."""
        tuning = self.base.personalization()
        if tuning is None:
            return None
        algorithm, phase = tuning
        return FFALoRA(algorithm), phase


def _without_a(tensor_names: TensorNames) -> TensorNames:
    """Return the names as if A were not trained: without those of A, and without pairs of factors."""
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
    """LoRA's A is shared and B stays at the client (FedSA-LoRA: Guo et al., ICLR 2025, arXiv 2410.01463).

    A client keeps B, sends A, and trains both together. The mean is of a single matrix and therefore exact. The
    classification head stays at the client too, as in the authors' published settings; the paper mentions only A and B.
    All other trained tensors, such as norms, are shared.

    Source: [Guo et al., ICLR 2025](https://arxiv.org/abs/2410.01463).
    """

    what = "LoRA's B and the classification head"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """Return the names of all B, and of the head."""
        return ups(tensor_names) | tensor_names.head

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no LoRA factors."""
        check_model_factors(type(self).__name__, tensor_names)
        super().check(tensor_names, num_clients)


A_IS_TRAINED = "lora/turn"
"""Name under which a client receives whether A is trained in the round, rather than B."""


class RoLoRA(Algorithm):
    """FedAvg that trains LoRA's B and A in alternating rounds (RoLoRA: Chen et al., NeurIPS 2025, arXiv 2502.01755).

    In odd rounds, counted from 1, clients train and send B with A frozen, and in even rounds A with B frozen. One
    factor is thus the same for all clients, and the mean of the other one is exact. B comes first: as long as it is
    zero, A has no gradient. The head and all other tensors are trained and sent in every round. Clients keep nothing.
    They receive both factors, since a client may not have taken part in the round in which the other factor was
    trained.

    Source: [Chen et al., NeurIPS 2025](https://arxiv.org/abs/2502.01755).
    """

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no LoRA factors."""
        check_model_factors(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global state, and whether A is trained."""
        flag = torch.tensor(_trains_a(sending.round), device=device_of(sending.global_state))
        return expand(sending.global_state | {A_IS_TRAINED: flag}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the global state."""
        global_state = without(received, {A_IS_TRAINED})
        return {"local": global_state}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all parameters but the factor that is frozen in this round."""
        frozen = _frozen_factor_names(tensor_names, _trains_a(round))
        return tuple(key for key in tensor_names.parameters if key not in frozen)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing; send all tensors but the frozen factor."""
        frozen = _frozen_factor_names(tensor_names, bool(received[A_IS_TRAINED][0]))
        update = without(trained["local"], frozen)
        return {}, update


def _trains_a(round: int) -> bool:
    """Return whether A rather than B is trained in a round, counted from 0."""
    return round % 2 == 1


def _frozen_factor_names(tensor_names: TensorNames, a_is_trained: bool) -> frozenset[str]:
    """Return the names of the factor that is frozen: all B if A is trained, otherwise all A."""
    if a_is_trained:
        return ups(tensor_names)
    return downs(tensor_names)
