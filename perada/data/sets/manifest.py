# SPDX-License-Identifier: Apache-2.0
"""Sets of image files, which are read one by one as their manifest lists them."""

import hashlib
import os
import re
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import OptionError, check_integer, check_number
from perada.core.text import abbreviated, near_names
from perada.data.batches.transforms import UnreadableImageError, check_full_scale, read_image, resize_uint8
from perada.data.federated import warn_of_look_alikes
from perada.data.partitions.shares import Array, hashed_share
from perada.data.sets.base import ImageSet, Manifest, class_names, renumbered

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "val"
)
"""Words for a split, in any case, and what they mean."""


class ImageFiles(ImageSet):
    """Images that are read one by one, as squares of one size; a subclass makes their manifest.

    Args:
        root: Where they are.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.
    """

    mode = "RGB"  # of Pillow
    full_scale: float | None = None  # the value of white in images of more than 8 bits
    _source = ""  # where to fetch them

    def __init__(self, root: str, *, size: int = 224, in_memory: bool = False, train: bool = True) -> None:
        super().__init__(train)
        check_integer("size", size)
        self.root, self.size, self.in_memory = root, size, in_memory

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """List all images of the source."""

    @cached_property
    def manifest(self) -> Manifest:
        """The images of the split in ``self.train``; all where there are no splits."""
        found = self._divided(self.read_manifest())
        side = "train" if self.train else "test"
        return found if found.split is None else found.rows(np.flatnonzero(found.split == side))

    def _divided(self, found: Manifest) -> Manifest:
        """The images with their splits as ``train`` and ``test``."""
        return found

    def read(self, path: str) -> Tensor:
        """Read one file as uint8 (Ch, size, size), turned as its EXIF data say (see :func:`.decode`).

        Raises:
            MissingImageError: If it does not exist.
            UnreadableImageError: If it is not an image, is cut short, or has values that cannot be scaled.
        """
        remedy = f"fetch it again from {self._source}" if self._source else "fix it or take it out of the folder"
        return resize_uint8(read_image(path, remedy, self.mode, self.full_scale), self.size)

    def content(self, path: str) -> bytes:
        """One file as it is stored."""
        return Path(path).read_bytes()

    def digest(self, path: str) -> str:
        """A digest of a file's content, whatever it is called; of the path if it cannot be read."""
        try:
            return self._digest(path)
        except OSError:
            return hashlib.sha256(path.encode()).hexdigest()

    def _digest(self, path: str) -> str:
        state = os.stat(path)
        return _of_file(path, state.st_size, state.st_mtime_ns)

    def _load(self) -> tuple[Tensor | None, Tensor | None]:
        labels = None if self.manifest.labels is None else torch.from_numpy(self.manifest.labels)
        if not self.in_memory:
            return None, labels
        images, broken = [], []
        for path in self.manifest.paths:
            try:
                images.append(self.read(path))
            except (OSError, ValueError) as error:
                broken.append(str(error))
        if broken:
            raise UnreadableImageError(
                f"{'; '.join(broken)}; to leave such out, set in_memory: false and on_broken: skip"
            )
        return torch.stack(images), labels

    @property
    def num_classes(self) -> int | None:  # type: ignore[override]  # known from the files
        """Number of classes, or of labels that an image may have; None where there are no labels."""
        return self.manifest.num_classes if self.classes is None else len(self.classes)

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # known from the files
        """Names of the classes, or of the labels that an image may have, in the order of their numbers."""
        return self.manifest.classes

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Further facts about each image, (N,) by name."""
        return self.manifest.columns

    def __len__(self) -> int:
        return len(self.manifest.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        image = self.images[index] if self.images is not None else self.read(self.manifest.paths[index])
        return image if self.labels is None else (image, self.labels[index])


class OwnImages(ImageFiles):
    """Images of one's own; a subclass says where their names come from.

    Class names are sorted, as numbers where all are numbers, and numbered in this order, or in that of ``classes`` if
    they are given. Without a split of the source's own, about a share of the images is the test split, and never all
    of a client, or of a class that was not named. Which ones follows from ``seed`` and each image's content alone, or
    from the name of its group: images that come or go move no others, but in clients with few (:func:`.hashed_share`).

    Args:
        root: Where they are.
        classes: Names of the classes, in the order of their numbers; some may have no images. null: those found.
        test_share: Without a split of the source's own, about the share of each client's images that is the test split.
        seed: Another seed, another test split.
        gray: One channel instead of three.
        full_scale: The value of white in grey images of more than 8 bits, such as 4095; null for 65535, or for 1 in
            floating-point images.
        **options: Those of :class:`ImageFiles`.

    Attributes:
        known: Identities of which it is settled that they are test images, or not.
    """

    _clients = "client"  # column by which images are set aside

    def __init__(
        self,
        root: str,
        *,
        classes: list[str] | None = None,
        test_share: float = 0.2,
        seed: int = 0,
        gray: bool = False,
        full_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self._names = class_names(type(self).__name__, classes, None)
        if classes is not None and not self._names:
            raise OptionError(
                f"classes={classes!r} cannot be used; give a list of their names, or leave it out",
                name="classes",
                value=classes,
            )
        check_number("test_share", test_share, gt=0, lt=1, hint="a share of the images")
        check_full_scale(full_scale)
        self.known: Mapping[str, bool] = {}
        self.test_share, self.seed, self.gray, self.full_scale = test_share, seed, gray, full_scale
        self.mode = "L" if gray else "RGB"
        self.where = root

    def _divided(self, found: Manifest) -> Manifest:
        found = found if self._names is None else renumbered(found, self._names, self.where)
        # Classes and clients are compared when FederatedData is made.
        warn_of_look_alikes("groups", found.columns.get("group", ()))
        if found.split is None:
            identities = self._identified(found)
            found, split = replace(found, identities=identities), np.full(len(found.paths), "train")
            clients = found.columns.get(self._clients, np.zeros(len(split), np.int64)).tolist()
            assert found.labels is not None
            several = found.labels.ndim == 2
            classes = [np.flatnonzero(one).tolist() if several else [one.item()] for one in found.labels]
            given = identities.tolist(), clients, classes, self.test_share, self.seed, self.known
            split[hashed_share(*given, leave=self._names is None)] = "test"
        else:
            split = self._said(found, found.split.tolist())
        self._check_classes(found, split == "train")
        return replace(found, split=split)

    def _identified(self, found: Manifest) -> Array:
        """What stands for each image: its group, or else its content."""
        if "group" in found.columns:
            groups = found.columns["group"].tolist()
            return np.array([hashlib.sha256(f"group {name}".encode()).hexdigest() for name in groups])
        with ThreadPoolExecutor(8) as pool:
            return np.array(list(pool.map(self.digest, found.paths)))

    @property
    def identities(self) -> Array:  # type: ignore[override]  # known from the files
        """A digest (N,) of each image's group, or else of its content."""
        own = self.manifest.identities
        return self._identified(self.manifest) if own is None else own

    def with_split(self, train: bool) -> Self:
        """As of every set; what is settled stays so."""
        other = super().with_split(train)
        other.known = self.known
        return other

    @property
    def group_column(self) -> str | None:  # type: ignore[override]  # known from the source
        """The column of groups, if there is one."""
        return "group" if "group" in self.columns else None

    def _said(self, found: Manifest, words: list[str]) -> Array:
        """The split (N,) that the source's words mean."""
        split = np.array([SPLITS.get(word.lower(), "") for word in words])
        if "" in split:
            place = int(np.argmax(split == ""))
            raise ValueError(
                f"{found.paths[place]}: the split {words[place]!r} is none of {', '.join(SPLITS)}; correct it"
            )
        has = Counter(split.tolist())
        if not has["train"] or not has["test"] + has["val"]:
            raise ValueError(
                f"{self.where} has no {'test' if has['train'] else 'training'} images in its split: add some, or "
                "leave the split out, and test_share of the images is the test split"
            )
        if not has["test"]:
            split[split == "val"] = "test"
        elif has["val"]:
            left = f"{has['val']} validation images of {self.where} are neither trained on nor tested on"
            warnings.warn(f"{left}; call them train to use them", stacklevel=2)
        groups = found.columns.get("group", np.arange(len(split)))
        both = np.intersect1d(groups[split == "train"], groups[split == "test"])
        if len(both):
            raise ValueError(
                f"{self.where} has both training and test images of the group{'s' * (len(both) > 1)} "
                f"{abbreviated(both.tolist())}: put all images of a group on one side, or leave the split out"
            )
        return split

    def _check_classes(self, found: Manifest, train: Array) -> None:
        if self._names is not None:
            return
        assert found.labels is not None and found.classes is not None
        own = found.labels[train]
        counts = np.bincount(own, minlength=len(found.classes)) if own.ndim == 1 else own.sum(0)
        lacking = [name for name, count in zip(found.classes, counts, strict=True) if not count]
        if lacking:
            raise ValueError(
                f"{self.where} has no training images of {abbreviated(lacking)}, among {len(found.classes)} classes: "
                "add "
                "some, or take its test images out"
            )


class ListedImages(OwnImages):
    """Images that are listed with what is known of each; a subclass reads the columns.

    The columns ``client``, ``group`` and ``domain`` of the set are those that are named so here.

    Args:
        root: Where they are.
        client: Column of the clients; null for ``client``, if there is such a column.
        group: Column of what must not stand on both sides, such as the patient; null for ``group``, likewise.
        domain: Column of the domains; null for ``domain``, likewise.
        **options: Those of :class:`.OwnImages`.
    """

    def __init__(
        self,
        root: str,
        *,
        client: str | None = None,
        group: str | None = None,
        domain: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.client, self.group, self.domain = client, group, domain

    @property
    @abstractmethod
    def listed(self) -> tuple[Mapping[str, Sequence[Any]], Sequence[Any]]:
        """The columns by name, each of words or of lists of words, and what a message calls each row."""

    def named(self, option: str, name: str) -> str:
        """The name of a column that an option gives, which must be there."""
        columns, _ = self.listed
        if name not in columns:
            if re.fullmatch(r"\[.*\]", name):
                quoted = ", ".join(f'"{part.strip()}"' for part in name[1:-1].split(",") if part.strip())
                raise ValueError(
                    f"{option}: {self.where} has no column {name!r}. For a list of columns, quote each name that YAML "
                    f"reads as a number or as true or false: '--{option}=[{quoted}]' on the command line, "
                    f"{option}: [{quoted}] in a recipe"
                )
            close = near_names(name, columns)
            hint = f"did you mean {close[0]!r}?" if close else f"name one of {', '.join(map(repr, columns))}"
            raise ValueError(f"{option}: {self.where} has no column {name!r}; {hint}")
        return name

    def column(self, option: str, name: str, remedy: str = "fill it in, or take the row out") -> list[Any]:
        """The values of a column, which must have no gaps."""
        values = list(self.listed[0][self.named(option, name)][:])
        empty = [place for place, one in enumerate(values) if one in ("", None)]
        self.refuse(empty, f"{name} is empty", remedy)
        return values

    def refuse(self, wrong: Iterable[int], what: str, remedy: str) -> None:
        """Name the rows that cannot be used, if there are any."""
        rows = [str(self.listed[1][place]) for place in wrong]
        if rows:
            raise ValueError(f"{self.where}, row{'s' * (len(rows) > 1)} {abbreviated(rows)}: {what}; {remedy}")

    def facts(self) -> dict[str, Array]:
        """The columns of the set."""
        named = {name: getattr(self, name) or name for name in ("client", "group", "domain")}
        there = [name for name in named if getattr(self, name) or name in self.listed[0]]
        return {name: np.array(list(map(str, self.column(name, named[name])))) for name in there}


@lru_cache(maxsize=2**20)
def _of_file(path: str, size: int, changed: int) -> str:
    """Of the content of a file that has so many bytes, and was changed then."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
