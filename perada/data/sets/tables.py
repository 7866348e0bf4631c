# SPDX-License-Identifier: Apache-2.0
"""Users' own images in the rows of a table: CSV, TSV or Parquet, or a dataset of Hugging Face ``datasets``."""

import codecs
import csv
import hashlib
import io
import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import (
    OptionError,
    check_choice,
    check_name,
    checked_names,
    checked_path,
    installed,
    invalid_option,
    without_effect,
)
from perada.core.states import loses_digits
from perada.core.text import abbreviated
from perada.data.batches.transforms import MissingImageError, read_image, resize_uint8
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, explain_read_errors, number_labels
from perada.data.sets.manifest import SPLITS, ListedImages, Listing
from perada.data.sets.masks import check_mask_values, decode_mask
from perada.data.sets.palettes import Colour, palette_of
from perada.tasks import Classification, MultiLabel, Regression, Segmentation, Task
from perada.tasks.multi_label import UNKNOWN

if TYPE_CHECKING:
    from datasets import Dataset

Decimal = Literal[".", ","]
"""What separates the whole from the fraction of a number."""
_NUMBERS: Mapping[Decimal, re.Pattern[str]] = {
    ".": re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(r"[+-]?(\d+,?\d*|,\d+)(e[+-]?\d+)?", re.IGNORECASE),
}
"""Numbers by what separates their fraction."""
_LABEL_COLUMNS = ("label", "labels", "fine_label")
_DECLARED_DELIMITER = re.compile(r'"?sep=(?P<delimiter>[^"\r\n])"?(?=[\r\n]|$)', re.IGNORECASE)
"""The first line that Excel reads, and some programs write, to declare the delimiter."""
_ROWS_TO_GUESS = 100
"""Number of rows, with the header, from which the delimiter is guessed."""
_TRUE = frozenset({"1", "1.0", "true"})
BINARY = _TRUE | {"0", "0.0", "false"}
"""Accepted cells of a column of zeros and ones, in lower case."""
UNKNOWN_CELLS = frozenset({"-1", "-1.0", "nan"})
"""Cells of such a column that mark an unknown label, in lower case. A blank cell does too, unless it means absent."""
Unknown = Literal["reject", "ignore", "zeros", "ones"]
"""What is done with unknown labels."""
VALUES_OF_UNKNOWN: Mapping[Unknown, int] = {"zeros": 0, "ones": 1}
"""Values that replace unknown labels in training."""
Blank = Literal["unknown", "absent"]
"""What a blank cell means."""


def is_number(cell: str, decimal: Decimal = ".") -> bool:
    """Return whether a cell is a number.

    >>> is_number("-1.5e3"), is_number("1,5"), is_number("nan")
    (True, False, False)
    >>> is_number("1,5", decimal=","), is_number("1.5", decimal=","), is_number("1.234,5", decimal=",")
    (True, False, False)
    """
    return _NUMBERS[decimal].fullmatch(cell) is not None


def with_point(cell: str) -> str:
    """Return a number with a point before its fraction, as Python reads it."""
    return cell.replace(",", ".")


def holds_measurements(cells: Sequence[str], decimal: Decimal = ".") -> bool:
    """Return whether a column holds measurements: mostly different numbers, some of which have a fraction.

    >>> holds_measurements(["1.5", "2", "3"]), holds_measurements(["1", "2", "3"])
    (True, False)
    """
    values = {*cells}
    if 2 * len(values) <= len(cells) or not all(is_number(value, decimal) for value in values):
        return False
    return any(float(with_point(value)) % 1 for value in values)


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
        **options: Any,
    ) -> None:
        check_encoding(encoding)
        check_choice("decimal", decimal, get_args(Decimal))
        _check_unknown(unknown, blank, label)
        _check_one_kind_of_label(
            mask=mask, numbers=numbers, separator=separator, label=None if isinstance(label, str) else label
        )
        table_path = checked_path("table", table)
        _check_columns("label", label)
        _check_columns("numbers", numbers, optional=True)
        for name, column in {"path": path, "separator": separator, "mask": mask, "split": split}.items():
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
        self.mask_values = _checked_mask_values(mask_values, mask)
        self.numbers = numbers
        self.encoding = encoding
        self.decimal: Decimal = decimal
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
        files = self.column("path", self.path, "fill in the file's path, or take the row out")
        counts = Counter(files)
        duplicates = [row for row, file in enumerate(files) if counts[file] > 1]
        self.reject_rows(
            duplicates, "files occur more than once", "use one row per file; separator splits several labels"
        )
        paths = self._existing_paths(files)
        self._reject_other_spellings(files, paths)
        classes: tuple[str, ...] | None = None
        labels: Array | None = None
        masks: list[str] | None = None
        numbers: Array | None = None
        if self.numbers is not None:
            classes = _names_of_numbers(self.numbers)
            numbers = _read_numbers(self, classes, self.decimal, "decimal: ','")
        elif self.mask is None:
            classes, labels = self._number_labels()
        else:
            masks = self._existing_paths(self.column("mask", self.mask, "fill in the mask, or take the row out"))
        split_column = self.split
        if not split_column and "split" in self.listing.columns:
            split_column = "split"
        split = None
        if split_column:
            split = np.array(self.column("split", split_column))
        return Manifest(paths, labels, classes, self.extra_columns(), split, masks=masks, numbers=numbers)

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
            if value in _TRUE:
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


class HuggingFace(ListedImages):
    """An image set of Hugging Face ``datasets`` (``pip install 'perada[datasets]'``), by name or from a local folder.

    A folder was written by ``save_to_disk``, or is one that ``load_dataset`` reads: Parquet files, or images with or
    without ``metadata.csv``. Code that comes with a dataset is never run. Labels are class labels, integers, words, or
    lists of these if an image may have several; masks in a second column; or columns of numbers. Class labels keep
    their names and order, without those that no image has.

    Args:
        name: Name on the Hub, such as ``flwrlabs/office-home``, or a folder.
        config: Configuration of the dataset, if it has several.
        revision: A branch, tag or commit on the Hub, so that the dataset stays the same.
        splits: Splits to use; null for all whose names are known.
        image: Column of the images; null for the only one.
        label: Column of the labels; null for ``label``, ``labels`` or ``fine_label``, or the only class labels.
        mask: Column of the masks, which are then the labels (:class:`.ImageMasks`); null for no masks.
        mask_values: Value of each class in the masks, as of :class:`.ImageMasks`.
        numbers: Column, or columns, of numbers such as an age, which are then the labels. They need the task
            :class:`.Regression`; null for other labels.
        **options: Options of :class:`.ListedImages`.

    >>> HuggingFace("beans", image="image", label="labels")  # doctest: +SKIP
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        revision: str | None = None,
        splits: list[str] | None = None,
        image: str | None = None,
        label: str | None = None,
        mask: str | None = None,
        mask_values: list[int] | None = None,
        numbers: str | list[str] | None = None,
        **options: Any,
    ) -> None:
        _check_one_kind_of_label(mask=mask, numbers=numbers, label=label)
        check_name("name", name)
        named_options = {"config": config, "revision": revision, "image": image, "label": label, "mask": mask}
        for option, value in named_options.items():
            check_name(option, value, optional=True)
        _check_columns("numbers", numbers, optional=True)
        super().__init__(name, **options)
        self.name = str(name).removeprefix("hf:")  # the prefix of datasets on the command line
        self.config = config
        self.revision = revision
        self.splits = checked_names("splits", splits)
        self.image = image
        self.label = label
        self.mask = mask
        self.mask_values = _checked_mask_values(mask_values, mask)
        self.numbers = numbers
        self.source_name = self.name

    @property
    def task(self) -> Task | None:  # type: ignore[override]  # an attribute of other sets
        """What is learnt from masks or numbers, known without reading the dataset; None for classes.

        Only the labels show whether an image may have several.
        """
        if self.mask is not None:
            return Segmentation()
        if self.numbers is not None:
            return Regression()
        return None

    @cached_property
    def _used_splits(self) -> dict[str, "Dataset"]:
        """The splits to use by name, in order."""
        available = self._load_splits()
        with_known_name = [name for name, rows in available.items() if name.lower() in SPLITS and len(rows)]
        selected = list(available)
        if self.splits:
            selected = self.splits
        elif len(available) > 1:
            selected = with_known_name
        for name in selected:
            if name not in available:
                raise OptionError(
                    f"splits: {self.name} has no split {name!r}; it has {', '.join(available)}", name="splits"
                )
        if not selected or (len(selected) > 1 and not {*selected} <= {*with_known_name}):
            raise OptionError(
                f"splits: of several splits of {self.name} each must be one of {', '.join(SPLITS)}; name those to use, "
                "or a single one",
                name="splits",
            )
        return {name: available[name] for name in selected}

    def _load_splits(self) -> dict[str, "Dataset"]:
        """Load all splits of the dataset by name."""
        datasets = installed("datasets", self.name, "datasets")
        folder = Path(self.name)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                loaded = datasets.load_from_disk(self.name)
            else:
                loaded = datasets.load_dataset(self.name, self.config, revision=self.revision)
        except Exception as error:  # it raises many types
            reason = " ".join(str(error).split())
            raise FileNotFoundError(
                f"the dataset {self.name!r} cannot be loaded ({type(error).__name__}: {reason[:300]}): set name to "
                "a dataset on the Hub or to a folder, and config if it has several"
            ) from None
        if isinstance(loaded, dict):
            return dict(loaded)
        return {str(loaded.split or "train"): loaded}

    @cached_property
    def _row_of_path(self) -> dict[str, int]:
        """The row of each image in :attr:`_used_rows` by its path ``split[row]``."""
        paths = []
        for name, rows in self._used_splits.items():
            paths += [f"{name}[{row}]" for row in range(len(rows))]
        return {path: row for row, path in enumerate(paths)}

    @cached_property
    def _used_rows(self) -> "Dataset":
        """The rows of all splits that are used."""
        datasets = installed("datasets", self.name, "datasets")
        all_splits = list(self._used_splits.values())
        # An empty split may have other features than the others.
        nonempty = [rows for rows in all_splits if len(rows)]
        try:
            selected: Dataset = datasets.concatenate_datasets(nonempty or all_splits[:1])
        except ValueError as error:
            raise OptionError(
                f"splits: {', '.join(self._used_splits)} of {self.name} have columns that do not match ({error}); cast "
                "them to the same features, or name a single split",
                name="splits",
            ) from None
        return selected

    @cached_property
    def listing(self) -> Listing:
        """The columns of all splits that are used, and ``split[row]`` of each row."""
        return Listing({name: self._used_rows[name] for name in self._used_rows.column_names}, list(self._row_of_path))

    def _select_column(self, option: str, candidates: list[str], description: str, supported: list[str]) -> str:
        """Return the column that an option selects, or else the only candidate.

        Raises:
            ValueError: If there is not exactly one candidate, or the column is not ``supported``.
        """
        selected: str | None = getattr(self, option)
        if selected is not None:
            candidates = [self.check_column(option, selected)]
        if len(candidates) != 1:
            number = f"several ({', '.join(candidates)})" if candidates else "none"
            raise ValueError(
                f"{option}: {self.name} has {number} of the columns {description} among "
                f"{', '.join(self.listing.columns)}; name it"
            )
        (column,) = candidates
        if column not in supported:
            feature = self._used_rows.features[column]
            remedy = "choose a different one"
            if option == "label" and re.match("float", str(getattr(feature, "dtype", ""))):
                remedy += f", or predict it (numbers: {column}, and task: Regression)"
            raise ValueError(f"{option}: column {column!r} of {self.name} contains {feature}, not {option}s; {remedy}")
        return column

    @cached_property
    def _image_columns(self) -> list[str]:
        """Names of the columns of images, which masks are, too."""
        from datasets import Image as ImageFeature

        return [name for name, feature in self._used_rows.features.items() if isinstance(feature, ImageFeature)]

    def _stored_images(self, column: str) -> "Dataset":
        """Return a column of images, as stored bytes."""
        from datasets import Image as ImageFeature

        return self._used_rows.select_columns([column]).cast_column(column, ImageFeature(decode=False))

    @cached_property
    def _stored_image_column(self) -> "Dataset":
        """The column of images, as stored bytes."""
        return self._stored_images(self._image_column())

    @cached_property
    def _stored_mask_column(self) -> "Dataset":
        """The column of masks, as stored bytes."""
        return self._stored_images(self._mask_column())

    def _image_column(self) -> str:
        """Return the name of the column of images; raise a ValueError if there is none."""
        candidates = [name for name in self._image_columns if name != self.mask]
        return self._select_column("image", candidates, "of images", self._image_columns)

    def _mask_column(self) -> str:
        """Return the name of the column of masks; raise a ValueError if there is none."""
        return self._select_column("mask", [], "of images", self._image_columns)

    def content(self, path: str) -> bytes:
        """Return the stored bytes of the image ``split[row]``."""
        return self._read_content(self._stored_image_column, path, "image")

    def _read_content(self, stored_column: "Dataset", path: str, what: str) -> bytes:
        """Return the stored bytes of row ``split[row]``; raise a MissingImageError that names ``what`` is missing."""
        (stored,) = stored_column[self._row_of_path[path]].values()
        if stored is None:
            raise MissingImageError(f"{self.name}, {path}, has no {what}", "take the row out")
        return stored["bytes"] or Path(stored["path"]).read_bytes()

    def read_mask(self, path: str, image_path: str) -> Tensor:
        """Read the mask (size, size) of row ``split[row]``; see :func:`.decode_mask`."""
        mask = io.BytesIO(self._read_content(self._stored_mask_column, path, "mask"))
        image = io.BytesIO(self.content(image_path))
        return decode_mask(mask, image, self.size, self.mask_values, f"{self.name}, {path}, column {self.mask},")

    def read_palette(self, path: str) -> list[Colour] | None:
        """Return the colours of the mask of row ``split[row]`` by number; None if it has no palette."""
        return palette_of(io.BytesIO(self._read_content(self._stored_mask_column, path, "mask")))

    def _hash_image(self, path: str) -> str:
        return hashlib.sha256(self.content(path)).hexdigest()

    def read(self, path: str) -> Tensor:
        """Read the image ``split[row]`` as uint8 (Ch, size, size)."""
        file = io.BytesIO(self.content(path))
        pixels = read_image(file, "take the row out", self.mode, self.full_scale, f"{self.name}, {path},")
        return resize_uint8(pixels, self.size)

    def read_manifest(self) -> Manifest:
        """List the rows of the splits that are used."""
        # Missing columns are reported before anything else.
        if self.mask is not None:
            self._mask_column()
        self._image_column()
        paths = list(self._row_of_path)
        classes: tuple[str, ...] | None = None
        labels: Array | None = None
        masks: list[str] | None = None
        numbers: Array | None = None
        if self.numbers is not None:
            classes = _names_of_numbers(self.numbers)
            numbers = _read_numbers(self, classes)
        elif self.mask is None:
            classes, labels = self._number_labels()
        else:
            masks = paths
        split = np.array([path.rpartition("[")[0] for path in paths])
        uses_several_splits = len({*split, *(self.splits or ())}) > 1
        split_or_none = split if uses_several_splits else None
        return Manifest(paths, labels, classes, self.extra_columns(), split_or_none, masks=masks, numbers=numbers)

    def _number_labels(self) -> tuple[tuple[str, ...], Array]:
        """Return the classes and the labels of all rows."""
        features = self._used_rows.features
        # The feature of a list's elements, or of the column itself.
        element_features = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
        candidates = [name for name in _LABEL_COLUMNS if name in element_features][:1]
        if not candidates:  # class labels have names
            candidates = [name for name, feature in element_features.items() if hasattr(feature, "names")]
        supported = []
        for name, feature in element_features.items():
            if re.match("u?int|bool|(large_)?string", str(getattr(feature, "dtype", ""))):
                supported.append(name)
        description = f"called {', '.join(_LABEL_COLUMNS)} or of class labels"
        column = self._select_column("label", candidates, description, supported)

        values = self.column("label", column)
        has_lists = element_features[column] is not features[column]
        names = dict(enumerate(getattr(element_features[column], "names", ())))
        words_of_images = []
        for value in values:
            labels = value if has_lists else [value]
            words_of_images.append([str(names.get(label, label)) for label in labels])
        words_in_use = set(chain.from_iterable(words_of_images))
        if names and not words_in_use <= {*names.values()}:
            raise OptionError(
                f"label: {self.name} has classes in {column} that have no name; take their rows out", name="label"
            )
        classes = tuple(name for name in names.values() if name in words_in_use) or None
        if has_lists:
            return number_labels(words_of_images, classes)
        return number_labels([words[0] for words in words_of_images], classes)


def _check_one_kind_of_label(**options: str | list[str] | None) -> None:
    """Raise an OptionError if more than one of the options that select kinds of labels is set.

    Args:
        **options: Values of these options by name, None for those that are not set.
    """
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        first = names[0]
        second = names[1]
        raise OptionError(
            f"{second}={options[second]!r} cannot be combined with {first}={options[first]!r}: labels are either "
            "masks, numbers, names in one column, or columns of zeros and ones; leave one out",
            name=second,
            value=options[second],
        )


def _checked_mask_values(values: object, mask: str | None) -> tuple[int, ...] | None:
    """Return the option ``mask_values`` as a tuple; raise an OptionError if it is invalid, or no masks are read."""
    checked_values = check_mask_values(values)
    if checked_values is not None and mask is None:
        raise without_effect("mask_values", checked_values, "mask=None", "name the column of the masks in mask")
    return checked_values


def _names_of_numbers(option: str | list[str]) -> tuple[str, ...]:
    """Return the names of the D columns that the option ``numbers`` selects: the name of one, or those of several."""
    return (option,) if isinstance(option, str) else tuple(option)


def _read_numbers(
    image_set: ListedImages, column_names: Sequence[str], decimal: Decimal = ".", comma_option: str = ""
) -> Array:
    """Read columns of numbers.

    Args:
        image_set: The image set with the columns.
        column_names: Names of the D columns.
        decimal: What separates their fraction.
        comma_option: Option of the image set with which commas separate it; empty if there is none.

    Returns:
        The numbers, float32 (N, D).

    Raises:
        ValueError: If there is no such column, or a cell is not a number. The message names the rows.
    """
    numbers_of_columns = []
    for name in column_names:
        column = image_set.column("numbers", name, "fill it in, or take the row out")
        cells = [str(cell).strip() for cell in column]
        not_numbers = [row for row, cell in enumerate(cells) if not is_number(cell, decimal)]
        if not_numbers:
            example = cells[not_numbers[0]]
            problem = f"{name} is {example!r}, which is not a number"
            remedy = "correct it, with a point for decimals, or take the row out"
            if decimal == ",":
                problem += " with a decimal comma"
                remedy = "correct it, or take the row out"
                if is_number(example):
                    remedy += "; if all numbers have points, leave decimal out"
            elif comma_option and is_number(example, ","):
                remedy = f"set {comma_option} if the table has decimal commas, or correct it"
            image_set.reject_rows(not_numbers, problem, remedy)
        exact = np.array([with_point(cell) for cell in cells], dtype=np.float64)
        if loses_digits(torch.from_numpy(exact)):
            raise ValueError(
                f"numbers: the column {name!r} has numbers from {exact.min():.15g} to {exact.max():.15g}, which "
                "float32 cannot tell apart; subtract a reference from them in the table, such as the smallest"
            )
        numbers_of_columns.append(exact.astype(np.float32))
    return np.stack(numbers_of_columns, 1)


def _check_columns(name: str, value: object, optional: bool = False) -> None:
    """Raise an OptionError unless an option is the name of a column, or a list of some."""
    if optional and value is None:
        return
    column_names: Sequence[object] = []
    if isinstance(value, str):
        column_names = [value]
    elif isinstance(value, list | tuple):
        column_names = value
    if not column_names or not all(isinstance(entry, str) and entry for entry in column_names):
        raise invalid_option(name, value, "the name of a column or a list of names")


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


def guess_separator(cells: list[str]) -> str | None:
    """Guess the separator of several labels in a cell: a character whose parts are labels of other cells, too."""
    distinct_cells = {*cells}
    for separator in "|;,":
        parts = {part.strip() for cell in distinct_cells if separator in cell for part in cell.split(separator)}
        if parts and parts <= distinct_cells:
            return separator
    return None


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
        files = [name for name in header if name.lower().endswith(IMG_EXTENSIONS)]
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
    # Of two that fit equally well, the one that is rarer in words and numbers.
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


_BYTE_ORDER_MARKS = {  # the longer ones first, since that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8",
}


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


def _as_text(value: Any) -> Any:  # noqa: ANN401  # whatever Parquet can hold
    if isinstance(value, list):
        return [str(element) for element in value]
    return "" if value is None else str(value)
