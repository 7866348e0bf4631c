# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: what clients keep and send, one client's step, and the server's rule.

The names of the roles follow PerAda: ``personal`` is what a client keeps and predicts with, ``local`` what it trains
from the received global state and sends back. Everything a client holds is a :data:`~perada.states.State`; every method
sees the states of all clients at hand as one stack with a leading client axis C, and must treat the clients alike and
apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from perada.rounds import Phase
from perada.states import State

Stacks = dict[str, State]
"""Stacked states by role."""


@dataclass(frozen=True)
class Slot:
    """The names of the single model's trained tensors, by what they are.

    Attributes:
        keys: All names of a state: trained parameters and the running statistics of trained norms.
        parameters: The trained parameters.
        head: Names (of parameters) of the classification head.
        norms: Names (of parameters and running statistics) of normalisation layers.
    """

    keys: tuple[str, ...]
    parameters: tuple[str, ...]
    head: frozenset[str] = field(default_factory=frozenset)
    norms: frozenset[str] = field(default_factory=frozenset)


class ClientStep(Protocol):
    """One local step of C clients, as an algorithm sees it (built by :class:`perada.cohort.Cohort`)."""

    round: int
    phase: str
    states: Stacks
    """What is being trained, by role; trained parameters are leaves that require gradients."""
    received: State
    """What the server sent, (C, ...)."""

    def logits(self, states: str | State) -> Tensor:
        """Training-mode logits (C, B, K) of a role's states, or of any stack, on the step's images."""

    def loss(self, states: str | State) -> Tensor:
        """Each client's task loss (C,): the mean over its images."""

    def descend(self, role: str, loss: Tensor, *, pull: tuple[float, State] | None = None) -> None:
        """Take one optimiser step on a role.

        Args:
            role: Whose parameters to move.
            loss: (C,); each client's gradient is that of its own entry.
            pull: ``(strength, anchor)`` adds the gradient of strength/2 · ||parameters − anchor||².
        """


@dataclass
class ServerStep:
    """The server's side of a round.

    Attributes:
        round: Counted from 0.
        clients: Who sent the updates, in their order.
        num_clients: Clients M of the federation.
        previous: Global state before the round.
        updates: What the clients sent, (C, ...).
        weights: Aggregation weights (C,), summing to one.
        state: The server's own tensors, kept between rounds and in checkpoints; may be replaced.
        mean: The aggregation rule.
        distill: Refines a state by distilling the ensemble of a stack of teachers into it.
    """

    round: int
    clients: tuple[int, ...]
    num_clients: int
    previous: State
    updates: State
    weights: Tensor
    state: dict[str, State]
    mean: Callable[[State, Tensor], State]
    distill: Callable[[State, State], State]


class Algorithm:
    """A federated algorithm. Subclasses are final, and override only what differs from FedAvg.

    Attributes:
        inference: Which state a client predicts with: its ``personal`` one, or the ``global`` one.
        sends: Whether clients send anything.
        distills: Whether the server distils, so that a public set is needed when there are distillation steps.
    """

    inference: Literal["personal", "global"] = "global"
    sends: bool = True
    distills: bool = False

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """Split a round of local training in phases; every client finishes one before any starts the next."""
        return (Phase("train", epochs, steps),)

    def kept(self, initial: State, slot: Slot) -> Stacks:
        """What a client stores between rounds, before the first one (states of one client, no client axis)."""
        return {}

    def broadcast(self, global_state: State, round: int, clients: tuple[int, ...]) -> State:
        """What the server sends to each of C clients, (C, ...)."""
        return {key: value.unsqueeze(0).expand(len(clients), *value.shape) for key, value in global_state.items()}

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Stacks to train in this round, made from what the clients kept and what they received."""
        return {"local": received}

    def trained(self, role: str, phase: str, slot: Slot) -> tuple[str, ...]:
        """Names of the parameters that ``phase`` trains in ``role``."""
        return slot.parameters

    def client_step(self, step: ClientStep) -> None:
        """One local step of every client."""
        step.descend("local", step.loss("local"))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """What the clients keep, and what they send."""
        return {}, trained["local"]

    def server_step(self, server: ServerStep) -> State:
        """The new global state."""
        return server.mean(server.updates, server.weights)

    def personal(self, kept: Stacks, global_state: State) -> State:
        """The state (C, ...) each client predicts with, where ``inference`` is ``"personal"``."""
        return kept["personal"]

    def finetuning(self) -> "tuple[Algorithm, Phase] | None":
        """An algorithm every client runs alone from the final global state after the last round, and for how long."""
        return None
