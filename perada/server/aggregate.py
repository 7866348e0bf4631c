# SPDX-License-Identifier: Apache-2.0
"""Means over the client axis."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from perada.states import State

Weighting = Literal["uniform", "samples"]


def client_weights(weighting: Weighting, samples: Sequence[int]) -> Tensor:
    """Weights of C clients, summing to one.

    Args:
        weighting: ``"uniform"`` (PerAda, Algorithm 1, line 18), or ``"samples"`` for each client's share of the images
            (FedAvg).
        samples: Training images of each client.

    Returns:
        Weights (C,) in float64.

    Raises:
        ValueError: If ``weighting`` is unknown.

    >>> client_weights("samples", [1, 3]).tolist()
    [0.25, 0.75]
    """
    if weighting == "uniform":
        return torch.full((len(samples),), 1 / len(samples), dtype=torch.float64)
    if weighting == "samples":
        counts = torch.tensor(samples, dtype=torch.float64)
        return counts / counts.sum()
    raise ValueError(f"weighting={weighting!r} is unknown; choose 'uniform' or 'samples'")


def mean(updates: State, weights: Tensor) -> State:
    """Weighted mean over the leading client axis.

    Args:
        updates: Stack (C, ...). Integer tensors (counters of BatchNorm) are not averaged: their maximum is taken.
        weights: Weights (C,) that sum to one.

    Returns:
        A state without the client axis.

    >>> mean({"w": torch.tensor([[1.0], [5.0]])}, torch.tensor([0.25, 0.75]))["w"].tolist()
    [4.0]
    """
    return {
        key: _weighted(value, weights) if value.is_floating_point() else value.amax(0) for key, value in updates.items()
    }


def _weighted(value: Tensor, weights: Tensor) -> Tensor:
    # Elementwise: autocast would run a product of matrices, and so round the states, in half precision.
    return (value * weights.to(value).view(-1, *[1] * (value.dim() - 1))).sum(0)
