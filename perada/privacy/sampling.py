# SPDX-License-Identifier: Apache-2.0
"""Batches of a client's images by Poisson sampling or by shuffled passes, and draws from a cryptographic generator.

Privacy amplification by subsampling is proven for Poisson samples. The cryptographic generator is for training whose
randomness must be unpredictable. It is that of OpenSSL (AES-256 in counter mode by default), which is seeded by the
operating system and reseeded in a forked process. Its draws do not depend on the run's seed, cannot be repeated, and
leave torch's generators as they are. All functions raise a ValueError if a number is out of range.
"""

import math
import ssl

import torch
from torch import Tensor

from perada.core.checks import check_integer
from perada.core.seeding import generator
from perada.privacy.accounting import check_step


def poisson_batches(
    num_images: int,
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
        num_images: Number of the client's images.
        sample_rate: Probability that an image is in a batch.
        steps: Number of batches.
        seed: Seed of the run, which a client must keep secret.
        role: Name of the trained state, such as ``"local"``. The draws of different roles are independent, as the
            composition of privacy costs assumes.
        round: Number of the round.
        client: Number of the client.
        secure: Draw from the cryptographic generator. Otherwise the indices are a pure function of the arguments.

    Returns:
        For each step the indices of its images, ascending, int64 (batch,).

    >>> batches = poisson_batches(4, 1.0, 2, seed=0, role="local", round=0, client=0)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    check_integer("num_images", num_images, hint="a client without images cannot take part")
    check_step(0.0, sample_rate, steps)
    source = generator(seed, f"poisson/{role}", round, client)

    batches = []
    for _ in range(steps):
        # float64 is needed: a float32 has 24 random bits, and the rate would be rounded to a multiple of 2**-24.
        if secure:
            draws = secure_uniform((num_images,))
        else:
            draws = torch.rand(num_images, generator=source, dtype=torch.float64)
        batches.append((draws < sample_rate).nonzero().squeeze(1))
    return batches


def shuffled_batches(
    num_images: int,
    batch_size: int,
    steps: int,
    *,
    seed: int,
    role: str,
    round: int,
    client: int,
    secure: bool = False,
) -> list[Tensor]:
    """Split passes over a client's images, each in a new random order, into batches; no batch spans two passes.

    An image is used at most once in each pass, for which there is no amplification. A pass is accounted for as one step
    at rate 1, under the neighbouring relation in which an image is replaced by an empty one: if it were removed, other
    images would move to other batches. There are :func:`passes` of them, and each round begins with a new one.

    Args:
        num_images: Number n of the client's images.
        batch_size: Number B of images in a batch; the last batch of a pass may be smaller.
        steps: Number of batches.
        seed: Seed of the run, which a client must keep secret.
        role: Name of the trained state, such as ``"local"``.
        round: Number of the round.
        client: Number of the client.
        secure: Draw from the cryptographic generator. Otherwise the indices are a pure function of the arguments.

    Returns:
        For each step the indices of its images, int64 (batch,).

    >>> batches = shuffled_batches(5, 2, 4, seed=0, role="local", round=0, client=0)
    >>> [len(batch) for batch in batches], torch.cat(batches[:3]).sort().values.tolist()
    ([2, 2, 1, 2], [0, 1, 2, 3, 4])
    """
    source = generator(seed, f"shuffle/{role}", round, client)
    index_batches: list[Tensor] = []
    for _ in range(passes(num_images, batch_size, steps)):
        if secure:
            order = secure_permutation(num_images)
        else:
            order = torch.randperm(num_images, generator=source)
        index_batches += torch.split(order, batch_size)
    # The last pass may have more batches than there are steps left.
    return index_batches[:steps]


def passes(num_images: int, batch_size: int, steps: int) -> int:
    """Return the number of passes over n images that ``steps`` batches of size B begin: ⌈steps / ⌈n / B⌉⌉.

    Each pass is accounted for as one step at rate 1.

    >>> [passes(5, 2, steps) for steps in (0, 1, 3, 4)]
    [0, 1, 1, 2]
    """
    check_integer("num_images", num_images, hint="a client without images cannot take part")
    check_integer("steps", steps, 0)
    check_integer("batch_size", batch_size)
    batches_per_pass = math.ceil(num_images / batch_size)
    return math.ceil(steps / batches_per_pass)


_BITS = 53
"""Number of random bits of a uniform number: as many as the significand of a float64 has."""
_BLOCK = 2**18
"""Number of normal numbers drawn at a time, from up to 8 MiB of random bytes."""


def secure_uniform(shape: tuple[int, ...]) -> Tensor:
    """Draw uniform numbers from [0, 1) with 53 random bits each.

    Args:
        shape: Shape of the result.

    Returns:
        Multiples of 2**-53, in float64 on the CPU.

    Raises:
        ValueError: If a dimension is negative.

    >>> secure_uniform((2, 3)).shape
    torch.Size([2, 3])
    """
    for side in shape:
        check_integer("a side of the shape", side, 0)
    bits: Tensor = _random_integers(math.prod(shape)) & (2**_BITS - 1)
    return bits.double().mul_(2.0**-_BITS).view(shape)


def secure_noise(like: Tensor) -> Tensor:
    """Draw standard normal numbers to be added to a tensor, in float64 on the CPU and not yet rounded to its dtype.

    The method is that of Box and Muller (1958): uniform numbers u in (0, 1] and v give two draws, √(−2 ln u) times the
    cosine and the sine of 2πv.

    In float64 the possible draws are so sparse that a noisy sum can reveal the sum without noise (Mironov, CCS 2012).
    For tensors of that dtype each number is therefore half the sum of four draws, which have too many combinations for
    the attack (Holohan and Braghin, ESORICS 2021). For float32 a single draw is enough: it has 2**106 possible values,
    and the sum is rounded after the noise was added, so that about 2**80 of them give the same result.

    Args:
        like: Tensor to which the noise will be added, for its shape and dtype.
    """
    draws = 1
    if like.dtype == torch.float64:
        draws = 4
    return _normal_numbers(like.numel(), draws).view(like.shape)


def _normal_numbers(count: int, draws: int) -> Tensor:
    """Return standard normal numbers.

    Args:
        count: Number of numbers.
        draws: How many draws of Box and Muller are summed for each number; the sum is divided by √draws.

    Returns:
        The numbers (count,), in float64 on the CPU.
    """
    numbers = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, _BLOCK):
        block = numbers[start : start + _BLOCK]
        # Each pair of uniform numbers gives two normal ones; if the length is odd, the last one is not used.
        num_pairs = (len(block) + 1) // 2
        uniform = secure_uniform((2, draws, num_pairs))
        # [0, 1) becomes (0, 1], whose logarithm is finite. Operations are in place, since the tensors are large.
        radius = (1 - uniform[0]).log_().mul_(-2 / draws).sqrt_()
        angle = uniform[1].mul_(2 * math.pi)
        cosines = (radius * angle.cos()).sum(0)
        sines = radius.mul_(angle.sin_()).sum(0)
        block.copy_(torch.cat([cosines, sines])[: len(block)])
    return numbers


def secure_permutation(n: int) -> Tensor:
    """Draw a uniformly random permutation of ``range(n)``: the order of n random 64-bit keys.

    Args:
        n: Number of elements.

    Returns:
        The permutation (n,), int64 on the CPU.

    Raises:
        ValueError: If n is negative.

    >>> sorted(secure_permutation(4).tolist())
    [0, 1, 2, 3]
    """
    check_integer("n", n, 0)
    while True:
        keys, order = _random_integers(n).sort()
        # A sort would always put equal keys in the same order, so all keys are drawn again.
        if not (keys[1:] == keys[:-1]).any():
            return order


def _random_integers(count: int) -> Tensor:
    """Return random integers (count,), uniform over all 64 bits, as int64 on the CPU."""
    # torch.frombuffer rejects an empty buffer.
    if not count:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * count)), dtype=torch.int64)
