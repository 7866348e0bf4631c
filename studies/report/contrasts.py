# SPDX-License-Identifier: Apache-2.0
"""A run against its baselines: each client training alone, and one shared model for all."""

from collections.abc import Sequence
from dataclasses import dataclass
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
