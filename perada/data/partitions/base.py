# SPDX-License-Identifier: Apache-2.0
"""The base of partitions, and checks of what they give; those by label are in :mod:`perada.data.partitions.by_label`.

Shape suffixes: M clients, K classes, N samples.
"""

import inspect
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perada.core.checks import Options, check_name, check_whole
from perada.core.files import check_sealed
from perada.core.seeding import derive_seed
from perada.data.partitions.shares import Array, check_enough

Assignment = tuple[list[Array], list[Array]]


class _Columns(dict[str, Array]):
    """Columns by name; one that there is not is refused in words."""

    def __init__(self, columns: Mapping[str, Array], owner: str) -> None:
        super().__init__(columns)
        self._owner = owner

    def __missing__(self, name: str) -> Array:
        raise ValueError(
            f"{self._owner} has no column {name!r} to divide by: it has {sorted(self) or 'none'}; an ImageFolder with "
            "domains: true and OfficeHome have 'domain', CheXpert has 'category', OpenImage has 'client', and so have "
            "Images with {client} in its layout and ImageTable"
        )


@dataclass(frozen=True)
class Split:
    """What a partition sees of one split. Rows are positions in ``labels``, ``index`` and each column alike."""

    labels: Array  # (N,) classes, or (N, K) several labels, whose combinations then count as the classes
    index: Array  # (N,) position of each sample in its dataset
    columns: Mapping[str, Array] = field(default_factory=dict)  # further facts (N,) by name
    name: str = "the dataset"  # in messages

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _Columns(self.columns, self.name))

    def __len__(self) -> int:
        return len(self.labels)


class Partition(Options, ABC):
    """Divides a training set and a test set among clients."""

    @abstractmethod
    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Choose each client's samples; the test set may have none.

        Returns:
            For each client the rows of ``train``, and those of ``test``: integers from 0 to below ``len(train)`` and
            ``len(test)``, every row at most once. Both lists have an entry for each client, in the same order.

        Raises:
            ValueError: If the data cannot be divided so.
        """

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Names of the clients that :meth:`split` makes of ``train``, in their order; None where they have none."""
        return None


class IID(Partition):
    """Equal shares at random.

    Args:
        num_clients: Number of clients M.
    """

    def __init__(self, num_clients: int = 20) -> None:
        check_whole("num_clients", num_clients)
        self.num_clients = num_clients

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Cut a permutation into M parts whose sizes differ by at most one."""
        check_enough(len(train), self.num_clients, 1)
        rng = partition_rng(seed)
        rows = [np.array_split(rng.permutation(len(part)), self.num_clients) for part in (train, test)]
        return rows[0], rows[1]


class ByDomain(Partition):
    """Divides by a column of the dataset, such as the domain of Office-Home or the uploader of OpenImage.

    A client has the test images that have its value in the column; it may have none.

    Args:
        column: Name of the column.
        clients_per_domain: Clients that share each domain, at random and evenly.
    """

    def __init__(self, column: str = "domain", clients_per_domain: int = 1) -> None:
        check_whole("clients_per_domain", clients_per_domain)
        check_name("column", column)
        self.column, self.clients_per_domain = column, clients_per_domain

    def client_names(self, train: Split) -> Sequence[str] | None:
        """The domains; clients that share one are numbered behind it."""
        domains = np.unique(train.columns[self.column]).tolist()
        share = range(self.clients_per_domain)
        return [f"{domain} {one}" if len(share) > 1 else str(domain) for domain in domains for one in share]

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Sort the domains by name, and cut each domain's samples into equal shares."""
        rng = partition_rng(seed)
        division: Assignment = ([], [])
        domains = np.unique(train.columns[self.column])
        of_train = _rows_of(domains, train.columns[self.column])
        for domain, rows in zip(domains, of_train, strict=True):
            if len(rows) < self.clients_per_domain:
                raise ValueError(
                    f"domain {domain} has {len(rows)} samples for {self.clients_per_domain} clients: "
                    "lower clients_per_domain"
                )
        of_test = _rows_of(domains, test.columns[self.column] if len(test) else domains[:0])
        left = len(test) - sum(map(len, of_test))
        if left:
            what = f"{left} of {len(test)} test samples have a {self.column} that no training sample has"
            then = "nobody can be scored" if left == len(test) else "they are left out"
            warnings.warn(f"{what}; {then}", stacklevel=2)
        for both in zip(of_train, of_test, strict=True):
            for part, own in zip(division, both, strict=True):
                part.extend(np.array_split(rng.permutation(own), self.clients_per_domain))
        return division


def _rows_of(values: Array, column: Array) -> list[Array]:
    """The rows of a column, ascending, that have each of the ``values``, which are sorted."""
    place = np.minimum(np.searchsorted(values, column), len(values) - 1)
    known = np.flatnonzero(values[place] == column)
    place = place[known]
    return np.split(known[np.argsort(place, kind="stable")], np.cumsum(np.bincount(place, minlength=len(values)))[:-1])


class FromFile(Partition):
    """The division of an earlier run.

    Args:
        path: The ``partition.json`` that the run wrote.
    """

    def __init__(self, path: str) -> None:
        check_name("path", path)
        self.path = path

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Those of the earlier run."""
        names = json.loads(Path(self.path).read_text()).get("clients")
        return [str(name) for name in names] if isinstance(names, list) else None

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Look up the rows of the recorded positions; the seed is not used."""
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the partition.json in the folder of an earlier run")
        try:
            saved = check_sealed(json.loads(path.read_text(encoding="utf-8")))
            train_of, test_of = saved["train"], saved["test"]
            held = saved.get("client_validation") or [[]] * len(train_of)  # given for training too
            train_of = [[*own, *more] for own, more in zip(train_of, held, strict=True)]
            recorded = [[np.array(own, np.int64).reshape(-1).tolist() for own in part] for part in (train_of, test_of)]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not a partition of a dataset ({error!r}): give another file") from None
        division = [_find(own, part, path) for own, part in zip(recorded, (train, test), strict=True)]
        return division[0], division[1]


def _find(recorded: list[list[int]], samples: Split, path: Path) -> list[Array]:
    """Rows of ``samples`` at the recorded positions of the dataset."""
    row_of = {position: row for row, position in enumerate(samples.index.tolist())}
    for client, positions in enumerate(recorded):
        for position in positions:
            if position not in row_of:
                raise ValueError(
                    f"{path} gives client {client} sample {position}, which is not among the clients' data: "
                    "use the dataset, limits, held-out fractions and seed of the run that wrote it"
                )
    return [np.array([row_of[position] for position in positions], np.int64) for positions in recorded]


def partition_rng(seed: int) -> np.random.Generator:
    """Where a division is drawn from."""
    return np.random.default_rng(derive_seed(seed, "partition"))


_RETURN = "return two lists, of the clients' training rows and of their test rows, each with one integer array a client"


def divide(partition: Partition, train: Split, test: Split, seed: int) -> Assignment:
    """Each client's rows of both splits, as ``partition`` gives them.

    Raises:
        ValueError: If ``split`` takes other arguments, returns something else than rows for each client, a row that
            there is not, or one twice; or if it refuses the data.
        TypeError: If rows are not whole numbers.
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
                f"{who} returned {what} as the {part} rows of client {client}, which are not a list; {_RETURN}"
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
