# SPDX-License-Identifier: Apache-2.0
"""Scores on the images of all clients together, from sums over clients that tell nothing about a single one.

A client's summary is a vector of integers, so that the sum over clients is exact, and the same in a simulation and as a
secure sum over sites. It has sums over images and over groups of images (:class:`.GroupSums`), and histograms of scores
by class. Real numbers are rounded to multiples of 2⁻²⁰, and sums of their products to multiples of 2⁻¹².
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from perada.evaluation.outputs import ClassLabels, ClientOutputs, auroc_classes, class_auroc
from perada.evaluation.rows import AUROC, RowMaker, ScoreRow, pairs_of, recall_rows
from perada.scores.auroc import (
    NUM_BINS,
    Auroc,
    Floats,
    auroc_difference_interval,
    auroc_interval,
    auroc_of_histograms,
    score_bins,
)
from perada.scores.intervals import (
    NO_INTERVAL,
    GroupSums,
    paired_share_interval,
    share_interval,
    standard_error_of_sums,
    student_interval,
    sum_groups,
)
from perada.scores.summed_scores import SummedScore, predictions_for, summed_scores
from perada.tasks import Task

Integers = NDArray[np.int64]
_SUM_SCALE = 2**20
"""Sums of real numbers are multiples of one divided by this."""
_MOMENT_SCALE = 2**12
"""Sums of products of real numbers are multiples of one divided by this."""
LARGEST = 2**40
"""Largest integer of a summary, as of a secure sum over sites."""


@dataclass(frozen=True)
class Field:
    """A part of a summary.

    Attributes:
        name: Name of the part.
        shape: Its shape.
        scale: What its numbers are multiplied by before they are rounded.
    """

    name: str
    shape: tuple[int, ...]
    scale: int = 1

    @property
    def size(self) -> int:
        """Number of integers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summaries:
    """The summaries of clients: their layout, which all clients share, and the scores that follow from their sum.

    Attributes:
        models: Names of the models, in order.
        task: Task of the data.
        class_names: Names of the K classes.
    """

    models: tuple[str, ...]
    task: Task
    class_names: tuple[str, ...]

    @cached_property
    def scores(self) -> list[SummedScore]:
        """The scores that follow from sums over images."""
        return summed_scores(self.task, len(self.class_names))

    @cached_property
    def auroc_classes(self) -> list[int]:
        """The classes whose AUROC are computed."""
        return auroc_classes(self.task, len(self.class_names))

    @cached_property
    def fields(self) -> list[Field]:
        """The parts of a summary, in order."""
        num_classes = len(self.auroc_classes)
        fields = [Field("images", ()), Field("groups", ())]
        for model in range(len(self.models)):
            fields.append(Field(f"failed {model}", ()))
            for score in self.scores:
                size = self._num_summands(score)
                num_products = size * (size + 1) // 2
                sum_scale, moment_scale = _scales_of(score)
                fields.append(Field(f"sums {model} {score.name}", (size,), sum_scale))
                fields.append(Field(f"moments {model} {score.name}", (num_products,), moment_scale))
            fields.append(Field(f"histograms {model}", (num_classes, 2, NUM_BINS)))
        for pair in range(len(pairs_of(self.models))):
            for score in self.scores:
                size = self._num_summands(score)
                fields.append(Field(f"cross {pair} {score.name}", (size, size), _scales_of(score)[1]))
        num_aurocs = len(self.models) * num_classes
        fields.append(Field("influences", (num_aurocs, 1 + num_aurocs), _MOMENT_SCALE))
        return [field for field in fields if field.size]

    @property
    def size(self) -> int:
        """Number of integers of a summary."""
        return sum(field.size for field in self.fields)

    def _num_summands(self, score: SummedScore) -> int:
        """Return the number S of sums of a score."""
        num_classes = len(self.class_names)
        pixels = (1, 1) if self.task.per_pixel else ()
        logits = torch.zeros(1, *pixels, num_classes)
        targets = self.task.blank_targets((1, *pixels), num_classes, logits.device)
        return int(score.summands(predictions_for(self.task, logits), targets).shape[1])

    def summarize(self, outputs: ClientOutputs) -> Integers:
        """Return the summary (V,) of a client. A model without scores, and so its pairs, contribute zeros.

        Raises:
            ValueError: If a number is too large to be summed.
        """
        parts: dict[str, Floats | Integers] = {
            "images": np.array(outputs.num_images),
            "groups": np.array(outputs.num_groups),
        }
        scored: set[str] = set()
        sums_of_models: dict[str, dict[str, torch.Tensor]] = {}
        for number, model in enumerate(self.models):
            model_outputs = outputs.models[model]
            if model_outputs.num_failed:
                parts[f"failed {number}"] = np.array(1)
            if model_outputs.num_failed or not outputs.num_images:
                continue
            scored.add(model)
            sums_of_models[model] = {}
            for score in self.scores:
                sums_of_groups = sum_groups(model_outputs.summands[score.name], outputs.groups)
                sums_of_models[model][score.name] = sums_of_groups
                group_sums = GroupSums.of(sums_of_groups)
                parts[f"sums {number} {score.name}"] = group_sums.sums.numpy()
                rows, columns = np.triu_indices(len(group_sums.sums))
                parts[f"moments {number} {score.name}"] = group_sums.moments.numpy()[rows, columns]
            if self.auroc_classes:
                parts[f"histograms {number}"] = self._count_bins(outputs, model)
        for number, (first, second) in enumerate(pairs_of(self.models)):
            if not {first, second} <= scored:
                continue
            for score in self.scores:
                first_sums = sums_of_models[first][score.name]
                second_sums = sums_of_models[second][score.name]
                parts[f"cross {number} {score.name}"] = (first_sums.T @ second_sums).numpy()
        if self.auroc_classes and outputs.num_images:
            parts["influences"] = self._sum_influences(outputs, scored)
        return np.concatenate([_to_integers(field, parts.get(field.name)) for field in self.fields])

    def _count_bins(self, outputs: ClientOutputs, model: str) -> Integers:
        """Return the numbers (C, 2, B) of images with and without each class in each bin of a model's scores."""
        probabilities = outputs.models[model].probabilities
        assert probabilities is not None and outputs.targets is not None
        histograms = []
        for k in self.auroc_classes:
            labels = ClassLabels.of(self.task, outputs.targets, k)
            bins = score_bins(probabilities[:, k].numpy())
            kinds = (labels.has_class, labels.is_known & ~labels.has_class)
            histograms.append([np.bincount(bins[rows], minlength=NUM_BINS) for rows in kinds])
        return np.array(histograms)

    def _sum_influences(self, outputs: ClientOutputs, scored: Collection[str]) -> Floats:
        """Return what the client's own A AUROC, of each model and class, say of groups and of correlations.

        These are the variance of each AUROC without groups, then the covariances with groups, times N²: (A, 1 + A). The
        weights make the contributions of clients of one kind proportional to their numbers of images. An AUROC without
        a variance contributes zeros.
        """
        rows = []
        for model in self.models:
            for k in self.auroc_classes:
                if model in scored:
                    rows.append(class_auroc(outputs, model, self.task, k).influences)
                else:
                    rows.append(np.zeros(outputs.num_images))
        of_images = np.array(rows) * outputs.num_images
        of_images = np.where(np.isfinite(of_images).all(1, keepdims=True), of_images, 0.0)
        of_groups = np.zeros((len(of_images), outputs.num_groups))
        for row, influences in enumerate(of_images):
            of_groups[row] = np.bincount(outputs.groups, weights=influences, minlength=outputs.num_groups)
        return np.concatenate([(of_images**2).sum(1, keepdims=True), of_groups @ of_groups.T], 1)

    def find_impossible(self, total: Integers) -> str:
        """Return the part of a sum of summaries that no images can have; "" if there is none.

        A dishonest site of a deployment may have added any numbers.
        """
        parts = self._unpack_total(total)
        images = float(parts["images"])
        if not 0 <= parts["groups"] <= images:
            return "groups"
        for number in range(len(self.models)):
            for score in self.scores:
                moments = self._group_sums(parts, number, score).moments.diagonal()
                if bool((moments < 0).any()):
                    return f"moments {number} {score.name}"
            if self.auroc_classes:
                histograms = parts[f"histograms {number}"]
                if (histograms < 0).any() or (histograms.sum((1, 2)) > images).any():
                    return f"histograms {number}"
        if self.auroc_classes and (parts["influences"][:, 0] < 0).any():
            return "influences"
        return ""

    def rows(self, client: str, total: Integers) -> list[ScoreRow]:
        """Return the rows of a sum of summaries.

        Args:
            client: Name of the rows' client, such as :data:`.POOLED`.
            total: Sum (V,) of the summaries.
        """
        parts = self._unpack_total(total)
        maker = RowMaker(client, int(parts["images"]))
        if not maker.images:
            return []
        rows: list[ScoreRow] = []
        for number in range(len(self.models)):
            has_failed = bool(parts[f"failed {number}"])
            for score in self.scores:
                rows += self._score_rows(maker, parts, number, score, has_failed)
            if self.auroc_classes:
                rows += self._auroc_rows(maker, parts, number, has_failed)
        for number, (first, second) in enumerate(pairs_of(self.models)):
            places = (self.models.index(first), self.models.index(second))
            if any(parts[f"failed {place}"] for place in places):
                continue
            for score in self.scores:
                rows.append(self._difference_row(maker, parts, number, places, score))
            if self.auroc_classes:
                rows.append(self._auroc_difference_row(maker, parts, places))
        return rows

    def _unpack_total(self, total: Integers) -> Mapping[str, Floats]:
        """Return the parts of a sum of summaries by name."""
        parts: dict[str, Floats] = {}
        begin = 0
        for field in self.fields:
            end = begin + field.size
            parts[field.name] = (total[begin:end] / field.scale).reshape(field.shape)
            begin = end
        return parts

    def _group_sums(self, parts: Mapping[str, Floats], number: int, score: SummedScore) -> GroupSums:
        """Return the sums over groups of a model's score."""
        sums = torch.from_numpy(parts[f"sums {number} {score.name}"])
        rows, columns = np.triu_indices(len(sums))
        moments = torch.zeros(len(sums), len(sums), dtype=torch.float64)
        products = torch.from_numpy(parts[f"moments {number} {score.name}"])
        moments[rows, columns] = products
        moments[columns, rows] = products
        return GroupSums(float(parts["groups"]), sums, moments)

    def _score_rows(
        self, maker: RowMaker, parts: Mapping[str, Floats], number: int, score: SummedScore, has_failed: bool
    ) -> list[ScoreRow]:
        """Return the row of a score that follows from sums, and of balanced accuracy also the recall of each class."""
        model = self.models[number]
        support = int(parts["groups"])
        if has_failed:
            return [maker.row(model, score.name, math.nan, NO_INTERVAL, support)]
        group_sums = self._group_sums(parts, number, score)
        value = float(score.score(group_sums.sums))
        if score.is_share:
            interval = share_interval(group_sums)
        else:
            error = standard_error_of_sums(score.score, group_sums)
            interval = student_interval(value, error, group_sums.num_groups, *_range_of(score))
        rows = [maker.row(model, score.name, value, interval, support)]
        if score.has_recalls:
            images_of_classes = group_sums.sums[len(self.class_names) :].int().tolist()
            rows += recall_rows(maker, model, self.class_names, group_sums, images_of_classes)
        return rows

    def _auroc_rows(
        self, maker: RowMaker, parts: Mapping[str, Floats], number: int, has_failed: bool
    ) -> list[ScoreRow]:
        """Return the rows of AUROC: of the mean over classes, and of each class if there are several."""
        model = self.models[number]
        if has_failed:
            return [maker.row(model, AUROC, math.nan, NO_INTERVAL, maker.images)]
        aurocs = self._compute_aurocs(parts, number)
        defined = [place for place, each in enumerate(aurocs) if each.fewest]
        if not defined:
            return [maker.row(model, AUROC, math.nan, NO_INTERVAL, 0)]
        covariance = self._compute_covariance(parts, {number: aurocs})
        mean = float(np.mean([aurocs[place].value for place in defined]))
        fewest = min(aurocs[place].fewest for place in defined)
        error = _error_of(covariance, [1 / len(defined) if place in defined else 0.0 for place in range(len(aurocs))])
        rows = [maker.row(model, AUROC, mean, auroc_interval(mean, error, fewest), fewest)]
        if len(aurocs) > 1:
            for place, each in enumerate(aurocs):
                interval = NO_INTERVAL
                if each.fewest:
                    interval = auroc_interval(each.value, math.sqrt(covariance[place, place]), each.fewest)
                name = self.class_names[self.auroc_classes[place]]
                rows.append(maker.row(model, AUROC, each.value, interval, each.fewest, class_name=name))
        return rows

    def _compute_aurocs(self, parts: Mapping[str, Floats], number: int) -> list[Auroc]:
        """Return the AUROC of a model from its histograms, for each class."""
        histograms = parts[f"histograms {number}"].astype(np.int64)
        return [auroc_of_histograms(positives, negatives) for positives, negatives in histograms]

    def _compute_covariance(self, parts: Mapping[str, Floats], aurocs_of_models: Mapping[int, list[Auroc]]) -> Floats:
        """Return the covariance of the AUROC of each class of some models, model by model.

        Variances are those of the histograms, times how much groups of images make those of the clients' own AUROC
        larger. Correlations, too, are those of the clients' own AUROC.

        Args:
            parts: The parts of the sum of summaries.
            aurocs_of_models: AUROC of each class of the models, by the number of the model.
        """
        num_classes = len(self.auroc_classes)
        rows: list[int] = []
        errors: list[float] = []
        for number, aurocs in aurocs_of_models.items():
            rows += range(number * num_classes, (number + 1) * num_classes)
            errors += [each.standard_error() if each.fewest else 0.0 for each in aurocs]
        without_groups = parts["influences"][rows, 0]
        products = parts["influences"][:, 1:][np.ix_(rows, rows)]
        variances = products.diagonal()
        with np.errstate(divide="ignore", invalid="ignore"):
            deviations = np.sqrt(variances)
            design_effects = np.where(without_groups > 0, variances / without_groups, 1.0)
            correlations = products / np.outer(deviations, deviations)
        # Those of classes of which no client has both kinds of images are not known.
        correlations = np.where(np.isfinite(correlations), correlations, np.eye(len(rows)))
        scaled_errors = np.array(errors) * np.sqrt(np.maximum(design_effects, 1.0))
        covariance: Floats = np.clip(correlations, -1.0, 1.0) * np.outer(scaled_errors, scaled_errors)
        return covariance

    def _difference_row(
        self,
        maker: RowMaker,
        parts: Mapping[str, Floats],
        number: int,
        places: tuple[int, int],
        score: SummedScore,
    ) -> ScoreRow:
        """Return the difference of two models' score that follows from sums."""
        first = self._group_sums(parts, places[0], score)
        second = self._group_sums(parts, places[1], score)
        cross = torch.from_numpy(parts[f"cross {number} {score.name}"])
        size = len(first.sums)
        both = GroupSums(
            num_groups=first.num_groups,
            sums=torch.cat([first.sums, second.sums]),
            moments=torch.cat(
                [torch.cat([first.moments, cross], 1), torch.cat([cross.T, second.moments], 1)],
            ),
        )
        value = float(score.score(first.sums) - score.score(second.sums))
        if score.is_share:
            # Successes of the first minus those of the second, and trials, which are the same.
            change = torch.tensor([[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
            difference_sums = GroupSums(both.num_groups, change @ both.sums, change @ both.moments @ change.T)
            interval = paired_share_interval(difference_sums)
        else:
            error = standard_error_of_sums(
                lambda sums: score.score(sums[..., :size]) - score.score(sums[..., size:]), both
            )
            interval = student_interval(value, error, both.num_groups)
        names = [self.models[place] for place in places]
        return maker.row(names[0], score.name, value, interval, int(parts["groups"]), versus=names[1])

    def _auroc_difference_row(self, maker: RowMaker, parts: Mapping[str, Floats], places: tuple[int, int]) -> ScoreRow:
        """Return the difference of two models' mean AUROC."""
        first = self._compute_aurocs(parts, places[0])
        second = self._compute_aurocs(parts, places[1])
        names = [self.models[place] for place in places]
        defined = [place for place, each in enumerate(first) if each.fewest]
        if not defined:
            return maker.row(names[0], AUROC, math.nan, NO_INTERVAL, 0, versus=names[1])
        covariance = self._compute_covariance(parts, {places[0]: first, places[1]: second})
        weights = [1 / len(defined) if place in defined else 0.0 for place in range(len(first))]
        error = _error_of(covariance, [*weights, *(-weight for weight in weights)])
        value = float(np.mean([first[place].value - second[place].value for place in defined]))
        fewest = min(first[place].fewest for place in defined)
        interval = auroc_difference_interval(Auroc(value, np.zeros(0), fewest), error)
        return maker.row(names[0], AUROC, value, interval, fewest, versus=names[1])


def _error_of(covariance: Floats, weights: Sequence[float]) -> float:
    """Return the standard error of a weighted sum of AUROC."""
    of_each = np.array(weights)
    return math.sqrt(max(0.0, float(of_each @ covariance @ of_each)))


def _scales_of(score: SummedScore) -> tuple[int, int]:
    """Return the scales of the sums and of the moments of a score."""
    return (1, 1) if score.has_counts else (_SUM_SCALE, _MOMENT_SCALE)


def _range_of(score: SummedScore) -> tuple[float, float]:
    """Return the smallest and the largest value of a score that is not a share."""
    highest = math.inf if score.lower_is_better else 1.0
    return 0.0, highest


def _to_integers(field: Field, values: Floats | Integers | None) -> Integers:
    """Return the integers of a part of a summary; zeros without values.

    Raises:
        ValueError: If one is too large.
    """
    if values is None:
        return np.zeros(field.size, dtype=np.int64)
    scaled = np.rint(np.asarray(values, dtype=np.float64).reshape(-1) * field.scale)
    largest = float(np.abs(scaled).max()) if len(scaled) else 0.0
    if not largest <= LARGEST:
        raise ValueError(
            f"the {field.name!r} of a client's scores reach {largest / field.scale:.3g}, but at most "
            f"{LARGEST / field.scale:.3g} can be summed; set mean and std of the task, so that numbers are scaled"
        )
    return scaled.astype(np.int64)
