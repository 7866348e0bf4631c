# SPDX-License-Identifier: Apache-2.0
"""Bottleneck adapters in the blocks of a vision transformer."""

from .config import BottleneckConfig
from .layer import BottleneckLayer
from .model import BottleneckModel

__all__ = ["BottleneckConfig", "BottleneckLayer", "BottleneckModel"]
