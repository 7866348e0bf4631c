# SPDX-License-Identifier: Apache-2.0
"""Readers of the idx files of the MNIST family and of CIFAR's two layouts."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import check_integrity

_AGAIN = "fetch the data again"


def find_folder(candidates: Sequence[Path], pattern: str) -> Path | None:
    """Return the first folder with a file that matches ``pattern``."""
    return next((folder for folder in candidates if folder.is_dir() and any(folder.glob(pattern))), None)


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, ``path`` or ``path.gz``: uint8 of the shape in the file.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian 32-bit
    integer, then the data (http://yann.lecun.com/exdb/mnist).

    Raises:
        FileNotFoundError: If there is neither file.
        ValueError: If the file is not of that format or is cut short.
    """
    zipped = path.with_name(path.name + ".gz")
    if not path.exists() and not zipped.exists():
        raise FileNotFoundError(f"{path} (or .gz) does not exist: {_AGAIN}")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be unpacked ({error}): {_AGAIN}") from None
    axes = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * axes
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist() if len(content) >= start else []
    if content[:3] != b"\x00\x00\x08" or len(shape) != axes or len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is cut short: {_AGAIN}")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(*shape)


def read_cifar(kind: type[CIFAR10], folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Read the Python layout of CIFAR with torchvision, which opens no file before it has compared its checksum.

    Returns:
        Images uint8 (N, 3, 32, 32) and labels int64 (N,).

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
    return torch.from_numpy(split.data.transpose(0, 3, 1, 2)), torch.tensor(split.targets)


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> tuple[Tensor, Tensor]:
    """Read the files of a split in CIFAR's binary layout; the results are those of :func:`read_cifar`.

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
