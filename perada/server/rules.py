# SPDX-License-Identifier: Apache-2.0
"""Server rules: how the clients' updates of a round become the next global state."""

import math
from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import Tensor

from perada.core.checks import check_number
from perada.core.states import State
from perada.server.aggregate import client_weights, mean
from perada.server.rule_base import Aggregation, ComposedRule, Mean, ServerRule
from perada.server.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi


class _Coordinatewise(ServerRule):
    """A rule on the sorted values of each coordinate. A NaN counts as the largest."""

    weighted = False

    def __call__(self, given: Aggregation) -> State:
        floating = {key: value for key, value in given.updates.items() if value.is_floating_point()}
        rest = {key: value for key, value in given.updates.items() if key not in floating}
        merged = mean(rest, given.weights) | {key: self._reduce(value.sort(0)[0]) for key, value in floating.items()}
        return {key: merged[key] for key in given.updates}

    def _reduce(self, ordered: Tensor) -> Tensor:
        """What the rule makes (...) of the values (C, ...), which rise along C."""
        raise NotImplementedError


class Median(_Coordinatewise):
    """The coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

    It withstands nonsense from fewer than half of the clients. Of an even number, the two in the middle are averaged.
    """

    def _reduce(self, ordered: Tensor) -> Tensor:
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        return low.clone() if len(ordered) % 2 else low / 2 + high / 2  # halved first: the sum may not fit in float16


class TrimmedMean(_Coordinatewise):
    """The coordinate-wise mean without the lowest and highest values (Yin et al., ICML 2018, Algorithm 1, option II).

    Args:
        trim: Share of the clients dropped at each end, between 0 and 1/2: ``floor(trim * C)`` of C clients.
    """

    def __init__(self, trim: float = 0.1) -> None:
        check_number("trim", trim, above=0, below=0.5, hint="the share of the clients to drop at each end")
        self.trim = trim

    def check(self, clients: int) -> None:
        """Refuse so few clients a round that none would be dropped."""
        if self._cut(clients) == 0:
            need = next(c for c in range(clients + 1, math.ceil(1 / self.trim) + 2) if self._cut(c))
            raise ValueError(
                f"trim={self.trim!r} drops none of {clients} clients a round; sample at least {need}, or raise trim"
            )

    def _cut(self, clients: int) -> int:
        return int(self.trim * clients)

    def _reduce(self, ordered: Tensor) -> Tensor:
        cut = self._cut(len(ordered))
        left = ordered[cut : len(ordered) - cut]
        return mean({"": left}, client_weights("uniform", [1] * len(left)))[""]  # halves are summed as elsewhere


class ModifiedLocalGD(ComposedRule):
    """Pulls the aggregate back to where the run began: w ← (1 − α_k) w⁰ + α_k · aggregate.

    Zhu, Vardhan & Mazumdar, Algorithm 3 (Modified Local-GD). Parameters and running statistics are moved so. Counters
    take the aggregate's value.

    Args:
        alpha: A constant α instead of the schedule. With 1 this is ``aggregate``, to the last bit.
        power: The schedule α_k = 1 − (k + 1)^−power for rounds k = 1, 2, …; the paper's example is 1. Its theorem needs
            Σ (1 − α_k) = ∞, and so a power of at most 1.
        aggregate: What is pulled back. Default: the mean.
    """

    function_of_mean = True

    def __init__(self, alpha: float | None = None, power: float = 1.0, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("alpha", alpha, above=0, most=1, optional=True)
        check_number("power", power, above=0)
        self.alpha, self.power = alpha, power

    def share(self, round: int) -> float:
        """The α of a round, counted from 0.

        >>> [ModifiedLocalGD().share(round) for round in (0, 1, 3)]
        [0.5, 0.6666666666666667, 0.8]
        """
        return 1 - (round + 2) ** -self.power if self.alpha is None else self.alpha

    def __call__(self, given: Aggregation) -> State:
        """Aggregate."""
        target, alpha = self._aggregate(given), self.share(given.round)
        if alpha == 1:
            return target
        known = given.state.get("initial", {})
        initial = known | {key: given.previous[key].clone() for key in target if key not in known}
        given.state["initial"] = initial
        return {
            key: _between(initial[key], value, alpha) if value.is_floating_point() else value
            for key, value in target.items()
        }


def _between(start: Tensor, end: Tensor, share: float) -> Tensor:
    exact = torch.promote_types(end.dtype, torch.float32)
    return ((1 - share) * start.to(end.device, exact) + share * end.to(exact)).to(end.dtype)


SERVER_RULES: dict[str, Callable[[], ServerRule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "modified_local_gd": ModifiedLocalGD,
}


def make_rule(name: str | ServerRule) -> ServerRule:
    """The rule called ``name`` with its default options. A :class:`ServerRule` is returned as it is.

    Raises:
        ValueError: If there is no such rule.

    >>> make_rule("trimmed_mean").trim
    0.1
    """
    if isinstance(name, ServerRule):
        return name
    if name not in SERVER_RULES:
        close = get_close_matches(str(name), SERVER_RULES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(SERVER_RULES)}, or a ServerRule"
        raise ValueError(f"server_rule={name!r} is unknown; {hint}")
    return SERVER_RULES[name]()
