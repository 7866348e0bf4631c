# SPDX-License-Identifier: Apache-2.0
"""Differences between rows of a comparison, paired by client and seed, with intervals and tests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

ScoreMatrix = NDArray[np.float64]
"""Scores (S, M) of the M clients with each of S seeds."""

LEVEL = 0.05
"""Probability with which a difference is called significant though there is none."""
PRIOR_DEGREES_OF_FREEDOM = 2
"""Weight of all rows' spread over seeds beside that of two rows: as much as two degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """The difference between two rows: the mean of their scores' differences over clients and seeds.

    Attributes:
        first: Name of the first row.
        second: Name of the second row.
        mean: Mean difference, above zero if the first row is better, also where lower scores are better.
        low: Lower end of the 95 % confidence interval of the mean; NaN with one client and one seed.
        high: Its upper end.
        p_value: Two-sided p-value of the t-test that the mean is zero.
        adjusted_p_value: The same after Holm's correction for the number of differences that are tested together.
        num_better: Number of clients whose mean over seeds is better in the first row.
        num_worse: Number of clients for which it is worse.
        sign_p_value: p-value of the exact sign test over the clients. It takes them to be independent, which clients
            that share one global model are not.
        of_clients: Mean difference (M,) of each client over the seeds; NaN for a client without a score.
    """

    first: str
    second: str
    mean: float
    low: float
    high: float
    p_value: float
    adjusted_p_value: float
    num_better: int
    num_worse: int
    sign_p_value: float
    of_clients: tuple[float, ...]

    @property
    def is_significant(self) -> bool:
        """Whether the difference is larger than chance explains, after the correction."""
        return self.adjusted_p_value < LEVEL


@dataclass(frozen=True)
class _Uncertainty:
    """The squared standard error of a mean difference, and its degrees of freedom; NaN if there is no estimate."""

    variance: float
    degrees_of_freedom: float


def seed_variance(scores_of_rows: Sequence[ScoreMatrix]) -> float:
    """Return the variance over seeds of a row's mean score, pooled over all rows.

    What a seed changes in all rows alike, such as the division of the data, is left out, because it leaves the
    differences between rows as they are.

    Args:
        scores_of_rows: Scores (S, M) of each of R rows.

    Returns:
        The mean square of the interaction of rows and seeds, with (R − 1)(S − 1) degrees of freedom; NaN with one row
        or one seed.

    >>> seed_variance([np.array([[0.0], [2.0]]), np.array([[1.0], [1.0]])])
    1.0
    """
    means = np.stack([scores.mean(1) for scores in scores_of_rows])  # (R, S)
    num_rows, num_seeds = means.shape
    if num_rows < 2 or num_seeds < 2:
        return math.nan
    of_rows = means.mean(1, keepdims=True)
    of_seeds = means.mean(0, keepdims=True)
    residuals = means - of_rows - of_seeds + means.mean()
    return float((residuals**2).sum() / ((num_rows - 1) * (num_seeds - 1)))


def difference(
    first: str,
    second: str,
    scores_of_first: ScoreMatrix,
    scores_of_second: ScoreMatrix,
    *,
    pooled_seed_variance: float = math.nan,
    num_rows: int = 2,
    lower_is_better: bool = False,
) -> Difference:
    """Return the difference between two rows.

    Clients and seeds are both taken as draws from many, as in an analysis of variance with two random factors, since a
    statement on methods should also hold for other seeds and for clients like these. The interval and the p-value are
    those of Student's t with Satterthwaite's degrees of freedom. With few seeds their spread is hardly known, so it is
    averaged with that of all rows (a moderated t-test: Smyth, Statistical Applications in Genetics and Molecular
    Biology 3, 2004). A bootstrap of three seeds would underestimate it by a third.

    Args:
        first: Name of the first row.
        second: Name of the second row.
        scores_of_first: Scores (S, M) of M clients with S seeds.
        scores_of_second: Scores (S, M) of the same clients with the same seeds.
        pooled_seed_variance: See :func:`seed_variance`; NaN to use the spread of these two rows only.
        num_rows: Number of rows that are pooled.
        lower_is_better: Whether a lower score is better.

    Returns:
        The difference. ``adjusted_p_value`` is not corrected yet, see :func:`correct_p_values`. With one seed the
        interval and the p-value cover the draw of the clients only.
    """
    from scipy import stats

    # Two means of the same counts may differ in their last digits.
    is_equal = np.isclose(scores_of_first, scores_of_second, rtol=1e-9, atol=1e-12)
    differences = np.where(is_equal, 0.0, scores_of_first - scores_of_second)
    if lower_is_better:
        differences = -differences
    mean = float(differences.mean())
    uncertainty = _estimate_uncertainty(differences, pooled_seed_variance, num_rows)
    low = high = mean
    p_value = 1.0
    if math.isnan(uncertainty.variance):
        low = high = math.nan
    elif uncertainty.variance > 0:
        student = stats.t(uncertainty.degrees_of_freedom)
        standard_error = math.sqrt(uncertainty.variance)
        half_width = float(student.ppf(1 - LEVEL / 2)) * standard_error
        low = mean - half_width
        high = mean + half_width
        p_value = 2 * float(student.sf(abs(mean) / standard_error))
    elif mean != 0:
        p_value = 0.0  # the same difference with each seed and at each client
    of_clients = differences.mean(0)
    num_better = int((of_clients > 0).sum())
    num_worse = int((of_clients < 0).sum())
    num_unequal = num_better + num_worse
    sign_p_value = 1.0
    if num_unequal:
        sign_p_value = float(stats.binomtest(num_better, num_unequal).pvalue)
    return Difference(
        first=first,
        second=second,
        mean=mean,
        low=low,
        high=high,
        p_value=p_value,
        adjusted_p_value=p_value,
        num_better=num_better,
        num_worse=num_worse,
        sign_p_value=sign_p_value,
        of_clients=tuple(of_clients.tolist()),
    )


def _estimate_uncertainty(differences: ScoreMatrix, pooled_seed_variance: float, num_rows: int) -> _Uncertainty:
    """Estimate the variance of the mean of differences (S, M) over seeds and clients, both drawn at random."""
    num_seeds, num_clients = differences.shape
    of_seeds = differences.mean(1)
    of_clients = differences.mean(0)
    if num_seeds == 1:
        if num_clients == 1:
            return _Uncertainty(math.nan, math.nan)
        return _Uncertainty(float(of_clients.var(ddof=1)) / num_clients, num_clients - 1)

    variance_of_seeds = float(of_seeds.var(ddof=1))
    degrees_of_seeds = num_seeds - 1
    prior_degrees = min(PRIOR_DEGREES_OF_FREEDOM, (num_rows - 2) * (num_seeds - 1))
    if prior_degrees > 0 and not math.isnan(pooled_seed_variance):
        # The variance of the difference of two means is twice that of one.
        prior = 2 * pooled_seed_variance
        total_degrees = degrees_of_seeds + prior_degrees
        variance_of_seeds = (degrees_of_seeds * variance_of_seeds + prior_degrees * prior) / total_degrees
        degrees_of_seeds = total_degrees
    from_seeds = variance_of_seeds / num_seeds

    from_clients = 0.0
    from_rest = 0.0
    if num_clients > 1:
        residuals = differences - of_seeds[:, None] - of_clients[None] + differences.mean()
        degrees_of_rest = (num_seeds - 1) * (num_clients - 1)
        mean_square_of_rest = float((residuals**2).sum()) / degrees_of_rest
        mean_square_of_clients = num_seeds * float(of_clients.var(ddof=1))
        if mean_square_of_clients > mean_square_of_rest:
            # Clients differ by more than the noise of single scores, which the spread over seeds has already.
            from_clients = mean_square_of_clients / differences.size
            from_rest = mean_square_of_rest / differences.size
    variance = from_seeds + from_clients - from_rest
    # Satterthwaite: each mean square has a variance of 2 · square² / its degrees of freedom.
    spread = from_seeds**2 / degrees_of_seeds
    if from_clients:
        spread += from_clients**2 / (num_clients - 1) + from_rest**2 / degrees_of_rest
    degrees_of_freedom = variance**2 / spread if spread > 0 else math.inf
    if from_clients:
        # Where one mean square is subtracted from another of nearly the same size, the formula gives fewer degrees of
        # freedom than any of them has, even below one. A sum of mean squares has at least those of the smallest.
        degrees_of_freedom = max(degrees_of_freedom, min(degrees_of_seeds, num_clients - 1))
    return _Uncertainty(variance, degrees_of_freedom)


def standard_error(differences: ScoreMatrix) -> float:
    """Return the standard error of the mean of differences (S, M) over S seeds, or draws, and M clients.

    Both are taken as drawn at random, as in :func:`difference`. NaN with one client and one seed.
    """
    return math.sqrt(_estimate_uncertainty(differences, math.nan, 2).variance)


def correct_p_values(differences: Sequence[Difference]) -> list[Difference]:
    """Correct the p-values of differences for their number (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    p_values = holm([entry.p_value for entry in differences])
    return [replace(entry, adjusted_p_value=p_value) for entry, p_value in zip(differences, p_values, strict=True)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's correction, in the same order.

    >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for num_smaller, place in enumerate(order):
        corrected = (len(p_values) - num_smaller) * p_values[place]
        # A larger p-value does not become smaller than one before it.
        largest = max(largest, min(1.0, corrected))
        adjusted[place] = largest
    return adjusted
