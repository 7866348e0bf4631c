# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds, in files."""

import secrets
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from perada.algorithms.base import Stacks
from perada.federation.store.files import link_file, named_files, read_row
from perada.federation.store.memory import ClientStore


class DiskStore(ClientStore):
    """States in files: a safetensors file for each client and version, never changed once it has its name.

    A checkpoint names the files, which are in the same run folder; it holds the states itself where there is no
    ``folder`` and so a temporary one. With ``prune`` a file that is outdated is deleted once two newer checkpoints do
    without it, since one of these is complete; otherwise a checkpoint of any age finds its own.
    """

    kind = "disk"

    def __init__(self, initial: Stacks, folder: Path | None = None, prune: bool = True) -> None:
        super().__init__(initial)
        self.temporary, self.prune = folder is None, prune
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="perada-clients-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self._session, self._count = secrets.token_hex(4), 0
        self._outdated: list[Path] = []
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
        path = self.folder / f"client_{client}-{self._session}-{self._count}.safetensors"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(self.layout.header)
            file.write(row.contiguous().cpu().numpy().data)
        part.replace(path)
        self.drop([client])
        self.written[client] = path

    def _outdate(self, path: Path) -> None:
        if self.temporary and path.parent == self.folder:
            path.unlink()
        elif self.prune and path.parent == self.folder:
            self._outdated.append(path)

    def _read(self, client: int) -> Tensor:
        return read_row(self.written[client], self.layout)

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
