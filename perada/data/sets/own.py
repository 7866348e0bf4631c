# SPDX-License-Identifier: Apache-2.0
"""Images of one's own: names, clients and a split without code, from the paths of files."""

import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from perada.core.checks import check_number
from perada.core.text import some
from perada.data.batches.decoding import check_full_scale
from perada.data.partitions.apportion import Array
from perada.data.partitions.shares import hashed_share
from perada.data.sets.checks import class_names
from perada.data.sets.folders import ImageFiles, Listing
from perada.data.sets.layouts import SPLITS, layout_pattern, list_images, proposal


@dataclass(frozen=True)
class Records:
    """All images of a source, before they are divided into training and test images."""

    paths: list[str]
    labels: Array  # (N,) classes, or (N, K) zeros and ones
    classes: tuple[str, ...]
    columns: dict[str, Array] = field(default_factory=dict)  # client and group, (N,), those that are known
    split: Array | None = None  # (N,) train, test or val


class OwnImages(ImageFiles):
    """Images of one's own; a subclass says where their names come from.

    Class names are sorted, as numbers where all are numbers, and numbered in this order, or in that of ``classes`` if
    they are given. Without a split of the source's own, about a share of the images is the test split, and never all
    of a client, or of a class that was not named. Which ones follows from ``seed`` and each image's content alone, or
    from the name of its group: images that come or go move no others, but in clients with few (:func:`.hashed_share`).

    Attributes:
        known: Identities of which it is settled that they are test images, or not.
    """

    _own = True
    _how = "the layout"  # where a split is said

    def __init__(
        self,
        root: str,
        test_share: float,
        seed: int,
        size: int,
        gray: bool,
        full_scale: float | None,
        in_memory: bool,
        train: bool,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__(root, size, in_memory, train)
        self._names = None if classes is None else class_names(type(self).__name__, classes, None)
        if classes is not None and not self._names:
            raise ValueError(f"classes={classes!r} cannot be used; give a list of their names, or leave it out")
        check_number("test_share", test_share, above=0, below=1, hint="a share of the images")
        check_full_scale(full_scale)
        self.known: Mapping[str, bool] = {}
        self.test_share, self.seed, self.gray, self.full_scale = test_share, seed, gray, full_scale
        self._mode = "L" if gray else "RGB"
        self._where = root

    @abstractmethod
    def _records(self) -> Records:
        """List all images."""

    @cached_property
    def _listing(self) -> Listing:
        found = self._records()
        found = found if self._names is None else renumbered(found, self._names, self._where)
        identities = self._identified(found.paths, found.columns) if found.split is None else None
        test = self._test_rows(found, identities)
        train = np.setdiff1d(np.arange(len(found.paths)), test)
        if found.split is not None:
            train = train[found.split[train] == "train"]
        self._check_classes(found, train)
        rows = train if self.train else test
        labels = torch.from_numpy(found.labels[rows])
        columns = {name: column[rows] for name, column in found.columns.items()}
        paths = [found.paths[row] for row in rows]
        own = None if identities is None else identities[rows]
        return Listing(paths, labels, columns, len(found.classes), found.classes, own)

    def with_split(self, train: bool) -> Self:
        """As of every set; what is settled stays so."""
        other = super().with_split(train)
        other.known = self.known
        return other

    @property
    def divided(self) -> bool:
        """Whether training and test images were divided here, and not by the source."""
        return self._listing.identities is not None

    def _test_rows(self, found: Records, identities: Array | None) -> Array:
        """The rows of the test split, ascending."""
        if found.split is None:
            assert identities is not None
            clients = found.columns.get("client", np.zeros(len(found.paths), np.int64)).tolist()
            several = found.labels.ndim == 2
            classes = [np.flatnonzero(one).tolist() if several else [one.item()] for one in found.labels]
            given = identities.tolist(), clients, classes, self.test_share, self.seed, self.known
            return hashed_share(*given, leave=self._names is None)
        has = {name: int((found.split == name).sum()) for name in ("train", "test", "val")}
        for name in ("train", "test"):
            if not has[name] and not (name == "test" and has["val"]):
                raise ValueError(
                    f"{self._where} has no {name} images in its split: add some, or leave the split out of "
                    f"{self._how}, and test_share of the images is the test split"
                )
        if has["test"] and has["val"]:
            left = f"{has['val']} validation images of {self._where} are neither trained on nor tested on"
            warnings.warn(f"{left}; call them train to use them", stacklevel=2)
        elif has["val"]:
            found.split[found.split == "val"] = "test"
        if "group" in found.columns:
            groups = found.columns["group"]
            both = np.intersect1d(groups[found.split == "train"], groups[found.split == "test"])
            if len(both):
                raise ValueError(
                    f"{self._where} has both training and test images of the group{'s' * (len(both) > 1)} "
                    f"{some(both.tolist())}: put all images of a group on one side, or leave the split out of "
                    f"{self._how}"
                )
        return np.flatnonzero(found.split == "test")

    def _check_classes(self, found: Records, train: Array) -> None:
        """Refuse classes without images to train on, unless the classes were named."""
        if self._names is not None:
            return
        own = found.labels[train]
        counts = np.bincount(own, minlength=len(found.classes)) if own.ndim == 1 else own.sum(0)
        lacking = [name for name, count in zip(found.classes, counts, strict=True) if not count]
        if lacking:
            raise ValueError(
                f"{self._where} has no training images of {some(lacking)}, among {len(found.classes)} classes: add "
                "some, or take its test images out"
            )


class Images(OwnImages):
    """Images of one's own whose client, class, split and group stand in their paths.

    ``{client}/{class}/*`` reads ``hospital_a/benign/0001.png``. A layout is the path below ``root``, with ``/``. Its
    fields are ``{client}``, ``{class}`` (which is needed), ``{split}`` and ``{group}``; a field is a folder's name or a
    part of a name, as short as possible. ``*`` and ``?`` stand for any letters of one name, ``**`` for any folders too.
    What begins with a dot and what is no image is passed over.

    The columns ``client`` and ``group`` are those of the fields. A split is called ``train``, ``test`` or ``val`` (or
    ``training``, ``testing``, ``valid``, ``validation``, ``dev``). ``val`` is the test split where there is no other,
    or else left out.

    Args:
        root: The folder.
        layout: Where client, class, split and group stand.
        test_share: Without ``{split}``, about the share of each client's images that is the test split.
        seed: Another seed, another test split.
        size: Height and width that images are resized to (bilinear, antialiased, sides not kept in proportion).
        gray: One channel instead of three.
        full_scale: The value of white in grey images of more than 8 bits, such as 4095; null for 65535, or for 1 in
            floating-point images.
        in_memory: Keep all images as one tensor instead of reading files again and again.
        train: The training split, or else the test split.
        classes: Names of the classes, in the order of their numbers; some may have no images. null: those in the paths.

    Raises:
        FileNotFoundError: When the set is first read, if ``root`` is missing or nothing in it has the layout.
        ValueError: If an option is out of range or, when it is first read, a class has no training images, or is not
            among those that are named.
    """

    def __init__(
        self,
        root: str,
        layout: str = "{client}/{class}/*",
        test_share: float = 0.2,
        seed: int = 0,
        size: int = 224,
        gray: bool = False,
        full_scale: float | None = None,
        in_memory: bool = False,
        train: bool = True,
        classes: list[str] | None = None,
    ) -> None:
        super().__init__(root, test_share, seed, size, gray, full_scale, in_memory, train, classes)
        self.layout = layout
        self._pattern = layout_pattern(layout)
        self.group_column = "group" if "{group}" in layout else None
        self.has_clients = "{client}" in layout

    def _records(self) -> Records:
        root = Path(self.root)
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not a folder: set root to the folder of the images")
        files = list_images(root)
        if not files and any((root / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            raise FileNotFoundError(
                f"{root} is a set that datasets wrote: read it with the class HuggingFace, or as hf:{root} on the "
                "command line"
            )
        if not files:
            raise FileNotFoundError(f"{root} has no images: set root to a folder with {', '.join(IMG_EXTENSIONS)}")
        matches = [self._pattern.fullmatch(file) for file in files]
        found = [match for match in matches if match]
        others = [file for file, match in zip(files, matches, strict=True) if not match]
        what = f"in {root}, such as {others[0]}, do not have the layout {self.layout!r}" if others else ""
        if not found:
            raise FileNotFoundError(f"the {len(files)} images {what}: set layout to fit{proposal(files[0])}")
        if others:
            warnings.warn(f"{len(others)} of {len(files)} images {what}; they are left out", stacklevel=2)
        values = {name: [match[name] for match in found] for name in self._pattern.groupindex}
        classes, labels = numbered(values["class"])
        split = None
        if "split" in values:
            split = np.array(
                [_split_word(word, f"{root / m[0]}") for word, m in zip(values["split"], found, strict=True)]
            )
        columns = {name: np.array(values[name]) for name in values if name in ("client", "group")}
        return Records([f"{self.root}/{match[0]}" for match in found], labels, classes, columns, split)


def ordered(names: set[str]) -> tuple[str, ...]:
    """Sorted names, as numbers where all are whole numbers."""
    numeric = all(re.fullmatch(r"\d{1,18}", name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if numeric else (0, name)))


def numbered(names: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray[Any, Any]]:
    """The classes, and the number (N,) of each of the names."""
    classes = ordered(set(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.array([numbers[name] for name in names], dtype=np.int64)


def marked(words: Sequence[Sequence[str]], classes: Sequence[str]) -> Array:
    """Zeros and ones (N, K): which of the classes each image has.

    >>> marked([["b"], [], ["a", "b"]], ["a", "b"]).tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.zeros((len(words), len(classes)), dtype=np.float32)
    for row, own in zip(labels, words, strict=True):
        row[[numbers[word] for word in own]] = 1
    return labels


def renumbered(found: Records, classes: Sequence[str], where: str) -> Records:
    """The images with their labels numbered by the order of ``classes``.

    Raises:
        ValueError: If there is another class among them.
    """
    unknown = [name for name in found.classes if name not in classes]
    if unknown:
        raise ValueError(
            f"{where} has images of {some(unknown)}, and the classes are {some(classes)}: rename them, take the images "
            "out, or name them among classes"
        )
    places = np.array([list(classes).index(name) for name in found.classes])
    if found.labels.ndim == 1:
        return replace(found, labels=places[found.labels], classes=tuple(classes))
    labels = np.zeros((len(found.labels), len(classes)), found.labels.dtype)
    labels[:, places] = found.labels
    return replace(found, labels=labels, classes=tuple(classes))


def _split_word(word: str, where: str) -> str:
    if word.lower() not in SPLITS:
        raise ValueError(f"{where}: the split {word!r} is none of {', '.join(SPLITS)}; correct the layout or the name")
    return SPLITS[word.lower()]
