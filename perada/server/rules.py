# SPDX-License-Identifier: Apache-2.0
"""Server rules: how the clients' updates of a round become the next global state."""

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_known, check_number, floor_share
from perada.core.states import State
from perada.server.aggregate import Aggregation, ComposedRule, Mean, ServerRule, client_weights, mean
from perada.server.low_rank import SVD, LoRAFair
from perada.server.robust import FLTrust, GeometricMedian, Krum, NormClipping


class _Coordinatewise(ServerRule):
    """A rule on the sorted values of each coordinate. A NaN counts as the largest."""

    weighted = False

    def __call__(self, aggregation: Aggregation) -> State:
        result: State = {}
        for name, value in aggregation.updates.gathered_all().items():
            if value.is_floating_point():
                ordered, _ = value.sort(0)
                result[name] = self._reduce(ordered)
            else:
                result |= mean({name: value}, aggregation.weights)
        return result

    @abstractmethod
    def _reduce(self, ordered: Tensor) -> Tensor:
        """What the rule makes (...) of the values (C, ...), which rise along C."""


class Median(_Coordinatewise):
    """The coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

    It withstands nonsense from fewer than half of the clients. Of an even number, the two in the middle are averaged.
    """

    def _reduce(self, ordered: Tensor) -> Tensor:
        low = ordered[(len(ordered) - 1) // 2]
        high = ordered[len(ordered) // 2]
        return low.clone() if len(ordered) % 2 else low / 2 + high / 2  # halved first: the sum may not fit in float16


class TrimmedMean(_Coordinatewise):
    """The coordinate-wise mean without the lowest and highest values (Yin et al., ICML 2018, Algorithm 1, option II).

    Args:
        trim: Share of the clients dropped at each end, between 0 and 1/2: ``floor(trim * C)`` of C clients.
    """

    def __init__(self, trim: float = 0.1) -> None:
        check_number("trim", trim, gt=0, lt=0.5, hint="it is the share of the clients to drop at each end")
        self.trim = trim

    def check(self, clients: int) -> None:
        """Refuse so few clients a round that none would be dropped."""
        if floor_share(self.trim, clients) == 0:
            need = next(c for c in range(clients + 1, math.ceil(1 / self.trim) + 2) if floor_share(self.trim, c))
            raise OptionError(
                f"trim={self.trim!r} drops none of {clients} clients a round; sample at least {need}, or raise trim",
                name="trim",
                value=self.trim,
            )

    def _reduce(self, ordered: Tensor) -> Tensor:
        cut = floor_share(self.trim, len(ordered))
        remaining = ordered[cut : len(ordered) - cut]
        return mean({"": remaining}, client_weights("uniform", [1] * len(remaining)))[
            ""
        ]  # halves are summed as elsewhere


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
        check_number("alpha", alpha, gt=0, le=1, optional=True)
        check_number("power", power, gt=0)
        self.alpha = alpha
        self.power = power

    def share(self, round: int) -> float:
        """The α of a round, counted from 0.

        >>> [ModifiedLocalGD().share(round) for round in (0, 1, 3)]
        [0.5, 0.6666666666666667, 0.8]
        """
        return 1 - (round + 2) ** -self.power if self.alpha is None else self.alpha

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        target = self._aggregate(aggregation)
        alpha = self.share(aggregation.round)
        if alpha == 1:
            return target
        initial_known = aggregation.state.get("initial", {})
        initial = initial_known | {key: aggregation.previous[key].clone() for key in target if key not in initial_known}
        aggregation.state["initial"] = initial
        moved = {}
        for key, end in target.items():
            exact = torch.promote_types(end.dtype, torch.float32)
            start = initial[key].to(end.device, exact)
            moved[key] = ((1 - alpha) * start + alpha * end.to(exact)).to(end.dtype) if end.is_floating_point() else end
        return moved


class _Optimizer(ComposedRule):
    """Treats the aggregate's change Δ of the parameters as minus a gradient, and takes a step with it."""

    function_of_mean = True

    def __init__(self, lr: float, aggregate: ServerRule | None) -> None:
        super().__init__(aggregate)
        check_number("lr", lr, gt=0)
        self.lr = lr

    def __call__(self, aggregation: Aggregation) -> State:
        target = self._aggregate(aggregation)  # whose statistics stay: a variance that overshot could become negative
        return target | {
            key: self._moved(aggregation, key, value)
            for key, value in target.items()
            if key in aggregation.parameters and value.is_floating_point()
        }

    def _moved(self, aggregation: Aggregation, key: str, target: Tensor) -> Tensor:
        exact = torch.promote_types(target.dtype, torch.float32)  # τ² and small changes would vanish in half precision
        previous = aggregation.previous[key].to(target.device, exact)
        step = self._step(aggregation.state, key, target.to(exact) - previous)
        return (previous + self.lr * step).to(target.dtype)

    @abstractmethod
    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        """Direction of the step for Δ = ``delta``; reads and replaces ``state[...][key]``."""


def _kept(state: dict[str, State], name: str, key: str, delta: Tensor, start: float) -> Tensor:
    """``state[name][key]`` where Δ is; before the first round, ``start`` everywhere."""
    return state.get(name, {}).get(key, torch.full_like(delta, start)).to(delta)


def _keep(state: dict[str, State], name: str, key: str, value: Tensor) -> Tensor:
    state[name] = state.get(name, {}) | {key: value}
    return value


class FedAvgM(_Optimizer):
    """Server momentum: u ← momentum · u + Δ, w ← w + lr · u (Hsu, Qi & Brown, 2019).

    Args:
        lr: Server learning rate. With ``lr=1, momentum=0`` this is ``aggregate``, to the last bit.
        momentum: Share of the last step that is kept.
        aggregate: Where Δ comes from. Default: the mean.
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.9, aggregate: ServerRule | None = None) -> None:
        super().__init__(lr, aggregate)
        check_number("momentum", momentum, ge=0, lt=1)
        self.momentum = momentum

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        return self._aggregate(aggregation) if (self.lr, self.momentum) == (1, 0) else super().__call__(aggregation)

    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        return _keep(state, "momentum", key, self.momentum * _kept(state, "momentum", key, delta, 0.0) + delta)


class FedAdam(_Optimizer):
    """Adam on the server: v ← β₂ v + (1 − β₂) Δ² (Reddi et al., ICLR 2021, Algorithm 2).

    m ← β₁ m + (1 − β₁) Δ, then w ← w + lr · m / (√v + τ). m starts at 0 and v at τ², without bias correction.

    Args:
        lr: Server learning rate η.
        beta1: Decay of the momentum m.
        beta2: Decay of v.
        tau: Degree of adaptivity τ. The smaller it is, the more alike are the steps of all coordinates.
        aggregate: Where Δ comes from. Default: the mean.
    """

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        aggregate: ServerRule | None = None,
    ) -> None:
        super().__init__(lr, aggregate)
        check_number("beta1", beta1, ge=0, lt=1)
        check_number("tau", tau, gt=0)
        check_number("beta2", beta2, ge=0, lt=1)
        self.beta1 = beta1
        self.beta2 = beta2
        self.tau = tau

    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        first = _kept(state, "momentum", key, delta, 0.0)
        first = _keep(state, "momentum", key, self.beta1 * first + (1 - self.beta1) * delta)
        second = self._second(_kept(state, "variance", key, delta, self.tau**2), delta.square())
        return first / (_keep(state, "variance", key, second).sqrt() + self.tau)

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        """Next v, given Δ²."""
        return self.beta2 * v + (1 - self.beta2) * squared


class FedYogi(FedAdam):
    """Yogi on the server: v ← v − (1 − β₂) Δ² sign(v − Δ²) (Reddi et al., ICLR 2021, Algorithm 2).

    It takes the options of :class:`FedAdam`.
    """

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


class FedAdagrad(FedAdam):
    """Adagrad on the server: v ← v + Δ² (Reddi et al., ICLR 2021, Algorithm 2).

    Args:
        lr: Server learning rate η.
        beta1: Decay of the momentum m. Default: 0, as in the paper's experiments, since Adagrad has no momentum.
        tau: Degree of adaptivity τ. The smaller it is, the more alike are the steps of all coordinates.
        aggregate: Where Δ comes from. Default: the mean.
    """

    def __init__(
        self, lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3, aggregate: ServerRule | None = None
    ) -> None:
        super().__init__(lr, beta1, tau=tau, aggregate=aggregate)

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


SERVER_RULES: dict[str, Callable[[], ServerRule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "geometric_median": GeometricMedian,
    "norm_clipping": NormClipping,
    "fltrust": FLTrust,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "modified_local_gd": ModifiedLocalGD,
    "svd": SVD,
    "lora_fair": LoRAFair,
}


def make_rule(name: str | ServerRule) -> ServerRule:
    """The rule called ``name`` with its default options; a :class:`ServerRule` is returned as it is.

    >>> make_rule("trimmed_mean").trim
    0.1
    """
    if isinstance(name, ServerRule):
        return name
    check_known("server_rule", name, SERVER_RULES, ", or a ServerRule")
    return SERVER_RULES[name]()
