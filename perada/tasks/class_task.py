# SPDX-License-Identifier: Apache-2.0
"""The base of tasks with one class per image."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.tasks.base import Task


class ClassTask(Task):
    """One class per image, whatever the loss, and however probabilities follow from the outputs of the network.

    A subclass defines :meth:`loss` and :meth:`predictions`, which return the loss (N,) of each image and the
    probabilities (..., K) of the classes. Ensembles that average probabilities need
    :meth:`logits_of_mean_predictions` too. Targets are classes (N,).
    """

    exclusive: ClassVar[bool] = True
    default_metric: ClassVar[str] = "accuracy"
    metric_prefix: ClassVar[str] = "Multiclass"
    metric_size_option: ClassVar[str] = "num_classes"
    labels_per_image: ClassVar[str] = "one class per image"

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the most likely class (...)."""
        return self.predictions(logits).argmax(-1)

    def confidence(self, logits: Tensor) -> Tensor:
        """Return the probability (N,) of the most likely class."""
        return self.predictions(logits).amax(-1)

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the divergence of the distributions over classes that the outputs, divided by T, predict."""
        p = self.predictions(teacher / temperature)
        q = self.predictions(student / temperature)
        # The student's probability may be 0 in single precision, and the logarithm infinite.
        log_q = q.clamp(min=torch.finfo(q.dtype).tiny).log()
        divergences = (torch.xlogy(p, p) - p * log_q).sum(-1)
        return divergences.mean() * temperature**2

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the entropy of the distribution over classes.

        >>> from perada.tasks import Classification
        >>> Classification().entropy(torch.full((1, 4), 0.25)).exp().tolist()
        [4.0]
        """
        # p log p; xlogy is 0 where p is 0.
        return -torch.xlogy(probabilities, probabilities).sum(-1)

    def errors(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return one minus the probability (N,) of the image's class."""
        return 1 - probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def presence(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return one-hot vectors."""
        return F.one_hot(targets, num_classes)

    def class_counts(self, targets: Tensor, num_classes: int) -> Tensor:
        """Count the images of each class."""
        return targets.bincount(minlength=num_classes)

    def blank_targets(self, shape: Sequence[int], num_classes: int, device: torch.device) -> Tensor:
        """Return class 0 for every image."""
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    def largest_label(self, num_classes: int) -> int:
        """Return the last class."""
        return num_classes - 1

    def count_classes(self, targets: Tensor) -> int:
        """Return the largest class plus one."""
        return int(targets.max()) + 1

    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether there is one integer per image."""
        return targets.ndim == 1 and not targets.is_floating_point()

    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets."""
        return f"{num_classes} classes"

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], num_classes: int) -> Tensor:
        """Look up the run's number of each class."""
        return torch.tensor(class_numbers)[targets]
