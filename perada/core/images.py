# SPDX-License-Identifier: Apache-2.0
"""What images must look like for a backbone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageConfig:
    """Images of a backbone: (channels, height, width), each channel in [0, 1] normalised by ``mean`` and ``std``."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
