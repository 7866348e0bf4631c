# SPDX-License-Identifier: Apache-2.0
"""Derived randomness: every draw is a pure function of the run's seed and of its purpose.

perada never draws from torch's global stream, so a run does not depend on the number of devices, on the engine, or on
having been stopped and resumed. A stream's key has at least 127 bits, all of them hashed from the seed, the purpose and
the indices. torch's own ``manual_seed`` keeps only 32 bits of a seed on the CPU: among a hundred thousand streams some
would be the same.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

# Factors of SplitMix64's mixing function.
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685
# The state of torch's generator on the CPU, the Mersenne Twister mt19937: 624 words of 32 bits after 24 bytes of the
# seed, two flags and a position.
_WORDS = 624
_START = 24
_LAYOUT = "7488e7de02f18dcd010628b79fd41f56b07708ab2c3d0ec1481cf0c30840bf78"
"""SHA-256 of the words, each in 8 bytes with the lowest first, after the seed 5489 (Matsumoto and Nishimura, 1998)."""


def _digest(size: int, seed: int, purpose: str, *ids: int) -> bytes:
    """Hash the arguments to a number of bytes by SHAKE-256."""
    # JSON distinguishes ("a", 1, 2) from ("a/1", 2).
    text = json.dumps([int(seed), purpose, *map(int, ids)])
    return hashlib.shake_256(text.encode()).digest(size)


def derive_seed(seed: int, purpose: str, *ids: int) -> int:
    """Hash the run's seed, a purpose such as ``"cohort"``, and indices such as round and client into 128 bits.

    NumPy's and Python's generators use all 128 bits. torch's would keep 32 of them: see :func:`generator`.

    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 3, 7)
    True
    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 7, 3)
    False
    """
    return int.from_bytes(_digest(16, seed, purpose, *ids), "little")


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a new generator on the CPU, whose complete state of 19,968 bits is SHAKE-256 of the arguments.

    Numbers are drawn on the CPU and then moved, so that they do not depend on the device.

    >>> a, b = generator(0, "cohort", 1), generator(0, "cohort", 1)
    >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
    True
    """
    fresh = torch.Generator()
    fresh.set_state(_state(seed, purpose, *ids))
    return fresh


def seed_global(seed: int, purpose: str, *ids: int) -> None:
    """Set torch's global stream on the CPU to that of :func:`generator`, for code that can use no other."""
    torch.default_generator.set_state(_state(seed, purpose, *ids))


@contextmanager
def seeded(seed: int, purpose: str, *ids: int) -> Iterator[None]:
    """Replace torch's global stream on the CPU by a derived one within the ``with`` statement.

    >>> with seeded(0, "model"):
    ...     drawn = torch.rand(3)
    >>> bool(torch.equal(drawn, torch.rand(3, generator=generator(0, "model"))))
    True
    """
    with torch.random.fork_rng(devices=[]):
        seed_global(seed, purpose, *ids)
        yield


def _state(seed: int, purpose: str, *ids: int) -> Tensor:
    """Return the state (bytes,) of a Mersenne Twister whose words are all hashed."""
    state = _fresh_state().clone()
    words = _digest(4 * _WORDS, seed, purpose, *ids)
    # torch stores each word of 32 bits in one of 64.
    wide = torch.frombuffer(bytearray(words), dtype=torch.int32).long() & 0xFFFFFFFF
    state[_START : _START + 8 * _WORDS] = wide.view(torch.uint8)
    return state


@cache
def _fresh_state() -> Tensor:
    """Return the state of a generator before its first draw.

    Raises:
        RuntimeError: If this version of torch has another layout of the state.
    """
    state = torch.Generator().manual_seed(5489).get_state()
    words = state[_START : _START + 8 * _WORDS].numpy().tobytes()
    if hashlib.sha256(words).hexdigest() != _LAYOUT:
        raise RuntimeError(
            f"torch {torch.__version__} stores the state of its generator in a layout that perada does not know; use "
            "a torch version that perada was tested with"
        )
    return state


class Streams:
    """Random streams of C clients, in which each draw is a pure function of its place.

    A client's numbers depend neither on the other clients nor on the device, and those of all clients are drawn
    together. SplitMix64 (Steele, Lea & Flood, OOPSLA 2014, section 5): word i of a stream is the mixed s + i·γ, with a
    seed s and an odd increment γ of each stream's own, 127 bits together, so that streams do not run into one another.

    Args:
        seeds: Seeds s (C,), int64.
        gammas: Increments γ (C,), int64 and odd.
    """

    def __init__(self, seeds: Tensor, gammas: Tensor) -> None:
        self.seeds = seeds
        self.gammas = gammas

    @classmethod
    def derived(
        cls,
        seed: int,
        purpose: str,
        *ids: int,
        clients: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> "Streams":
        """Return the streams of ``clients``, whose s and γ are hashed as in :func:`derive_seed`."""
        keys = [_digest(16, seed, purpose, *ids, client) for client in clients]
        # torch.frombuffer rejects an empty buffer.
        table = torch.empty(0, dtype=torch.int64)
        if keys:
            table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int64)
        seeds, gammas = table.view(-1, 2).to(device).unbind(1)
        # γ must be odd.
        return cls(seeds, gammas | 1)

    def __getitem__(self, clients: slice) -> "Streams":
        return Streams(self.seeds[clients], self.gammas[clients])

    def fork(self, purpose: str, index: int) -> "Streams":
        """Derive new streams of the same clients, for the ``index``-th use for a purpose.

        >>> streams = Streams.derived(0, "dropout", clients=[4, 7])
        >>> torch.equal(streams.fork("step", 1).bits(5), streams.fork("step", 2).bits(5))
        False
        """
        seed_offset, gamma_offset = _fork(purpose, index)
        return Streams(self.seeds + seed_offset, self.gammas + gamma_offset)

    def bits(self, count: int) -> Tensor:
        """Return the first ``count`` draws of each client, uniform over all 16-bit integers: int16 (C, count)."""
        # A word of 64 bits gives four of them.
        num_words = (count + 3) // 4
        places = torch.arange(num_words, device=self.seeds.device)
        # s + i·γ, and SplitMix64's mixing function, all modulo 2**64.
        z = places * self.gammas.unsqueeze(1)
        z += self.seeds.unsqueeze(1)
        _xor_shifted_(z, 30)
        z *= _FIRST
        _xor_shifted_(z, 27)
        z *= _SECOND
        _xor_shifted_(z, 31)
        return z.view(torch.int16)[:, :count]


def _xor_shifted_(z: Tensor, shift: int) -> None:
    """Replace int64 numbers by z ^ (z >> shift), as if they had no sign."""
    shifted = z >> shift
    # torch shifts signed integers: the copies of the sign bit are cut off.
    z ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # hashing cannot be traced, and need not be
def _fork(purpose: str, index: int) -> tuple[int, int]:
    """Return what a fork adds to s and to γ, as signed integers of 64 bits; the latter is even, so that γ stays odd."""
    digest = _digest(16, index, purpose)
    seed_offset = int.from_bytes(digest[:8], "little", signed=True)
    gamma_offset = int.from_bytes(digest[8:], "little", signed=True)
    return seed_offset, gamma_offset & ~1
