# SPDX-License-Identifier: Apache-2.0
"""Federated data: sets of images, ways to divide them among clients, and the datamodule that serves rounds."""

from perada.data.datamodule import FederatedDataModule
from perada.data.datasets import CIFAR10, CIFAR100, Digits, FashionMNIST, ImageSet, Photographs
from perada.data.federated import FederatedData
from perada.data.folders import ImageFolder, UnlabelledFolder
from perada.data.label_partitions import Dirichlet, DominantClass, Shards
from perada.data.partitions import IID, ByDomain, FromFile, Partition
from perada.rounds import CohortBatch, EvalBatch, Phase, RoundPlan

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
    "Shards",
    "UnlabelledFolder",
]
