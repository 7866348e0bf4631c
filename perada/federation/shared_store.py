# SPDX-License-Identifier: Apache-2.0
"""The division of client states among several processes, and transfers between them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from perada.algorithms.base import Stacks
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan
from perada.core.states import expand, gather
from perada.federation.store import ClientStore

CLIENTS_PER_TRANSFER = 64
"""Largest number of clients whose states move in one transfer, which bounds the memory that it takes."""


class SharedStore:
    """The states that all clients keep, divided among the ranks.

    The rank that trained a client last holds its state. A client that was never written belongs to rank
    client % ranks, and is stored nowhere: it has the initial state.

    Attributes:
        local: The part of this rank.
        ranks: The processes.
    """

    def __init__(self, local: ClientStore, ranks: Ranks) -> None:
        self.local = local
        self.ranks = ranks
        # By client, the rank that holds its state. All ranks have the same table, and change it alike.
        self._holders: dict[int, int] = {}

    def holder(self, client: int) -> int:
        """Return the rank that holds ``client``'s state."""
        return self._holders.get(client, client % self.ranks.size)

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Return copies of the states that ``clients`` keep, stacked in that order.

        Raises:
            ValueError: If another rank holds one of them.
        """
        for client in clients:
            if client in self._holders and self.holder(client) != self.ranks.rank:
                raise ValueError(
                    f"the state of client {client} is held by process {self.holder(client)}, but this is process "
                    f"{self.ranks.rank}; request it after training in process 0 (if trainer.is_global_zero)"
                )
        return self.local.gather(clients)

    def bring(self, shares: Sequence[RoundPlan]) -> None:
        """Move the clients of a round to the ranks that train them. A collective.

        Args:
            shares: The plan of each rank.
        """
        targets: dict[int, int] = {}
        for rank, share in enumerate(shares):
            targets |= dict.fromkeys(share.clients, rank)
        self._move(targets)

    def collect(self) -> None:
        """Move all to rank 0. A collective."""
        self._move(dict.fromkeys(self._holders, 0))

    def scatter(self, shares: Sequence[RoundPlan], broken: Collection[int], rows: Stacks) -> None:
        """Store the new states that clients keep.

        Args:
            shares: The plan of each rank.
            broken: Clients that keep what they had.
            rows: What the clients of this rank's plan keep, (C, ...) by role, in its order.
        """
        for rank, share in enumerate(shares):
            for client in share.clients:
                if client not in broken:
                    self._holders[client] = rank
        own_clients = shares[self.ranks.rank].clients
        places = [place for place, client in enumerate(own_clients) if client not in broken]
        finite_rows = {role: gather(stack, places) for role, stack in rows.items()}
        self.local.scatter([own_clients[place] for place in places], finite_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the clients written so far, for a checkpoint: those of all ranks on rank 0, which writes it.

        A collective.
        """
        saved = self.local.state_dict()
        if self.ranks.size == 1:
            return saved
        # Ranks exchange pickled values, whose tensors must be on the CPU.
        saved["initial"] = saved["initial"].cpu()
        if "rows" in saved:
            saved["rows"] = {client: row.cpu() for client, row in saved["rows"].items()}
        return joined(self.ranks.collect(saved))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a store saved by :meth:`state_dict`, of which this rank holds its part."""
        written = [*saved.get("rows", {}), *saved.get("files", {})]
        self._holders = {client: client % self.ranks.size for client in written}
        own_clients = {client for client in written if self.holder(client) == self.ranks.rank}
        self.local.load_state_dict(restricted(saved, own_clients))

    def grow(self, saved: dict[str, Any], numbers: Sequence[int], others: Sequence[int], kept: Stacks) -> None:
        """Take over a saved store with more clients. A collective.

        Args:
            saved: The store, as of :meth:`state_dict`.
            numbers: Its client k is client ``numbers[k]`` from now on.
            others: The new clients.
            kept: What each of them keeps, by role and without a client axis.
        """
        rows = dict(saved.get("rows", {}))
        for client, path in self.local.files_of(saved).items():
            rows[client] = self.local.read(client, path)
        renumbered = {numbers[client]: row.clone() for client, row in rows.items()}
        self.load_state_dict({"header": saved["header"], "initial": saved["initial"], "rows": renumbered})
        # They start from ``kept``, and not from the initial state that was saved.
        for client in others:
            self._holders[client] = self.holder(client)
        own_clients = [client for client in others if self.holder(client) == self.ranks.rank]
        stacks = {role: expand(state, len(own_clients)) for role, state in kept.items()}
        self.local.scatter(own_clients, stacks)

    def _move(self, targets: Mapping[int, int]) -> None:
        """Move written clients to other ranks. A collective.

        Args:
            targets: By client, the rank to which it goes. Clients that are there, or never written, stay.
        """
        moving = []
        for client, target in targets.items():
            if client in self._holders and self.holder(client) != target:
                moving.append(client)
        for start in range(0, len(moving), CLIENTS_PER_TRANSFER):
            self._transfer(moving[start : start + CLIENTS_PER_TRANSFER], targets)

    def _transfer(self, clients: Sequence[int], targets: Mapping[int, int]) -> None:
        """Move ``clients`` to the ranks named in ``targets`` in one exchange. A collective."""
        leaving: dict[int, list[int]] = {}  # by the rank to which they go
        arriving: dict[int, list[int]] = {}  # by the rank that holds them
        for client in clients:
            holder = self.holder(client)
            target = targets[client]
            self._holders[client] = target
            if holder == self.ranks.rank:
                leaving.setdefault(target, []).append(client)
            elif target == self.ranks.rank:
                arriving.setdefault(holder, []).append(client)
        if not self.local.size:  # clients keep nothing: there is nothing to send
            return
        sent = {rank: self.local.rows(group) for rank, group in leaving.items()}
        received = {rank: torch.empty_like(self.local.rows(group)) for rank, group in arriving.items()}
        self.ranks.exchange(sent, received)
        for rank, group in arriving.items():
            self.local.put(group, received[rank])
        for group in leaving.values():
            self.local.drop(group)


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the stores that several processes saved, each with different clients, into one."""
    store: dict[str, Any] = {}
    for part in parts:
        clients = {}
        for name in ("rows", "files"):
            if name in part:
                clients[name] = store.get(name, {}) | part[name]
        store |= part | clients
    return store


def restricted(saved: dict[str, Any], clients: Collection[int]) -> dict[str, Any]:
    """Reduce a saved store to some of its clients."""
    restricted_store = dict(saved)
    for name in ("rows", "files"):
        if name in saved:
            restricted_store[name] = {client: saved[name][client] for client in saved[name] if client in clients}
    return restricted_store
