# SPDX-License-Identifier: Apache-2.0
"""Readers of the idx files of the MNIST family and of CIFAR's two layouts."""

import gzip
import math
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# All that a pickled CIFAR batch, old or new, needs to be rebuilt: nothing else in a file is run.
_HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}

_BROKEN = (pickle.UnpicklingError, AttributeError, EOFError, KeyError, RuntimeError, TypeError, ValueError)


def find_folder(candidates: Sequence[Path], pattern: str) -> Path | None:
    """Return the first folder with a file that matches ``pattern``."""
    return next((folder for folder in candidates if folder.is_dir() and any(folder.glob(pattern))), None)


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, with or without ``.gz``.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian 32-bit
    integer, then the data (http://yann.lecun.com/exdb/mnist).

    Args:
        path: The file's name without ``.gz``.

    Returns:
        uint8 tensor of the shape in the file.

    Raises:
        FileNotFoundError: If there is neither ``path`` nor ``path.gz``.
        ValueError: If the file is not of that format or is cut short.
    """
    zipped = path.with_name(path.name + ".gz")
    if not path.exists() and not zipped.exists():
        raise FileNotFoundError(f"{path} (or .gz) does not exist: fetch the data again")
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(zipped.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{zipped} cannot be unpacked ({error}): fetch the data again") from None
    axes = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * axes
    shape = np.frombuffer(content[4:start], dtype=">i4").tolist() if len(content) >= start else []
    if content[:3] != b"\x00\x00\x08" or len(shape) != axes or len(content) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is cut short: fetch the data again")
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=start).copy()).view(*shape)


class _SafeUnpickler(pickle.Unpickler):
    """Rebuilds NumPy arrays and plain containers, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_cifar(paths: Sequence[Path], label: str, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Read CIFAR batches in the Python or, where ``path.bin`` exists, the binary layout.

    Args:
        paths: Files, without ``.bin``.
        label: Key of the labels in the pickled files.
        label_bytes: Bytes before the pixels of a binary record; the last one is the label.

    Returns:
        Images uint8 (N, 3, 32, 32) and labels int64 (N,).

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is not of its format.
    """
    images, labels = [], []
    for path in paths:
        binary = path.with_name(path.name + ".bin")
        if not path.exists() and not binary.exists():
            raise FileNotFoundError(f"{path} does not exist: fetch the data again, or set download: true")
        try:
            pixels, classes = _read_pickled(path, label) if path.exists() else _read_binary(binary, label_bytes)
            images.append(torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32))
            labels.append(torch.as_tensor(classes, dtype=torch.int64))
        except (
            pickle.UnpicklingError,
            EOFError,
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
        ) as error:
            raise ValueError(f"{path} is not a CIFAR batch ({error}): fetch the data again") from None
        if len(images[-1]) != len(labels[-1]):
            raise ValueError(f"{path} has {len(images[-1])} images and {len(labels[-1])} labels: fetch the data again")
    return torch.cat(images), torch.cat(labels)


def _read_pickled(path: Path, label: str) -> tuple[np.ndarray[Any, Any], Any]:
    """Pixels (N, 3072) and labels of a pickled batch."""
    with path.open("rb") as file:
        batch = _SafeUnpickler(file, encoding="latin1").load()
    return batch["data"], batch[label]


def _read_binary(path: Path, label_bytes: int) -> tuple[np.ndarray[Any, Any], Any]:
    """Pixels (N, 3072) and labels of a binary batch."""
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, label_bytes + 3072)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)
