# SPDX-License-Identifier: Apache-2.0
"""Readers of the files that sets of images are published in: idx, CIFAR's two layouts, NumPy's, plain bytes."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

_AGAIN = "fetch the data again"


def find_folder(candidates: Sequence[Path], pattern: str) -> Path | None:
    """Return the first folder with a file that matches ``pattern``."""
    return next((folder for folder in candidates if folder.is_dir() and any(folder.glob(pattern))), None)


def read_idx(path: Path, item: tuple[int, ...], source: str) -> Tensor:
    """Read an idx file of unsigned bytes, ``path`` or ``path.gz``: uint8 (N, ...) of ``item`` each.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian 32-bit
    integer, then the data (http://yann.lecun.com/exdb/mnist).

    Raises:
        FileNotFoundError: If there is neither file.
        ValueError: If the file is not of that format and shape, or is cut short. Messages name the ``source``.
    """
    again = f"{_AGAIN}, for example from {source}"
    zipped = path.with_name(path.name + ".gz")
    if not path.exists() and not zipped.exists():
        raise FileNotFoundError(f"{path} (or .gz) does not exist: {again}")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be unpacked ({error}): {again}") from None
    axes = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * axes
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist() if len(content) >= start else []
    if content[:3] != b"\x00\x00\x08" or len(shape) != axes or len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is cut short: {again}")
    if shape[1:] != list(item) or not shape:
        expected = ", ".join(map(str, ("N", *item)))
        raise ValueError(f"{path} has the shape {tuple(shape)}, and ({expected}) is expected: {again}")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(*shape)


def read_cifar(kind: type[CIFAR10], folder: Path, train: bool) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read the Python layout of CIFAR with torchvision, which opens no file before it has compared its checksum.

    Returns:
        Images uint8 (N, 3, 32, 32), labels int64 (N,), and the names of the classes.

    Raises:
        FileNotFoundError: If a file of either split is missing.
        ValueError: If a file is not the published one.
    """
    try:
        split = type(kind.__name__, (kind,), {"base_folder": ""})(folder, train)
    except RuntimeError:  # it does not say which file is missing or wrong
        for name, checksum in (*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name} does not exist: {_AGAIN}") from None
            if not check_integrity(str(folder / name), checksum):
                raise ValueError(f"{folder / name} is not the published file (its MD5 differs): {_AGAIN}") from None
        raise
    return torch.from_numpy(split.data.transpose(0, 3, 1, 2)), torch.tensor(split.targets), tuple(split.classes)


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> tuple[Tensor, Tensor]:
    """Read the files of a split in CIFAR's binary layout; images and labels are those of :func:`read_cifar`.

    A record has ``label_bytes`` before its pixels, of which the last one is the label.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file does not consist of whole records.
    """
    batches = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: {_AGAIN}")
        batches.append(np.fromfile(path, dtype=np.uint8))
        if len(batches[-1]) % (label_bytes + 3072) or not len(batches[-1]):
            raise ValueError(f"{path} is not a CIFAR batch, or is cut short: {_AGAIN}")
    records = torch.from_numpy(np.concatenate(batches)).view(-1, label_bytes + 3072)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].long()


def map_npy(path: Path, shape: tuple[int, ...], source: str, whole: bool = False) -> np.ndarray[Any, Any]:
    """Map a .npy file into memory, of which what is looked at is then read.

    Args:
        path: The file.
        shape: The shape that it has as published.
        source: Where to fetch it.
        whole: Whether it may be of any whole numbers, or else of unsigned bytes alone.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not an array of that shape and type, or is cut short. Nothing in it is run.
    """
    expected = f"an array {shape} of {'whole numbers' if whole else 'unsigned bytes'} is expected"
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, and {expected}: fetch it from {source}") from None
    except (EOFError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({reason}), and {expected}: fetch it from {source}") from None
    fits = np.issubdtype(array.dtype, np.integer) if whole else array.dtype == np.uint8
    if array.shape != shape or not fits:
        raise ValueError(f"{path} is {array.dtype} {array.shape}, and {expected}: fetch it from {source}")
    return array


def map_bytes(path: Path, shape: tuple[int, ...], source: str) -> Tensor:
    """Map a file of plain bytes into memory, uint8 of the given shape; what is looked at is then read.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has another size.
    """
    size = math.prod(shape)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, and a file of {size:,} bytes is expected: fetch it from {source}"
        )
    if path.stat().st_size != size:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and {size:,} are expected: fetch it again from {source}"
        )
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(shape)
