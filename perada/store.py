# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds."""

from collections.abc import Sequence

import torch

from perada.algorithms.base import Stacks
from perada.states import State, clone, stack, to_device, unstack


class ClientStore:
    """States that M clients keep, in memory; a client never written still has the initial ones, which are held once.

    Args:
        initial: What every client keeps before its first round, by role (no client axis).
    """

    def __init__(self, initial: Stacks) -> None:
        self.initial = initial
        self.written: dict[int, dict[str, State]] = {}

    def __getitem__(self, client: int) -> Stacks:
        """What ``client`` keeps, by role (not a copy)."""
        return self.written.get(client, self.initial)

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Copy out what ``clients`` keep, stacked in that order."""
        return {role: stack([self[client][role] for client in clients]) for role in self.initial}

    def scatter(self, clients: Sequence[int], rows: Stacks) -> None:
        """Store what ``clients`` keep from now on; the tensors are copied."""
        split = {role: unstack(state) for role, state in rows.items()}
        for index, client in enumerate(clients):
            self.written[client] = {role: clone(states[index]) for role, states in split.items()}

    def state_dict(self) -> dict[int, Stacks]:
        """The clients written so far, for a checkpoint."""
        return self.written

    def load_state_dict(self, written: dict[int, Stacks], device: torch.device) -> None:
        """Take the place of a store saved by :meth:`state_dict`."""
        self.written = {
            client: {role: to_device(state, device) for role, state in kept.items()} for client, kept in written.items()
        }
