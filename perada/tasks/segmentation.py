# SPDX-License-Identifier: Apache-2.0
"""One class per pixel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.core.checks import OptionError, check_choice, check_integer, check_number, use_plain_numbers, without_effect
from perada.tasks.base import SummedMetric, Task
from perada.tasks.class_task import ClassTask
from perada.tasks.mixture import log_mixture
from perada.tasks.overlap import Dice, IntersectionOverUnion
from perada.tasks.weights import BALANCED, check_all_occur, check_length, checked_weights, weights_on

LossFunction = Literal["cross_entropy", "dice", "both"]
"""How the loss of an image is computed."""


@dataclass(frozen=True, repr=False)
class Segmentation(ClassTask):
    """One class per pixel: softmax probabilities of each pixel.

    The network maps images to logits (N, K, H, W). perada moves their classes to the last axis, so that everything here
    has logits (N, H, W, K). Targets are masks (N, H, W) of classes. Pixels of the class ``ignore_index`` are left out
    of losses and scores.

    All losses are losses of one image; in particular, the Dice loss is not computed from sums over a batch, since the
    images of a batch belong to several clients, and differential privacy clips the gradient of each image.

    - ``cross_entropy``: the mean of w_y (−log p_y) over the pixels that count; w_y is the weight of a pixel's class y.
    - ``dice``: 1 − the mean over classes k of (2 Σ p_k g_k + s) / (Σ p_k + Σ g_k + s), with sums over the pixels that
      count, the probability p_k of class k, g_k = 1 where the pixel has class k and else 0, and the smoothing s. This
      is the soft Dice loss of V-Net (Milletari et al., 3DV 2016) without squares, smoothed as in MONAI.
    - ``both``: the sum of the two.

    An image without a pixel that counts has a loss of 0. Distillation compares the distributions of the pixels, by the
    mean of their Kullback-Leibler divergences.

    Args:
        loss_function: Loss of an image.
        ignore_index: Class of pixels that do not count, such as 255 in Pascal VOC.
        class_weights: Factor of the cross-entropy for each class, K numbers; ``balanced`` for N / (K n_k), where n_k of
            all clients' N pixels that count have class k. The counts leave the clients, so ``balanced`` is not allowed
            with differential privacy or in a deployment.
        include_background: Whether class 0 is part of the Dice loss and of the means ``dice`` and ``miou``.
        dice_smoothing: Smoothing s of the Dice loss.
        distill_stride: Distil only every so many pixels of each axis. The teachers' logits take
            H W K / ``distill_stride``² numbers for each public image.

    Raises:
        OptionError: If an option is out of range.

    >>> Segmentation(loss_function="dice").predicted(torch.zeros(1, 4, 4, 3)).shape
    torch.Size([1, 4, 4])
    """

    exclusive: ClassVar[bool] = False
    per_pixel: ClassVar[bool] = True
    has_positions: ClassVar[bool] = True
    default_metric: ClassVar[str] = "dice"
    labels_per_image: ClassVar[str] = "one class per pixel"

    loss_function: LossFunction = "cross_entropy"
    ignore_index: int = 255
    class_weights: Sequence[float] | Literal["balanced"] | None = None
    include_background: bool = True
    dice_smoothing: float = 1.0
    distill_stride: int = 1

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_choice("loss_function", self.loss_function, get_args(LossFunction))
        check_choice("include_background", self.include_background, (True, False))
        # Any integer, such as torch's -100.
        check_integer("ignore_index", self.ignore_index, -(2**31))
        check_number("dice_smoothing", self.dice_smoothing, gt=0)
        if self.dice_smoothing != 1 and self.loss_function == "cross_entropy":
            loss = f"loss_function={self.loss_function!r}"
            raise without_effect("dice_smoothing", self.dice_smoothing, loss, "choose 'dice' or 'both'")
        check_integer("distill_stride", self.distill_stride)
        weights = checked_weights("class_weights", self.class_weights)
        # A tuple, since tasks with the same options must be equal.
        object.__setattr__(self, "class_weights", weights)
        if weights is not None and self.loss_function == "dice":
            raise OptionError(
                "class_weights have no effect with loss_function='dice'; leave them out, or choose 'cross_entropy' or "
                "'both'",
                name="class_weights",
                value=weights,
            )

    @property
    def border_target(self) -> int:
        """Pixels from outside of an image do not count."""
        return self.ignore_index

    @property
    def uses_all_targets(self) -> bool:
        """Whether the weights are computed from all clients' counts."""
        return self.class_weights == BALANCED

    def fitted_to(self, targets: Tensor, num_classes: int) -> Task:
        """Return the task with the weights N / (K n_k) in place of ``balanced``."""
        if not self.uses_all_targets:
            return self
        counts = torch.stack([(targets == k).sum() for k in range(num_classes)])
        check_all_occur("class_weights", counts)
        weights = counts.sum() / (num_classes * counts.double())
        return replace(self, class_weights=tuple(weights.tolist()))

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if an option does not match the number of classes."""
        check_length("class_weights", self.class_weights, num_classes)
        if 0 <= self.ignore_index < num_classes:
            outside = 255 if num_classes <= 255 else -1
            raise OptionError(
                f"ignore_index={self.ignore_index} is one of the {num_classes} classes; choose a value outside of "
                f"0..{num_classes - 1}, such as {outside}",
                name="ignore_index",
                value=self.ignore_index,
            )

    def check_moved_images(self, changes: Sequence[str], description: str) -> None:
        """Raise an OptionError: masks are not moved with their images."""
        if changes:
            raise OptionError(
                f"{' and '.join(changes)} would move the content of {description}, but not the masks: leave "
                f"{' and '.join(changes)} out",
                name=changes[0],
                value=True,
            )

    def known(self, targets: Tensor) -> Tensor:
        """Return a mask (N, H, W) that is false for pixels that do not count."""
        return targets != self.ignore_index

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss (N,) of each image from logits (N, H, W, K) and masks (N, H, W).

        >>> Segmentation().loss(torch.zeros(1, 2, 2, 4), torch.tensor([[[0, 3], [1, 255]]])).exp().tolist()
        [4.0]
        """
        num_classes = logits.shape[-1]
        # Made-up logits of dry runs have no axes of pixels: an image is then a single pixel.
        logits = logits.reshape(len(logits), -1, num_classes)
        targets = targets.reshape(len(targets), -1).long()
        counts = self.known(targets)
        targets = targets.where(counts, 0)
        if self.loss_function == "cross_entropy":
            return self._cross_entropy(logits, targets, counts)
        if self.loss_function == "dice":
            return self._dice_loss(logits, targets, counts)
        return self._cross_entropy(logits, targets, counts) + self._dice_loss(logits, targets, counts)

    def _cross_entropy(self, logits: Tensor, targets: Tensor, is_counted: Tensor) -> Tensor:
        """Compute the mean cross-entropy (N,) over the pixels that count.

        Args:
            logits: Logits (N, P, K) of P pixels.
            targets: Classes (N, P), some class where a pixel does not count.
            is_counted: Mask (N, P) of the pixels that count.
        """
        weights = weights_on(self.class_weights, logits)
        losses = F.cross_entropy(logits.movedim(-1, 1), targets, weight=weights, reduction="none")
        return losses.where(is_counted, 0).sum(1) / is_counted.sum(1).clamp(min=1)

    def _dice_loss(self, logits: Tensor, targets: Tensor, is_counted: Tensor) -> Tensor:
        """Compute the soft Dice loss (N,) of each image; the arguments are those of :meth:`_cross_entropy`."""
        counted = is_counted.to(logits).unsqueeze(-1)
        probabilities = logits.softmax(-1) * counted
        truth = F.one_hot(targets, logits.shape[-1]).to(logits) * counted
        overlaps = (probabilities * truth).sum(1)
        sizes = probabilities.sum(1) + truth.sum(1)
        dice = (2 * overlaps + self.dice_smoothing) / (sizes + self.dice_smoothing)  # (N, K)
        return 1 - dice[:, self._first_class :].mean(1)

    @property
    def _first_class(self) -> int:
        """The first class of means over classes."""
        return 0 if self.include_background else 1

    def predictions(self, logits: Tensor) -> Tensor:
        """Compute the softmax of each pixel."""
        return logits.softmax(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the most likely class of each pixel."""
        return logits.argmax(-1)

    def logits_of_mean_predictions(self, logits: Tensor) -> Tensor:
        """Return the log of the sum of probabilities: the factor 1/M is a constant in all logits of a pixel."""
        return logits.log_softmax(-1).logsumexp(0)

    def distilled(self, logits: Tensor) -> Tensor:
        """Return the logits (..., H', W', K) of every ``distill_stride``-th pixel of both axes.

        >>> Segmentation(distill_stride=4).distilled(torch.zeros(2, 8, 9, 3)).shape
        torch.Size([2, 2, 3, 3])
        """
        return logits[..., :: self.distill_stride, :: self.distill_stride, :]

    def mixture(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Return the logarithms of the mixed probabilities of each pixel."""
        return log_mixture(first.log_softmax(-1), second.log_softmax(-1), share)

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the divergence of the distributions over classes, averaged over the pixels of all images."""
        log_student = F.log_softmax(student / temperature, -1)
        log_teacher = F.log_softmax(teacher / temperature, -1)
        divergences = F.kl_div(log_student, log_teacher, log_target=True, reduction="none").sum(-1)
        return divergences.mean() * temperature**2

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the mean entropy (N,) of the pixels of each image."""
        entropies = super().entropy(probabilities)
        return entropies.flatten(1).mean(1)

    def error_rates(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the share (N,) of wrong pixels among those that are not background in both masks.

        Most pixels of most images are background, which is easy to predict.
        """
        counts = self.known(targets)
        predicted = self.predicted(logits)
        is_foreground = counts & ((predicted != 0) | (targets != 0))
        is_wrong = is_foreground & (predicted != targets)
        return is_wrong.flatten(1).sum(1) / is_foreground.flatten(1).sum(1).clamp(min=1)

    def errors(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return one minus the probability (N, H, W) of each pixel's class, 0 where a pixel does not count."""
        counts = self.known(targets)
        classes = targets.long().where(counts, 0)
        return super().errors(probabilities, classes).where(counts, 0)

    def presence(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return an indicator (N, K) of the classes that each image has."""
        pixels = targets.flatten(1)
        return torch.stack([(pixels == k).any(1) for k in range(num_classes)], 1).long()

    def class_counts(self, targets: Tensor, num_classes: int) -> Tensor:
        """Count the images that have a pixel of each class."""
        return self.presence(targets, num_classes).sum(0)

    def count_classes(self, targets: Tensor) -> int:
        """Return the largest class plus one; 0 if no pixel counts."""
        classes = targets[self.known(targets)]
        return int(classes.max()) + 1 if len(classes) else 0

    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether there is a mask of integers per image."""
        return targets.ndim == 3 and not targets.is_floating_point()

    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets."""
        return f"masks (H, W) of {num_classes} classes and {self.ignore_index}"

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], num_classes: int) -> Tensor:
        """Look up the run's number of each pixel's class."""
        counts = self.known(targets)
        numbers = torch.tensor(class_numbers)[targets.long().where(counts, 0)]
        return numbers.where(counts, self.ignore_index)

    def summed_metrics(self, num_classes: int) -> Mapping[str, SummedMetric]:
        """Return Dice and intersection over union, as means and by class."""
        return {
            "dice": Dice(num_classes, self.ignore_index, self._first_class),
            "dice_per_class": Dice(num_classes, self.ignore_index, 0, per_class=True),
            "miou": IntersectionOverUnion(num_classes, self.ignore_index, self._first_class),
            "iou_per_class": IntersectionOverUnion(num_classes, self.ignore_index, 0, per_class=True),
        }
