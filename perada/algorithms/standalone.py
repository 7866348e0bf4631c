# SPDX-License-Identifier: Apache-2.0
"""Standalone: every client trains alone."""

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Slot, Stacks
from perada.core.states import State


class Standalone(Algorithm):
    """Clients train and keep their personal state. They send nothing, and the global state stays as it began."""

    inference = "personal"
    sends = False
    global_model = False
    unsent = frozenset({"personal"})

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """Train what the client kept."""
        return {"personal": kept["personal"]}

    def client_step(self, step: ClientStep) -> None:
        """A step on the client's own loss."""
        step.descend("personal", step.loss("personal"))

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep everything, send nothing."""
        return {"personal": trained["personal"]}, {}

    def server_step(self, server: ServerStep) -> State:
        """Nothing changes."""
        return {}
