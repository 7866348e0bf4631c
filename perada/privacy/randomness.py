# SPDX-License-Identifier: Apache-2.0
"""Draws from a cryptographic generator, for training whose randomness nobody may foretell.

It is OpenSSL's, AES-256 in counter mode by default, which the operating system seeds and which starts anew in a forked
process. Nothing here follows from the run's seed, so no draw can be repeated, and torch's generators are not touched.
"""

import math
import ssl

import torch
from torch import Tensor

from perada.core.checks import check_whole

_BITS = 53  # of a float64's significand
_BLOCK = 2**18  # normal draws made at a time: up to 8 MiB of random bytes


def secure_uniform(shape: tuple[int, ...]) -> Tensor:
    """Draw numbers of 53 random bits from [0, 1): multiples of 2**-53 in float64, on the CPU.

    A ValueError if a side of the shape is negative.
    """
    for side in shape:
        check_whole("a side of the shape", side, 0)
    bits: Tensor = _words(math.prod(shape)) & (2**_BITS - 1)
    return bits.double().mul_(2.0**-_BITS).view(shape)


def secure_noise(like: Tensor) -> Tensor:
    """Draw standard normal numbers for adding to ``like``, not yet rounded to its type: float64, on the CPU.

    By Box and Muller (1958) two numbers u in (0, 1] and v give two draws, √(−2 ln u) times the cosine and the sine of
    2πv. In float64 these are so sparse that a noisy sum may tell what it was without noise (Mironov, CCS 2012). There
    each number is half the sum of four draws, of which there are too many combinations for that (Holohan and Braghin,
    ESORICS 2021). For float32 they are single draws, of which there are 2**106: the sum is rounded, after the noise is
    in it, and some 2**80 of them round to the same.
    """
    return _normal(like.numel(), 4 if like.dtype == torch.float64 else 1).view(like.shape)


def _normal(count: int, draws: int) -> Tensor:
    """Normal numbers (count,) in float64, each the sum of so many draws by Box and Muller over the root of that."""
    numbers = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, _BLOCK):
        block = numbers[start : start + _BLOCK]
        u, v = secure_uniform((2, draws, (len(block) + 1) // 2))
        length = (1 - u).log_().mul_(-2 / draws).sqrt_()
        v.mul_(2 * math.pi)
        both = torch.cat([(length * v.cos()).sum(0), length.mul_(v.sin_()).sum(0)])
        block.copy_(both[: len(block)])
    return numbers


def secure_permutation(n: int) -> Tensor:
    """Draw an order of ``range(n)``, each as likely as any other: that of n random keys of 64 bits.

    Where two keys are equal all are drawn again, since a sort would prefer one order of the two. The indices (n,) are
    int64, on the CPU. A ValueError if n is negative.
    """
    check_whole("n", n, 0)
    while True:
        keys, order = _words(n).sort()
        if not (keys[1:] == keys[:-1]).any():
            return order


def _words(count: int) -> Tensor:
    """Random int64 of 64 bits each, (count,)."""
    if not count:  # torch refuses an empty buffer
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * count)), dtype=torch.int64)
