# SPDX-License-Identifier: Apache-2.0
"""From batches as they are read to batches that a model takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from perada.data.loaders import real_rows
from perada.data.transforms import augment, draw_crops, prepare_images
from perada.rounds import CohortBatch, EvalBatch
from perada.seeding import generator

if TYPE_CHECKING:
    from perada.backbones import ImageConfig

BatchT = TypeVar("BatchT", CohortBatch, EvalBatch, Tensor)


@dataclass(frozen=True)
class Preparation:
    """Makes a batch ready for the model, on the device it is on.

    uint8 images are scaled, given the backbone's channels, resized and normalised (see
    :func:`~perada.data.transforms.prepare_images`). Before that, cohort batches are augmented if that is asked for,
    with draws that depend on the seed, the round, the client and the step alone. Padding stays zero.

    Args:
        image: What the backbone asks of images.
        image_size: Height and width to resize to, or None.
        crop_padding: Shift training images by up to so many pixels; 0 for not.
        flip: Mirror half of the training images.
        seed: The run's seed.
    """

    image: "ImageConfig | None" = None
    image_size: int | None = None
    crop_padding: int = 0
    flip: bool = False
    seed: int = 0

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        return self.flip or self.crop_padding > 0

    def __call__(self, batch: BatchT) -> BatchT:
        """Prepare a cohort batch, a batch of test data, or images (B, ...)."""
        if isinstance(batch, Tensor):
            return prepare_images(batch, self.image, self.image_size)
        if isinstance(batch, EvalBatch):
            return batch._replace(x=prepare_images(batch.x, self.image, self.image_size))
        x = prepare_images(self._augment(batch), self.image, self.image_size)
        if min(batch.counts) < x.shape[1]:
            real = real_rows(batch.counts, x.device)
            x = x * real.view(*real.shape, *[1] * (x.ndim - 2))
        return batch._replace(x=x)

    def _augment(self, batch: CohortBatch) -> Tensor:
        """Shift and mirror the images (C, B, Ch, H, W), as asked for."""
        if not self.augments:
            return batch.x
        padding = self.crop_padding
        streams = [generator(self.seed, "augment", batch.round, client, batch.step) for client in batch.clients]
        rows = batch.x.shape[1]
        crops = torch.cat([draw_crops(rows, padding > 0, self.flip, padding, stream) for stream in streams])
        return augment(batch.x.flatten(0, 1), crops, padding).view_as(batch.x)


def check_least(least: int, **options: int | str | None) -> None:
    """Refuse options below ``least``; None fits, and ``batch_size`` may be "full".

    Raises:
        ValueError: With the option and the remedy.
    """
    for name, value in options.items():
        full = name == "batch_size"
        if value is None or (full and value == "full"):
            continue
        if isinstance(value, str) or value < least:
            raise ValueError(f"{name} is {value!r}: give at least {least}" + ", or 'full'" * full)
