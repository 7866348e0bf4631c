# SPDX-License-Identifier: Apache-2.0
"""SGD, Adam and AdamW on stacked parameters (C, ...) of which some clients skip a step, without waiting for the device.

The arithmetic is that of ``torch.optim``, client by client. A client that skips keeps its parameters, its moments and
its number of steps as they were.
"""

import torch
from torch import Tensor


class MaskedOptimizer(torch.optim.Optimizer):
    """An optimiser that steps the clients it is told."""

    def step_rows(self, stepping: Tensor) -> None:
        """Take a step for the clients ``stepping`` (C,); the others' gradients may be anything."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        rows = stepping.view(-1, *[1] * (parameter.dim() - 1))
                        gradient = parameter.grad.where(rows, 0)
                        self._step(parameter, gradient, rows.to(parameter), group)

    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        """Step ``parameter`` (C, ...), where ``rows`` (C, 1, ...) is 1 and not 0, as is the gradient there."""
        raise NotImplementedError


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
        self.betas, self.eps, self.decoupled = (0.9, 0.999), 1e-8, decoupled

    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        state, (beta1, beta2) = self.state[parameter], self.betas
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
