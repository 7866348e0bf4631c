# SPDX-License-Identifier: Apache-2.0
"""Derived randomness: every draw is a pure function of the run's seed and of its purpose.

perada never draws from torch's global generator, so results do not depend on the number of devices, on the engine, or
on whether a run was stopped and resumed. A stream's key has at least 127 bits, all hashed from the seed, the purpose
and the indices. torch's ``manual_seed`` would use only 32 bits of a seed on the CPU: among a hundred thousand streams
some would be equal.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# The two factors of SplitMix64's mixing function, as signed integers of 64 bits.
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685
# torch's generator on the CPU is the Mersenne Twister mt19937. Its state is 24 bytes (the seed, two flags and a
# position), followed by 624 words of 32 bits, and more.
_WORDS = 624
_START = 24
_LAYOUT = "7488e7de02f18dcd010628b79fd41f56b07708ab2c3d0ec1481cf0c30840bf78"
"""SHA-256 of the 624 words for the seed 5489 (Matsumoto and Nishimura, 1998), each in 8 little-endian bytes."""


def _hash_words(num_bytes: int, seed: int, purpose: str, *ids: int) -> bytes:
    """Hash a seed, a purpose and indices to ``num_bytes`` bytes by SHAKE-256."""
    # JSON, since it separates its items: ("a", 1, 2) and ("a/1", 2) have different texts.
    text = json.dumps([int(seed), purpose, *map(int, ids)])
    return hashlib.shake_256(text.encode()).digest(num_bytes)


def derive_seed(seed: int, purpose: str, *ids: int) -> int:
    """Hash the run's seed, a purpose and indices to a seed of 128 bits.

    NumPy's and Python's generators use all 128 bits. torch's would use 32 of them: see :func:`generator`.

    Args:
        seed: Seed of the run.
        purpose: What the numbers are for, such as ``"cohort"``; different purposes have independent numbers.
        ids: Indices such as those of the round and the client.

    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 3, 7)
    True
    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 7, 3)
    False
    """
    return int.from_bytes(_hash_words(16, seed, purpose, *ids), "little")


def generator(seed: int, purpose: str, *ids: int) -> torch.Generator:
    """Return a new generator on the CPU, whose complete state of 19,968 bits is hashed by SHAKE-256.

    Numbers are drawn on the CPU and then moved, so that they do not depend on the device. The arguments are those of
    :func:`derive_seed`.

    >>> a, b = generator(0, "cohort", 1), generator(0, "cohort", 1)
    >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
    True
    """
    new_generator = torch.Generator()
    new_generator.set_state(_generator_state(seed, purpose, *ids))
    return new_generator


def seed_global(seed: int, purpose: str, *ids: int) -> None:
    """Set torch's global generator on the CPU to the state of :func:`generator`, for code that takes no generator."""
    torch.default_generator.set_state(_generator_state(seed, purpose, *ids))


@contextmanager
def seeded(seed: int, purpose: str, *ids: int) -> Iterator[None]:
    """Replace torch's global generator on the CPU by that of :func:`generator` within the ``with`` statement.

    >>> with seeded(0, "model"):
    ...     drawn = torch.rand(3)
    >>> bool(torch.equal(drawn, torch.rand(3, generator=generator(0, "model"))))
    True
    """
    with torch.random.fork_rng(devices=[]):
        seed_global(seed, purpose, *ids)
        yield


def _generator_state(seed: int, purpose: str, *ids: int) -> Tensor:
    """Return the state of a Mersenne Twister with hashed words, as bytes in torch's layout."""
    state = _fresh_state().clone()
    words = _hash_words(4 * _WORDS, seed, purpose, *ids)
    # torch stores each word of 32 bits in one of 64. The mask removes the copies of the sign bit.
    wide = torch.frombuffer(bytearray(words), dtype=torch.int32).long() & 0xFFFFFFFF
    state[_START : _START + 8 * _WORDS] = wide.view(torch.uint8)
    return state


@cache
def _fresh_state() -> Tensor:
    """Return the state of a generator before its first draw, as bytes in torch's layout.

    Raises:
        RuntimeError: If this version of torch uses another layout.
    """
    # For this seed the words are published, which shows where torch stores them.
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

    The numbers of all clients are drawn together, but those of one client depend neither on the others nor on the
    device. The generator is SplitMix64 (Steele, Lea & Flood, OOPSLA 2014, section 5): word i of a stream is a mixing
    function of s + i·γ. Each stream has its own seed s and odd increment γ, 127 bits in total, so that no stream is a
    shifted copy of another.

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
        """Return the streams of some clients, whose seeds and increments are hashed.

        Args:
            seed: Seed of the run.
            purpose: What the numbers are for, as in :func:`derive_seed`.
            ids: Indices that all clients share, such as that of the round.
            clients: Number of each client, which is hashed too.
            device: Device on which the streams draw.
        """
        keys = [_hash_words(16, seed, purpose, *ids, client) for client in clients]
        # torch.frombuffer rejects an empty buffer.
        table = torch.empty(0, dtype=torch.int64)
        if keys:
            table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.int64)
        seeds, gammas = table.view(-1, 2).to(device).unbind(1)
        # γ must be odd.
        return cls(seeds, gammas | 1)

    def __getitem__(self, selection: slice) -> "Streams":
        return Streams(self.seeds[selection], self.gammas[selection])

    def fork(self, purpose: str, index: int) -> "Streams":
        """Derive independent streams of the same clients.

        Args:
            purpose: What the new streams are for.
            index: Number of the use for this purpose, such as that of a step.

        >>> streams = Streams.derived(0, "dropout", clients=[4, 7])
        >>> torch.equal(streams.fork("step", 1).bits(5), streams.fork("step", 2).bits(5))
        False
        """
        offsets = _fork_offsets(purpose, index)
        return Streams(self.seeds + offsets.seed, self.gammas + offsets.gamma)

    def bits(self, count: int) -> Tensor:
        """Return the first draws of each client.

        Args:
            count: Number of draws per client.

        Returns:
            Integers (C, count), uniform over all values of int16.
        """
        # Each word of 64 bits is four draws.
        num_words = (count + 3) // 4
        places = torch.arange(num_words, device=self.seeds.device)
        # s + i·γ and the mixing function. Multiplication and addition of int64 wrap around, as the method requires. In
        # place where possible, since a mask of dropout has millions of numbers.
        z = places * self.gammas.unsqueeze(1)
        z += self.seeds.unsqueeze(1)
        _xor_shifted_(z, 30)
        z *= _FIRST
        _xor_shifted_(z, 27)
        z *= _SECOND
        _xor_shifted_(z, 31)
        return z.view(torch.int16)[:, :count]


def _xor_shifted_(z: Tensor, shift: int) -> None:
    """Replace int64 numbers by z ^ (z >> shift), in place and as if they were unsigned."""
    shifted = z >> shift
    # torch fills the upper bits with copies of the sign bit, which an unsigned shift would fill with zeros.
    z ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)


class _ForkOffsets(NamedTuple):
    """Offsets of forked streams, as signed integers of 64 bits.

    Attributes:
        seed: Offset of s.
        gamma: Offset of γ.
    """

    seed: int
    gamma: int


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # hashing cannot be traced, and need not be
def _fork_offsets(purpose: str, index: int) -> _ForkOffsets:
    """Return the offsets for :meth:`Streams.fork`."""
    digest = _hash_words(16, index, purpose)
    seed_offset = int.from_bytes(digest[:8], "little", signed=True)
    gamma_offset = int.from_bytes(digest[8:], "little", signed=True)
    # γ must stay odd, so its offset must be even.
    return _ForkOffsets(seed_offset, gamma_offset & ~1)
