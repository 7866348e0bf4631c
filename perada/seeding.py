# SPDX-License-Identifier: Apache-2.0
"""Derived randomness: every draw is a pure function of the run's seed and of what it is for.

Nothing in perada takes from torch's global stream, so a run does not depend on the number of devices, on the engine,
or on having been stopped and resumed.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GAMMA, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # of SplitMix64


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # hashing cannot be traced, and need not be
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


class Streams:
    """Random streams of C clients, in which each draw is a pure function of its place.

    A client's numbers depend neither on the other clients nor on the device, and all clients' are drawn at once.
    SplitMix64 (Steele, Lea & Flood, OOPSLA 2014, section 5): word i of a stream with seed s is the mixed s + i·γ.

    Args:
        seeds: Seeds (C,), int64.
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds

    @classmethod
    def derived(
        cls, seed: int, purpose: str, *ids: int, clients: Sequence[int], device: torch.device | str = "cpu"
    ) -> "Streams":
        """Streams of ``clients`` with the seeds of :func:`derive_seed`."""
        seeds = [derive_seed(seed, purpose, *ids, client) for client in clients]
        return cls(torch.tensor(seeds, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, clients: slice) -> "Streams":
        return Streams(self.seeds[clients])

    def fork(self, purpose: str, index: int) -> "Streams":
        """Other streams of the same clients, for the ``index``-th of what they are for.

        >>> streams = Streams.derived(0, "dropout", clients=[4, 7])
        >>> torch.equal(streams.fork("step", 1).bits(5), streams.fork("step", 2).bits(5))
        False
        """
        return Streams(self.seeds + derive_seed(index, purpose))

    def bits(self, count: int) -> Tensor:
        """The first ``count`` draws of each client, uniform over all 16-bit integers: int16 (C, count)."""
        places = torch.arange((count + 3) // 4, device=self.seeds.device)
        z = places * _GAMMA + self.seeds.unsqueeze(1)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            shifted = z >> shift
            shifted &= (1 << (64 - shift)) - 1  # the sign bit is no number here
            z ^= shifted
            if factor != 1:
                z *= factor
        return z.view(torch.int16)[:, :count]
