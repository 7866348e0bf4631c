# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds: on the device, in host memory, or in files.

Whatever the place, a client's tensors are one flat row of bytes, so that moving a client is one copy. Only the clients
of a round, or of a group in evaluation, are ever stacked.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.digests import digest_of
from perada.core.files import Scratch, open_atomic, sync

_NAME = re.compile(r"client_(\d+)-[0-9a-f]+-\d+-([0-9a-f]{32})\.safetensors")
_REMEDY = "keep the folder 'clients' of the run that wrote the checkpoint beside its folder 'checkpoints'"


class ClientStore:
    """States that M clients keep, on the device or in the memory of the ``host``.

    A client's tensors lie in its row of ``size`` bytes as in a safetensors file, which the ``header`` begins. One that
    was not ``written`` has the ``initial`` ones, by role (no client axis), which are held once. Host memory is
    page-locked where the device is a GPU: copies then do not wait, and are made in the order of their asking.
    """

    def __init__(self, initial: Stacks, host: bool = False) -> None:
        self.host = host
        names: dict[str, tuple[str, str]] = {}
        copies: dict[str, Tensor] = {}
        for role, state in initial.items():
            for key, value in state.items():
                names[f"{role}/{key}"] = (role, key)
                # Tensors may share memory, which safetensors refuses.
                copies[f"{role}/{key}"] = value.detach().clone(memory_format=torch.contiguous_format)
        content = save(copies, {"format": "pt"})
        # A safetensors file begins with the size of its header, in 8 bytes, and the header in JSON.
        begin = 8 + int.from_bytes(content[:8], "little")
        self.header = content[:begin]
        self.size = len(content) - begin
        fields = json.loads(content[8:begin])
        self._fields = [(*names[name], *fields[name]["data_offsets"]) for name in fields if name in names]
        self._like = {role: {key: value.to("meta") for key, value in state.items()} for role, state in initial.items()}
        device = next((value.device for value in copies.values()), None)
        self._initial = torch.from_numpy(np.frombuffer(content, np.uint8)[begin:].copy()).to(device)
        self.written: dict[int, Any] = {}

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Copy out what ``clients`` keep, stacked in that order, on the device; each tensor in memory of its own."""
        rows = self.rows(clients)
        stacks: Stacks = {role: dict.fromkeys(state, rows) for role, state in self._like.items()}
        for role, key, start, stop in self._fields:
            like = self._like[role][key]
            values = rows[:, start:stop].clone(memory_format=torch.contiguous_format).view(like.dtype)
            stacks[role][key] = values.view(len(rows), *like.shape)
        return stacks

    def scatter(self, clients: Sequence[int], stacks: Stacks) -> None:
        """Store what ``clients`` keep from now on, (C, ...) by role; the tensors are copied."""
        if len(clients) and self.size:
            parts = [
                stacks[role][key].detach().reshape(len(clients), -1).contiguous().view(torch.uint8)
                for role, key, *_ in self._fields
            ]
            self.put(clients, torch.cat(parts, 1))

    def rows(self, clients: Sequence[int]) -> Tensor:
        """Copies of the clients' rows of bytes, (C, size), on the device."""
        rows = self._initial.new_empty(len(clients), self.size)
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
        if self.host:
            place = self.written.get(client)
            if place is None:
                pinned = self._initial.device.type == "cuda"
                place = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
            self.written[client] = place.copy_(row, non_blocking=True)
        else:
            self.written[client] = row.to(self._initial.device, copy=True)

    def _read(self, client: int) -> Tensor:
        """The row of a client that was written; not a copy."""
        return cast(Tensor, self.written[client])

    def state_dict(self) -> dict[str, Any]:
        """What a client keeps that was never written, and the clients written so far, for a checkpoint."""
        if self._initial.device.type == "cuda":
            torch.cuda.synchronize(self._initial.device)  # until all copies have arrived
        rows = {client: self._read(client) for client in self.written}
        return {"header": self.header, "initial": self._initial, "rows": rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the place of a store of any kind, saved by :meth:`state_dict`.

        A ValueError if it held other tensors, and as of :meth:`files_of`.
        """
        self.written = {}
        if saved["header"] != self.header:
            raise ValueError(
                "the checkpoint's clients keep other tensors than this run's; resume with its configuration"
            )
        self._initial.copy_(saved["initial"])
        for client, row in saved.get("rows", {}).items():
            self._write(client, row)
        self._take(self.files_of(saved))

    def _take(self, files: dict[int, Path]) -> None:
        """Take over the files of another store."""
        for client, path in files.items():
            self._write(client, self.read(client, path))

    def files_of(self, saved: dict[str, Any]) -> dict[int, Path]:
        """The files that a checkpoint names: in one folder, called as a store calls them, with the tensors of the run.

        If one is missing, that is a FileNotFoundError; a ValueError if it names something else, or a byte has changed.
        """
        files = {}
        for client, name in saved.get("files", {}).items():
            path = Path(saved["folder"], str(name))
            fields = _NAME.fullmatch(str(name))
            if fields is None or fields[1] != str(client) or path.is_symlink():
                raise _damaged(client, path)
            self.read(client, path)
            if fields[2] != digest_of(path)[:32]:
                raise _damaged(client, path)
            files[client] = path
        return files

    def read(self, client: int, path: Path) -> Tensor:
        """Map a client's file into memory.

        One that is missing is a FileNotFoundError, one that was cut off or holds other tensors a ValueError.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing, the states of client {client}; {_REMEDY}")
        begin = len(self.header)
        with path.open("rb") as file:
            complete = path.stat().st_size == begin + self.size and file.read(begin) == self.header
        if not complete:
            raise _damaged(client, path)
        return torch.from_file(str(path), shared=False, size=begin + self.size, dtype=torch.uint8)[begin:]


def _damaged(client: int, path: Path) -> ValueError:
    return ValueError(f"{str(path)!r}, the states of client {client}, is damaged or another file; {_REMEDY}")


class DiskStore(ClientStore):
    """States in files: a safetensors file for each client and version, never changed once it has its name.

    A checkpoint names the files, which are in the same run folder and on the disk before it. It holds the states itself
    where there is no ``folder`` and so a temporary one. With ``prune`` a file that is outdated is deleted once two
    newer checkpoints do without it, since one of these is complete; otherwise a checkpoint of any age finds its own.
    """

    def __init__(self, initial: Stacks, folder: Path | None = None, prune: bool = True) -> None:
        super().__init__(initial)
        self.temporary = folder is None
        self.prune = prune
        if folder is None:
            self._scratch = Scratch()
            folder = self._scratch.path
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self._session = secrets.token_hex(4)
        self._count = 0
        self._files: set[Path] = set()  # in the folder, that were not deleted
        self._unsynced: list[Path] = []  # since the last checkpoint
        self._named: list[set[Path]] = [set(), set()]  # the files of the last two checkpoints

    def drop(self, clients: Sequence[int]) -> None:
        """Forget what ``clients`` keep; their files go when no checkpoint needs them."""
        for path in [self.written.pop(client) for client in clients if client in self.written]:
            if self.temporary and path in self._files:
                path.unlink()

    def _write(self, client: int, row: Tensor) -> None:
        self._count += 1  # with the session, no name is ever used twice
        content = row.contiguous().cpu().numpy().data
        digest = hashlib.sha256(self.header)
        digest.update(content)
        name = f"client_{client}-{self._session}-{self._count}-{digest.hexdigest()[:32]}.safetensors"
        path = self.folder / name
        with open_atomic(path, durable=False) as file:
            file.write(self.header)
            file.write(content)
        self._unsynced.append(path)
        self._files.add(path)
        self.drop([client])
        self.written[client] = path

    def _read(self, client: int) -> Tensor:
        return self.read(client, self.written[client])

    def state_dict(self) -> dict[str, Any]:
        """The names of the clients' files, for a checkpoint; files of another run are linked into this one's folder.

        Those of a temporary folder would not be found again: their contents are given instead.
        """
        if self.temporary:
            return super().state_dict()
        for client, path in self.written.items():
            if path.parent != self.folder:
                copy = self.folder / path.name
                self.written[client] = copy
                if not copy.exists():
                    try:
                        os.link(path, copy)
                    except OSError:  # on another file system
                        with path.open("rb") as content, open_atomic(copy, durable=False) as file:
                            shutil.copyfileobj(content, file)
                self._unsynced.append(copy)
        sync([*(path for path in self._unsynced if path.exists()), self.folder])
        self._unsynced = []
        self._named = [self._named[1], set(self.written.values())]
        if self.prune:
            for path in self._files - (self._named[0] | self._named[1]):
                path.unlink(missing_ok=True)
                self._files.remove(path)
        return {
            "header": self.header,
            "initial": self._initial,
            "folder": str(self.folder),
            "files": {client: path.name for client, path in self.written.items()},
        }

    def _take(self, files: dict[int, Path]) -> None:
        self.written |= files  # they are read where they are
        self._named = [set(), set(self.written.values())]
        self._files |= {path for path in files.values() if path.parent == self.folder}


def locate(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A store that was saved in a checkpoint, with the folder of its files: near the checkpoint, if it was moved.

    A ValueError if they are not there, and are said to be in no folder of a run's clients.
    """
    if not saved.get("files"):
        return saved
    name = next(iter(saved["files"].values()))
    folder = Path(saved["folder"])
    for parent in checkpoint.absolute().parents:
        for place in (parent / "clients", parent / "clients" / folder.name):
            if (place / name).is_file():
                return saved | {"folder": str(place)}
    if "clients" not in folder.parts[-2:]:
        raise ValueError(f"the checkpoint names files in {str(folder)!r}, which is not a run's; {_REMEDY}")
    return saved | {"folder": str(folder)}
