# SPDX-License-Identifier: Apache-2.0
"""What a party keeps in one file: nested values with tensors among them, written all at once."""

import math
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from perada.core.files import write_atomic
from perada.core.states import State
from perada.deploy.protocol import header_of, pack

KeptT = TypeVar("KeptT")
_TENSOR, _BYTES, _NUMBER = "$tensor", "$bytes", "$number"
"""Keys of what stands in the header for what JSON does not know."""


def write_kept(path: Path, kept: object, version: int, former: Path | None = None) -> None:
    """Write a file that only its owner may read.

    Args:
        path: The file.
        kept: Dictionaries, lists and dataclasses of numbers, texts, bytes and tensors.
        version: Of its format.
        former: Where the file that is replaced is kept; nowhere by default.
    """
    tensors: State = {}
    header = {"format": version, "kept": _plain(kept, tensors)}
    write_atomic(path, pack(header, tensors), private=True, former=former)


def read_kept(path: Path, version: int, build: Callable[..., KeptT]) -> KeptT:
    """What ``build`` makes of the dictionary that :func:`write_kept` wrote, given as keywords.

    Raises:
        ValueError: If the file is damaged, or of another version's format.
    """
    content = path.read_bytes()
    try:
        header = header_of(content, len(content))
        if header["format"] != version:
            raise KeyError(f"format {header['format']}, this version reads {version}")
        return build(**_kept(header["kept"], load(content)))
    except Exception as error:  # whatever a damaged file gives
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a copy: nothing else says "
            "what was trained and spent"
        ) from error


def _plain(value: Any, tensors: State) -> Any:  # noqa: ANN401  # any of those
    """A value in JSON's types; its tensors are added to those that there are."""
    if isinstance(value, Tensor | bytes):
        name = str(len(tensors))
        tensors[name] = (
            value if isinstance(value, Tensor) else torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))
        )
        return {_TENSOR if isinstance(value, Tensor) else _BYTES: name}
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(one, tensors) for key, one in value.items()}
    return [_plain(one, tensors) for one in value] if isinstance(value, list | tuple) else value


def _kept(value: Any, tensors: State) -> Any:  # noqa: ANN401  # likewise
    """What :func:`_plain` made a value of; dataclasses are dictionaries."""
    if isinstance(value, list):
        return [_kept(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensors[value[_TENSOR]]
    if value.keys() == {_BYTES}:
        return tensors[value[_BYTES]].numpy().tobytes()
    return float(value[_NUMBER]) if value.keys() == {_NUMBER} else {k: _kept(one, tensors) for k, one in value.items()}
