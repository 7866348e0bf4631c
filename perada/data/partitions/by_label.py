# SPDX-License-Identifier: Apache-2.0
"""Ways to divide a set among clients by the labels or a column; training and test data get the same proportions.

Shape suffixes: M clients, K classes, N samples.
"""

from abc import abstractmethod

import numpy as np

from perada.core.checks import check_name, check_number, check_whole
from perada.data.partitions.base import Assignment, Partition, Split, partition_rng
from perada.data.partitions.shares import Array, apportion, check_enough, deal, even, raise_to_minimum


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


class Dirichlet(LabelPartition):
    """Each class is divided among the clients in proportions drawn from a Dirichlet distribution (Hsu et al., 2019).

    The smaller ``alpha``, the fewer classes a client has, and the more unequal the clients' sizes.

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

    def __init__(
        self,
        num_clients: int = 20,
        alpha: float = 0.1,
        min_per_client: int = 2,
        min_per_class: int = 0,
        merge_below: int = 0,
        column: str | None = None,
    ) -> None:
        check_whole("num_clients", num_clients)
        check_number("alpha", alpha, above=0, hint="0.1 is very unequal, 100 even")
        check_whole("min_per_client", min_per_client)
        check_whole("min_per_class", min_per_class, 0)
        check_whole("merge_below", merge_below, 0)
        self.num_clients, self.alpha = num_clients, alpha
        self.min_per_client, self.min_per_class, self.merge_below = min_per_client, min_per_class, merge_below
        check_name("column", column, optional=True)
        self.column = column

    def counts(self, sizes: Array, rng: np.random.Generator) -> Array:
        """Draw the proportions, round them to whole samples, and see to the minimum."""
        check_enough(int(sizes.sum()), self.num_clients, self.min_per_client)
        if sizes.min() < self.num_clients * self.min_per_class:
            raise ValueError(
                f"the smallest class has {sizes.min()} samples, too few for min_per_class={self.min_per_class} on "
                f"{self.num_clients} clients: lower one of the two"
            )
        proportions = rng.dirichlet(np.full(self.num_clients, self.alpha), len(sizes)).T
        free = sizes - self.num_clients * self.min_per_class
        shared = [apportion(total, proportions[:, k], rng) for k, total in enumerate(free)]
        counts = self.min_per_class + np.stack(shared, axis=1)
        return raise_to_minimum(counts, self.min_per_client, proportions * sizes, keep=self.min_per_class)


class Shards(LabelPartition):
    """Every client has the same number of classes, and every class about as many clients.

    Args:
        num_clients: Number of clients M.
        classes_per_client: Classes that each client has.
    """

    def __init__(self, num_clients: int = 20, classes_per_client: int = 2) -> None:
        check_whole("num_clients", num_clients)
        check_whole("classes_per_client", classes_per_client)
        self.num_clients, self.classes_per_client = num_clients, classes_per_client

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


class DominantClass(LabelPartition):
    """A given fraction of each client's samples is of one class, the rest evenly of the others.

    All clients have one size, the largest that the classes allow (a sample less where rounding asks for it); what is
    left over belongs to nobody.

    Args:
        num_clients: Number of clients M.
        fraction: Share of the dominant class, above 0 and at most 1.
    """

    def __init__(self, num_clients: int = 20, fraction: float = 0.5) -> None:
        check_whole("num_clients", num_clients)
        check_number("fraction", fraction, above=0, most=1)
        self.num_clients, self.fraction = num_clients, fraction

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
