# SPDX-License-Identifier: Apache-2.0
"""Rows of an evaluation: the scores of models on the images of one client, and their differences, with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from perada.evaluation.outputs import ClientOutputs, auroc_classes, class_auroc
from perada.scores.auroc import Auroc, auroc_difference_interval, auroc_interval, mean_auroc
from perada.scores.intervals import (
    FEWEST,
    NO_INTERVAL,
    GroupSums,
    ScoreInterval,
    bootstrap_interval,
    paired_share_interval,
    share_interval,
    sum_groups,
)
from perada.scores.summed_scores import SummedScore
from perada.tasks import Task

POOLED = "pooled"
"""Client of the rows about the images of all clients together."""
AUROC = "auroc"
RECALL = "recall"


@dataclass(frozen=True)
class ScoreRow:
    """A score of a model, or the difference of two models' scores on the same images.

    Attributes:
        client: Name of the client, or :data:`POOLED`.
        model: Name of the model.
        versus: The model whose score is subtracted; None for the score itself.
        score: Name of the score.
        class_name: The class that the score is of; None if it is of all.
        value: The score; NaN if it is not defined.
        low: Lower end of its interval of 95 %; NaN if there is none.
        high: Upper end.
        support: What the score rests on: groups of images such as patients, or, for AUROC, the smaller one of the
            numbers of those with and without the class. Pooled AUROC count images.
        images: Number of images.
    """

    client: str
    model: str
    versus: str | None
    score: str
    class_name: str | None
    value: float
    low: float
    high: float
    support: int
    images: int

    @property
    def is_ranked(self) -> bool:
        """Whether the support suffices to rank clients by the score."""
        return self.support >= FEWEST

    def record(self) -> dict[str, Any]:
        """Return the row in plain types, without NaN, for JSON and tables."""
        record: dict[str, Any] = dict(vars(self))
        for name in ("value", "low", "high"):
            if not math.isfinite(record[name]):
                record[name] = None
        return record | {"too_few": not self.is_ranked}


@dataclass(frozen=True)
class RowMaker:
    """Makes rows of one client, or of all together.

    Attributes:
        client: Name of the client.
        images: Number of its images.
    """

    client: str
    images: int

    def row(
        self,
        model: str,
        score: str,
        value: float,
        interval: ScoreInterval,
        support: int,
        *,
        versus: str | None = None,
        class_name: str | None = None,
    ) -> ScoreRow:
        """Return a row. A score that is NaN has no interval."""
        if math.isnan(value):
            interval = NO_INTERVAL
        return ScoreRow(
            client=self.client,
            model=model,
            versus=versus,
            score=score,
            class_name=class_name,
            value=value,
            low=interval.low,
            high=interval.high,
            support=support,
            images=self.images,
        )


def pairs_of(models: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of models that are compared.

    >>> pairs_of(["own", "global", "vendor"])
    [('own', 'global'), ('own', 'vendor'), ('global', 'vendor')]
    """
    return list(combinations(models, 2))


@dataclass(frozen=True)
class ClientRows:
    """Makes the rows of one client from what models predict for its images.

    Attributes:
        outputs: What they predict.
        task: Task of the data.
        class_names: Names of the K classes.
        scores: Scores that follow from sums over images.
        seed: Seed of the bootstrap.
    """

    outputs: ClientOutputs
    task: Task
    class_names: Sequence[str]
    scores: Sequence[SummedScore]
    seed: int

    def rows(self) -> list[ScoreRow]:
        """Return the rows: scores of each model, then differences of each pair of models."""
        outputs = self.outputs
        if not outputs.num_images:
            return []
        models = list(outputs.models)
        scored = [model for model in models if not outputs.models[model].num_failed]
        rows: list[ScoreRow] = []
        aurocs: dict[str, dict[int, Auroc]] = {}
        for model in scored:
            aurocs[model] = {}
            for number in auroc_classes(self.task, len(self.class_names)):
                aurocs[model][number] = class_auroc(outputs, model, self.task, number)
        for model in models:
            if model not in scored:
                rows += self._failed_rows(model)
                continue
            for score in self.scores:
                rows += self._score_rows(model, score)
            rows += self._auroc_rows(model, aurocs[model])
        for first, second in pairs_of(scored):
            rows += [self._difference_row(first, second, score) for score in self.scores]
            rows += self._auroc_difference_rows(first, second, aurocs[first], aurocs[second])
        return rows

    @property
    def _row_maker(self) -> RowMaker:
        """Maker of the rows."""
        return RowMaker(self.outputs.name, self.outputs.num_images)

    def _failed_rows(self, model: str) -> list[ScoreRow]:
        """Return rows without values, for a model whose outputs for some images are NaN or infinite."""
        names = [score.name for score in self.scores]
        if auroc_classes(self.task, len(self.class_names)):
            names.append(AUROC)
        return [self._row_maker.row(model, name, math.nan, NO_INTERVAL, self.outputs.num_groups) for name in names]

    def _sums_of_groups(self, model: str, score: SummedScore) -> Tensor:
        """Return the sums (G, S) of a score over each group of images."""
        return sum_groups(self.outputs.models[model].summands[score.name], self.outputs.groups)

    def _score_rows(self, model: str, score: SummedScore) -> list[ScoreRow]:
        """Return the row of a score that follows from sums, and of balanced accuracy also the recall of each class."""
        sums_of_groups = self._sums_of_groups(model, score)
        value = float(score.score(sums_of_groups.sum(0)))
        if score.is_share:
            interval = share_interval(GroupSums.of(sums_of_groups))
        else:
            interval = bootstrap_interval(sums_of_groups, score.score, self.seed)
        rows = [self._row_maker.row(model, score.name, value, interval, self.outputs.num_groups)]
        if score.has_recalls:
            num_classes = len(self.class_names)
            supports = (sums_of_groups[:, num_classes:] > 0).sum(0).tolist()
            rows += recall_rows(self._row_maker, model, self.class_names, GroupSums.of(sums_of_groups), supports)
        return rows

    def _auroc_rows(self, model: str, auroc_of_class: Mapping[int, Auroc]) -> list[ScoreRow]:
        """Return the rows of AUROC: of the mean over the classes that have both kinds of images, and of each class."""
        if not auroc_of_class:
            return []
        defined = [found for found in auroc_of_class.values() if found.fewest]
        rows = [self._auroc_row(model, mean_auroc(defined), None)]
        if len(auroc_of_class) > 1:
            for number, found in auroc_of_class.items():
                rows.append(self._auroc_row(model, found, self.class_names[number]))
        return rows

    def _auroc_row(self, model: str, found: Auroc, class_name: str | None) -> ScoreRow:
        interval = NO_INTERVAL
        if found.fewest:
            error = found.standard_error(self.outputs.groups)
            interval = auroc_interval(found.value, error, found.fewest)
        return self._row_maker.row(model, AUROC, found.value, interval, found.fewest, class_name=class_name)

    def _difference_row(self, first: str, second: str, score: SummedScore) -> ScoreRow:
        """Return the difference of two models' score that follows from sums."""
        first_sums = self._sums_of_groups(first, score)
        second_sums = self._sums_of_groups(second, score)
        size = first_sums.shape[1]
        value = float(score.score(first_sums.sum(0)) - score.score(second_sums.sum(0)))
        if score.is_share:
            trials = first_sums[:, 1]
            difference_sums = torch.stack([first_sums[:, 0] - second_sums[:, 0], trials], 1)
            interval = paired_share_interval(GroupSums.of(difference_sums))
        else:
            interval = bootstrap_interval(
                torch.cat([first_sums, second_sums], 1),
                lambda sums: score.score(sums[..., :size]) - score.score(sums[..., size:]),
                self.seed,
            )
        return self._row_maker.row(first, score.name, value, interval, self.outputs.num_groups, versus=second)

    def _auroc_difference_rows(
        self, first: str, second: str, first_of_class: Mapping[int, Auroc], second_of_class: Mapping[int, Auroc]
    ) -> list[ScoreRow]:
        """Return the difference of two models' mean AUROC."""
        defined = [number for number, found in first_of_class.items() if found.fewest]
        if not defined:
            return []
        difference = mean_auroc([first_of_class[number].minus(second_of_class[number]) for number in defined])
        error = difference.standard_error(self.outputs.groups)
        interval = auroc_difference_interval(difference, error)
        return [self._row_maker.row(first, AUROC, difference.value, interval, difference.fewest, versus=second)]


def recall_rows(
    maker: RowMaker, model: str, class_names: Sequence[str], group_sums: GroupSums, supports: Sequence[int]
) -> list[ScoreRow]:
    """Return the recall of each class that occurs.

    Args:
        maker: Makes the rows.
        model: Name of the model.
        class_names: Names of the K classes.
        group_sums: Sums of right predictions of each class, then of images of each class (2 K,).
        supports: Number of groups, or of images, of each class.
    """
    rows = []
    for number, (class_name, support) in enumerate(zip(class_names, supports, strict=True)):
        sums_of_class = group_sums.select([number, number + len(class_names)])
        hits, images = sums_of_class.sums.tolist()
        if images:
            interval = share_interval(sums_of_class)
            rows.append(maker.row(model, RECALL, hits / images, interval, int(support), class_name=class_name))
    return rows
