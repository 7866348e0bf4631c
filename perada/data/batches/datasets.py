# SPDX-License-Identifier: Apache-2.0
"""Access to map-style datasets: the tensors behind them, their items, and their labels."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from perada.core.seeding import derive_seed, seed_global
from perada.core.states import loses_digits
from perada.core.text import dtype_name, value_text
from perada.data.batches.transforms import MissingImageError, UnreadableImageError
from perada.data.sets.base import ImageSet
from perada.data.sets.label_types import computable, stack_integers
from perada.data.sets.masks import mask_pixels

TensorFormat = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one image, or of one label."""
IMAGE_KEYS = ("image", "img", "pixel_values")
LABEL_KEYS = ("label", "labels")


class Source(NamedTuple):
    """The tensors of a dataset.

    Attributes:
        images: All images of the dataset that it is a Subset of, or its own.
        labels: Their labels, or None.
        rows: The rows (N,) of these tensors that are the dataset's items.
    """

    images: Tensor
    labels: Tensor | None
    rows: Tensor


def length(dataset: Dataset[Any]) -> int:
    """Return the number of items of a map-style dataset.

    Raises:
        ValueError: If the dataset cannot tell.
    """
    try:
        return len(cast(Sized, dataset))
    except Exception as error:  # whatever a dataset raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise ValueError(
            f"the length of {value_text(dataset)} cannot be read ({reason}); correct its __len__, which returns the "
            "number of items"
        ) from error


class ResolvedSubset(NamedTuple):
    """The items of a dataset as items of the dataset that it is a Subset of.

    Attributes:
        base: This dataset, or the given one if it is no Subset.
        rows: The indices (N,) of the given dataset's items in it.
    """

    base: Dataset[Any]
    rows: np.ndarray[Any, Any]


Resolve = Callable[[Dataset[Any]], ResolvedSubset]
"""Function that resolves a dataset: :func:`resolve_subset`, or a :class:`SubsetResolver`, which stores the results."""


def resolve_subset(dataset: Dataset[Any]) -> ResolvedSubset:
    """Follow Subsets, which may be nested, to the dataset that they are taken from.

    Raises:
        IndexError: If an index of a Subset is out of range.
        TypeError: If the indices of a Subset are not integers.
    """
    # A subclass of Subset may change the items.
    if type(dataset) is not Subset:
        return ResolvedSubset(dataset, np.arange(length(dataset)))
    # A copy, since the caller may change an array of indices.
    rows = _indices_of(dataset).copy()
    is_outermost = True
    while type(dataset) is Subset:
        if not is_outermost:
            rows = _indices_of(dataset)[rows]
        is_outermost = False
        dataset = dataset.dataset
        size = length(dataset)
        if not len(rows):
            continue
        smallest = rows.min()
        if smallest < -size or rows.max() >= size:
            out_of_range = rows[(rows < -size) | (rows >= size)]
            raise IndexError(f"a Subset has item {out_of_range[0]} of a dataset of {size}; correct its indices")
        if smallest < 0:
            rows = np.where(rows < 0, rows + size, rows)
    return ResolvedSubset(dataset, rows)


def _indices_of(subset: Subset[Any]) -> np.ndarray[Any, Any]:
    """Return the indices (N,) of a Subset.

    Raises:
        TypeError: If they are not integers. Numbers with decimals, and a mask of booleans, would select other items.
    """
    indices: Any = subset.indices
    if isinstance(indices, list | tuple) and any(isinstance(index, Tensor) for index in indices[:1]):
        indices = [int(index) for index in indices]
    if isinstance(indices, Tensor):
        indices = indices.cpu().numpy()
    try:
        rows = np.asarray(indices)
    except ValueError:  # lists of unequal lengths
        rows = np.empty(0, dtype=object)
    if rows.ndim == 1 and (np.issubdtype(rows.dtype, np.integer) or (not len(rows) and rows.dtype != object)):
        return rows.astype(np.int64, copy=False)
    raise TypeError(
        f"the indices of a Subset must be a list of integers, got {value_text(indices)}; for a mask of booleans, pass "
        "mask.nonzero()[0] of NumPy, or mask.nonzero().flatten() of torch"
    )


class SubsetResolver:
    """Resolves each dataset once, and returns the stored result on later calls.

    Set-up needs the datasets of all clients several times, and there may be 100,000 of them.
    """

    def __init__(self) -> None:
        # Keys are ids. The dataset itself is stored too, since the id of one that is deleted may be used again.
        self._resolved: dict[int, tuple[Dataset[Any], ResolvedSubset]] = {}

    def __call__(self, dataset: Dataset[Any]) -> ResolvedSubset:
        """Resolve a dataset.

        Raises:
            IndexError: If an index of a Subset is out of range.
        """
        if id(dataset) not in self._resolved:
            self._resolved[id(dataset)] = (dataset, resolve_subset(dataset))
        return self._resolved[id(dataset)][1]


def tensor_source(dataset: Dataset[Any], labelled: bool, resolve: Resolve = resolve_subset) -> Source | None:
    """Return the tensors behind a TensorDataset, an ImageSet or a Subset of one; None for other datasets.

    Labels are read only if they are needed (``labelled``).
    """
    base, rows = resolve(dataset)
    if type(base) is TensorDataset and len(base.tensors) >= 1 + labelled:
        return Source(base.tensors[0], base.tensors[1] if labelled else None, torch.from_numpy(rows))
    if isinstance(base, ImageSet) and base.images is not None:
        return Source(base.images, base.labels if labelled else None, torch.from_numpy(rows))
    return None


def is_repeatable(dataset: Dataset[Any]) -> bool:
    """Return whether a dataset promises that each of its images is the same whenever it is read."""
    # A subclass of Subset may change the items.
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return isinstance(dataset, ImageSet) and dataset.is_repeatable


def stored_images(base: Dataset[Any]) -> Tensor | None:
    """Return all images of a TensorDataset or an ImageSet in memory; None for other datasets, also for Subsets."""
    if type(base) is TensorDataset and base.tensors:
        return base.tensors[0]
    if isinstance(base, ImageSet):
        return base.images
    return None


_LARGEST_INTEGER = 2**24
"""Largest integer up to which float32 has all of them."""


def _check_float32(labels: Tensor, of_one_image: bool) -> None:
    """Raise a ValueError if labels are numbers in double precision that would be equal, or others, in float32."""
    if labels.dtype != torch.float64 or labels.numel() == 0:
        return
    if of_one_image:
        is_lossy = bool(((labels.abs() > _LARGEST_INTEGER) & (labels.float().double() != labels)).any())
    else:
        columns = labels.reshape(len(labels), -1)
        # More columns are no numbers to predict, but pixels.
        is_lossy = labels.ndim <= 2 and any(loses_digits(column) for column in columns.T)
    if is_lossy:
        raise ValueError(
            f"labels are numbers from {labels.min():.15g} to {labels.max():.15g}, which float32 cannot tell apart: "
            "subtract a reference from them, such as their mean, or pass integers (int64) with mean and std of the task"
        )


def as_labels(values: object, of_one_image: bool = False) -> Tensor:
    """Convert labels to int64 classes (N,), float32 numbers (N,) or vectors (N, K), or masks (N, H, W).

    The task decides which of them are valid. Classes may have further axes of length 1, as in MedMNIST's (N, 1), which
    are dropped, and masks a channel axis (N, 1, H, W). Masks keep their dtype, since they are large.

    Args:
        values: Labels of N images, or of one.
        of_one_image: Whether ``values`` is the label of one image: a class or number (), a vector (K,), or a mask
            (H, W), which may be an image of Pillow.

    Raises:
        TypeError: If the values are none of these.

    >>> as_labels([1, 2]).dtype, as_labels(torch.ones(2, 5).double()).dtype
    (torch.int64, torch.float32)
    >>> as_labels([[1], [2]]).tolist(), as_labels([2], of_one_image=True).tolist()
    ([1, 2], 2)
    """
    labels = _tensor_of_labels(values)
    if labels.is_floating_point():
        _check_float32(labels, of_one_image)
        return labels.float()
    expected_ndim = 0 if of_one_image else 1
    if labels.dtype == torch.bool and labels.ndim >= expected_ndim + 2:
        # A mask of the foreground: background and foreground are two classes.
        labels = labels.to(torch.uint8)
    if labels.dtype == torch.bool:
        raise TypeError("labels are booleans: use labels.long() for two classes, or labels.float() for several labels")
    if labels.ndim == expected_ndim + 3 and labels.shape[expected_ndim] == 1:
        labels = labels.squeeze(expected_ndim)
    if labels.ndim == expected_ndim + 2 and min(labels.shape[expected_ndim:]) > 1:
        return labels
    if labels.ndim == expected_ndim + 3:
        raise TypeError(
            f"labels are integers of shape {tuple(labels.shape)}: a mask must be (H, W), with the number of the "
            "class of each pixel; convert colours to numbers, or take one channel"
        )
    while labels.ndim > expected_ndim and labels.shape[-1] == 1:
        labels = labels.squeeze(-1)
    if labels.ndim > expected_ndim:
        raise TypeError(
            f"labels are integers of shape {tuple(labels.shape)}, which may be one-hot vectors or several labels: pass "
            "the classes of one-hot vectors (labels.argmax(-1)), or several labels as floats (labels.float())"
        )
    return labels.long()


def _tensor_of_labels(values: object) -> Tensor:
    """Convert labels to a tensor that torch can compute with; raise a TypeError if they are not real numbers."""
    remedy = "use integer classes, float vectors (K,) for several labels, or floats for numbers"
    if isinstance(values, Image.Image):
        values = _values_of_mask(values)
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):  # such as None, words, or lists of unequal lengths
        raise TypeError(f"labels are {value_text(values)}: {remedy}") from None
    if labels.is_complex():
        raise TypeError(f"labels are complex numbers: {remedy}")
    try:
        return computable(labels)
    except ValueError as error:
        raise TypeError(str(error)) from None


def _values_of_mask(image: Image.Image) -> np.ndarray[Any, Any]:
    """Return the values (H, W) of a mask that is an image of Pillow; raise a TypeError if it has none."""
    name = getattr(image, "filename", "") or f"an image of mode {image.mode}"
    try:
        return stack_integers([torch.from_numpy(mask_pixels(image, str(name)))])[0].numpy()
    except UnreadableImageError as error:
        raise TypeError(f"labels are images, and {error}") from None


Labels = Tensor | list[Any]
"""Labels of a dataset's items; a list if some are words."""


def declared_labels(dataset: Dataset[Any]) -> Labels | None:
    """Return the labels that a dataset, or the one behind a Subset, declares without reading an image.

    Returns:
        The labels of its items, as a list if the first is a word; None if none are declared.
    """
    base, rows = resolve_subset(dataset)
    labels = labels_of_base(base)
    return None if labels is None else labels_at(labels, rows)


def labels_at(base_labels: Labels, rows: np.ndarray[Any, Any]) -> Labels:
    """Return the labels of the items at ``rows`` (N,)."""
    if isinstance(base_labels, Tensor):
        return base_labels[torch.from_numpy(rows)]
    return [base_labels[row] for row in rows.tolist()]


def labels_of_base(base: Dataset[Any]) -> Labels | None:
    """Return all labels that a dataset, which is no Subset, declares without reading an image.

    Image sets and torchvision's datasets have ``targets``, those of Hugging Face a column.

    Returns:
        The labels of its items, as a list if the first is a word; None if the dataset declares none.
    """
    targets = base.labels if isinstance(base, ImageSet) else getattr(base, "targets", None)
    column_names = getattr(base, "column_names", None) or ()
    label_columns = [key for key in LABEL_KEYS if key in column_names]
    if label_columns:
        item_format = getattr(base, "format", {"type": "custom"})
        # With the format "custom" a function makes the items, and may make other labels than the column's.
        if item_format["type"] != "custom":
            targets = base[label_columns[0]][:]
    if targets is None or getattr(base, "target_transform", None) is not None or len(targets) != length(base):
        return None
    if isinstance(next(iter(targets), None), str):
        # Words of NumPy become those of Python, which is what messages and files show.
        return [str(target) if isinstance(target, str) else target for target in targets]
    try:
        return as_labels(targets)
    except TypeError:
        # The items may have them in another form. If not, reading an item raises an error that names it.
        return None


def image_and_label(item: object, labelled: bool) -> tuple[Any, Any]:
    """Return the image of an item, and its label or None if ``labelled`` is False.

    An item is a pair, or a dict with one of :data:`IMAGE_KEYS` and, if labelled, one of :data:`LABEL_KEYS`.

    Raises:
        TypeError: If the item is neither.
    """
    if isinstance(item, Mapping):
        image = _find_entry(item, "image", IMAGE_KEYS)
        label = _find_entry(item, "label", LABEL_KEYS) if labelled else None
        return image, label
    if not labelled:
        image = item[0] if isinstance(item, tuple | list) else item
        return image, None
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) < 2:
        raise TypeError(f"the item is {value_text(item)}: return (image, label), or a dict with both")
    return item[0], item[1]


def _find_entry(item: Mapping[str, Any], name: str, accepted_keys: Sequence[str]) -> object:
    """Return the entry under the one accepted key that the item has."""
    keys = [key for key in accepted_keys if key in item]
    if len(keys) != 1:
        problem = f"no {name}"
        if keys:
            problem = f"more than one {name}, {' and '.join(map(repr, keys))}"
        raise TypeError(
            f"the item is a dict with the keys {', '.join(map(repr, item)) or 'none'}, which has {problem}: name one "
            f"entry {', '.join(accepted_keys[:-1])} or {accepted_keys[-1]}"
        )
    return item[keys[0]]


def read_item(dataset: Dataset[Any], index: int, owner: str) -> object:
    """Read an item of a dataset.

    Raises:
        UnreadableImageError: If the dataset raises any error. The message names the owner and the item's location.
    """
    try:
        return dataset[index]
    except (UnreadableImageError, MissingImageError):  # they name the file already
        raise
    except Exception as error:  # whatever a dataset raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UnreadableImageError(
            f"sample {index}{location_of(dataset, index)}, cannot be read ({reason})",
            remedy="fix it or leave it out",
            owner=owner,
        ) from error


def location_of(dataset: object, index: int) -> str:
    """Return the path of an item in parentheses, after a space, if the dataset lists its paths; else an empty string.

    torchvision's folders list them, for example.
    """
    if isinstance(dataset, Subset):
        return location_of(dataset.dataset, dataset.indices[index])
    for name in ("samples", "imgs", "paths", "files"):
        entries = getattr(dataset, name, None)
        if not isinstance(entries, list | tuple) or index >= len(entries):
            continue
        entry = entries[index]
        if isinstance(entry, tuple | list) and entry:  # (path, class)
            entry = entry[0]
        return f" ({str(entry)!r})" if isinstance(entry, str | Path) else ""
    if hasattr(dataset, "dataset"):  # a wrapper
        return location_of(dataset.dataset, index)
    return ""


def size_of_targets(dataset: object, index: int) -> tuple[int, int] | None:
    """Return the height and width that the target of an item refers to; None for those of the image.

    They differ for image files with coordinates (:meth:`.ImageFiles.original_size`), of which only the images are
    resized as they are read.
    """
    if isinstance(dataset, Subset):
        return size_of_targets(dataset.dataset, dataset.indices[index])
    original_size = getattr(dataset, "original_size", None)
    if original_size is None:
        return None
    target_size: tuple[int, int] | None = original_size(index)
    return target_size


def tensor_format(tensor: Tensor, skip: int = 1) -> TensorFormat:
    """Return the shape without the first ``skip`` axes, and the dtype."""
    return tuple(tensor.shape[skip:]), tensor.dtype


def resized_format(image_format: TensorFormat, size: int | None) -> TensorFormat:
    """Return the format of an image (Ch, H, W) after uint8 images are resized to ``size``."""
    shape, dtype = image_format
    if size is not None and dtype == torch.uint8:
        shape = (*shape[:-2], size, size)
    return shape, dtype


def format_text(tensor_format: TensorFormat) -> str:
    """Describe the format of an image or a label for a message.

    >>> format_text(((3, 8, 8), torch.uint8)), format_text(((), torch.int64))
    ('uint8 of shape (3, 8, 8)', 'a single int64')
    """
    shape, dtype = tensor_format
    return f"{dtype_name(dtype)} of shape {shape}" if shape else f"a single {dtype_name(dtype)}"


def check_same_format(owner: str, actual: TensorFormat, expected_format: TensorFormat) -> None:
    """Raise a ValueError, which begins with the ``owner`` of an image, if images cannot be batched together."""
    if actual == expected_format:
        return
    shape, dtype = actual
    expected_shape, expected_dtype = expected_format
    remedies = []
    if dtype != expected_dtype:
        remedies.append("use one type for all images")
    if len(shape) == len(expected_shape) == 3 and shape[0] != expected_shape[0]:
        if {shape[0], expected_shape[0]} == {1, 3}:
            remedies.append(
                "convert grey images to three channels (image.convert('RGB') of a PIL image, image.expand(3, -1, -1) "
                "of a tensor (1, H, W))"
            )
        else:
            remedies.append(
                "use the same number of channels for all images, such as image.convert('RGB') of a PIL image"
            )
    if len(shape) != len(expected_shape):
        remedies.append("use images of one shape for all clients")
    elif shape[-2:] != expected_shape[-2:]:
        remedies.append("use one shape and type for all clients, or set image_size to resize uint8 images")
    raise ValueError(
        f"{owner}: an image is {format_text(actual)}, others are {format_text(expected_format)}: "
        f"{'; and '.join(remedies)}"
    )


def check_label_formats(labels_of_clients: Sequence[tuple[int, Tensor]]) -> None:
    """Raise a ValueError unless the labels are all classes, all vectors of one length, or all masks of one size.

    Args:
        labels_of_clients: Pairs of a client and its labels (N,), (N, K) or (N, H, W).
    """
    _, first_labels = labels_of_clients[0]
    expected = tensor_format(first_labels)
    for client, labels in labels_of_clients:
        label_format = tensor_format(labels)
        remedy = "use an integer for all, a float for all, a float vector of K labels for all, or a mask of one size"
        if labels.ndim > 3:
            raise ValueError(f"client {client}: a label is {format_text(label_format)}: {remedy} for all")
        if _are_masks(labels) and _are_masks(first_labels):
            # Masks of one size may be stored as integers of several types.
            label_format = (label_format[0], expected[1])
        if label_format != expected:
            raise ValueError(
                f"client {client}: a label is {format_text(label_format)}, an earlier client's is "
                f"{format_text(expected)}: {remedy} for all"
            )


def _are_masks(labels: Tensor) -> bool:
    """Return whether labels (N, ...) are masks (N, H, W) of classes."""
    return labels.ndim == 3 and not labels.is_floating_point()


@contextmanager
def isolated_randomness() -> Iterator[None]:
    """Seed the global random streams of Python, NumPy and torch (on the CPU) with 0, and restore them on exit."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        seed_all(0)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def seed_all(seed: int) -> None:
    """Seed the global streams of Python, NumPy and torch (on the CPU), from which datasets' transforms draw."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(np.frombuffer(derive_seed(seed, "numpy").to_bytes(16, "little"), dtype=np.uint32))
    seed_global(seed, "torch")
