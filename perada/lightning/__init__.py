# SPDX-License-Identifier: Apache-2.0
"""Communication rounds as Lightning epochs: the module, the loop, checkpoints, devices."""

from perada.lightning.callbacks import PredictionFile, RoundLines, RoundProgressBar, round_progress
from perada.lightning.checkpoint import RoundCheckpoint
from perada.lightning.federated_loop import FederatedLoop
from perada.lightning.module import FederatedClassifier

__all__ = [
    "FederatedClassifier",
    "FederatedLoop",
    "PredictionFile",
    "RoundCheckpoint",
    "RoundLines",
    "RoundProgressBar",
    "round_progress",
]
