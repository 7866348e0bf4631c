# SPDX-License-Identifier: Apache-2.0
"""The base of tasks with numbers instead of classes."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.tasks.base import Average, Task


class NumberTask(Task):
    """D numbers per image, whose outputs are averaged by ensembles and compared by distillation.

    A prediction is an affine function of an output, so that the mean of outputs predicts the mean of predictions.
    Distillation minimises the mean squared difference of outputs; its temperature has no effect. Targets are (N, D).
    """

    has_classes: ClassVar[bool] = False
    metric_prefix: ClassVar[str] = ""
    metric_size_option: ClassVar[str] = ""

    def ensemble(self, logits: Tensor, average: Average) -> Tensor:
        """Return the mean of the outputs: their mean prediction is the prediction of their mean."""
        return logits.mean(0)

    def mixture(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Return the weighted mean of the outputs, whose prediction is the weighted mean of the predictions."""
        return share * first + (1 - share) * second

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the mean squared difference of the outputs, whatever the temperature."""
        return F.mse_loss(student, teacher)

    def blank_targets(self, shape: Sequence[int], num_classes: int, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(*shape, num_classes, device=device)

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], num_classes: int) -> Tensor:
        """Move each target to its place in the run; a client must have all of them.

        Raises:
            ValueError: If the client lacks a target.
        """
        if sorted(class_numbers) != list(range(num_classes)):
            raise ValueError(
                f"the data have {len(class_numbers)} of the run's {num_classes} targets; provide all of them"
            )
        if targets.ndim == 1:
            return targets
        renumbered = torch.empty_like(targets)
        renumbered[:, list(class_numbers)] = targets
        return renumbered
