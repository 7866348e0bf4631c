# SPDX-License-Identifier: Apache-2.0
"""Training a selection of a network's own parameters, with nothing added."""

from .config import SelectiveConfig
from .model import SelectiveModel, selected_names

__all__ = ["SelectiveConfig", "SelectiveModel", "selected_names"]
