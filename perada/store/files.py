# SPDX-License-Identifier: Apache-2.0
"""Rows of clients in files."""

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perada.store.layout import Layout

_REMEDY = "keep the folder 'clients' of the run that wrote the checkpoint beside its folder 'checkpoints'"


def read_row(path: Path, layout: Layout) -> Tensor:
    """Map a client's file into memory.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: If it was cut off, or holds other tensors.
    """
    begin = len(layout.header)
    try:
        whole = path.stat().st_size == begin + layout.size
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{str(path)!r} is missing, the states of a client; {_REMEDY}") from error
    if whole:
        mapped = torch.from_file(str(path), shared=False, size=begin + layout.size, dtype=torch.uint8)
        if mapped[:begin].numpy().tobytes() == layout.header:
            return mapped[begin:]
    raise ValueError(f"{str(path)!r} was cut off, or is of another run; {_REMEDY}")


def named_files(saved: dict[str, Any]) -> dict[int, Path]:
    """The files that a checkpoint names.

    Raises:
        FileNotFoundError: If one is missing.
    """
    files = {client: Path(saved["folder"], name) for client, name in saved.get("files", {}).items()}
    for client, path in files.items():
        if not path.is_file():
            raise FileNotFoundError(f"{str(path)!r} is missing, the states of client {client}; {_REMEDY}")
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
    return saved | {
        name: {client: held for client, held in saved[name].items() if client in clients}
        for name in ("rows", "files")
        if name in saved
    }


def locate(saved: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of the clients, with the folder of their files where it now is.

    Args:
        saved: What :meth:`ClientStore.state_dict` gave.
        checkpoint: The checkpoint's path; a run folder that was moved or copied is found by it.
    """
    if saved.get("files"):
        name = next(iter(saved["files"].values()))
        own = Path(saved["folder"]).name
        for parent in checkpoint.absolute().parents:
            for folder in (parent / "clients", parent / "clients" / own):
                if (folder / name).is_file():
                    return saved | {"folder": str(folder)}
    return saved


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name; a copy where the two are on different file systems."""
    try:
        os.link(source, target)
    except OSError:
        part = target.with_suffix(".part")
        shutil.copyfile(source, part)
        part.replace(target)
