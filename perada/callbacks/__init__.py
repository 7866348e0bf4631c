# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks."""

from perada.callbacks.checkpoint import RoundCheckpoint, find_checkpoint, newest_checkpoint
from perada.callbacks.federated_loop import FederatedLoop, check_precision, check_trainer
from perada.callbacks.predictions import PredictionFile
from perada.callbacks.progress import RoundProgressBar

__all__ = [
    "FederatedLoop",
    "PredictionFile",
    "RoundCheckpoint",
    "RoundProgressBar",
    "check_precision",
    "check_trainer",
    "find_checkpoint",
    "newest_checkpoint",
]
