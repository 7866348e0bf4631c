# SPDX-License-Identifier: Apache-2.0
"""What the clients keep, spread over the ranks: each client's state is held by one of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from perada.algorithms.base import Stacks
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan
from perada.core.states import expand
from perada.federation.store.kinds import ClientStore
from perada.federation.store.rows import joined, restricted

TOGETHER = 64
"""Clients whose states are moved in one transfer."""


class SharedStore:
    """The rank that trained a client last holds its state; one never written is client % ranks's, and nowhere stored.

    ``local`` is the part of this rank.
    """

    def __init__(self, local: ClientStore, ranks: Ranks) -> None:
        self.local, self.ranks = local, ranks
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
        broken = set(broken)
        for rank, share in enumerate(shares):
            self._holders |= dict.fromkeys((client for client in share.clients if client not in broken), rank)
        own = shares[self.ranks.rank].clients
        places = [place for place, client in enumerate(own) if client not in broken]
        kept = {role: {key: value[places] for key, value in state.items()} for role, state in rows.items()}
        self.local.scatter([own[place] for place in places], kept)

    def state_dict(self) -> dict[str, Any]:
        """The clients written so far, for a checkpoint: those of all ranks on rank 0, which writes it."""
        own = self.local.state_dict()
        if self.ranks.size == 1:
            return own
        own["initial"] = own["initial"].cpu()
        if "rows" in own:
            own["rows"] = {client: row.cpu() for client, row in own["rows"].items()}
        return joined(self.ranks.collect(own))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of a store saved by :meth:`state_dict`, of which this rank holds its part."""
        written = {**saved.get("rows", {}), **saved.get("files", {})}
        self._holders = {client: client % self.ranks.size for client in written}
        self.local.load_state_dict(restricted(saved, {c for c in written if self.holder(c) == self.ranks.rank}))

    def begin(self, clients: Sequence[int], kept: Stacks) -> None:
        """Let ``clients`` keep what is given, by role and without a client axis; all ranks call it."""
        own = [client for client in clients if self.holder(client) == self.ranks.rank]
        self._holders |= {client: self.holder(client) for client in clients}
        self.local.scatter(own, {role: expand(state, len(own)) for role, state in kept.items()})

    def _move(self, targets: Mapping[int, int]) -> None:
        """Move the written ones of the clients named in ``targets`` to the ranks named there."""
        moving = [c for c, target in targets.items() if c in self._holders and self.holder(c) != target]
        for start in range(0, len(moving), TOGETHER):
            self._transfer({client: targets[client] for client in moving[start : start + TOGETHER]})

    def _transfer(self, targets: Mapping[int, int]) -> None:
        here = self.ranks.rank
        leaving: dict[int, list[int]] = {}
        coming: dict[int, list[int]] = {}
        for client, target in targets.items():
            if self.holder(client) == here:
                leaving.setdefault(target, []).append(client)
            elif target == here:
                coming.setdefault(self.holder(client), []).append(client)
        self._holders |= targets
        if not self.local.layout.size:
            return
        sent = {rank: self.local.rows(clients) for rank, clients in leaving.items()}
        received = {rank: torch.empty_like(self.local.rows(clients)) for rank, clients in coming.items()}
        self.ranks.exchange(sent, received)
        for rank, clients in coming.items():
            self.local.put(clients, received[rank])
        self.local.drop([client for clients in leaving.values() for client in clients])
