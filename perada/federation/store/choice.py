# SPDX-License-Identifier: Apache-2.0
"""Where the clients' states are held, by the user's choice or by their size."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from perada.algorithms.base import Stacks
from perada.core.checks import check_choice
from perada.federation.store.disk import DiskStore
from perada.federation.store.memory import ClientStore, HostStore, StoreKind

SHARE = 0.25
"""Share of the device's free memory, then of the host's memory, that ``auto`` lets client states take."""


@dataclass(frozen=True)
class Storage:
    """Where the clients' states are held.

    Attributes:
        kind: ``device``, ``host`` or ``disk``; ``auto`` takes the first of these in which all fit. Others are refused.
        folder: Of the files; ``None`` for a temporary one.
        prune: Delete files that no checkpoint needs any more.
        clients: At most so many clients are ever written.
    """

    kind: StoreKind = "auto"
    folder: Path | None = None
    prune: bool = True
    clients: int = 0

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
