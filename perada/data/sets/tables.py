# SPDX-License-Identifier: Apache-2.0
"""Image sets whose files a table lists, with their labels and to whom they belong."""

import csv
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perada.core.checks import check_number, check_whole
from perada.core.seeding import derive_seed
from perada.data.partitions.apportion import Array
from perada.data.partitions.by_label import categories
from perada.data.partitions.shares import of_each_stratum, whole_groups
from perada.data.sets.folders import ImageFiles, Listing
from perada.data.sets.readers import find_folder

LISTED = "\x1f"
"""Stands before each entry of a list in a column of a Parquet file."""
_LIKE = "CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg"
FINDINGS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")


def read_columns(path: Path, names: Sequence[str], source: str) -> list[Array]:
    """Read columns of a csv file with a header: an array (N,) of strings for each of ``names``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a column is missing, a row has another number of fields than the header, or there are no rows.
    """
    again = f"fetch it again from {source}"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: set root to the folder that holds it, or {again}")
    columns, _ = _read_csv(path, again)
    missing = [name for name in names if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r} among {list(columns)}: {again}")
    return [columns[name] for name in names]


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
        return _read_csv(
            path, "correct the table, and save it in UTF-8", "\t" if suffix == ".tsv" else _delimiter(path)
        )
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
        raise ValueError(f"{path} is no table ({' '.join(str(error).split())}): correct the table") from None
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


def _read_csv(path: Path, remedy: str, delimiter: str = ",") -> tuple[dict[str, Array], Array]:
    """The columns of a text file and the rows' numbers; empty lines are passed over."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark at its start
            rows = [(number, row) for number, row in enumerate(csv.reader(file, delimiter=delimiter), 1) if row]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no table in UTF-8 ({error}): {remedy}") from None
    except csv.Error as error:
        raise ValueError(f"{path} is no table ({error}): {remedy}") from None
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


class CheXpert(ImageFiles):
    """CheXpert, 223,414 chest radiographs of 64,540 patients, with five labels each (Irvin et al., AAAI 2019).

    The labels are Cardiomegaly, Edema, Consolidation, Atelectasis and Pleural Effusion: 1 where the report affirms it
    or is uncertain (U-Ones), or else 0. Images are grey. Columns: ``patient``, whose images stay together wherever
    images are set aside, and ``category``, the number of the combination of labels that an image has. Combinations with
    few training images have one number, the last (PerAda, Xie et al., CVPR 2024, where 19 numbers come out).

    Args:
        root: Folder that holds (or is) ``CheXpert-v1.0-small`` or ``CheXpert-v1.0``, with ``train.csv`` and
            ``valid.csv`` (https://stanfordmlgroup.github.io/competitions/chexpert).
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        frontal_only: Leave the lateral views out.
        test_share: Share of the images in ``train.csv``, of whole patients drawn by ``seed``, that is the test split.
            0: the test split is ``valid.csv``, of 234 images.
        merge_below: Combinations of labels with fewer training images are one category.
        seed: Another seed, another test split.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
    """

    group_column = "patient"
    _mode = "L"
    _source = "https://stanfordmlgroup.github.io/competitions/chexpert"

    def __init__(
        self,
        root: str = "data",
        size: int = 224,
        frontal_only: bool = False,
        test_share: float = 0.0,
        merge_below: int = 2000,
        seed: int = 0,
        in_memory: bool = False,
        train: bool = True,
    ) -> None:
        super().__init__(root, size, in_memory, train)
        check_number("test_share", test_share, least=0, below=1, hint="a share of the images in train.csv")
        check_whole("merge_below", merge_below, 0)
        self.frontal_only, self.test_share, self.merge_below, self.seed = frontal_only, test_share, merge_below, seed

    @cached_property
    def _listing(self) -> Listing:
        places = [Path(self.root) / name for name in ("", "CheXpert-v1.0-small", "CheXpert-v1.0")]
        home = find_folder(places, "train.csv") or places[1]
        paths, patients, labels = self._read(home / "train.csv")
        train = np.arange(len(paths))
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "chexpert"))
            test, train = whole_groups(patients, [round(self.test_share * len(paths))], rng, least=1)
        training_labels = labels[train]
        if self.train or self.test_share:
            rows = train if self.train else test
            paths, patients, labels = [paths[row] for row in rows], patients[rows], labels[rows]
        else:
            paths, patients, labels = self._read(home / "valid.csv")
        _, category = categories(training_labels, labels, self.merge_below)
        columns = {"patient": patients, "category": category}
        return Listing(paths, torch.from_numpy(labels).float(), columns, len(FINDINGS), FINDINGS)

    def _read(self, table: Path) -> tuple[list[str], Array, Array]:
        """Files, patients (N,) and labels (N, 5) of a table."""
        names, views, *found = read_columns(table, ["Path", "Frontal/Lateral", *FINDINGS], self._source)
        labels = np.stack(found, axis=1)
        # What a report does not mention is blank; -1 is uncertain.
        known = {"": 0, "0.0": 0, "1.0": 1, "-1.0": 1, "0": 0, "1": 1, "-1": 1}
        wrong = np.argwhere(~np.isin(labels, list(known)))
        if len(wrong):
            row, column = wrong[0]
            raise ValueError(
                f"{table}, row {row + 2}, has {str(labels[row, column])!r} under {FINDINGS[column]}, and blank, 0.0, "
                f"1.0 or -1.0 is expected: fetch it again from {self._source}"
            )
        parts = [name.split("/") for name in names.tolist()]
        for number, own in enumerate(parts, 2):
            if len(own) != 5 or not own[2].startswith("patient") or ".." in own:
                raise ValueError(
                    f"{table}, row {number}, has the path {'/'.join(own)!r}, and one like {_LIKE!r} is expected: fetch "
                    f"it again from {self._source}"
                )
        rows = np.flatnonzero((views == "Frontal") | (not self.frontal_only))
        if not len(rows):
            raise ValueError(f"{table} has no frontal views: set frontal_only to false")
        numbers = np.vectorize(known.get, otypes=[np.int64])(labels[rows])
        home = str(table.parent)
        paths = ["/".join((home, *parts[row][1:])) for row in rows]  # a Path of each would take seconds
        return paths, np.array([parts[row][2] for row in rows]), numbers


class OpenImage(ImageFiles):
    """Photographs of Open Images with those who uploaded them, as FedScale divides them (Lai et al., ICML 2022).

    The column ``client`` is the uploader. Labels are FedScale's ``label_id``.

    Args:
        root: Folder with ``client_data_mapping/train.csv`` and ``test.csv``, which have the columns ``client_id``,
            ``sample_path``, ``label_name`` and ``label_id``, and with their images in ``train`` and ``test``
            (https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images).
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        test_share: Share of each uploader's images in ``train.csv``, drawn by ``seed``, that is the test split; none of
            an uploader with very few. 0: the test split is ``test.csv``.
        seed: Another seed, another test split.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.

    Raises:
        FileNotFoundError: When the set is first read, if a file or folder is missing.
        ValueError: If an option is out of range or, when it is first read, a file is damaged.
    """

    _source = "https://github.com/SymbioticLab/FedScale/tree/master/benchmark/dataset/open_images"

    def __init__(
        self,
        root: str = "data",
        size: int = 224,
        test_share: float = 0.0,
        seed: int = 0,
        in_memory: bool = False,
        train: bool = True,
    ) -> None:
        super().__init__(root, size, in_memory, train)
        check_number("test_share", test_share, least=0, below=1, hint="a share of each uploader's images")
        self.test_share, self.seed = test_share, seed

    @cached_property
    def _listing(self) -> Listing:
        paths, clients, labels = self._read("train")
        num_classes = int(labels.max()) + 1
        rows = np.arange(len(paths))
        if self.test_share:
            rng = np.random.default_rng(derive_seed(self.seed, "open_image"))
            held = of_each_stratum(clients, self.test_share, rng)
            rows = np.setdiff1d(rows, held) if self.train else held
        else:
            others = self._read("test")
            num_classes = max(num_classes, int(others[2].max()) + 1)
            if not self.train:
                (paths, clients, labels), rows = others, np.arange(len(others[0]))
        columns = {"client": clients[rows]}
        return Listing([paths[row] for row in rows], torch.from_numpy(labels[rows]), columns, num_classes)

    def _read(self, part: str) -> tuple[list[str], Array, Array]:
        """Files, uploaders (N,) and classes (N,) of a part."""
        table = Path(self.root) / "client_data_mapping" / f"{part}.csv"
        clients, files, labels = read_columns(table, ["client_id", "sample_path", "label_id"], self._source)
        wrong = np.flatnonzero(~np.char.isdigit(labels))
        if len(wrong):
            raise ValueError(
                f"{table}, row {wrong[0] + 2}, has the label_id {str(labels[wrong[0]])!r}, and a whole number from 0 "
                f"is expected: fetch it again from {self._source}"
            )
        for row, file in enumerate(files.tolist(), 2):
            if file.startswith("/") or ".." in file.split("/"):
                raise ValueError(
                    f"{table}, row {row}, has the path {file!r}, which leaves the folder: fetch it again from "
                    f"{self._source}"
                )
        return [f"{self.root}/{part}/{file}" for file in files.tolist()], clients, labels.astype(np.int64)
