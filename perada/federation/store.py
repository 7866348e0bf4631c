# SPDX-License-Identifier: Apache-2.0
"""Storage of the states that clients keep between rounds: on the device, in host memory, or in files.

A client's tensors are stored as one flat row of bytes, so that moving a client takes a single copy. Only the clients of
a round, or of a group in evaluation, are stacked.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.states import device_of
from perada.system.digests import digest_of
from perada.system.files import Scratch, open_atomic, sync
from perada.system.tensor_tables import SIZE_BYTES, tensors_begin

# Client, session, number and digest, as DiskStore names its files.
_NAME = re.compile(r"client_(\d+)-[0-9a-f]+-\d+-([0-9a-f]{32})\.safetensors")
_REMEDY = "keep the folder 'clients' of the run that wrote the checkpoint next to its folder 'checkpoints'"


class _Field(NamedTuple):
    """Position of a tensor in a client's row.

    Attributes:
        role: Role of the state.
        key: Name of the tensor in the state.
        start: Index of its first byte.
        stop: Index after its last byte.
    """

    role: str
    key: str
    start: int
    stop: int


class ClientStore:
    """States that M clients keep, on the device or in the memory of the host.

    A client's row has the layout of a safetensors file without its header. Clients that were never written share one
    initial row. If the device is a GPU, host memory is pinned, so that copies are asynchronous and run in order.

    Args:
        initial: States that a client keeps at first, by role and without a client axis.
        host: Whether the states are stored in host memory.

    Attributes:
        header: Header of the safetensors file of a client's row.
        size: Number of bytes of a row.
        written: Rows of the clients that were written, by client; in :class:`DiskStore` their files.
    """

    def __init__(self, initial: Stacks, host: bool = False) -> None:
        self.host = host
        # Role and key of each tensor, by its name in the file.
        role_and_key_of_name: dict[str, tuple[str, str]] = {}
        copies: dict[str, Tensor] = {}
        self._like: Stacks = {}
        for role, state in initial.items():
            self._like[role] = {}
            for key, value in state.items():
                name = f"{role}/{key}"
                role_and_key_of_name[name] = (role, key)
                # Copies, since safetensors rejects tensors that share memory.
                copies[name] = value.detach().clone(memory_format=torch.contiguous_format)
                self._like[role][key] = value.to("meta")
        content = save(copies, {"format": "pt"})
        begin = tensors_begin(content)
        self.header = content[:begin]
        self.size = len(content) - begin
        # Fields are in the order of the tensors in the file.
        self._fields: list[_Field] = []
        for name, entry in json.loads(content[SIZE_BYTES:begin]).items():
            # The metadata is an entry of the header, too.
            if name in role_and_key_of_name:
                role, key = role_and_key_of_name[name]
                start, stop = entry["data_offsets"]
                self._fields.append(_Field(role, key, start, stop))
        # A copy, since an array on bytes is read-only.
        initial_row = np.frombuffer(content, np.uint8)[begin:].copy()
        device = device_of(copies) if copies else None
        self._initial = torch.from_numpy(initial_row).to(device)
        self.written: dict[int, Any] = {}

    def gather(self, clients: Sequence[int]) -> Stacks:
        """Return copies of the states of some clients, stacked in this order on the device, by role."""
        stacks: Stacks = {role: dict.fromkeys(state, self._initial) for role, state in self._like.items()}
        for field, columns in zip(self._fields, self._copy_columns(clients), strict=True):
            like = self._like[field.role][field.key]
            stacks[field.role][field.key] = columns.view(like.dtype).view(len(clients), *like.shape)
        return stacks

    @property
    def _has_rows_on_device(self) -> bool:
        """Whether the rows that :meth:`read_row` returns are on the device."""
        return not self.host or self._initial.device.type == "cpu"

    def _copy_columns(self, clients: Sequence[int]) -> list[Tensor]:
        """Return copies of the bytes (C, size of the field) of each field of some clients, on the device.

        They are aligned to any dtype, as ``view()`` requires.
        """
        sizes = [field.stop - field.start for field in self._fields]
        if not clients or not self._has_rows_on_device:
            # To a GPU, one copy of a row is faster than a copy of each of its fields.
            parts = self.rows(clients).split(sizes, 1)
            return [part.clone(memory_format=torch.contiguous_format) for part in parts]
        parts_of_clients: list[tuple[Tensor, ...]] = []
        for client in clients:
            row = self.read_row(client) if client in self.written else self._initial
            parts_of_clients.append(row.split(sizes))
        return [torch.stack(parts_of_field) for parts_of_field in zip(*parts_of_clients, strict=True)]

    def scatter(self, clients: Sequence[int], stacks: Stacks) -> None:
        """Store copies of the new states (C, ...) of some clients, by role."""
        if len(clients) == 0 or self.size == 0:
            return
        columns: list[tuple[Tensor, ...]] = []
        for field in self._fields:
            values = stacks[field.role][field.key].detach()
            columns.append(values.reshape(len(clients), -1).contiguous().view(torch.uint8).unbind())
        for client, parts in zip(clients, zip(*columns, strict=True), strict=True):
            self.write_row(client, torch.cat(parts))

    def rows(self, clients: Sequence[int]) -> Tensor:
        """Return copies of the rows (C, size) of some clients on the device."""
        rows = self._initial.new_empty(len(clients), self.size)
        for row, client in zip(rows, clients, strict=True):
            stored = self.read_row(client) if client in self.written else self._initial
            row.copy_(stored, non_blocking=True)
        return rows

    def put(self, clients: Sequence[int], rows: Tensor) -> None:
        """Store copies of the rows (C, size) of some clients."""
        for client, row in zip(clients, rows, strict=True):
            self.write_row(client, row.clone())

    def drop(self, clients: Sequence[int]) -> None:
        """Forget the states of some clients, which return to the initial state or are now stored elsewhere."""
        for client in clients:
            self.written.pop(client, None)

    def write_row(self, client: int, row_values: Tensor) -> None:
        """Store a client's row (size,), which nothing else uses, so that it may be kept without copying."""
        if not self.host:
            self.written[client] = row_values.to(self._initial.device)
            return
        # The client's memory is used again. It is pinned, so that copies from and to a GPU are asynchronous.
        stored = self.written.get(client)
        if stored is None:
            pinned = self._initial.device.type == "cuda"
            stored = torch.empty(self.size, dtype=torch.uint8, pin_memory=pinned)
        self.written[client] = stored.copy_(row_values, non_blocking=True)

    def read_row(self, client: int) -> Tensor:
        """Return the row of a written client, without copying."""
        return cast(Tensor, self.written[client])

    def state_dict(self) -> dict[str, Any]:
        """Return the initial row and the rows of the clients written so far, for a checkpoint."""
        if self._initial.device.type == "cuda":
            # Asynchronous copies to host memory must be complete.
            torch.cuda.synchronize(self._initial.device)
        rows = {client: self.read_row(client) for client in self.written}
        return {"header": self.header, "initial": self._initial, "rows": rows}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the states of a saved store of any kind.

        Args:
            saved: Result of :meth:`state_dict`.

        Raises:
            ValueError: If the store had other tensors, or as :meth:`files_of` does.
            FileNotFoundError: As :meth:`files_of` does.
        """
        self.written = {}
        if saved["header"] != self.header:
            raise ValueError(
                "the clients of the checkpoint keep different tensors than those of this run; resume with the "
                "checkpoint's configuration"
            )
        self._initial.copy_(saved["initial"])
        for client, row in saved.get("rows", {}).items():
            self.write_row(client, row.clone())
        self.adopt_files(self.files_of(saved))

    def adopt_files(self, file_of_client: dict[int, Path]) -> None:
        """Read the files of a checkpoint into this store."""
        for client, path in file_of_client.items():
            self.write_row(client, self.read(client, path).clone())

    def files_of(self, saved: dict[str, Any]) -> dict[int, Path]:
        """Return the clients' files that a checkpoint names, after checking them.

        A checkpoint may come from anyone, so only files in its folder with the name and the header of a store's files
        are read.

        Args:
            saved: Result of :meth:`state_dict`.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the checkpoint names another file, or if a file was changed.
        """
        files = {}
        for client, name in saved.get("files", {}).items():
            path = Path(saved["folder"], str(name))
            fields = _NAME.fullmatch(str(name))
            if fields is None or fields[1] != str(client) or path.is_symlink():
                raise _damaged_file(client, path)
            self.read(client, path)
            if fields[2] != digest_of(path)[:32]:
                raise _damaged_file(client, path)
            files[client] = path
        return files

    def read(self, client: int, path: Path) -> Tensor:
        """Return a client's row (size,) as a memory map of its file.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If the file is truncated, or has other tensors.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r}, the states of client {client}, is missing; {_REMEDY}")
        begin = len(self.header)
        with path.open("rb") as file:
            is_complete = path.stat().st_size == begin + self.size
            has_header = file.read(begin) == self.header
        if not is_complete or not has_header:
            raise _damaged_file(client, path)
        content = torch.from_file(str(path), shared=False, size=begin + self.size, dtype=torch.uint8)
        return content[begin:]


def _damaged_file(client: int, path: Path) -> ValueError:
    """Return the error for a client's file that was changed or is not the store's."""
    return ValueError(f"{str(path)!r}, the states of client {client}, is damaged or a different file; {_REMEDY}")


class DiskStore(ClientStore):
    """States in files: one safetensors file per client and version, which is never changed once it has its name.

    A checkpoint contains the names of the files, which are in the same run folder and on disk before the checkpoint is.
    If the folder is temporary, a checkpoint contains the states.

    Args:
        initial: States that a client keeps at first, by role and without a client axis.
        folder: Folder of the files; by default a temporary one.
        prune: Whether to delete a file that the last two checkpoints do not name. At least one of these is complete,
            whenever the process is killed. Otherwise checkpoints of any age can be resumed from.
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
        # Names contain the session and the count, so that none is used twice.
        self._session = secrets.token_hex(4)
        self._count = 0
        # Files of this store in the folder that were not deleted.
        self._files: set[Path] = set()
        # Files that were written since the last checkpoint, and may not be on disk yet.
        self._unsynced: list[Path] = []
        self._of_last_checkpoint: set[Path] = set()
        self._of_checkpoint_before: set[Path] = set()

    @property
    def _has_rows_on_device(self) -> bool:
        """Whether the rows that :meth:`read_row` returns, which are memory maps, are on the device."""
        return self._initial.device.type == "cpu"

    def drop(self, clients: Sequence[int]) -> None:
        """Forget the states of some clients; their files are deleted once no checkpoint needs them."""
        for client in clients:
            path = self.written.pop(client, None)
            if path is not None and self.temporary and path in self._files:
                path.unlink()

    def write_row(self, client: int, row_values: Tensor) -> None:
        """Write a client's row (size,) to a new file, which replaces the client's former one."""
        self._count += 1
        content = row_values.contiguous().cpu().numpy().data
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

    def read_row(self, client: int) -> Tensor:
        """Return the row of a written client as a memory map."""
        return self.read(client, self.written[client])

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the clients' files, for a checkpoint.

        The files of a temporary folder will be deleted, so their contents are returned instead.
        """
        if self.temporary:
            return super().state_dict()
        self._link_files_of_other_runs()
        # Files are synced before the checkpoint is written, so that it names none that a power failure would lose.
        existing = [path for path in self._unsynced if path.exists()]
        sync([*existing, self.folder])
        self._unsynced = []
        self._of_checkpoint_before = self._of_last_checkpoint
        self._of_last_checkpoint = set(self.written.values())
        if self.prune:
            needed = self._of_checkpoint_before | self._of_last_checkpoint
            for path in self._files - needed:
                path.unlink(missing_ok=True)
                self._files.remove(path)
        return {
            "header": self.header,
            "initial": self._initial,
            "folder": str(self.folder),
            "files": {client: path.name for client, path in self.written.items()},
        }

    def _link_files_of_other_runs(self) -> None:
        """Link or copy the files that were adopted from the folder of another run into this run's folder."""
        for client, path in self.written.items():
            if path.parent == self.folder:
                continue
            copy = self.folder / path.name
            self.written[client] = copy
            if not copy.exists():
                try:
                    os.link(path, copy)
                except OSError:
                    # Links cannot cross file systems.
                    with path.open("rb") as content, open_atomic(copy, durable=False) as file:
                        shutil.copyfileobj(content, file)
            self._unsynced.append(copy)

    def adopt_files(self, file_of_client: dict[int, Path]) -> None:
        """Use the files of a checkpoint, without copying them."""
        self.written |= file_of_client
        self._of_checkpoint_before = set()
        self._of_last_checkpoint = set(self.written.values())
        self._files |= {path for path in file_of_client.values() if path.parent == self.folder}


def locate(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Find the folder of a saved store's files, which is near the checkpoint even if the run was moved.

    Args:
        saved: Result of :meth:`ClientStore.state_dict`, read from a checkpoint.
        checkpoint: Path of the checkpoint.

    Returns:
        The saved store, with the folder in which its files are.

    Raises:
        ValueError: If the files are not near the checkpoint, and the saved folder is not that of a run's clients.
    """
    if not saved.get("files"):
        return saved
    name = next(iter(saved["files"].values()))
    folder = Path(saved["folder"])
    for parent in checkpoint.absolute().parents:
        for candidate in (parent / "clients", parent / "clients" / folder.name):
            if (candidate / name).is_file():
                return saved | {"folder": str(candidate)}
    if "clients" not in folder.parts[-2:]:
        raise ValueError(f"the checkpoint lists files in {str(folder)!r}, which is not the folder of a run; {_REMEDY}")
    return saved | {"folder": str(folder)}
