# SPDX-License-Identifier: Apache-2.0
"""The vector of integers that a site contributes to a secure sum, and what the server reads from the total."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perada.core.checks import check_installed
from perada.core.states import State, double
from perada.deploy.protocol import MAX_COUNT, MAX_MAGNITUDE, RejectionError
from perada.server.sums import SecureSums

Uint64Vector = NDArray[np.uint64]
"""A vector of numbers modulo 2⁶⁴."""
_CHUNK = 2**14
"""Numbers that are rounded at a time, so that intermediate results stay in the processor's cache."""
SPOILED = "secure sum: spoiled by at least one site:"
"""Beginning of the reason for rejecting a sum that was decrypted."""


def check_cryptography() -> None:
    """Check that the libraries for keys, masks and shares are installed.

    Raises:
        ModuleNotFoundError: If one of them is not.
    """
    check_installed("secure_sums", "flower", "cryptography", "Crypto")


class SumResult(NamedTuple):
    """Values read from the total over sites, none of which are about a single site.

    Attributes:
        mean: Weighted mean of the states that they sent.
        logits: Sum (images, ..., classes) of their logits on the public images, in fixed point; None without
            distillation.
        metrics: Mean of each metric over the sites that have it.
        totals: Sum of each metric over the sites that have it.
    """

    mean: State
    logits: Tensor | None
    metrics: dict[str, float]
    totals: dict[str, float]


@dataclass(frozen=True)
class Contents:
    """The layout of the vectors of a round: the same at all sites and at the server.

    A vector holds weight times state, the logits, the weight, the metrics, and for each metric a 1 if the site has it.

    Args:
        secure_sums: Options of the recipe.
        example: Example of what a site sends (no client axis).
        logits: Shape (images, ..., classes) of the logits on the public images, with axes for pixels if there are any;
            (0, 0) in a round that is not distilled.
        metric_names: Names of other numbers, such as training losses, which a site may have or not.
        equal: Whether each site's weight is one rather than its number of images.
        noisy: Whether the example holds noisy changes, which sites send as integers, rather than states.
    """

    secure_sums: SecureSums
    example: State
    logits: tuple[int, ...] = (0, 0)
    metric_names: tuple[str, ...] = ()
    equal: bool = True
    noisy: bool = False

    @property
    def size(self) -> int:
        """Length of a vector."""
        state_size = sum(value.numel() for value in self.example.values())
        return state_size + math.prod(self.logits) + 1 + 2 * len(self.metric_names)

    def vector(
        self,
        sent: State,
        weight: float,
        logits: Tensor | None,
        metrics: Mapping[str, float],
        num_sites: int,
    ) -> Uint64Vector:
        """Encode what a site contributes.

        Args:
            sent: State of the site, or its noisy change in integers.
            weight: Weight of the site.
            logits: Logits (images, ..., classes) on the public images; None in a round that is not distilled.
            metrics: The site's metrics by name.
            num_sites: Number of sites in the sum.

        Raises:
            ValueError: If a number is not finite, or too large for the sum over so many sites.
        """
        # Each part has a factor; None marks integers, which are taken as they are.
        scaled_parts: list[tuple[Tensor, float | None]] = []
        for key in self.example:
            scaled_parts.append((sent[key], None if self.noisy else weight))
        if logits is not None:
            scaled_parts.append((logits, 1.0))
        values = [metrics.get(name, 0.0) for name in self.metric_names]
        has_metric = [float(name in metrics) for name in self.metric_names]
        scaled_parts.append((torch.tensor([weight, *values, *has_metric], dtype=torch.float64), 1.0))

        size = sum(part.numel() for part, _ in scaled_parts)
        if size != self.size:
            raise ValueError(f"a site's vector has {size} numbers, expected {self.size}")
        integers = torch.empty(size, dtype=torch.int64)
        begin = 0
        for part, factor in scaled_parts:
            for chunk in part.detach().flatten().split(_CHUNK):
                end = begin + len(chunk)
                if factor is None:
                    integers[begin:end] = chunk
                else:
                    integers[begin:end] = self.secure_sums.to_integers(double(chunk) * factor, num_sites)
                begin = end
        return integers.numpy().view(np.uint64)

    def decode(self, total: Uint64Vector, num_sites: int) -> SumResult:
        """Decode the total over ``num_sites`` sites. Integer tensors are rounded means.

        Raises:
            RejectionError: If a site added other numbers than it should, or masks that did not cancel.
        """
        integers = torch.from_numpy(total.view(np.int64))
        num_logits = math.prod(self.logits)
        num_metrics = len(self.metric_names)
        state_sizes = [value.numel() for value in self.example.values()]
        *states, logits, scalars = integers.split([*state_sizes, num_logits, 1 + 2 * num_metrics])
        weight, *values = self.secure_sums.real(scalars).tolist()
        totals = values[:num_metrics]
        counts = values[num_metrics:]

        # The total weight is a sum of ones, or of numbers of images of which no site has none.
        is_sum_of_weights = weight == num_sites if self.equal else weight >= num_sites and weight.is_integer()
        if not is_sum_of_weights:
            raise RejectionError(f"{SPOILED} the total weight is {weight:g}", "other")
        mean = {}
        for (key, example), part in zip(self.example.items(), states, strict=True):
            mean[key] = self._mean_of_tensor(key, part, weight).view(example.shape)
        total_of: dict[str, float] = {}
        mean_of: dict[str, float] = {}
        for name, total_value, count in zip(self.metric_names, totals, counts, strict=True):
            if count in range(1, num_sites + 1):
                total_of[name] = total_value
                mean_of[name] = total_value / count
        return SumResult(
            mean=mean,
            logits=logits.view(self.logits).clone() if num_logits else None,
            metrics=mean_of,
            totals=total_of,
        )

    def _mean_of_tensor(self, key: str, total: Tensor, weight: float) -> Tensor:
        """Return the mean of a flat tensor in the dtype of the example's, from its sum in fixed point."""
        is_floating_point = self.example[key].is_floating_point()
        mean = torch.empty(len(total), dtype=self.example[key].dtype)
        smallest = 0.0
        largest = 0.0
        for sum_chunk, mean_chunk in zip(total.split(_CHUNK), mean.split(_CHUNK), strict=True):
            value = self.secure_sums.real(sum_chunk).div_(weight)
            if len(value):
                chunk_min, chunk_max = value.aminmax()
                smallest = min(smallest, float(chunk_min))
                largest = max(largest, float(chunk_max))
            mean_chunk.copy_(value if is_floating_point else value.round_())
        lower = -MAX_MAGNITUDE if is_floating_point else 0
        upper = MAX_MAGNITUDE if is_floating_point else MAX_COUNT
        if not lower <= smallest <= largest <= upper:
            raise RejectionError(f"{SPOILED} {key!r} has values from {smallest:g} to {largest:g}", "other")
        return mean
