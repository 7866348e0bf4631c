# SPDX-License-Identifier: Apache-2.0
"""Derived randomness: every draw is a pure function of the run's seed and of what it is for.

Nothing in perada takes from torch's global stream, so a run does not depend on the number of devices, on the engine,
or on having been stopped and resumed.
"""

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *ids: int) -> int:
    """Hash the run's seed, a purpose and any indices into a 63-bit seed.

    Args:
        seed: The run's seed.
        purpose: What is drawn, for example ``"cohort"`` or ``"dropout"``.
        *ids: Indices that tell draws of one purpose apart, for example the round and the client.

    Returns:
        A non-negative integer below 2**63.

    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 3, 7)
    True
    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 7, 3)
    False
    """
    text = "/".join([str(seed), purpose, *map(str, ids)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *ids: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh generator seeded by :func:`derive_seed`.

    >>> a, b = generator(0, "cohort", 1), generator(0, "cohort", 1)
    >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
    True
    """
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *ids))
