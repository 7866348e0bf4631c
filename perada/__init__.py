# SPDX-License-Identifier: Apache-2.0
"""Personalized, parameter-efficient federated fine-tuning of pretrained vision models on PyTorch Lightning."""

import perada.adapters  # noqa: F401  # registers our PEFT methods
from perada.algorithms import Algorithm, make_algorithm
from perada.api import finetune
from perada.callbacks import FederatedLoop
from perada.data import FederatedData, FederatedDataModule
from perada.module import FederatedClassifier
from perada.privacy import ClientPrivacy, Privacy
from perada.run import Run

__all__ = [
    "Algorithm",
    "ClientPrivacy",
    "FederatedClassifier",
    "FederatedData",
    "FederatedDataModule",
    "FederatedLoop",
    "Privacy",
    "Run",
    "finetune",
    "make_algorithm",
]
