# SPDX-License-Identifier: Apache-2.0
"""Image sets and their manifests, and the checks of image sets that users write."""

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
from math import isnan
from pathlib import Path, PurePath
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from perada.core.checks import check_choice, checked_names
from perada.core.text import abbreviated, dtype_name, near_names, plain_number, value_text, visible_form
from perada.data.batches.transforms import check_dtype
from perada.data.partitions.shares import Array
from perada.data.sets.label_names import number_of
from perada.data.sets.label_types import computable
from perada.tasks import Task

_CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency


class ImageSet(Dataset[Any], ABC):
    """Base class of image sets. A set is one split; :meth:`with_split` returns the other.

    Items are (uint8 image (Ch, H, W), label). Nothing is read before it is needed.

    Args:
        train: Whether to load the training split or the test split.

    Attributes:
        images: All images as a tensor, or None if they stay on disk.
        labels: int64 (N,), float (N, K) for several labels per image, float (N,) or (N, D) for numbers, integer masks
            (N, H, W), or None without labels.
        columns: Further facts (N,) about the images by name.
        group_column: Column whose values stay together when images are held out, such as the patient, or None.
        classes: Names of the classes in the order of their numbers, or None.
        identities: A string (N,) for each image, or for its group, that decides whether it is held out; None to decide
            by position.
        task: What is learnt from the labels, as far as it is known without reading them; None if the labels show it.
        movements: Names of the changes of the set's images that move their content, but not their labels.
        resizes_images_only: Whether images are resized when they are read, and labels such as coordinates are not.
        is_repeatable: Whether an image is the same whenever it is read, so that outputs of frozen layers can be kept. A
            subclass that changes images at random sets it to False.
    """

    task: Task | None = None
    movements: Sequence[str] = ()
    resizes_images_only: bool = False
    is_repeatable: bool = False
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    group_column: str | None = None
    identities: Array | None = None

    _init_args: tuple[Any, ...] = ()
    _init_kwargs: Mapping[str, Any] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments, from which :meth:`with_split` makes the other split."""
        _check_option_names(cls, kwargs)
        images = super().__new__(cls)
        # A class's own constructor need not call that of its base class, which sets it.
        images.train = True
        images._init_args = args
        images._init_kwargs = kwargs
        return images

    def __init__(self, train: bool = True) -> None:
        check_choice("train", train, [True, False])
        self.train = train

    @abstractmethod
    def _load_images(self) -> tuple[Tensor | None, Tensor | None]:
        """Read the training split if ``self.train``, else the test split.

        Returns:
            Images: uint8 (N, Ch, H, W), or (N, H, W) with one grey channel; or floating-point values prepared for the
            model, which are neither resized nor normalised; or texts, int64 tokens (N, L); or None if they stay on
            disk. Labels: integers (N,), floats (N, K) of zeros and ones for several labels per image, floats (N,) or
            (N, D) for numbers, integer masks (N, H, W), or None. Arrays are converted.
        """

    @cached_property
    def _images_and_labels(self) -> tuple[Tensor | None, Tensor | None]:
        return checked_tensors(split_of(self), self._load_images())

    @property
    def images(self) -> Tensor | None:
        """All images, uint8 (N, Ch, H, W), or None if they are read one by one."""
        return self._images_and_labels[0]

    @property
    def labels(self) -> Tensor | None:
        """All labels (N,), or None if the set has none."""
        return self._images_and_labels[1]

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Facts (N,) about each image of the split by name, for partitions that divide by them."""
        return {}

    def download(self) -> None:
        """Download missing files, if the set is configured to."""

    def with_split(self, train: bool) -> Self:
        """Return the training or the test split of the same set, made from the same arguments."""
        if train == self.train:
            return self
        other = self._copy_with("train", train)
        other.train = train  # for a class without this argument
        return other

    def with_seed(self, seed: int) -> Self:
        """Return the set as this seed draws it, if its option ``seed`` is None; else the set itself.

        The data module calls it with its own seed, so that one seed draws everything of a division.
        """
        has_option = "seed" in inspect.signature(type(self)).parameters
        if not has_option or getattr(self, "seed", 0) is not None:
            return self
        return self._copy_with("seed", seed)

    def _copy_with(self, name: str, value: object) -> Self:
        """Return a set made from the same arguments but for one, which is left unchanged if the class lacks it."""
        bound = self._bound_arguments()
        parameters = bound.signature.parameters
        if name in parameters:
            bound.arguments[name] = value
        else:
            # It may be one of the options that the class hands on to its base class.
            for keyword, parameter in parameters.items():
                if parameter.kind is parameter.VAR_KEYWORD:
                    bound.arguments.setdefault(keyword, {})[name] = value
        return type(self)(*bound.args, **bound.kwargs)

    def _bound_arguments(self) -> inspect.BoundArguments:
        return inspect.signature(type(self)).bind(*self._init_args, **self._init_kwargs)

    def _in_memory(self) -> Tensor:
        if self.images is None:
            raise TypeError(
                f"{split_of(self)}: _load_images returned no images, so {type(self).__name__} must define __len__ and "
                "__getitem__, which read them one by one"
            )
        return self.images

    def __len__(self) -> int:
        return len(self._in_memory())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        image = self._in_memory()[index]
        if self.labels is None:
            return image
        return image, self.labels[index]

    def __repr__(self) -> str:
        bound = self._bound_arguments()
        arguments = bound.arguments | bound.kwargs
        options = [f"{name}={_as_plain_value(value)!r}" for name, value in arguments.items() if name in vars(self)]
        return f"{type(self).__name__}({', '.join(options)})"


def _check_option_names(image_class: type, options: Mapping[str, Any]) -> None:
    """Raise a TypeError for an option that a class hands on to its base classes, and none of them has.

    Python's own error would name the base class instead of the class that the caller knows.
    """
    option_names: list[str] = []
    for base in image_class.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        parameters = [*inspect.signature(constructor).parameters.values()][1:]
        option_names += [
            option.name for option in parameters if option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)
        ]
        if not any(option.kind is option.VAR_KEYWORD for option in parameters):
            break
    else:
        return
    for name in options:
        if name not in option_names:
            near = near_names(name, option_names)
            remedy = f"did you mean {near[0]}?" if near else f"its options are {', '.join(dict.fromkeys(option_names))}"
            raise TypeError(f"{image_class.__name__} has no option {name!r}; {remedy}")


def _as_plain_value(value: object) -> object:
    """Return an argument of a set as a recipe has it: a path as text, and a number of NumPy as one of Python."""
    return str(value) if isinstance(value, PurePath) else plain_number(value)


@dataclass(frozen=True)
class Manifest:
    """A table of images with one row each, which every source of images is converted to first.

    Attributes:
        paths: File of each image, or its position in the source.
        labels: Classes (N,), or zeros and ones (N, K) for several labels per image, with -1 for unknown ones; ``None``
            without labels.
        classes: Names of the classes, or of the labels that an image may have, in the order of their numbers.
        columns: Further facts (N,) by name, such as ``client``, ``group`` and ``domain``.
        split: ``train``, ``test`` or ``val`` (N,); ``None`` if the source has no splits.
        num_classes: Number of classes if they have no names.
        identities: See :attr:`ImageSet.identities`.
        masks: File of the mask of each image; ``None`` if labels are not masks.
        numbers: Numbers float (N, D) that are the labels, with their names in ``classes``; ``None`` if labels are not
            numbers.
    """

    paths: list[str]
    labels: Array | None = None
    classes: tuple[str, ...] | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    split: Array | None = None
    num_classes: int | None = None
    identities: Array | None = None
    masks: list[str] | None = None
    numbers: Array | None = None

    def rows(self, rows: Array) -> "Manifest":
        """Return the images at ``rows``, in this order, without their splits."""
        return replace(
            self,
            paths=[self.paths[row] for row in rows],
            columns={name: column[rows] for name, column in self.columns.items()},
            labels=None if self.labels is None else self.labels[rows],
            identities=None if self.identities is None else self.identities[rows],
            masks=None if self.masks is None else [self.masks[row] for row in rows],
            numbers=None if self.numbers is None else self.numbers[rows],
            split=None,
        )


def split_of(image_set: ImageSet) -> str:
    """Return the class of an image set and its split, for messages."""
    return f"{type(image_set).__name__}, {'training' if image_set.train else 'test'} split"


def checked_tensors(who: str, loaded: Any) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401  # whatever a set gives
    """Convert the images and labels that ``_load_images`` returned to tensors, and check them.

    Args:
        who: Name of the set for messages.
        loaded: What ``_load_images`` returned.

    Raises:
        ValueError: If ``loaded`` is not a pair, its parts do not match, or images have an unsupported shape.
        TypeError: If images or labels have an unsupported type.
    """
    prefix = f"{who}: _load_images returned"
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        returned = f"{len(loaded)} values" if isinstance(loaded, tuple | list) else _describe_type(loaded)
        raise ValueError(f"{prefix} {returned}; return images and labels, with None if there are no labels")
    images = _as_tensor(f"{prefix} images", loaded[0])
    labels = _as_tensor(f"{prefix} labels", loaded[1])
    if images is not None:
        try:
            check_dtype(images)
        except TypeError as error:
            raise TypeError(f"{who}: {error}") from None
        _check_image_shape(prefix, images)
        if labels is not None and len(images) != len(labels):
            raise ValueError(f"{prefix} {len(images)} images and {len(labels)} labels; return one label for each image")
    if labels is None:
        return images, None
    try:
        labels = computable(labels)
    except ValueError as error:
        raise TypeError(f"{who}: {error}") from None
    if labels.dtype == torch.bool and labels.ndim == 3:
        # Masks of the foreground: background and foreground are two classes.
        labels = labels.to(torch.uint8)
    are_floats = labels.is_floating_point()
    are_integers = not (are_floats or labels.is_complex() or labels.dtype == torch.bool)
    if are_integers and labels.ndim == 1:
        return images, labels.long()
    if are_integers and labels.ndim == 3:
        return images, labels
    if are_floats and labels.ndim in (1, 2):
        return images, labels
    hint = " (labels.squeeze(1) of these)" if are_integers and labels.shape[1:] == (1,) else ""
    raise TypeError(
        f"{prefix} labels {_describe_type(labels)}, which are neither classes nor vectors; return integers (N,){hint}, "
        "a class for each image, floats (N, K) of zeros and ones for several labels each, or floats (N,) or (N, D) for "
        "numbers"
    )


def _check_image_shape(prefix: str, images: Tensor) -> None:
    """Raise a ValueError that begins with ``prefix`` for an unsupported shape."""
    shape = tuple(images.shape)
    if len(shape) == 4:
        _, second, third, last = shape
        if last in _CHANNELS and second not in _CHANNELS and min(second, third) > last:
            raise ValueError(
                f"{prefix} images of shape {shape}; its channels seem to come last: return images.permute(0, 3, 1, 2)"
            )
    supported_ndims = (3, 4) if images.dtype == torch.uint8 else range(2, 9)
    if len(shape) not in supported_ndims:
        raise ValueError(
            f"{prefix} images of shape {shape}; return (N, channels, height, width), or (N, height, width) of one grey "
            "channel"
        )


def _as_tensor(prefix: str, values: object) -> Tensor | None:
    if values is None or isinstance(values, Tensor):
        return values
    try:
        array = np.ascontiguousarray(values)
        # torch warns of arrays that cannot be written to.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # such as words, or lists of unequal lengths
        raise TypeError(
            f"{prefix} as {_describe_type(values)}, which is not a tensor of numbers; return a tensor"
        ) from None


def checked_columns(who: str, value: object, num_images: int) -> dict[str, np.ndarray[Any, Any]]:
    """Convert the columns of a set to arrays, and check that they have one value for each image.

    Args:
        who: Name of the set for messages.
        value: The columns by name.
        num_images: Number of images.

    Raises:
        ValueError: If a column has another length.
        TypeError: If ``value`` is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{who}: columns is {value_text(value)}; return {{name: array (N,)}} from a @property")
    arrays = {name: np.asarray(column) for name, column in value.items()}
    for name, array in arrays.items():
        blank = _blank_rows(array)
        if blank:
            raise ValueError(
                f"{who}: the column {name!r} has no value (None or NaN) for {len(blank)} images, such as image "
                f"{blank[0]}; give each image of the split one, such as 'unknown'"
            )
        if array.shape[:1] != (num_images,):
            raise ValueError(
                f"{who}: the column {name!r} has shape {array.shape} for {num_images} images; return one value for "
                "each image of the split in self.train"
            )
    return arrays


def _blank_rows(column_values: np.ndarray[Any, Any]) -> list[int]:
    """Return the rows of a column (N, ...) that have no value: None, or NaN."""
    if column_values.dtype.kind == "f":
        row_indices: list[int] = np.flatnonzero(np.isnan(column_values)).tolist()
        return row_indices
    if column_values.dtype.kind != "O":
        return []
    values = column_values.tolist()
    return [row for row, value in enumerate(values) if value is None or (isinstance(value, float) and isnan(value))]


def class_names(who: str, classes: object, num_classes: int | None) -> tuple[str, ...] | None:
    """Return the class names as a tuple; None if there are none.

    Args:
        who: Name of the set for messages.
        classes: The names.
        num_classes: Expected number of names; None for any.

    Raises:
        ValueError: If ``classes`` is not a list of names, there are more or fewer, or a name occurs twice.
    """
    names = checked_names(f"{who}: classes", classes)
    if names is None:
        return None
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    problem = ""
    if duplicates:
        problem = f"the name {duplicates[0]!r} twice"
    elif num_classes not in (None, len(names)):
        problem = f"{len(names)} names for {num_classes} classes"
    if problem:
        raise ValueError(
            f"{who} has {problem} in classes; give each class a unique name, in the order of their numbers"
        )
    return tuple(names)


def _describe_type(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    return value_text(value)


@contextmanager
def explain_read_errors(path: Path, remedy: str, expected: str) -> Iterator[None]:
    """Add the path, the expected content and the remedy to errors of a missing or damaged file."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, expected {expected}: {remedy}") from None
    except (EOFError, KeyError, OSError, TypeError, ValueError, csv.Error, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read ({reason}), expected {expected}: {remedy}") from None


def number_labels(words: Sequence[Any], classes: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], Array]:
    """Number labels that are words.

    Args:
        words: The label of each image, or a list of its labels.
        classes: All classes in the order of their numbers. By default those that occur, sorted as numbers if all are
            numbers and as words otherwise.

    Returns:
        The classes, and the labels: int64 (N,), or zeros and ones float32 (N, K) for lists.

    >>> number_labels([["b"], [], ["a", "b"]])[1].tolist()
    [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    several_labels = any(isinstance(label, list) for label in words)
    words_of_images = words if several_labels else [[label] for label in words]
    if classes is None:
        names = {name for words_of_image in words_of_images for name in words_of_image}
        if all(re.fullmatch(r"\d{1,18}", name) for name in names):
            classes = tuple(sorted(names, key=lambda name: (int(name), name)))
        else:
            classes = tuple(sorted(names))
    numbers = {name: number for number, name in enumerate(classes)}
    if not several_labels:
        return classes, np.array([numbers[label] for label in words], dtype=np.int64)
    labels = np.zeros((len(words_of_images), len(classes)), dtype=np.float32)
    for row, words_of_image in zip(labels, words_of_images, strict=True):
        row[[numbers[name] for name in words_of_image]] = 1
    return classes, labels


def renumber_labels(manifest: Manifest, class_names: Sequence[str], source: str) -> Manifest:
    """Renumber the labels of a manifest in the order of ``class_names``.

    Args:
        manifest: The images.
        class_names: All classes in the new order; some may have no images.
        source: Name of the source for messages.

    Raises:
        ValueError: If an image has another class.
    """
    assert manifest.labels is not None and manifest.classes is not None
    unknown = [name for name in manifest.classes if name not in class_names]
    class_by_form = {visible_form(name): name for name in class_names}
    for name in unknown:
        twin = class_by_form.get(visible_form(name))
        if twin is not None:
            raise ValueError(
                f"{source} has images of {name!a}, which looks like the class {twin!a} but is a different name: rename "
                "one of them so that both have the same code points"
            )
    class_of_number = {number_of(name): name for name in class_names}
    for name in unknown:
        number = number_of(name)
        if number is not None and number in class_of_number:
            raise ValueError(
                f"{source} has images of {name!r}, which is the same number as the class {class_of_number[number]!r}: "
                "write it in the same way"
            )
    if unknown:
        raise ValueError(
            f"{source} has images of {abbreviated(unknown)}, but the classes are {abbreviated(class_names)}: rename "
            "them, remove the images, or add the classes"
        )
    new_numbers = np.array([list(class_names).index(name) for name in manifest.classes], dtype=np.int64)
    if manifest.labels.ndim == 1:
        labels = new_numbers[manifest.labels]
    else:
        # One row of the identity matrix moves one column of the labels.
        labels = manifest.labels @ np.eye(len(class_names), dtype="f")[new_numbers]
    return replace(manifest, labels=labels, classes=tuple(class_names))
