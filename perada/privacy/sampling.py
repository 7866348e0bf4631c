# SPDX-License-Identifier: Apache-2.0
"""Batches of a client's images, Poisson samples and shuffled passes, and draws from a cryptographic generator.

Amplification by subsampling is proved for Poisson samples. The generator is for training whose randomness nobody may
foretell: OpenSSL's, AES-256 in counter mode by default, which the operating system seeds and which starts anew in a
forked process. None of its draws follows from the run's seed or can be repeated, and torch's generators are not
touched. A number that is out of its range is a ValueError.
"""

import math
import ssl

import torch
from torch import Tensor

from perada.core.checks import check_integer
from perada.core.seeding import generator
from perada.privacy.accounting import check_step


def poisson_batches(
    images: int, sample_rate: float, steps: int, *, seed: int, role: str, round: int, client: int, secure: bool = False
) -> list[Tensor]:
    """Draw the batches of one client's run: each image is in each batch with probability ``sample_rate``.

    The draws are independent over images and steps (Poisson sampling, Abadi et al. 2016, section 3), so a batch has a
    binomial number of images and may be empty: a step like any other, of noise alone. Those of each ``role`` that is
    trained, such as ``"local"``, are independent of the others', as the composition of costs assumes. Unless they are
    drawn securely, the indices are a pure function of the arguments, and a client must keep the seed to itself.

    There are ``steps`` tensors of ascending indices below ``images``, int64, each of shape (batch,).

    >>> batches = poisson_batches(4, 1.0, 2, seed=0, role="local", round=0, client=0)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    check_integer("images", images, hint="a client without images cannot take part")
    check_step(0.0, sample_rate, steps)
    source = generator(seed, f"poisson/{role}", round, client)

    def draw() -> Tensor:
        # float64: with the 24 random bits of a float32 the rate would be rounded to a multiple of 2**-24.
        return secure_uniform((images,)) if secure else torch.rand(images, generator=source, dtype=torch.float64)

    return [(draw() < sample_rate).nonzero().squeeze(1) for _ in range(steps)]


def shuffled_batches(
    images: int, batch_size: int, steps: int, *, seed: int, role: str, round: int, client: int, secure: bool = False
) -> list[Tensor]:
    """Cut passes over a client's images, each in a new random order, into batches; none spans two passes.

    An image is used at most once in each pass. That earns no amplification. A pass is counted as one step at rate 1,
    for a neighbour in which an image is made void; an image that is taken out would move others from batch to batch.
    There are :func:`passes` of them, and each round begins with a new one. The arguments and results are those of
    :func:`poisson_batches`, with batches of B images, or of all n, the last of a pass perhaps smaller.

    >>> batches = shuffled_batches(5, 2, 4, seed=0, role="local", round=0, client=0)
    >>> [len(batch) for batch in batches], torch.cat(batches[:3]).sort().values.tolist()
    ([2, 2, 1, 2], [0, 1, 2, 3, 4])
    """
    begun = passes(images, batch_size, steps)
    source = generator(seed, f"shuffle/{role}", round, client)
    orders = (secure_permutation(images) if secure else torch.randperm(images, generator=source) for _ in range(begun))
    return [batch for order in orders for batch in torch.split(order, batch_size)][:steps]


def passes(images: int, batch_size: int, steps: int) -> int:
    """Passes over a client's n images that ``steps`` batches of B begin: ⌈steps / ⌈n / B⌉⌉, counted at rate 1.

    >>> [passes(5, 2, steps) for steps in (0, 1, 3, 4)]
    [0, 1, 1, 2]
    """
    check_integer("images", images, hint="a client without images cannot take part")
    check_integer("steps", steps, 0)
    check_integer("batch_size", batch_size)
    return math.ceil(steps / math.ceil(images / batch_size))


_BITS = 53  # of a float64's significand
_BLOCK = 2**18  # normal draws made at a time: up to 8 MiB of random bytes


def secure_uniform(shape: tuple[int, ...]) -> Tensor:
    """Draw numbers of 53 random bits from [0, 1): multiples of 2**-53 in float64, on the CPU.

    A ValueError if a side of the shape is negative.
    """
    for side in shape:
        check_integer("a side of the shape", side, 0)
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
    check_integer("n", n, 0)
    while True:
        keys, order = _words(n).sort()
        if not (keys[1:] == keys[:-1]).any():
            return order


def _words(count: int) -> Tensor:
    """Random int64 of 64 bits each, (count,)."""
    if not count:  # torch refuses an empty buffer
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(ssl.RAND_bytes(8 * count)), dtype=torch.int64)
