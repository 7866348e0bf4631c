# SPDX-License-Identifier: Apache-2.0
"""Images of one's own that the rows of a table list: CSV, TSV or Parquet, or a set of Hugging Face ``datasets``."""

import codecs
import csv
import hashlib
import io
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from perada.core.checks import OptionError, installed
from perada.data.batches.transforms import MissingImageError, read_image, resize_uint8
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, numbered, reading
from perada.data.sets.manifest import SPLITS, ListedImages

if TYPE_CHECKING:
    from datasets import Dataset

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_LABELS = ("label", "labels", "fine_label")
_TRUE = frozenset({"1", "1.0", "true"})
BINARY = _TRUE | {"0", "0.0", "false"}
"""What cells of a column of zeros and ones may hold, in lower case."""


class ImageTable(ListedImages):
    """Images of one's own that a table lists, a row each: CSV, TSV or Parquet (``pip install 'perada[tables]'``).

    Labels are names. Several labels an image stand in one column, parted by ``separator``, or in columns of zeros and
    ones, which ``label`` then lists.

    Args:
        table: The file.
        folder: Where paths begin; null for the table's own folder.
        path: Column of the files' paths.
        label: Column of the labels, or columns of zeros and ones.
        split: Column of the split; null for ``split``, if there is such a column.
        separator: What parts several labels in one column, such as ``|``; null for one label an image.
        encoding: Of a text file, such as ``cp1252`` as Excel writes it on Windows; null for UTF-8, or for UTF-16 or
            UTF-32 with a byte-order mark.
        **options: Those of :class:`.ListedImages`.
    """

    def __init__(
        self,
        table: str,
        folder: str | None = None,
        path: str = "path",
        label: str | list[str] = "label",
        split: str | None = None,
        separator: str | None = None,
        encoding: str | None = None,
        **options: Any,
    ) -> None:
        check_encoding(encoding)
        super().__init__(str(Path(table).parent) if folder is None else folder, **options)
        self.table, self.folder, self.path, self.label = table, folder, path, label
        self.where = table
        self.split, self.separator = split, separator
        self.encoding = encoding

    @cached_property
    def listed(self) -> tuple[dict[str, list[Any]], list[int]]:
        """The columns as the file has them, and the number of each row in it."""
        columns, numbers = read_table(Path(self.table), encoding=self.encoding)
        return {name: column.tolist() for name, column in columns.items()}, numbers.tolist()

    def read_manifest(self) -> Manifest:
        """List the rows of the table."""
        files = self.column("path", self.path, "give the file's path, or take the row out")
        counts = Counter(files)
        twice = [place for place, file in enumerate(files) if counts[file] > 1]
        self.refuse(twice, "files are named more than once", "give each file one row; separator parts several labels")
        paths = [os.path.join(self.root, file) for file in files]
        paths = [existing_spelling(path) for path in paths]
        missing = [place for place, path in enumerate(paths) if not os.path.isfile(path)]
        self.refuse(
            missing, f"{paths[missing[0]] if missing else ''} does not exist", "correct the path, or set folder"
        )
        classes, labels = self._labels()
        split = self.split or ("split" if "split" in self.listed[0] else None)
        words = None if split is None else np.array(self.column("split", split))
        return Manifest(paths, labels, classes, self.facts(), words)

    def _labels(self) -> tuple[tuple[str, ...], Array]:
        if not isinstance(self.label, str):
            known = {cell: cell in _TRUE for cell in BINARY}
            labels: list[list[str]] = [[] for _ in self.listed[1]]
            for name in self.label:
                for place, cell in enumerate(self.column("label", name)):
                    if cell.lower() not in known:
                        self.refuse([place], f"{name} is {cell!r}, neither 0 nor 1", "correct it, or take the row out")
                    labels[place] += [name] * known[cell.lower()]
            return numbered(labels, tuple(self.label))
        column = self.listed[0][self.named("label", self.label)]
        if self.separator is not None or any(isinstance(cell, list) for cell in column):
            cells = [cell.split(self.separator) if isinstance(cell, str) else cell for cell in column]
            return numbered([[part.strip() for part in cell if part.strip()] for cell in cells])
        parted = separator_of(column)
        several = f"; or set separator={parted!r}, if an image may have none, one or several" if parted else ""
        self.column("label", self.label, "give a label, or take the row out" + several)
        if parted:
            warnings.warn(
                f"{self.table}: each of {self.label}'s cells is one class, also those with {parted!r}; if they "
                f"hold several labels, set separator={parted!r}",
                stacklevel=2,
            )
        values = {*column}
        broken = next((one for one in column if _NUMBER.fullmatch(one) and float(one) % 1), None)
        if broken is not None and 2 * len(values) > len(column) and all(map(_NUMBER.fullmatch, values)):
            raise ValueError(
                f"{self.table}: {self.label} holds {len(values)} different numbers in {len(column)} rows, such as "
                f"{broken}, and no classes; name another column, or divide the numbers into ranges"
            )
        return numbered(column)


class HuggingFace(ListedImages):
    """An image set of Hugging Face ``datasets`` (``pip install 'perada[datasets]'``), by name or from a local folder.

    A folder is what ``save_to_disk`` wrote, or one that ``load_dataset`` reads: Parquet files, or images with or
    without ``metadata.csv``. Code that comes with a set is never run. Labels are class labels, whole numbers, words, or
    lists of these where an image may have several. Class labels keep their names and order; those that no image has
    are left out.

    Args:
        name: Name on the Hub, such as ``flwrlabs/office-home``, or a folder.
        config: Which of the set's configurations, where it has several.
        revision: A branch, a tag or a commit of the Hub, so that the set stays the same.
        splits: The set's splits that are used; null for all whose names are known.
        image: Column of the images; null for the only one.
        label: Column of the labels; null for ``label``, ``labels`` or ``fine_label``, or the only class labels.
        **options: Those of :class:`.ListedImages`.
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        revision: str | None = None,
        splits: list[str] | None = None,
        image: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.name = self.where = name.removeprefix("hf:")  # as the command line names sets
        self.config, self.revision, self.splits, self.image, self.label = config, revision, splits, image, label

    @cached_property
    def _rows(self) -> tuple["Dataset", dict[str, int]]:
        """The rows of all splits that are used, and where in them each ``split[row]`` is."""
        datasets, folder = installed("datasets", self.name, "datasets"), Path(self.name)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                read = datasets.load_from_disk(self.name)
            else:
                read = datasets.load_dataset(self.name, self.config, revision=self.revision)
        except Exception as error:  # it raises many types
            reason = " ".join(str(error).split())
            raise FileNotFoundError(
                f"the data set {self.name!r} cannot be had ({type(error).__name__}: {reason[:300]}): set name to one "
                "of the Hub or to a folder, and config where it has several"
            ) from None
        found = dict(read) if isinstance(read, dict) else {str(read.split or "train"): read}
        known = [split for split, part in found.items() if split.lower() in SPLITS and len(part)]
        wanted = self.splits or (known if len(found) > 1 else list(found))
        for split in wanted:
            if split not in found:
                raise OptionError(
                    f"splits: {self.name} has no split {split!r}; it has {', '.join(found)}", name="splits"
                )
        if not wanted or (len(wanted) > 1 and not {*wanted} <= {*known}):
            raise OptionError(
                f"splits: of several splits of {self.name} each must be one of {', '.join(SPLITS)}; name those to be "
                "used, or a single one",
                name="splits",
            )
        names = [f"{split}[{row}]" for split in wanted for row in range(len(found[split]))]
        parts = [found[split] for split in wanted if len(found[split])]
        try:
            whole = datasets.concatenate_datasets(parts or [found[wanted[0]]])
        except ValueError as error:
            raise OptionError(
                f"splits: {', '.join(wanted)} of {self.name} have columns that do not fit ({error}); cast them to the "
                "same features, or name a single split",
                name="splits",
            ) from None
        return whole, {name: row for row, name in enumerate(names)}

    @cached_property
    def listed(self) -> tuple[dict[str, Sequence[Any]], list[str]]:
        """The columns of all splits that are used, and ``split[row]`` of each row."""
        whole, places = self._rows
        return {name: whole[name] for name in whole.column_names}, list(places)

    def _only(self, option: str, usual: list[str], what: str, able: list[str]) -> str:
        """The column that an option names, or the only usual one; it must be one of those that are able."""
        given: str | None = getattr(self, option)
        found = usual if given is None else [self.named(option, given)]
        if len(found) != 1:
            there = f"several ({', '.join(found)})" if found else "none"
            raise ValueError(
                f"{option}: {self.name} has {there} of the columns {what} among {', '.join(self.listed[0])}; name it"
            )
        if found[0] not in able:
            kind = self._rows[0].features[found[0]]
            raise ValueError(
                f"{option}: column {found[0]!r} of {self.name} holds {kind}, and no {option}s; name another"
            )
        return found[0]

    @cached_property
    def _images(self) -> "Dataset":
        from datasets import Image as ImageFeature

        whole, _ = self._rows
        fitting = [name for name, kind in whole.features.items() if isinstance(kind, ImageFeature)]
        column = self._only("image", fitting, "of images", fitting)
        return whole.select_columns([column]).cast_column(column, ImageFeature(decode=False))

    def content(self, path: str) -> bytes:
        """The image ``split[row]`` as it is stored."""
        (stored,) = self._images[self._rows[1][path]].values()
        if stored is None:
            raise MissingImageError(f"{self.name}, {path}, has no image: take the row out")
        return stored["bytes"] or Path(stored["path"]).read_bytes()

    def _digest(self, path: str) -> str:
        return hashlib.sha256(self.content(path)).hexdigest()

    def read(self, path: str) -> Tensor:
        """Read the image ``split[row]`` as uint8 (Ch, size, size), as image files are read."""
        file = io.BytesIO(self.content(path))
        pixels = read_image(file, "take the row out", self.mode, self.full_scale, f"{self.name}, {path},")
        return resize_uint8(pixels, self.size)

    def read_manifest(self) -> Manifest:
        """List the rows of the splits that are used."""
        self._images  # noqa: B018  # whether there are images is said before anything else
        classes, labels = self._labels()
        paths = self.listed[1]
        split = np.array([path.rpartition("[")[0] for path in paths])
        return Manifest(
            paths, labels, classes, self.facts(), split if len({*split, *(self.splits or ())}) > 1 else None
        )

    def _labels(self) -> tuple[tuple[str, ...], Array]:
        features = self._rows[0].features
        inner = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
        usual = [name for name in _LABELS if name in inner][:1]
        fitting = usual or [name for name, kind in inner.items() if hasattr(kind, "names")]  # class labels
        dtypes = {name: str(getattr(kind, "dtype", "")) for name, kind in inner.items()}
        able = [name for name, dtype in dtypes.items() if re.match("u?int|bool|(large_)?string", dtype)]
        column = self._only("label", fitting, f"called {', '.join(_LABELS)} or of class labels", able)
        kind = inner[column]
        values = self.column("label", column)
        several = kind is not features[column]
        rows = values if several else [[value] for value in values]
        names = dict(enumerate(getattr(kind, "names", ())))
        words = [[str(names.get(one, one)) for one in own] for own in rows]
        used = {word for own in words for word in own}
        if names and not used <= {*names.values()}:
            raise OptionError(
                f"label: {self.name} has classes in {column} that have no name; take their rows out", name="label"
            )
        classes = tuple(name for name in names.values() if name in used) or None
        return numbered(words if several else [own[0] for own in words], classes)


def separator_of(column: list[str]) -> str | None:
    """What seems to part several labels in a cell: its parts are labels of other cells, too."""
    cells = {*column}
    for mark in "|;,":
        together = [cell.split(mark) for cell in cells if mark in cell]
        if together and all(part.strip() in cells for parts in together for part in parts):
            return mark
    return None


def existing_spelling(path: str) -> str:
    """The path, or the same one as other systems write it, if that is there."""
    if os.path.exists(path):
        return path
    with_slashes = path.replace("\\", "/")  # Windows writes backslashes
    # macOS writes letters with accents as two code points each.
    spellings = [with_slashes, *(unicodedata.normalize(form, with_slashes) for form in ("NFC", "NFD"))]
    return next((spelling for spelling in spellings if os.path.exists(spelling)), with_slashes)


def check_encoding(encoding: str | None) -> None:
    """Refuse what is not the name of an encoding of text, or None."""
    try:
        if encoding is not None:
            "".encode(encoding)
    except (LookupError, TypeError, ValueError):
        raise OptionError(
            f"encoding={encoding!r} is unknown; choose one that Python knows, such as 'utf-8', 'cp1252' (Western "
            "European Windows), 'utf-16' or 'shift_jis', or leave it out",
            name="encoding",
            value=encoding,
        ) from None


def read_table(
    path: Path, again: str = "correct the table", encoding: str | None = None
) -> tuple[dict[str, Array], Array]:
    """Read a CSV, TSV or Parquet file: columns (N,) of text by name, and the number (N,) of each row in the file.

    What a Parquet file lacks is an empty string, and its lists are lists of strings. Rows of text files count from 1,
    the header; empty lines are passed over. The fields of a CSV file are divided by commas, or by semicolons or tabs if
    its header has these and no comma. Text is in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark, or in
    ``encoding``.

    Raises:
        FileNotFoundError: If there is no such file. Messages end with what to do, ``again``.
        ValueError: If it is no such table, a row has another number of fields than the header, or there are no rows.
        ModuleNotFoundError: If pyarrow is not installed, and the file is of Parquet.
    """
    with reading(path, again, "a table (.csv, .tsv or .parquet)"):
        is_parquet = path.suffix.lower() == ".parquet"
        header, columns, numbers = _parquet(path) if is_parquet else _text(path, encoding)
        twice = [name for name, count in Counter(header).items() if count > 1]
        if twice:
            raise ValueError(f"several columns are called {twice[0]!r}")
        if not numbers:
            raise ValueError("there are no rows")
    return dict(zip(header, columns, strict=True)), np.array(numbers)


def _text(path: Path, encoding: str | None = None) -> tuple[list[str], list[Array], list[int]]:
    """Header, columns and the rows' numbers of a CSV or TSV file."""
    text = _decoded(path.read_bytes(), encoding)
    header = text.partition("\n")[0]
    other = next((mark for mark in ";\t" if mark in header), ",")  # the comma stands in numbers in many countries
    delimiter = "\t" if path.suffix.lower() == ".tsv" else "," if "," in header else other
    found = [
        (number, row)
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 1)
        if row
    ]
    (_, names), *rows = found or [(1, [])]
    for number, row in rows:
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} fields and the header {len(names)}")
    columns = [np.array([row[place] for _, row in rows]) for place in range(len(names))]
    return names, columns, [number for number, _ in rows]


_BYTE_ORDER_MARKS = {  # the longer ones first, since that of UTF-32 begins as that of UTF-16 does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}


def _decoded(content: bytes, encoding: str | None) -> str:
    """The text of a file.

    Raises:
        ValueError: If it is in another encoding; the message has the line and what to do.
    """
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), None)
    if encoding is None and marked is None and b"\0" in content[:1024]:
        raise ValueError(
            "it has zero bytes, as UTF-16 without a byte-order mark has them: save it as UTF-8, or name its encoding "
            "(encoding: utf-16-le or utf-16-be)"
        )
    chosen = encoding or marked or "utf-8"
    try:
        return content.decode(chosen).removeprefix("\ufeff")  # the mark is no part of the first column's name
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        letter = content[error.start : error.start + 1]
        windows = letter.decode("cp1252", "replace")
        guess = f", which is {windows!r} in Windows-1252" if chosen.startswith("utf-8") and windows != "\ufffd" else ""
        raise ValueError(
            f"line {line} has the byte {letter[0]:#04x}{guess}, and is not {chosen.upper()}: save "
            "it as UTF-8 (in Excel: CSV UTF-8), or name its encoding, such as encoding: cp1252 (--encoding=cp1252)"
        ) from None


def _parquet(path: Path) -> tuple[list[str], list[Array], list[int]]:
    parquet = installed("pyarrow.parquet", path, "tables")
    content = parquet.ParquetFile(path).read()
    columns = [np.fromiter(map(_as_text, one.to_pylist()), dtype=object) for one in content.columns]
    return content.column_names, columns, [*range(1, len(content) + 1)]


def _as_text(value: Any) -> Any:  # noqa: ANN401  # what Parquet can hold
    if isinstance(value, list):
        return [str(one) for one in value]
    return "" if value is None else str(value)
