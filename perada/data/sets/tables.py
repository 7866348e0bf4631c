# SPDX-License-Identifier: Apache-2.0
"""Images of one's own that a table lists: CSV, TSV or Parquet."""

import csv
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from perada.core.text import some
from perada.data.partitions.shares import Array
from perada.data.sets.manifest import SPLITS, Manifest, OwnImages, marked, numbered, ordered

LISTED = "\x1f"
"""Stands before each entry of a list in a column of a Parquet file."""
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
        **options: Those of :class:`.OwnImages`.

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
        **options: Any,
    ) -> None:
        super().__init__(str(Path(table).parent) if folder is None else folder, **options)
        self.table, self.folder, self.path, self.label = table, folder, path, label
        self.where = table
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

    def read_manifest(self) -> Manifest:
        """List the rows of the table."""
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
        return Manifest(paths, labels, classes, columns, split)

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


def read_table(path: Path) -> tuple[dict[str, Array], Array]:
    """Read a CSV, TSV or Parquet file: columns (N,) of strings by name, and the number (N,) of each row in the file.

    What a Parquet file lacks is an empty string; before each entry of a list in it stands :data:`LISTED`. Rows of text
    files count from 1, the header. The fields of a CSV file are divided by commas, or by semicolons or tabs if its
    header has these and no comma.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such table, a row has another number of fields than the header, or there are no rows.
        ModuleNotFoundError: If pyarrow is not installed, and the file is of Parquet.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: set table to a .csv, .tsv or .parquet file")
    suffix = path.suffix.lower()
    if suffix != ".parquet":
        return read_csv(path, "correct the table, and save it in UTF-8", "\t" if suffix == ".tsv" else _delimiter(path))
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is read with pyarrow, which is not installed ({error}); pip install 'perada[tables]'"
        ) from error
    try:
        _check_header(path, parquet.read_schema(path).names)
        content = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a table ({' '.join(str(error).split())}): correct the table") from None
    if not len(content):
        raise ValueError(f"{path} has no rows: correct the table")
    columns = {
        name: np.array([_as_text(value) for value in column.to_pylist()])
        for name, column in zip(content.column_names, content.columns, strict=True)
    }
    return columns, np.arange(1, len(content) + 1)


def _check_header(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has several columns called {twice[0]!r}: rename all but one, or leave them out")


def _as_text(value: Any) -> str:  # noqa: ANN401  # what Parquet can hold
    if isinstance(value, list):
        return "".join(f"{LISTED}{one}" for one in value)
    return "" if value is None else str(value)


def _delimiter(path: Path) -> str:
    """What divides the fields: spreadsheets write semicolons where the comma stands in numbers."""
    with path.open("rb") as file:
        header = file.readline(2**16)
    other = next((mark for mark in (b";", b"\t") if mark in header), b",")
    return "," if b"," in header else other.decode()


def read_csv(path: Path, remedy: str, delimiter: str = ",") -> tuple[dict[str, Array], Array]:
    """The columns of a text file and the rows' numbers; empty lines are passed over.

    Raises:
        ValueError: If it is not a table, a row has another number of fields than the header, or there are no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark at its start
            rows = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=delimiter), 1) if row]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a table in UTF-8 ({error}): {remedy}") from None
    except csv.Error as error:
        raise ValueError(f"{path} is not a table ({error}): {remedy}") from None
    if not rows:
        raise ValueError(f"{path} is empty: {remedy}")
    header = rows[0][1]
    _check_header(path, header)
    for number, row in rows[1:]:
        if len(row) != len(header):
            raise ValueError(f"{path}, row {number}, has {len(row)} fields and the header {len(header)}: {remedy}")
    if len(rows) < 2:
        raise ValueError(f"{path} has a header and no rows: {remedy}")
    columns = {name: np.array([row[place] for _, row in rows[1:]]) for place, name in enumerate(header)}
    return columns, np.array([number for number, _ in rows[1:]])
