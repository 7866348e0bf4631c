# SPDX-License-Identifier: Apache-2.0
"""Several labels per image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.tasks.base import Task


@dataclass(frozen=True)
class MultiLabel(Task):
    """Several labels per image, each present or absent: sigmoid probabilities, and the binary cross-entropy.

    Targets are vectors (N, K) of 0 and 1. Losses, entropies and divergences are means over the K labels.
    """

    exclusive: ClassVar[bool] = False
    default_metric: ClassVar[str] = "auroc"
    metric_prefix: ClassVar[str] = "Multilabel"
    metric_size_option: ClassVar[str] = "num_labels"
    labels_per_image: ClassVar[str] = "several labels"

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the binary cross-entropy (N,) of each image, averaged over its labels.

        >>> MultiLabel().loss(torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 1.0]])).exp().tolist()
        [2.0]
        """
        losses_of_labels = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none")
        return losses_of_labels.mean(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the sigmoid."""
        return logits.sigmoid()

    def predicted(self, logits: Tensor) -> Tensor:
        """Return 1 for each label (..., K) that is more likely present than absent, else 0."""
        return (logits > 0).long()

    def entropy(self, probabilities: Tensor) -> Tensor:
        """Compute the mean entropy of the K Bernoulli distributions."""
        absent = 1 - probabilities
        terms = torch.xlogy(probabilities, probabilities)
        terms_of_absence = torch.xlogy(absent, absent)
        entropies = -terms - terms_of_absence
        return entropies.mean(-1)

    def logits_of_mean_probabilities(self, logits: Tensor) -> Tensor:
        """Return the log odds of the mean: the factor 1/M cancels between the sums for presence and for absence."""
        log_sum_present = F.logsigmoid(logits).logsumexp(0)
        log_sum_absent = F.logsigmoid(-logits).logsumexp(0)
        return log_sum_present - log_sum_absent

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the mean divergence of the K Bernoulli distributions."""
        student = student / temperature
        teacher = teacher / temperature
        # KL(Bernoulli(p) || Bernoulli(q)) = cross-entropy(p, q) - entropy(p)
        p = teacher.sigmoid()
        cross_entropy = F.binary_cross_entropy_with_logits(student, p)
        return (cross_entropy - F.binary_cross_entropy_with_logits(teacher, p)) * temperature**2

    def confidence(self, logits: Tensor) -> Tensor:
        """Return the probability (N, K) of the more likely of presence and absence."""
        present = logits.sigmoid()
        return torch.maximum(present, 1 - present)

    def errors(self, probabilities: Tensor, targets: Tensor) -> Tensor:
        """Return the distance (N, K) of each probability from the label."""
        return (probabilities - targets).abs()

    def presence(self, targets: Tensor, classes: int) -> Tensor:
        """Return the targets, which are indicators."""
        return targets

    def class_counts(self, targets: Tensor, classes: int) -> Tensor:
        """Count the images that have each label."""
        return targets.long().sum(0)

    def blank_targets(self, shape: Sequence[int], classes: int, device: torch.device) -> Tensor:
        """Return vectors without a label."""
        return torch.zeros(*shape, classes, dtype=torch.float32, device=device)

    def largest_label(self, classes: int) -> int:
        """Return 1, for a label that is present."""
        return 1

    def count_classes(self, targets: Tensor) -> int:
        """Return the length of the vectors."""
        return targets.shape[1]

    def fits(self, targets: Tensor, classes: int) -> bool:
        """Return whether there is a vector of length K per image."""
        return targets.ndim == 2 and targets.shape[1] == classes

    def describe_targets(self, classes: int) -> str:
        """Describe valid targets."""
        return f"vectors of {classes} entries"

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], classes: int) -> Tensor:
        """Move each label to its place in the run; labels that the client does not know are absent."""
        renumbered = targets.new_zeros(len(targets), classes)
        renumbered[:, list(class_numbers)] = targets
        return renumbered
