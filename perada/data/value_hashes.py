# SPDX-License-Identifier: Apache-2.0
"""Hashes of images and labels, which cover shape and dtype: equal bytes of another form are other values."""

import hashlib

import torch
from torch import Tensor

from perada.core.states import bytes_of


def new_hash() -> "hashlib.blake2b":
    """Return an empty hash of 128 bits."""
    return hashlib.blake2b(digest_size=16)


def add_to_hash(hasher: "hashlib.blake2b", shape: tuple[int, ...], dtype: torch.dtype, value_bytes: memoryview) -> None:
    """Add values to a hash: the shape and the dtype of a value, then the bytes of one or several."""
    hasher.update(f"{shape} {dtype} ".encode())
    hasher.update(value_bytes)


def hash_of_content(shape: tuple[int, ...], dtype: torch.dtype, value_bytes: memoryview) -> "hashlib.blake2b":
    """Return the hash of values of one shape and dtype from their bytes."""
    result = new_hash()
    add_to_hash(result, shape, dtype, value_bytes)
    return result


def hash_of(value: Tensor) -> "hashlib.blake2b":
    """Return the hash of a tensor, as one value."""
    return hash_of_content(tuple(value.shape), value.dtype, bytes_of(value))
