# SPDX-License-Identifier: Apache-2.0
"""Federated data: sets of images, ways to divide them among clients, and the datamodule that serves rounds."""

from perada.core.rounds import CohortBatch as CohortBatch
from perada.core.rounds import EvalBatch as EvalBatch
from perada.core.rounds import Phase as Phase
from perada.core.rounds import RoundPlan as RoundPlan
from perada.data.datamodule import FederatedDataModule as FederatedDataModule
from perada.data.federated import FederatedData as FederatedData
from perada.data.partitions import IID as IID
from perada.data.partitions import ByDomain as ByDomain
from perada.data.partitions import Dirichlet as Dirichlet
from perada.data.partitions import DominantClass as DominantClass
from perada.data.partitions import FromFile as FromFile
from perada.data.partitions import Partition as Partition
from perada.data.partitions import Shards as Shards
from perada.data.sets.arrays import CIFAR10 as CIFAR10
from perada.data.sets.arrays import CIFAR10_1 as CIFAR10_1
from perada.data.sets.arrays import CIFAR10C as CIFAR10C
from perada.data.sets.arrays import CIFAR100 as CIFAR100
from perada.data.sets.arrays import MNIST as MNIST
from perada.data.sets.arrays import STL10 as STL10
from perada.data.sets.arrays import Digits as Digits
from perada.data.sets.arrays import FashionMNIST as FashionMNIST
from perada.data.sets.arrays import Photographs as Photographs
from perada.data.sets.base import ImageSet as ImageSet
from perada.data.sets.folders import ImageFolder as ImageFolder
from perada.data.sets.folders import Images as Images
from perada.data.sets.folders import UnlabelledFolder as UnlabelledFolder
from perada.data.sets.published import CheXpert as CheXpert
from perada.data.sets.published import OfficeHome as OfficeHome
from perada.data.sets.published import OpenImage as OpenImage
from perada.data.sets.published import Shakespeare as Shakespeare
from perada.data.sets.tables import HuggingFace as HuggingFace
from perada.data.sets.tables import ImageTable as ImageTable
from perada.data.shifts import Corruptions as Corruptions
from perada.data.shifts import LabelShift as LabelShift
from perada.data.shifts import Shift as Shift
