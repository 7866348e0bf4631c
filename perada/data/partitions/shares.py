# SPDX-License-Identifier: Apache-2.0
"""Shares of a set: drawn at random, chosen by hashes, or apportioned to clients."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from perada.core.seeding import derive_seed

Array = np.ndarray[Any, Any]


def check_enough(num_samples: int, num_clients: int, minimum: int) -> None:
    """Raise a ValueError if there are too few samples to give every client ``minimum`` of them."""
    if num_samples < num_clients * minimum:
        raise ValueError(
            f"{num_clients} clients with at least {minimum} training samples each need {num_clients * minimum}, got "
            f"{num_samples}: lower num_clients or the minimum, or raise train_limit"
        )


def apportion(total: int, shares: Array, rng: np.random.Generator) -> Array:
    """Divide samples among M clients by their shares, each rounded up or down at random without bias.

    Rounding the running sum, shifted by one random offset, keeps the sum exact (systematic sampling).

    Args:
        total: Number of samples.
        shares: Share (M,) of each client; they sum to at most 1.
        rng: Source of the offset.

    Returns:
        Number (M,) of samples of each client, within 1 of ``total * shares``.

    >>> apportion(10, np.array([0.25, 0.5, 0.25]), np.random.default_rng(0)).sum()
    np.int64(10)
    """
    # In floating point, shares that should sum to 1 may be off in the last digits, and floor() would lose a sample.
    running_total = np.round(np.cumsum(shares) * total, 6)
    offset = rng.random()
    return np.diff(np.floor(running_total + offset), prepend=0).astype(np.int64)


def split_evenly(total: int, num_parts: int, rng: np.random.Generator) -> Array:
    """Divide samples into P parts whose sizes differ by at most one; which parts are larger is random.

    Args:
        total: Number of samples.
        num_parts: P.
        rng: Source of the draw.

    Returns:
        Sizes (P,) of the parts.

    >>> sorted(split_evenly(8, 3, np.random.default_rng(0)).tolist())
    [2, 3, 3]
    """
    has_extra = np.arange(num_parts) < total % num_parts
    sizes = total // num_parts + has_extra
    return rng.permutation(sizes).astype(np.int64)


def raise_to_minimum(
    class_counts: Array,
    minimum: int,
    preference: Array,
    spare: Array | None = None,
    keep: int = 0,
) -> Array:
    """Move samples between clients so that each has at least ``minimum``.

    A client with too few samples receives some of the classes that it prefers: first unassigned samples, then those of
    the client that can give most of the class. The caller makes sure that there are enough samples.

    Args:
        class_counts: Number (M, K) of samples of each of M clients and K classes. Not modified.
        minimum: Smallest number of samples that a client may have afterwards.
        preference: Preference (M, K) of each client for each class; classes are tried from the highest to the lowest.
        spare: Number (K,) of unassigned samples of each class; None if all are assigned.
        keep: Number of samples of each class that a client never gives away.

    Returns:
        The new counts (M, K).

    >>> raise_to_minimum(np.array([[0, 0], [3, 2]]), 1, np.array([[0.1, 0.2], [1, 1]])).tolist()
    [[0, 1], [3, 1]]
    """
    class_counts = class_counts.copy()
    totals = class_counts.sum(1)
    if spare is None:
        spare = np.zeros(class_counts.shape[1], dtype=np.int64)
    spare = spare.copy()
    offers_by_class = _collect_offers(class_counts, minimum, keep)
    for client in np.flatnonzero(totals < minimum):
        preferred_classes = np.argsort(-preference[client], kind="stable")
        for k in preferred_classes:
            needed = minimum - totals[client]
            received = min(needed, spare[k])
            spare[k] -= received
            while received < needed and offers_by_class[k]:
                negative_offer, donor = heapq.heappop(offers_by_class[k])
                available = min(class_counts[donor, k] - keep, totals[donor] - minimum)
                transferred = 0
                # What a client can give only ever decreases. If it has given samples since it made this offer, it may
                # no longer be the largest donor: its lower offer goes back into the heap, and the next one is tried.
                if available == -negative_offer:
                    transferred = min(needed - received, available)
                class_counts[donor, k] -= transferred
                totals[donor] -= transferred
                received += transferred
                if available > transferred:
                    heapq.heappush(offers_by_class[k], (transferred - available, donor))
            class_counts[client, k] += received
            totals[client] += received
            if totals[client] == minimum:
                break
    return class_counts


def _collect_offers(class_counts: Array, minimum: int, keep: int) -> list[list[tuple[int, int]]]:
    """Return a heap of offers for each class, the largest offer first.

    Args:
        class_counts: Number (M, K) of samples of each client and class.
        minimum: Smallest number of samples that a client may have afterwards.
        keep: Number of samples of each class that a client never gives away.

    Returns:
        A heap of ``(-offer, client)`` for each class. Offers are negative because ``heapq`` pops the smallest entry.
    """
    surplus = class_counts.sum(1) - minimum
    can_give = np.minimum(class_counts - keep, surplus[:, None])
    heaps = []
    for column in can_give.T.tolist():
        offers = [(-offer, client) for client, offer in enumerate(column) if offer > 0]
        # A sorted list is a valid heap.
        heaps.append(sorted(offers))
    return heaps


def assign_samples(sample_classes: Array, sample_counts: Array, rng: np.random.Generator) -> list[Array]:
    """Draw at random which samples each client gets, given how many of each class it gets.

    Args:
        sample_classes: Class (N,) of each sample, from 0 to K − 1.
        sample_counts: Number (M, K) of samples of each client and class.
        rng: Source of the draws.

    Returns:
        For each of the M clients the indices of its samples, ascending.

    >>> parts = assign_samples(np.array([0, 1, 0]), np.array([[2, 0], [0, 1]]), np.random.default_rng(0))
    >>> [rows.tolist() for rows in parts]
    [[0, 2], [1]]
    """
    drawn_rows = []
    drawn_owners = []
    for k, class_counts in enumerate(sample_counts.T):
        rows_of_class = rng.permutation(np.flatnonzero(sample_classes == k))
        drawn_rows.append(rows_of_class[: class_counts.sum()])
        drawn_owners.append(np.repeat(np.arange(len(sample_counts)), class_counts))
    rows = np.concatenate(drawn_rows)
    owners = np.concatenate(drawn_owners)
    # The last key of lexsort is the primary one: by client, and within a client by row.
    order = np.lexsort((rows, owners))
    client_ends = np.cumsum(sample_counts.sum(1))
    return np.split(rows[order], client_ends[:-1])


def rows_by_value(distinct_values: Array, column_values: Array) -> list[Array]:
    """Find the rows that hold each of some values.

    Args:
        distinct_values: The values (V,), sorted and unique.
        column_values: Value (N,) of each row.

    Returns:
        For each value the indices of its rows, ascending. Rows with another value are in none of the lists.
    """
    # A value above all of `values` would be inserted after the last one, an index that does not exist.
    value_index = np.minimum(np.searchsorted(distinct_values, column_values), len(distinct_values) - 1)
    matching_rows = np.flatnonzero(distinct_values[value_index] == column_values)
    value_index = value_index[matching_rows]
    sorted_rows = matching_rows[np.argsort(value_index, kind="stable")]
    sizes = np.bincount(value_index, minlength=len(distinct_values))
    return np.split(sorted_rows, np.cumsum(sizes)[:-1])


def split_by_group(
    groups: Array, part_sizes: Sequence[int], rng: np.random.Generator, min_groups: int = 0
) -> list[Array]:
    """Draw disjoint parts of about ``part_sizes`` rows without splitting a group.

    Each part ends at the group where its size is closest to the requested one, so groups of one row give the exact
    counts.

    Args:
        groups: Group (N,) of each row.
        part_sizes: Requested number of rows of each part.
        rng: Source of the draw.
        min_groups: Smallest number of groups in each part and in the remainder. The caller makes sure that there are
            enough groups.

    Returns:
        For each part, and last for the remainder, the indices of its rows, ascending.

    >>> [rows.tolist() for rows in split_by_group(np.array([7, 7, 7, 8]), [2], np.random.default_rng(0), min_groups=1)]
    [[0, 1, 2], [3]]
    """
    names, group_index = np.unique(groups, return_inverse=True)
    num_groups = len(names)
    order = rng.permutation(num_groups)
    group_sizes = np.bincount(group_index, minlength=num_groups)
    # The first n groups of the drawn order have running_sizes[n] rows.
    running_sizes = np.concatenate([[0], group_sizes[order].cumsum()])
    # The inverse of the permutation: the place of each group in the drawn order.
    rank_of_group = np.argsort(order)
    rank_of_row = rank_of_group[group_index]
    parts = []
    start = 0
    for i, requested in enumerate(np.cumsum(part_sizes)):
        closest_end = int(np.abs(running_sizes - requested).argmin())
        # Leave enough groups for this part and those before it, and for those after it and the remainder.
        earliest_end = min_groups * (i + 1)
        latest_end = num_groups - min_groups * (len(part_sizes) - i)
        end = min(max(closest_end, earliest_end), latest_end)
        parts.append(np.flatnonzero((rank_of_row >= start) & (rank_of_row < end)))
        start = end
    parts.append(np.flatnonzero(rank_of_row >= start))
    return parts


def stratified_sample(strata: Array, share: float, rng: np.random.Generator) -> Array:
    """Draw a share of the rows of each stratum, rounded to whole rows and never all of them.

    Args:
        strata: Stratum (N,) of each row.
        share: Share to draw, below 1.
        rng: Source of the draw.

    Returns:
        Indices of the drawn rows, ascending.

    >>> len(stratified_sample(np.repeat([3, 5, 6], [20, 10, 1]), 0.5, np.random.default_rng(0)))
    15
    """
    _, stratum_index, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    num_rows = len(stratum_index)
    # A stable sort by stratum keeps the random order of the permutation within each stratum.
    order = rng.permutation(num_rows)
    order = order[np.argsort(stratum_index[order], kind="stable")]
    starts = np.cumsum(sizes) - sizes
    rank_in_stratum = np.arange(num_rows) - np.repeat(starts, sizes)
    # The first rows of each stratum are drawn.
    rounded_counts = np.rint(sizes * share).astype(np.int64)
    counts = np.minimum(rounded_counts, sizes - 1)
    is_drawn = rank_in_stratum < np.repeat(counts, sizes)
    return np.sort(order[is_drawn])


Stratum = tuple[Hashable, ...]
"""``("client", client)``, ``("part", client, class)`` for a client's rows of one class, or ``("class", class)``."""


def _strata_of_keys(
    keys: Sequence[str],
    clients_of_rows: Sequence[Hashable],
    classes_of_rows: Sequence[Iterable[Hashable]],
    protect_classes: bool,
) -> dict[str, set[Stratum]]:
    """Return the strata that each key's rows belong to; the arguments are those of :func:`hashed_share`."""
    strata_of: dict[str, set[Stratum]] = defaultdict(set)
    for key, client, classes_of_row in zip(keys, clients_of_rows, classes_of_rows, strict=True):
        strata_of[key].add(("client", client))
        for name in classes_of_row:
            strata_of[key].add(("part", client, name))
            if protect_classes:
                strata_of[key].add(("class", name))
    return strata_of


def hashed_share(
    keys: Sequence[str],
    clients_of_rows: Sequence[Hashable],
    classes_of_rows: Sequence[Iterable[Hashable]],
    share: float,
    seed: int,
    preset: Mapping[str, bool] | None = None,
    protect_classes: bool = False,
) -> Array:
    """Choose about a share of the rows by hashes, so that adding or removing rows does not change the choice of others.

    A row is chosen if the hash of its key and of the seed, as a number from 0 to 1, is below the share. Rows with the
    same key stay together. There are two exceptions, which concern clients with few rows:

    - Never are all rows of a client chosen, nor all its rows of a class if these have at least two keys: the key with
      the highest hash is left out.
    - If no row of a client would be chosen, or none of its rows of a class of which two are expected, the key with the
      lowest hash is.

    Args:
        keys: Key of each row.
        clients_of_rows: Client of each row.
        classes_of_rows: Classes of each row, possibly none.
        share: Share to choose, above 0 and below 1.
        seed: Seed of the hashes.
        preset: Keys that are chosen (True) or not (False) regardless of their hashes, unless an exception applies.
        protect_classes: Also never choose all rows of a class over all clients, even if they share one key.

    Returns:
        Indices of the chosen rows, ascending.

    >>> hashed_share(["a", "b", "c", "d", "a"], [0] * 5, [[]] * 5, 0.4, seed=0).tolist()
    [2]
    >>> hashed_share(["a", "c", "d", "e"], [0] * 4, [[]] * 4, 0.4, seed=0).tolist()
    [1, 3]
    """
    preset = preset or {}
    strata_of = _strata_of_keys(keys, clients_of_rows, classes_of_rows, protect_classes)
    hashes = {key: derive_seed(seed, f"share/{key}") / 2**128 for key in strata_of}

    size_of_stratum: Counter[Stratum] = Counter()
    for strata in strata_of.values():
        size_of_stratum.update(strata)
    # These strata must have a chosen key, and have none yet.
    unrepresented: set[Stratum] = set()
    for stratum, size in size_of_stratum.items():
        if stratum[0] == "client" or share * size >= 2:
            unrepresented.add(stratum)
    # Keys of each stratum that are not chosen yet are counted, since the last one must be left out.
    remaining = size_of_stratum.copy()
    for stratum, size in size_of_stratum.items():
        # A client's part of a class with a single key may be chosen entirely.
        if stratum[0] == "part" and size == 1:
            remaining[stratum] = 2
    chosen_keys: set[str] = set()

    def choose_if_possible(key: str) -> None:
        """Choose a key unless one of its strata would have none left."""
        if all(remaining[stratum] > 1 for stratum in strata_of[key]):
            remaining.subtract(strata_of[key])
            unrepresented.difference_update(strata_of[key])
            chosen_keys.add(key)

    # Keys are taken by ascending hash. Preset keys come first here, so that they are followed, and last below, so
    # that they are overruled only where no other key is left.
    for key in sorted(strata_of, key=lambda key: (key not in preset, hashes[key])):
        if preset.get(key, hashes[key] < share):
            choose_if_possible(key)
    for key in sorted(strata_of, key=lambda key: (key in preset, hashes[key])):
        if unrepresented & strata_of[key]:
            choose_if_possible(key)
    return np.flatnonzero([key in chosen_keys for key in keys])
