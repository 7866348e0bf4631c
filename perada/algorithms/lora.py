# SPDX-License-Identifier: Apache-2.0
"""LoRA's factors, federated: of s·B·A one is averaged while the other is the same for all, so that the mean is exact.

B (``up``) and A (``down``) are named in :class:`perada.core.states.Factors`; s is the scale.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from perada.algorithms.base import Algorithm, AlgorithmWrapper, Broadcast, ServerStep, Stacks, TensorNames, check_base
from perada.algorithms.fedavg import FedAvg
from perada.algorithms.sharing import PartialSharing
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.core.states import State, expand, partition


def check_factors(name: str, tensor_names: TensorNames) -> None:
    """Refuse, by a ValueError with the algorithm's ``name``, a model without LoRA's factors."""
    if not tensor_names.factors:
        raise ValueError(
            f"algorithm {name} is about LoRA's factors A and B, and there are none in what is trained, "
            f"{tensor_names.parameter_range}; choose adapter='lora', without DoRA, on linear layers and convolutions"
        )


def downs(tensor_names: TensorNames) -> frozenset[str]:
    """Names of all A."""
    return frozenset(pair.down for pair in tensor_names.factors)


def ups(tensor_names: TensorNames) -> frozenset[str]:
    """Names of all B, and of biases beside them."""
    modules = {pair.up.rpartition(".")[0] for pair in tensor_names.factors}
    return frozenset(key for key in tensor_names.keys if key.rpartition(".")[0] in modules)


class FFALoRA(AlgorithmWrapper):
    """Any algorithm, with every A of LoRA frozen as it was drawn (FFA-LoRA: Sun et al., ICLR 2024, arXiv 2403.12313).

    A is the same for all, so that mean(B_m)·A is the mean of the B_m·A, and half of LoRA's numbers are sent. Noise of
    differential privacy is added to B alone: with σ its standard deviation, s·B·A gets s·σ·ξ_B·A, which is linear in
    the noise, where LoRA gets s·σ (ξ_B·A + B·ξ_A) + s·σ²·ξ_B·ξ_A. The base works as if A were a part of the frozen
    backbone: its clients neither train, pull nor send A, and a distillation does not train it. Clients receive A with
    everything else, since one may take part for the first time in any round. Several global models have an A each.

    Args:
        base: What clients do with B, the head and all else that is trained. Default: FedAvg, as in the paper.
    """

    def __init__(self, base: Algorithm | None = None) -> None:
        self.base = base or FedAvg()
        check_base(self, self.base)
        if isinstance(self.base, FFALoRA | FedSALoRA | RoLoRA) or self.base.merges_into_backbone:
            raise OptionError(
                f"base={type(self.base).__name__} says itself what becomes of A; choose another one, such as FedAvg",
                name="base",
                value=type(self.base).__name__,
            )
        vars(self).update({name: getattr(self.base, name) for name in Algorithm.__annotations__})

    @property
    def kind(self) -> str:
        """The class and the base."""
        return f"{type(self).__name__} of {self.base.kind}"

    @property
    def is_ensemble(self) -> bool:
        """As the base."""
        return self.base.is_ensemble

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without factors, and what the base cannot work with."""
        check_factors(type(self).__name__, tensor_names)
        self.base.check(_without_a(tensor_names), num_clients)

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Those of the base."""
        return self.base.phases(epochs, steps)

    def initial(self, make: Callable[[int], State]) -> State:
        """That of the base."""
        return self.base.initial(make)

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """As the base. A whole personal model has its A."""
        return self.base.initial_client_state(initial, _without_a(tensor_names))

    def broadcast(self, sending: Broadcast) -> State:
        """As the base, with A."""
        return self.base.broadcast(replace(sending, tensor_names=_without_a(sending.tensor_names)))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """As the base."""
        return self.base.begin_round(client_state, received, _without_a(tensor_names))

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """As the base, but for A."""
        return self.base.trainable_keys(role, phase, _without_a(tensor_names), round)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """As the base. A is not sent."""
        new_client_state, update = self.base.end_round(trained, client_state, received, _without_a(tensor_names))
        return new_client_state, partition(update, downs(tensor_names))[1]

    def server_step(self, server: ServerStep) -> State:
        """As the base. A stays as it is."""
        return self.base.server_step(replace(server, tensor_names=_without_a(server.tensor_names)))

    def members(self, global_state: State, server_state: dict[str, State]) -> State:
        """Those of the base, with A."""
        members = self.base.members(global_state, server_state)
        whole = expand(partition(global_state, members)[1], len(next(iter(members.values()))))
        return whole | members

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """As the base."""
        return self.base.personal(client_state, global_state)

    def personalization(self) -> tuple[Algorithm, Phase] | None:
        """As the base, with A frozen."""
        tuning = self.base.personalization()
        return None if tuning is None else (FFALoRA(tuning[0]), tuning[1])


def _without_a(tensor_names: TensorNames) -> TensorNames:
    """The tensor names without A among those that are trained."""
    frozen = downs(tensor_names)
    keys, parameters = (
        tuple(key for key in names if key not in frozen) for names in (tensor_names.keys, tensor_names.parameters)
    )
    sets = {name: getattr(tensor_names, name) - frozen for name in ("input", "adapter", "shared", "private")}
    return replace(tensor_names, keys=keys, parameters=parameters, factors=(), **sets)


class FedSALoRA(PartialSharing):
    """Every A of LoRA is shared, every B stays at its client (FedSA-LoRA: Guo et al., ICLR 2025, arXiv 2410.01463).

    Both are trained at once. The mean of A is of a single matrix, and so is exact. The classification head stays at the
    client too, as in the settings that the authors publish; the paper's text speaks of A and B alone. Whatever else is
    trained, such as norms, is shared.
    """

    what = "LoRA's B and the classification head"

    def private(self, tensor_names: TensorNames) -> frozenset[str]:
        """All B, and the head."""
        return ups(tensor_names) | tensor_names.head

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without factors."""
        check_factors(type(self).__name__, tensor_names)
        super().check(tensor_names, num_clients)


TURN = "lora/turn"
"""Whether it is A's turn, which travels with what a client receives."""


class RoLoRA(Algorithm):
    """FedAvg in which B and A of LoRA take turns (RoLoRA: Chen et al., NeurIPS 2025, arXiv 2502.01755).

    In odd rounds, of which the first is one, clients train B and send it, with A as it is at the server; in even rounds
    A, with B as it is. So one factor is the same for all clients, and the mean of the other one is exact. B comes
    first, which is zero at first: A would have no gradient. The head and all else is trained and sent in each round.
    Clients receive both factors, since one may not have been there when the other factor was trained.
    """

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without factors."""
        check_factors(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """The global state, and whose turn it is."""
        device = next(iter(sending.global_state.values())).device
        turn = torch.tensor(_is_turn_of_a(sending.round), device=device)
        return expand(sending.global_state | {TURN: turn}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The global state."""
        return {"local": partition(received, {TURN})[1]}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """All but the factor whose turn it is not."""
        idle = ups(tensor_names) if _is_turn_of_a(round) else downs(tensor_names)
        return tuple(key for key in tensor_names.parameters if key not in idle)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Send what was trained."""
        idle = ups(tensor_names) if bool(received[TURN][0]) else downs(tensor_names)
        return {}, partition(trained["local"], idle)[1]


def _is_turn_of_a(round: int) -> bool:
    """Whether A is trained in a round, counted from 0."""
    return round % 2 == 1
