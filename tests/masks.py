# SPDX-License-Identifier: Apache-2.0
"""Small pictures with masks, and a small U-Net, for tests of segmentation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from perada.data import FederatedData

SIZE = 32


def squares(count, seed, brightness=0, size=SIZE):
    """Noise with a red square of class 1 and a green one of class 2, the later over the earlier."""
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 3, size, size), generator=random)
    masks = torch.zeros(count, size, size, dtype=torch.uint8)
    for row in range(count):
        for channel in range(2):
            side = int(torch.randint(5, 10, (1,), generator=random))
            top, left = torch.randint(0, size - 10, (2,), generator=random).tolist()
            images[row, channel, top : top + side, left : left + side] += 100 + brightness
            masks[row, top : top + side, left : left + side] = channel + 1
    return TensorDataset(images.clamp(max=255).to(torch.uint8), masks)


def dice_loss(logits, masks):
    """The mean over images of 1 − the mean Dice coefficient of the three classes, with one pixel of smoothing."""
    p = logits.softmax(1)
    g = F.one_hot(masks.long(), 3).movedim(-1, 1)
    dice = (2 * (p * g).sum((2, 3)) + 1) / (p.sum((2, 3)) + g.sum((2, 3)) + 1)
    return (1 - dice.mean(1)).mean()


def hospitals(clients=3):
    """Clients with scanners of different brightness, and public images."""
    return FederatedData(
        train=[squares(12 + client, client, 20 * client) for client in range(clients)],
        test=[squares(5, 100 + client, 20 * client) for client in range(clients)],
        public=squares(8, 7, 10),
    )


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.ReLU())


class UNet(nn.Module):
    """Two levels, as in MONAI: a module that returns logits (B, K, H, W)."""

    def __init__(self, classes=3, width=8):
        super().__init__()
        self.encoder = block(3, width)
        self.bottom = block(width, 2 * width)
        self.decoder = block(3 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skipped = self.encoder(x)
        deep = F.interpolate(self.bottom(F.max_pool2d(skipped, 2)), scale_factor=2)
        return self.out(self.decoder(torch.cat([skipped, deep], 1)))
