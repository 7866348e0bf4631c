# SPDX-License-Identifier: Apache-2.0
"""Predictions of a run's models for images from elsewhere."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import check_integer
from perada.core.files import writing
from perada.core.text import FORMULA, abbreviated, cell_text, near_names
from perada.data.preprocessing import Preprocessing
from perada.data.sets.folders import list_images
from perada.data.sets.tables import check_encoding, existing_spelling, read_table

_TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for N images.

    Attributes:
        probabilities: (N, K) floats: a softmax over the classes, or, where an image may have several labels, a sigmoid
            of each.
        labels: Classes (N,), int64; or (N, K) of zeros and ones, where an image may have several labels.
        classes: Names of the K classes; their numbers where the run knows no names.
        paths: The N paths, where all images were given as such.
    """

    probabilities: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    paths: tuple[str, ...] | None = None

    @property
    def names(self) -> list[str]:
        """The name predicted for each image; several are joined by ``|``."""
        if self.labels.ndim == 1:
            return [self.classes[label] for label in self.labels.tolist()]
        rows = self.labels.bool().tolist()
        return ["|".join(name for name, has in zip(self.classes, row, strict=True) if has) for row in rows]

    def to_csv(self, path: str | Path) -> Path:
        """Write a row for each image: its ``path`` (or number, ``image``), ``predicted``, ``p(NAME)`` of each class.

        Probabilities have six digits after the point. No cell is one that a spreadsheet takes for a formula: a path
        then begins with ``./``, a name with a quote.
        """
        paths = range(len(self.labels)) if self.paths is None else self.paths
        first = [f"./{path}" if str(path).startswith(FORMULA) else str(path) for path in paths]
        header = ["image" if self.paths is None else "path", "predicted", *(f"p({name})" for name in self.classes)]
        with writing(Path(path)), Path(path).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(header)
            for start, name, row in zip(first, self.names, self.probabilities.tolist(), strict=True):
                table.writerow([start, cell_text(name), *(f"{value:.6f}" for value in row)])
        return Path(path)


def readable(
    preprocessing: Preprocessing, images: list[Any], broken: dict[Any, str] | None
) -> tuple[Tensor | None, list[Any]]:
    """A batch of those that can be read, which are given too; the others go into ``broken``, or are an error."""
    try:
        return preprocessing.batch(images), images
    except (OSError, ValueError):  # then one by one
        if broken is None:
            raise
        kept = []
        for image in images:
            try:
                kept.append((preprocessing.batch([image]), image))
            except (OSError, ValueError) as error:
                broken[image] = str(error)
        return torch.cat([one for one, _ in kept]) if kept else None, [image for _, image in kept]


def usable(device: torch.device | str) -> torch.device:
    """A device on which there can be tensors."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # as torch was built
        reason = " ".join(str(error).split(".")[0].split())[:200]
        raise ValueError(
            f"device={str(device)!r} cannot be used ({reason}); give cpu, or a GPU that is there"
        ) from None
    return found


def as_list(images: Any) -> list[Any]:  # noqa: ANN401
    """One image, a batch (B, ...) of four axes, or a list of images, as a list."""
    if isinstance(images, Tensor | np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    single = isinstance(images, str | Path | Image.Image) or not isinstance(images, Iterable)
    return [images] if single else list(images)


def client_index(client: int | str | None, names: Sequence[str] | None, num_clients: int) -> int:
    """The number of a client, given as such, as text, or by name.

    Raises:
        ValueError: If there is no such client.
    """
    if names is not None and client in names:
        return list(names).index(str(client))
    if isinstance(client, str) and not client.isdecimal():
        close = near_names(client, names or ())
        hint = f"the clients have no names: give a number from 0 to {num_clients - 1}"
        hint = f"the clients are {abbreviated(names)}" if names else hint
        raise ValueError(f"client={client!r} is unknown; {f'did you mean {close[0]!r}?' if close else hint}")
    number = int(client) if isinstance(client, str) else client
    check_integer("client", number, 0, le=num_clients - 1)
    assert number is not None
    return number


def find_images(source: Path, column: str = "path", encoding: str | None = None) -> tuple[list[str], list[Path]]:
    """The images that ``source`` stands for: a file, all image files below a folder, or those in a table's ``column``.

    Returns:
        What each is called (in a folder or a table, relative to it), and where it is; those of a folder in order.

    Raises:
        FileNotFoundError: If it does not exist, or a folder holds no images.
        ValueError: If it is not a table (CSV, TSV, Parquet), has no such column, or a row has no path.
        ModuleNotFoundError: If pyarrow is not installed, and the table is of Parquet.
    """
    if source.is_dir():
        names = list_images(source)
        if not names:
            kinds = ", ".join(IMG_EXTENSIONS)
            raise FileNotFoundError(f"{str(source)!r} holds no images ({kinds}); give a folder that does")
        return names, [source / name for name in names]
    if not source.is_file():
        raise FileNotFoundError(
            f"{str(source)!r} does not exist; give an image, a folder, or a table ({', '.join(_TABLES)})"
        )
    if source.suffix.lower() not in _TABLES:
        return [str(source)], [source]
    check_encoding(encoding)
    columns, rows = read_table(source, encoding=encoding)
    if column not in columns:
        raise ValueError(f"{str(source)!r} has no column {column!r} among {list(columns)}; name the paths' with --path")
    names = columns[column].tolist()
    for row, name in zip(rows, names, strict=True):
        if not name:
            raise ValueError(f"{str(source)!r}, row {row}, has no path; fill it in, or leave the row out")
    return names, [Path(existing_spelling(str(source.parent / name))) for name in names]
