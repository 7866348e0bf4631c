# SPDX-License-Identifier: Apache-2.0
"""A run against its baselines: each client training alone, and one shared model for all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

# The command prints the path of its page before it imports anything large.
if TYPE_CHECKING:
    from perada.studies.compare.comparison import ComparedRow, Comparison
    from perada.studies.compare.differences import Difference

THIS_RUN = "this run"
ALONE = "training alone"
SHARED = "one shared model"


@dataclass(frozen=True)
class Contrast:
    """A run against a baseline.

    Attributes:
        baseline: The baseline.
        own: Difference on each client's own test images, positive if the run is better.
        everyone: The same on the test images of all clients; None if there are no such scores.
    """

    baseline: "ComparedRow"
    own: "Difference"
    everyone: "Difference | None"


@dataclass(frozen=True)
class Baselines:
    """A run and its baselines, whose clients have the same test images.

    Attributes:
        comparison: The rows, of which the first is the run (:data:`THIS_RUN`).
        contrasts: The run against each baseline: :data:`ALONE`, :data:`SHARED` or both.
        path: The file of the baselines.
    """

    comparison: "Comparison"
    contrasts: Sequence[Contrast]
    path: Path

    def contrast_with(self, name: str) -> Contrast | None:
        """Return the contrast with the baseline of a name; None if there is none."""
        for contrast in self.contrasts:
            if contrast.baseline.name == name:
                return contrast
        return None


def with_shared_images(
    difference: "Difference", accuracies: tuple[float, float], num_images: int, num_tests: int
) -> "Difference":
    """Widen the interval of a difference of accuracies on test images that all clients' models have in common.

    Clients whose models are nearly the same have nearly the same mistakes on these images, so that the spread over
    clients says little about other images. Mistakes of the two rows are taken as independent, although both read the
    same images: too few differences are then found rather than too many.

    Args:
        difference: The difference, whose interval covers the choice of clients.
        accuracies: Mean accuracies of the two rows.
        num_images: Number of test images.
        num_tests: Number of differences that are tested together, for Bonferroni's correction.
    """
    from scipy import stats

    num_clients = sum(not math.isnan(value) for value in difference.of_clients)
    if math.isnan(difference.low) or num_clients < 2 or num_images == 0:
        return difference
    student = stats.t(num_clients - 1)
    half_width = (difference.high - difference.low) / 2
    error_of_clients = half_width / float(student.ppf(0.975))
    variance_of_images = sum(accuracy * (1 - accuracy) for accuracy in accuracies) / num_images
    error = math.hypot(error_of_clients, math.sqrt(variance_of_images))
    if error == 0:
        return difference
    half_width = error * float(student.ppf(0.975))
    p_value = 2 * float(student.sf(abs(difference.mean) / error))
    return replace(
        difference,
        low=difference.mean - half_width,
        high=difference.mean + half_width,
        p_value=p_value,
        adjusted_p_value=max(difference.adjusted_p_value, min(1.0, num_tests * p_value)),
    )
