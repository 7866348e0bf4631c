# SPDX-License-Identifier: Apache-2.0
"""Federated data: image sets, ways to divide them among clients, and the datamodule that serves rounds."""

from typing import TYPE_CHECKING

from perada.core.rounds import CohortBatch, EvalBatch, Phase, RoundPlan
from perada.data.federated import FederatedData
from perada.data.partitions import (
    IID,
    BalancedDirichlet,
    ByDomain,
    Dirichlet,
    DominantClass,
    FromFile,
    Partition,
    QuantitySkew,
    Shards,
)
from perada.data.sets.arrays import (
    CIFAR10,
    CIFAR10_1,
    CIFAR10C,
    CIFAR100,
    MNIST,
    STL10,
    Digits,
    FashionMNIST,
    Photographs,
)
from perada.data.sets.base import ImageSet
from perada.data.sets.folders import ImageFolder, ImageMasks, Images, UnlabelledFolder
from perada.data.sets.hugging_face import HuggingFace
from perada.data.sets.parts import RandomPart
from perada.data.sets.published import CheXpert, OfficeHome, OpenImage, Shakespeare
from perada.data.sets.scanners import Scanners
from perada.data.sets.tables import ImageTable
from perada.data.shifts import Corruptions, LabelShift, Shift

if TYPE_CHECKING:
    from perada.data.datamodule import FederatedDataModule

__all__ = [
    "CIFAR10",
    "CIFAR10C",
    "CIFAR10_1",
    "CIFAR100",
    "IID",
    "MNIST",
    "STL10",
    "BalancedDirichlet",
    "ByDomain",
    "CheXpert",
    "CohortBatch",
    "Corruptions",
    "Digits",
    "Dirichlet",
    "DominantClass",
    "EvalBatch",
    "FashionMNIST",
    "FederatedData",
    "FederatedDataModule",
    "FromFile",
    "HuggingFace",
    "ImageFolder",
    "ImageMasks",
    "ImageSet",
    "ImageTable",
    "Images",
    "LabelShift",
    "OfficeHome",
    "OpenImage",
    "Partition",
    "Phase",
    "Photographs",
    "QuantitySkew",
    "RandomPart",
    "RoundPlan",
    "Scanners",
    "Shakespeare",
    "Shards",
    "Shift",
    "UnlabelledFolder",
]


def __getattr__(name: str) -> object:
    """Import the data module when it is first used: Lightning takes seconds, and a saved run predicts without it."""
    if name == "FederatedDataModule":
        from perada.data.datamodule import FederatedDataModule

        return FederatedDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
