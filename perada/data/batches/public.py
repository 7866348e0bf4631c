# SPDX-License-Identifier: Apache-2.0
"""The server's unlabelled public images: which ones a round uses, and how they are changed at random."""

from typing import Literal

import torch
from torch import Tensor

from perada.core.rounds import batch_indices
from perada.core.seeding import generator
from perada.data.batches.transforms import Preparation, draw_crops
from perada.tasks.geometry import augment


def public_indices(
    num_images: int,
    round: int,
    steps: int,
    batch_size: int | Literal["full"],
    preparation: Preparation,
) -> Tensor:
    """Draw the public images of each step of a round's distillation: indices (steps, B), B at most ``num_images``.

    An index below ``num_images`` is a position in the set and stands for the stored image. With ``augment_public`` it
    also names a random change: ``position + num_images * draw``, where draws are numbered from 1 over all steps of all
    rounds. One number thus determines exactly what teachers and student see. Sites of a deployment, several devices and
    resumed runs get the same image from it.
    """
    positions = batch_indices(num_images, batch_size, steps, preparation.seed, "public", round)
    if not preparation.augment_public:
        return positions
    draws = 1 + round * steps + torch.arange(steps)
    return positions + num_images * draws.unsqueeze(1)


def augment_public_images(images: Tensor, indices: Tensor, num_images: int, preparation: Preparation) -> Tensor:
    """Shift and mirror the public images (N, Ch, H, W) that indices (N,) of :func:`public_indices` select.

    Args:
        images: Stored images at the positions ``indices % num_images``, on any device.
        indices: On the CPU.
        num_images: Number of public images.
        preparation: How far images are shifted, whether they are mirrored, and the seed.
    """
    draws = indices // num_images
    if not draws.any():
        return images
    padding = preparation.crop_padding
    # Stored images, whose draw is 0, stay in place and are not mirrored.
    crops = torch.tensor([padding, padding, 0]).repeat(len(indices), 1)
    for draw in draws[draws > 0].unique().tolist():
        rows = draws == draw
        # Drawn for all positions, so that a change does not depend on which images are read together.
        of_positions = draw_crops(
            num_images, preparation.flip, padding, generator(preparation.seed, "augment/public", draw)
        )
        crops[rows] = of_positions[indices[rows] % num_images]
    return augment(images, crops, padding)
