# SPDX-License-Identifier: Apache-2.0
"""Options of a survey, which fix what is counted and therefore the order of the counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perada.core.checks import check_integer, check_number, checked_names, invalid_option

MODALITIES = ("CR", "DX", "MG", "CT", "MR", "US", "XA", "NM", "PT", "OP", "OPT", "ES", "SM", "XC")
"""Modalities of DICOM images (PS3.3, C.7.3.1.1.1) that are counted by name."""
MANUFACTURERS = (
    *("agfa", "canon", "carestream", "esaote", "fujifilm", "ge", "hitachi", "hologic", "konica", "mindray"),
    *("philips", "samsung", "shimadzu", "siemens", "toshiba", "united imaging", "zeiss"),
)
"""Manufacturers that are counted by name."""
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Edges of the bins of widths and heights in pixels."""


@dataclass(frozen=True)
class SurveyOptions:
    """What a survey counts, and how small counts are protected.

    Args:
        min_count: Counts from 1 to ``min_count`` - 1 do not leave a site: of each, only that it is fewer.
        sizes: Edges of the bins of widths and heights in pixels.
        grey_bins: Number of bins of grey levels, from the darkest to the brightest.
        modalities: Modalities that are counted by name; all others together.
        manufacturers: Manufacturers that are counted by name, which is a part of theirs; all others together.
        noise_multiplier: Gaussian noise that each site adds to each of its counts, relative to the largest change of
            all its counts by one patient; None for no noise. With noise, sites add a step with it to their ledgers.
        images_per_patient: With noise, the number of images of a patient that are counted.

    Raises:
        ValueError: If an option is invalid.
    """

    min_count: int = 5
    sizes: Sequence[int] = SIZES
    grey_bins: int = 10
    modalities: Sequence[str] = MODALITIES
    manufacturers: Sequence[str] = MANUFACTURERS
    noise_multiplier: float | None = None
    images_per_patient: int = 4

    def __post_init__(self) -> None:
        check_integer("survey: min_count", self.min_count, 1)
        check_integer("survey: grey_bins", self.grey_bins, 2, le=256)
        check_integer("survey: images_per_patient", self.images_per_patient, 1)
        check_number("survey: noise_multiplier", self.noise_multiplier, gt=0, le=1e6, optional=True)
        edges = list(self.sizes) if isinstance(self.sizes, Sequence) else []
        if not edges or not all(type(edge) is int and edge > 0 for edge in edges) or edges != sorted({*edges}):
            raise invalid_option("survey: sizes", self.sizes, "ascending numbers of pixels, such as [128, 512]")
        for name in ("modalities", "manufacturers"):
            names = checked_names(f"survey: {name}", getattr(self, name))
            object.__setattr__(self, name, tuple(names or ()))
        object.__setattr__(self, "sizes", tuple(edges))

    def deviation(self, cells_per_image: int) -> float:
        """Return the standard deviation of a site's noise in each count; 0 without noise.

        One patient changes at most ``images_per_patient`` times ``cells_per_image`` counts by one each, so that the
        Euclidean norm of the change is at most ``images_per_patient`` times its root.

        Args:
            cells_per_image: Largest number of counts that one image changes.
        """
        if self.noise_multiplier is None:
            return 0.0
        return self.noise_multiplier * self.images_per_patient * math.sqrt(cells_per_image)
