# SPDX-License-Identifier: Apache-2.0
"""Base of the methods whose clients share some tensors and keep the others."""

from abc import ABC, abstractmethod

from perada.algorithms.base import Algorithm, Broadcast, Slot, Stacks
from perada.core.states import State, expand, partition


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
    def private(self, slot: Slot) -> frozenset[str]:
        """Names of what stays on the client."""

    def check(self, slot: Slot, num_clients: int) -> None:
        """Refuse a split that leaves nothing to keep or nothing to share."""
        private = self.private(slot)
        for verb, part in (("keep", private), ("send", set(slot.parameters) - private)):
            if not part:
                raise ValueError(
                    f"algorithm {type(self).__name__} has nothing to {verb}: clients keep {self.what} and share all "
                    f"else, but what is trained are {len(slot.parameters)} tensors from {slot.parameters[0]!r} to "
                    f"{slot.parameters[-1]!r}; {self.remedy}"
                )

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
        """The newest shared part with the client's own."""
        own = kept["personal"]
        return expand(global_state, len(next(iter(own.values())))) | own
