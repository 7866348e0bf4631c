# SPDX-License-Identifier: Apache-2.0
"""What a partition returns, checked before the data are divided by it; every message names the class."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from perada.data.partitions.apportion import Array
from perada.data.partitions.base import Assignment, Partition, Split

_RETURN = "return two lists, of the clients' training rows and of their test rows, each with one integer array a client"


def divide(partition: Partition, train: Split, test: Split, seed: int) -> Assignment:
    """Each client's rows of both splits, as ``partition`` gives them.

    Raises:
        ValueError: If ``split`` takes other arguments, returns something else than rows for each client, a row that
            there is not, or one twice; or if it refuses the data.
        TypeError: If rows are no whole numbers.
    """
    who = f"{type(partition).__name__}.split"
    try:
        inspect.signature(partition.split).bind(train, test, seed)
    except TypeError as error:
        raise ValueError(
            f"{who} is called with train, test and seed: {error}; define split(self, train, test, seed)"
        ) from None
    given = partition.split(train, test, seed)
    if not isinstance(given, tuple | list) or len(given) != 2:
        what = f"{len(given)} values" if isinstance(given, tuple | list) else f"one {type(given).__name__}"
        raise ValueError(f"{who} returned {what}; {_RETURN}")
    rows = [
        _rows(who, name, own, len(of)) for name, own, of in zip(("training", "test"), given, (train, test), strict=True)
    ]
    if len(rows[1]) not in (0, len(rows[0])):
        raise ValueError(
            f"{who} returned rows of {len(rows[0])} clients for training and of {len(rows[1])} for testing; give each "
            "client an entry in both lists, an empty array where it has no test rows"
        )
    return rows[0], rows[1]


def _rows(who: str, part: str, given: Any, size: int) -> list[Array]:  # noqa: ANN401  # whatever a partition gives
    """The rows of each client, of which there are ``size``."""
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str):
        raise ValueError(f"{who} returned the {part} rows as {type(given).__name__}; {_RETURN}")
    clients = [np.asarray(own) for own in given]
    for client, own in enumerate(clients):
        if own.ndim != 1:
            what = f"the number {own.item()!r}" if own.ndim == 0 else f"an array of shape {own.shape}"
            raise ValueError(
                f"{who} returned {what} as the {part} rows of client {client}, which are no list; {_RETURN}"
            )
        if len(own) and not np.issubdtype(own.dtype, np.integer):
            mask = " (np.flatnonzero makes rows of a mask)" if own.dtype == bool else ""
            raise TypeError(f"{who} returned {part} rows of client {client} as {own.dtype}; give whole numbers{mask}")
        wrong = own[(own < 0) | (own >= size)]
        if len(wrong):
            raise ValueError(
                f"{who} gave client {client} the {part} row {wrong[0]}, and there are {size}, from 0; give "
                f"positions in {'train' if part == 'training' else 'test'}.labels, not values of index"
            )
    clients = [own.astype(np.int64) for own in clients]
    flat = np.concatenate([*clients, np.array([], np.int64)])
    if len(np.unique(flat)) < len(flat):
        row = int(np.flatnonzero(np.bincount(flat) > 1)[0])
        who_has = [client for client, own in enumerate(clients) for _ in range(int((own == row).sum()))]
        first, second = who_has[:2]
        whom = f"client {first} twice" if first == second else f"clients {first} and {second}"
        raise ValueError(f"{who} gave {whom} the {part} row {row}; give each row to one client, once")
    return clients
