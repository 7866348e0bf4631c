# SPDX-License-Identifier: Apache-2.0
"""The blocks of counts of a survey, and their order in a vector of integers that can be added up over sites."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from perada.privacy.client_sums import integer_noise
from perada.survey.options import SurveyOptions

Counts = NDArray[np.int64]
MISSPELT = "spelt differently"
OTHER_LABEL = "other label"
NO_LABEL = "no label"
OTHER = "other"
NONE = "none"
CLASS_NUMBERS = "numbers of the classes"
BLACK_AND_WHITE = "only 0 and 255"
OTHER_VALUES = "other values"
BACKGROUND_ONLY = "background only"
ANOTHER_SIZE = "another size than the image"
MASK_KINDS = (CLASS_NUMBERS, BLACK_AND_WHITE, OTHER_VALUES, BACKGROUND_ONLY, ANOTHER_SIZE)
"""What the values of an image's mask are."""
MISSING = "missing"
REASONS = (
    *(MISSING, "damaged or truncated", "no image", "encrypted or another format", "no pixel data"),
    *("values out of range", "mask with colours or losses", OTHER),
)
"""Why an image or its mask cannot be read."""
BITS = ("1", "8", "9 to 11", "12", "13 to 15", "16", "more than 16", "floating point")
COLOURS = ("grey", "colour", "palette", "transparent", "MONOCHROME1", "MONOCHROME2")
SPACINGS = (NONE, "below 0.1", "0.1 to 0.25", "0.25 to 0.5", "0.5 to 1", "1 or more")
"""Bins of the distance between rows, in mm; none if the file has none."""
WINDOWS = ("in the file", NONE)
COPY = "same pixels as another image"
CONTRADICTION = "same pixels with another label"
BLANK = "one grey level only"
PROBLEMS = (COPY, CONTRADICTION, BLANK)
PER_PATIENT = ("1", "2 to 4", "5 to 19", "20 or more")
GREYS = ("darkest grey", "median grey", "brightest grey", "mean after preprocessing")
"""Blocks of grey levels: of the stored values, and of the images as they are trained."""
FOREGROUND = "foreground of masks"
"""Block of the share of a mask's pixels that are not background."""


@dataclass(frozen=True)
class Layout:
    """The blocks of a survey, each with its names of counts.

    Args:
        options: Options of the survey.
        classes: Names of the classes.
        has_masks: Whether labels are masks.
        several_labels: Whether an image may have several labels.
    """

    options: SurveyOptions
    classes: tuple[str, ...]
    has_masks: bool = False
    several_labels: bool = False

    @cached_property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the counts of each block, in the order of the vector."""
        options = self.options
        sizes = bin_names(options.sizes)
        greys = tuple(_grey_bin(number, options.grey_bins) for number in range(options.grey_bins))
        labels = (*self.classes, NO_LABEL) if self.has_masks else (*self.classes, MISSPELT, OTHER_LABEL, NO_LABEL)
        blocks: dict[str, tuple[str, ...]] = {
            "images": ("read",),
            "unreadable": REASONS,
            "patients": ("patients", "images without patient"),
            "images of a patient": PER_PATIENT,
            "labels": labels,
        }
        if self.has_masks:
            blocks["values of masks"] = MASK_KINDS
            blocks[FOREGROUND] = greys
        blocks |= {
            "width": sizes,
            "height": sizes,
            "bits": BITS,
            "colours": COLOURS,
            "modality": (*options.modalities, OTHER, NONE),
            "manufacturer": (*options.manufacturers, OTHER, NONE),
            "spacing in mm": SPACINGS,
            "window": WINDOWS,
        }
        blocks |= dict.fromkeys(GREYS, greys)
        blocks["problems"] = PROBLEMS
        return blocks

    @cached_property
    def places(self) -> Mapping[tuple[str, str], int]:
        """Place of each count by its block and name."""
        pairs = [(block, name) for block, names in self.blocks.items() for name in names]
        return {pair: place for place, pair in enumerate(pairs)}

    @property
    def num_counts(self) -> int:
        """Number C of counts."""
        return len(self.places)

    @property
    def size(self) -> int:
        """Length of a vector, which has three numbers for each count; see :class:`SurveyTally`."""
        return 3 * self.num_counts

    @property
    def cells_per_image(self) -> int:
        """Largest number of counts that one image changes: one in most blocks."""
        labels = 1
        if self.has_masks or self.several_labels:
            labels = len(self.blocks["labels"])
        return len(self.blocks) - 3 + labels + 2 + len(PROBLEMS)


def bin_names(edges: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the bins between edges, and of those outside.

    >>> bin_names([64, 128])
    ('below 64', '64 to 127', '128 or more')
    """
    names = [f"below {edges[0]}"]
    names += [f"{low} to {high - 1}" for low, high in pairwise(edges)]
    return (*names, f"{edges[-1]} or more")


def _grey_bin(number: int, num_bins: int) -> str:
    """Return the name of a bin of grey levels, in percent of the range from black to white."""
    return f"{100 * number / num_bins:.3g} to {100 * (number + 1) / num_bins:.3g} %"


@dataclass(frozen=True)
class Cell:
    """One count of a tally.

    Attributes:
        count: Sum of the counts of sites that have at least ``min_count``.
        few: Number of sites with fewer, but not none.
        many: Number of sites with at least ``min_count``.
    """

    count: int
    few: int
    many: int

    @property
    def num_sites(self) -> int:
        """Number of sites that have any."""
        return self.few + self.many

    def describe(self, min_count: int) -> str:
        """Return the count in words.

        >>> Cell(120, 0, 2).describe(5), Cell(0, 1, 0).describe(5), Cell(9, 2, 1).describe(5)
        ('120', 'fewer than 5', '9 + fewer than 5 at each of 2 sites')
        """
        if not self.few:
            return str(self.count)
        few = f"fewer than {min_count}"
        if self.few > 1:
            few += f" at each of {self.few} sites"
        elif self.many:
            few += " at 1 site"
        return f"{self.count} + {few}" if self.many else few


class SurveyTally:
    """The counts of one site, or the sum of several sites'.

    A site's own count c becomes three numbers: c if it is at least ``min_count``, else 0; whether it is smaller, but
    not 0; and whether it is at least ``min_count``. So small counts never leave a site, and still are not zero in the
    sum. With noise, which hides what is small, only the first number is used.

    Args:
        layout: The layout.
        numbers: The numbers (3, C).
        num_sites: Number of sites.
    """

    def __init__(self, layout: Layout, numbers: Counts, num_sites: int = 1) -> None:
        self.layout = layout
        self.numbers = numbers
        self.num_sites = num_sites

    @classmethod
    def of_counts(cls, layout: Layout, counts: Counts) -> "SurveyTally":
        """Return the tally of one site, without noise, from its exact counts (C,)."""
        is_many = counts >= layout.options.min_count
        is_few = (counts > 0) & ~is_many
        return cls(layout, np.stack([np.where(is_many, counts, 0), is_few, is_many]).astype(np.int64))

    @classmethod
    def with_noise(cls, layout: Layout, counts: Counts) -> "SurveyTally":
        """Return the noisy tally of one site from its exact counts (C,), from a cryptographic generator.

        Rounding the noise is post-processing of the Gaussian mechanism, since counts are integers.
        """
        deviation = layout.options.deviation(layout.cells_per_image)
        noise = integer_noise(torch.Size(counts.shape), deviation, None).numpy()
        return cls(layout, np.stack([counts + noise, np.zeros_like(counts), np.zeros_like(counts)]))

    @classmethod
    def of_vector(cls, layout: Layout, vector: Sequence[int] | Counts, num_sites: int = 1) -> "SurveyTally":
        """Return the tally in a vector (3 C,) of :meth:`vector`, or in a sum of vectors of several sites."""
        return cls(layout, np.asarray(vector, dtype=np.int64).reshape(3, layout.num_counts), num_sites)

    def vector(self) -> list[int]:
        """Return the numbers (3 C,) that are added up."""
        numbers: list[int] = self.numbers.ravel().tolist()
        return numbers

    def without(self, other: "SurveyTally") -> "SurveyTally":
        """Return the sum of the other sites, without those of a tally."""
        return SurveyTally(self.layout, self.numbers - other.numbers, self.num_sites - other.num_sites)

    def plus(self, other: "SurveyTally") -> "SurveyTally":
        """Return the sum of two tallies."""
        return SurveyTally(self.layout, self.numbers + other.numbers, self.num_sites + other.num_sites)

    @property
    def is_noisy(self) -> bool:
        """Whether sites have added noise."""
        return self.layout.options.noise_multiplier is not None

    @property
    def noise(self) -> float:
        """Standard deviation of the noise in each count."""
        return self.layout.options.deviation(self.layout.cells_per_image) * float(np.sqrt(self.num_sites))

    def cell(self, block: str, name: str) -> Cell:
        """Return a count. A noisy one that is not clearly above zero counts as none."""
        numbers = self.numbers[:, self.layout.places[block, name]]
        count = int(numbers[0])
        num_sites_with_few = int(numbers[1])
        num_sites_with_enough = int(numbers[2])
        if self.is_noisy:
            if count <= 3 * self.noise:
                return Cell(0, 0, 0)
            return Cell(count, 0, 1)
        return Cell(count, num_sites_with_few, num_sites_with_enough)

    def rows(self) -> Iterator[tuple[str, str, Cell]]:
        """Return block, name and count of all that is not zero."""
        for block, name in self.layout.places:
            cell = self.cell(block, name)
            if cell.num_sites:
                yield block, name, cell

    def names(self, block: str) -> list[str]:
        """Return the names of a block's counts that are not zero."""
        return [name for name in self.layout.blocks[block] if self.cell(block, name).num_sites]

    def shares(self, block: str) -> NDArray[np.float64]:
        """Return the share of each of a block's counts in their sum; zeros if there are none.

        A count below ``min_count`` is taken as 1 for each site.
        """
        cells = [self.cell(block, name) for name in self.layout.blocks[block]]
        counts = np.array([cell.count + cell.few for cell in cells], dtype=np.float64)
        shares: NDArray[np.float64] = counts / max(1.0, counts.sum())
        return shares

    def total(self, block: str) -> int:
        """Return the sum of a block's counts, without those below ``min_count``."""
        return sum(self.cell(block, name).count for name in self.layout.blocks[block])
