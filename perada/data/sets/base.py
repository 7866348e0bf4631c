# SPDX-License-Identifier: Apache-2.0
"""What every set of images has: a training and a test split, labels, and further facts about each image."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from perada.data.sets.checks import checked_tensors, split_of


class ImageSet(Dataset[Any], ABC):
    """One split of a set of images; :meth:`with_split` gives the other. Nothing is read before it is needed.

    Items are (uint8 image (Ch, H, W), label). Attributes: ``images`` all of them as a tensor, or None if they stay on
    disk; ``labels`` int64 (N,), or None if there are none; ``columns`` further facts about each image by name;
    ``group_column`` the column whose values stay together wherever images are set aside, such as the patient, or None;
    ``classes`` the names of the classes in the order of their numbers, or None.

    Args:
        train: The training split, or else the test split.
    """

    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    group_column: str | None = None

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

    @property
    def identities(self) -> np.ndarray[Any, Any] | None:
        """A word (N,) that stands for each image, or for its group, by which it is set aside; None: its position."""
        return None

    def download(self) -> None:
        """Fetch the files if that was asked for and they are missing."""

    def with_split(self, train: bool) -> Self:
        """Return the training or the test split of the same set: what the class makes of the same arguments."""
        given = inspect.signature(type(self)).bind(*self._given[0], **self._given[1])
        given.arguments["train"] = train
        other = type(self)(*given.args, **given.kwargs)
        other.train = train  # of a class that has no such argument
        return other

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
        names = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        given = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"{type(self).__name__}({', '.join(given)})"
