# SPDX-License-Identifier: Apache-2.0
"""The model, the federation and the numbers of steps of a measured round, the same for every way."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData, FederatedDataModule
from perada.lightning.module import FederatedClassifier
from perada.results.run import Run
from perada.server import Distillation
from perada.tasks import Classification

PROX = 1.0
LR = 0.01
LR_SERVER = 1e-3


@dataclass(frozen=True)
class Workload:
    """PerAda on random images.

    Attributes:
        backbone: Name of a timm model, whose weights are random, or a network.
        adapter: Name of the adapter.
        options: Options of the adapter.
        side: Side of the images in pixels.
        clients: Number of clients M.
        sampled: Number of clients C in a round.
        batch: Images in a local step.
        steps: Local steps in a round.
        public: Number of public images.
        public_batch: Images in a step of the distillation.
        passes: Passes of the distillation over the public images in a round; 0 for no distillation.
        classes: Number of classes.
    """

    backbone: str | nn.Module = "resnet18"
    adapter: str = "residual"
    options: dict[str, Any] = field(default_factory=dict)
    side: int = 32
    clients: int = 20
    sampled: int = 8
    batch: int = 64
    steps: int = 4
    public: int = 256
    public_batch: int = 64
    passes: int = 3
    classes: int = 10

    @property
    def distillation(self) -> Distillation:
        """Options of the distillation as the naive way has them: no trust region, teachers in evaluation mode."""
        steps = self.passes * self.public // self.public_batch
        return Distillation(
            steps=steps, batch_size=self.public_batch, lr=LR_SERVER, teacher_mode="eval", trust_region=None
        )

    def data(self, dtype: torch.dtype = torch.float32) -> FederatedData:
        """Return random images: for each client an epoch of ``steps`` batches, and public ones; none for tests."""
        random = torch.Generator().manual_seed(0)

        def images(count: int) -> torch.Tensor:
            return torch.randn(count, 3, self.side, self.side, generator=random).to(dtype)

        size = self.batch * self.steps
        labels = torch.arange(size) % self.classes
        train = [TensorDataset(images(size), labels) for _ in range(self.clients)]
        return FederatedData(train, public=TensorDataset(images(self.public)))

    def module(self) -> FederatedClassifier:
        """Return the built model in its initial state."""
        module = FederatedClassifier(self.backbone, self.adapter, self.options, False, image_size=self._image_size)
        module.build(self.classes, Classification(), 0)
        return module

    def finetune(self, data: FederatedData | FederatedDataModule, device: torch.device, **options: Any) -> Run:
        """Run rounds of perada.

        Args:
            data: The clients' images.
            device: The device to train on.
            options: Further options of :func:`perada.finetune`.
        """
        return perada.finetune(
            self.backbone,
            data,
            adapter=self.adapter,
            adapter_options=self.options,
            pretrained=False,
            image_size=self._image_size,
            algorithm_options={"prox_strength": PROX},
            num_classes=self.classes,
            clients_per_round=self.sampled,
            batch_size=self.batch,
            lr_personal=LR,
            lr_local=LR,
            distillation=self.distillation,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **options,
        )

    @property
    def _image_size(self) -> int | None:
        return self.side if isinstance(self.backbone, str) and "vit" in self.backbone else None
