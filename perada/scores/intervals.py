# SPDX-License-Identifier: Apache-2.0
"""Intervals of scores that are computed from sums over groups of images, such as the images of a patient.

Images of one patient resemble each other, so groups, not images, are taken as independent. Without groups, each image
is one. Three methods are used:

- the bootstrap over groups, where all groups are at hand;
- the delta method, where only sums over groups are, as in a secure sum over sites;
- Wilson's interval for shares such as accuracy, since both others have no width if all predictions are right.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

LEVEL = 0.95
"""Confidence level of all intervals."""
FEWEST = 10
"""Smallest support of a score that is ranked: groups of images or, for AUROC, those with and those without the class.

With 10 of each, an AUROC of 0.8 has a standard error of about 0.1, and the intervals cover what they state, as
tests/scores/test_coverage.py shows. With fewer, neither holds, and the order of sites is mostly chance."""
RESAMPLES = 999
"""Number of resamples of a bootstrap."""
_LARGEST_BCA = 2000
"""Number of groups above which the bootstrap takes percentiles: the jackknife of BCa grows with its square."""
_NUMBERS_AT_ONCE = 10**6
"""Numbers of drawn groups that are in memory at a time."""
_LEAST_ERROR = 1e-9
"""Largest standard error that may be one of 0 and rounding."""
_STEP = 1e-5
"""Relative step of numerical derivatives."""

ScoreOfSums = Callable[[Tensor], Tensor]
"""Computes scores (...) from sums (..., S), which may be multiplied by any factor without changing the score."""


class ScoreInterval(NamedTuple):
    """An interval, NaN at both ends if there is none."""

    low: float
    high: float


NO_INTERVAL = ScoreInterval(math.nan, math.nan)


def quantile(level: float, degrees_of_freedom: float = math.inf) -> float:
    """Return how many standard errors an interval extends to each side, by Student's t.

    >>> round(quantile(0.95), 2), round(quantile(0.95, 9), 2)
    (1.96, 2.26)
    """
    return float(stats.t.ppf(0.5 + level / 2, degrees_of_freedom))


def sum_groups(summands: Tensor, groups: NDArray[Any]) -> Tensor:
    """Add up the summands (N, S) of images within each group (N,): (G, S), in the order of the groups' names."""
    index = np.unique(groups, return_inverse=True)[1]
    sums = summands.new_zeros(int(index.max()) + 1 if len(index) else 0, summands.shape[1])
    return sums.index_add_(0, torch.from_numpy(index), summands)


@dataclass(frozen=True)
class GroupSums:
    """What the delta method needs of G groups. Those of several sites can be added up.

    Attributes:
        num_groups: Number of groups.
        sums: Sums (S,) over all images.
        moments: Sum (S, S) over groups of the products of the group's sums.
    """

    num_groups: float
    sums: Tensor
    moments: Tensor

    @classmethod
    def of(cls, sums_of_groups: Tensor) -> "GroupSums":
        """Return those of groups with sums (G, S).

        >>> GroupSums.of(torch.tensor([[1.0, 1.0], [0.0, 1.0]])).sums.tolist()
        [1.0, 2.0]
        """
        sums_of_groups = sums_of_groups.double()
        return cls(
            num_groups=len(sums_of_groups), sums=sums_of_groups.sum(0), moments=sums_of_groups.T @ sums_of_groups
        )

    def select(self, indices: list[int]) -> "GroupSums":
        """Return those of some of the S sums."""
        return GroupSums(self.num_groups, self.sums[indices], self.moments[indices][:, indices])


def standard_error_of_sums(score: ScoreOfSums, group_sums: GroupSums) -> float:
    """Return the standard error of a score by the delta method.

    The score is linearised at the sums. Since it does not change if all sums grow by the same factor, the linear terms
    of the groups add up to 0, and their sum of squares is the variance, as for a ratio (Cochran, Sampling Techniques,
    3rd ed., eq. 6.10).

    Args:
        score: Computes the score.
        group_sums: Its sums.

    Returns:
        The standard error; NaN with fewer than two groups.
    """
    num_groups = group_sums.num_groups
    if num_groups < 2:
        return math.nan
    gradient = _gradient_of(score, group_sums)
    variance = float(gradient @ group_sums.moments @ gradient) * num_groups / (num_groups - 1)
    return math.sqrt(max(variance, 0.0))


def _gradient_of(score: ScoreOfSums, group_sums: GroupSums) -> Tensor:
    """Return the derivatives (S,) of a score by central differences; 0 for sums to which no group has contributed.

    Scores of classes that do not occur are 0 / 0, which automatic differentiation would turn into NaN.
    """
    contributes = group_sums.moments.diagonal() != 0
    steps = _STEP * group_sums.sums.abs().clamp(min=1) * contributes
    shifts = torch.diag(steps)
    differences = score(group_sums.sums + shifts) - score(group_sums.sums - shifts)
    return (differences / (2 * steps)).where(contributes, 0)


def student_interval(
    value: float,
    error: float,
    num_groups: float,
    lowest: float = -math.inf,
    highest: float = math.inf,
    level: float = LEVEL,
) -> ScoreInterval:
    """Return the interval of a score with a standard error that was estimated from some groups, within its range.

    There is none if the error is 0, but for rounding: that groups do not differ does not make the score certain.
    """
    if not error > _LEAST_ERROR or math.isinf(error):
        return NO_INTERVAL
    margin = quantile(level, num_groups - 1) * error
    return ScoreInterval(max(lowest, value - margin), min(highest, value + margin))


def share_interval(group_sums: GroupSums, level: float = LEVEL) -> ScoreInterval:
    """Return Wilson's interval of a share, such as accuracy.

    With groups, the number of trials is divided by the design effect: the variance of the share divided by that
    without groups, and at least 1 (Rao and Scott, 1992). If no or all trials succeed, that is unknown, and the trials
    of a group count as one.

    Args:
        group_sums: Sums of successes and of trials (2,).
        level: Confidence level.

    >>> group_sums = GroupSums.of(torch.tensor([[1.0, 1.0]] * 9 + [[0.0, 1.0]]))
    >>> [round(end, 3) for end in share_interval(group_sums)]
    [0.596, 0.982]
    """
    successes, trials = group_sums.sums.tolist()
    if trials == 0:
        return NO_INTERVAL
    share = successes / trials
    if share in (0.0, 1.0):
        effective_trials = trials**2 / float(group_sums.moments[1, 1])
    else:
        error = standard_error_of_sums(ratio, group_sums)
        # Without groups the two variances are equal.
        design_effect = error**2 * (trials - 1) / (share * (1 - share))
        effective_trials = trials / max(1.0, design_effect) if math.isfinite(error) else 1.0
    squared_quantile = quantile(level) ** 2
    center = (share + squared_quantile / (2 * effective_trials)) / (1 + squared_quantile / effective_trials)
    variance = share * (1 - share) / effective_trials + squared_quantile / (4 * effective_trials**2)
    margin = math.sqrt(squared_quantile * variance) / (1 + squared_quantile / effective_trials)
    # Rounding could put an end beside the share.
    low = 0.0 if share == 0 else max(0.0, center - margin)
    high = 1.0 if share == 1 else min(1.0, center + margin)
    return ScoreInterval(low, high)


def ratio(sums: Tensor) -> Tensor:
    """Return the first of two sums (..., 2) divided by the second."""
    return sums[..., 0] / sums[..., 1]


def paired_share_interval(difference_sums: GroupSums, level: float = LEVEL) -> ScoreInterval:
    """Return the interval of the difference of two shares on the same trials, such as two accuracies.

    It is the adjusted Wald interval of Bonett and Price (2012): two trials are added, of which each model wins one.
    They give it a width if no trial tells the models apart. McNemar's test looks at the same differences.

    Args:
        difference_sums: Sums (2,) of successes of the first model minus those of the second, and of trials.
        level: Confidence level.
    """
    sums = difference_sums.sums + torch.tensor([0.0, 2.0], dtype=torch.float64)
    moments = difference_sums.moments + 2 * torch.eye(2, dtype=torch.float64)
    adjusted = GroupSums(difference_sums.num_groups + 2, sums, moments)
    error = standard_error_of_sums(ratio, adjusted)
    return student_interval(float(ratio(sums)), error, math.inf, lowest=-1.0, highest=1.0, level=level)


def bootstrap_interval(
    sums_of_groups: Tensor, score: ScoreOfSums, seed: int, level: float = LEVEL, resamples: int = RESAMPLES
) -> ScoreInterval:
    """Return the bootstrap interval of a score, whose groups are drawn with replacement.

    It is bias-corrected and accelerated (BCa; Efron, 1987): scores such as the calibration error or Dice are bounded
    and skewed, and the calibration error of a resample is too large on average, so that percentiles would cover too
    little. Beyond 2,000 groups the difference is small, and percentiles are taken.

    Args:
        sums_of_groups: Sums (G, S) of each group.
        score: Computes the score.
        seed: Seed of the draws.
        level: Confidence level.
        resamples: Number of resamples.

    Returns:
        The interval; none with fewer than two groups, or if all resamples have the same score: that groups do not
        differ does not make the score certain.
    """
    num_groups = len(sums_of_groups)
    sums_of_groups = sums_of_groups.double()
    if num_groups < 2:
        return NO_INTERVAL

    def score_of_resamples(drawn: NDArray[np.int64], axis: int) -> NDArray[np.float64]:
        """Return the scores (R,) of resamples (R, n), or of a single one (n,)."""
        rows = np.atleast_2d(drawn)
        offsets = np.arange(len(rows))[:, None] * num_groups
        counts = np.bincount((rows + offsets).ravel(), minlength=len(rows) * num_groups)
        times_drawn = torch.from_numpy(counts.reshape(len(rows), num_groups)).double()
        scores: NDArray[np.float64] = score(times_drawn @ sums_of_groups).numpy()
        return scores.reshape(drawn.shape[:-1])

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # BCa is not defined if the jackknife's scores are equal.
        warnings.simplefilter("ignore")
        result = stats.bootstrap(
            (np.arange(num_groups),),
            score_of_resamples,
            n_resamples=resamples,
            batch=max(1, _NUMBERS_AT_ONCE // num_groups),
            vectorized=True,
            axis=-1,
            confidence_level=level,
            method="BCa" if num_groups <= _LARGEST_BCA else "percentile",
            random_state=np.random.default_rng(seed),
        )
    scores_of_resamples = result.bootstrap_distribution
    if not np.isfinite(scores_of_resamples).all() or np.ptp(scores_of_resamples) == 0:
        return NO_INTERVAL
    low, high = result.confidence_interval
    if not math.isfinite(low + high):
        low, high = np.quantile(scores_of_resamples, [0.5 - level / 2, 0.5 + level / 2])
    return ScoreInterval(float(low), float(high))
