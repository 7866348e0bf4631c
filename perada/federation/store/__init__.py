# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds: on the device, in host memory, or in files.

Whatever the place, a client's tensors are one flat row of bytes, so that moving a client is one copy. Only the clients
of a round, or of a group in evaluation, are ever stacked.
"""

from perada.federation.store.choice import Storage
from perada.federation.store.disk import DiskStore
from perada.federation.store.files import joined, locate, restricted
from perada.federation.store.memory import ClientStore, HostStore, StoreKind

__all__ = ["ClientStore", "DiskStore", "HostStore", "Storage", "StoreKind", "joined", "locate", "restricted"]
