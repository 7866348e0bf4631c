# SPDX-License-Identifier: Apache-2.0
"""What a step of local training, and of evaluation, sees, and what images must look like for a backbone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class CohortBatch(NamedTuple):
    """One local step of every active client, of whom :func:`~perada.core.rounds.share_out` may leave none.

    ``x`` is (C, B, ...), ``y`` (C, B) integers or (C, B, K) floats. Client ``clients[i]`` has ``counts[i]`` real rows;
    the others are zero padding at the end. ``step`` is the index within the round. ``failed`` are clients of whom a
    sample could not be read, and why.
    """

    clients: tuple[int, ...]
    x: Tensor
    y: Tensor
    counts: tuple[int, ...]
    phase: int
    step: int
    round: int = 0
    failed: tuple[tuple[int, str], ...] = ()


def no_batch(phase: int, step: int, round: int) -> CohortBatch:
    """A batch without clients."""
    return CohortBatch((), torch.empty(0), torch.empty(0), (), phase, step, round)


AnyBatch = CohortBatch | dict[str, CohortBatch]
"""A step's batch, or one for each stream where training is private."""


def one_of(batches: AnyBatch) -> CohortBatch:
    """The batch, or any of them: they agree in all but images, labels and counts."""
    return next(iter(batches.values())) if isinstance(batches, dict) else batches


class EvalBatch(NamedTuple):
    """Test images: ``x`` is (B, ...), ``y`` (B,) or (B, K), ``owner`` (B,) the index of the client each belongs to."""

    x: Tensor
    y: Tensor
    owner: Tensor


@dataclass(frozen=True)
class ImageConfig:
    """Images of a backbone: (channels, height, width), each channel in [0, 1] normalised by ``mean`` and ``std``."""

    input_size: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
