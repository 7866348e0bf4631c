# SPDX-License-Identifier: Apache-2.0
"""Sums over clients in integers modulo 2⁶⁴, as in secure aggregation, and means computed from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number, floor_share, use_plain_numbers
from perada.core.states import State, double, per_client
from perada.server.aggregate import Updates


@dataclass(frozen=True)
class SecureSums:
    """Options of secure sums, in which the server sees only sums over a round's clients.

    Numbers are rounded to multiples of 2^−``fraction_bits`` and added up modulo 2⁶⁴, where the masks of sites are
    uniform and cancel exactly (Bonawitz et al., CCS 2017). A simulation computes the same numbers without masks.

    Args:
        min_sites: Smallest number of clients in a sum; a round with fewer is void. With two sites, each can compute the
            other's contribution, so it is at least 3.
        threshold: A sum is revealed only if more than this share of the round's clients stay until its end. It is at
            least 2/3: then the server learns nothing else, even with the help of half of ``min_sites``, rounded down.
        fraction_bits: Bits after the binary point. The error of a mean is at most 2^−(``fraction_bits`` + 1). An
            update that does not fit into the bits before the point is dropped; nothing is clipped.

    Raises:
        ValueError: If an option cannot be used.

    >>> SecureSums(min_sites=4).min_sites
    4
    """

    min_sites: int = 3
    threshold: float = 2 / 3
    fraction_bits: int = 24

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        hint = "with two sites, each can compute the other's contribution"
        check_integer("secure_sums: min_sites", self.min_sites, 3, hint=hint)
        hint = "below it, a dishonest site could help present different requests to two groups of sites"
        check_number("secure_sums: threshold", self.threshold, ge=2 / 3, lt=1, hint=hint)
        check_integer("secure_sums: fraction_bits", self.fraction_bits, 8, le=40)

    def least(self, sites: int) -> int:
        """Return how many of a round's sites must stay until its end, more than ``threshold`` of them.

        >>> SecureSums(threshold=0.7).least(90)
        64
        """
        return max(self.min_sites, floor_share(self.threshold, sites) + 1)

    def limit(self, sites: int) -> float:
        """Return the bound on magnitudes below which the sum over the sites does not overflow."""
        return 2.0 ** (62 - self.fraction_bits) / sites

    def to_integers(self, values: Tensor, sites: int) -> Tensor:
        """Round to multiples of 2^−``fraction_bits``, as integers (int64); halves are rounded to even.

        Raises:
            ValueError: If a value is not finite, or too large for the sum over so many ``sites``.

        >>> SecureSums(fraction_bits=8).to_integers(torch.tensor([1.5, -0.25]), 3).tolist()
        [384, -64]
        """
        values = double(values)
        limit = self.limit(sites)
        smallest = 0.0
        largest = 0.0
        if values.numel():
            extremes = values.aminmax()
            smallest = float(extremes.min)
            largest = float(extremes.max)
        # NaN compares false, so that it is rejected too.
        if not -limit < smallest <= largest < limit:
            wrong = values[~(values.abs() < limit)][0]
            raise ValueError(
                f"{float(wrong)} cannot be summed over {sites} sites with fraction_bits={self.fraction_bits}, which "
                f"only leaves room below {limit:g}; use fewer bits, or find out why training produced this value"
            )
        return (values * 2.0**self.fraction_bits).round_().to(torch.int64)

    def real(self, total: Tensor) -> Tensor:
        """Convert a sum of integers to real numbers, in double precision.

        >>> SecureSums(fraction_bits=8).real(torch.tensor([384 - 64])).tolist()
        [1.25]
        """
        return total.double() * 2.0**-self.fraction_bits

    def summable(self, updates: Updates, shares: Sequence[float], places: Sequence[int]) -> list[int]:
        """Select the clients whose states, times their shares (C,), can be added up. A collective.

        Args:
            updates: Updates of the clients.
            shares: Weight of each client.
            places: Clients to select from, by their place among all.
        """
        # The largest magnitude in each client's state.
        magnitudes = torch.zeros(updates.num_clients, dtype=torch.float64)
        for value in updates.local_rows.values():
            num_rows = len(value)
            if num_rows == 0 or value[0].numel() == 0:
                continue
            flat_rows = double(value).reshape(num_rows, -1)
            largest = flat_rows.abs().amax(1).to(magnitudes)
            magnitudes[updates.places] = torch.maximum(magnitudes[updates.places], largest)
        # Each rank has zeros for the clients of the others.
        updates.ranks.sum_([magnitudes])

        limit = self.limit(updates.num_clients)
        summable = []
        for place in places:
            # The comparison is false for NaN.
            if float(magnitudes[place]) * shares[place] < limit:
                summable.append(place)
        return summable

    def mean(self, updates: Updates, shares: Sequence[float]) -> State:
        """Compute the weighted mean of the updates from sums of integers. A collective.

        Counters of BatchNorm are averaged too, and rounded, since their maximum is not a sum.

        Args:
            updates: Updates of the clients.
            shares: Weight of each client; they need not sum to one.
        """
        local_shares = torch.tensor([shares[place] for place in updates.places], dtype=torch.float64)
        total_share = sum(shares)
        sums: State = {}
        for key, value in updates.local_rows.items():
            weighted = double(value) * per_client(local_shares.to(value.device), value)
            sums[key] = self.to_integers(weighted, updates.num_clients).sum(0)
        updates.ranks.sum_(sums.values())
        means: State = {}
        for key, value in updates.local_rows.items():
            mean = self.real(sums[key]) / total_share
            if not value.is_floating_point():
                mean = mean.round()
            means[key] = mean.to(value.dtype)
        return means

    def rows(self, updates: Updates, shares: Sequence[float]) -> Updates:
        """Replace every client's row by the mean, the only thing that the server may see."""
        mean = self.mean(updates, shares)
        return updates.repeat(mean)
