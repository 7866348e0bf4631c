# SPDX-License-Identifier: Apache-2.0
"""A client's tensors as one flat row of bytes, which is also the inside of a safetensors file, and these files."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perada.algorithms.base import Stacks
from perada.core.digests import digest_of
from perada.core.files import open_atomic

_NAME = re.compile(r"client_(\d+)-[0-9a-f]+-\d+(?:-([0-9a-f]{32}))?\.safetensors")
_REMEDY = "keep the folder 'clients' of the run that wrote the checkpoint beside its folder 'checkpoints'"
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Number formats by the names that safetensors files give them, widest first: so each tensor is aligned."""


class _Field(NamedTuple):
    """Where one tensor lies in a row, in bytes."""

    role: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """Order of a client's tensors in its row of ``size`` bytes, given what a client keeps by role (no client axis).

    A safetensors file of one row begins with the ``header``.
    """

    def __init__(self, states: Stacks) -> None:
        found = [(role, key, value) for role, state in states.items() for key, value in state.items()]
        self.size, self._fields = 0, list[_Field]()
        for role, key, value in sorted(found, key=lambda item: list(_DTYPES).index(item[2].dtype)):
            start, self.size = self.size, self.size + value.numel() * value.element_size()
            self._fields.append(_Field(role, key, value.dtype, tuple(value.shape), start, self.size))
        self._order = {role: tuple(state) for role, state in states.items()}
        names = {
            f"{role}/{key}": {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, stop)}
            for role, key, dtype, shape, start, stop in self._fields
        }
        text = json.dumps({"__metadata__": {"format": "pt"}, **names}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
        self.header = len(text).to_bytes(8, "little") + text

    def pack(self, stacks: Stacks, clients: int) -> Tensor:
        """Rows (C, size) of uint8 of what C clients keep, (C, ...) by role."""
        parts = [
            stacks[field.role][field.key].detach().reshape(clients, -1).contiguous().view(torch.uint8)
            for field in self._fields
        ]
        return torch.cat(parts, 1)

    def unpack(self, rows: Tensor) -> Stacks:
        """The inverse of :meth:`pack`: copies (C, ...), each in memory of its own."""
        stacks: Stacks = {role: dict.fromkeys(keys, rows) for role, keys in self._order.items()}
        for field in self._fields:
            values = rows[:, field.start : field.stop].clone(memory_format=torch.contiguous_format).view(field.dtype)
            stacks[field.role][field.key] = values.view(len(rows), *field.shape)
        return stacks


def read_row(client: int, path: Path, layout: Layout) -> Tensor:
    """Map a client's file into memory, once :func:`check_row` has looked at it."""
    check_row(client, path, layout)
    begin = len(layout.header)
    return torch.from_file(str(path), shared=False, size=begin + layout.size, dtype=torch.uint8)[begin:]


def check_row(client: int, path: Path, layout: Layout) -> None:
    """Refuse a client's file that is missing (FileNotFoundError), was cut off or holds other tensors (ValueError)."""
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is missing, the states of client {client}; {_REMEDY}")
    begin = len(layout.header)
    with path.open("rb") as file:
        whole = path.stat().st_size == begin + layout.size and file.read(begin) == layout.header
    if not whole:
        raise ValueError(f"{str(path)!r} was cut off, or is of another run; {_REMEDY}")


def named_files(saved: dict[str, Any], layout: Layout) -> dict[int, Path]:
    """The files that a checkpoint names: in one folder, called as a store calls them, with the tensors of the run.

    If one is missing, that is a FileNotFoundError; a ValueError if it names something else, or a byte has changed.
    """
    files = {}
    for client, name in saved.get("files", {}).items():
        path, known = Path(saved["folder"], str(name)), _NAME.fullmatch(str(name))
        if known is None or known[1] != str(client) or path.is_symlink():
            raise ValueError(
                f"the checkpoint names {str(path)!r} as the states of client {client}, which is not the name of a "
                f"client's file; {_REMEDY}"
            )
        check_row(client, path, layout)
        if known[2] not in (None, digest_of(path)[:32]):  # files of former versions name none
            raise ValueError(f"{str(path)!r}, the states of client {client}, is damaged or another file; {_REMEDY}")
        files[client] = path
    return files


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One saved store of those that several processes saved, each of clients of its own."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            whole[name] = whole[name] | value if name in ("rows", "files") and name in whole else value
    return whole


def restricted(saved: dict[str, Any], clients: Collection[int]) -> dict[str, Any]:
    """What a saved store says of some clients."""
    parts = {name: saved[name] for name in ("rows", "files") if name in saved}
    return saved | {name: {c: held for c, held in part.items() if c in clients} for name, part in parts.items()}


def renumbered(saved: dict[str, Any], numbers: Sequence[int], layout: Layout) -> dict[str, Any]:
    """A saved store whose client k is client ``numbers[k]`` from now on; what is in files is read."""
    read = {client: read_row(client, path, layout).clone() for client, path in named_files(saved, layout).items()}
    rows = {numbers[client]: row for client, row in {**saved.get("rows", {}), **read}.items()}
    return {name: value for name, value in saved.items() if name not in ("files", "folder")} | {"rows": rows}


def locate(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What :meth:`ClientStore.state_dict` saved in a checkpoint, with the folder of the clients' files.

    A run folder that was moved or copied is found by the checkpoint's path. A ValueError if they are not there, and are
    said to be in no folder of a run's clients.
    """
    if saved.get("files"):
        name = next(iter(saved["files"].values()))
        own = Path(saved["folder"]).name
        for parent in checkpoint.absolute().parents:
            for folder in (parent / "clients", parent / "clients" / own):
                if (folder / name).is_file():
                    return saved | {"folder": str(folder)}
        if "clients" not in Path(saved["folder"]).parts[-2:]:
            raise ValueError(f"the checkpoint names files in {saved['folder']!r}, which is no run's; {_REMEDY}")
    return saved


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name; a copy where the two are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as content, open_atomic(target, durable=False) as file:
            shutil.copyfileobj(content, file)
