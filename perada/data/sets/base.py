# SPDX-License-Identifier: Apache-2.0
"""Image sets and their manifests, and the checks of what a set of one's own gives."""

import csv
import inspect
import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.text import abbreviated, visible_form
from perada.data.batches.transforms import check_dtype
from perada.data.partitions.shares import Array

_CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency


class ImageSet(Dataset[Any], ABC):
    """One split of a set of images; :meth:`with_split` gives the other. Nothing is read before it is needed.

    Items are (uint8 image (Ch, H, W), label). Attributes: ``images`` all of them as a tensor, or None if they stay on
    disk; ``labels`` int64 (N,), or None if there are none; ``columns`` further facts about each image by name;
    ``group_column`` the column whose values stay together wherever images are set aside, such as the patient, or None;
    ``classes`` the names of the classes in the order of their numbers, or None; ``identities`` a word (N,) that stands
    for each image, or for its group, by which it is set aside, or None: its position.

    Args:
        train: The training split, or else the test split.
    """

    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    group_column: str | None = None
    identities: Array | None = None

    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments, of which :meth:`with_split` makes the other split."""
        made = super().__new__(cls)
        made._given = args, kwargs
        return made

    def __init__(self, train: bool = True) -> None:
        self.train = train

    @abstractmethod
    def _load(self) -> tuple[Tensor | None, Tensor | None]:
        """Read the split that ``self.train`` names.

        Returns:
            Images uint8 (N, Ch, H, W), or (N, H, W) of one grey channel; or floating point that is ready for the model,
            which is neither resized nor normalised; or texts, int64 tokens (N, L); or None if they stay on disk.
            Labels: whole numbers (N,), or floats (N, K) of zeros and ones for several labels an image, or None. Arrays
            are converted.
        """

    @cached_property
    def _tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return checked_tensors(split_of(self), self._load())

    @property
    def images(self) -> Tensor | None:
        """All images, uint8 (N, Ch, H, W), or None if they are read one by one."""
        return self._tensors[0]

    @property
    def labels(self) -> Tensor | None:
        """All labels (N,), or None if the set has none."""
        return self._tensors[1]

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Facts about each image of the split in ``self.train``, (N,) by name, for partitions that divide by them."""
        return {}

    def download(self) -> None:
        """Fetch the files if that was asked for and they are missing."""

    def with_split(self, train: bool) -> Self:
        """Return the training or the test split of the same set: what the class makes of the same arguments."""
        if train == self.train:
            return self
        given = self._arguments()
        inside = given.arguments
        if "train" not in given.signature.parameters:  # it is an option of the class below
            rest = [name for name, one in given.signature.parameters.items() if one.kind is one.VAR_KEYWORD]
            inside = given.arguments.setdefault(rest[0], {}) if rest else {}
        inside["train"] = train
        other = type(self)(*given.args, **given.kwargs)
        other.train = train  # of a class that has no such argument
        return other

    def _arguments(self) -> inspect.BoundArguments:
        return inspect.signature(type(self)).bind(*self._given[0], **self._given[1])

    def _in_memory(self) -> Tensor:
        if self.images is None:
            raise TypeError(
                f"{split_of(self)}: _load returned no images, so {type(self).__name__} must define __len__ and "
                "__getitem__, which read them one by one"
            )
        return self.images

    def __len__(self) -> int:
        return len(self._in_memory())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        image = self._in_memory()[index]
        return image if self.labels is None else (image, self.labels[index])

    def __repr__(self) -> str:
        given = self._arguments()
        shown = [f"{name}={value!r}" for name, value in (given.arguments | given.kwargs).items() if name in vars(self)]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Manifest:
    """A table of images, a row each: what any source of images is made into before anything is done with it.

    Attributes:
        paths: Where each image is: its file, or its place in the source.
        labels: Classes (N,), or zeros and ones (N, K) for several labels an image; ``None`` without labels.
        classes: Names of the classes, or of the labels that an image may have, in the order of their numbers.
        columns: Further facts (N,) by name, such as ``client``, ``group`` and ``domain``.
        split: ``train``, ``test`` or ``val`` (N,); ``None`` where the source does not say.
        num_classes: Number of classes that have no names.
        identities: A word (N,) that stands for each image, or for its group, by which it is set aside.
    """

    paths: list[str]
    labels: Array | None = None
    classes: tuple[str, ...] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    split: Array | None = None
    num_classes: int | None = None
    identities: Array | None = None

    def rows(self, rows: Array) -> "Manifest":
        """Some of the images, in the order of ``rows``, as a set of its own."""
        return replace(
            self,
            paths=[self.paths[row] for row in rows],
            columns={name: column[rows] for name, column in self.columns.items()},
            labels=None if self.labels is None else self.labels[rows],
            identities=None if self.identities is None else self.identities[rows],
            split=None,
        )


def split_of(images: ImageSet) -> str:
    """The class of an image set and its split, for messages."""
    return f"{type(images).__name__}, {'training' if images.train else 'test'} split"


def checked_tensors(who: str, loaded: Any) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401  # whatever a set gives
    """The images and labels that ``_load`` of the set ``who`` returned, as tensors; arrays are converted.

    Raises:
        ValueError: If they are not two, do not fit one another, or have axes that images or labels do not have.
        TypeError: If they are of a type that cannot be used.
    """
    given = f"{who}: _load returned"
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        what = f"{len(loaded)} values" if isinstance(loaded, tuple | list) else _shown(loaded)
        raise ValueError(f"{given} {what}; return images and labels, with None for labels of which there are none")
    images, labels = (_tensor(f"{given} {what}", one) for what, one in zip(("images", "labels"), loaded, strict=True))
    if images is not None:
        try:
            check_dtype(images)
        except TypeError as error:
            raise TypeError(f"{who}: {error}") from None
        shape = tuple(images.shape)
        remedy = "return (N, channels, height, width), or (N, height, width) of one grey channel"
        last = len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS and min(shape[1:3]) > shape[3]
        if last:
            remedy = "its channels seem to come last: return images.permute(0, 3, 1, 2)"
        if last or len(shape) not in ((3, 4) if images.dtype == torch.uint8 else range(2, 9)):
            raise ValueError(f"{given} images of shape {shape}; {remedy}")
        if labels is not None and len(images) != len(labels):
            raise ValueError(f"{given} {len(images)} images and {len(labels)} labels; return one label for each image")
    whole = labels is None or not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels is not None and (labels.ndim != 1 if whole else labels.ndim != 2 or not labels.is_floating_point()):
        column = " (labels.squeeze(1) of these)" if whole and labels.shape[1:] == (1,) else ""
        raise TypeError(
            f"{given} labels {_shown(labels)}, which are neither classes nor vectors; return whole numbers "
            f"(N,){column}, a class for each image, or floats (N, K) of zeros and ones for several labels each"
        )
    return images, labels.long() if labels is not None and whole else labels


def _tensor(who: str, given: Any) -> Tensor | None:  # noqa: ANN401
    if given is None or isinstance(given, Tensor):
        return given
    try:
        array = np.ascontiguousarray(given)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # words, lists of unequal lengths
        reason = f"{who} as {_shown(given)}, which is not a tensor of numbers; return a tensor"
        raise TypeError(reason) from None


def checked_columns(who: str, columns: Any, size: int) -> dict[str, np.ndarray[Any, Any]]:  # noqa: ANN401
    """The columns of the set ``who`` of so many images, as arrays.

    Raises:
        ValueError: If a column has not one value for each image.
        TypeError: If they are not a mapping.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(
            f"{who}: columns is of type {type(columns).__name__}; return {{name: array (N,)}} from a @property"
        )
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        if array.shape[:1] != (size,):
            raise ValueError(
                f"{who}: the column {name!r} has shape {array.shape} for {size} images; return one value for each "
                "image of the split in self.train"
            )
    return arrays


def class_names(who: str, classes: Any, num_classes: int | None) -> tuple[str, ...] | None:  # noqa: ANN401
    """The names of classes, of which there are so many; None where ``classes`` is anything but a list of names.

    Raises:
        ValueError: If they are not so many, or one is there twice.
    """
    if not isinstance(classes, tuple | list) or not all(isinstance(name, str) for name in classes):
        return None
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice or num_classes not in (None, len(classes)):
        has = f"the name {twice[0]!r} twice" if twice else f"{len(classes)} names for {num_classes} classes"
        raise ValueError(
            f"{who} has {has} in classes; give each class a name of its own, in the order of their numbers"
        )
    return tuple(classes)


def _shown(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "None" if value is None else f"one {type(value).__name__}"


@contextmanager
def reading(path: Path, again: str, expected: str) -> Iterator[None]:
    """Name a file that is missing or damaged, with what is expected and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, and {expected} is expected: {again}") from None
    except (EOFError, KeyError, OSError, TypeError, ValueError, csv.Error, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({reason}), and {expected} is expected: {again}") from None


def numbered(words: Sequence[Any], classes: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], Array]:
    """The classes, by default all there are, sorted, as numbers where all are, and the labels by each image's words.

    Labels are int64 (N,) of one word an image, and float32 zeros and ones (N, K) of a list of words each.

    >>> numbered([["b"], [], ["a", "b"]])[1].tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    several = any(isinstance(own, list) for own in words)
    rows = words if several else [[word] for word in words]
    if classes is None:
        found = {word for own in rows for word in own}
        numeric = all(re.fullmatch(r"\d{1,18}", name) for name in found)
        classes = tuple(sorted(found, key=lambda name: (int(name), name) if numeric else (0, name)))
    numbers = {name: number for number, name in enumerate(classes)}
    if not several:
        return classes, np.array([numbers[word] for word in words], dtype=np.int64)
    labels = np.zeros((len(rows), len(classes)), dtype=np.float32)
    for row, own in zip(labels, rows, strict=True):
        row[[numbers[word] for word in own]] = 1
    return classes, labels


def renumbered(found: Manifest, classes: Sequence[str], where: str) -> Manifest:
    """The images with their labels numbered by the order of ``classes``.

    Raises:
        ValueError: If there is another class among them.
    """
    assert found.labels is not None and found.classes is not None
    unknown = [name for name in found.classes if name not in classes]
    by_form = {visible_form(name): name for name in classes}
    for name in unknown:
        twin = by_form.get(visible_form(name))
        if twin is not None:
            raise ValueError(
                f"{where} has images of {name!a}, which looks like the class {twin!a} but is another name: rename one "
                "of them, so that they are the same code points"
            )
    if unknown:
        raise ValueError(
            f"{where} has images of {abbreviated(unknown)}, and the classes are {abbreviated(classes)}: rename them, "
            "take the images "
            "out, or name them among classes"
        )
    places = np.array([list(classes).index(name) for name in found.classes], dtype=np.int64)
    labels = places[found.labels] if found.labels.ndim == 1 else found.labels @ np.eye(len(classes), dtype="f")[places]
    return replace(found, labels=labels, classes=tuple(classes))
