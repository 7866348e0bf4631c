# SPDX-License-Identifier: Apache-2.0
"""Several labels per image."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.tasks.base import Task
from perada.tasks.mixture import log_mixture
from perada.tasks.weights import BALANCED, check_all_occur, check_length, checked_weights, weights_on

UNKNOWN = -1
"""An unknown label, which may also be NaN; CheXpert has both."""


@dataclass(frozen=True, repr=False)
class MultiLabel(Task):
    """Several labels per image, each present or absent: sigmoid probabilities, and the binary cross-entropy.

    Targets are vectors (N, K) of 0 and 1. An unknown label is NaN or -1. It is left out of the loss, which is the mean
    over the known labels of an image, and of the scores. An image without any known label has a loss of 0. Entropies
    and divergences are means over the K labels.

    Args:
        positive_weights: Factor of the loss of each label where it is present, K numbers, as ``pos_weight`` of
            :class:`torch.nn.BCEWithLogitsLoss`; ``balanced`` for the number of images without the label divided by
            those with it, among all clients' training images. The counts leave the clients, so ``balanced`` is not
            allowed with differential privacy or in a deployment.

    Raises:
        OptionError: If an option is out of range.

    >>> MultiLabel().predicted(torch.tensor([[2.0, -1.0, 0.5]]))
    tensor([[1, 0, 1]])
    """

    exclusive: ClassVar[bool] = False
    default_metric: ClassVar[str] = "auroc"
    metric_prefix: ClassVar[str] = "Multilabel"
    metric_size_option: ClassVar[str] = "num_labels"
    labels_per_image: ClassVar[str] = "several labels per image"

    positive_weights: Sequence[float] | Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        weights = checked_weights("positive_weights", self.positive_weights)
        # A tuple, since tasks with the same options must be equal.
        object.__setattr__(self, "positive_weights", weights)

    @property
    def uses_all_targets(self) -> bool:
        """Whether the weights are computed from all clients' counts."""
        return self.positive_weights == BALANCED

    def fitted_to(self, targets: Tensor, num_classes: int) -> Task:
        """Return the task with absent / present images of each label in place of ``balanced``.

        >>> targets = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, -1.0]])
        >>> MultiLabel(positive_weights="balanced").fitted_to(targets, 2).positive_weights
        (3.0, 0.5)
        """
        if not self.uses_all_targets:
            return self
        present = self.class_counts(targets, num_classes)
        absent = self.known(targets).sum(0) - present
        check_all_occur("positive_weights", torch.minimum(present, absent))
        weights = absent.double() / present
        return replace(self, positive_weights=tuple(weights.tolist()))

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if there is not one weight for each label."""
        check_length("positive_weights", self.positive_weights, num_classes)

    def known(self, targets: Tensor) -> Tensor:
        """Return a mask (N, K) that is false where a label is NaN or -1."""
        return ~targets.isnan() & (targets != UNKNOWN)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the binary cross-entropy (N,) of each image, averaged over its known labels.

        >>> MultiLabel().loss(torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 1.0]])).exp().tolist()
        [2.0]
        """
        has_label = self.known(targets)
        # The loss must not see unknown targets: the gradient with respect to a target of NaN would be NaN, not 0.
        targets = targets.where(has_label, 0).to(logits)
        losses_of_labels = F.binary_cross_entropy_with_logits(
            logits, targets, reduction="none", pos_weight=weights_on(self.positive_weights, logits)
        )
        sums = losses_of_labels.where(has_label, 0).sum(-1)
        return sums / has_label.sum(-1).clamp(min=1)

    def predictions(self, logits: Tensor) -> Tensor:
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

    def logits_of_mean_predictions(self, logits: Tensor) -> Tensor:
        """Return the log odds of the mean: the factor 1/M cancels between the sums for presence and for absence."""
        log_sum_present = F.logsigmoid(logits).logsumexp(0)
        log_sum_absent = F.logsigmoid(-logits).logsumexp(0)
        return log_sum_present - log_sum_absent

    def mixture(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Return the log odds of the mixed probabilities of each label."""
        log_present = log_mixture(F.logsigmoid(first), F.logsigmoid(second), share)
        log_absent = log_mixture(F.logsigmoid(-first), F.logsigmoid(-second), share)
        return log_present - log_absent

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
        """Return the distance (N, K) of each probability from the label, 0 where the label is unknown."""
        return (probabilities - targets).abs().where(self.known(targets), 0)

    def presence(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return the targets, which are indicators."""
        return targets

    def mix(self, targets: Tensor, others: Tensor, shares: Tensor, num_classes: int) -> Tensor:
        """Return mixed labels (C, B, K), unknown where one of the two is unknown."""
        mixed = targets.lerp(others, 1 - shares.unsqueeze(-1))
        return mixed.where(self.known(targets) & self.known(others), UNKNOWN)

    def class_counts(self, targets: Tensor, num_classes: int) -> Tensor:
        """Count the images that have each label."""
        return (targets >= 1).sum(0)

    def blank_targets(self, shape: Sequence[int], num_classes: int, device: torch.device) -> Tensor:
        """Return vectors without a label."""
        return torch.zeros(*shape, num_classes, dtype=torch.float32, device=device)

    def largest_label(self, num_classes: int) -> int:
        """Return 1, for a label that is present."""
        return 1

    def count_classes(self, targets: Tensor) -> int:
        """Return the length of the vectors."""
        return targets.shape[1]

    def fits(self, targets: Tensor, num_classes: int | None = None) -> bool:
        """Return whether there is a vector of length K per image."""
        return targets.ndim == 2 and num_classes in (None, targets.shape[1])

    def describe_targets(self, num_classes: int) -> str:
        """Describe valid targets."""
        return f"vectors of {num_classes} entries"

    def renumber(self, targets: Tensor, class_numbers: Sequence[int], num_classes: int) -> Tensor:
        """Move each label to its place in the run; labels that the client's data do not have are unknown."""
        # An unknown label is negative.
        dtype = targets.dtype if targets.dtype.is_signed else torch.float32
        renumbered = torch.full((len(targets), num_classes), UNKNOWN, dtype=dtype)
        renumbered[:, list(class_numbers)] = targets.to(dtype)
        return renumbered
