# SPDX-License-Identifier: Apache-2.0
"""Where the clients' states are held: on the device, in host memory, or on disk; and states that clients share."""

import hashlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.checks import check_choice
from perada.core.files import Scratch, open_atomic, sync
from perada.core.ranks import Ranks
from perada.core.rounds import RoundPlan
from perada.core.states import expand
from perada.federation.store.rows import Layout, joined, link_file, named_files, read_row, restricted

StoreKind = Literal["auto", "device", "host", "disk"]
SHARE = 0.25
"""Share of the device's free memory, then of the host's memory, that ``auto`` lets client states take."""


class ClientStore:
    """States that M clients keep, on the device.

    A client that was not ``written`` has the initial ones, by role (no client axis), which are held once.
    """

    def __init__(self, initial: Stacks) -> None:
        self.layout = Layout(initial)
        expanded = {role: {key: value.unsqueeze(0) for key, value in state.items()} for role, state in initial.items()}
        self._initial = self.layout.pack(expanded, 1)[0] if self.layout.size else torch.empty(0, dtype=torch.uint8)
        self.written: dict[int, Any] = {}

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Copy out what ``clients`` keep, stacked in that order, on the device."""
        return self.layout.unpack(self.rows(clients))

    def scatter(self, clients: Sequence[int], stacks: Stacks) -> None:
        """Store what ``clients`` keep from now on, (C, ...) by role; the tensors are copied."""
        if len(clients) and self.layout.size:
            self.put(clients, self.layout.pack(stacks, len(clients)))

    def rows(self, clients: Sequence[int]) -> Tensor:
        """Copies of the clients' rows of bytes, (C, size), on the device."""
        rows = self._initial.new_empty(len(clients), self.layout.size)
        for row, client in zip(rows, clients, strict=True):
            row.copy_(self._read(client) if client in self.written else self._initial, non_blocking=True)
        return rows

    def put(self, clients: Sequence[int], rows: Tensor) -> None:
        """Store copies of the clients' rows (C, size), as :meth:`rows` gave them."""
        for client, row in zip(clients, rows, strict=True):
            self._write(client, row)

    def drop(self, clients: Sequence[int]) -> None:
        """Forget what ``clients`` keep: it is the initial again, or kept elsewhere."""
        for client in clients:
            self.written.pop(client, None)

    def _write(self, client: int, row: Tensor) -> None:
        self.written[client] = row.to(self._initial.device, copy=True)

    def _read(self, client: int) -> Tensor:
        """The row of a client that was written; not a copy."""
        return cast(Tensor, self.written[client])

    def state_dict(self) -> dict[str, Any]:
        """What a client keeps that was never written, and the clients written so far, for a checkpoint."""
        rows = {client: self._read(client) for client in self.written}
        return {"header": self.layout.header, "initial": self._initial, "rows": rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of a store of any kind, saved by :meth:`state_dict`.

        A ValueError if it held other tensors, a FileNotFoundError if it held files and one is missing.
        """
        self.written = {}
        if saved["header"] != self.layout.header:
            raise ValueError(
                "the checkpoint's clients keep other tensors than this run's; resume with its configuration"
            )
        if "initial" in saved:
            self._initial.copy_(saved["initial"])
        for client, row in saved.get("rows", {}).items():
            self._write(client, row)
        for client, path in named_files(saved, self.layout).items():
            self._write(client, read_row(client, path, self.layout))


class HostStore(ClientStore):
    """States in host memory, page-locked where the device is a GPU: copies to and from it then do not wait.

    What a copy from the device writes here is read by copies back to it, in the order in which they were asked for.
    """

    def _write(self, client: int, row: Tensor) -> None:
        if client not in self.written:
            pinned = self._initial.device.type == "cuda"
            self.written[client] = torch.empty(self.layout.size, dtype=torch.uint8, pin_memory=pinned)
        self.written[client].copy_(row, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """The clients written so far, for a checkpoint, once all copies have arrived."""
        if self._initial.device.type == "cuda":
            torch.cuda.synchronize(self._initial.device)
        return super().state_dict()


class DiskStore(ClientStore):
    """States in files: a safetensors file for each client and version, never changed once it has its name.

    A checkpoint names the files, which are in the same run folder and on the disk before it. It holds the states itself
    where there is no ``folder`` and so a temporary one. With ``prune`` a file that is outdated is deleted once two
    newer checkpoints do without it, since one of these is complete; otherwise a checkpoint of any age finds its own.
    """

    def __init__(self, initial: Stacks, folder: Path | None = None, prune: bool = True) -> None:
        super().__init__(initial)
        self.temporary, self.prune = folder is None, prune
        if folder is None:
            self._scratch = Scratch()
            folder = self._scratch.path
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self._session, self._count = secrets.token_hex(4), 0
        self._outdated: list[Path] = []
        self._unsynced: list[Path] = []  # since the last checkpoint
        self._named: list[set[Path]] = [set(), set()]  # the files of the last two checkpoints

    def put(self, clients: Sequence[int], rows: Tensor) -> None:
        """Write files of the clients' rows (C, size)."""
        super().put(clients, rows.cpu())

    def drop(self, clients: Sequence[int]) -> None:
        """Forget what ``clients`` keep; their files go when no checkpoint needs them."""
        for client in clients:
            if client in self.written:
                self._outdate(self.written.pop(client))

    def _write(self, client: int, row: Tensor) -> None:
        self._count += 1  # with the session, no name is ever used twice
        content = row.contiguous().cpu().numpy().data
        digest = hashlib.sha256(self.layout.header)
        digest.update(content)
        name = f"client_{client}-{self._session}-{self._count}-{digest.hexdigest()[:32]}.safetensors"
        path = self.folder / name
        with open_atomic(path, durable=False) as file:
            file.write(self.layout.header)
            file.write(content)
        self._unsynced.append(path)
        self.drop([client])
        self.written[client] = path

    def _outdate(self, path: Path) -> None:
        if self.temporary and path.parent == self.folder:
            path.unlink()
        elif self.prune and path.parent == self.folder:
            self._outdated.append(path)

    def _read(self, client: int) -> Tensor:
        return read_row(client, self.written[client], self.layout)

    def state_dict(self) -> dict[str, Any]:
        """The names of the clients' files, for a checkpoint; files of another run are linked into this one's folder.

        Those of a temporary folder would not be found again: their contents are given instead.
        """
        if self.temporary:
            return super().state_dict()
        for client, path in self.written.items():
            if path.parent != self.folder:
                self.written[client] = own = self.folder / path.name
                if not own.exists():
                    link_file(path, own)
                self._unsynced.append(own)
        sync([*(path for path in self._unsynced if path.exists()), self.folder])
        self._unsynced = []
        self._named = [self._named[1], set(self.written.values())]
        needed = set.union(*self._named)
        for path in set(self._outdated) - needed:
            path.unlink(missing_ok=True)
        self._outdated = [path for path in self._outdated if path in needed]
        files = {client: path.name for client, path in self.written.items()}
        whole = {"header": self.layout.header, "initial": self._initial}
        return whole | {"folder": str(self.folder), "files": files}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of a store of any kind; its files are read where they are."""
        super().load_state_dict({name: value for name, value in saved.items() if name not in ("folder", "files")})
        self.written |= named_files(saved, self.layout)
        self._named = [set(), set(self.written.values())]


@dataclass(frozen=True)
class Storage:
    """Where the clients' states are held: ``auto`` takes the first of device, host and disk in which all fit."""

    kind: StoreKind = "auto"
    folder: Path | None = None  # of the files; by default a temporary one
    prune: bool = True  # delete files that no checkpoint needs any more
    clients: int = 0  # at most so many are ever written

    def __post_init__(self) -> None:
        check_choice("client_store", self.kind, get_args(StoreKind))

    def open(self, initial: Stacks, name: str = "") -> ClientStore:
        """Make a store; ``name`` tells the folders of several apart."""
        kind = self._choice(initial) if self.kind == "auto" else self.kind
        if kind == "disk":
            return DiskStore(initial, self.folder and self.folder / name, self.prune)
        return HostStore(initial) if kind == "host" else ClientStore(initial)

    def _choice(self, initial: Stacks) -> StoreKind:
        values = [value for state in initial.values() for value in state.values()]
        needed = self.clients * sum(value.numel() * value.element_size() for value in values)
        device = values[0].device if values else torch.device("cpu")
        if device.type == "cuda" and needed <= SHARE * torch.cuda.mem_get_info(device)[0]:
            return "device"
        if needed <= SHARE * host_memory():
            return "host" if device.type == "cuda" else "device"
        return "disk"


def host_memory() -> int:
    """Bytes of memory that this machine has, or lets this process have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit
        return total


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
