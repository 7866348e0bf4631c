# SPDX-License-Identifier: Apache-2.0
"""Kinds of labels that small runs learn: images of three clients with them, a task with options, and a network."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedDataModule
from perada.tasks import Classification, MultiLabel, Regression, Segmentation, Task

NUM_OUTPUTS = 3
"""Classes, labels of an image, or numbers of an image."""
SIDE = 4
"""Height and width of an image in pixels."""
IGNORED = 255
"""Class of pixels that do not count."""
DEFAULT_LABELS = "classes"


@dataclass(frozen=True)
class Labels:
    """A kind of labels.

    Attributes:
        task: Task of runs without differential privacy; None for that of the labels.
        private_task: Task of private runs, which compute nothing from all clients' labels; None for ``task``.
        data_options: Options of the data module.
    """

    task: Task | None = None
    private_task: Task | None = None
    data_options: dict[str, Any] = field(default_factory=dict)


LABELS = {
    DEFAULT_LABELS: Labels(),
    "weighted classes": Labels(
        Classification(label_smoothing=0.1, class_weights="balanced_per_client"),
        data_options={"sampling": "balanced"},
    ),
    "unknown labels": Labels(MultiLabel("balanced"), private_task=MultiLabel([1.0, 2.0, 3.0])),
    "numbers": Labels(
        Regression("huber", standardize="all"),
        private_task=Regression("huber", mean=20.0, std=[5.0, 10.0, 20.0]),
    ),
    "masks": Labels(
        Segmentation("both", ignore_index=IGNORED, class_weights="balanced"),
        private_task=Segmentation("both", ignore_index=IGNORED, class_weights=[1.0, 2.0, 3.0]),
        data_options={"flip": True, "crop_padding": 1},
    ),
}
"""The kinds by name. Some algorithms, and privacy of images, reject some of them."""


def make_data(
    labels: str = DEFAULT_LABELS, private: bool = False, batch_size: int = 4, dtype: torch.dtype = torch.float32
) -> FederatedDataModule:
    """Return a data module of :func:`make_clients`, with the task and the options of the kind of labels."""
    kind = LABELS[labels]
    task = kind.task
    if private and kind.private_task is not None:
        task = kind.private_task
    # Networks with outputs for more labels than there are would need the number, too.
    return FederatedDataModule(
        make_clients(labels, dtype), batch_size=batch_size, num_classes=NUM_OUTPUTS, task=task, **kind.data_options
    )


def make_clients(labels: str = DEFAULT_LABELS, dtype: torch.dtype = torch.float32) -> perada.FederatedData:
    """Return images of three clients with labels of a kind, three test images of each, and some public images."""
    generator = torch.Generator().manual_seed(0)

    def dataset(count: int) -> TensorDataset:
        images = torch.randn(count, 1, SIDE, SIDE, generator=generator).to(dtype)
        return TensorDataset(images, make_labels(labels, count, generator))

    train = [dataset(count) for count in (6, 9, 5)]
    test = [dataset(3) for _ in range(3)]
    public = TensorDataset(torch.randn(6, 1, SIDE, SIDE, generator=generator).to(dtype))
    return perada.FederatedData(train, test, public)


def make_labels(labels: str, count: int, generator: torch.Generator, side: int = SIDE) -> Tensor:
    """Return labels of a kind: classes (N,), labels or numbers (N, 3), or masks (N, side, side).

    Args:
        labels: The kind.
        count: Number of images N.
        generator: Draws labels other than classes, which take turns.
        side: Height and width of a mask.
    """
    if labels == "unknown labels":
        values = torch.randint(0, 2, (count, NUM_OUTPUTS), generator=generator).float()
        values[torch.rand(count, NUM_OUTPUTS, generator=generator) < 0.3] = torch.nan
        # Every label of a client is present once and absent once, so that all scores are defined.
        values[0] = 0.0
        values[1] = 1.0
        return values
    if labels == "numbers":
        scales = torch.tensor([5.0, 10.0, 20.0])
        return 20 + scales * torch.randn(count, NUM_OUTPUTS, generator=generator)
    if labels == "masks":
        masks = torch.randint(0, NUM_OUTPUTS, (count, side, side), generator=generator)
        masks[torch.rand(count, side, side, generator=generator) < 0.1] = IGNORED
        return masks
    return torch.arange(count) % NUM_OUTPUTS


def make_network(labels: str = DEFAULT_LABELS, convolution: bool = False) -> nn.Module:
    """Return a few layers with weights from a fixed seed.

    Args:
        labels: Kind of labels; masks need an output for each pixel.
        convolution: Whether the network has convolutions in any case.
    """
    torch.manual_seed(0)
    if labels == "masks":
        first = [nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)]
        last = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, NUM_OUTPUTS, 1)]
        return nn.Sequential(*first, *last)
    if convolution:
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, NUM_OUTPUTS))
    layers = [nn.Flatten(), nn.Linear(SIDE**2, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, NUM_OUTPUTS)]
    return nn.Sequential(*layers)
