# SPDX-License-Identifier: Apache-2.0
"""Image sets of Hugging Face ``datasets``, from the Hub or a local folder."""

import hashlib
import io
import re
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from perada.data.batches.transforms import MissingImageError, read_image, resize_uint8
from perada.data.partitions.shares import Array
from perada.data.sets.manifest import SPLITS, Manifest, OwnImages, marked, ordered

if TYPE_CHECKING:
    from datasets import Dataset

_LABELS = ("label", "labels", "fine_label")
_PLACE = re.compile(r"(.+)\[(\d+)\]")


class HuggingFace(OwnImages):
    """An image set of Hugging Face ``datasets`` (``pip install 'perada[datasets]'``), by name or from a local folder.

    A folder is what ``save_to_disk`` wrote, or one that ``load_dataset`` reads: Parquet files, or images with or
    without ``metadata.csv``. Code that comes with a set is never run. Labels are class labels, whole numbers, words, or
    lists of these where an image may have several. Class labels keep their names and order; those that no image has
    are left out.

    The columns ``client``, ``group`` and ``domain`` of the set are those that are named so here. Splits are called as
    in :class:`.ImageTable`; where there is only one, ``test_share`` of it is the test split.

    Args:
        name: Name on the Hub, such as ``flwrlabs/office-home``, or a folder.
        config: Which of the set's configurations, where it has several.
        revision: A branch, a tag or a commit of the Hub, so that the set stays the same.
        splits: The set's splits that are used; null for all whose names are known.
        image: Column of the images; null for the only one.
        label: Column of the labels; null for ``label``, ``labels`` or ``fine_label``, or the only class labels.
        client: Column of the clients; null for ``client``, if there is such a column.
        group: Column of what must not stand on both sides, such as the patient; null for ``group``, likewise.
        domain: Column of the domains; null for ``domain``, likewise.
        **options: Those of :class:`.OwnImages`.

    Raises:
        FileNotFoundError: When the set is first read, if it cannot be had.
        ValueError: If an option is out of range or, when it is first read, a column or a split is missing.
        ModuleNotFoundError: If ``datasets`` is not installed.
    """

    _how = "splits"

    def __init__(
        self,
        name: str,
        config: str | None = None,
        revision: str | None = None,
        splits: list[str] | None = None,
        image: str | None = None,
        label: str | None = None,
        client: str | None = None,
        group: str | None = None,
        domain: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        name = name.removeprefix("hf:")  # as the command line names sets
        self.name, self.config, self.revision, self.splits = name, config, revision, splits
        self.image, self.label, self.client, self.group, self.domain = image, label, client, group, domain

    @cached_property
    def _parts(self) -> dict[str, "Dataset"]:
        """The splits that are used, by name."""
        found = _load(self.name, self.config, self.revision)
        if self.splits is not None:
            for split in self.splits:
                if split not in found:
                    raise ValueError(f"splits: {self.name} has no split {split!r}; it has {', '.join(found)}")
            found = {split: found[split] for split in self.splits}
        known = {split: part for split, part in found.items() if split.lower() in SPLITS and len(part)}
        if len(found) > 1 and self.splits is None:
            found = known
        if not found or (len(found) > 1 and len(known) < len(found)):
            raise ValueError(
                f"{self.name}: of several splits each must be one of {', '.join(SPLITS)}; name those to be used in "
                "splits, or a single one"
            )
        return found

    @cached_property
    def _features(self) -> dict[str, Any]:
        return dict(next(iter(self._parts.values())).features)

    @property
    def group_column(self) -> str | None:  # type: ignore[override]  # it depends on the set
        """The column of groups, if there is one."""
        return "group" if self.group or "group" in self._features else None

    @property
    def has_clients(self) -> bool:
        """Whether the set says which client an image belongs to."""
        return bool(self.client) or "client" in self._features

    def _named(self, option: str, given: str) -> str:
        """A column, which must be there."""
        if given not in self._features:
            close = get_close_matches(given, self._features, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, self._features))}"
            raise ValueError(f"{option}: {self.name} has no column {given!r}; {hint}")
        return given

    def _only(self, option: str, given: str | None, fitting: list[str]) -> str:
        """The column given, or the only one that fits."""
        if given is not None:
            return self._named(option, given)
        if len(fitting) != 1:
            there = f"several ({', '.join(fitting)})" if fitting else "none"
            what = (
                "columns of images" if option == "image" else f"columns called {', '.join(_LABELS)} or of class labels"
            )
            raise ValueError(
                f"{option}: {self.name} has {there} of the {what} among {', '.join(self._features)}; name it in "
                f"{option}"
            )
        return fitting[0]

    @cached_property
    def _images(self) -> dict[str, "Dataset"]:
        """The splits with their images alone, as they are stored."""
        from datasets import Image as ImageFeature

        fitting = [name for name, kind in self._features.items() if isinstance(kind, ImageFeature)]
        column = self._only("image", self.image, fitting)
        if column not in fitting:
            raise ValueError(f"image: column {column!r} of {self.name} holds {self._features[column]}, and no images")
        stored = ImageFeature(decode=False)
        return {split: part.select_columns([column]).cast_column(column, stored) for split, part in self._parts.items()}

    def content(self, path: str) -> bytes:
        """The image ``split[row]`` as it is stored."""
        split, row = _PLACE.fullmatch(path).groups()  # type: ignore[union-attr]  # as read_manifest makes it
        (stored,) = self._images[split][int(row)].values()
        if stored is None:
            raise MissingImageError(f"{self.name}, {path}, has no image: take the row out")
        return stored["bytes"] or Path(stored["path"]).read_bytes()

    def digest(self, path: str) -> str:
        """A digest of the image ``split[row]`` as it is stored; of its place if there is none."""
        try:
            return hashlib.sha256(self.content(path)).hexdigest()
        except OSError:
            return hashlib.sha256(path.encode()).hexdigest()

    def read(self, path: str) -> Tensor:
        """Read the image ``split[row]`` as uint8 (Ch, size, size), as image files are read."""
        file = io.BytesIO(self.content(path))
        pixels = read_image(file, "take the row out", self.mode, self.full_scale, f"{self.name}, {path},")
        return resize_uint8(pixels, self.size)

    def read_manifest(self) -> Manifest:
        """List the rows of the splits that are used."""
        parts = self._parts
        self._images  # noqa: B018  # whether there are images is said before anything else
        paths = [f"{split}[{row}]" for split, part in parts.items() for row in range(len(part))]
        classes, labels = self._labels()
        columns = {}
        for option, given in (("client", self.client), ("group", self.group), ("domain", self.domain)):
            if given is not None or option in self._features:
                columns[option] = np.array(list(map(str, self._values(self._named(option, given or option)))))
        split = None
        if len(parts) > 1:
            split = np.repeat([SPLITS[name.lower()] for name in parts], [len(part) for part in parts.values()])
        return Manifest(paths, labels, classes, columns, split)

    def _values(self, column: str) -> list[Any]:
        """A column of all splits, one after the other; an error names the first row that lacks it."""
        values = []
        for split, part in self._parts.items():
            own = part[column][:]
            if None in own:
                raise ValueError(f"{self.name}, {split}[{own.index(None)}], lacks {column}: take the row out")
            values += own
        return values

    def _labels(self) -> tuple[tuple[str, ...], Array]:
        from datasets import ClassLabel

        inner = {name: getattr(kind, "feature", kind) for name, kind in self._features.items()}
        usual = [name for name in _LABELS if name in inner][:1]
        column = self._only("label", self.label, usual or [n for n, k in inner.items() if isinstance(k, ClassLabel)])
        kind, several = inner[column], inner[column] is not self._features[column]
        if not isinstance(kind, ClassLabel) and not re.match("u?int|bool|(large_)?string", getattr(kind, "dtype", "")):
            raise ValueError(
                f"label: column {column!r} of {self.name} holds {kind}, and no classes; name another column"
            )
        values = self._values(column)
        rows = values if several else [[value] for value in values]
        names = kind.names if isinstance(kind, ClassLabel) else None
        if names is not None:
            wrong = next((one for own in rows for one in own if not 0 <= one < len(names)), None)
            if wrong is not None:
                raise ValueError(f"{self.name}: a {column} is {wrong}, of {len(names)} classes; take its row out")
        words = [[str(one) if names is None else names[one] for one in own] for own in rows]
        found = {word for own in words for word in own}
        classes = ordered(found) if names is None else tuple(name for name in names if name in found)
        labels = marked(words, classes)
        return classes, labels if several else labels.argmax(1)


def _load(name: str, config: str | None, revision: str | None) -> dict[str, "Dataset"]:
    """All splits of a set."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is read with datasets, which is not installed ({error}); pip install 'perada[datasets]'"
        ) from error
    folder = Path(name)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, config, revision=revision)
    except Exception as error:  # it raises many types
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the data set {name!r} cannot be had ({type(error).__name__}: {reason[:300]}): set name to one of the Hub "
            "or to a folder, and config where it has several"
        ) from None
    return dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
