# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble's toy regression (Shi et al., 2021, section 5, Table 1 and Figure 2), for many re-runs at once.

Clients hold two points each of y = a sin(2πx) + noise. K linear models on fixed Gaussian basis functions are trained,
each from a random initialisation of its own, by the schedule of :func:`~perada.algorithms.ensembles.mode_schedule`;
their mean predicts. The data and the basis are drawn once. Between re-runs the initialisations are drawn anew, and with
them the strata, the permutations and the sampled clients.

Legend of shapes: R re-runs, C clients, N points of a client, D basis functions, K modes, G points of the grid.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from perada.algorithms.ensembles import mode_schedule
from perada.core.checks import check_integer, check_number
from perada.core.seeding import derive_seed, generator

CLIENTS, POINTS, FUNCTIONS = 50, 2, 100
WIDTH, NOISE, SPREAD = 0.08, 0.2, 0.2
"""Width b of a basis function, standard deviations of the noise and of the clients' amplitudes."""
DECAY_EVERY = 10
"""Rounds after which the learning rate is multiplied; the paper's "all experiments"."""


@dataclass(frozen=True)
class Problem:
    """The data of all clients, inputs (C, N) in [-1, 1] and outputs (C, N), and the centres (D,) of the basis."""

    x: Tensor
    y: Tensor
    centres: Tensor


@dataclass(frozen=True)
class Settings:
    """How the modes are trained.

    Args:
        seed: Of the data, and of everything that differs between re-runs.
        reruns: Trainings on the same data for each K.
        rounds: Rounds of a training, the same for every K.
        ages: Instead of rounds: ages of a training, which are K rounds each.
        strata: Sets that the 50 clients are split into.
        clients_per_round: Clients drawn at random for a round.
        local_steps: Steps of gradient descent of a client in a round, on half the mean of its points' squared errors.
        lr: Learning rate.
        lr_decay: Factor of the learning rate after every 10 rounds.
        init_std: Standard deviation of the initial weights.

    Raises:
        ValueError: If an option cannot be used.
    """

    seed: int = 0
    reruns: int = 100
    rounds: int = 480
    ages: int | None = None
    strata: int = 10
    clients_per_round: int = CLIENTS
    local_steps: int = 5
    lr: float = 0.1
    lr_decay: float = 0.99
    init_std: float = 2.0

    def __post_init__(self) -> None:
        check_integer("reruns", self.reruns, 2, hint="one run has no variance")
        check_integer("rounds", self.rounds)
        check_integer("ages", self.ages, optional=True)
        check_integer("strata", self.strata, le=CLIENTS, hint="it is the number of clients")
        check_integer("clients_per_round", self.clients_per_round, le=CLIENTS, hint="it is the number of clients")
        check_integer("local_steps", self.local_steps)
        check_number("lr_decay", self.lr_decay, gt=0, le=1)
        check_number("init_std", self.init_std, ge=0)

    def length(self, modes: int) -> int:
        """Rounds of a training with K modes."""
        return self.rounds if self.ages is None else self.ages * modes


def make_problem(seed: int) -> Problem:
    """Draw the clients' data, y = a sin(2πx) + ε with one a a client, and the centres of the basis."""
    draw = generator(seed, "toy regression")
    float64: dict[str, Any] = {"generator": draw, "dtype": torch.float64}
    amplitude = 1 + SPREAD * torch.randn(CLIENTS, 1, **float64)
    x = 2 * torch.rand(CLIENTS, POINTS, **float64) - 1
    y = amplitude * torch.sin(2 * math.pi * x) + NOISE * torch.randn(CLIENTS, POINTS, **float64)
    return Problem(x, y, 2 * torch.rand(FUNCTIONS, **float64) - 1)


def basis(x: Tensor, centres: Tensor) -> Tensor:
    """Gaussian basis functions exp(-(x - ν)² / 2b²) of inputs (...), as (..., D)."""
    return torch.exp(-((x[..., None] - centres) ** 2) / (2 * WIDTH**2))


def local_gain(phi: Tensor, lr: float, steps: int) -> Tensor:
    """What local gradient descent does to the residuals of a client, in closed form.

    With basis functions Φ (C, N, D) and Gram matrix G = ΦΦᵀ/N, s steps on 1/2N ||Φw - y||² move w by -Φᵀ M (Φw - y),
    where M = (lr/N) Σ_{j<s} (I - lr G)^j, (C, N, N).

    Raises:
        ValueError: If gradient descent diverges on some client.
    """
    points = phi.shape[1]
    gram = phi @ phi.mT / points
    limit = 2 / torch.linalg.eigvalsh(gram).max().item()
    if not 0 < lr < limit:
        raise ValueError(f"lr={lr} does not descend: on these data it has to be above 0 and below {limit:.3g}")
    left = torch.eye(points, dtype=phi.dtype).expand_as(gram)
    total = torch.zeros_like(gram)
    for _ in range(steps):
        total, left = total + left, left - lr * gram @ left
    return lr / points * total


def federated_round(modes: Tensor, taken: Tensor, takes_part: Tensor, phi: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    """One round: clients train the mode they are given, the server averages each mode over those that had it.

    Args:
        modes: Weights (R, K, D); a mode that nobody had stays as it is.
        taken: Mode of each client (R, C).
        takes_part: Whether a client trains in this round (R, C).
        phi: Basis functions (C, N, D).
        y: Outputs (C, N).
        gain: Of :func:`local_gain`, (C, N, N).
    """
    reruns, count, size = modes.shape
    flat = modes.reshape(-1, size)
    rows = (taken + count * torch.arange(reruns)[:, None])[takes_part]
    clients = torch.arange(len(y)).expand(reruns, -1)[takes_part]
    holders = torch.bincount(rows, minlength=reruns * count)
    residuals = ((flat @ phi.reshape(-1, size).mT).view(-1, *y.shape) - y)[rows, clients]
    moves = (gain[clients] @ residuals[..., None])[..., 0] / holders[rows, None]
    by_point = torch.zeros(len(flat), *y.shape, dtype=flat.dtype).index_put((rows, clients), moves, accumulate=True)
    return (flat - by_point.flatten(1) @ phi.reshape(-1, size)).view_as(modes)


def train(problem: Problem, settings: Settings, modes: int, bar: "tqdm[Any] | None" = None) -> Tensor:
    """Train K modes in every re-run; returns their weights (R, K, D)."""
    seeds = [derive_seed(settings.seed, "toy re-run", modes, rerun) for rerun in range(settings.reruns)]
    size = (modes, FUNCTIONS)
    starts = [torch.randn(size, generator=generator(seed, "initial"), dtype=torch.float64) for seed in seeds]
    weights = settings.init_std * torch.stack(starts)
    phi = basis(problem.x, problem.centres)
    clients = (settings.reruns, CLIENTS)
    for round in range(settings.length(modes)):
        if round % DECAY_EVERY == 0:
            rate = settings.lr * settings.lr_decay ** (round // DECAY_EVERY)
            gain = local_gain(phi, rate, settings.local_steps)
        taken = torch.stack([mode_schedule(seed, round, CLIENTS, modes, settings.strata) for seed in seeds])
        order = torch.rand(clients, generator=generator(settings.seed, "toy clients", modes, round)).argsort(1)
        takes_part = order < settings.clients_per_round
        weights = federated_round(weights, taken, takes_part, phi, problem.y, gain)
        if bar is not None:
            bar.update()
    return weights


def decompose(predictions: Tensor, truth: Tensor) -> dict[str, float]:
    """Bias and variance of predictions (R, G) over re-runs (equation 3), averaged over the grid; truth E[y | x], (G,).

    Returns:
        ``squared_bias``, its root ``bias``, ``variance``, and ``variance_se``, the standard error of the variance.
    """
    mean = predictions.mean(0)
    squared_bias = ((truth - mean) ** 2).mean().item()
    spread = ((predictions - mean) ** 2).mean(1)
    return {
        "squared_bias": squared_bias,
        "bias": math.sqrt(squared_bias),
        "variance": spread.mean().item(),
        "variance_se": spread.std().item() / math.sqrt(len(spread)),
    }
