# SPDX-License-Identifier: Apache-2.0
"""Tables as files: CSV, TSV and Parquet."""

import codecs
import csv
import io
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import OptionError, installed
from perada.data.medical.reading import MEDICAL_EXTENSIONS
from perada.data.partitions.shares import Array
from perada.data.sets.base import explain_read_errors

_DECLARED_DELIMITER = re.compile(r'"?sep=(?P<delimiter>[^"\r\n])"?(?=[\r\n]|$)', re.IGNORECASE)
"""The first line that Excel reads, and some programs write, to declare the delimiter."""
_ROWS_TO_GUESS = 100
"""Number of rows, with the header, from which the delimiter is guessed."""
_BYTE_ORDER_MARKS = {  # the longer ones first, since that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}


def read_table(
    path: Path, remedy: str = "correct the table", encoding: str | None = None
) -> tuple[dict[str, Array], Array]:
    """Read a CSV, TSV or Parquet file.

    The delimiter of a CSV file is a comma, semicolon, tab or vertical bar: that with which most rows have as many
    fields as the header, or that of a first line such as ``sep=;``. Rows without content, and last columns without name
    and content, are skipped. Null values of a Parquet file become empty strings, its lists lists of strings.

    Args:
        path: The file.
        remedy: What to do, for the end of messages.
        encoding: Encoding of a text file; None for UTF-8, or for UTF-16 or UTF-32 with a byte-order mark.

    Returns:
        The columns (N,) of text by name, and the number (N,) of each row in the file. Rows of text files count from 1,
        the header.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not a table, a row has another number of fields than the header, or there are no rows.
        ModuleNotFoundError: If it is a Parquet file and pyarrow is not installed.
    """
    with explain_read_errors(path, remedy, "a table (.csv, .tsv or .parquet)"):
        if path.suffix.lower() == ".parquet":
            header, columns, row_numbers = _read_parquet(path)
        else:
            header, columns, row_numbers = _read_text_table(path, encoding)
        duplicates = [name for name, count in Counter(header).items() if count > 1]
        if duplicates:
            raise ValueError(f"several columns are called {duplicates[0]!r}")
        files = [name for name in header if name.lower().endswith(IMG_EXTENSIONS + MEDICAL_EXTENSIONS)]
        if files:
            raise ValueError(f"its first line has the image {files[0]!r}; add a line with names, such as path,label")
        if not row_numbers:
            raise ValueError("there are no rows")
    return dict(zip(header, columns, strict=True)), np.array(row_numbers)


def _read_text_table(path: Path, encoding: str | None = None) -> tuple[list[str], list[Array], list[int]]:
    """Return the header, the columns and the row numbers of a CSV or TSV file."""
    text = _decode_text(path.read_bytes(), encoding)
    declaration = _DECLARED_DELIMITER.match(text)
    if declaration is None:
        delimiter = _guess_delimiter(text, prefers_tabs=path.suffix.lower() == ".tsv")
    else:
        delimiter = declaration["delimiter"]
    column_names: list[str] = []
    rows = []
    row_numbers = []
    # Without strict, a quote that is not closed would swallow the rest of the file.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for number, row in enumerate(reader, 1):
            is_blank = not any(cell.strip() for cell in row)
            is_declaration = number == 1 and declaration is not None
            if is_blank or is_declaration:
                continue
            if not column_names:
                column_names = [name.strip() for name in row]
                continue
            rows.append(row)
            row_numbers.append(number)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}, so a quote is missing or superfluous") from None
    cells = _without_edges(_Cells(column_names, rows))
    num_columns = len(cells.column_names)
    for number, row in zip(row_numbers, cells.rows, strict=True):
        if len(row) != num_columns:
            used_delimiter = "" if delimiter == "," else f", with the delimiter {delimiter!r}"
            raise ValueError(f"row {number} has {len(row)} fields, but the header has {num_columns}{used_delimiter}")
    columns = [np.array([row[index] for row in cells.rows]) for index in range(num_columns)]
    return cells.column_names, columns, row_numbers


def _guess_delimiter(text: str, prefers_tabs: bool) -> str:
    """Return the delimiter of a text table: that with which most rows have as many fields as the header.

    Args:
        text: The table.
        prefers_tabs: Whether the table is separated by tabs if its header has any.
    """
    best_delimiter = ","
    best_score = (0.0, 0)
    # Of two that fit equally well, the one that is rarer in words and numbers wins.
    for delimiter in "\t;|,":
        lines = io.StringIO(text, newline="")
        try:
            records = [record for record in islice(csv.reader(lines, delimiter=delimiter), _ROWS_TO_GUESS) if record]
        except csv.Error:
            continue
        if not records or len(records[0]) < 2:
            continue
        if prefers_tabs and delimiter == "\t":
            return delimiter
        num_fields = len(records[0])
        # A trailing delimiter adds an empty field to rows, and R writes row names without a name in the header.
        num_fitting = sum(len(record) in (num_fields, num_fields + 1) for record in records[1:])
        score = (num_fitting / max(1, len(records) - 1), num_fields)
        if score > best_score:
            best_score = score
            best_delimiter = delimiter
    return best_delimiter


@dataclass(frozen=True)
class _Cells:
    """Cells of a text table.

    Attributes:
        column_names: Names of the columns, in the header.
        rows: The cells of each row below.
    """

    column_names: list[str]
    rows: list[list[str]]


def _without_edges(cells: _Cells) -> _Cells:
    """Take off empty last columns, and row names that R writes without a name in the header."""
    names = cells.column_names
    rows = cells.rows
    if rows and all(len(row) == len(names) + 1 for row in rows):
        if all(not row[-1].strip() for row in rows):
            rows = [row[:-1] for row in rows]
        else:
            rows = [row[1:] for row in rows]
    while names and not names[-1] and all(len(row) == len(names) and not row[-1].strip() for row in rows):
        names = names[:-1]
        rows = [row[:-1] for row in rows]
    return _Cells(names, rows)


def _decode_text(content: bytes, encoding: str | None) -> str:
    """Decode the content of a text file.

    Raises:
        ValueError: If it has another encoding. The message has the line and the remedy.
    """
    marked_encoding = None
    for mark, name in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            marked_encoding = name
            break
    if encoding is None and marked_encoding is None and b"\0" in content[:1024]:
        raise ValueError(
            "it has zero bytes, like UTF-16 without a byte-order mark: save it as UTF-8, or name its encoding "
            "(encoding: utf-16-le or utf-16-be)"
        )
    used_encoding = encoding or marked_encoding or "utf-8"
    try:
        # The byte-order mark is not part of the first column's name.
        return content.decode(used_encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        invalid_byte = content[error.start : error.start + 1]
        hint = ""
        in_windows_1252 = invalid_byte.decode("cp1252", "replace")
        if used_encoding.startswith("utf-8") and in_windows_1252 != "\ufffd":
            hint = f", which is {in_windows_1252!r} in Windows-1252"
        raise ValueError(
            f"line {line} has the byte {invalid_byte[0]:#04x}{hint}, so the file is not {used_encoding.upper()}: save "
            "it as UTF-8 (in Excel: CSV UTF-8), or name its encoding, such as encoding: cp1252 (--encoding=cp1252)"
        ) from None


def _read_parquet(path: Path) -> tuple[list[str], list[Array], list[int]]:
    """Return the column names, the columns and the row numbers of a Parquet file."""
    parquet = installed("pyarrow.parquet", path, "tables")
    table = parquet.ParquetFile(path).read()
    columns = []
    for column in table.columns:
        # np.array would make a second axis of lists of equal length.
        columns.append(np.fromiter(map(_as_text, column.to_pylist()), dtype=object))
    return table.column_names, columns, list(range(1, len(table) + 1))


def _as_text(value: object) -> object:
    if isinstance(value, list):
        return [str(element) for element in value]
    return "" if value is None else str(value)


def check_encoding(encoding: str | None) -> None:
    """Raise an OptionError unless the value is the name of a text encoding, or None."""
    try:
        if encoding is not None:
            "".encode(encoding)
    except (LookupError, TypeError, ValueError):
        raise OptionError(
            f"encoding={encoding!r} is unknown; choose one that Python supports, such as 'utf-8', 'cp1252' (Western "
            "European Windows), 'utf-16' or 'shift_jis', or leave it out",
            name="encoding",
            value=encoding,
        ) from None


def existing_spelling(path: str) -> str:
    """Return the path, or its spelling on other systems if only that exists."""
    if os.path.exists(path):
        return path
    with_slashes = path.replace("\\", "/")  # Windows writes backslashes
    # macOS writes letters with accents as two code points each.
    spellings = [with_slashes, *(unicodedata.normalize(form, with_slashes) for form in ("NFC", "NFD"))]
    for spelling in spellings:
        if os.path.exists(spelling):
            return spelling
    return with_slashes


def is_same_file(path: str, other: str) -> bool:
    """Return whether two resolved paths, which differ in case at most, are one file."""
    return path == other or os.path.samefile(path, other)
