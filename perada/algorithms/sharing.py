# SPDX-License-Identifier: Apache-2.0
"""Methods whose clients share a part of the parameters and keep the rest."""

from abc import ABC, abstractmethod
from typing import Literal

from perada.algorithms.base import Algorithm, Broadcast, Slot, Stacks
from perada.core.states import State, expand, partition


class PartialSharing(Algorithm, ABC):
    """Base of the methods whose clients keep some tensors and share the others, trained together as in FedAvg.

    A subclass says which tensors are private.
    """

    inference: Literal["personal", "global"] = "personal"
    global_model = False

    remedy: str = "train more (adapter='full'), or choose another algorithm"
    """What to do where there is nothing to keep or to share."""

    @abstractmethod
    def private(self, slot: Slot) -> frozenset[str]:
        """Names of what stays on the client."""

    def check(self, slot: Slot, num_clients: int) -> None:
        """Refuse a split that leaves nothing to keep or nothing to share."""
        name, private = type(self).__name__, self.private(slot)
        for what, part in (("keep", private), ("send", set(slot.parameters) - private)):
            if not part:
                raise ValueError(
                    f"{name} has nothing to {what}: clients keep {self._what()} and share all else, but what is "
                    f"trained are {len(slot.parameters)} tensors from {slot.parameters[0]!r} to "
                    f"{slot.parameters[-1]!r}; {self.remedy}"
                )

    def _what(self) -> str:
        """What stays on the client, in words."""
        return "their private part"

    def kept(self, initial: State, slot: Slot) -> Stacks:
        """The private part of the initial state."""
        return {"personal": partition(initial, self.private(slot))[0]}

    def broadcast(self, sending: Broadcast) -> State:
        """The shared part."""
        return expand(partition(sending.global_state, self.private(sending.slot))[1], len(sending.clients))

    def open(self, kept: Stacks, received: State, slot: Slot) -> Stacks:
        """The whole model, made of both parts."""
        return {"local": received | kept["personal"]}

    def close(self, trained: Stacks, kept: Stacks, received: State, slot: Slot) -> tuple[Stacks, State]:
        """Keep one part, send the other."""
        private, shared = partition(trained["local"], self.private(slot))
        return {"personal": private}, shared

    def personal(self, kept: Stacks, global_state: State) -> State:
        """The newest shared part and the client's own."""
        own = kept["personal"]
        return expand(global_state, len(next(iter(own.values())))) | own
