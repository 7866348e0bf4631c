# SPDX-License-Identifier: Apache-2.0
"""A survey at a site: it counts its images, and compares its counts with the sum over sites."""

from collections.abc import Callable, Sequence

from perada.deploy.jobs import Counts, DeployedJob
from perada.deploy.site.file import Limits
from perada.deploy.site.jobs import SiteJob
from perada.survey.changes import count_changes, digests_of_patients
from perada.survey.counting import survey_images
from perada.survey.findings import compare_with_others
from perada.survey.images import SurveyedImage
from perada.survey.layout import Layout, SurveyTally

MIN_CHANGES = 5
"""Smallest number of patients by which two surveys without noise may differ, if they differ."""


class SiteSurvey(SiteJob):
    """A survey that a site has approved.

    Args:
        job: What server and sites know of it.
        limits: Limits of the site.
        layout: Layout of the counts.
        list_images: Function that lists the site's images.
    """

    permission = "survey"
    limit_name = "max_surveys"

    def __init__(
        self, job: DeployedJob, limits: Limits, layout: Layout, list_images: Callable[[], Sequence[SurveyedImage]]
    ) -> None:
        super().__init__(job, limits)
        self.layout = layout
        self.noise_multiplier = layout.options.noise_multiplier or 0.0
        # Noise hides a single patient anyway.
        self.min_changes = 0 if self.noise_multiplier else max(MIN_CHANGES, layout.options.min_count)
        self._list_images = list_images

    def digests_of_patients(self) -> bytes:
        """Return digests of the site's patients; empty with noise."""
        return digests_of_patients(self._list_images()) if self.min_changes else b""

    def count_changes(self, before: bytes, after: bytes) -> int:
        """Return how many patients differ between two surveys."""
        return count_changes(before, after)

    def make_tally(self) -> SurveyTally:
        """Count the site's images, with noise if the survey has any."""
        return survey_images(self._list_images(), self.layout)

    def make_vector(self) -> list[int]:
        """Return the counts of the site's images."""
        return self.make_tally().vector()

    def compare(self, own_vector: Sequence[int], total: Counts, num_sites: int) -> list[str]:
        """Return how the site's images differ from those of the other sites."""
        own = SurveyTally.of_vector(self.layout, own_vector)
        sum_of_all = SurveyTally.of_vector(self.layout, total, num_sites)
        lines = compare_with_others(own, sum_of_all.without(own))
        return lines or [f"the images fit to those of the {num_sites - 1} other sites, as far as counts show it"]
