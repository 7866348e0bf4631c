# SPDX-License-Identifier: Apache-2.0
"""Who gets what: ways to divide a set of images among clients.

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
from perada.core.digests import check_sealed
from perada.core.seeding import derive_seed
from perada.data.partitions.shares import Array, apportion, check_enough, deal, even, raise_to_minimum, rows_of

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

    def rows(self, rows: Array) -> "Split":
        """Return some of the samples, in the order of ``rows``, as a split of its own."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Split(self.labels[rows], self.index[rows], columns, self.name)


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


def partition_rng(seed: int) -> np.random.Generator:
    """Where a division is drawn from."""
    return np.random.default_rng(derive_seed(seed, "partition"))


@dataclass(repr=False, eq=False)
class IID(Partition):
    """Equal shares at random.

    Args:
        num_clients: Number of clients M.
    """

    num_clients: int = 20

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Cut a permutation into M parts whose sizes differ by at most one."""
        check_enough(len(train), self.num_clients, 1)
        rng = partition_rng(seed)
        rows = [np.array_split(rng.permutation(len(part)), self.num_clients) for part in (train, test)]
        return rows[0], rows[1]


@dataclass(repr=False, eq=False)
class ByDomain(Partition):
    """Divides by a column of the dataset, such as the domain of Office-Home or the uploader of OpenImage.

    A client has the test images that have its value in the column; it may have none.

    Args:
        column: Name of the column.
        clients_per_domain: Clients that share each domain, at random and evenly.
        within: A partition by which the clients of each domain share it, such as ``Dirichlet(num_clients=2)``, in place
            of ``clients_per_domain``.
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
                f"clients_per_domain={self.clients_per_domain} and within={self.within} both say how clients share a "
                "domain: leave one out"
            )
        if not isinstance(getattr(self.within, "num_clients", None), int):
            raise ValueError(
                f"within={self.within} cannot be used; give a partition with num_clients, such as "
                "Dirichlet(num_clients=2, alpha=0.3)"
            )

    @property
    def _clients_of_domain(self) -> int:
        return self.clients_per_domain if self.within is None else cast(int, vars(self.within)["num_clients"])

    def client_names(self, train: Split) -> Sequence[str] | None:
        """The domains; clients that share one are numbered behind it."""
        domains = np.unique(train.columns[self.column]).tolist()
        share = range(self._clients_of_domain)
        return [f"{domain} {one}" if len(share) > 1 else str(domain) for domain in domains for one in share]

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Sort the domains by name, and cut each domain's samples into equal shares."""
        rng = partition_rng(seed)
        division: Assignment = ([], [])
        domains = np.unique(train.columns[self.column])
        of_train = rows_of(domains, train.columns[self.column])
        for domain, rows in zip(domains, of_train, strict=True):
            if len(rows) < self._clients_of_domain:
                option = "clients_per_domain" if self.within is None else "num_clients of within"
                raise ValueError(
                    f"domain {domain} has {len(rows)} samples for {self._clients_of_domain} clients: lower {option}"
                )
        of_test = rows_of(domains, test.columns[self.column] if len(test) else domains[:0])
        left = len(test) - sum(map(len, of_test))
        if left:
            then = "nobody can be scored" if left == len(test) else "they are left out"
            warnings.warn(
                f"{left} of {len(test)} test samples have a {self.column} that no training sample has; {then}",
                stacklevel=2,
            )
        for place, both in enumerate(zip(of_train, of_test, strict=True)):
            if self.within is not None:
                # Each domain is divided as a set of its own, by draws of its own.
                own_seed = derive_seed(seed, "within", place)
                splits = [part.rows(own) for part, own in zip((train, test), both, strict=True)]
                shares = self.within.split(splits[0], splits[1], own_seed)
                for part, own, rows_of_clients in zip(division, both, shares, strict=True):
                    part.extend(own[rows] for rows in rows_of_clients)
                continue
            for part, own in zip(division, both, strict=True):
                part.extend(np.array_split(rng.permutation(own), self.clients_per_domain))
        return division


@dataclass(repr=False, eq=False)
class FromFile(Partition):
    """The division of an earlier run.

    Args:
        path: The ``partition.json`` that the run wrote.
    """

    path: str

    def __post_init__(self) -> None:
        check_name("path", self.path)

    def client_names(self, train: Split) -> Sequence[str] | None:
        """Those of the earlier run."""
        names = json.loads(Path(self.path).read_text()).get("clients")
        return [str(name) for name in names] if isinstance(names, list) else None

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Look up the rows of the recorded positions; the seed is not used."""
        path, division = self.path, list[list[Array]]()
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist: give the partition.json in the folder of an earlier run")
        try:
            saved = check_sealed(json.loads(Path(path).read_text(encoding="utf-8")))
            held = saved.get("client_validation") or [[]] * len(saved["train"])  # given for training too
            train_of = [[*own, *more] for own, more in zip(saved["train"], held, strict=True)]
            parts = train_of, saved["test"]
            recorded = [[np.array(own, np.int64).reshape(-1).tolist() for own in part] for part in parts]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not a partition of a dataset ({error!r}): give another file") from None
        for clients, samples in zip(recorded, (train, test), strict=True):
            row_of = {position: row for row, position in enumerate(samples.index.tolist())}
            for client, own in enumerate(clients):
                unknown = [position for position in own if position not in row_of]
                if unknown:
                    raise ValueError(
                        f"{path} gives client {client} sample {unknown[0]}, which is not among the clients' data: "
                        "use the dataset, limits, held-out fractions and seed of the run that wrote it"
                    )
            division.append([np.array([row_of[position] for position in own], np.int64) for own in clients])
        return division[0], division[1]


class LabelPartition(Partition):
    """Divides by the label alone: a subclass says how many samples of each class every client gets."""

    num_clients: int
    merge_below: int = 0
    column: str | None = None

    @abstractmethod
    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Training samples (M, K) for each client, of the ``sizes`` (K,), at least 1, of the classes that there are."""

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Deal the samples of each class; of the test set, each client gets the share that it got of the training set.

        Every client gets a test sample if there are as many as clients.
        """
        check_enough(len(train), self.num_clients, 1)
        rng = partition_rng(seed)
        classes, test_classes = categories(*self._labels(train, test), self.merge_below)
        width = int(max(classes.max(), test_classes.max(initial=0))) + 1
        sizes, test_sizes = (np.bincount(part, minlength=width) for part in (classes, test_classes))
        present = np.flatnonzero(sizes)
        counts = np.zeros((self.num_clients, width), dtype=np.int64)
        counts[:, present] = self.counts(sizes[present], rng)
        shares = counts / np.maximum(sizes, 1)
        test_counts = np.stack([apportion(size, shares[:, k], rng) for k, size in enumerate(test_sizes)], axis=1)
        if len(test) >= self.num_clients:
            test_counts = raise_to_minimum(test_counts, 1, counts, test_sizes - test_counts.sum(0))
        return deal(classes, counts, rng), deal(test_classes, test_counts, rng)

    def _labels(self, train: Split, test: Split) -> tuple[Array, Array]:
        """What the two splits are divided by: their labels, or the column as if it were one of several labels."""
        if self.column is None:
            return train.labels, test.labels
        values = np.concatenate([part.columns[self.column] for part in (train, test) if len(part)])
        numbers = np.unique(values, return_inverse=True)[1].reshape(-1, 1)
        return numbers[: len(train)], numbers[len(train) :]


@dataclass(repr=False, eq=False)
class Dirichlet(LabelPartition):
    """Divide each class among the clients in proportions drawn from a Dirichlet distribution (Yurochkin et al., 2019).

    The smaller ``alpha``, the fewer classes a client has, and the more unequal the clients' sizes. See
    :class:`BalancedDirichlet` for clients of one size, and :class:`QuantitySkew` for sizes that differ while the
    classes do not. The source is `Bayesian Nonparametric Federated Learning of Neural Networks
    <https://arxiv.org/abs/1905.12022>`_ (ICML 2019), section 4.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        min_per_client: Training samples every client has at least; they are taken from the largest holders of the
            classes that the client has most of.
        min_per_class: Training samples of every class that every client has at least.
        merge_below: For several labels a sample, or a column: combinations or values with fewer training samples form
            one class together.
        column: Column of the dataset whose values take the place of classes, such as ``category`` of CheXpert; null
            for the labels.

    Raises:
        ValueError: If an option is out of range.
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
        """Draw the proportions, round them to whole samples, and see to the minimum."""
        check_enough(int(sizes.sum()), self.num_clients, self.min_per_client)
        _check_min_per_class(sizes, self.num_clients, self.min_per_class)
        proportions = rng.dirichlet(np.full(self.num_clients, self.alpha), len(sizes)).T
        free = sizes - self.num_clients * self.min_per_class
        shared = [apportion(total, proportions[:, k], rng) for k, total in enumerate(free)]
        counts = self.min_per_class + np.stack(shared, axis=1)
        return raise_to_minimum(counts, self.min_per_client, proportions * sizes, keep=self.min_per_class)


def _check_min_per_class(sizes: Array, num_clients: int, min_per_class: int) -> None:
    """Refuse more samples of each class for every client than the smallest of the classes, of ``sizes`` (K,), has."""
    if sizes.min() < num_clients * min_per_class:
        raise ValueError(
            f"the smallest class has {sizes.min()} samples, too few for min_per_class={min_per_class} on "
            f"{num_clients} clients: lower one of the two"
        )


@dataclass(repr=False, eq=False)
class BalancedDirichlet(LabelPartition):
    """Give every client as many samples, in class proportions drawn for it from a Dirichlet distribution.

    The proportions of a client are drawn from Dir(alpha · p), where p (K,) are the shares of the classes in the
    training set (Hsu, Qi and Brown, 2019, `DiagnosticsPass the Effects of Non-Identical Data Distribution for Federated
    Visual Classification <https://arxiv.org/abs/1909.06335>`_, section 3). The smaller ``alpha``, the fewer classes a
    client has; the larger, the closer it is to p. Samples are drawn without replacement: once a class is used up, the
    proportions of the clients that follow are those of the other classes, scaled to sum to 1.

    The proportion of a class has variance p · (1 - p) / (alpha + 1). ``alpha`` is the sum of the distribution's K
    parameters here, and each of its M parameters in :class:`Dirichlet`, so equal values do not mean equal
    heterogeneity.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        samples_per_client: Training samples of each client; null for as many as the training set allows, N // M. The
            rest belongs to nobody.
        merge_below: For several labels a sample, or a column: combinations or values with fewer training samples form
            one class together.
        column: Column of the dataset whose values take the place of classes; null for the labels.
        min_per_class: Training samples of every class that every client has at least, whatever its proportions; they
            are among its samples.

    Raises:
        ValueError: If an option is out of range.
    """

    num_clients: int = 20
    alpha: float = 1.0
    samples_per_client: int | None = None
    merge_below: int = 0
    column: str | None = None
    min_per_class: int = 0

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("alpha", self.alpha, gt=0, hint="0.1 is about one class a client, 100 even")
        check_integer("samples_per_client", self.samples_per_client, optional=True)
        check_integer("merge_below", self.merge_below, 0)
        check_integer("min_per_class", self.min_per_class, 0)
        check_name("column", self.column, optional=True)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Draw the class proportions of one client after the other, and take its samples from what is left."""
        total = int(sizes.sum())
        per_client = self.samples_per_client or max(1, total // self.num_clients)
        if self.num_clients * per_client > total:
            raise ValueError(
                f"{self.num_clients} clients of {per_client} training samples each need "
                f"{self.num_clients * per_client}, and there are {total}: lower num_clients or samples_per_client, or "
                "raise train_limit"
            )
        _check_min_per_class(sizes, self.num_clients, self.min_per_class)
        of_all_classes = self.min_per_class * len(sizes)
        if of_all_classes > per_client:
            raise ValueError(
                f"min_per_class={self.min_per_class} of {len(sizes)} classes are {of_all_classes} training samples, "
                f"and a client has {per_client}: lower min_per_class, or raise samples_per_client"
            )
        # NumPy refuses a parameter of 0, to which a tiny alpha underflows.
        concentration = np.maximum(self.alpha * sizes / total, np.finfo(np.float64).tiny)
        # The minimum of all clients is set aside first: nobody else's proportions can use it up.
        left = sizes - self.num_clients * self.min_per_class
        counts = np.full((self.num_clients, len(sizes)), self.min_per_class, dtype=np.int64)
        for client in range(self.num_clients):
            proportions = rng.dirichlet(concentration)
            drawn = _draw_without_replacement(per_client - of_all_classes, proportions, left, rng)
            counts[client] += drawn
            left -= drawn
        return counts


def _draw_without_replacement(total: int, proportions: Array, left: Array, rng: np.random.Generator) -> Array:
    """Draw ``total`` samples by class proportions (K,), of which only ``left`` (K,) are there.

    What a class lacks is drawn from the other classes by their proportions; the result sums to ``total``.
    """
    drawn = np.zeros(len(left), dtype=np.int64)
    while drawn.sum() < total:
        remaining = left - drawn
        weights = np.where(remaining > 0, proportions, 0.0)
        if not weights.sum() > 0:  # the classes that are left have no share, or one that underflows
            weights = remaining.astype(np.float64)
        wanted = apportion(int(total - drawn.sum()), weights / weights.sum(), rng)
        drawn += np.minimum(wanted, remaining)
    return drawn


@dataclass(repr=False, eq=False)
class QuantitySkew(Partition):
    """Give the clients numbers of samples drawn from a Dirichlet distribution, and each a random sample of all classes.

    The clients' shares of the training set are drawn from Dir(alpha, ..., alpha) (quantity skew of Li et al., 2022,
    `Federated Learning on Non-IID Data Silos <https://arxiv.org/abs/2102.02079>`_, section 4.3). The smaller ``alpha``,
    the more unequal the sizes. Test samples are divided in the same shares.

    Args:
        num_clients: Number of clients M.
        alpha: Concentration, above 0.
        min_per_client: Training samples every client has at least; they are taken from the largest clients.

    Raises:
        ValueError: If an option is out of range.
    """

    num_clients: int = 20
    alpha: float = 0.5
    min_per_client: int = 2

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("alpha", self.alpha, gt=0, hint="0.1 is very unequal, 100 even")
        check_integer("min_per_client", self.min_per_client)

    def split(self, train: Split, test: Split, seed: int) -> Assignment:
        """Cut a permutation of each split into parts of the sizes that were drawn.

        Every client gets a test sample if there are as many as clients.
        """
        check_enough(len(train), self.num_clients, self.min_per_client)
        rng = partition_rng(seed)
        shares = rng.dirichlet(np.full(self.num_clients, self.alpha))
        sizes = self._at_least(self.min_per_client, apportion(len(train), shares, rng))
        test_sizes = apportion(len(test), sizes / len(train), rng)
        if len(test) >= self.num_clients:
            test_sizes = self._at_least(1, test_sizes)
        return _cut(len(train), sizes, rng), _cut(len(test), test_sizes, rng)

    def _at_least(self, minimum: int, sizes: Array) -> Array:
        """Raise sizes (M,) to the minimum."""
        one_class = sizes[:, None]
        return raise_to_minimum(one_class, minimum, np.ones_like(one_class))[:, 0]


def _cut(total: int, sizes: Array, rng: np.random.Generator) -> list[Array]:
    """Cut a permutation of ``total`` rows into parts of these sizes."""
    return np.split(rng.permutation(total), np.cumsum(sizes)[:-1])


@dataclass(repr=False, eq=False)
class Shards(LabelPartition):
    """Every client has the same number of classes, and every class about as many clients.

    Args:
        num_clients: Number of clients M.
        classes_per_client: Classes that each client has.
    """

    num_clients: int = 20
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_integer("classes_per_client", self.classes_per_client)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Give each client the classes that lack most clients, then divide each class evenly."""
        width, slots = len(sizes), self.num_clients * self.classes_per_client
        if self.classes_per_client > width or slots < width:
            raise ValueError(
                f"{self.num_clients} clients with classes_per_client={self.classes_per_client} do not fit {width} "
                f"classes: give at most {width} classes per client, and at least one client to every class"
            )
        open_slots = even(slots, width, rng)
        has = np.zeros((self.num_clients, width), dtype=bool)
        for client in range(self.num_clients):
            chosen = np.argsort(-(open_slots + rng.random(width)))[: self.classes_per_client]
            has[client, chosen] = True
            open_slots[chosen] -= 1
        scarce = np.flatnonzero(sizes < has.sum(0))
        if len(scarce):
            raise ValueError(
                f"a class has {sizes[scarce[0]]} samples for {has.sum(0)[scarce[0]]} clients: "
                "lower num_clients or classes_per_client"
            )
        counts = np.zeros(has.shape, dtype=np.int64)
        for k in range(width):
            counts[has[:, k], k] = even(int(sizes[k]), int(has[:, k].sum()), rng)
        return counts


@dataclass(repr=False, eq=False)
class DominantClass(LabelPartition):
    """A given fraction of each client's samples is of one class, the rest evenly of the others.

    All clients have one size, the largest that the classes allow (a sample less where rounding asks for it); what is
    left over belongs to nobody.

    Args:
        num_clients: Number of clients M.
        fraction: Share of the dominant class, above 0 and at most 1.
    """

    num_clients: int = 20
    fraction: float = 0.5

    def __post_init__(self) -> None:
        check_integer("num_clients", self.num_clients)
        check_number("fraction", self.fraction, gt=0, le=1)

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Give each client its dominant class, then its other samples from the classes that have most left."""
        width = len(sizes)
        if width < 2:
            raise ValueError(f"there is {width} class: a dominant class needs at least 2, use the partition IID")
        dominant = rng.permutation(np.arange(self.num_clients) % width)
        weights = np.full((self.num_clients, width), (1 - self.fraction) / (width - 1))
        weights[np.arange(self.num_clients), dominant] = self.fraction
        size = int(np.floor(round((sizes / np.maximum(weights.sum(0), 1e-12)).min(), 6)))
        if size < 1:
            raise ValueError(
                f"{sizes.sum()} samples of {width} classes are too few for {self.num_clients} clients with a "
                "dominant class: lower num_clients"
            )
        counts = np.floor(np.round(size * weights, 6)).astype(np.int64)
        left = sizes - counts.sum(0)
        wanted = int(size * self.fraction + 0.5)
        for client in rng.permutation(self.num_clients):
            main = dominant[client]
            extra = int(min(wanted - counts[client, main], left[main]))
            counts[client, main] += extra
            left[main] -= extra
            # What rounding left out: at most one more of each other class, of those that have most left.
            order = np.argsort(-(left + rng.random(width)))
            order = order[(order != main) & (left[order] > 0)][: size - counts[client].sum()]
            counts[client, order] += 1
            left[order] -= 1
        return counts


def categories(train: Array, test: Array, merge_below: int = 0) -> tuple[Array, Array]:
    """Number the classes, int64 from 0; combinations of several labels, (N, K) and not (N,), are classes.

    Combinations with fewer training samples than ``merge_below``, or none, become one class.

    >>> labels = np.array([[0, 1], [0, 1], [1, 1], [1, 0]])
    >>> categories(labels, labels[:1], merge_below=2)
    (array([0, 0, 1, 1]), array([0]))
    """
    if train.ndim == 1:
        return train.astype(np.int64), test.astype(np.int64).reshape(-1)
    rows = np.concatenate([train, test.reshape(-1, train.shape[1])])
    _, ids = np.unique(rows, axis=0, return_inverse=True)
    ids = ids.reshape(-1)
    sizes = np.bincount(ids[: len(train)], minlength=int(ids.max()) + 1)
    kept = sizes >= max(merge_below, 1)
    number = np.where(kept, np.cumsum(kept) - 1, kept.sum())
    return number[ids[: len(train)]], number[ids[len(train) :]]
