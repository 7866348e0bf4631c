# SPDX-License-Identifier: Apache-2.0
"""A client's tensors as one flat row of bytes, which is also the inside of a safetensors file."""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from perada.algorithms.base import Stacks

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
    """Order of a client's tensors in its row, given what a client keeps by role (no client axis).

    Attributes:
        size: Bytes of a row.
        header: What a safetensors file of one row begins with.
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
