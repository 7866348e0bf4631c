# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks."""

from perada.callbacks.checkpoint import RoundCheckpoint
from perada.callbacks.federated_loop import FederatedLoop
from perada.callbacks.predictions import PredictionFile
from perada.callbacks.progress import RoundProgressBar

__all__ = [
    "FederatedLoop",
    "PredictionFile",
    "RoundCheckpoint",
    "RoundProgressBar",
]
