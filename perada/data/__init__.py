# SPDX-License-Identifier: Apache-2.0
"""Federated data: sets of images, ways to divide them among clients, and the datamodule that serves rounds."""

from perada.core.batches import CohortBatch, EvalBatch
from perada.core.rounds import Phase, RoundPlan
from perada.data.datamodule import FederatedDataModule
from perada.data.federated import FederatedData
from perada.data.partitions import IID, ByDomain, Dirichlet, DominantClass, FromFile, Partition, Shards
from perada.data.sets.folders import ImageFolder, UnlabelledFolder
from perada.data.sets.images import CIFAR10, CIFAR100, Digits, FashionMNIST, ImageSet, Photographs
from perada.data.sets.text import Shakespeare

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "ByDomain",
    "CohortBatch",
    "Digits",
    "Dirichlet",
    "DominantClass",
    "EvalBatch",
    "FashionMNIST",
    "FederatedData",
    "FederatedDataModule",
    "FromFile",
    "ImageFolder",
    "ImageSet",
    "Partition",
    "Phase",
    "Photographs",
    "RoundPlan",
    "Shakespeare",
    "Shards",
    "UnlabelledFolder",
]
