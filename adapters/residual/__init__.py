# SPDX-License-Identifier: Apache-2.0
"""Residual adapters after the convolutions of a network."""

from .config import ResidualConfig
from .layer import ResidualLayer
from .model import ResidualModel

__all__ = ["ResidualConfig", "ResidualLayer", "ResidualModel"]
