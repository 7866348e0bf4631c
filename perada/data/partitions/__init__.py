# SPDX-License-Identifier: Apache-2.0
"""Who gets what: ways to divide a set of images among clients."""

from perada.data.partitions.base import IID, ByDomain, FromFile, Partition
from perada.data.partitions.by_label import Dirichlet, DominantClass, Shards

__all__ = ["IID", "ByDomain", "Dirichlet", "DominantClass", "FromFile", "Partition", "Shards"]
