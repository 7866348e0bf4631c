# SPDX-License-Identifier: Apache-2.0
"""Rows of clients in files."""

import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perada.federation.store.layout import Layout

_NAME = re.compile(r"client_(\d+)-[0-9a-f]+-\d+\.safetensors")
_REMEDY = "keep the folder 'clients' of the run that wrote the checkpoint beside its folder 'checkpoints'"


def read_row(path: Path, layout: Layout) -> Tensor:
    """Map a client's file into memory, once :func:`check_row` has looked at it."""
    check_row(path, layout)
    begin = len(layout.header)
    return torch.from_file(str(path), shared=False, size=begin + layout.size, dtype=torch.uint8)[begin:]


def check_row(path: Path, layout: Layout) -> None:
    """Look at a client's file: its length, and the names and shapes of what it holds.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it was cut off, or holds other tensors.
    """
    begin = len(layout.header)
    try:
        with path.open("rb") as file:
            whole = path.stat().st_size == begin + layout.size and file.read(begin) == layout.header
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{str(path)!r} is missing, the states of a client; {_REMEDY}") from error
    if not whole:
        raise ValueError(f"{str(path)!r} was cut off, or is of another run; {_REMEDY}")


def named_files(saved: dict[str, Any], layout: Layout) -> dict[int, Path]:
    """The files that a checkpoint names: in one folder, called as a store calls them, with the tensors of the run.

    Raises:
        FileNotFoundError: If one is missing.
        ValueError: If it names something else.
    """
    files = {}
    for client, name in saved.get("files", {}).items():
        path, known = Path(saved["folder"], str(name)), _NAME.fullmatch(str(name))
        if known is None or known[1] != str(client) or path.is_symlink():
            raise ValueError(
                f"the checkpoint names {str(path)!r} as the states of client {client}, which is not the name of a "
                f"client's file; {_REMEDY}"
            )
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing, the states of client {client}; {_REMEDY}")
        check_row(path, layout)
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


def locate(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What :meth:`ClientStore.state_dict` saved in a checkpoint, with the folder of the clients' files.

    A run folder that was moved or copied is found by the checkpoint's path.

    Raises:
        ValueError: If they are not there, and are said to be in no folder of a run's clients.
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
        part = target.with_suffix(".part")
        shutil.copyfile(source, part)
        part.replace(target)
