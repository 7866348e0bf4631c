# SPDX-License-Identifier: Apache-2.0
"""Server rules that treat the round's change as a gradient: momentum, Adagrad, Adam and Yogi on the server."""

import torch
from torch import Tensor

from perada.core.checks import check_number
from perada.core.states import State
from perada.server.rule_base import Aggregation, ComposedRule, ServerRule


class _Optimizer(ComposedRule):
    """Treats the aggregate's change Δ of the parameters as minus a gradient, and takes a step with it.

    Running statistics and counters take the aggregate's value: a variance that overshot could become negative.
    """

    function_of_mean = True

    def __init__(self, lr: float, aggregate: ServerRule | None) -> None:
        super().__init__(aggregate)
        check_number("lr", lr, above=0)
        self.lr = lr

    def __call__(self, given: Aggregation) -> State:
        target = self._aggregate(given)
        return target | {
            key: self._moved(given, key, value)
            for key, value in target.items()
            if key in given.parameters and value.is_floating_point()
        }

    def _moved(self, given: Aggregation, key: str, target: Tensor) -> Tensor:
        exact = torch.promote_types(target.dtype, torch.float32)  # τ² and small changes would vanish in half precision
        previous = given.previous[key].to(target.device, exact)
        step = self._step(given.state, key, target.to(exact) - previous)
        return (previous + self.lr * step).to(target.dtype)

    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        """Direction of the step for Δ = ``delta``; reads and replaces ``state[...][key]``."""
        raise NotImplementedError


def _kept(state: dict[str, State], name: str, key: str, delta: Tensor, start: float) -> Tensor:
    """``state[name][key]`` where Δ is; before the first round, ``start`` everywhere."""
    value = state.get(name, {}).get(key)
    return torch.full_like(delta, start) if value is None else value.to(delta)


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
        check_number("momentum", momentum, least=0, below=1)
        self.momentum = momentum

    def __call__(self, given: Aggregation) -> State:
        """Aggregate."""
        return self._aggregate(given) if (self.lr, self.momentum) == (1, 0) else super().__call__(given)

    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        return _keep(state, "momentum", key, self.momentum * _kept(state, "momentum", key, delta, 0.0) + delta)


class _Adaptive(_Optimizer):
    """m ← β₁ m + (1 − β₁) Δ, then w ← w + lr · m / (√v + τ). m starts at 0 and v at τ², without bias correction."""

    def __init__(self, lr: float, beta1: float, tau: float, aggregate: ServerRule | None) -> None:
        super().__init__(lr, aggregate)
        check_number("beta1", beta1, least=0, below=1)
        check_number("tau", tau, above=0)
        self.beta1, self.tau = beta1, tau

    def _step(self, state: dict[str, State], key: str, delta: Tensor) -> Tensor:
        first = _kept(state, "momentum", key, delta, 0.0)
        first = _keep(state, "momentum", key, self.beta1 * first + (1 - self.beta1) * delta)
        second = self._second(_kept(state, "variance", key, delta, self.tau**2), delta.square())
        return first / (_keep(state, "variance", key, second).sqrt() + self.tau)

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        """Next v, given Δ²."""
        raise NotImplementedError


class FedAdagrad(_Adaptive):
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
        super().__init__(lr, beta1, tau, aggregate)

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


class FedAdam(_Adaptive):
    """Adam on the server: v ← β₂ v + (1 − β₂) Δ² (Reddi et al., ICLR 2021, Algorithm 2).

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
        super().__init__(lr, beta1, tau, aggregate)
        check_number("beta2", beta2, least=0, below=1)
        self.beta2 = beta2

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


class FedYogi(FedAdam):
    """Yogi on the server: v ← v − (1 − β₂) Δ² sign(v − Δ²) (Reddi et al., ICLR 2021, Algorithm 2).

    It takes the options of :class:`FedAdam`.
    """

    def _second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
