# SPDX-License-Identifier: Apache-2.0
"""Shares of a set: drawn, by hashes, or apportioned to clients."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from perada.core.seeding import derive_seed

Array = np.ndarray[Any, Any]


def check_enough(samples: int, clients: int, least: int) -> None:
    """Refuse more clients than the samples allow."""
    if samples < clients * least:
        raise ValueError(
            f"{clients} clients with at least {least} training samples each need {clients * least}, and there are "
            f"{samples}: lower num_clients or the minimum, or raise train_limit"
        )


def apportion(total: int, shares: Array, rng: np.random.Generator) -> Array:
    """Divide ``total`` samples by ``shares``, each rounded up or down at random without bias.

    Rounding the running sum, shifted by one random offset, keeps the sum exact (systematic sampling). For shares (M,)
    that sum to at most 1, the integers (M,) are each within 1 of ``total * shares``.

    >>> apportion(10, np.array([0.25, 0.5, 0.25]), np.random.default_rng(0)).sum()
    np.int64(10)
    """
    # Rounded: a sum of shares that is 1 may differ from it in the last digits.
    running = np.round(np.cumsum(shares) * total, 6)
    return np.diff(np.floor(running + rng.random()), prepend=0).astype(np.int64)


def even(total: int, parts: int, rng: np.random.Generator) -> Array:
    """Divide ``total`` into parts that differ by at most one; which are larger is random.

    >>> sorted(even(8, 3, np.random.default_rng(0)).tolist())
    [2, 3, 3]
    """
    return rng.permutation(total // parts + (np.arange(parts) < total % parts)).astype(np.int64)


def raise_to_minimum(
    counts: Array, minimum: int, preference: Array, spare: Array | None = None, keep: int = 0
) -> Array:
    """Move samples so that every client has at least ``minimum``; there must be so many.

    A client in need takes samples of the classes it prefers: first those that belong to nobody, then from the client
    that has most of them and can spare some.

    Args:
        counts: Integers (M, K), of which a changed copy is returned.
        minimum: Samples each client gets at least.
        preference: (M, K), higher first.
        spare: (K,) samples that belong to nobody; None for none.
        keep: Samples of each class that no client gives away.

    >>> raise_to_minimum(np.array([[0, 0], [3, 2]]), 1, np.array([[0.1, 0.2], [1, 1]])).tolist()
    [[0, 1], [3, 1]]
    """
    counts, totals = counts.copy(), counts.sum(1)
    spare = np.zeros(counts.shape[1], dtype=np.int64) if spare is None else spare.copy()
    can_give = np.minimum(counts - keep, (totals - minimum)[:, None])
    heaps = [  # of each class, (-samples, client): who can give most comes first
        sorted((-left, client) for client, left in enumerate(column) if left > 0) for column in can_give.T.tolist()
    ]
    for client in np.flatnonzero(totals < minimum):
        for k in np.argsort(-preference[client], kind="stable"):
            need = minimum - totals[client]
            taken = min(need, spare[k])
            spare[k] -= taken
            while taken < need and heaps[k]:
                offer, donor = heapq.heappop(heaps[k])
                left = min(counts[donor, k] - keep, totals[donor] - minimum)
                # Who has given since may no longer have most: what a client can give only ever falls.
                given = min(need - taken, left) if left == -offer else 0
                counts[donor, k] -= given
                totals[donor] -= given
                taken += given
                if left > given:
                    heapq.heappush(heaps[k], (given - left, donor))
            counts[client, k] += taken
            totals[client] += taken
            if totals[client] == minimum:
                break
    return counts


def deal(classes: Array, counts: Array, rng: np.random.Generator) -> list[Array]:
    """Give each client its number of samples of each class, ``counts`` (M, K), at random: rows, ascending, of each.

    >>> [rows.tolist() for rows in deal(np.array([0, 1, 0]), np.array([[2, 0], [0, 1]]), np.random.default_rng(0))]
    [[0, 2], [1]]
    """
    rows = [rng.permutation(np.flatnonzero(classes == k))[:dealt] for k, dealt in enumerate(counts.sum(0))]
    owners = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    row, owner = np.concatenate(rows), np.concatenate(owners)
    order = np.lexsort((row, owner))
    return np.split(row[order], np.cumsum(counts.sum(1))[:-1])


def rows_of(values: Array, column: Array) -> list[Array]:
    """The rows of a column, ascending, that have each of the ``values``, which are sorted."""
    place = np.minimum(np.searchsorted(values, column), len(values) - 1)
    known = np.flatnonzero(values[place] == column)
    place = place[known]
    return np.split(known[np.argsort(place, kind="stable")], np.cumsum(np.bincount(place, minlength=len(values)))[:-1])


def whole_groups(groups: Array, counts: Sequence[int], rng: np.random.Generator, least: int = 0) -> list[Array]:
    """Draw disjoint parts of about ``counts`` rows, and the rest; the rows of a group are all in one of these.

    Whole groups are drawn, of the group (N,) of each row, and each part ends where its size comes closest to what was
    asked for; groups of one row each give the exact counts. Each part and the rest have at least ``least`` groups, of
    which there must be so many. Rows are ascending.

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
    """Draw about a share, below 1, of the rows of each stratum (N,): its number is rounded, and never all; ascending.

    >>> len(of_each_stratum(np.repeat([3, 5, 6], [20, 10, 1]), 0.5, np.random.default_rng(0)))
    15
    """
    _, of, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    order = rng.permutation(len(of))
    order = order[np.argsort(of[order], kind="stable")]
    counts = np.minimum(np.rint(sizes * share).astype(np.int64), sizes - 1)
    place = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(order[place < np.repeat(counts, sizes)])


def hashed_share(
    keys: Sequence[str],
    clients: Sequence[Hashable],
    classes: Sequence[Iterable[Hashable]],
    share: float,
    seed: int,
    known: Mapping[str, bool] | None = None,
    leave: bool = False,
) -> Array:
    """Choose about a share of the rows, each by its own key: whatever is added or removed, the others stay.

    A row is chosen if the hash of its key and of the seed, as a number from 0 to 1, is below the share. Rows of one key
    stay together. Other rows count in two cases alone, where there are few. Nothing is chosen whole, neither a client
    nor its part of a class, if this has two keys: the highest number stays. And of a client, or of its part of a class
    if two are expected of it, the lowest is chosen if none was.

    Args:
        keys: The key of each row.
        clients: The client of each row.
        classes: The classes of each row, if there are any.
        share: Above 0 and below 1.
        seed: Another seed, another choice.
        known: Keys that are chosen, or not, whatever their hash is.
        leave: Nor choose a class of all clients whole, even if it has one key.

    Returns:
        The rows, ascending.

    >>> hashed_share(["a", "b", "c", "d", "a"], [0] * 5, [[]] * 5, 0.4, seed=0).tolist()
    [2]
    >>> hashed_share(["a", "c", "d", "e"], [0] * 4, [[]] * 4, 0.4, seed=0).tolist()
    [1, 3]
    """
    known = known or {}
    inside: dict[str, set[tuple[Hashable, ...]]] = defaultdict(set)
    for key, client, own in zip(keys, clients, classes, strict=True):
        inside[key] |= {("client", client), *(("part", client, one) for one in own)}
        inside[key] |= {("class", one) for one in own if leave}
    places = {key: derive_seed(seed, f"share/{key}") / 2**128 for key in inside}
    left = Counter(stratum for strata in inside.values() for stratum in strata)  # keys of each that are not chosen
    without = {stratum for stratum, size in left.items() if stratum[0] == "client" or share * size >= 2}
    left.update(stratum for stratum, size in list(left.items()) if stratum[0] == "part" and size == 1)
    chosen = set[str]()

    def choose(key: str) -> None:
        if all(left[stratum] > 1 for stratum in inside[key]):
            left.subtract(inside[key])
            without.difference_update(inside[key])
            chosen.add(key)

    for key in sorted(inside, key=lambda key: (key not in known, places[key])):
        if known.get(key, places[key] < share):
            choose(key)
    for key in sorted(inside, key=lambda key: (key in known, places[key])):
        if without & inside[key]:
            choose(key)
    return np.flatnonzero([key in chosen for key in keys])
