# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of samples for clients. Shape suffixes: M clients, K classes, N samples."""

import heapq
from typing import Any

import numpy as np

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
