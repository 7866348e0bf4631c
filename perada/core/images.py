# SPDX-License-Identifier: Apache-2.0
"""What images must look like for a backbone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageConfig:
    """What images must look like for a backbone.

    Attributes:
        input_size: Channels, height and width.
        mean: Mean that each channel, scaled to [0, 1], is normalised with.
        std: Standard deviation, likewise.
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
