# SPDX-License-Identifier: Apache-2.0
"""The division of client states among several processes, and transfers between them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from perada.algorithms.base import Stacks
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan
from perada.core.states import expand, gather, prefix
from perada.federation.store import ClientStore

CLIENTS_PER_TRANSFER = 64
"""Maximum number of clients whose states move in one transfer, which limits its memory."""


class SharedStore:
    """The states that all clients keep, divided among the ranks.

    A client's state is stored at the rank that trained it last. A client that was never trained has the initial state,
    which is not stored for it, and is assigned to rank ``client % ranks``.

    Attributes:
        local: Store of this rank.
        ranks: The processes that share the work.
    """

    def __init__(self, local: ClientStore, ranks: Ranks) -> None:
        self.local = local
        self.ranks = ranks
        # Rank that stores the state of each written client. All ranks have the same table, and change it in the same
        # way.
        self._holders: dict[int, int] = {}

    def holder(self, client: int) -> int:
        """Return the rank that a client's state is stored at, or assigned to."""
        return self._holders.get(client, client % self.ranks.size)

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Return copies of the states of some clients, stacked in this order, by role.

        Raises:
            ValueError: If one of them is stored at another rank.
        """
        for client in clients:
            # The initial state of a client that was never written is known to all ranks.
            holder = self._holders.get(client, self.ranks.rank)
            if holder != self.ranks.rank:
                raise ValueError(
                    f"the state of client {client} is held by process {holder}, but this is process "
                    f"{self.ranks.rank}; request it after training in process 0 (if trainer.is_global_zero)"
                )
        return self.local.gather(clients)

    def bring(self, plans: Sequence[RoundPlan]) -> None:
        """Move the clients of a round to the ranks that train them. A collective.

        Args:
            plans: The plan of each rank.
        """
        targets: dict[int, int] = {}
        for rank, share in enumerate(plans):
            targets |= dict.fromkeys(share.clients, rank)
        self._move_clients(targets)

    def collect(self) -> None:
        """Move all states to rank 0. A collective."""
        self._move_clients(dict.fromkeys(self._holders, 0))

    def scatter(self, plans: Sequence[RoundPlan], broken_clients: Collection[int], stacks: Stacks) -> None:
        """Store the new states that clients keep.

        Args:
            plans: The plan of each rank.
            broken_clients: Clients whose training failed, which keep their former states.
            stacks: States (C, ...) that the clients of this rank's plan keep, by role, in the plan's order.
        """
        # Every rank records the clients of all ranks, so that the tables stay equal.
        for rank, share in enumerate(plans):
            for client in share.clients:
                if client not in broken_clients:
                    self._holders[client] = rank

        clients = plans[self.ranks.rank].clients
        finite_places = [place for place, client in enumerate(clients) if client not in broken_clients]
        finite_rows: Stacks = {}
        for role, stack in stacks.items():
            if len(finite_places) == len(clients):
                # Views, since copies of all states would take as long as storing them. The stand-in of a rank without
                # clients is left out.
                finite_rows[role] = prefix(stack, len(clients))
            else:
                finite_rows[role] = gather(stack, finite_places)
        self.local.scatter([clients[place] for place in finite_places], finite_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all written clients, for a checkpoint. A collective.

        Those of all ranks are returned on rank 0, which writes the checkpoint.
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
        """Restore this rank's part of a saved store.

        Args:
            saved: Result of :meth:`state_dict` on rank 0.
        """
        written_clients = [*saved.get("rows", {}), *saved.get("files", {})]
        self._holders = {}
        local_clients = set()
        for client in written_clients:
            holder = client % self.ranks.size
            self._holders[client] = holder
            if holder == self.ranks.rank:
                local_clients.add(client)
        self.local.load_state_dict(restricted(saved, local_clients))

    def grow(
        self,
        saved: dict[str, Any],
        new_numbers: Sequence[int],
        new_clients: Sequence[int],
        client_state: Stacks,
    ) -> None:
        """Restore a saved store into a run with more clients. A collective.

        Args:
            saved: Result of :meth:`state_dict` on rank 0.
            new_numbers: New number of each saved client.
            new_clients: Numbers of the clients that were not saved.
            client_state: States that each new client keeps, by role and without a client axis.
        """
        rows = dict(saved.get("rows", {}))
        for client, path in self.local.files_of(saved).items():
            rows[client] = self.local.read(client, path)
        renumbered = {}
        for client, row in rows.items():
            renumbered[new_numbers[client]] = row.clone()
        self.load_state_dict({"header": saved["header"], "initial": saved["initial"], "rows": renumbered})

        # New clients are written, since a client without a row would have the saved initial state.
        local_clients = []
        for client in new_clients:
            holder = self.holder(client)
            self._holders[client] = holder
            if holder == self.ranks.rank:
                local_clients.append(client)
        stacks = {}
        for role, state in client_state.items():
            stacks[role] = expand(state, len(local_clients))
        self.local.scatter(local_clients, stacks)

    def _move_clients(self, targets: Mapping[int, int]) -> None:
        """Move written clients to other ranks. A collective.

        Args:
            targets: New rank of each client. Clients that are already there, or were never written, do not move.
        """
        moving = []
        for client, target in targets.items():
            if client in self._holders and self.holder(client) != target:
                moving.append(client)
        for start in range(0, len(moving), CLIENTS_PER_TRANSFER):
            self._transfer_clients(moving[start : start + CLIENTS_PER_TRANSFER], targets)

    def _transfer_clients(self, clients: Sequence[int], targets: Mapping[int, int]) -> None:
        """Move some clients in one exchange. A collective.

        Args:
            clients: The clients.
            targets: New rank of each client.
        """
        # Clients that leave this rank by their new rank, and clients that arrive here by their former rank.
        leaving: dict[int, list[int]] = {}
        arriving: dict[int, list[int]] = {}
        for client in clients:
            holder = self.holder(client)
            target = targets[client]
            self._holders[client] = target
            if holder == self.ranks.rank:
                leaving.setdefault(target, []).append(client)
            elif target == self.ranks.rank:
                arriving.setdefault(holder, []).append(client)
        if not self.local.size:
            # Clients keep nothing, so that no rank has anything to exchange.
            return

        outgoing = {}
        for rank, group in leaving.items():
            outgoing[rank] = self.local.rows(group)
        incoming = {}
        for rank, group in arriving.items():
            # Buffers in the shape of these clients' rows, which the exchange fills.
            incoming[rank] = torch.empty_like(self.local.rows(group))
        self.ranks.exchange(outgoing, incoming)

        for rank, group in arriving.items():
            self.local.put(group, incoming[rank])
        # The exchange reads these rows, so they are dropped after it.
        for group in leaving.values():
            self.local.drop(group)


def joined(saved_parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge saved stores of several processes, each with different clients, into one."""
    joined_store: dict[str, Any] = {}
    for part in saved_parts:
        by_client: dict[str, Any] = {}
        for name in ("rows", "files"):
            if name in part:
                by_client[name] = joined_store.get(name, {}) | part[name]
        # All other entries are equal in all parts.
        joined_store |= part
        joined_store |= by_client
    return joined_store


def restricted(saved: dict[str, Any], client_ids: Collection[int]) -> dict[str, Any]:
    """Return a saved store with only some of its clients."""
    restricted_store = dict(saved)
    for name in ("rows", "files"):
        if name in saved:
            restricted_store[name] = {client: value for client, value in saved[name].items() if client in client_ids}
    return restricted_store
