# SPDX-License-Identifier: Apache-2.0
"""An evaluation at a site: it scores models on its test images, and compares its scores with those of the others."""

from collections.abc import Callable, Sequence

import numpy as np

from perada.deploy.jobs import Counts, DeployedJob
from perada.deploy.site.file import Limits
from perada.deploy.site.jobs import SiteJob
from perada.deploy.site.survey import MIN_CHANGES
from perada.evaluation.outputs import ClientOutputs
from perada.evaluation.pooled import Summaries
from perada.evaluation.result import format_row
from perada.evaluation.rows import POOLED, ScoreRow
from perada.evaluation.site_rows import encode_rows
from perada.survey.changes import count_changes


class SiteEvaluation(SiteJob):
    """An evaluation that a site has approved.

    Args:
        job: What server and sites know of it.
        limits: Limits of the site.
        summaries: Layout of what the site adds to the sum.
        predict: Runs the models on the site's test images.
        list_patients: Returns digests of the patients of these images, each of :data:`.DIGEST_BYTES`.
    """

    permission = "scores"
    limit_name = "max_evaluations"
    is_of_training_images = False
    min_changes = MIN_CHANGES

    def __init__(
        self,
        job: DeployedJob,
        limits: Limits,
        summaries: Summaries,
        predict: Callable[[], ClientOutputs],
        list_patients: Callable[[], bytes],
    ) -> None:
        super().__init__(job, limits)
        self.summaries = summaries
        self._predict = predict
        self._list_patients = list_patients

    def digests_of_patients(self) -> bytes:
        """Return digests of the patients of the site's test images."""
        return self._list_patients()

    def count_changes(self, before: bytes, after: bytes) -> int:
        """Return how many patients differ between two evaluations."""
        return count_changes(before, after)

    def make_vector(self) -> list[int]:
        """Return the summary of the models' predictions for the site's test images."""
        summary: list[int] = self.summaries.summarize(self._predict()).tolist()
        return summary

    def own_row(self, vector: list[int]) -> list[int]:
        """Return the site's scores with their intervals, from which the numbers of images follow, but no histograms."""
        return encode_rows(self.summaries, np.array(vector, dtype=np.int64))

    def compare(self, own_vector: Sequence[int], total: Counts, num_sites: int) -> list[str]:
        """Return the site's scores beside those on the images of the other sites."""
        own = np.array(own_vector, dtype=np.int64)
        impossible = self.summaries.find_impossible(total - own)
        if impossible:
            return [f"no images have the {impossible!r} that the server names for the {num_sites - 1} others"]
        rows_of_others = {_subject_of(row): row for row in self.summaries.rows(POOLED, total - own)}
        lines = []
        for row in self.summaries.rows(POOLED, own):
            others = rows_of_others.get(_subject_of(row))
            if row.class_name is not None or others is None:
                continue
            name = row.model if row.versus is None else f"{row.model} − {row.versus}"
            line = f"{name}: {row.score} {format_row(row)}, at the {num_sites - 1} others {format_row(others)}"
            if row.is_ranked and (row.high < others.low or others.high < row.low):
                line += "; the intervals do not overlap"
            lines.append(line)
        return lines


def _subject_of(row: ScoreRow) -> tuple[str, str | None, str, str | None]:
    """Return what a row is about, of whatever images."""
    return row.model, row.versus, row.score, row.class_name
