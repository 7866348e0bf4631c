# SPDX-License-Identifier: Apache-2.0
"""The area under the ROC curve with its variance by DeLong et al., from scores or from histograms of scores.

The variance is computed from the influence of each image on the AUROC. Influences can be added up: over the images of
a patient, over classes for their mean, and with a minus sign over two models for their difference. Sums of squares of
these give the variances and covariances of DeLong et al. (Biometrics, 1988), and with groups those of Obuchowski
(Biometrics, 1997) for clustered data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from perada.scores.intervals import LEVEL, NO_INTERVAL, ScoreInterval, quantile, student_interval

Floats = NDArray[np.float64]
NUM_BINS = 4096
"""Number of bins of scores, with a width of 1/128 on the scale of log odds."""
_LARGEST_LOG_ODDS = 16.0
"""Where the bins end; the first and the last one hold what lies outside."""


@dataclass(frozen=True)
class Auroc:
    """The AUROC of one class, or a mean or difference of several.

    Attributes:
        value: The AUROC.
        influences: Influence (N,) of each image. Their sum of squares is the variance.
        fewest: The smaller one of the numbers of groups with and without the class.
    """

    value: float
    influences: Floats
    fewest: int

    def standard_error(self, groups: NDArray[Any] | None = None) -> float:
        """Return the standard error.

        Args:
            groups: Group (N,) of each image, such as its patient; by default each image is one.
        """
        influences: NDArray[Any] = self.influences
        if groups is not None:
            index = np.unique(groups, return_inverse=True)[1]
            influences = np.bincount(index, weights=influences)
        return math.sqrt(float(influences @ influences))

    def minus(self, other: "Auroc") -> "Auroc":
        """Return the difference of two models' AUROC on the same images."""
        return Auroc(
            self.value - other.value, self.influences - other.influences, fewest=min(self.fewest, other.fewest)
        )


def auroc(scores: Floats, labels: NDArray[np.bool_], groups: NDArray[Any] | None = None) -> Auroc:
    """Compute the AUROC of a class from ranks in O(N log N) (Sun and Xu, IEEE Signal Processing Letters, 2014).

    Args:
        scores: Score (N,) of each image; ties count one half.
        labels: Whether each image has the class (N,).
        groups: Group (N,) of each image; by default each image is one.

    Returns:
        The AUROC; NaN, with influences of NaN, if all images have the class or none has.

    >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True])).value
    0.75
    """
    labels = labels.astype(bool)
    num_positive = int(labels.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return Auroc(math.nan, np.full(len(labels), math.nan), fewest=0)
    ranks = rankdata(scores)
    # The share of negatives below a positive, and of positives above a negative.
    placements = np.empty(len(labels))
    placements[labels] = (ranks[labels] - rankdata(scores[labels])) / num_negative
    placements[~labels] = 1 - (ranks[~labels] - rankdata(scores[~labels])) / num_positive
    value = float(placements[labels].mean())

    positive_groups = num_positive
    negative_groups = num_negative
    if groups is not None:
        positive_groups = len(np.unique(groups[labels]))
        negative_groups = len(np.unique(groups[~labels]))
    deviations = placements - value
    influences = np.where(
        labels,
        deviations / num_positive * _small_sample_factor(positive_groups),
        deviations / num_negative * _small_sample_factor(negative_groups),
    )
    return Auroc(value, influences, fewest=min(positive_groups, negative_groups))


def _small_sample_factor(num_groups: int) -> float:
    """Return the root of n / (n - 1), by which a variance is unbiased; NaN for n = 1."""
    return math.sqrt(num_groups / (num_groups - 1)) if num_groups > 1 else math.nan


def mean_auroc(aurocs: Sequence[Auroc]) -> Auroc:
    """Return the mean of several classes' AUROC on the same images; NaN without a class."""
    if not aurocs:
        return Auroc(math.nan, np.full(0, math.nan), fewest=0)
    return Auroc(
        value=float(np.mean([each.value for each in aurocs])),
        influences=np.mean([each.influences for each in aurocs], axis=0),
        fewest=min(each.fewest for each in aurocs),
    )


def auroc_interval(value: float, error: float, fewest: int, level: float = LEVEL) -> ScoreInterval:
    """Return the interval of an AUROC, symmetric on the scale of log odds, where few images are closer to normal.

    The error is estimated from few images of the rarer kind, for which the quantile is Student's t.

    If the AUROC is 1, its estimated variance is 0. The lower end is then that of as many independent pairs of images as
    there can be, all in the right order: (α / 2)^(1 / fewest), as by Clopper and Pearson. Likewise for 0.

    Args:
        value: The AUROC.
        error: Its standard error.
        fewest: See :class:`Auroc`.
        level: Confidence level.

    >>> [round(end, 3) for end in auroc_interval(0.9, 0.05, 20)]
    [0.738, 0.966]
    """
    if math.isnan(value) or math.isnan(error):
        return NO_INTERVAL
    if value in (0.0, 1.0):
        bound = (0.5 - level / 2) ** (1 / fewest)
        return ScoreInterval(bound, 1.0) if value else ScoreInterval(0.0, 1 - bound)
    log_odds = math.log(value / (1 - value))
    margin = quantile(level, fewest - 1) * error / (value * (1 - value))
    return ScoreInterval(_sigmoid(log_odds - margin), _sigmoid(log_odds + margin))


def auroc_difference_interval(difference: Auroc, error: float, level: float = LEVEL) -> ScoreInterval:
    """Return the interval of the difference of two models' AUROC with a standard error."""
    return student_interval(difference.value, error, difference.fewest, lowest=-1.0, highest=1.0, level=level)


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), for any x."""
    return float(0.5 + 0.5 * np.tanh(x / 2))


def score_bins(probabilities: Floats) -> NDArray[np.int64]:
    """Return the bin of each probability. Bins are equal on the scale of log odds, where models spread their scores.

    Scores in one bin are ties. If a model gives all images nearly the same score, that lowers its AUROC.

    >>> score_bins(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 2048, 4095]
    """
    with np.errstate(divide="ignore"):
        log_odds = np.log(probabilities) - np.log1p(-probabilities)
    width = 2 * _LARGEST_LOG_ODDS / NUM_BINS
    inside = np.clip(log_odds, -_LARGEST_LOG_ODDS, _LARGEST_LOG_ODDS)
    bins: NDArray[np.int64] = np.clip(np.floor((inside + _LARGEST_LOG_ODDS) / width), 0, NUM_BINS - 1).astype(np.int64)
    return bins


def auroc_of_histograms(positives: NDArray[np.int64], negatives: NDArray[np.int64]) -> Auroc:
    """Compute the AUROC from the numbers (B,) of images with and without the class in each bin of scores.

    Returns:
        The AUROC, with influences (2 B,) of all images of a bin together, of which only the sum of squares has a
        meaning.
    """
    num_positive = int(positives.sum())
    num_negative = int(negatives.sum())
    if not num_positive or not num_negative:
        return Auroc(math.nan, np.full(2 * len(positives), math.nan), fewest=0)
    # The share of negatives below a positive of a bin, and of positives above a negative.
    placements_of_positives = (negatives.cumsum() - negatives / 2) / num_negative
    placements_of_negatives = 1 - (positives.cumsum() - positives / 2) / num_positive
    value = float(positives @ placements_of_positives / num_positive)
    parts = []
    for counts, placements, num_images in (
        (positives, placements_of_positives, num_positive),
        (negatives, placements_of_negatives, num_negative),
    ):
        parts.append(np.sqrt(counts) * (placements - value) / num_images * _small_sample_factor(num_images))
    return Auroc(value, np.concatenate(parts), fewest=min(num_positive, num_negative))
