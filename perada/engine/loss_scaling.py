# SPDX-License-Identifier: Apache-2.0
"""Training in float16: one loss scale per client, and optimisers of which some clients skip a step.

Small gradients are zero in float16, so they are multiplied by a scale within the network, and divided by it as they
leave it: what reaches parameters is never scaled. A client whose gradient is not finite skips the step, and its scale
shrinks; after a number of good steps in a row it grows (Micikevicius et al., ICLR 2018). Neither waits for the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from perada.core.ranks import Ranks
from perada.core.states import State, per_client

LossScale = tuple[float, int]
"""A scale, and how many steps in a row were good since it last changed."""


class LossScales:
    """The loss scales (C,) of C clients while they train; all begin at ``start``, or torch's initial scale.

    Their ``options`` are those of torch's scaler, which itself is never used.
    """

    def __init__(self, options: GradScaler, clients: int, start: LossScale | None, device: torch.device) -> None:
        self.options = options
        self.start = start or (options.get_scale(), 0)
        scale, good_steps = self.start
        self.scale = torch.full((clients,), scale, device=device)
        self.good_steps = torch.full((clients,), good_steps, device=device)
        self.skipped = torch.zeros(clients, dtype=torch.int64, device=device)
        self.stepped = torch.zeros(clients, dtype=torch.bool, device=device)

    def enter(self, states: State, rows: slice) -> State:
        """Tensors to hand to the network in the place of ``states`` (C, ...): gradients leave it divided."""
        inverse = 1 / self.scale[rows]
        scaled = dict(states)
        for key, value in states.items():
            if value.requires_grad:
                scaled[key] = _scaled(
                    value.view_as(value), inverse
                )  # a view: hooks of the leaf would be there for good
        return scaled

    def leave(self, logits: Tensor, rows: slice) -> Tensor:
        """The network's logits (C, ...): gradients enter it multiplied."""
        return _scaled(logits, self.scale[rows].clone())  # of now: the backward pass may come after a change

    def update(self, gradients: Sequence[Tensor], rows: slice) -> Tensor:
        """Change the scales of some clients by their gradients (C, ...), in single precision at least.

        It gives (C,) whose gradients are all finite: who is to take the step.
        """
        options = self.options
        scale = self.scale[rows]
        good_steps = self.good_steps[rows]
        finite = torch.ones_like(self.stepped[rows])
        if gradients:  # the largest magnitude is NaN or infinite if any entry is
            largest = [torch.linalg.vector_norm(value.reshape(len(value), -1), torch.inf, 1) for value in gradients]
            finite = torch.stack(largest).isfinite().all(0)
        good_steps.add_(1).mul_(finite)
        grow = good_steps >= options.get_growth_interval()
        growth = torch.where(grow, options.get_growth_factor(), 1.0)
        factor = torch.where(finite, growth, options.get_backoff_factor())
        scale.mul_(factor).clamp_(max=torch.finfo(scale.dtype).max)
        good_steps.masked_fill_(grow, 0)
        self.skipped[rows] += ~finite
        self.stepped[rows] |= finite
        return finite

    def settle(self, sound: Tensor, ranks: Ranks) -> LossScale:
        """Choose the scale that the clients of the next round start from. A collective: all ranks call it.

        It is the smallest with which a client ended on any rank, of those that took a step if any did.

        Args:
            sound: Whose training stayed finite, (C,); others do not count.
            ranks: The processes.
        """
        stepped = self.stepped[sound].tolist()
        scales = list(zip(self.scale[sound].tolist(), self.good_steps[sound].tolist(), strict=True))
        ends = [scale for scale, took_step in zip(scales, stepped, strict=True) if took_step]
        gathered = ranks.gather((ends, scales))
        of_stepped = [scale for own_ends, _ in gathered for scale in own_ends]
        of_all = [scale for _, own_scales in gathered for scale in own_scales]
        return min(of_stepped or of_all, default=self.start)


class KeptScales:
    """What clients and student start the next round from: scales that began afresh would cost skipped steps."""

    def __init__(self, options: GradScaler | None) -> None:
        self.options = options
        self._kept: dict[str, LossScale] = {}

    def open(self, whose: str, count: int, device: torch.device) -> LossScales | None:
        """Scales of ``count`` states, "clients" or "student"; ``None`` where losses are not scaled."""
        return None if self.options is None else LossScales(self.options, count, self._kept.get(whose), device)

    def close(self, whose: str, scales: LossScales | None, sound: Tensor, ranks: Ranks) -> None:
        """Keep what :meth:`LossScales.settle` gives."""
        if scales is not None:
            self._kept[whose] = scales.settle(sound, ranks)

    def state_dict(self) -> dict[str, LossScale]:
        """For a checkpoint."""
        return dict(self._kept)

    def load_state_dict(self, saved: dict[str, LossScale]) -> None:
        """Take the place of the one that wrote ``saved``."""
        self._kept = dict(saved)


def _scaled(value: Tensor, factors: Tensor) -> Tensor:
    """Let the gradient of ``value`` (C, ...) be multiplied by ``factors`` (C,), and return it."""
    if value.requires_grad:
        rows = per_client(factors, value)
        value.register_hook(lambda gradient: gradient * rows)
    return value


class MaskedOptimizer(torch.optim.Optimizer, ABC):
    """Steps the clients it is told, with the arithmetic of ``torch.optim`` on stacked parameters (C, ...).

    A client that skips keeps its parameters, its moments and its number of steps as they were.
    """

    def step_rows(self, stepping: Tensor) -> None:
        """Take a step for the clients ``stepping`` (C,); the others' gradients may be anything."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        rows = per_client(stepping, parameter)
                        gradient = parameter.grad.where(rows, 0)
                        self._step(parameter, gradient, rows.to(parameter), group)

    @abstractmethod
    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        """Step ``parameter`` (C, ...), where ``rows`` (C, 1, ...) is 1 and not 0, as is the gradient there."""


class MaskedSGD(MaskedOptimizer):
    """``torch.optim.SGD`` with momentum and weight decay, of stacked leaves (C, ...)."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        if group["weight_decay"]:
            gradient = gradient.addcmul(parameter, rows, value=group["weight_decay"])
        if group["momentum"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"].mul_(1 - rows * (1 - group["momentum"])).add_(gradient) * rows
        parameter.sub_(gradient, alpha=group["lr"])


class MaskedAdam(MaskedOptimizer):
    """``torch.optim.Adam`` of stacked leaves (C, ...), or ``AdamW`` if the weight decay is ``decoupled``."""

    def __init__(
        self, parameters: list[Tensor], lr: float, weight_decay: float = 0, *, decoupled: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.betas = (0.9, 0.999)
        self.eps = 1e-8
        self.decoupled = decoupled

    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        state = self.state[parameter]
        beta1, beta2 = self.betas
        if not state:
            state["step"] = parameter.new_zeros(len(parameter))
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        decay = rows * group["weight_decay"]
        if self.decoupled:
            parameter.mul_(1 - decay * group["lr"])
        else:
            gradient = gradient.addcmul(parameter, decay)
        steps = state["step"].add_(rows.flatten()).view_as(rows)
        mean = state["exp_avg"].lerp_(gradient, rows * (1 - beta1))
        square = state["exp_avg_sq"].mul_(1 - rows * (1 - beta2)).addcmul_(gradient, gradient, value=1 - beta2)
        steps = steps.clamp(min=1)  # 0 before the first step that is not skipped
        scale = (square / (1 - beta2**steps)).sqrt().add_(self.eps)
        parameter.addcdiv_(mean * (rows / (1 - beta1**steps)), scale, value=-group["lr"])
