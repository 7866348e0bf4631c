# SPDX-License-Identifier: Apache-2.0
"""Parts of an image set, for parties that must not have the same images."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import OptionError, check_integer, check_number
from perada.core.seeding import derive_seed
from perada.data.partitions.shares import Array, split_by_group
from perada.data.sets.base import ImageSet, checked_columns, split_of
from perada.data.sets.derived import DerivedSet


class RandomPart(DerivedSet):
    """A part of the images of a set, in a random order that is the same for all parts.

    Two parts whose ranges do not overlap have no image in common, so one can be the server's public set and the other
    be divided among the clients. Images of a group, such as a patient's, are in the same part.

    Args:
        dataset: The images.
        start: Share of the images of each split before the part.
        stop: Share of the images of each split up to the end of the part.
        seed: A different seed gives a different order. Null for the seed of the data module, or 0 without one.
        train: Whether to load the training split or the test split.

    Raises:
        ValueError: If an option is out of range, or no image lies between ``start`` and ``stop``.

    >>> from perada.data import Digits
    >>> len(RandomPart(Digits(), stop=0.2)), len(RandomPart(Digits(), start=0.2)), len(Digits())
    (288, 1150, 1438)

    >>> RandomPart(Digits(), start=0.2)  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: ImageSet,
        start: float = 0.0,
        stop: float = 1.0,
        seed: int | None = None,
        train: bool = True,
    ) -> None:
        super().__init__(dataset, train)
        check_number("start", start, ge=0, lt=1, hint="it is a share of the images")
        check_number("stop", stop, gt=0, le=1, hint="it is a share of the images")
        if start >= stop:
            raise OptionError(
                f"RandomPart: start={start} leaves no images before stop={stop}: choose a smaller start",
                name="start",
                value=start,
            )
        check_integer("seed", seed, 0, le=None, optional=True)
        self.start = start
        self.stop = stop
        self.seed = seed

    @property
    def identities(self) -> Array | None:  # type: ignore[override]  # an attribute of other sets
        """Identity (N,) of each image, or None if the set has none."""
        identities = self._whole_split.identities
        return None if identities is None else np.asarray(identities)[self._row_indices]

    @property
    def columns(self) -> Mapping[str, Array]:
        """The set's own columns."""
        columns = self._columns_of_split
        return {name: column[self._row_indices] for name, column in columns.items()}

    @property
    def paths(self) -> list[str | None]:
        """Paths of the images for messages; None if the set does not name them."""
        paths = getattr(self._whole_split, "paths", None)
        if not isinstance(paths, list):
            return [None] * len(self)
        return [paths[row] for row in self._row_indices.tolist()]

    @cached_property
    def _whole_split(self) -> ImageSet:
        return self.dataset.with_split(self.train)

    @property
    def _columns_of_split(self) -> Mapping[str, Array]:
        return checked_columns(split_of(self._whole_split), self._whole_split.columns, len(self._whole_split))

    @cached_property
    def _row_indices(self) -> Array:
        """Rows (N,) of the part in its split of the set, ascending."""
        num_images = len(self._whole_split)
        groups = np.arange(num_images)
        if self.group_column is not None:
            groups = self._columns_of_split[self.group_column]
        first = round(self.start * num_images)
        last = round(self.stop * num_images)
        # The order must not depend on the part, or two parts would share images.
        seed = 0 if self.seed is None else self.seed
        rng = np.random.default_rng(derive_seed(seed, "random_part", int(self.train)))
        rows_of_parts = split_by_group(groups, [first, last - first], rng)
        # The images before the part come first, those after it last.
        rows = rows_of_parts[1]
        if not len(rows):
            raise ValueError(
                f"RandomPart: of the {num_images} images of {split_of(self._whole_split)}, none lies "
                f"between start={self.start} and stop={self.stop}: choose a larger part"
            )
        return rows

    def _load_images(self) -> tuple[Tensor | None, Tensor | None]:
        images = self._whole_split.images
        labels = self._whole_split.labels
        rows = torch.from_numpy(self._row_indices)
        images_of_part = None if images is None else images[rows]
        labels_of_part = None if labels is None else labels[rows]
        return images_of_part, labels_of_part

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | Tensor:
        # A range turns a negative index into the place that it stands for, and raises beyond the end.
        place = range(len(self))[index]
        item: tuple[Tensor, Tensor] | Tensor = self._whole_split[int(self._row_indices[place])]
        return item
