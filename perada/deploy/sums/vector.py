# SPDX-License-Identifier: Apache-2.0
"""What a site adds to a secure sum, as one vector of whole numbers, and what its server reads from the total."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perada.core.checks import check_installed
from perada.core.states import State
from perada.deploy.protocol import COUNT, MAGNITUDE, refuse
from perada.server.aggregate import double
from perada.server.sums import SecureSums

Uint64Vector = NDArray[np.uint64]
"""A vector of numbers modulo 2⁶⁴."""
_CHUNK = 2**14
"""Numbers that are rounded at a time, so that what is in between stays in the processor's cache."""
SPOILED = "secure sum: a site spoiled it, or more:"
"""Begin of the reason why a sum that was read is refused."""


def check_cryptography() -> None:
    """Refuse to continue without what makes keys, masks and shares, by a ModuleNotFoundError."""
    check_installed("secure_sums", "flower", "cryptography", "Crypto")


class SumResult(NamedTuple):
    """What a sum over sites says: nothing of any of them."""

    mean: State  # weighted mean of what they sent
    logits: Tensor | None  # sum (images, classes) of their logits on the public images, in whole numbers
    numbers: dict[str, float]  # means over the sites that have them


@dataclass(frozen=True)
class Contents:
    """The parts of the vectors of a round, in their order: the same at all sites and at the server.

    Args:
        options: Of the recipe.
        example: What a site sends (no client axis).
        logits: Public images and classes, (0, 0) in a round that is not distilled.
        numbers: Names of others, such as training losses, each of which a site has or not.
        equal: Whether each site's weight is one, and not a number of images.
        noisy: Whether the example is of noisy changes, which sites give in whole numbers, and not of states.
    """

    options: SecureSums
    example: State
    logits: tuple[int, int] = (0, 0)
    numbers: tuple[str, ...] = ()
    equal: bool = True
    noisy: bool = False

    @property
    def size(self) -> int:
        """How long a vector is: the state, logits, the weight, the other numbers, and which of them a site has."""
        return (
            sum(value.numel() for value in self.example.values()) + math.prod(self.logits) + 1 + 2 * len(self.numbers)
        )

    def vector(
        self, sent: State, weight: float, logits: Tensor | None, numbers: Mapping[str, float], sites: int
    ) -> Uint64Vector:
        """A site's part: weight · state, or its noisy change, logits (images, classes), weight, other numbers.

        Raises:
            ValueError: If a number is not finite, or too large for the sum over so many ``sites``.
        """
        parts: list[tuple[Tensor, float | None]]
        parts = [(sent[key], None if self.noisy else weight) for key in self.example]
        parts += [] if logits is None else [(logits, 1.0)]
        told = [numbers.get(name, 0.0) for name in self.numbers]
        rest = [weight, *told, *(float(name in numbers) for name in self.numbers)]
        parts.append((torch.tensor(rest, dtype=torch.float64), 1.0))
        size = sum(part.numel() for part, _ in parts)
        if size != self.size:
            raise ValueError(f"a site's vector has {size} numbers, and {self.size} are to be added up")
        chunks = ((chunk, factor) for part, factor in parts for chunk in part.detach().flatten().split(_CHUNK))
        whole, end = torch.empty(size, dtype=torch.int64), 0
        for chunk, factor in chunks:
            begin, end = end, end + len(chunk)
            whole[begin:end] = chunk if factor is None else self.options.whole(double(chunk) * factor, sites)
        return whole.numpy().view(np.uint64)

    def opened(self, total: Uint64Vector, sites: int) -> SumResult:
        """What a total over so many sites says; integer tensors are means that were rounded.

        Raises:
            Refused: If it cannot be: a site added other numbers than it should, or masks that did not cancel.
        """
        whole = torch.from_numpy(total.view(np.int64))
        images = math.prod(self.logits)
        sizes = [value.numel() for value in self.example.values()]
        *states, logits, rest = whole.split([*sizes, images, 1 + 2 * len(self.numbers)])
        weight, *told = self.options.real(rest).tolist()
        refuse(weight != (sites if self.equal else max(sites, weight // 1)), f"{SPOILED} is {weight:g}", "other")
        mean = {
            key: self._mean(key, part, weight).view(example.shape)
            for (key, example), part in zip(self.example.items(), states, strict=True)
        }
        totals, counts = told[: len(self.numbers)], told[len(self.numbers) :]
        means = {
            name: total / count
            for name, total, count in zip(self.numbers, totals, counts, strict=True)
            if count in range(1, sites + 1)
        }
        return SumResult(mean, logits.view(self.logits).clone() if images else None, means)

    def _mean(self, key: str, total: Tensor, weight: float) -> Tensor:
        """The mean of a flat tensor, of which the sum is given in whole numbers, in the format of the example's."""
        real, low, high = self.example[key].is_floating_point(), 0.0, 0.0
        found = torch.empty(len(total), dtype=self.example[key].dtype)
        for chunk, place in zip(total.split(_CHUNK), found.split(_CHUNK), strict=True):
            value = self.options.real(chunk).div_(weight)
            if len(value):
                least, most = map(float, value.aminmax())
                low, high = min(low, least), max(high, most)
            place.copy_(value if real else value.round_())
        least, most = (-MAGNITUDE, MAGNITUDE) if real else (0, COUNT)
        refuse(not least <= low <= high <= most, f"{SPOILED} has {key!r} from {low:g} to {high:g}", "other")
        return found
