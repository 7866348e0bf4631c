# SPDX-License-Identifier: Apache-2.0
"""Numbers, such as an age or an angle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.core.checks import (
    OptionError,
    check_choice,
    check_number,
    invalid_option,
    use_plain_numbers,
    without_effect,
)
from perada.core.states import double, loses_digits, to_device_async
from perada.tasks.base import SummedMetric, Task
from perada.tasks.deviation import (
    Determination,
    MeanAbsoluteError,
    MeanSquaredError,
    PearsonCorrelation,
    RootMeanSquaredError,
)
from perada.tasks.number_task import NumberTask

Movement = Literal[
    "flip",
    "crop_padding",
    "elastic_transform",
    "zoom_blur",
    "turned",
    "mirrored",
    "upside_down_negative",
    "sheared",
    "small",
]
"""What moves the content of images: options of the data module, corruptions of test images, and scanners."""
RegressionLoss = Literal["squared", "absolute", "huber"]
"""How the loss of an image follows from its deviations."""
Numbers = float | Sequence[float]
"""A number for all targets, or one for each."""


@dataclass(frozen=True, repr=False)
class Regression(NumberTask):
    """D numbers per image: the mean loss of their deviations from the targets.

    Targets are finite numbers (N,) or (N, D), and the network has D outputs. With ``mean`` μ and ``std`` σ it learns
    the standardised targets z = (y − μ) / σ, and μ + σ z is predicted from an output z. Losses and distillation compare
    standardised values, scores those in the targets' units. For a deviation d = output − z the loss is

    - ``squared``: d²;
    - ``absolute``: |d|;
    - ``huber``: d² / 2 where |d| ≤ δ, and δ (|d| − δ / 2) elsewhere, as :class:`torch.nn.HuberLoss`.

    Ensembles average outputs. Distillation minimises the mean squared difference of outputs; its temperature has no
    effect.

    Args:
        loss_function: Loss of a deviation.
        delta: Deviation δ from which the Huber loss is linear, in standard deviations.
        mean: Mean μ of the targets, a number or D numbers; None for 0.
        std: Standard deviation σ of the targets, a number or D numbers; None for 1.
        standardize: ``all`` to compute ``mean`` and ``std`` from the training targets of all clients. They leave the
            clients for it, so ``all`` is not allowed with differential privacy or in a deployment; give numbers there.
        invariant_to: What does not change the targets although it moves the content of images: ``flip`` and
            ``crop_padding`` of the data module, the corruptions ``elastic_transform`` and ``zoom_blur``, and the
            scanners ``turned``, ``mirrored``, ``upside_down_negative``, ``sheared`` and ``small``. For an age that is
            all of them, for an angle only ``crop_padding``. The others are rejected, since the targets, such as
            coordinates, would stay behind.

    Raises:
        OptionError: If an option is out of range.

    >>> Regression(loss_function="huber", delta=0.5)
    Regression(loss_function='huber', delta=0.5)
    """

    default_metric: ClassVar[str] = "mae"
    labels_per_image: ClassVar[str] = "numbers"

    loss_function: RegressionLoss = "squared"
    delta: float = 1.0
    mean: Numbers | None = None
    std: Numbers | None = None
    standardize: Literal["all"] | None = None
    invariant_to: Movement | Sequence[Movement] = ()

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_choice("loss_function", self.loss_function, get_args(RegressionLoss))
        check_number("delta", self.delta, gt=0)
        if self.delta != 1 and self.loss_function != "huber":
            loss = f"loss_function={self.loss_function!r}"
            raise without_effect("delta", self.delta, loss, "choose loss_function='huber'")
        # Tuples, since tasks with the same options must be equal.
        object.__setattr__(self, "mean", _checked_numbers("mean", self.mean))
        object.__setattr__(self, "std", _checked_numbers("std", self.std, gt=0))
        object.__setattr__(self, "invariant_to", _checked_movements(self.invariant_to))
        if self.standardize is not None:
            check_choice("standardize", self.standardize, ("all",))
            if self.mean is not None or self.std is not None:
                raise invalid_option("standardize", self.standardize, "None where mean or std are set")

    @property
    def uses_all_targets(self) -> bool:
        """Whether mean and standard deviation are computed from all clients' targets."""
        return self.standardize is not None

    def fitted_to(self, targets: Tensor, num_classes: int) -> Task:
        """Return the task with mean and standard deviation (N in the denominator) in place of ``standardize``.

        >>> Regression(standardize="all").fitted_to(torch.tensor([1.0, 3.0]), 1)
        Regression(mean=(2.0,), std=(1.0,))
        """
        if not self.uses_all_targets:
            return self
        rows = targets.double().view(len(targets), num_classes)
        std = rows.std(0, correction=0)
        constant = (std == 0).nonzero().flatten().tolist()
        if constant:
            raise invalid_option(
                "standardize", "all", "None", hint=f"target {constant[0]} is the same for all training images"
            )
        return replace(self, mean=tuple(rows.mean(0).tolist()), std=tuple(std.tolist()), standardize=None)

    def check_targets(self, targets: Tensor) -> None:
        """Raise an OptionError if single precision, in which networks compute, cannot tell the targets apart."""
        rows = targets.double().view(len(targets), -1)
        standardized = self._standardize_targets(rows, rows)
        for number, column in enumerate(standardized.T):
            if loses_digits(column):
                numbers = rows[:, number]
                raise OptionError(
                    f"target {number} has numbers from {numbers.min():.15g} to {numbers.max():.15g}, which float32 "
                    "cannot tell apart, the dtype of the network's outputs; set standardize='all', or mean and std to "
                    "those of the targets",
                    name="mean",
                    value=self.mean,
                )

    def check_augmentation(self, options: Sequence[str]) -> None:
        """Raise an OptionError for augmentations that the targets may not be invariant to."""
        self.check_moved_images(options, "training images")

    def check_moved_images(self, changes: Sequence[str], description: str) -> None:
        """Raise an OptionError for changes that the targets may not be invariant to."""
        changing = [change for change in changes if change not in self.invariant_to]
        if changing:
            listed = ", ".join(repr(change) for change in dict.fromkeys((*self.invariant_to, *changing)))
            raise OptionError(
                f"{' and '.join(changing)} would move the content of {description}, but not the numbers to predict, "
                f"which is wrong for coordinates: leave {' and '.join(changing)} out or, if the numbers do not depend "
                f"on it, as an age, set task=Regression(invariant_to=[{listed}])",
                name=changing[0],
                value=True,
            )

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if there is neither one number nor one for each target."""
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if isinstance(numbers, Sequence) and len(numbers) != num_classes:
                raise invalid_option(name, numbers, f"a number, or a list of {num_classes}, one for each target")

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss (N,) of each image, averaged over its targets, from outputs (N, D).

        >>> Regression(mean=10, std=2).loss(torch.tensor([[1.0]]), torch.tensor([16.0])).tolist()
        [4.0]
        """
        standardized = self._standardize_targets(targets.view(logits.shape), logits)
        if self.loss_function == "squared":
            losses = F.mse_loss(logits, standardized, reduction="none")
        elif self.loss_function == "absolute":
            losses = F.l1_loss(logits, standardized, reduction="none")
        else:
            losses = F.huber_loss(logits, standardized, reduction="none", delta=self.delta)
        return losses.mean(-1)

    def _standardize_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Return (y − μ) / σ in the dtype of the outputs, of targets with the outputs' shape.

        The subtraction is done in double precision where the device supports it. In single precision, a large mean
        would leave no digits, for example of time stamps in milliseconds.
        """
        values = double(targets)
        if self.mean is not None:
            values = values - _convert_like(self.mean, values)
        if self.std is not None:
            values = values / _convert_like(self.std, values)
        return values.to(outputs.dtype)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return μ + σ z, numbers (..., D) in the targets' units, from outputs z."""
        if self.std is not None:
            logits = logits * _convert_like(self.std, logits)
        if self.mean is not None:
            logits = logits + _convert_like(self.mean, logits)
        return logits

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the predictions (..., D), in double precision where the device supports it."""
        return self.predictions(double(logits))

    def error_rates(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error (N,) of each image, in units of σ² and at most 1."""
        standardized = self._standardize_targets(targets.view(logits.shape), logits)
        return (logits - standardized).square().mean(-1).clamp(max=1)

    def out_of_range(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return the targets that are not finite."""
        return targets[~targets.isfinite()]

    def describe_range(self, num_classes: int) -> str:
        """Describe which numbers are valid."""
        return "finite numbers"

    def count_classes(self, targets: Tensor) -> int:
        """Return the number D of targets per image."""
        return 1 if targets.ndim == 1 else targets.shape[1]

    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether there is a number, or a vector of length D, per image."""
        return targets.ndim in (1, 2) and num_classes in (None, self.count_classes(targets))

    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets."""
        return "one finite number per image" if num_classes == 1 else f"vectors of {num_classes} finite numbers"

    def summed_metrics(self, num_classes: int) -> Mapping[str, SummedMetric]:
        """Return errors, coefficients of determination and correlations, as means over targets and by target."""
        center = _per_target(0.0 if self.mean is None else self.mean, num_classes)
        summed: dict[str, SummedMetric] = {}
        for suffix, per_target in (("", False), ("_per_target", True)):
            summed[f"mae{suffix}"] = MeanAbsoluteError(num_classes, center, per_target)
            summed[f"mse{suffix}"] = MeanSquaredError(num_classes, center, per_target)
            summed[f"rmse{suffix}"] = RootMeanSquaredError(num_classes, center, per_target)
            summed[f"r2{suffix}"] = Determination(num_classes, center, per_target)
            summed[f"pearson{suffix}"] = PearsonCorrelation(num_classes, center, per_target)
        return summed


def _checked_movements(options: object) -> tuple[str, ...]:
    """Return the value of ``invariant_to`` as a tuple; raise an OptionError if it has other names."""
    names = (options,) if isinstance(options, str) else options
    if not isinstance(names, Sequence):
        raise invalid_option("invariant_to", options, f"a list of {', '.join(get_args(Movement))}")
    for name in names:
        check_choice("invariant_to", name, get_args(Movement))
    return tuple(names)


def _checked_numbers(name: str, option_value: Numbers | None, gt: float | None = None) -> Numbers | None:
    """Return the value of an option as a number, a tuple of numbers or None; raise an OptionError otherwise."""
    if option_value is None:
        return None
    has_axes = bool(getattr(option_value, "shape", None))  # a tensor or an array, but not one of its numbers
    if has_axes and hasattr(option_value, "tolist"):
        option_value = option_value.tolist()
    if isinstance(option_value, Sequence) and not isinstance(option_value, str) and option_value:
        for number in option_value:
            check_number(name, number, gt=gt)
        return tuple(float(number) for number in option_value)
    check_number(name, option_value, gt=gt)
    assert not isinstance(option_value, Sequence)
    return float(option_value)


def _per_target(option_value: Numbers, targets: int) -> tuple[float, ...]:
    """Return a number for each target."""
    if isinstance(option_value, Sequence):
        return tuple(option_value)
    return (option_value,) * targets


def _convert_like(option_value: Numbers, values: Tensor) -> Tensor:
    """Return a number, or one for each target (D,), in the dtype and on the device of values (..., D)."""
    return to_device_async(torch.tensor(option_value, dtype=values.dtype), values.device)
