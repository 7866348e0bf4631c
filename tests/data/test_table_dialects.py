# SPDX-License-Identifier: Apache-2.0
"""Text tables as Excel, R and pandas write them have the cells that were written."""

import csv
import io

import pytest

from perada.data.sets.table_files import read_table

CELLS = {"path": ["a.png", "b, c.png", "d.png"], "age, years": ["1,5", "2,25", "3"], "label": ["x", "y\nz", 'say "w"']}
HEADER = list(CELLS)
ROWS = [list(row) for row in zip(*CELLS.values(), strict=True)]


def write_csv(delimiter=",", newline="\n", quoting=csv.QUOTE_MINIMAL, header=HEADER, rows=ROWS):
    """A table as the standard library writes it."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=newline, quoting=quoting)
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()


def read_columns(tmp_path, text, name="table.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    columns, _ = read_table(path)
    return {name: column.tolist() for name, column in columns.items()}


def excel_rows(text):
    """A table in which each row ends in a delimiter, as for an empty last column."""
    return text.replace("\r\n", ";\r\n")


def r_table(delimiter):
    """``write.table(col.names=TRUE)`` of R: the header has no field for the names of rows."""
    rows = [[str(number), *row] for number, row in enumerate(ROWS, 1)]
    return write_csv(delimiter, quoting=csv.QUOTE_ALL, rows=rows)


DIALECTS = {
    "comma": write_csv(),
    "semicolon": write_csv(";"),
    "semicolon, Windows": write_csv(";", "\r\n"),
    "tab": write_csv("\t", "\r\n"),
    "bar": write_csv("|"),
    "all quoted": write_csv(";", quoting=csv.QUOTE_ALL),
    "old Macintosh": write_csv(";", "\r").replace("\n", " "),
    "sep": "sep=;\r\n" + write_csv(";", "\r\n"),
    "SEP, quoted": '"SEP=;"\r\n' + write_csv(";", "\r\n"),
    "sep of tabs": "sep=\t\n" + write_csv("\t"),
    "sep of another character": "sep=#\n" + write_csv("#"),
    "trailing delimiters": excel_rows(write_csv(";", "\r\n")),
    "trailing delimiters of rows": excel_rows(write_csv(";", "\r\n")).replace("label;\r\n", "label\r\n", 1),
    "rows without content": write_csv(";", "\r\n") + ";;\r\n\r\n;;\r\n",
    "blank lines first": "\n\n" + write_csv(),
    "R": r_table(","),
    "R, write.csv2": r_table(";"),
    "spaces in the header": write_csv(";").replace("path;age, years;label", "path ; age, years ; label"),
}


@pytest.mark.parametrize("kind", DIALECTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_dialect_is_read(tmp_path, kind, encoding):
    expected = {name: list(cells) for name, cells in CELLS.items()}
    if kind == "old Macintosh":
        expected["label"][1] = "y z"
    assert read_columns(tmp_path, DIALECTS[kind], encoding=encoding) == expected


def test_a_tsv_may_be_separated_otherwise(tmp_path):
    for delimiter in "\t,;":
        assert read_columns(tmp_path, write_csv(delimiter), "table.tsv") == CELLS


def test_two_columns_with_a_comma_in_each_cell(tmp_path):
    text = "path;height, cm\na.png;1,5\nb.png;2,5\n"
    assert read_columns(tmp_path, text) == {"path": ["a.png", "b.png"], "height, cm": ["1,5", "2,5"]}


def test_labels_with_bars_are_no_delimiters(tmp_path):
    assert read_columns(tmp_path, "path,label\na.png,x|y\nb.png,x\n") == {
        "path": ["a.png", "b.png"],
        "label": ["x|y", "x"],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('path,label\na.png,"x\nb.png,y\n', "line 3: unexpected end of data, so a quote is missing"),
        ('path,label\na.png,"x"y\n', "line 2: ',' expected after '\"'"),
        (
            "path;label\na.png;x\nb.png;y;z\nc.png;z\n",
            "row 3 has 3 fields, but the header has 2, with the delimiter ';'",
        ),
        ("path,label\na.png,x\nb.png\n", "row 3 has 1 fields, but the header has 2"),
        ("sep=;\n", "there are no rows"),
        ("path;label\n;\n", "there are no rows"),
    ],
)
def test_a_damaged_table_is_named_with_its_row(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"table\.csv.*{message}"):
        read_columns(tmp_path, text)


def test_rows_are_numbered_as_in_the_file(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("sep=;\n\npath;label\na.png;x\n;\nb.png;y\n")
    _, row_numbers = read_table(path)
    assert row_numbers.tolist() == [4, 6]


def test_a_table_without_names_of_columns_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"'a\.png'; add a line"):
        read_columns(tmp_path, "a.png,cat\nb.png,dog\n")
