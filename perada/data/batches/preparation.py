# SPDX-License-Identifier: Apache-2.0
"""From batches as they are read to batches that a model takes."""

import secrets
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from perada.core.batches import CohortBatch, EvalBatch, ImageConfig
from perada.core.seeding import generator
from perada.data.batches.loaders import pad
from perada.data.batches.transforms import augment, draw_crops, prepare_images
from perada.engine.losses import real_rows

BatchT = TypeVar("BatchT", CohortBatch, dict[str, CohortBatch], EvalBatch, Tensor)


@dataclass(frozen=True)
class Preparation:
    """Makes a batch ready for the model, on the device it is on.

    uint8 images are scaled, given the backbone's channels, resized and normalised (see
    :func:`~perada.data.batches.transforms.prepare_images`). Before that, cohort batches are augmented if asked for,
    with draws that depend on the seed, the round, the client and the step alone; for private training also on the
    stream. Padding stays zero.

    Args:
        image: What the backbone asks of images.
        image_size: Height and width to resize to, or None.
        crop_padding: Shift training images by up to so many pixels; 0 for not.
        flip: Mirror half of the training images.
        seed: The run's seed.
        secure: Augment the images of private training by the operating system's generator instead: the draws go by an
            image's place in the batch, and whoever knew them could tell from the others whether an image is there.
    """

    image: ImageConfig | None = None
    image_size: int | None = None
    crop_padding: int = 0
    flip: bool = False
    seed: int = 0
    secure: bool = False

    @property
    def augments(self) -> bool:
        """Whether training images are changed at random."""
        return self.flip or self.crop_padding > 0

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse to augment what is not an image."""
        if self.augments and len(shape) != 3:
            raise ValueError(
                f"images have shape {shape}, but crop_padding and flip need (channels, height, width); leave both out"
            )

    def __call__(self, batch: BatchT) -> BatchT:
        """Prepare a cohort batch, one for each stream by name, a batch of test data, or images (B, ...)."""
        if isinstance(batch, Tensor):
            return prepare_images(batch, self.image, self.image_size)
        if isinstance(batch, EvalBatch):
            return batch._replace(x=prepare_images(batch.x, self.image, self.image_size))
        if isinstance(batch, CohortBatch):
            return self._cohort(batch)
        return {name: self._cohort(own, name) for name, own in batch.items()}

    def _cohort(self, batch: CohortBatch, stream: str | None = None) -> CohortBatch:
        if not batch.clients:
            return batch
        x = prepare_images(self._augment(batch, stream), self.image, self.image_size)
        if min(batch.counts) < x.shape[1]:
            real = real_rows(batch.counts, x.shape[1], x.device)
            x = x * real.view(*real.shape, *[1] * (x.ndim - 2))
        return batch._replace(x=x)

    def _augment(self, batch: CohortBatch, stream: str | None) -> Tensor:
        """Shift and mirror the images (C, B, Ch, H, W), as asked for.

        A client draws for its own rows alone, since the width depends on others' batches.
        """
        if not self.augments:
            return batch.x
        purpose = "augment" if stream is None else f"augment/{stream}"
        seed = secrets.randbits(256) if self.secure and stream is not None else self.seed
        sources = [generator(seed, purpose, batch.round, client, batch.step) for client in batch.clients]
        drawn = zip(batch.counts, sources, strict=True)
        own = [draw_crops(rows, self.flip, self.crop_padding, source) for rows, source in drawn]
        crops = pad(torch.cat(own), batch.counts).flatten(0, 1)
        return augment(batch.x.flatten(0, 1), crops, self.crop_padding).view_as(batch.x)
