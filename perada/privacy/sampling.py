# SPDX-License-Identifier: Apache-2.0
"""Batches of a client's images by Poisson sampling and shuffled passes, and draws from a cryptographic generator.

Amplification by subsampling is proved for Poisson samples. The generator is for training whose randomness nobody may
foretell: OpenSSL's, AES-256 in counter mode by default, which the operating system seeds and which starts anew in a
forked process. None of its draws follows from the run's seed or can be repeated, and torch's generators are not
touched. All functions raise a ValueError if a number is out of its range.
"""

import math
import ssl

import torch
from torch import Tensor

from perada.core.checks import check_integer
from perada.core.seeding import generator
from perada.privacy.accounting import check_step


def poisson_batches(
    images: int,
    sample_rate: float,
    steps: int,
    *,
    seed: int,
    role: str,
    round: int,
    client: int,
    secure: bool = False,
) -> list[Tensor]:
    """Draw the batches of one client's round: each image is in each batch with probability ``sample_rate``.

    The draws are independent over images and steps (Poisson sampling, Abadi et al. 2016, section 3), so a batch has a
    binomial number of images and may be empty: a step like any other, of noise only.

    Args:
        images: Number of the client's images.
        sample_rate: Probability of an image to be in a batch.
        steps: Number of batches.
        seed: Seed of the run. A client must keep it to itself.
        role: What is trained, such as ``"local"``. Draws of one role are independent of those of others, as the
            composition of costs assumes.
        round: Number of the round.
        client: Number of the client.
        secure: Draw from the cryptographic generator. Otherwise the indices are a pure function of the arguments.

    Returns:
        For each step ascending indices below ``images``, int64 (batch,).

    >>> batches = poisson_batches(4, 1.0, 2, seed=0, role="local", round=0, client=0)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    check_integer("images", images, hint="a client without images cannot take part")
    check_step(0.0, sample_rate, steps)
    source = generator(seed, f"poisson/{role}", round, client)

    batches = []
    for _ in range(steps):
        # float64: with the 24 random bits of a float32 the rate would be rounded to a multiple of 2**-24.
        if secure:
            draws = secure_uniform((images,))
        else:
            draws = torch.rand(images, generator=source, dtype=torch.float64)
        batches.append((draws < sample_rate).nonzero().squeeze(1))
    return batches


def shuffled_batches(
    images: int,
    batch_size: int,
    steps: int,
    *,
    seed: int,
    role: str,
    round: int,
    client: int,
    secure: bool = False,
) -> list[Tensor]:
    """Cut passes over a client's images, each in a new random order, into batches; none spans two passes.

    An image is used at most once in each pass. That earns no amplification. A pass is counted as one step at rate 1,
    for a neighbour in which an image is made void; an image that is taken out would move others from batch to batch.
    There are :func:`passes` of them, and each round begins with a new one.

    Args:
        images: Number n of the client's images.
        batch_size: Images B of a batch; the last batch of a pass may be smaller.
        steps: As those of :func:`poisson_batches`, like the following arguments.
        seed: Seed of the run.
        role: What is trained.
        round: Number of the round.
        client: Number of the client.
        secure: Draw from the cryptographic generator.

    Returns:
        For each step indices below ``images``, int64 (batch,).

    >>> batches = shuffled_batches(5, 2, 4, seed=0, role="local", round=0, client=0)
    >>> [len(batch) for batch in batches], torch.cat(batches[:3]).sort().values.tolist()
    ([2, 2, 1, 2], [0, 1, 2, 3, 4])
    """
    source = generator(seed, f"shuffle/{role}", round, client)
    batches: list[Tensor] = []
    for _ in range(passes(images, batch_size, steps)):
        if secure:
            order = secure_permutation(images)
        else:
            order = torch.randperm(images, generator=source)
        batches += torch.split(order, batch_size)
    return batches[:steps]


def passes(images: int, batch_size: int, steps: int) -> int:
    """Return the number of passes over n images that ``steps`` batches of B begin: ⌈steps / ⌈n / B⌉⌉.

    Each is counted as one step at rate 1.

    >>> [passes(5, 2, steps) for steps in (0, 1, 3, 4)]
    [0, 1, 1, 2]
    """
    check_integer("images", images, hint="a client without images cannot take part")
    check_integer("steps", steps, 0)
    check_integer("batch_size", batch_size)
    return math.ceil(steps / math.ceil(images / batch_size))


_BITS = 53
"""Random bits of a uniform number, those of a float64's significand."""
_BLOCK = 2**18
"""Normal numbers drawn at a time: up to 8 MiB of random bytes."""


def secure_uniform(shape: tuple[int, ...]) -> Tensor:
    """Draw numbers of 53 random bits from [0, 1): multiples of 2**-53 in float64, on the CPU.

    Raises:
        ValueError: If a side of the shape is negative.
    """
    for side in shape:
        check_integer("a side of the shape", side, 0)
    bits: Tensor = _random_integers(math.prod(shape)) & (2**_BITS - 1)
    return bits.double().mul_(2.0**-_BITS).view(shape)


def secure_noise(like: Tensor) -> Tensor:
    """Draw standard normal numbers to be added to ``like``, in float64 on the CPU, not yet rounded to its type.

    By Box and Muller (1958) two numbers u in (0, 1] and v give two draws, √(−2 ln u) times the cosine and the sine of
    2πv. In float64 these are so sparse that a noisy sum may tell what it was without noise (Mironov, CCS 2012). There
    each number is half the sum of four draws, of which there are too many combinations for that (Holohan and Braghin,
    ESORICS 2021). For float32 they are single draws, of which there are 2**106: the sum is rounded, after the noise is
    in it, and some 2**80 of them round to the same.
    """
    draws = 4 if like.dtype == torch.float64 else 1
    return _normal_numbers(like.numel(), draws).view(like.shape)


def _normal_numbers(count: int, draws: int) -> Tensor:
    """Return standard normal numbers (count,) in float64, each the sum of ``draws`` draws divided by √draws."""
    numbers = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, _BLOCK):
        block = numbers[start : start + _BLOCK]
        # Each pair (u, v) gives two numbers. In place where possible, since the tensors are large.
        u, v = secure_uniform((2, draws, (len(block) + 1) // 2))
        radius = (1 - u).log_().mul_(-2 / draws).sqrt_()
        angle = v.mul_(2 * math.pi)
        cosines = (radius * angle.cos()).sum(0)
        sines = radius.mul_(angle.sin_()).sum(0)
        block.copy_(torch.cat([cosines, sines])[: len(block)])
    return numbers


def secure_permutation(n: int) -> Tensor:
    """Draw a uniformly random permutation of ``range(n)``, the order of n random 64-bit keys.

    Returns:
        Indices (n,), int64, on the CPU.

    Raises:
        ValueError: If n is negative.
    """
    check_integer("n", n, 0)
    while True:
        keys, order = _random_integers(n).sort()
        # Of two equal keys, a sort would prefer one order: then all are drawn again.
        if not (keys[1:] == keys[:-1]).any():
            return order


def _random_integers(count: int) -> Tensor:
    """Return random int64 (count,), uniform over all 64 bits."""
    if not count:  # torch refuses an empty buffer
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * count)), dtype=torch.int64)
