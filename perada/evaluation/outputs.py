# SPDX-License-Identifier: Apache-2.0
"""What evaluated models predict for the images of one client, as far as their scores need it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perada.data import FederatedDataModule
from perada.evaluation.models import ClientModel
from perada.scores.accumulation import finite_outputs
from perada.scores.auroc import Auroc, auroc
from perada.scores.summed_scores import SummedScore, predictions_for
from perada.tasks import Task


@dataclass(frozen=True)
class ModelOutputs:
    """What one model predicts for the N images of a client.

    Attributes:
        probabilities: Probabilities (N, K) in double precision; None for masks and numbers.
        summands: Summands (N, S) of each score by its name.
        num_failed: Number of images for which its outputs are NaN or infinite, so that it has no score.
    """

    probabilities: Tensor | None
    summands: Mapping[str, Tensor]
    num_failed: int


@dataclass(frozen=True)
class ClientOutputs:
    """What the models predict for the N images of a client.

    Attributes:
        name: Name of the client.
        groups: Group (N,) of each image, such as its patient, numbered from 0.
        targets: Targets (N, ...); None for masks and numbers.
        models: Outputs of each model, by its name.
    """

    name: str
    groups: NDArray[np.int64]
    targets: Tensor | None
    models: Mapping[str, ModelOutputs]

    @property
    def num_images(self) -> int:
        """Number N of images."""
        return len(self.groups)

    @property
    def num_groups(self) -> int:
        """Number of groups of images."""
        return int(self.groups.max()) + 1 if len(self.groups) else 0


def predict_client(
    name: str,
    models: Mapping[str, ClientModel],
    data: FederatedDataModule,
    client: int,
    scores: Sequence[SummedScore],
) -> ClientOutputs:
    """Run models on the test images of a client.

    Args:
        name: Name of the client.
        models: The models by name.
        data: The data.
        client: Number of the client in the data.
        scores: What is computed from predictions.
    """
    task = data.task
    keeps_probabilities = task.has_classes and not task.per_pixel
    targets_of_batches: list[Tensor] = []
    probabilities: dict[str, list[Tensor]] = {model: [] for model in models}
    summands: dict[str, dict[str, list[Tensor]]] = {model: {score.name: [] for score in scores} for model in models}
    num_failed = dict.fromkeys(models, 0)
    with torch.inference_mode():
        for images, targets in data.test_batches_of(client):
            if keeps_probabilities:
                targets_of_batches.append(targets)
            for model_name, model in models.items():
                logits = model.predictor(model.preprocessing.batch(list(images))).logits
                num_failed[model_name] += int((~finite_outputs(logits)).sum())
                # A model with such images gets no score, whatever stands in their place.
                predictions = predictions_for(model.task, logits.nan_to_num())
                _check_shape(model_name, predictions, targets, task)
                if keeps_probabilities:
                    probabilities[model_name].append(predictions)
                for score in scores:
                    summands[model_name][score.name].append(score.summands(predictions, targets))
    group_numbers = np.unique(data.test_groups(client), return_inverse=True)[1]
    outputs = {}
    for model_name in models:
        outputs[model_name] = ModelOutputs(
            probabilities=torch.cat(probabilities[model_name]) if probabilities[model_name] else None,
            summands={score: torch.cat(parts) for score, parts in summands[model_name].items() if parts},
            num_failed=num_failed[model_name],
        )
    return ClientOutputs(
        name=name,
        groups=group_numbers.astype(np.int64),
        targets=torch.cat(targets_of_batches) if targets_of_batches else None,
        models=outputs,
    )


def _check_shape(model_name: str, predictions: Tensor, targets: Tensor, task: Task) -> None:
    """Raise a ValueError if predicted masks have another size than the masks of the data."""
    if task.per_pixel and predictions.shape[-2:] != targets.shape[-2:]:
        raise ValueError(
            f"{model_name} predicts masks of {tuple(predictions.shape[-2:])} pixels, but those of the data have "
            f"{tuple(targets.shape[-2:])}; set data.image_size to the size that the model was trained with"
        )


def digests_of_groups(data: FederatedDataModule, client: int, num_bytes: int) -> bytes:
    """Return the digests of the groups of a client's test images, of their pixels and targets, in order.

    Args:
        data: The data.
        client: Number of the client.
        num_bytes: Bytes of each digest.
    """
    groups = data.test_groups(client)
    images_of_group: dict[Any, list[bytes]] = {}
    position = 0
    for images, targets in data.test_batches_of(client):
        for image, target in zip(images, targets, strict=True):
            content = image.contiguous().numpy().tobytes() + target.contiguous().numpy().tobytes()
            images_of_group.setdefault(groups[position], []).append(hashlib.sha256(content).digest())
            position += 1
    digests = [hashlib.sha256(b"".join(sorted(images))).digest() for images in images_of_group.values()]
    return b"".join(sorted(digest[:num_bytes] for digest in digests))


def auroc_classes(task: Task, num_classes: int) -> list[int]:
    """Return the classes whose AUROC are computed. Of two exclusive classes, both have the same, so the second is."""
    if not task.has_classes or task.per_pixel:
        return []
    if task.exclusive and num_classes == 2:
        return [1]
    return list(range(num_classes))


@dataclass(frozen=True)
class ClassLabels:
    """Which images of a client have a class.

    Attributes:
        is_known: Mask (N,) of the images whose label is known.
        has_class: Mask (N,) of those among them that have the class.
    """

    is_known: NDArray[np.bool_]
    has_class: NDArray[np.bool_]

    @classmethod
    def of(cls, task: Task, targets: Tensor, number: int) -> "ClassLabels":
        """Return those of a class, from targets (N, ...)."""
        if task.exclusive:
            has_class = (targets == number).numpy()
            return cls(is_known=np.ones_like(has_class), has_class=has_class)
        is_known = task.known(targets)[:, number].numpy()
        return cls(is_known=is_known, has_class=(targets[:, number] == 1).numpy() & is_known)


def class_auroc(outputs: ClientOutputs, model: str, task: Task, number: int) -> Auroc:
    """Return a model's AUROC of a class on the images of a client; images without a known label have no influence."""
    probabilities = outputs.models[model].probabilities
    assert probabilities is not None and outputs.targets is not None
    labels = ClassLabels.of(task, outputs.targets, number)
    rows = labels.is_known
    auroc_of_known = auroc(probabilities[:, number].numpy()[rows], labels.has_class[rows], outputs.groups[rows])
    influences = np.zeros(outputs.num_images)
    influences[rows] = auroc_of_known.influences
    return Auroc(auroc_of_known.value, influences, auroc_of_known.fewest)
