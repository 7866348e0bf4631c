# SPDX-License-Identifier: Apache-2.0
"""Partitions: ways to divide a set of images among clients.

Shape suffixes: M clients, K classes, N samples.
"""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from perada.core.checks import Options, check_integer, check_name, check_number
from perada.core.seeding import derive_seed
from perada.core.text import quoted, value_text
from perada.data.partitions.shares import (
    Array,
    apportion,
    assign_samples,
    check_enough,
    raise_to_minimum,
    rows_by_value,
    split_evenly,
)
from perada.system.digests import check_sealed
from perada.tasks.multi_label import UNKNOWN

Assignment = tuple[list[Array], list[Array]]


class _Columns(dict[str, Array]):
    """Columns by name, with a helpful error for a missing one."""

    def __init__(self, columns: Mapping[str, Array], owner: str) -> None:
        super().__init__(columns)
        self._owner = owner

    def __missing__(self, name: str) -> Array:
        raise ValueError(
            f"{self._owner} has no column {name!r} to divide by: it has {quoted(sorted(self))}; an ImageFolder with "
            "domains: true and OfficeHome have 'domain', CheXpert has 'category', and OpenImage and Images with "
            "{client} in its layout have 'client'. For a column of an ImageTable or HuggingFace, set its option "
            f"client={name!r}, and divide by 'client'"
        )


@dataclass(frozen=True)
class Split:
    """What a partition sees of one split. A row is a position in ``labels``, ``index`` and each column alike.

    Attributes:
        labels: Classes (N,), several labels (N, K), whose combinations then count as the classes, or masks (N, H, W).
        index: Position (N,) of each sample in its dataset.
        columns: Further facts (N,) about the samples, by name.
        name: Name of the dataset in messages.
    """

    labels: Array
    index: Array
    columns: Mapping[str, Array] = field(default_factory=dict)
    name: str = "the dataset"

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _Columns(self.columns, self.name))

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Array) -> "Split":
        """Return the samples at ``rows``, in this order, as a split."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Split(self.labels[rows], self.index[rows], columns, self.name)


class Partition(Options, ABC):
    """Divides a training set and a test set among clients."""

    @abstractmethod
    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Choose each client's samples; the test set may have none.

        Returns:
            The rows of ``train`` and of ``test`` of each client: integers from 0 to below ``len(train)`` and
            ``len(test)``, every row at most once. Both lists have one entry per client, in the same order.

        Raises:
            ValueError: If the data cannot be divided this way.
        """

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Return the names of the clients in the order of :meth:`split`, or None if they have no names."""
        return None


def partition_rng(seed: int) -> np.random.Generator:
    """Return the generator that a partition draws from."""
    return np.random.default_rng(derive_seed(seed, "partition"))


@dataclass(repr=False, eq=False)
class IID(Partition):
    """Divide the samples at random into shares of equal size.

    Args:
        num_clients: Number of clients M.

    >>> IID(num_clients=5)
    IID(num_clients=5)
    """

    num_clients: int = 20

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Cut a permutation into M parts whose sizes differ by at most one."""
        check_enough(len(train), self.num_clients, 1)
        rng = partition_rng(seed)
        train_rows = np.array_split(rng.permutation(len(train)), self.num_clients)
        test_rows = np.array_split(rng.permutation(len(test)), self.num_clients)
        return train_rows, test_rows


@dataclass(repr=False, eq=False)
class ByDomain(Partition):
    """Divide by a column of the dataset, such as the domain of Office-Home or the uploader of OpenImage.

    A client gets the test images with its value in the column, which may be none.

    Args:
        column: Name of the column.
        clients_per_domain: Number of clients that share each domain, at random and evenly.
        within: Instead of ``clients_per_domain``: a partition that divides each domain among its clients, such as
            ``Dirichlet(num_clients=2)``.

    >>> ByDomain("scanner")
    ByDomain(column='scanner', clients_per_domain=1, within=None)
    """

    column: str = "domain"
    clients_per_domain: int = 1
    within: Partition | None = None

    def __post_init__(self) -> None:
        check_integer("clients_per_domain", self.clients_per_domain)
        check_name("column", self.column)
        if self.within is None:
            return
        if self.clients_per_domain != 1:
            raise ValueError(
                f"clients_per_domain={self.clients_per_domain} and within={self.within} are mutually exclusive: leave "
                "one out"
            )
        if not isinstance(getattr(self.within, "num_clients", None), int):
            raise ValueError(
                f"within must be a partition with num_clients, such as Dirichlet(num_clients=2, alpha=0.3), got "
                f"{value_text(self.within)}"
            )

    @property
    def _num_clients_of_domain(self) -> int:
        """Return the number of clients that share a domain."""
        if self.within is None:
            return self.clients_per_domain
        return cast(int, vars(self.within)["num_clients"])

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Return the domains as names. Clients that share a domain get a number after its name."""
        domains = np.unique(train.columns[self.column]).tolist()
        if self._num_clients_of_domain == 1:
            return [str(domain) for domain in domains]
        names = []
        for domain in domains:
            names += [f"{domain} {number}" for number in range(self._num_clients_of_domain)]
        return names

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Sort the domains by name, and divide the samples of each domain among its clients."""
        domains = np.unique(train.columns[self.column])
        train_rows = rows_by_value(domains, train.columns[self.column])
        self._check_sizes(domains, train_rows)
        test_column = test.columns[self.column] if len(test) else domains[:0]
        test_rows = rows_by_value(domains, test_column)
        self._warn_of_unknown_domains(len(test), sum(len(rows) for rows in test_rows))

        train_shares: list[Array] = []
        test_shares: list[Array] = []
        rng = partition_rng(seed)
        for number, (domain_train, domain_test) in enumerate(zip(train_rows, test_rows, strict=True)):
            if self.within is None:
                train_shares += np.array_split(rng.permutation(domain_train), self.clients_per_domain)
                test_shares += np.array_split(rng.permutation(domain_test), self.clients_per_domain)
                continue
            # Each domain has its own seed, or all of them would be divided by the same draws.
            domain_seed = derive_seed(seed, "within", number)
            within_train, within_test = self.within.split(train.rows(domain_train), test.rows(domain_test), domain_seed)
            # The partition counts rows within the domain.
            train_shares += [domain_train[rows] for rows in within_train]
            test_shares += [domain_test[rows] for rows in within_test]
        return train_shares, test_shares

    def _check_sizes(self, domains: Array, train_rows: Sequence[Array]) -> None:
        """Raise a ValueError if a domain has fewer training samples than clients."""
        for domain, rows in zip(domains, train_rows, strict=True):
            if len(rows) < self._num_clients_of_domain:
                option = "clients_per_domain" if self.within is None else "num_clients of within"
                raise ValueError(
                    f"domain {domain} has {len(rows)} samples for {self._num_clients_of_domain} clients: lower {option}"
                )

    def _warn_of_unknown_domains(self, num_test: int, num_assigned: int) -> None:
        """Warn about test samples whose domain has no training samples."""
        num_unassigned = num_test - num_assigned
        if not num_unassigned:
            return
        consequence = "they are left out"
        if num_unassigned == num_test:
            consequence = "no client can be evaluated"
        warnings.warn(
            f"{num_unassigned} of {num_test} test samples have a {self.column} that no training sample has; "
            f"{consequence}",
            stacklevel=3,
        )


@dataclass(repr=False, eq=False)
class FromFile(Partition):
    """Repeat the partition of an earlier run.

    Args:
        path: The ``partition.json`` that the run wrote.

    >>> FromFile("partition.json")
    FromFile(path='partition.json')
    """

    path: str

    def __post_init__(self) -> None:
        check_name("path", self.path)

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Return the names of the earlier run's clients, if it has any."""
        names = json.loads(Path(self.path).read_text()).get("clients")
        return [str(name) for name in names] if isinstance(names, list) else None

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Look up the rows of the recorded positions; the seed is not used."""
        if not Path(self.path).is_file():
            raise FileNotFoundError(
                f"{self.path} does not exist: set path to the partition.json in the folder of an earlier run"
            )
        try:
            record = check_sealed(json.loads(Path(self.path).read_text(encoding="utf-8")))
            if not isinstance(record, dict):
                raise TypeError("it has no entries")
            # The validation images were held out of the training images of this partition, and are again.
            held_out = record.get("client_validation") or [[]] * len(record["train"])
            train_positions = []
            for trained, validation in zip(record["train"], held_out, strict=True):
                train_positions.append(_as_integers([*trained, *validation]))
            test_positions = [_as_integers(positions) for positions in record["test"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"it has no entry {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{self.path} is not a partition of a dataset ({reason}): use a different file") from None
        return self._rows_of(train_positions, train), self._rows_of(test_positions, test)

    def _rows_of(self, positions: Sequence[list[int]], split: Split) -> list[Array]:
        """Return the row of each client's positions in the split."""
        row_of_position = {position: row for row, position in enumerate(split.index.tolist())}
        rows = []
        for client, client_positions in enumerate(positions):
            for position in client_positions:
                if position not in row_of_position:
                    raise ValueError(
                        f"{self.path} assigns sample {position} to client {client}, but it is not among the clients' "
                        "data: use the dataset, limits, held-out fractions and seed of the run that wrote it"
                    )
            rows.append(np.array([row_of_position[position] for position in client_positions], np.int64))
        return rows


def _as_integers(column_values: Sequence[object]) -> list[int]:
    """Convert a list from a JSON file; raises NumPy's error for anything but integers."""
    integers: list[int] = np.array(column_values, np.int64).reshape(-1).tolist()
    return integers


class LabelPartition(Partition):
    """Base class of partitions that only decide how many samples of each class every client gets."""

    num_clients: int
    merge_below: int = 0
    column: str | None = None

    @abstractmethod
    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Choose the number of training samples (M, K) of each client and class.

        Args:
            sizes: Training samples (K,) of each class that occurs, all at least 1.
            rng: Source of the draws.
        """

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Divide the samples of each class according to :meth:`counts`.

        A client gets the same share of the test samples of a class as of the training samples. It gets at least one
        test sample if there are as many as clients.
        """
        check_enough(len(train), self.num_clients, 1)
        rng = partition_rng(seed)
        train_labels, test_labels = self._read_labels(train, test)
        classes, test_classes = categories(train_labels, test_labels, self.merge_below)
        num_classes = int(max(classes.max(), test_classes.max(initial=0))) + 1
        sizes = np.bincount(classes, minlength=num_classes)
        test_sizes = np.bincount(test_classes, minlength=num_classes)

        present = np.flatnonzero(sizes)
        counts = np.zeros((self.num_clients, num_classes), dtype=np.int64)
        counts[:, present] = self.counts(sizes[present], rng)
        shares = counts / np.maximum(sizes, 1)
        test_counts = np.stack([apportion(size, shares[:, k], rng) for k, size in enumerate(test_sizes)], axis=1)
        if len(test) >= self.num_clients:
            unassigned = test_sizes - test_counts.sum(0)
            test_counts = raise_to_minimum(test_counts, 1, counts, unassigned)
        train_rows = assign_samples(classes, counts, rng)
        test_rows = assign_samples(test_classes, test_counts, rng)
        return train_rows, test_rows

    def _read_labels(self, train: Split, test: Split) -> tuple[Array, Array]:
        """Return what each split is divided by: its labels (N,) or (N, K), or the numbered values (N, 1) of a column.

        The second axis makes :func:`categories` merge rare values of a column as it merges combinations of labels.
        """
        if self.column is None:
            if train.labels.ndim > 2:
                raise ValueError(
                    f"{type(self).__name__} divides images by their class, but their labels are masks; choose IID, "
                    "QuantitySkew, or ByDomain with a column"
                )
            if _are_numbers(train.labels):
                raise ValueError(
                    f"{type(self).__name__} divides images by their class, but their labels are numbers; choose IID, "
                    "QuantitySkew, or a column of the table (column=)"
                )
            return train.labels, test.labels
        # An empty split may have no columns.
        values = np.concatenate([split.columns[self.column] for split in (train, test) if len(split)])
        _, numbers = np.unique(values, return_inverse=True)
        numbers = numbers.reshape(-1, 1)
        return numbers[: len(train)], numbers[len(train) :]


def _are_numbers(labels: Array) -> bool:
    """Return whether labels are numbers to predict, and neither classes nor zeros, ones and unknown labels."""
    if not np.issubdtype(labels.dtype, np.floating):
        return False
    known_labels = labels[~np.isnan(labels)]
    return labels.ndim == 1 or not np.isin(known_labels, (0, 1, UNKNOWN)).all()


@dataclass(repr=False, eq=False)
class Dirichlet(LabelPartition):
    """Divide each class among the clients in proportions drawn from a Dirichlet distribution (Yurochkin et al., 2019).

    The smaller ``alpha``, the fewer classes a client has, and the more unequal the clients' sizes. See
    :class:`BalancedDirichlet` for clients of equal size, and :class:`QuantitySkew` for sizes that differ while the
    classes do not. The source is `Bayesian Nonparametric Federated Learning of Neural Networks
    <https://arxiv.org/abs/1905.12022>`_ (ICML 2019), section 4.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        min_per_client: Minimum number of training samples of a client. Missing ones are taken from the largest holders
            of the classes that the client has most of.
        min_per_class: Minimum number of training samples of every class at every client.
        merge_below: For samples with several labels, or with ``column``: combinations or values with fewer training
            samples are merged into one class.
        column: Column of the dataset whose values replace the classes, such as ``category`` of CheXpert; null for the
            labels.

    Raises:
        ValueError: If an option is out of range.

    >>> Dirichlet(num_clients=5, alpha=0.3)
    Dirichlet(num_clients=5, alpha=0.3, min_per_client=2, min_per_class=0, merge_below=0, column=None)
    """

    num_clients: int = 20
    alpha: float = 0.1
    min_per_client: int = 2
    min_per_class: int = 0
    merge_below: int = 0
    column: str | None = None

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("alpha", self.alpha, gt=0, hint="0.1 is very unequal, 100 even")
        check_integer("min_per_client", self.min_per_client)
        check_integer("min_per_class", self.min_per_class, 0)
        check_integer("merge_below", self.merge_below, 0)
        check_name("column", self.column, optional=True)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Draw the proportions, round them to whole samples, and enforce the minimum."""
        check_enough(int(sizes.sum()), self.num_clients, self.min_per_client)
        _check_min_per_class(sizes, self.num_clients, self.min_per_class)
        proportions = rng.dirichlet(np.full(self.num_clients, self.alpha), len(sizes)).T
        divisible = sizes - self.num_clients * self.min_per_class
        columns = [apportion(total, proportions[:, k], rng) for k, total in enumerate(divisible)]
        counts = self.min_per_class + np.stack(columns, axis=1)
        return raise_to_minimum(counts, self.min_per_client, proportions * sizes, keep=self.min_per_class)


def _check_min_per_class(sizes: Array, num_clients: int, min_per_class: int) -> None:
    """Raise a ValueError if the smallest of the classes, of ``sizes`` (K,), is too small for the minimum."""
    if sizes.min() < num_clients * min_per_class:
        raise ValueError(
            f"the smallest class has {sizes.min()} samples, too few for min_per_class={min_per_class} on "
            f"{num_clients} clients: lower one of the two"
        )


@dataclass(repr=False, eq=False)
class BalancedDirichlet(LabelPartition):
    """Give all clients the same number of samples, in class proportions drawn from a Dirichlet distribution.

    The proportions of a client are drawn from Dir(alpha · p), where p (K,) are the shares of the classes in the
    training set (Hsu, Qi and Brown, 2019, `Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification <https://arxiv.org/abs/1909.06335>`_, section 3). The smaller ``alpha``, the fewer classes a
    client has; the larger, the closer it is to p. Samples are drawn without replacement: once a class is used up, the
    proportions of the clients that follow are those of the other classes, scaled to sum to 1.

    The proportion of a class has variance p · (1 - p) / (alpha + 1). ``alpha`` is the sum of the distribution's K
    parameters here, and each of its M parameters in :class:`Dirichlet`, so equal values do not mean equal
    heterogeneity.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        samples_per_client: Training samples of each client; null for the most that the training set allows, N // M.
            The remaining samples are not used.
        merge_below: For samples with several labels, or with ``column``: combinations or values with fewer training
            samples are merged into one class.
        column: Column of the dataset whose values replace the classes; null for the labels.
        min_per_class: Minimum number of training samples of every class at every client, regardless of its proportions.
            They are part of its samples.

    Raises:
        ValueError: If an option is out of range.

    >>> BalancedDirichlet(num_clients=5, alpha=0.3)
    BalancedDirichlet(num_clients=5, alpha=0.3, samples_per_client=None, merge_below=0, column=None, min_per_class=0)
    """

    num_clients: int = 20
    alpha: float = 1.0
    samples_per_client: int | None = None
    merge_below: int = 0
    column: str | None = None
    min_per_class: int = 0

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("alpha", self.alpha, gt=0, hint="0.1 is about one class per client, 100 nearly even")
        check_integer("samples_per_client", self.samples_per_client, optional=True)
        check_integer("merge_below", self.merge_below, 0)
        check_integer("min_per_class", self.min_per_class, 0)
        check_name("column", self.column, optional=True)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Draw the class proportions of one client after the other, and take its samples from the remaining ones."""
        total = int(sizes.sum())
        per_client = self.samples_per_client or max(1, total // self.num_clients)
        if self.num_clients * per_client > total:
            raise ValueError(
                f"{self.num_clients} clients of {per_client} training samples each need "
                f"{self.num_clients * per_client}, got {total}: lower num_clients or samples_per_client, or raise "
                "train_limit"
            )
        _check_min_per_class(sizes, self.num_clients, self.min_per_class)
        reserved_per_client = self.min_per_class * len(sizes)
        if reserved_per_client > per_client:
            raise ValueError(
                f"min_per_class={self.min_per_class} of {len(sizes)} classes requires {reserved_per_client} training "
                f"samples, but a client has {per_client}: lower min_per_class, or raise samples_per_client"
            )
        # NumPy rejects a parameter of 0, to which a tiny alpha underflows.
        concentration = np.maximum(self.alpha * sizes / total, np.finfo(np.float64).tiny)
        # The minimum of all clients is reserved first, so that the proportions of others cannot use it up.
        available = sizes - self.num_clients * self.min_per_class
        counts = np.full((self.num_clients, len(sizes)), self.min_per_class, dtype=np.int64)
        for client in range(self.num_clients):
            proportions = rng.dirichlet(concentration)
            drawn = _draw_without_replacement(per_client - reserved_per_client, proportions, available, rng)
            counts[client] += drawn
            available -= drawn
        return counts


def _draw_without_replacement(total: int, proportions: Array, available: Array, rng: np.random.Generator) -> Array:
    """Draw ``total`` samples by class proportions (K,) when only ``available`` (K,) samples of each class exist.

    Missing samples of a class are drawn from the other classes by their proportions.

    Returns:
        Drawn samples (K,) of each class, which sum to ``total``.
    """
    drawn = np.zeros(len(available), dtype=np.int64)
    while drawn.sum() < total:
        remaining = available - drawn
        weights = np.where(remaining > 0, proportions, 0.0)
        # The proportions of all remaining classes may be 0, or so small that they underflow.
        if not weights.sum() > 0:
            weights = remaining.astype(np.float64)
        class_counts = apportion(int(total - drawn.sum()), weights / weights.sum(), rng)
        drawn += np.minimum(class_counts, remaining)
    return drawn


@dataclass(repr=False, eq=False)
class QuantitySkew(Partition):
    """Draw the clients' numbers of samples from a Dirichlet distribution, and their samples from all classes.

    The clients' shares of the training set are drawn from Dir(alpha, ..., alpha) (quantity skew of Li et al., 2022,
    `Federated Learning on Non-IID Data Silos <https://arxiv.org/abs/2102.02079>`_, section 4.3). The smaller ``alpha``,
    the more unequal the sizes. Test samples are divided in the same shares.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        min_per_client: Minimum number of training samples of a client; missing ones are taken from the largest clients.

    Raises:
        ValueError: If an option is out of range.

    >>> QuantitySkew(num_clients=5, alpha=0.5)
    QuantitySkew(num_clients=5, alpha=0.5, min_per_client=2)
    """

    num_clients: int = 20
    alpha: float = 0.5
    min_per_client: int = 2

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("alpha", self.alpha, gt=0, hint="0.1 is very unequal, 100 even")
        check_integer("min_per_client", self.min_per_client)

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Cut a permutation of each split into parts of the drawn sizes.

        A client gets at least one test sample if there are as many as clients.
        """
        check_enough(len(train), self.num_clients, self.min_per_client)
        rng = partition_rng(seed)
        shares = rng.dirichlet(np.full(self.num_clients, self.alpha))
        sizes = self._raise_sizes(apportion(len(train), shares, rng), self.min_per_client)
        test_sizes = apportion(len(test), sizes / len(train), rng)
        if len(test) >= self.num_clients:
            test_sizes = self._raise_sizes(test_sizes, 1)
        return _split_at_random(len(train), sizes, rng), _split_at_random(len(test), test_sizes, rng)

    def _raise_sizes(self, sizes: Array, minimum: int) -> Array:
        """Raise sizes (M,) to the minimum, as if all samples were of one class."""
        counts = sizes[:, None]
        return raise_to_minimum(counts, minimum, np.ones_like(counts))[:, 0]


def _split_at_random(total: int, sizes: Array, rng: np.random.Generator) -> list[Array]:
    """Cut a permutation of ``total`` rows into parts of the given sizes."""
    return np.split(rng.permutation(total), np.cumsum(sizes)[:-1])


@dataclass(repr=False, eq=False)
class Shards(LabelPartition):
    """Give every client the same number of classes, and every class about the same number of clients.

    Args:
        num_clients: Number of clients M.
        classes_per_client: Number of classes of each client.

    >>> Shards(num_clients=5, classes_per_client=2)
    Shards(num_clients=5, classes_per_client=2)
    """

    num_clients: int = 20
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_integer("classes_per_client", self.classes_per_client)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Give each client the classes that still need most clients, then divide each class evenly."""
        num_classes = len(sizes)
        slots = self.num_clients * self.classes_per_client
        if self.classes_per_client > num_classes or slots < num_classes:
            raise ValueError(
                f"{self.num_clients} clients with classes_per_client={self.classes_per_client} do not fit "
                f"{num_classes} classes: use at most {num_classes} classes per client, and at least one client for "
                "every class"
            )
        open_slots = split_evenly(slots, num_classes, rng)
        has_class = np.zeros((self.num_clients, num_classes), dtype=bool)
        for client in range(self.num_clients):
            # The random numbers below 1 break ties.
            most_open_first = np.argsort(-(open_slots + rng.random(num_classes)))
            client_classes = most_open_first[: self.classes_per_client]
            has_class[client, client_classes] = True
            open_slots[client_classes] -= 1
        clients_of_class = has_class.sum(0)
        scarce = np.flatnonzero(sizes < clients_of_class)
        if len(scarce):
            raise ValueError(
                f"a class has {sizes[scarce[0]]} samples for {clients_of_class[scarce[0]]} clients: "
                "lower num_clients or classes_per_client"
            )
        counts = np.zeros(has_class.shape, dtype=np.int64)
        for k in range(num_classes):
            counts[has_class[:, k], k] = split_evenly(int(sizes[k]), int(clients_of_class[k]), rng)
        return counts


@dataclass(repr=False, eq=False)
class DominantClass(LabelPartition):
    """Take a given fraction of each client's samples from one class, and the others evenly from the other classes.

    All clients have the same size, the largest that the classes allow (one sample less where rounding requires it). The
    remaining samples are not used.

    Args:
        num_clients: Number of clients M.
        fraction: Share of the dominant class, above 0 and at most 1.

    >>> DominantClass(num_clients=5, fraction=0.8)
    DominantClass(num_clients=5, fraction=0.8)
    """

    num_clients: int = 20
    fraction: float = 0.5

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("fraction", self.fraction, gt=0, le=1)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Give each client its dominant class, then samples of the other classes with most samples remaining."""
        num_classes = len(sizes)
        if num_classes < 2:
            raise ValueError(f"a dominant class needs at least 2 classes, got {num_classes}: use the partition IID")
        dominant = rng.permutation(np.arange(self.num_clients) % num_classes)
        weights = np.full((self.num_clients, num_classes), (1 - self.fraction) / (num_classes - 1))
        weights[np.arange(self.num_clients), dominant] = self.fraction
        # The class that is used up first limits the size, which is rounded, since 6.9999999 means 7.
        size_limits = sizes / np.maximum(weights.sum(0), 1e-12)
        size = int(np.floor(round(size_limits.min(), 6)))
        if size < 1:
            raise ValueError(
                f"{sizes.sum()} samples of {num_classes} classes are too few for {self.num_clients} clients with a "
                "dominant class: lower num_clients"
            )
        counts = np.floor(np.round(size * weights, 6)).astype(np.int64)
        remaining = sizes - counts.sum(0)
        dominant_size = int(size * self.fraction + 0.5)
        for client in rng.permutation(self.num_clients):
            k = dominant[client]
            extra = int(min(dominant_size - counts[client, k], remaining[k]))
            counts[client, k] += extra
            remaining[k] -= extra
            # Rounding down left out less than one sample of each other class. Give one more of the classes with most
            # samples remaining; the random numbers below 1 break ties.
            order = np.argsort(-(remaining + rng.random(num_classes)))
            candidates = order[(order != k) & (remaining[order] > 0)]
            num_missing = size - counts[client].sum()
            filled_up = candidates[:num_missing]
            counts[client, filled_up] += 1
            remaining[filled_up] -= 1
        return counts


def categories(train_labels: Array, test: Array, merge_below: int = 0) -> tuple[Array, Array]:
    """Number the classes from 0.

    Args:
        train_labels: Classes (N,) of the training samples, or several labels (N, K), whose combinations count as
            classes.
        test: The same of the test samples.
        merge_below: Combinations with fewer training samples, or none, become one class, the last.

    Returns:
        Classes int64 (N,) of the training and of the test samples.

    >>> labels = np.array([[0, 1], [0, 1], [1, 1], [1, 0]])
    >>> categories(labels, labels[:1], merge_below=2)
    (array([0, 0, 1, 1]), array([0]))
    """
    if train_labels.ndim == 1:
        return train_labels.astype(np.int64), test.astype(np.int64).reshape(-1)
    labels = np.concatenate([train_labels, test.reshape(-1, train_labels.shape[1])])
    _, combinations = np.unique(labels, axis=0, return_inverse=True)
    combinations = combinations.reshape(-1)  # NumPy 2.0 returned the shape of the labels
    sizes = np.bincount(combinations[: len(train_labels)], minlength=int(combinations.max()) + 1)
    is_class = sizes >= max(merge_below, 1)
    class_of_combination = np.where(is_class, np.cumsum(is_class) - 1, is_class.sum())
    classes = class_of_combination[combinations]
    return classes[: len(train_labels)], classes[len(train_labels) :]
