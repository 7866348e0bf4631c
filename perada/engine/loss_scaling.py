# SPDX-License-Identifier: Apache-2.0
"""Half precision: one loss scale per client in float16, and optimisers in which some clients can skip a step.

Small gradients underflow to zero in float16, so the backward pass multiplies them by a scale where it enters the
network, and divides them by it where they reach the parameters, whose gradients are therefore not scaled. A client
whose gradients are not finite skips the step and its scale shrinks; after a number of good steps in a row it grows
(Micikevicius et al., ICLR 2018). All decisions within a step are tensor operations, so that the host does not wait for
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
"""A scale, and the number of good steps in a row since it last changed."""


class LossScales:
    """The loss scales (C,) of C clients while they train.

    Args:
        scaler: A scaler of torch, which holds the options; it does not scale anything itself.
        num_clients: Number C of clients.
        start: Scale from which all clients start; ``None`` for torch's initial scale.
        device: Device of the scales.

    Attributes:
        scale: Scale (C,) of each client.
        good_steps: Number (C,) of good steps in a row since a scale last changed.
        skipped: Number (C,) of skipped steps.
        stepped: Whether (C,) a client took any step.
    """

    def __init__(self, scaler: GradScaler, num_clients: int, start: LossScale | None, device: torch.device) -> None:
        if start is None:
            start = (scaler.get_scale(), 0)
        self.options = scaler
        self.start = start
        scale, good_steps = start
        self.scale = torch.full((num_clients,), scale, device=device)
        self.good_steps = torch.full((num_clients,), good_steps, device=device)
        self.skipped = torch.zeros(num_clients, dtype=torch.int64, device=device)
        self.stepped = torch.zeros(num_clients, dtype=torch.bool, device=device)

    def enter(self, states: State, client_slice: slice) -> State:
        """Return states whose gradients are divided by the loss scales on their way to the parameters.

        Args:
            states: States (C, ...) of the clients in ``client_slice``; those that are trained require gradients.
            client_slice: Which clients run through the network.

        Returns:
            The tensors to pass to the network; their values are those of ``states``.
        """
        inverse = 1 / self.scale[client_slice]
        scaled = dict(states)
        for key, value in states.items():
            if value.requires_grad:
                # A hook on the leaf itself would add up over the steps; one on a view is freed with the graph.
                scaled[key] = _scale_gradient(value.view_as(value), inverse)
        return scaled

    def leave(self, logits: Tensor, client_slice: slice) -> Tensor:
        """Return the network's logits (C, ...), whose gradients are multiplied by the loss scales."""
        # A copy, since update() changes the scales in place, possibly before the backward pass.
        return _scale_gradient(logits, self.scale[client_slice].clone())

    def update(self, gradients: Sequence[Tensor], client_slice: slice) -> Tensor:
        """Adjust the scales of the clients in ``client_slice``.

        Args:
            gradients: Gradients (C, ...) of these clients, one tensor per parameter, in float32 or float64.
            client_slice: Which clients take part in the step.

        Returns:
            A mask (C,) of the clients whose gradients are all finite, which take the step.
        """
        options = self.options
        # These are views: the in-place operations below change the scales and counters of the clients in `rows`.
        scale = self.scale[client_slice]
        good_steps = self.good_steps[client_slice]
        finite = torch.ones_like(self.stepped[client_slice])
        if gradients:
            finite = torch.stack([finite_rows(gradient) for gradient in gradients]).all(0)

        # A skipped step resets the count to 0.
        good_steps.add_(1).mul_(finite)
        grows = good_steps >= options.get_growth_interval()
        growth = torch.where(grows, options.get_growth_factor(), 1.0)
        factor = torch.where(finite, growth, options.get_backoff_factor())
        # A scale that overflowed would stay infinite, since inf · 0.5 is inf.
        largest_scale = torch.finfo(scale.dtype).max
        scale.mul_(factor).clamp_(max=largest_scale)
        good_steps.masked_fill_(grows, 0)
        self.skipped[client_slice] += ~finite
        self.stepped[client_slice] |= finite
        return finite

    def settle(self, sound: Tensor, ranks: Ranks) -> LossScale:
        """Choose the scale from which the clients of the next round start. A collective: all ranks must call this.

        It is the smallest final scale of the clients on all ranks. A client that skipped every step counts only if all
        others did too: its scale shrank in each step, and would be far too small for the others.

        Args:
            sound: Mask (C,) of the clients whose training stayed finite; the others do not count.
            ranks: The processes that share the work.

        Returns:
            The scale of the next round; the initial one if no client counts.
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
        candidates = scales_of_stepped or all_scales
        # Among equal scales, the one with the fewest good steps is chosen, which grows last.
        return min(candidates, default=self.start)


class KeptScales:
    """The loss scales from which clients and the student start the next round.

    They are carried over because each round that began with torch's initial scale would first skip steps.

    Args:
        scaler: A scaler of torch, as for :class:`LossScales`; ``None`` if losses are not scaled.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self.options = scaler
        self._scales: dict[str, LossScale] = {}

    def open(self, role: str, count: int, device: torch.device) -> LossScales | None:
        """Return the scales for a round's training; ``None`` if losses are not scaled.

        Args:
            role: Whose training: ``"clients"`` or ``"student"``.
            count: Number of states that are trained together.
            device: Device of the scales.
        """
        if self.options is None:
            return None
        return LossScales(self.options, count, self._scales.get(role), device)

    def close(self, role: str, scales: LossScales | None, sound: Tensor, ranks: Ranks) -> None:
        """Keep the result of :meth:`LossScales.settle` for the next round. A collective unless ``scales`` is None."""
        if scales is not None:
            self._scales[role] = scales.settle(sound, ranks)

    def state_dict(self) -> dict[str, LossScale]:
        """Return the scales for a checkpoint."""
        return dict(self._scales)

    def load_state_dict(self, saved: dict[str, LossScale]) -> None:
        """Restore the scales of a checkpoint."""
        self._scales = dict(saved)


def _scale_gradient(value: Tensor, factors: Tensor) -> Tensor:
    """Register a hook that multiplies the gradient of ``value`` (C, ...) by ``factors`` (C,), and return ``value``."""
    if value.requires_grad:
        rows = per_client(factors, value)
        value.register_hook(lambda gradient: gradient * rows)
    return value


class MaskedOptimizer(torch.optim.Optimizer, ABC):
    """Base class of optimisers of stacked parameters (C, ...) in which only some clients take a step.

    The arithmetic is that of ``torch.optim``. A client that skips a step keeps its parameters, moments and step count.
    Which clients do is only known on the device, so the rows are masked instead of indexed.
    """

    def step_rows(self, stepping: Tensor) -> None:
        """Take a step for some clients.

        Args:
            stepping: Mask (C,) of the clients that take the step. The gradients of the others are ignored.
        """
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    rows = per_client(stepping, parameter)
                    # A product would not do: a skipped gradient is infinite or NaN, and 0 times that is NaN.
                    gradient = parameter.grad.where(rows, 0)
                    self._update_parameter(parameter, gradient, rows.to(parameter), group)

    @abstractmethod
    def _update_parameter(
        self, parameter: Tensor, gradient: Tensor, rows: Tensor, param_group: dict[str, float]
    ) -> None:
        """Update a parameter in place.

        Args:
            parameter: Stacked parameter (C, ...).
            gradient: Its gradient (C, ...), 0 for clients that skip the step.
            rows: 1 for each client that takes the step and 0 for each other one, (C, 1, ...) in the parameter's dtype.
            param_group: Options of the parameter, such as the learning rate.
        """


class MaskedSGD(MaskedOptimizer):
    """``torch.optim.SGD`` with momentum and weight decay, of stacked leaves (C, ...)."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update_parameter(
        self, parameter: Tensor, gradient: Tensor, rows: Tensor, param_group: dict[str, float]
    ) -> None:
        if param_group["weight_decay"]:
            gradient = gradient.addcmul(parameter, rows, value=param_group["weight_decay"])
        if param_group["momentum"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            # 1 for a client that skips the step, whose buffer stays as it is.
            decay = 1 - rows * (1 - param_group["momentum"])
            buffer.mul_(decay).add_(gradient)
            gradient = buffer * rows
        parameter.sub_(gradient, alpha=param_group["lr"])


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

    def _update_parameter(
        self, parameter: Tensor, gradient: Tensor, rows: Tensor, param_group: dict[str, float]
    ) -> None:
        state = self.state[parameter]
        beta1, beta2 = self.betas
        if not state:
            state["step"] = parameter.new_zeros(len(parameter))
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        decay = rows * param_group["weight_decay"]
        if self.decoupled:
            parameter.mul_(1 - decay * param_group["lr"])
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
        parameter.addcdiv_(corrected_mean, denominator, value=-param_group["lr"])


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds that a 512×512 matrix product takes on the CPU: the fastest of five.

    On processors without instructions for bfloat16 one takes hundreds of times as long as in float32. It is repeated
    only as long as that takes less than a tenth of a second.
    """
    matrix = torch.ones(512, 512, dtype=dtype)
    # The minimum is the least disturbed by other processes, and by the library's set-up in the first call.
    all_seconds: list[float] = []
    while len(all_seconds) < 5 and sum(all_seconds) < 0.1:
        all_seconds.append(timeit.timeit(lambda: matrix @ matrix, number=1))
    return min(all_seconds)
