# SPDX-License-Identifier: Apache-2.0
"""Base class of sets that are made from the images of another set."""

from collections.abc import Sequence
from typing import Self

from perada.core.text import value_text
from perada.data.medical.reading import DEFAULT_READING, MedicalReading
from perada.data.sets.base import ImageSet


class DerivedSet(ImageSet):
    """A set made from the images of another set, whose classes and groups it has.

    Args:
        dataset: The other set.
        train: Whether to load the training split or the test split.

    Raises:
        TypeError: If ``dataset`` is not an image set.
    """

    def __init__(self, dataset: ImageSet, train: bool = True) -> None:
        super().__init__(train)
        if not isinstance(dataset, ImageSet):
            raise TypeError(
                f"{type(self).__name__}: dataset must be an image set such as Digits(), got {value_text(dataset)}"
            )
        self.dataset = dataset

    @property
    def num_classes(self) -> int | None:  # type: ignore[override]  # lazy: the set may read files
        """Number of classes of the set."""
        return self.dataset.num_classes

    @property
    def classes(self) -> tuple[str, ...] | None:  # type: ignore[override]  # an attribute of other sets
        """Names of the set's classes."""
        return self.dataset.classes

    @property
    def group_column(self) -> str | None:  # type: ignore[override]  # lazy: the set may read files
        """The column whose values stay together when images are held out, or None."""
        return self.dataset.group_column

    @property
    def movements(self) -> Sequence[str]:  # type: ignore[override]  # an attribute of other sets
        """Changes of the set's images that move their content, but not their labels."""
        return self.dataset.movements

    @property
    def resizes_images_only(self) -> bool:  # type: ignore[override]  # an attribute of other sets
        """Whether the set resizes its images when they are read, and not labels such as coordinates."""
        return self.dataset.resizes_images_only

    @property
    def full_scale(self) -> float | None:
        """The value of white in the set's files, if the set has this option."""
        scale: float | None = getattr(self.dataset, "full_scale", None)
        return scale

    @property
    def medical(self) -> MedicalReading:
        """How the set decodes DICOM files and NIfTI volumes."""
        reading: MedicalReading = getattr(self.dataset, "medical", DEFAULT_READING)
        return reading

    def download(self) -> None:
        """Download missing files, if the set is configured to."""
        self.dataset.download()

    def with_seed(self, seed: int) -> Self:
        """Return the set drawn by this seed, and the set behind it, each unless it has a seed of its own."""
        inner_set = self.dataset.with_seed(seed)
        derived = self if inner_set is self.dataset else self._copy_with("dataset", inner_set)
        return super(DerivedSet, derived).with_seed(seed)
