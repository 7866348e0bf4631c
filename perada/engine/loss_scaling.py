# SPDX-License-Identifier: Apache-2.0
"""Half precision: one loss scale per client in float16, optimisers in which some clients skip a step, and its speed.

Small gradients would be zero in float16. They are multiplied by a scale within the network, and divided by it as they
leave it: the gradients of parameters are not scaled. A client whose gradient is not finite skips the step, and its
scale shrinks; after a number of good steps in a row it grows (Micikevicius et al., ICLR 2018). Nothing here waits for
the device.
"""

import timeit
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from perada.core.ranks import Ranks
from perada.core.states import State, finite_rows, per_client

LossScale = tuple[float, int]
"""A scale, and how many steps in a row were good since it last changed."""


class LossScales:
    """The loss scales (C,) of C clients while they train.

    Args:
        options: Torch's scaler, of which only the options are read.
        clients: C.
        start: Scale from which all clients start; ``None`` for torch's initial one.
        device: Where the scales are.

    Attributes:
        scale: Scale (C,) of each client.
        good_steps: Number (C,) of good steps in a row since a scale last changed.
        skipped: Number (C,) of skipped steps.
        stepped: Whether (C,) a client took any step.
    """

    def __init__(self, options: GradScaler, clients: int, start: LossScale | None, device: torch.device) -> None:
        if start is None:
            start = (options.get_scale(), 0)
        self.options = options
        self.start = start
        scale, good_steps = start
        self.scale = torch.full((clients,), scale, device=device)
        self.good_steps = torch.full((clients,), good_steps, device=device)
        self.skipped = torch.zeros(clients, dtype=torch.int64, device=device)
        self.stepped = torch.zeros(clients, dtype=torch.bool, device=device)

    def enter(self, states: State, rows: slice) -> State:
        """Return the tensors to pass to the network in place of ``states`` (C, ...), which divide their gradients."""
        inverse = 1 / self.scale[rows]
        scaled = dict(states)
        for key, value in states.items():
            if value.requires_grad:
                # A hook of the leaf itself would stay for good, that of a view goes with the pass.
                scaled[key] = _scaled(value.view_as(value), inverse)
        return scaled

    def leave(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the network's logits (C, ...), whose gradients are multiplied in the backward pass."""
        # A copy of the present scales, which may change before the backward pass.
        return _scaled(logits, self.scale[rows].clone())

    def update(self, gradients: Sequence[Tensor], rows: slice) -> Tensor:
        """Adjust the scales of the clients in ``rows``.

        Args:
            gradients: Their gradients (C, ...), in single precision at least.
            rows: Which clients take part in the step.

        Returns:
            Whether (C,) all gradients of a client are finite, so that it takes the step.
        """
        options = self.options
        # Views, through which the scales and the numbers of steps are changed.
        scale = self.scale[rows]
        good_steps = self.good_steps[rows]
        finite = torch.ones_like(self.stepped[rows])
        if gradients:
            finite = torch.stack([finite_rows(gradient) for gradient in gradients]).all(0)

        # One step more in a row, or none after a step that is skipped.
        good_steps.add_(1).mul_(finite)
        grows = good_steps >= options.get_growth_interval()
        growth = torch.where(grows, options.get_growth_factor(), 1.0)
        factor = torch.where(finite, growth, options.get_backoff_factor())
        largest_scale = torch.finfo(scale.dtype).max
        scale.mul_(factor).clamp_(max=largest_scale)
        good_steps.masked_fill_(grows, 0)
        self.skipped[rows] += ~finite
        self.stepped[rows] |= finite
        return finite

    def settle(self, sound: Tensor, ranks: Ranks) -> LossScale:
        """Choose the scale from which the clients of the next round start. A collective: all ranks must call this.

        It is the smallest final scale of the clients on all ranks, of those that took a step if any did.

        Args:
            sound: Whether (C,) a client's training stayed finite; others do not count.
            ranks: The processes.
        """
        scales = self.scale[sound].tolist()
        good_steps = self.good_steps[sound].tolist()
        stepped = self.stepped[sound].tolist()
        clients_of_rank = list(zip(scales, good_steps, stepped, strict=True))

        all_scales: list[LossScale] = []
        scales_of_stepped: list[LossScale] = []
        for clients in ranks.gather(clients_of_rank):
            for scale, num_good_steps, has_stepped in clients:
                all_scales.append((scale, num_good_steps))
                if has_stepped:
                    scales_of_stepped.append((scale, num_good_steps))
        return min(scales_of_stepped or all_scales, default=self.start)


class KeptScales:
    """The scales from which clients and student start the next round, since a fresh start would cost skipped steps."""

    def __init__(self, options: GradScaler | None) -> None:
        self.options = options
        self._scales: dict[str, LossScale] = {}

    def open(self, role: str, count: int, device: torch.device) -> LossScales | None:
        """Return the scales of ``count`` states, of "clients" or the "student"; ``None`` if losses are not scaled."""
        if self.options is None:
            return None
        return LossScales(self.options, count, self._scales.get(role), device)

    def close(self, role: str, scales: LossScales | None, sound: Tensor, ranks: Ranks) -> None:
        """Keep the result of :meth:`LossScales.settle` for the next round. A collective."""
        if scales is not None:
            self._scales[role] = scales.settle(sound, ranks)

    def state_dict(self) -> dict[str, LossScale]:
        """Return the scales for a checkpoint."""
        return dict(self._scales)

    def load_state_dict(self, saved: dict[str, LossScale]) -> None:
        """Restore the scales of a checkpoint."""
        self._scales = dict(saved)


def _scaled(value: Tensor, factors: Tensor) -> Tensor:
    """Multiply the gradient of ``value`` (C, ...) by ``factors`` (C,) in the backward pass; return the value."""
    if value.requires_grad:
        rows = per_client(factors, value)
        value.register_hook(lambda gradient: gradient * rows)
    return value


class MaskedOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimisers of stacked parameters (C, ...) in which only some clients take a step.

    The arithmetic is that of ``torch.optim``. A client that skips a step keeps its parameters, moments and step count.
    """

    def step_rows(self, stepping: Tensor) -> None:
        """Take a step for the clients in the mask ``stepping`` (C,); the gradients of the others are ignored."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    rows = per_client(stepping, parameter)
                    gradient = parameter.grad.where(rows, 0)
                    self._step(parameter, gradient, rows.to(parameter), group)

    @abstractmethod
    def _step(self, parameter: Tensor, gradient: Tensor, rows: Tensor, group: dict[str, float]) -> None:
        """Update a parameter in place.

        Args:
            parameter: Parameter (C, ...).
            gradient: Its gradient, 0 for clients that skip the step.
            rows: 1 for the clients that take the step and 0 for the others, (C, 1, ...).
            group: Options such as the learning rate.
        """


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
            buffer = state["momentum_buffer"]
            # The buffer of a client that skips is multiplied by 1.
            decay = 1 - rows * (1 - group["momentum"])
            buffer.mul_(decay).add_(gradient)
            gradient = buffer * rows
        parameter.sub_(gradient, alpha=group["lr"])


class MaskedAdam(MaskedOptimizer):
    """``torch.optim.Adam`` of stacked leaves (C, ...), or ``AdamW`` if the weight decay is ``decoupled``."""

    def __init__(
        self,
        parameters: list[Tensor],
        lr: float,
        weight_decay: float = 0,
        *,
        decoupled: bool = False,
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
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        decay = rows * group["weight_decay"]
        if self.decoupled:
            parameter.mul_(1 - decay * group["lr"])
        else:
            gradient = gradient.addcmul(parameter, decay)

        # Everything is multiplied by `rows`, so that nothing changes for a client that skips the step. Kingma and Ba
        # (ICLR 2015), Algorithm 1: m and v are moving averages of the gradients and of their squares.
        steps = state["step"].add_(rows.flatten()).view_as(rows)  # t
        mean = state["exp_avg"].lerp_(gradient, rows * (1 - beta1))  # m
        square_decay = 1 - rows * (1 - beta2)
        square = state["exp_avg_sq"].mul_(square_decay).addcmul_(gradient, gradient, value=1 - beta2)  # v

        # A client has taken 0 steps until the first that it does not skip, and the bias corrections divide by 0.
        steps = steps.clamp(min=1)
        corrected_mean = mean * (rows / (1 - beta1**steps))
        corrected_square = square / (1 - beta2**steps)
        denominator = corrected_square.sqrt().add_(self.eps)
        parameter.addcdiv_(corrected_mean, denominator, value=-group["lr"])


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds of a 1024×1024 matrix product, the fastest of five."""
    matrix = torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=5))
