# SPDX-License-Identifier: Apache-2.0
"""One class per image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.tasks.base import Task


@dataclass(frozen=True)
class Classification(Task):
    """One class per image: softmax probabilities, and the cross-entropy loss. Targets are classes (N,)."""

    exclusive: ClassVar[bool] = True
    default_metric: ClassVar[str] = "accuracy"
    metric_prefix: ClassVar[str] = "Multiclass"
    metric_size_option: ClassVar[str] = "num_classes"
    labels_per_image: ClassVar[str] = "one class"

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy (N,) of each image.

        >>> Classification().loss(torch.zeros(2, 4), torch.tensor([0, 3])).exp().tolist()
        [4.0, 4.0]
        """
        return F.cross_entropy(logits, targets, reduction="none")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the softmax."""
        return logits.softmax(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the most likely class (...)."""
        return logits.argmax(-1)

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the entropy of the distribution over classes.

        >>> Classification().entropy(torch.full((1, 4), 0.25)).exp().tolist()
        [4.0]
        """
        # p log p; xlogy is 0 where p is 0.
        return -torch.xlogy(probabilities, probabilities).sum(-1)

    def logits_of_mean_probabilities(self, logits: Tensor) -> Tensor:
        """Return the log of the sum of probabilities: the factor 1/M is a constant in all logits of an image.

        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> Classification().ensemble(logits, "probabilities").softmax(-1).tolist()
        [0.5, 0.5]
        """
        return logits.log_softmax(-1).logsumexp(0)

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the divergence of the distributions over classes.

        >>> Classification().distillation_loss(torch.ones(2, 3), torch.zeros(2, 3)).item()
        0.0
        """
        log_student = F.log_softmax(student / temperature, -1)
        log_teacher = F.log_softmax(teacher / temperature, -1)
        return F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean") * temperature**2

    def confidence(self, logits: Tensor) -> Tensor:
        """Return the probability (N,) of the most likely class."""
        return logits.softmax(-1).amax(-1)

    def errors(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return one minus the probability (N,) of the image's class."""
        return 1 - probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def presence(self, targets: Tensor, classes: int) -> Tensor:
        """Return one-hot vectors."""
        return F.one_hot(targets, classes)

    def class_counts(self, targets: Tensor, classes: int) -> Tensor:
        """Count the images of each class."""
        return targets.bincount(minlength=classes)

    def blank_targets(self, shape: Sequence[int], classes: int, device: torch.device) -> Tensor:
        """Return class 0 for every image."""
        return torch.zeros(*shape, dtype=torch.int64, device=device)

    def largest_label(self, classes: int) -> int:
        """Return the last class."""
        return classes - 1

    def count_classes(self, targets: Tensor) -> int:
        """Return the largest class plus one."""
        return int(targets.max()) + 1

    def fits(self, targets: Tensor, classes: int) -> bool:
        """Return whether there is one number per image."""
        return targets.ndim == 1

    def describe_targets(self, classes: int) -> str:
        """Describe valid targets."""
        return f"{classes} classes"

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], classes: int) -> Tensor:
        """Look up the run's number of each class."""
        return torch.tensor(class_numbers)[targets]
