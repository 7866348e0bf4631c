# SPDX-License-Identifier: Apache-2.0
"""Predictions with both models of a client: its personal one for images like its own, and the global one for others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import State
from perada.engine.engine import Engine
from perada.federation.options import Prediction
from perada.federation.settings import Settings
from perada.federation.typical_images import ImageStatistics, TypicalImages
from perada.tasks import Task

LEAST_SHARE = 0.5
"""Weight of the personal model of a client for whose training images the global model is right as well."""
SHARE_OF_ERRORS = 2.0
"""How much that weight grows with the error rate of the global model: it is 1 where a quarter is wrong."""
NO_EXAMPLES = (
    "prediction='both' compares images with a client's training images, none of which can be read; restore them, or "
    "choose prediction='personal'"
)
"""Message for a client whose training images have all become unreadable."""
Examples = Iterable[tuple[Tensor, Tensor]]
"""Batches of training images (B, ...) of a client, and their labels (:meth:`.FederatedDataModule.examples`)."""


def check_both_models(settings: Settings, prediction: Prediction, num_classes: int) -> None:
    """Check that clients can predict with both models, if a run's option ``prediction`` asks for that.

    Args:
        settings: Settings of the run.
        prediction: The option.
        num_classes: Number of classes.

    Raises:
        OptionError: If training is private, or the task cannot mix predictions.
    """
    if prediction != "both":
        return
    if settings.private:
        raise OptionError(
            f"prediction='both' is not supported with {settings.privacy_options}: it compares images with the training "
            "images, which no ledger accounts for; choose prediction='personal' or 'global'",
            name="prediction",
            value="both",
        )
    logits = torch.zeros(1, num_classes)
    settings.training.task.mixture(logits, logits, torch.tensor(0.5))


def has_both_models(settings: Settings) -> bool:
    """Return whether clients have personal models, at least after a final fine-tuning, and there is a global one."""
    return settings.has_personal_models and settings.algorithm.global_model


def without_both_models(settings: Settings, prediction: Prediction) -> str | None:
    """Return a sentence that a run's option ``prediction`` has no effect on its scores; None if it has.

    Args:
        settings: Settings of the run.
        prediction: The option.
    """
    if prediction != "both" or has_both_models(settings):
        return None
    return (
        f"evaluation: prediction='both' has no effect with {settings.algorithm.kind}, whose clients have only one "
        "model to predict with"
    )


def statistics_for(engine: Engine, examples: Examples) -> ImageStatistics:
    """Return the statistics by which images are compared for a model, given some images in the model's format.

    Raises:
        OptionError: If the inputs are texts, and no layer is frozen.
    """
    for images, _ in examples:
        return ImageStatistics.of(engine, images[0])
    raise ValueError(NO_EXAMPLES)


def typical_images_of(statistics: ImageStatistics, examples: Examples, task: Task, num_classes: int) -> TypicalImages:
    """Return what is typical of a client, and which classes it knows, from its training images."""
    statistics_of_batches: list[Tensor] = []
    targets_of_batches: list[Tensor] = []
    for images, targets in examples:
        statistics_of_batches.append(statistics(images))
        targets_of_batches.append(targets)
    if not statistics_of_batches:
        raise ValueError(NO_EXAMPLES)
    known_classes = task.known_classes(torch.cat(targets_of_batches), num_classes)
    return replace(TypicalImages.of(torch.cat(statistics_of_batches)), known_classes=known_classes)


def personal_share_of(examples: Examples, shared_logits: Callable[[Tensor], Tensor], task: Task) -> float:
    """Return the weight α of a client's personal model (:func:`personal_share`), from its training images.

    Args:
        examples: The training images.
        shared_logits: Computes the logits (B, K) of the global model for images (B, ...).
        task: What the models predict.
    """
    error_rates: list[Tensor] = []
    for images, targets in examples:
        error_rates.append(task.error_rates(shared_logits(images), targets).double().cpu())
    return personal_share(float(torch.cat(error_rates).mean()))


def personal_share(error_rate: float) -> float:
    """Return the weight α of a client's personal model for images that are typical of the client.

    Where the global model is as good as the personal one, their mean is better than each. Where it is wrong for many of
    the client's images, the mean would be worse than the personal model. Its error on the training images tells which
    is the case, unlike that of the personal model, which has learnt them by heart.

    Args:
        error_rate: Mean error rate of the global model on the client's training images (:meth:`.Task.error_rates`).

    >>> personal_share(0.0), personal_share(0.1), personal_share(0.6)
    (0.5, 0.7, 1.0)
    """
    return min(1.0, LEAST_SHARE + SHARE_OF_ERRORS * error_rate)


@dataclass(frozen=True)
class Weights:
    """How far clients rely on each of their two models, for images that are typical of them.

    Attributes:
        personal_shares: Weight α of the personal model, of a shape (...) that broadcasts with masks of images.
        known_classes: Mask (..., K) of the classes that the client knows; without elements for a task of which each
            model knows everything.
    """

    personal_shares: Tensor
    known_classes: Tensor

    def of_batches(self) -> "Weights":
        """Return the weights (p, 1) of p clients that predict the same batch of images (B, ...), given those (p,)."""
        return Weights(self.personal_shares.unsqueeze(1), self.known_classes.unsqueeze(1))


@dataclass(frozen=True)
class BothModels:
    """Predicts with the personal and the global model of a client.

    For an image that is typical of the client's training images (:class:`.TypicalImages`), the prediction is
    α p̃ + (1 − α) q, with q of the global model, and p̃ of the personal one, which leaves classes that the client does
    not know to the global model (:meth:`.Task.completed`). For any other image it is q. The weight α of a client is by
    default that of :func:`personal_share`.

    Attributes:
        task: What the models predict.
        statistics: Computes the statistics by which images are compared.
        typical_images: The training images of each client, by its number.
        personal_shares: The weight α of each client, by its number.
    """

    task: Task
    statistics: ImageStatistics
    typical_images: Mapping[int, TypicalImages]
    personal_shares: Mapping[int, float]

    def typical(self, clients: Sequence[int], statistics: Tensor) -> Tensor:
        """Return masks (p, B) of the images that are typical of each of p clients, given their statistics (B, D)."""
        return torch.stack([self.typical_images[client].contains(statistics) for client in clients])

    def typical_of_owners(self, owners: Tensor, statistics: Tensor) -> Tensor:
        """Return a mask (B,) of the images that are typical of their own client (B,), which is on the CPU."""
        is_typical = torch.zeros(len(owners), dtype=torch.bool, device=statistics.device)
        for owner in owners.unique().tolist():
            rows = (owners == owner).nonzero().flatten().to(statistics.device)
            is_typical[rows] = self.typical([owner], statistics[rows])[0]
        return is_typical

    def distance_ratios_of_owners(self, owners: Tensor, statistics: Tensor) -> Tensor:
        """Return the distance ratios (B,) of images for their own client (B,), which is on the CPU.

        See :meth:`.TypicalImages.distance_ratios`.
        """
        ratios = statistics.new_zeros(len(owners))
        for owner in owners.unique().tolist():
            rows = (owners == owner).nonzero().flatten().to(statistics.device)
            ratios[rows] = self.typical_images[owner].distance_ratios(statistics[rows])
        return ratios

    def state(self, client: int) -> State:
        """Return what is needed to predict with the models of one client, as tensors by name.

        The states of all clients have the same names and shapes.
        """
        num_rows = max(len(images.examples) for images in self.typical_images.values())
        state = self.typical_images[client].state(num_rows)
        state["personal_share"] = torch.tensor(self.personal_shares[client], dtype=torch.double)
        return {name: value.cpu() for name, value in state.items()}

    def weights(self, clients: Sequence[int], device: torch.device) -> Weights:
        """Return the weights (p,) of p clients."""
        personal_shares = torch.tensor([self.personal_shares[client] for client in clients], dtype=torch.double)
        known_classes = torch.stack([self.typical_images[client].known_classes for client in clients])
        return Weights(personal_shares.to(device), known_classes.to(device))

    def logits(self, personal: Tensor, shared: Tensor, is_typical: Tensor, weights: Weights) -> Tensor:
        """Return the logits (..., B, K) of the prediction; see :func:`logits_of_both`."""
        return logits_of_both(self.task, personal, shared, is_typical, weights)


def logits_of_both(task: Task, personal: Tensor, shared: Tensor, is_typical: Tensor, weights: Weights) -> Tensor:
    """Return the logits (..., B, K) of the prediction with both models.

    Args:
        task: What the models predict.
        personal: Logits (..., B, K) of personal models; (..., B, H, W, K) of pixels.
        shared: Logits (B, K) of the global model.
        is_typical: Mask (..., B) of the images that are typical of the client whose model it is.
        weights: Those of that client.
    """
    shared = shared.to(personal.dtype).expand_as(personal)
    shares = weights.personal_shares.to(personal.dtype)
    if weights.known_classes.shape[-1]:
        # The global model is trusted as far as it is right at home: fully if its error is 0, where α is 1/2.
        trust = (2 * (1 - shares)).clamp(max=1).unsqueeze(-1)
        personal = task.completed(personal, shared, weights.known_classes, trust)
    # Where the weight is 0 the mixture is not taken, so that outputs that are NaN have no effect.
    shares = torch.where(is_typical, shares, 0)
    shares = shares.view(*shares.shape, *[1] * (personal.dim() - shares.dim()))
    return torch.where(shares > 0, task.mixture(personal, shared, shares), shared)


def both_models_of_state(state: State, task: Task, statistics: ImageStatistics, device: torch.device) -> BothModels:
    """Return the prediction with both models of a single client, number 0, from its :meth:`BothModels.state`."""
    typical_images = TypicalImages.from_state(state).to(device)
    personal_share = float(state["personal_share"])
    return BothModels(task, statistics, {0: typical_images}, {0: personal_share})
