# SPDX-License-Identifier: Apache-2.0
"""Which of several processes holds what a client keeps, and how it gets from one to another."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from perada.algorithms.base import Stacks
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan
from perada.core.states import expand, gather
from perada.federation.store import ClientStore

TOGETHER = 64
"""Clients whose states are moved in one transfer."""


class SharedStore:
    """The rank that trained a client last holds its state; one never written is client % ranks's, and nowhere stored.

    ``local`` is the part of this rank.
    """

    def __init__(self, local: ClientStore, ranks: Ranks) -> None:
        self.local = local
        self.ranks = ranks
        self._holders: dict[int, int] = {}

    def holder(self, client: int) -> int:
        """The rank that holds ``client``'s state."""
        return self._holders.get(client, client % self.ranks.size)

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Copy out what ``clients`` keep, stacked in that order; a ValueError if another rank holds one of them."""
        for client in clients:
            if client in self._holders and self.holder(client) != self.ranks.rank:
                raise ValueError(
                    f"the state of client {client} is held by process {self.holder(client)}, and this is process "
                    f"{self.ranks.rank}; after training ask for it in process 0 (if trainer.is_global_zero)"
                )
        return self.local.gather(clients)

    def bring(self, shares: Sequence[RoundPlan]) -> None:
        """Move the clients of a round to the ranks that train them; all ranks call it."""
        self._move({client: rank for rank, share in enumerate(shares) for client in share.clients})

    def collect(self) -> None:
        """Move all to rank 0; all ranks call it."""
        self._move(dict.fromkeys(self._holders, 0))

    def scatter(self, shares: Sequence[RoundPlan], broken: Collection[int], rows: Stacks) -> None:
        """Store what clients keep from now on; every rank gives the ``rows`` of its own share, stacked in its order.

        The ``broken`` ones keep what they had.
        """
        for rank, share in enumerate(shares):
            for client in share.clients:
                if client not in broken:
                    self._holders[client] = rank
        own_clients = shares[self.ranks.rank].clients
        places = [place for place, client in enumerate(own_clients) if client not in broken]
        kept = {role: gather(state, places) for role, state in rows.items()}
        self.local.scatter([own_clients[place] for place in places], kept)

    def state_dict(self) -> dict[str, Any]:
        """The clients written so far, for a checkpoint: those of all ranks on rank 0, which writes it."""
        saved = self.local.state_dict()
        if self.ranks.size == 1:
            return saved
        saved["initial"] = saved["initial"].cpu()
        if "rows" in saved:
            saved["rows"] = {client: row.cpu() for client, row in saved["rows"].items()}
        return joined(self.ranks.collect(saved))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of a store saved by :meth:`state_dict`, of which this rank holds its part."""
        written = {**saved.get("rows", {}), **saved.get("files", {})}
        self._holders = {client: client % self.ranks.size for client in written}
        own_clients = {client for client in written if self.holder(client) == self.ranks.rank}
        self.local.load_state_dict(restricted(saved, own_clients))

    def grow(self, saved: dict[str, Any], numbers: Sequence[int], others: Sequence[int], kept: Stacks) -> None:
        """Take over a saved store with more clients; all ranks call it.

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
        for client in others:
            self._holders[client] = self.holder(client)
        own_clients = [client for client in others if self.holder(client) == self.ranks.rank]
        self.local.scatter(own_clients, {role: expand(state, len(own_clients)) for role, state in kept.items()})

    def _move(self, targets: Mapping[int, int]) -> None:
        """Move the written ones of the clients named in ``targets`` to the ranks named there."""
        moving = []
        for client, target in targets.items():
            if client in self._holders and self.holder(client) != target:
                moving.append(client)
        for start in range(0, len(moving), TOGETHER):
            leaving: dict[int, list[int]] = {}
            coming: dict[int, list[int]] = {}
            for client in moving[start : start + TOGETHER]:
                holder = self.holder(client)
                self._holders[client] = targets[client]
                if holder == self.ranks.rank:
                    leaving.setdefault(targets[client], []).append(client)
                elif targets[client] == self.ranks.rank:
                    coming.setdefault(holder, []).append(client)
            if not self.local.size:
                continue
            sent = {rank: self.local.rows(clients) for rank, clients in leaving.items()}
            received = {rank: torch.empty_like(self.local.rows(clients)) for rank, clients in coming.items()}
            self.ranks.exchange(sent, received)
            for rank, clients in coming.items():
                self.local.put(clients, received[rank])
            self.local.drop([client for clients in leaving.values() for client in clients])


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the stores that several processes saved, each with clients of its own, into one."""
    store: dict[str, Any] = {}
    for part in parts:
        clients = {name: store.get(name, {}) | part[name] for name in ("rows", "files") if name in part}
        store |= part | clients
    return store


def restricted(saved: dict[str, Any], clients: Collection[int]) -> dict[str, Any]:
    """Leave all but some clients out of a saved store."""
    restricted_store = dict(saved)
    for name in ("rows", "files"):
        if name in saved:
            restricted_store[name] = {client: saved[name][client] for client in saved[name] if client in clients}
    return restricted_store
