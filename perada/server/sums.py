# SPDX-License-Identifier: Apache-2.0
"""Sums over clients in whole numbers modulo 2⁶⁴, as those of secure aggregation are, and what can be made of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.core.states import State, expand, per_client
from perada.server.aggregate import Updates, double


@dataclass(frozen=True)
class SecureSums:
    """The server gets to see sums over a round's clients, and nothing of a single one.

    Numbers are rounded to multiples of 2^−``fraction_bits``, and added up modulo 2⁶⁴, in which masks of sites are
    uniform and cancel exactly (Bonawitz et al., CCS 2017). A simulation has the same numbers without masks.

    Args:
        min_sites: Clients in a sum at least; a round with fewer is void. Of a sum of two, each knows the other's part.
        threshold: More than this share of a round's clients must stay until its end; at least 2/3. Up to half of
            ``min_sites`` may then collude with the server: to have two lists of one sum signed, it needs the help of
            2 :meth:`least` − n of n sites.
        fraction_bits: Bits behind the point. A mean is off by at most 2^−(``fraction_bits`` + 1). What does not fit in
            the bits before the point counts as broken; nothing is clipped.

    Raises:
        ValueError: If an option cannot be used.
    """

    min_sites: int = 3
    threshold: float = 2 / 3
    fraction_bits: int = 24

    def __post_init__(self) -> None:
        hint = "in a sum of two, each site knows the other's part"
        check_integer("secure_sums: min_sites", self.min_sites, 3, hint=hint)
        hint = "below it, a dishonest site could help to show two groups of sites different requests"
        check_number("secure_sums: threshold", self.threshold, ge=2 / 3, lt=1, hint=hint)
        check_integer("secure_sums: fraction_bits", self.fraction_bits, 8, le=40)

    def least(self, sites: int) -> int:
        """How many of so many sites must be there at the end."""
        return max(self.min_sites, int(self.threshold * sites) + 1)

    def limit(self, sites: int) -> float:
        """What a magnitude must be below, so that the sum over so many sites does not wrap around."""
        return 2.0 ** (62 - self.fraction_bits) / sites

    def to_integers(self, values: Tensor, sites: int) -> Tensor:
        """The nearest multiples as whole numbers (int64, by two's complement modulo 2⁶⁴); halves go to the even one.

        Raises:
            ValueError: If a value is not finite, or too large for the sum over so many ``sites``.

        >>> SecureSums(fraction_bits=8).to_integers(torch.tensor([1.5, -0.25]), 3).tolist()
        [384, -64]
        """
        values = double(values)
        limit = self.limit(sites)
        least, most = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)
        if not -limit < least <= most < limit:  # of NaN too
            wrong = values[~(values.abs() < limit)][0]
            raise ValueError(
                f"{float(wrong)} cannot be added up by {sites} sites with fraction_bits="
                f"{self.fraction_bits}, which leaves room below {limit:g}; give fewer bits, or find out "
                "why the training made it"
            )
        return (values * 2.0**self.fraction_bits).round_().to(torch.int64)

    def real(self, total: Tensor) -> Tensor:
        """The real numbers of a sum, in double precision.

        >>> SecureSums(fraction_bits=8).real(torch.tensor([384 - 64])).tolist()
        [1.25]
        """
        return total.double() * 2.0**-self.fraction_bits

    def summable(self, updates: Updates, shares: Sequence[float], places: Sequence[int]) -> list[int]:
        """Those of the clients at the ``places`` whose states, times their shares (C,), can be added up."""
        most = torch.zeros(updates.clients, dtype=torch.float64)
        for value in updates.own.values():
            if len(value) and value[0].numel():
                largest = double(value).reshape(len(value), -1).abs().amax(1).to(most)
                most[updates.places] = torch.maximum(most[updates.places], largest)
        updates.ranks.sum_([most])
        return [place for place in places if float(most[place]) * shares[place] < self.limit(updates.clients)]

    def mean(self, updates: Updates, shares: Sequence[float]) -> State:
        """The weighted mean of what clients sent, from sums of whole numbers; ``shares`` (C,) need not add up to one.

        Counters of BatchNorm are averaged too, and rounded: their maximum is not a sum.
        """
        own_shares = torch.tensor([shares[place] for place in updates.places], dtype=torch.float64)
        sums = dict[str, Tensor]()
        all_shares = sum(shares)
        for key, value in updates.own.items():
            shared = double(value) * per_client(own_shares.to(value.device), value)
            sums[key] = self.to_integers(shared, updates.clients).sum(0)
        updates.ranks.sum_(sums.values())
        means = {key: self.real(total) / all_shares for key, total in sums.items()}
        return {
            key: (means[key] if value.is_floating_point() else means[key].round()).to(value.dtype)
            for key, value in updates.own.items()
        }

    def rows(self, updates: Updates, shares: Sequence[float]) -> Updates:
        """What the server gets to see: the mean in every row."""
        mean = self.mean(updates, shares)
        return Updates(expand(mean, len(updates.places)), updates.places, updates.clients, updates.ranks)
