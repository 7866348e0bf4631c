# SPDX-License-Identifier: Apache-2.0
"""One class per image."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perada.core.checks import OptionError, check_number, use_plain_numbers
from perada.tasks.base import Task
from perada.tasks.class_task import ClassTask
from perada.tasks.mixture import log_mixture
from perada.tasks.weights import (
    BALANCED,
    BALANCED_PER_CLIENT,
    check_all_occur,
    check_length,
    checked_weights,
    weights_on,
    weights_per_client,
)

LEAST_IMAGES_OF_CLASS = 3
"""Number of training images from which on a client knows a class: fewer teach a model little about it."""


@dataclass(frozen=True, repr=False)
class Classification(ClassTask):
    """One class per image: softmax probabilities, and the cross-entropy loss. Targets are classes (N,).

    Options change the loss of training only. Scores and distillation are those of the plain task.

    Args:
        label_smoothing: Share ε of the target's probability that is spread evenly over all classes (Szegedy et al.,
            CVPR 2016).
        class_weights: Factor of the loss for each class, K numbers, as in :func:`torch.nn.functional.cross_entropy`;
            ``balanced`` for N / (K n_k), where n_k of all clients' N training images have class k. The counts leave the
            clients, so ``balanced`` is not allowed with differential privacy or in a deployment.
            ``balanced_per_client`` for n / (k n_c), where n_c of a client's n images of k classes have class c. These
            counts stay with the client. Not allowed with the differential privacy of images.
        focal_gamma: Exponent γ of the focal loss −(1 − p)^γ log p of the true class's probability p (Lin et al., ICCV
            2017), which gives confident predictions less weight; 0 for the cross-entropy.

    Raises:
        OptionError: If an option is out of range.

    >>> Classification(label_smoothing=0.1).predicted(torch.tensor([[2.0, -1.0, 0.0]]))
    tensor([0])
    """

    label_smoothing: float = 0.0
    class_weights: Sequence[float] | Literal["balanced", "balanced_per_client"] | None = None
    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_number("label_smoothing", self.label_smoothing, ge=0, lt=1)
        check_number("focal_gamma", self.focal_gamma, ge=0)
        if not (isinstance(self.class_weights, str) and self.class_weights == BALANCED_PER_CLIENT):
            weights = checked_weights("class_weights", self.class_weights)
            # A tuple, since tasks with the same options must be equal.
            object.__setattr__(self, "class_weights", weights)
        if self.label_smoothing and self.focal_gamma:
            raise OptionError(
                f"label_smoothing={self.label_smoothing} cannot be combined with focal_gamma={self.focal_gamma}: the "
                "focal loss is defined for one true class; set one of the two",
                name="label_smoothing",
                value=self.label_smoothing,
            )

    @property
    def uses_all_targets(self) -> bool:
        """Whether the weights are computed from all clients' counts."""
        return self.class_weights == BALANCED

    def fitted_to(self, targets: Tensor, num_classes: int) -> Task:
        """Return the task with the weights N / (K n_k) in place of ``balanced``.

        >>> targets = torch.tensor([0, 0, 0, 1])
        >>> Classification(class_weights="balanced").fitted_to(targets, 2).class_weights
        (0.6666666666666666, 2.0)
        """
        if not self.uses_all_targets:
            return self
        counts = self.class_counts(targets, num_classes)
        check_all_occur("class_weights", counts)
        weights = len(targets) / (num_classes * counts.double())
        return replace(self, class_weights=tuple(weights.tolist()))

    def check_classes(self, num_classes: int) -> None:
        """Raise an OptionError if there is not one weight for each class."""
        if not (isinstance(self.class_weights, str) and self.class_weights == BALANCED_PER_CLIENT):
            check_length("class_weights", self.class_weights, num_classes)

    @property
    def uses_client_counts(self) -> bool:
        """Whether the weights are computed from each client's own counts."""
        return self.class_weights == BALANCED_PER_CLIENT

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss (N,) of each image: the cross-entropy unless an option changes it.

        Targets are classes (N,), or probabilities (N, K) of mixed images.

        >>> Classification().loss(torch.zeros(2, 4), torch.tensor([0, 3])).exp().tolist()
        [4.0, 4.0]
        """
        weights = None
        if not (isinstance(self.class_weights, str) and self.class_weights == BALANCED_PER_CLIENT):
            weights = weights_on(self.class_weights, logits)
        if targets.is_floating_point():
            targets = targets.to(logits)
        if not self.focal_gamma:
            return F.cross_entropy(
                logits, targets, weight=weights, reduction="none", label_smoothing=self.label_smoothing
            )
        losses = self._focal_loss(logits, targets)
        if weights is None:
            return losses
        return losses * weights[targets]

    def client_loss(self, logits: Tensor, targets: Tensor, class_counts: Tensor) -> Tensor:
        """Compute the loss (N,) of each image like :meth:`loss`, with the class weights of its client.

        >>> task = Classification(class_weights="balanced_per_client")
        >>> task.client_loss(torch.zeros(1, 3), torch.tensor([1]), torch.tensor([[3, 1, 0]])).exp().round().tolist()
        [9.0]
        """
        weights = weights_per_client(class_counts).to(logits)
        if self.focal_gamma:
            weights_of_targets = weights.gather(1, targets.unsqueeze(1)).squeeze(1)
            return self._focal_loss(logits, targets) * weights_of_targets
        distribution = targets
        if not targets.is_floating_point():
            distribution = self.presence(targets, logits.shape[-1])
        distribution = (1 - self.label_smoothing) * distribution.to(logits) + self.label_smoothing / logits.shape[-1]
        return -(distribution * weights * logits.log_softmax(-1)).sum(-1)

    def _focal_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the focal loss (N,) of each image without class weights."""
        cross_entropies = F.cross_entropy(logits, targets, reduction="none")
        # Errors are at least eps: for γ < 1 the power has an infinite gradient at 0.
        errors = (1 - (-cross_entropies).exp()).clamp(min=torch.finfo(logits.dtype).eps)
        return errors**self.focal_gamma * cross_entropies

    def predictions(self, logits: Tensor) -> Tensor:
        """Compute the softmax."""
        return logits.softmax(-1)

    def predicted(self, logits: Tensor) -> Tensor:
        """Return the most likely class (...)."""
        return logits.argmax(-1)

    def logits_of_mean_predictions(self, logits: Tensor) -> Tensor:
        """Return the log of the sum of probabilities: the factor 1/M is a constant in all logits of an image.

        >>> logits = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> Classification().ensemble(logits, "probabilities").softmax(-1).tolist()
        [0.5, 0.5]
        """
        return logits.log_softmax(-1).logsumexp(0)

    def mixture(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Return the logarithms of the mixed probabilities.

        >>> first, second = torch.tensor([[9.0, 9.0]]), torch.tensor([[0.0, 0.75]]).log()
        >>> [round(p, 6) for p in Classification().mixture(first, second, torch.tensor(0.8)).softmax(-1)[0].tolist()]
        [0.4, 0.6]
        """
        return log_mixture(first.log_softmax(-1), second.log_softmax(-1), share)

    def known_classes(self, targets: Tensor, num_classes: int) -> Tensor:
        """Return the classes of at least :data:`LEAST_IMAGES_OF_CLASS` images."""
        return targets.cpu().bincount(minlength=num_classes) >= LEAST_IMAGES_OF_CLASS

    def completed(self, personal: Tensor, shared: Tensor, known_classes: Tensor, trust: Tensor) -> Tensor:
        """Return the logarithms of p̃(y) = τ u q(y | unknown) + (1 − τ u) p(y).

        The global model decides whether the class is unknown to the client, with its probability u of all unknown
        classes and the trust τ, and which of them it is.

        >>> personal, shared = torch.tensor([0.9, 0.1, 0.0]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
        >>> known_classes = torch.tensor([True, True, False])
        >>> completed = Classification().completed(personal, shared, known_classes, torch.tensor([0.5]))
        >>> [round(p, 6) for p in completed.exp().tolist()]
        [0.63, 0.07, 0.3]
        """
        unknown_probability = shared.softmax(-1).masked_fill(known_classes, 0).sum(-1, keepdim=True)
        # A sum of all probabilities may be rounded to more than 1.
        share_of_unknown = (trust * unknown_probability).clamp(max=1)
        shared_of_unknown = shared.masked_fill(known_classes, torch.finfo(shared.dtype).min)
        return self.mixture(shared_of_unknown, personal, share_of_unknown)

    def distillation_loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Compute the divergence of the distributions over classes.

        >>> Classification().distillation_loss(torch.ones(2, 3), torch.zeros(2, 3)).item()
        0.0
        """
        log_student = F.log_softmax(student / temperature, -1)
        log_teacher = F.log_softmax(teacher / temperature, -1)
        return F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean") * temperature**2

    def mix(self, targets: Tensor, others: Tensor, shares: Tensor, num_classes: int) -> Tensor:
        """Return the probabilities (C, B, K) of mixed classes."""
        if self.focal_gamma:
            raise ValueError(
                f"focal_gamma={self.focal_gamma} cannot be combined with mixup or cutmix: the focal loss is defined "
                "for one true class; set it to 0"
            )
        presence = self.presence(targets, num_classes).to(shares)
        other_presence = self.presence(others, num_classes).to(shares)
        return presence.lerp(other_presence, 1 - shares.unsqueeze(-1))
