# SPDX-License-Identifier: Apache-2.0
"""What an image set of one's own gives, checked before anything is made of it; every message names the set."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perada.data.batches.transforms import check_dtype

_CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency


def split_of(images: Any) -> str:  # noqa: ANN401  # an ImageSet, which imports this module
    """The class of an image set and its split, for messages."""
    return f"{type(images).__name__}, {'training' if images.train else 'test'} split"


def checked_tensors(who: str, loaded: Any) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401  # whatever a set gives
    """The images and labels that ``_load`` of the set ``who`` returned, as tensors; arrays are converted.

    Raises:
        ValueError: If they are not two, do not fit one another, or have axes that images or labels do not have.
        TypeError: If they are of a type that cannot be used.
    """
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        what = f"{len(loaded)} values" if isinstance(loaded, tuple | list) else _shown(loaded)
        raise ValueError(
            f"{who}: _load returned {what}; return images and labels, with None for labels of which there are none"
        )
    images, labels = loaded
    images = None if images is None else _images(who, images)
    labels = None if labels is None else _labels(who, labels)
    if images is not None and labels is not None and len(images) != len(labels):
        raise ValueError(
            f"{who}: _load returned {len(images)} images and {len(labels)} labels; return one label for each image"
        )
    return images, labels


def _images(who: str, given: Any) -> Tensor:  # noqa: ANN401
    if not isinstance(given, Tensor | np.ndarray):
        raise TypeError(
            f"{who}: _load returned images of type {type(given).__name__}; return one tensor (N, channels, height, "
            "width), for example by torch.stack, or None where images stay on disk"
        )
    images = _tensor(who, "images", given)
    try:
        check_dtype(images)
    except TypeError as error:
        raise TypeError(f"{who}: {error}") from None
    shape = tuple(images.shape)
    if (images.dtype == torch.uint8 and images.ndim not in (3, 4)) or images.ndim < 2:
        raise ValueError(
            f"{who}: _load returned images of shape {shape}; return (N, channels, height, width), or (N, height, "
            "width) of one grey channel"
        )
    if images.ndim == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS and min(shape[1:3]) > shape[3]:
        raise ValueError(
            f"{who}: _load returned images of shape {shape}, whose channels seem to come last; return them as "
            "(N, channels, height, width), by images.permute(0, 3, 1, 2)"
        )
    return images


def _labels(who: str, given: Any) -> Tensor:  # noqa: ANN401
    labels = _tensor(who, "labels", given)
    shown = f"{who}: _load returned labels {_shown(labels)}"
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.ndim == 1 and whole:
        return labels.long()
    if labels.ndim == 2 and labels.is_floating_point():
        return labels
    remedy = (
        "return whole numbers (N,), a class for each image, or floats (N, K) of zeros and ones for several labels each"
    )
    if labels.ndim not in (1, 2):
        raise ValueError(f"{shown}; {remedy}")
    raise TypeError(f"{shown}, which are neither classes nor vectors; {remedy}")


def _tensor(who: str, what: str, given: Any) -> Tensor:  # noqa: ANN401
    """A tensor or an array of numbers, as a tensor."""
    if isinstance(given, Tensor):
        return given
    try:
        array = np.ascontiguousarray(given)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # words, lists of unequal lengths
        kind = f"{given.dtype} array" if isinstance(given, np.ndarray) else type(given).__name__
        raise TypeError(
            f"{who}: _load returned {what} as {kind}, which is no tensor of numbers; return a tensor"
        ) from None


def checked_columns(who: str, columns: Any, size: int) -> dict[str, np.ndarray[Any, Any]]:  # noqa: ANN401
    """The columns of the set ``who`` of so many images, as arrays.

    Raises:
        ValueError: If a column has not one value for each image.
        TypeError: If they are no mapping.
    """
    if callable(columns):
        raise TypeError(f"{who}: columns is a method, which nobody calls; put @property above it")
    if not isinstance(columns, Mapping):
        raise TypeError(f"{who}: columns is of type {type(columns).__name__}; return {{name: array (N,)}}")
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
