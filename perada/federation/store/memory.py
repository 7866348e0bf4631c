# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds, in the device's memory or in the host's."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.federation.store.files import named_files, read_row
from perada.federation.store.layout import Layout

StoreKind = Literal["auto", "device", "host", "disk"]


class ClientStore:
    """States that M clients keep, on the device.

    A client that was not ``written`` has the initial ones, by role (no client axis), which are held once.
    """

    kind: StoreKind = "device"

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

        Raises:
            ValueError: If it held other tensors.
            FileNotFoundError: If it held files, and one is missing.
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
            self._write(client, read_row(path, self.layout))


class HostStore(ClientStore):
    """States in host memory, page-locked where the device is a GPU: copies to and from it then do not wait.

    What a copy from the device writes here is read by copies back to it, in the order in which they were asked for.
    """

    kind = "host"

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
