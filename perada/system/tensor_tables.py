# SPDX-License-Identifier: Apache-2.0
"""Where the parts of a safetensors file are: the size of its table in 8 bytes, the table in JSON, then the tensors.

Nothing large is imported: one of the processes that read such a table has no torch.
"""

SIZE_BYTES = 8
"""Bytes at the beginning of a file that state the size of its table."""


def table_size(beginning: bytes) -> int:
    """Return the size of the table in bytes, from the beginning of a file.

    >>> table_size(with_size(b"{}") + b"tensors")
    2
    """
    return int.from_bytes(beginning[:SIZE_BYTES], "little")


def tensors_begin(beginning: bytes) -> int:
    """Return the position of the first tensor's first byte, after the table.

    >>> content = with_size(b"{}") + b"tensors"
    >>> content[SIZE_BYTES : tensors_begin(content)], content[tensors_begin(content) :]
    (b'{}', b'tensors')
    """
    return SIZE_BYTES + table_size(beginning)


def with_size(table: bytes) -> bytes:
    """Return the size of a table, and the table: all of a file before its tensors."""
    return len(table).to_bytes(SIZE_BYTES, "little") + table
