# SPDX-License-Identifier: Apache-2.0
"""Server rules, which turn the clients' updates of a round into the next global state."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_known, check_number, floor_share, without_effect
from perada.core.states import State
from perada.server.aggregate import Aggregation, ComposedRule, Mean, ServerRule, client_weights, mean
from perada.server.low_rank import SVD, LoRAFair
from perada.server.robust import FLTrust, GeometricMedian, Krum, NormClipping


class _Coordinatewise(ServerRule):
    """Base class of rules on the sorted values of each coordinate. NaN counts as the largest value."""

    weighted = False

    def __call__(self, aggregation: Aggregation) -> State:
        result: State = {}
        for name, value in aggregation.updates.gathered_all().items():
            if value.is_floating_point():
                result[name] = self._reduce_sorted(value.sort(0).values)
            else:
                # Counters of batch norms, for which an order means nothing.
                result |= mean({name: value}, aggregation.weights)
        return result

    @abstractmethod
    def _reduce_sorted(self, ordered: Tensor) -> Tensor:
        """Reduce values (C, ...), which are sorted along C in ascending order, to one tensor (...)."""


class Median(_Coordinatewise):
    """Take the coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

    It is robust to arbitrary values from fewer than half of the clients. The median of an even number of clients is the
    mean of the two values in the middle.

    It ignores the clients' weights. A NaN counts as the largest value. Source: [Yin et al., ICML
    2018](https://arxiv.org/abs/1803.01498).
    """

    def _reduce_sorted(self, ordered: Tensor) -> Tensor:
        low = ordered[(len(ordered) - 1) // 2]
        high = ordered[len(ordered) // 2]
        if len(ordered) % 2:
            return low.clone()
        # Values are halved first, since their sum could overflow in float16.
        return low / 2 + high / 2


class TrimmedMean(_Coordinatewise):
    """Average each coordinate without its lowest and highest values (Yin et al., ICML 2018, Algorithm 1, option II).

    It ignores the clients' weights. A NaN counts as the largest value. Source: [Yin et al., ICML
    2018](https://arxiv.org/abs/1803.01498).

    Args:
        trim: Share of the clients dropped at each end, between 0 and 1/2: ``floor(trim * C)`` of C clients.
    """

    def __init__(self, trim: float = 0.1) -> None:
        check_number("trim", trim, gt=0, lt=0.5, hint="it is the share of the clients to drop at each end")
        self.trim = trim

    def check(self, num_clients: int) -> None:
        """Raise an OptionError if too few clients take part in a round for any to be dropped."""
        if floor_share(self.trim, num_clients) > 0:
            return
        enough = num_clients + 1
        while floor_share(self.trim, enough) == 0:
            enough += 1
        raise OptionError(
            f"trim={self.trim!r} drops none of {num_clients} clients per round; sample at least {enough}, or "
            "raise trim",
            name="trim",
            value=self.trim,
        )

    def _reduce_sorted(self, ordered: Tensor) -> Tensor:
        num_dropped = floor_share(self.trim, len(ordered))
        remaining = ordered[num_dropped : len(ordered) - num_dropped]
        # Tensor.mean() would not do: this function sums tensors of half precision in double precision.
        means = mean({"coordinates": remaining}, client_weights("uniform", [1] * len(remaining)))
        return means["coordinates"]


class ModifiedLocalGD(ComposedRule):
    """Pull the aggregate back to the initial state of the run: w ← (1 − α_k) w⁰ + α_k · aggregate.

    Zhu, Vardhan & Mazumdar, Algorithm 3 (Modified Local-GD). It applies to parameters and running statistics; integer
    counters are those of the aggregate.

    Source: [Zhu et al., 2024](https://arxiv.org/abs/2412.07971).

    Args:
        alpha: A constant α instead of the schedule. With 1, the result is that of ``aggregate`` to the last bit.
        power: Exponent of the schedule α_k = 1 − (k + 1)^−power for rounds k = 1, 2, …; 1 in the paper's example. The
            paper's theorem requires Σ (1 − α_k) = ∞, which holds for a power of at most 1.
        aggregate: Rule whose result is pulled back. Default: the mean.
    """

    function_of_mean = True

    def __init__(self, alpha: float | None = None, power: float = 1.0, aggregate: ServerRule | None = None) -> None:
        super().__init__(aggregate)
        check_number("alpha", alpha, gt=0, le=1, optional=True)
        check_number("power", power, gt=0)
        if alpha is not None and power != 1:
            raise without_effect("power", power, f"alpha={alpha}", "leave alpha out")
        self.alpha = alpha
        self.power = power

    def share(self, round: int) -> float:
        """Return the α of a round; rounds are counted from 0.

        >>> [ModifiedLocalGD().share(round) for round in (0, 1, 3)]
        [0.5, 0.6666666666666667, 0.8]
        """
        if self.alpha is not None:
            return self.alpha
        # The paper counts rounds from 1.
        return 1 - float((round + 2) ** -self.power)

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        target = self._aggregate_inner(aggregation)
        alpha = self.share(aggregation.round)
        if alpha == 1:
            return target
        # w⁰ is the state before the first round that is aggregated, and is kept in the server's state.
        initial = dict(aggregation.state.get("initial", {}))
        for key in target:
            if key not in initial:
                # A copy, since the state before the round may be changed in place.
                initial[key] = aggregation.previous[key].clone()
        aggregation.state["initial"] = initial

        moved = {}
        for key, end in target.items():
            moved[key] = end
            if end.is_floating_point():
                exact = torch.promote_types(end.dtype, torch.float32)
                start = initial[key].to(end.device, exact)
                pulled_back = (1 - alpha) * start + alpha * end.to(exact)
                moved[key] = pulled_back.to(end.dtype)
        return moved


class _Optimizer(ComposedRule):
    """Base class of rules that apply an optimiser; its negative gradient is the aggregate's change Δ of parameters."""

    function_of_mean = True

    def __init__(self, lr: float, aggregate: ServerRule | None) -> None:
        super().__init__(aggregate)
        check_number("lr", lr, gt=0)
        self.lr = lr

    def __call__(self, aggregation: Aggregation) -> State:
        target = self._aggregate_inner(aggregation)
        result = dict(target)
        # Running statistics stay those of the aggregate, since a variance that overshoots could become negative.
        for key, value in target.items():
            if key in aggregation.parameters and value.is_floating_point():
                result[key] = self._updated_parameter(aggregation, key, value)
        return result

    def _updated_parameter(self, aggregation: Aggregation, key: str, target: Tensor) -> Tensor:
        """Return a parameter after the optimiser's step.

        Args:
            aggregation: The updates and the state before the round.
            key: Name of the parameter.
            target: Value of the parameter in the aggregate.
        """
        # In single precision at least: τ² and small changes would vanish in half precision.
        exact = torch.promote_types(target.dtype, torch.float32)
        previous = aggregation.previous[key].to(target.device, exact)
        delta = target.to(exact) - previous
        step = self._compute_direction(aggregation.state, key, delta)
        moved = previous + self.lr * step
        return moved.to(target.dtype)

    @abstractmethod
    def _compute_direction(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        """Compute the direction of the step for a parameter.

        Args:
            state: The rule's tensors, ``{name: {parameter: tensor}}``, which are read and replaced.
            key: Name of the parameter.
            delta: Change Δ of the parameter in the aggregate.
        """


def _read_rule_state(state: dict[str, State], name: str, key: str, delta: Tensor, start: float) -> Tensor:
    """Return a tensor of the rule's state.

    Args:
        state: The rule's tensors, ``{name: {parameter: tensor}}``.
        name: Name of the quantity, such as ``momentum``.
        key: Name of the parameter.
        delta: Change of the parameter, for the shape, dtype and device of the result.
        start: Value of all elements before the first round.
    """
    tensors = state.get(name, {})
    if key not in tensors:
        return torch.full_like(delta, start)
    return tensors[key].to(delta)


def _write_rule_state(state: dict[str, State], name: str, key: str, value: Tensor) -> None:
    """Set a tensor of the rule's state; dictionaries are replaced, since a checkpoint may refer to the old ones."""
    state[name] = state.get(name, {}) | {key: value}


class FedAvgM(_Optimizer):
    """Server momentum: u ← momentum · u + Δ, w ← w + lr · u (Hsu, Qi & Brown, 2019).

    Source: [Hsu et al., 2019](https://arxiv.org/abs/1909.06335).

    Args:
        lr: Server learning rate. With ``lr=1, momentum=0`` the result is that of ``aggregate`` to the last bit.
        momentum: Momentum coefficient, from 0 to below 1.
        aggregate: Rule that computes Δ. Default: the mean.
    """

    def __init__(self, lr: float = 1.0, momentum: float = 0.9, aggregate: ServerRule | None = None) -> None:
        super().__init__(lr, aggregate)
        check_number("momentum", momentum, ge=0, lt=1)
        self.momentum = momentum

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate."""
        if self.lr == 1 and self.momentum == 0:
            return self._aggregate_inner(aggregation)
        return super().__call__(aggregation)

    def _compute_direction(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        previous_momentum = _read_rule_state(state, "momentum", key, delta, start=0.0)  # u
        momentum = self.momentum * previous_momentum + delta
        _write_rule_state(state, "momentum", key, momentum)
        return momentum


class FedAdam(_Optimizer):
    """Adam on the server: v ← β₂ v + (1 − β₂) Δ² (Reddi et al., ICLR 2021, Algorithm 2).

    m ← β₁ m + (1 − β₁) Δ, then w ← w + lr · m / (√v + τ). m starts at 0 and v at τ², without bias correction.

    The first steps are therefore short along m: 1 − β₁ of their later length. Source: [Reddi et al., ICLR
    2021](https://arxiv.org/abs/2003.00295).

    Args:
        lr: Server learning rate η.
        beta1: Decay of the momentum m.
        beta2: Decay of v.
        tau: Degree of adaptivity τ. The smaller it is, the more similar are the steps of all coordinates.
        aggregate: Rule that computes Δ. Default: the mean.
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

    def _compute_direction(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        previous_momentum = _read_rule_state(state, "momentum", key, delta, start=0.0)  # m
        momentum = self.beta1 * previous_momentum + (1 - self.beta1) * delta
        _write_rule_state(state, "momentum", key, momentum)

        previous_variance = _read_rule_state(state, "variance", key, delta, start=self.tau**2)  # v
        variance = self._next_variance(previous_variance, delta.square())
        _write_rule_state(state, "variance", key, variance)
        return momentum / (variance.sqrt() + self.tau)

    def _next_variance(self, v: Tensor, squared: Tensor) -> Tensor:
        """Compute the next v, given Δ²."""
        return self.beta2 * v + (1 - self.beta2) * squared


class FedYogi(FedAdam):
    """Yogi on the server: v ← v − (1 − β₂) Δ² sign(v − Δ²) (Reddi et al., ICLR 2021, Algorithm 2).

    It takes the options of :class:`FedAdam`.

    Source: [Reddi et al., ICLR 2021](https://arxiv.org/abs/2003.00295).
    """

    def _next_variance(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


class FedAdagrad(FedAdam):
    """Adagrad on the server: v ← v + Δ² (Reddi et al., ICLR 2021, Algorithm 2).

    Source: [Reddi et al., ICLR 2021](https://arxiv.org/abs/2003.00295).

    Args:
        lr: Server learning rate η.
        beta1: Decay of the momentum m. Default: 0, as in the paper's experiments, since Adagrad has no momentum.
        tau: Degree of adaptivity τ. The smaller it is, the more similar are the steps of all coordinates.
        aggregate: Rule that computes Δ. Default: the mean.
    """

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        aggregate: ServerRule | None = None,
    ) -> None:
        super().__init__(lr, beta1, tau=tau, aggregate=aggregate)

    def _next_variance(self, v: Tensor, squared: Tensor) -> Tensor:
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
"""The rules by the names that ``server_rule`` takes, each as a function that makes the rule with its defaults."""


def make_rule(name: str | ServerRule) -> ServerRule:
    """Return a server rule by its name, with default options; a :class:`ServerRule` is returned as it is.

    >>> make_rule("trimmed_mean").trim
    0.1
    """
    if isinstance(name, ServerRule):
        return name
    check_known("server_rule", name, SERVER_RULES, ", or a ServerRule")
    return SERVER_RULES[name]()
