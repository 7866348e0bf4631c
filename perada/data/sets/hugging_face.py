# SPDX-License-Identifier: Apache-2.0
"""Users' own images in datasets of Hugging Face ``datasets``."""

import hashlib
import io
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from perada.core.checks import OptionError, check_name, checked_names, installed
from perada.data.batches.transforms import MissingImageError, read_image, resize_uint8
from perada.data.partitions.shares import Array
from perada.data.sets.base import Manifest, number_labels
from perada.data.sets.label_columns import (
    RowLabels,
    check_columns,
    check_one_kind_of_label,
    checked_mask_values,
    names_of_numbers,
    read_numbers,
)
from perada.data.sets.manifest import SPLITS, ListedImages, Listing
from perada.data.sets.masks import decode_mask
from perada.data.sets.palettes import Colour, palette_of
from perada.tasks import Regression, Segmentation, Task

if TYPE_CHECKING:
    from datasets import Dataset

_LABEL_COLUMNS = ("label", "labels", "fine_label")


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
        check_one_kind_of_label(mask=mask, numbers=numbers, label=label)
        check_name("name", name)
        named_options = {"config": config, "revision": revision, "image": image, "label": label, "mask": mask}
        for option, value in named_options.items():
            check_name(option, value, optional=True)
        check_columns("numbers", numbers, optional=True)
        super().__init__(name, **options)
        self.name = str(name).removeprefix("hf:")  # the prefix of datasets on the command line
        self.config = config
        self.revision = revision
        self.splits = checked_names("splits", splits)
        self.image = image
        self.label = label
        self.mask = mask
        self.mask_values = checked_mask_values(mask_values, mask)
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

    def _select_column(self, option: str, candidate_columns: list[str], description: str, supported: list[str]) -> str:
        """Return the column that an option selects, or else the only candidate.

        Raises:
            ValueError: If there is not exactly one candidate, or the column is not ``supported``.
        """
        selected: str | None = getattr(self, option)
        if selected is not None:
            candidate_columns = [self.check_column(option, selected)]
        if len(candidate_columns) != 1:
            number = f"several ({', '.join(candidate_columns)})" if candidate_columns else "none"
            raise ValueError(
                f"{option}: {self.name} has {number} of the columns {description} among "
                f"{', '.join(self.listing.columns)}; name it"
            )
        (column,) = candidate_columns
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
        name = f"{self.name}, {path}, column {self.mask},"
        return decode_mask(mask, image, self.size, self.mask_values, name, self.medical)

    def read_palette(self, path: str) -> list[Colour] | None:
        """Return the colours of the mask of row ``split[row]`` by number; None if it has no palette."""
        return palette_of(io.BytesIO(self._read_content(self._stored_mask_column, path, "mask")))

    def _expand_frames(self, manifest: Manifest) -> Manifest:
        # Rows have contents and no files, of which the frame in the middle is read.
        clients = manifest.columns.get(self._client_column)
        self._check_windows(None if clients is None else clients.tolist())
        return manifest

    def _hash_image(self, path: str) -> str:
        return hashlib.sha256(self.content(path)).hexdigest()

    def read(self, path: str) -> Tensor:
        """Read the image ``split[row]`` as uint8 (Ch, size, size)."""
        file = io.BytesIO(self.content(path))
        name = f"{self.name}, {path},"
        pixels = read_image(file, "take the row out", self.mode, self.full_scale, name, self.reading_of(path))
        return resize_uint8(pixels, self.size)

    def read_manifest(self) -> Manifest:
        """List the rows of the splits that are used."""
        # Missing columns are reported before anything else.
        if self.mask is not None:
            self._mask_column()
        self._image_column()
        paths = list(self._row_of_path)
        row_labels = self._read_labels(paths)
        split = np.array([path.rpartition("[")[0] for path in paths])
        uses_several_splits = len({*split, *(self.splits or ())}) > 1
        split_or_none = split if uses_several_splits else None
        return Manifest(
            paths,
            row_labels.labels,
            row_labels.classes,
            self.extra_columns(),
            split_or_none,
            masks=row_labels.masks,
            numbers=row_labels.numbers,
        )

    def _read_labels(self, paths: list[str]) -> RowLabels:
        """Return what the options ``label``, ``mask`` and ``numbers`` select; a mask has the path of its image."""
        if self.numbers is not None:
            classes = names_of_numbers(self.numbers)
            return RowLabels(classes, numbers=read_numbers(self, classes))
        if self.mask is not None:
            return RowLabels(masks=paths)
        classes, labels = self._number_labels()
        return RowLabels(classes, labels)

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
