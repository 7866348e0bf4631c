# SPDX-License-Identifier: Apache-2.0
"""Images of one's own that a table lists."""

import os
import re
import warnings
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import numpy as np

from perada.core.text import some
from perada.data.partitions.apportion import Array
from perada.data.sets.layouts import SPLITS
from perada.data.sets.own import OwnImages, Records, marked, numbered, ordered
from perada.data.sets.tables import LISTED, read_table

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


class ImageTable(OwnImages):
    """Images of one's own that a table lists, a row each: CSV, TSV or Parquet (``pip install 'perada[tables]'``).

    Labels are names. Several labels an image stand in one column, parted by ``separator``, or in columns of zeros and
    ones, which ``label`` then lists.

    The columns ``client`` and ``group`` of the set are those of the table that are named so here. A split is called
    ``train``, ``test`` or ``val`` (or ``training``, ``testing``, ``valid``, ``validation``, ``dev``). ``val`` is the
    test split where there is no other, or else left out.

    Args:
        table: The file.
        folder: Where paths begin; null for the table's own folder.
        path: Column of the files' paths.
        label: Column of the labels, or columns of zeros and ones.
        client: Column of the clients; null for ``client``, if there is such a column.
        split: Column of the split; null for ``split``, if there is such a column.
        group: Column of what must not stand on both sides, such as the patient; null for ``group``, likewise.
        separator: What parts several labels in one column, such as ``|``; null for one label an image.
        test_share: Without a split, about the share of each client's images that is the test split.
        seed: Another seed, another test split.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        gray: One channel instead of three.
        full_scale: The value of white in grey images of more than 8 bits, such as 4095; null for 65535, or for 1 in
            floating-point images.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.
        classes: Names of the classes, in the order of their numbers; some may have no images. null: those in the table.

    Raises:
        FileNotFoundError: When the set is first read, if the table or files that it lists are missing.
        ValueError: If an option is out of range or, when it is first read, the table lacks a column or has rows that
            cannot be used; they are named.
    """

    _how = "the table"

    def __init__(
        self,
        table: str,
        folder: str | None = None,
        path: str = "path",
        label: str | list[str] = "label",
        client: str | None = None,
        split: str | None = None,
        group: str | None = None,
        separator: str | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        size: int = 224,
        gray: bool = False,
        full_scale: float | None = None,
        in_memory: bool = False,
        train: bool = True,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__(
            str(Path(table).parent) if folder is None else folder,
            test_share,
            seed,
            size,
            gray,
            full_scale,
            in_memory,
            train,
            classes,
        )
        self.table, self.folder, self.path, self.label = table, folder, path, label
        self._where = table
        self.client, self.split, self.group, self.separator = client, split, group, separator

    @cached_property
    def _table(self) -> tuple[dict[str, Array], Array]:
        """All columns, and the number of each row in the file."""
        return read_table(Path(self.table))

    @property
    def group_column(self) -> str | None:  # type: ignore[override]  # it depends on the table
        """The column of groups, if there is one."""
        return "group" if self.group or "group" in self._table[0] else None

    @property
    def has_clients(self) -> bool:
        """Whether the table says which client an image belongs to."""
        return bool(self.client) or "client" in self._table[0]

    def _column(self, name: str) -> Array:
        columns, _ = self._table
        if name not in columns:
            parts = [part.strip() for part in name.strip("[]").split(",")]
            if len(parts) > 1 and all(part in columns for part in parts):
                raise ValueError(
                    f"{self.table} has no column {name!r}; several are given as a list, [{', '.join(parts)}]"
                )
            close = get_close_matches(name, columns, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, columns))}"
            if not close and name in ("path", "label"):
                hint += f"; name the one that holds the {name}s with {name}"
            raise ValueError(f"{self.table} has no column {name!r}; {hint}")
        return columns[name]

    def _optional(self, name: str | None, default: str) -> Array | None:
        if name is None and default not in self._table[0]:
            return None
        return self._column(name or default)

    def _refuse(self, wrong: Array, what: str, remedy: str) -> None:
        """Name the rows of the file that cannot be used."""
        numbers = self._table[1][wrong]
        if len(numbers):
            rows = f"row{'s' * (len(numbers) > 1)} {some([str(number) for number in numbers])}"
            raise ValueError(f"{self.table}, {rows}: {what}; {remedy}")

    def _refuse_measured(self, column: Array) -> None:
        """Refuse numbers with fractions of which most occur once: these are measured, and no classes."""
        values = {*column.tolist()}
        if 2 * len(values) <= len(column) or not all(map(_NUMBER.fullmatch, values)):
            return
        broken = next((value for value in column.tolist() if float(value) % 1), None)
        if broken is not None:
            raise ValueError(
                f"{self.table}: {self.label} holds {len(values)} different numbers in {len(column)} rows, such as "
                f"{broken}, and no classes; name another column, or divide the numbers into ranges"
            )

    def _records(self) -> Records:
        files = self._column(self.path)
        self._refuse(np.equal(files, ""), f"{self.path} is empty", "give the file's path, or take the row out")
        _, first, counts = np.unique(files, return_index=True, return_counts=True)
        twice = np.flatnonzero(np.isin(files, files[first[counts > 1]]))
        self._refuse(twice, "files are named more than once", "give each file one row; separator parts several labels")
        paths = [_place(self.root, file) for file in files.tolist()]
        missing = np.flatnonzero([not os.path.isfile(path) for path in paths])
        if len(missing):
            self._refuse(missing, f"{paths[missing[0]]} does not exist", "correct the path, or set folder")
        classes, labels = self._labels()
        columns = {}
        for name, given in (("client", self.client), ("group", self.group)):
            column = self._optional(given, name)
            if column is not None:
                self._refuse(np.equal(column, ""), f"{given or name} is empty", "fill it in, or take the row out")
                columns[name] = column
        words = self._optional(self.split, "split")
        split = None
        if words is not None:
            meant = np.array([SPLITS.get(word.lower(), "") for word in words.tolist()])
            self._refuse(np.equal(meant, ""), f"{self.split or 'split'} is none of {', '.join(SPLITS)}", "correct it")
            split = meant
        return Records(paths, labels, classes, columns, split)

    def _labels(self) -> tuple[tuple[str, ...], Array]:
        if not isinstance(self.label, str):
            known = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
            found = np.stack([np.char.lower(self._column(name)) for name in self.label], axis=1)
            for name, words in zip(self.label, found.T, strict=True):
                wrong = np.flatnonzero(~np.isin(words, list(known)))
                if len(wrong):
                    one = self._column(name)[wrong[0]]
                    self._refuse(wrong, f"{name} is {str(one)!r}, neither 0 nor 1", "correct it, or take the row out")
            return tuple(self.label), np.vectorize(known.__getitem__, otypes=[np.float32])(found)
        column = self._column(self.label)
        separator = LISTED if np.char.startswith(column, LISTED).any() else self.separator
        if separator is None:
            parted = _separator_of(column)
            several = f"; or set separator={parted!r}, if an image may have none, one or several" if parted else ""
            self._refuse(np.equal(column, ""), f"{self.label} is empty", "give a label, or take the row out" + several)
            if parted:
                warnings.warn(
                    f"{self.table}: each of {self.label}'s cells is one class, also those with {parted!r}; if they "
                    f"hold several labels, set separator={parted!r}",
                    stacklevel=2,
                )
            self._refuse_measured(column)
            return numbered(column.tolist())
        cells = [cell.split(separator) for cell in column.tolist()]
        parts = [[part.strip() for part in cell if part.strip()] for cell in cells]
        classes = ordered({part for row in parts for part in row})
        if not classes:
            raise ValueError(f"{self.table}: {self.label} is empty in every row; give labels")
        return classes, marked(parts, classes)


def _separator_of(column: Array) -> str | None:
    """What seems to part several labels in a cell: its parts are labels of other cells, too."""
    cells = {*column.tolist()}
    for mark in "|;,":
        together = [cell.split(mark) for cell in cells if mark in cell]
        if together and all(part.strip() in cells for parts in together for part in parts):
            return mark
    return None


def _place(root: str, file: str) -> str:
    """Where a file is; a path with backslashes, as Windows writes them, is read with slashes if nothing is there."""
    path = os.path.join(root, file)
    if "\\" in file and not os.path.exists(path):
        return os.path.join(root, file.replace("\\", "/"))
    return path
