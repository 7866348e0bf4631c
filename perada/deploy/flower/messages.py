# SPDX-License-Identifier: Apache-2.0
"""Bytes as content of Flower's messages: one array of bytes, which Flower divides into chunks, or one code."""

from typing import TYPE_CHECKING

from perada.deploy.flower.socket import CODES
from perada.deploy.protocol import Failure

if TYPE_CHECKING:
    from flwr.app import RecordDict

_PAYLOAD, _FAILURE = "payload", "failure"
_KIND = "perada.bytes"  # not numpy's: nothing but our own code reads it


def packed(payload: bytes | Failure) -> "RecordDict":
    """A payload or a code as content of a message."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if isinstance(payload, Failure):
        return RecordDict({_FAILURE: ConfigRecord({"code": CODES.index(payload.code)})})
    array = Array(dtype="uint8", shape=(len(payload),), stype=_KIND, data=payload)
    return RecordDict({_PAYLOAD: ArrayRecord({_PAYLOAD: array})})


def unpacked(content: "RecordDict", most: int) -> bytes | Failure:
    """The payload or code of a message's content; ``malformed`` where it has neither, or one of over ``most`` bytes."""
    codes = content.config_records.get(_FAILURE)
    if codes is not None:
        code = codes.get("code")
        return Failure(CODES[code] if type(code) is int and 0 <= code < len(CODES) else "malformed")
    record = content.array_records.get(_PAYLOAD)
    array = None if record is None else record.get(_PAYLOAD)
    if array is None or array.stype != _KIND or len(array.data) > most:
        return Failure("malformed")
    payload: bytes = array.data
    return payload
