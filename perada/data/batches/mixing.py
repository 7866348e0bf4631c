# SPDX-License-Identifier: Apache-2.0
"""Mixup and CutMix: training images of one client are mixed in pairs, with their targets."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import check_number, use_plain_numbers
from perada.core.rounds import CohortBatch
from perada.core.seeding import derive_seed
from perada.core.states import to_device_async
from perada.tasks import Task


@dataclass(frozen=True)
class Mixing:
    """Mixes each image of a batch with another one of the same client, and their targets in the same proportion.

    Each client draws its proportion λ ~ Beta(α, α) and its pairs once per step, from the seed, the round, the client
    and the step. With both options, each step of a client is mixed by one of them, with equal probability.

    Args:
        mixup: α of mixup, λ x + (1 − λ) x' (Zhang et al., ICLR 2018); 0 to leave it out.
        cutmix: α of CutMix, which replaces a rectangle of x by that of x', with a share 1 − λ of the area (Yun et al.,
            ICCV 2019); 0 to leave it out.

    Raises:
        OptionError: If an option is out of range.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_number("mixup", self.mixup, ge=0)
        check_number("cutmix", self.cutmix, ge=0)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed at all."""
        return self.mixup > 0 or self.cutmix > 0

    def __call__(self, batch: CohortBatch, seed: int, task: Task, num_classes: int) -> CohortBatch:
        """Mix the images and targets of a prepared batch; padding stays.

        Args:
            batch: A step of C clients, with images (C, B, Ch, H, W).
            seed: The run's seed.
            task: Mixes the targets.
            num_classes: Number of classes K.
        """
        num_clients, rows, _, height, width = batch.x.shape
        shares = torch.ones(num_clients, height, width)
        target_shares = torch.ones(num_clients)
        partners = torch.arange(rows).repeat(num_clients, 1)
        for place, (client, count) in enumerate(zip(batch.clients, batch.counts, strict=True)):
            random = np.random.default_rng(derive_seed(seed, "mixing", batch.round, client, *batch.step_ids))
            partners[place, :count] = torch.from_numpy(random.permutation(count))
            shares[place] = self._draw_shares(random, height, width)
            # CutMix's rectangle has whole pixels and may be cut at the border: the targets follow its true area.
            target_shares[place] = shares[place].double().mean()
        device = batch.x.device
        partners = to_device_async(partners, device)
        image_shares = to_device_async(shares, device).to(batch.x)[:, None, None]
        clients = torch.arange(num_clients, device=device).unsqueeze(1)
        mixed_images = image_shares * batch.x + (1 - image_shares) * batch.x[clients, partners]
        mixed_targets = task.mix(
            batch.y, batch.y[clients, partners], to_device_async(target_shares, device).unsqueeze(1), num_classes
        )
        return batch._replace(x=mixed_images, y=mixed_targets)

    def _draw_shares(self, random: np.random.Generator, height: int, width: int) -> Tensor:
        """Draw the share (H, W) of each pixel that stays the image's own."""
        uses_cutmix = self.cutmix > 0
        if self.mixup > 0 and self.cutmix > 0:
            uses_cutmix = random.random() < 0.5
        if not uses_cutmix:
            return torch.full((height, width), random.beta(self.mixup, self.mixup))
        share = random.beta(self.cutmix, self.cutmix)
        side = math.sqrt(1 - share)
        centre_row = random.integers(height)
        centre_column = random.integers(width)
        half_height = int(height * side) // 2
        half_width = int(width * side) // 2
        shares = torch.ones(height, width)
        rows = slice(max(0, centre_row - half_height), min(height, centre_row + half_height))
        columns = slice(max(0, centre_column - half_width), min(width, centre_column + half_width))
        shares[rows, columns] = 0
        return shares
