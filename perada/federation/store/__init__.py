# SPDX-License-Identifier: Apache-2.0
"""What the clients keep between rounds: on the device, in host memory, or in files.

Whatever the place, a client's tensors are one flat row of bytes, so that moving a client is one copy. Only the clients
of a round, or of a group in evaluation, are ever stacked.
"""

from perada.federation.store.kinds import ClientStore, DiskStore, HostStore, Storage, StoreKind
from perada.federation.store.rows import joined, locate, restricted

__all__ = ["ClientStore", "DiskStore", "HostStore", "Storage", "StoreKind", "joined", "locate", "restricted"]
