# SPDX-License-Identifier: Apache-2.0
"""Users' own images in the rows of a table: CSV, TSV or Parquet."""

import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from perada.core.checks import OptionError, check_choice, check_name, checked_path, without_effect
from perada.core.text import abbreviated
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, number_labels
from perada.data.sets.image_paths import list_images
from perada.data.sets.label_columns import (
    BINARY,
    TRUE_CELLS,
    UNKNOWN_CELLS,
    VALUES_OF_UNKNOWN,
    Blank,
    Decimal,
    RowLabels,
    Unknown,
    check_columns,
    check_one_kind_of_label,
    checked_mask_values,
    guess_separator,
    holds_measurements,
    names_of_numbers,
    read_numbers,
    with_point,
)
from perada.data.sets.manifest import ListedImages, Listing
from perada.data.sets.medical_rows import uids_of_files
from perada.data.sets.table_files import check_encoding, existing_spelling, is_same_file, read_table
from perada.tasks import Classification, MultiLabel, Regression, Segmentation, Task
from perada.tasks.multi_label import UNKNOWN


class ImageTable(ListedImages):
    """Images in a table with one row each: CSV, TSV or Parquet (``pip install 'perada[tables]'``).

    Labels are names. Several labels per image are in one column, separated by ``separator``, or in columns of zeros and
    ones, which ``label`` then lists.

    Args:
        table: The file.
        folder: Folder that paths are relative to; null for the table's folder.
        path: Column of the files' paths.
        label: Column of the labels, or columns of zeros and ones.
        split: Column of the split; null for ``split``, if there is such a column.
        separator: Separator of several labels in one column, such as ``|``; null for one label per image.
        unknown: What to do if a cell of several label columns is -1, NaN or blank (Irvin et al., AAAI 2019): ``reject``
            the table; ``ignore`` such labels in the loss (U-Ignore); or train on them as ``zeros`` (U-Zeros) or
            ``ones`` (U-Ones). A mapping sets it for each column, with ``reject`` for the others. Unknown labels of test
            images are never scored.
        blank: Whether a blank cell means ``unknown``, or ``absent`` as in the reports of CheXpert and MIMIC-CXR, which
            mention few findings.
        mask: Column of the files of masks, which are then the labels (:class:`.ImageMasks`); null for no masks.
        mask_values: Value of each class in the masks, as of :class:`.ImageMasks`.
        numbers: Column, or columns, of numbers such as an age, which are then the labels. They need the task
            :class:`.Regression`; null for labels that are names.
        encoding: Encoding of a text file, such as ``cp1252`` as Excel writes it on Windows; null for UTF-8, or for
            UTF-16 or UTF-32 with a byte-order mark.
        uid: Column of UIDs, in place of ``path``: of an image (SOPInstanceUID), a series or a study. All DICOM files
            below the folder with this UID have the labels of its row; those without a row are left out.
        decimal: What separates the fraction of ``numbers``: a point, or a comma as Excel writes it in much of Europe.
        **options: Options of :class:`.ListedImages`.

    >>> ImageTable("labels.csv", folder="images", path="file", label="diagnosis")  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913  # each argument is an option of recipes
        self,
        table: str,
        folder: str | None = None,
        path: str = "path",
        label: str | list[str] = "label",
        split: str | None = None,
        separator: str | None = None,
        unknown: Unknown | dict[str, Unknown] = "reject",
        blank: Blank = "unknown",
        mask: str | None = None,
        mask_values: list[int] | None = None,
        numbers: str | list[str] | None = None,
        encoding: str | None = None,
        decimal: Decimal = ".",
        uid: str | None = None,
        **options: Any,
    ) -> None:
        check_encoding(encoding)
        check_choice("decimal", decimal, get_args(Decimal))
        _check_unknown(unknown, blank, label)
        check_one_kind_of_label(
            mask=mask, numbers=numbers, separator=separator, label=None if isinstance(label, str) else label
        )
        table_path = checked_path("table", table)
        check_columns("label", label)
        check_columns("numbers", numbers, optional=True)
        if uid is not None and path != "path":
            raise without_effect("path", path, f"uid={uid!r}", "leave uid out")
        columns = {"path": path, "separator": separator, "mask": mask, "split": split, "uid": uid}
        for name, column in columns.items():
            check_name(name, column, optional=name != "path")
        super().__init__(str(table_path.parent) if folder is None else folder, **options)
        self.table = table
        self.folder = folder
        self.path = path
        self.label = label
        self.split = split
        self.separator = separator
        self.unknown = unknown
        self.blank = blank
        self.mask = mask
        self.mask_values = checked_mask_values(mask_values, mask)
        self.numbers = numbers
        self.encoding = encoding
        self.decimal: Decimal = decimal
        self.uid = uid
        self.source_name = table

    @property
    def task(self) -> Task:  # type: ignore[override]  # an attribute of other sets
        """What is learnt from the labels, which is known without reading the table."""
        if self.mask is not None:
            return Segmentation()
        if self.numbers is not None:
            return Regression()
        if self.separator is not None or not isinstance(self.label, str):
            return MultiLabel()
        return Classification()

    @property
    def _has_words(self) -> bool:
        """Whether labels are words; the names of columns of zeros and ones are no labels that were read."""
        return isinstance(self.label, str)

    @cached_property
    def listing(self) -> Listing:
        """The columns of the file, and the number of each row in it."""
        columns, row_numbers = read_table(Path(self.table), encoding=self.encoding)
        return Listing({name: column.tolist() for name, column in columns.items()}, row_numbers.tolist())

    def read_manifest(self) -> Manifest:
        """List the rows of the table."""
        if self.uid is not None:
            paths, rows = self._find_files_of_uids(self.uid)
        else:
            paths = self._read_paths()
            rows = np.arange(len(paths))
        row_labels = self._read_labels()
        split_column = self.split
        if not split_column and "split" in self.listing.columns:
            split_column = "split"
        split = None
        if split_column:
            split = np.array(self.column("split", split_column))
        manifest = Manifest(
            [""] * len(self.listing.row_names),
            row_labels.labels,
            row_labels.classes,
            self.extra_columns(),
            masks=row_labels.masks,
            numbers=row_labels.numbers,
        )
        return replace(manifest.rows(rows), paths=paths, split=None if split is None else split[rows])

    def _read_paths(self) -> list[str]:
        """Return the file of each row."""
        files = self.column("path", self.path, "fill in the file's path, or take the row out")
        counts = Counter(files)
        duplicates = [row for row, file in enumerate(files) if counts[file] > 1]
        self.reject_rows(
            duplicates, "files occur more than once", "use one row per file; separator splits several labels"
        )
        paths = self._existing_paths(files)
        self._reject_other_spellings(files, paths)
        return paths

    def _find_files_of_uids(self, column: str) -> tuple[list[str], Array]:
        """Return the DICOM files of the rows' UIDs, and the row (N,) of each. Messages name rows, and no UID."""
        uids = [str(uid).strip() for uid in self.column("uid", column, "fill in the UID, or take the row out")]
        counts = Counter(uids)
        duplicates = [row for row, uid in enumerate(uids) if counts[uid] > 1]
        self.reject_rows(duplicates, "UIDs occur more than once", "use one row for each")
        row_of_uid = {uid: row for row, uid in enumerate(uids)}
        files = [f"{self.root}/{file}" for file in list_images(Path(self.root))]
        paths = []
        rows = []
        for file, uids_of_file in zip(files, uids_of_files(files), strict=True):
            matching_rows = sorted({row_of_uid[uid] for uid in uids_of_file if uid in row_of_uid})
            if len(matching_rows) > 1:
                self.reject_rows(matching_rows, f"{file} has the UIDs of several rows", "use one row for each file")
            if matching_rows:
                paths.append(file)
                rows.append(matching_rows[0])
        missing = sorted({*range(len(uids))} - {*rows})
        self.reject_rows(
            missing, f"no DICOM file in {self.root} has its UID", "take the row out, or set folder to that of the files"
        )
        if len(paths) < len(files):
            warnings.warn(
                f"{len(files) - len(paths)} of {len(files)} images in {self.root} have no row in {self.table}; they "
                "are skipped",
                stacklevel=2,
            )
        return paths, np.array(rows, dtype=np.int64)

    def _read_labels(self) -> RowLabels:
        """Return what the options ``label``, ``mask`` and ``numbers`` select."""
        if self.numbers is not None:
            classes = names_of_numbers(self.numbers)
            return RowLabels(classes, numbers=read_numbers(self, classes, self.decimal, "decimal: ','"))
        if self.mask is not None:
            masks = self.column("mask", self.mask, "fill in the mask, or take the row out")
            return RowLabels(masks=self._existing_paths(masks))
        classes, labels = self._number_labels()
        return RowLabels(classes, labels)

    def _existing_paths(self, files: Sequence[str]) -> list[str]:
        """Return the path of the file of each row; raise a ValueError that names rows whose file does not exist."""
        paths = [existing_spelling(os.path.join(self.root, file)) for file in files]
        missing = [row for row, path in enumerate(paths) if not os.path.isfile(path)]
        if missing:
            problem = f"{paths[missing[0]]} does not exist"
            self.reject_rows(missing, problem, "correct the path, or set folder")
        return paths

    def _reject_other_spellings(self, files: Sequence[str], paths: Sequence[str]) -> None:
        """Raise a ValueError that names rows with the same file in different spellings, such as through a link.

        Args:
            files: The file of each row, as the table spells it.
            paths: Its path.
        """
        rows_of_name: dict[str, list[int]] = {}
        real_paths = [os.path.realpath(path) for path in paths]
        for row, real_path in enumerate(real_paths):
            # On a disk that ignores case, two names that differ in it are one file.
            folded_name = unicodedata.normalize("NFC", real_path).casefold()
            rows_of_alike = rows_of_name.setdefault(folded_name, [])
            for first_row in rows_of_alike:
                if is_same_file(real_paths[first_row], real_path):
                    problem = f"{files[first_row]} and {files[row]} are the same file"
                    remedy = "use one row per file; separator splits several labels of an image"
                    self.reject_rows([first_row, row], problem, remedy)
            rows_of_alike.append(row)

    def _number_labels(self) -> tuple[tuple[str, ...], Array]:
        """Return the classes and the labels of all rows."""
        if not isinstance(self.label, str):
            return self._number_binary_columns(self.label)
        column = self.listing.columns[self.check_column("label", self.label)]
        if self.separator is not None or any(isinstance(cell, list) for cell in column):
            words_of_images = []
            for cell in column:
                words = cell.split(self.separator) if isinstance(cell, str) else cell
                words_of_images.append([word.strip() for word in words if word.strip()])
            return number_labels(words_of_images)

        remedy = "fill in a label, or take the row out"
        probable_separator = guess_separator(list(column))
        if probable_separator:
            remedy += f"; or set separator={probable_separator!r}, if an image may have none, one or several"
        self.column("label", self.label, remedy)  # rejects empty cells
        if probable_separator:
            warnings.warn(
                f"{self.table}: each cell of {self.label} is one class, even those with {probable_separator!r}; if "
                f"they contain several labels, set separator={probable_separator!r}",
                stacklevel=2,
            )
        self._check_not_measurements(self.label, column)
        return number_labels(column)

    def _number_binary_columns(self, column_names: Sequence[str]) -> tuple[tuple[str, ...], Array]:
        """Return the columns' names as classes, and the labels of all rows, from columns of zeros and ones.

        Unknown labels are :data:`.UNKNOWN`.
        """
        labels = np.zeros((len(self.listing.row_names), len(column_names)), dtype=np.float32)
        for place, name in enumerate(column_names):
            labels[:, place] = self._number_binary_column(name)
        return tuple(column_names), labels

    def _number_binary_column(self, name: str) -> list[int]:
        """Return the label of each row in a column of zeros and ones.

        Raises:
            ValueError: If a cell is neither 0 nor 1 nor unknown, or is unknown and unknown labels are rejected.
        """
        label_numbers: list[int] = []
        unknown_rows: list[int] = []
        has_blank_cells = False
        for row, cell in enumerate(self.listing.columns[self.check_column("label", name)]):
            value = cell.strip().lower()
            is_blank = value == ""
            has_blank_cells |= is_blank
            if value in TRUE_CELLS:
                label_numbers.append(1)
            elif value in BINARY or (is_blank and self.blank == "absent"):
                label_numbers.append(0)
            elif is_blank or value in UNKNOWN_CELLS:
                label_numbers.append(UNKNOWN)
                unknown_rows.append(row)
            else:
                problem = f"{name} is {cell!r}, neither 0 nor 1 nor unknown (-1, NaN or blank)"
                self.reject_rows([row], problem, "correct it, or take the row out")
        if self._find_policy(name) == "reject":
            remedy = "fill them in, or set unknown to ignore, zeros or ones"
            if has_blank_cells:
                remedy += ", or blank to absent if a blank cell means that the label is absent"
            self.reject_rows(unknown_rows, f"labels of {name} are unknown (-1, NaN or blank)", remedy)
        return label_numbers

    def _find_policy(self, name: str) -> Unknown:
        """Return what is done with unknown labels of a column."""
        if isinstance(self.unknown, str):
            return self.unknown
        return self.unknown.get(name, "reject")

    def _assign_splits(self, manifest: Manifest) -> Manifest:
        """Assign the splits, then replace unknown labels of training images where a policy sets a value.

        Not those of test images: all policies are scored on the same labels.
        """
        manifest = super()._assign_splits(manifest)
        if isinstance(self.label, str):
            return manifest
        assert manifest.labels is not None and manifest.classes is not None and manifest.split is not None
        labels = manifest.labels.copy()
        is_unknown = (labels == UNKNOWN) & (manifest.split == "train")[:, None]
        for place, name in enumerate(manifest.classes):
            value = VALUES_OF_UNKNOWN.get(self._find_policy(name), UNKNOWN)
            labels[is_unknown[:, place], place] = value
        return replace(manifest, labels=labels)

    def _check_not_measurements(self, name: str, cells: Sequence[str]) -> None:
        """Raise a ValueError if a column holds measurements: mostly different numbers, some with a fraction."""
        if not holds_measurements(cells, self.decimal):
            return
        cell = next(cell for cell in cells if float(with_point(cell)) % 1)
        raise ValueError(
            f"{self.table}: {name} holds {len({*cells})} different numbers in {len(cells)} rows, such as "
            f"{cell}, instead of classes; choose a different column, divide the numbers "
            f"into ranges, or predict them (numbers: {name}, and task: Regression)"
        )


def _check_unknown(unknown: Unknown | dict[str, Unknown], blank: Blank, label: str | list[str]) -> None:
    """Raise an OptionError for an invalid policy, or one of columns that are not label columns."""
    check_choice("blank", blank, get_args(Blank))
    policies = unknown if isinstance(unknown, Mapping) else {"": unknown}
    for policy in policies.values():
        check_choice("unknown", policy, get_args(Unknown))
    label_columns = [] if isinstance(label, str) else label
    if unknown != "reject" and not label_columns:
        raise OptionError(
            f"unknown={unknown!r} needs label to be a list of columns of zeros and ones, got label={label!r}; list the "
            "columns, or leave unknown out",
            name="unknown",
            value=unknown,
        )
    if blank != "unknown" and not label_columns:
        raise without_effect("blank", blank, f"label={label!r}", "list columns of zeros and ones in label")
    other_columns = [name for name in policies if name and name not in label_columns]
    if other_columns:
        raise OptionError(
            f"unknown names the column {other_columns[0]!r}, which is not in label; use some of "
            f"{abbreviated(label_columns)}",
            name="unknown",
            value=unknown,
        )
