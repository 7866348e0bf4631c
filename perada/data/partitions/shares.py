# SPDX-License-Identifier: Apache-2.0
"""Shares of a set, drawn at random so that groups stay whole or so that every stratum gives its part."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from perada.data.partitions.apportion import Array


def whole_groups(groups: Array, counts: Sequence[int], rng: np.random.Generator, least: int = 0) -> list[Array]:
    """Draw disjoint parts of about ``counts`` rows, and the rest; the rows of a group are all in one of these.

    Whole groups are drawn, and each part ends where its size comes closest to what was asked for. Groups of one row
    each give the exact counts.

    Args:
        groups: The group (N,) of each row.
        counts: Rows of each part.
        rng: What is drawn from.
        least: Groups that each part has at least, the rest too; there must be so many.

    Returns:
        The rows of each part and of the rest, ascending.

    >>> [rows.tolist() for rows in whole_groups(np.array([7, 7, 7, 8]), [2], np.random.default_rng(0), least=1)]
    [[0, 1, 2], [3]]
    """
    names, of = np.unique(groups, return_inverse=True)
    order = rng.permutation(len(names))
    sizes = np.concatenate([[0], np.bincount(of, minlength=len(names))[order].cumsum()])
    ends = [int(np.abs(sizes - wanted).argmin()) for wanted in np.cumsum(counts)]
    ends = [min(max(end, least * (i + 1)), len(names) - least * (len(ends) - i)) for i, end in enumerate(ends)]
    place = np.argsort(order)[of]
    return [np.flatnonzero((place >= start) & (place < end)) for start, end in pairwise([0, *ends, len(names)])]


def of_each_stratum(strata: Array, share: float, rng: np.random.Generator) -> Array:
    """Draw about a share of each stratum's rows: its number is rounded, and never all.

    Args:
        strata: The stratum (N,) of each row.
        share: From 0 to below 1.
        rng: What is drawn from.

    Returns:
        The rows, ascending.

    >>> len(of_each_stratum(np.repeat([3, 5, 6], [20, 10, 1]), 0.5, np.random.default_rng(0)))
    15
    """
    _, of, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    order = rng.permutation(len(of))
    order = order[np.argsort(of[order], kind="stable")]
    counts = np.minimum(np.rint(sizes * share).astype(np.int64), sizes - 1)
    place = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[place < np.repeat(counts, sizes)])


def spread_share(clients: Array, labels: Array, groups: Array, share: float, rng: np.random.Generator) -> Array:
    """Draw about a share of the rows, whole groups, spread over clients and the classes of each.

    The groups are walked through by client, then by class, else at random, and each one is drawn that brings the number
    of rows drawn so far closer to the share of those passed. Where each row is a group, the number drawn in any stretch
    of the walk is within one of the share of its length (systematic sampling). A client or class is never drawn whole.

    Args:
        clients: The client (N,) of each row.
        labels: Its class (N,), whole numbers from 0, or its several labels (N, K), zeros and ones.
        groups: Its group (N,). A group takes the place of its first row in the walk.
        share: Above 0 and below 1.
        rng: What is drawn from.

    Returns:
        The rows, ascending.

    >>> alone = np.arange(8)
    >>> len(spread_share(np.repeat([0, 1], 4), np.tile([0, 1], 4), alone, 0.25, np.random.default_rng(0)))
    2
    """
    _, first, of, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    _, numbers = np.unique(clients, return_inverse=True)
    _, combinations = np.unique(labels.reshape(len(labels), -1), axis=0, return_inverse=True)
    order = np.lexsort((rng.random(len(first)), combinations.reshape(-1)[first], numbers[first]))
    drawn = np.zeros(len(first), dtype=bool)
    passed, taken = float(rng.random()) - 0.5, 0
    for group in order:
        passed += sizes[group] * share
        if abs(passed - taken - sizes[group]) < abs(passed - taken):
            drawn[group] = True
            taken += int(sizes[group])
    every = np.arange(len(of))
    for rows, strata in ((every, numbers), (every, labels) if labels.ndim == 1 else np.nonzero(labels)):
        for stratum in np.setdiff1d(strata, strata[~drawn[of[rows]]]):  # whose last group is given back
            own = rows[strata == stratum]
            if drawn[of[own]].all():
                drawn[of[own[0]]] = False
    return np.flatnonzero(drawn[of])
