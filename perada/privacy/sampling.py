# SPDX-License-Identifier: Apache-2.0
"""Poisson sampling of a client's images: the sampling for which amplification by subsampling is proved."""

import torch
from torch import Tensor

from perada.seeding import generator


def poisson_batches(
    images: int, sample_rate: float, steps: int, *, seed: int, role: str, round: int, client: int
) -> list[Tensor]:
    """Draw the batches of one client's run: each image is in each batch with probability ``sample_rate``.

    The draws are independent over images and steps (Poisson sampling, Abadi et al. 2016, section 3), so a batch has a
    binomial number of images and may be empty. An empty batch is a step like any other: it is noise alone, and it is
    counted. The indices are a pure function of the arguments.

    Args:
        images: Number of the client's images, n.
        sample_rate: Probability q of an image to be in a batch, in (0, 1].
        steps: Number of batches.
        seed: The run's seed. Whoever knows it knows the batches: it is part of what a client keeps to itself.
        role: What is trained, for example ``"local"`` or ``"personal"``. Two runs on the same images need independent
            batches: the composition of their costs assumes it.
        round: The round.
        client: The client.

    Returns:
        ``steps`` tensors of ascending indices below ``images``, int64, each of shape (batch,), where batch may be 0.

    Raises:
        ValueError: If a number is out of its range.

    >>> batches = poisson_batches(4, 1.0, 2, seed=0, role="local", round=0, client=0)
    >>> [batch.tolist() for batch in batches]
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    _check(images, sample_rate)
    if steps < 0:
        raise ValueError(f"steps={steps} is negative; give the number of batches of the run")
    source = generator(seed, f"poisson/{role}", round, client)
    # float64: with the 24 random bits of a float32 the rate would be rounded to a multiple of 2**-24.
    draws = (torch.rand(images, generator=source, dtype=torch.float64) for _ in range(steps))
    return [(draw < sample_rate).nonzero().squeeze(1) for draw in draws]


def expected_batch_size(images: int, sample_rate: float) -> float:
    """Mean number of images in a Poisson batch, n · q: what a noisy sum of gradients is divided by.

    It is not rounded (Opacus takes ``int(n * q)``), and never the size of the batch that was drawn, which is private.

    Raises:
        ValueError: If a number is out of its range.

    >>> expected_batch_size(10, 0.25)
    2.5
    """
    _check(images, sample_rate)
    return images * sample_rate


def _check(images: int, sample_rate: float) -> None:
    if images < 1:
        raise ValueError(f"images={images}: a client without images cannot be sampled; leave it out of the round")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} is not a probability above 0; give batch size / number of images")
