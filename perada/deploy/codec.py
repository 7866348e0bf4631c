# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes: a safetensors file whose metadata hold a header in JSON. Nothing in them is ever unpickled.

A message is checked before any of its tensors is made: its length, that of its table, and the names, number formats and
shapes against those that are expected. Torch is imported where tensors are made, so that others need none.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perada.deploy.messages import Malformed

if TYPE_CHECKING:
    from torch import Tensor

    from perada.core.states import State

TABLE = 2**22
"""Bytes that the table of a message's tensors, with its header, may take."""
MAGNITUDE = 1e6
"""A number of a larger size is refused."""
COUNT = 2**40
"""A counter above it is refused."""
SECTION = "perada"
Spec = dict[str, tuple[str, tuple[int, ...]]]
"""Number format, as safetensors call it, and shape of each tensor that is expected."""


def digest(message: bytes) -> str:
    """By which an answer names the message that it answers."""
    return hashlib.sha256(message).hexdigest()


def pack(header: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> bytes:
    """A message of a header in plain types, and of tensors.

    >>> header_of(pack({"code": "ok"}))
    {'code': 'ok'}
    """
    text = json.dumps(header, allow_nan=False, sort_keys=True, separators=(",", ":"))
    if not tensors:
        table = json.dumps({"__metadata__": {SECTION: text}}).encode()
        return len(table).to_bytes(8, "little") + table
    from safetensors.torch import save
    from torch import contiguous_format

    # Copies, since safetensors refuses tensors that share memory, as those of two roles may.
    ready = {
        name: value.detach().to("cpu", copy=True, memory_format=contiguous_format) for name, value in tensors.items()
    }
    return bytes(save(ready, {SECTION: text}))


def header_of(message: bytes, most: int = TABLE) -> dict[str, Any]:
    """The header of a message, whose tensors are not looked at.

    Args:
        message: As it came.
        most: Bytes that its table may have; a party's own files may have more than a message.

    Raises:
        Malformed: If the message is none.
    """
    return _parts(message, most)[0]


def table_of(message: bytes) -> dict[str, Any]:
    """What a message says of its tensors, unchecked; Malformed if it is no message."""
    return _parts(message)[1]


def spec_of(state: "State") -> Spec:
    """What :func:`unpack` expects of a state like this one."""
    from safetensors.torch import _TYPES

    formats = {dtype: name for name, dtype in _TYPES.items()}
    return {key: (formats[value.dtype], tuple(value.shape)) for key, value in state.items()}


def largest(expected: Spec) -> int:
    """Bytes that a message with these tensors may have.

    >>> largest({"a": ("F32", (2, 3)), "b": ("BOOL", ())}) - largest({})
    25
    """
    return 8 + TABLE + sum(math.prod(shape) * _width(kind) for kind, shape in expected.values())


def _width(kind: str) -> int:
    """Bytes of a number in a format such as ``BF16`` or ``F8_E4M3``."""
    bits = re.search(r"\d+", kind)
    return 1 if bits is None else int(bits[0]) // 8


def unpack(message: bytes, expected: Spec) -> tuple[dict[str, Any], "State"]:
    """Header and tensors of a message that has exactly the ``expected`` tensors.

    Raises:
        Malformed: If the message is none, has other tensors, or a value is not finite or out of all proportion.
    """
    header, table = _parts(message)
    found = {}
    for name, entry in table.items():
        try:
            found[name] = str(entry["dtype"]), tuple(entry["shape"])
        except (KeyError, TypeError) as error:
            raise Malformed(f"the tensor {name[:80]!r} is not described ({error!r})") from None
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise Malformed(f"the tensor {names[0][:80]!r} is {found.get(names[0])}, not {expected.get(names[0])}")
    if not expected:
        return header, {}
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: State = load(message)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise Malformed(f"it is no safetensors file ({error})") from None
    for name, value in state.items():
        _check_values(name, value)
    return header, {name: state[name] for name in expected}


def _parts(message: bytes, most: int = TABLE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header, and the table of tensors."""
    size = int.from_bytes(message[:8], "little")
    if len(message) < 8 or size > min(most, len(message) - 8):
        raise Malformed(f"the table is said to have {size} bytes of {len(message)}")
    try:
        table = json.loads(message[8 : 8 + size])
        header = json.loads(table.pop("__metadata__")[SECTION], parse_constant=_refuse)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"its table cannot be read ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise Malformed("its header is no dictionary")
    return header, table


def _refuse(word: str) -> float:
    raise ValueError(word)


def _check_values(name: str, value: "Tensor") -> None:
    """Refuse NaN, infinities, and numbers that no training gives."""
    if not value.numel():
        return
    if value.is_floating_point():
        largest = float(value.abs().max())  # of NaN, NaN
        if not largest <= MAGNITUDE:
            raise Malformed(f"the tensor {name[:80]!r} has a value of size {largest}")
    elif int(value.min()) < 0 or int(value.max()) > COUNT:
        raise Malformed(f"the counter {name[:80]!r} is out of range")
