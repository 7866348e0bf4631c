# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble's toy regression (Shi et al., 2021, section 5, Table 1 and Figure 2), for many re-runs at once.

Each client has two points of y = a sin(2πx) + noise. K linear models (modes) on fixed Gaussian basis functions are
trained, each from its own random initialisation, by the schedule of
:func:`~perada.algorithms.ensembles.mode_schedule`; the prediction is their mean. The data and the basis are drawn once.
For each re-run the initialisations are drawn anew, and with them the strata, the permutations and the sampled clients.

Shapes: R re-runs, C clients, N points of a client, D basis functions, K modes, G points of the grid.
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

CLIENTS = 50
POINTS = 2
"""Points of a client."""
FUNCTIONS = 100
"""Basis functions."""
WIDTH = 0.08
"""Width b of a basis function."""
NOISE = 0.2
"""Standard deviation of the noise."""
SPREAD = 0.2
"""Standard deviation of the clients' amplitudes."""
DECAY_EVERY = 10
"""Rounds between two decays of the learning rate; the paper's "all experiments"."""


@dataclass(frozen=True)
class Problem:
    """The data of all clients.

    Attributes:
        x: Inputs (C, N) in [-1, 1].
        y: Outputs (C, N).
        centres: Centres of the basis functions (D,).
    """

    x: Tensor
    y: Tensor
    centres: Tensor


@dataclass(frozen=True)
class ModeSettings:
    """Options of the training of the modes.

    Args:
        seed: Seed of the data, and of everything that differs between re-runs.
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
        """Return the rounds of a training with K modes."""
        return self.rounds if self.ages is None else self.ages * modes


def make_problem(seed: int) -> Problem:
    """Draw the clients' data, y = a sin(2πx) + ε with an amplitude a for each client, and the centres of the basis."""
    random = generator(seed, "toy regression")
    amplitude = 1 + SPREAD * torch.randn(CLIENTS, 1, generator=random, dtype=torch.float64)
    x = 2 * torch.rand(CLIENTS, POINTS, generator=random, dtype=torch.float64) - 1
    noise = NOISE * torch.randn(CLIENTS, POINTS, generator=random, dtype=torch.float64)
    centres = 2 * torch.rand(FUNCTIONS, generator=random, dtype=torch.float64) - 1
    return Problem(x=x, y=amplitude * torch.sin(2 * math.pi * x) + noise, centres=centres)


def basis(x: Tensor, centres: Tensor) -> Tensor:
    """Return the Gaussian basis functions exp(-(x - ν)² / 2b²) of inputs (...), as (..., D)."""
    return torch.exp(-((x[..., None] - centres) ** 2) / (2 * WIDTH**2))


def local_gain(phi: Tensor, lr: float, steps: int) -> Tensor:
    """Return the matrix M (C, N, N) by which local gradient descent moves the weights of each client.

    With the Gram matrix G = ΦΦᵀ/N, s steps on 1/2N ||Φw - y||² move w by -Φᵀ M (Φw - y), where
    M = (lr/N) Σ_{j<s} (I - lr G)^j.

    Args:
        phi: Basis functions Φ (C, N, D).
        lr: Learning rate.
        steps: s.

    Raises:
        ValueError: If gradient descent diverges for a client.
    """
    points = phi.shape[1]
    gram = phi @ phi.mT / points
    limit = 2 / torch.linalg.eigvalsh(gram).max().item()
    if not 0 < lr < limit:
        raise ValueError(f"lr={lr} does not descend: on these data it must be above 0 and below {limit:.3g}")
    power = torch.eye(points, dtype=phi.dtype).expand_as(gram)  # (I - lr G)^j
    total = torch.zeros_like(gram)
    for _ in range(steps):
        total = total + power
        power = power - lr * gram @ power
    return lr / points * total


def federated_round(
    modes: Tensor, mode_of_client: Tensor, takes_part: Tensor, phi: Tensor, y: Tensor, gain: Tensor
) -> Tensor:
    """Return the modes after a round: clients train their modes, the server averages each over the clients that had it.

    Args:
        modes: Weights (R, K, D); a mode that no client had is returned as it is.
        mode_of_client: Mode of each client (R, C).
        takes_part: Whether a client trains in this round (R, C).
        phi: Basis functions (C, N, D).
        y: Outputs (C, N).
        gain: Result of :func:`local_gain`, (C, N, N).
    """
    num_reruns, num_modes, num_functions = modes.shape
    # Weights have a row for each mode of each re-run; T counts the clients that take part, over all re-runs.
    rows_of_weights = modes.reshape(-1, num_functions)
    phi_of_points = phi.reshape(-1, num_functions)  # (C · N, D)
    first_row_of_rerun = num_modes * torch.arange(num_reruns).unsqueeze(1)  # (R, 1)
    row = (first_row_of_rerun + mode_of_client)[takes_part]  # (T,)
    client = torch.arange(len(y)).expand(num_reruns, -1)[takes_part]  # (T,)

    residuals_of_all = (rows_of_weights @ phi_of_points.mT).view(-1, *y.shape) - y  # (R · K, C, N)
    residuals = residuals_of_all[row, client]  # (T, N)
    clients_of_row = torch.bincount(row, minlength=num_reruns * num_modes)
    moves_of_clients = (gain[client] @ residuals.unsqueeze(-1)).squeeze(-1)  # (T, N)
    moves = moves_of_clients / clients_of_row[row].unsqueeze(1)

    # The moves are sums of the clients' basis functions, so they are collected by point before the product with these.
    moves_of_points = torch.zeros(len(rows_of_weights), *y.shape, dtype=modes.dtype)
    moves_of_points = moves_of_points.index_put((row, client), moves, accumulate=True)
    moves_of_weights = moves_of_points.flatten(1) @ phi_of_points  # (R · K, D)
    return (rows_of_weights - moves_of_weights).view_as(modes)


def train(problem: Problem, mode_settings: ModeSettings, modes: int, bar: "tqdm[Any] | None" = None) -> Tensor:
    """Train K modes in every re-run, and return their weights (R, K, D).

    Args:
        problem: The data.
        mode_settings: Settings of the training.
        modes: K.
        bar: Progress bar, advanced after every round.
    """
    seeds = [derive_seed(mode_settings.seed, "toy re-run", modes, rerun) for rerun in range(mode_settings.reruns)]
    initial_weights = []
    for seed in seeds:
        random = generator(seed, "initial")
        initial_weights.append(torch.randn(modes, FUNCTIONS, generator=random, dtype=torch.float64))
    weights = mode_settings.init_std * torch.stack(initial_weights)
    phi = basis(problem.x, problem.centres)
    for round_number in range(mode_settings.length(modes)):
        if round_number % DECAY_EVERY == 0:
            lr = mode_settings.lr * mode_settings.lr_decay ** (round_number // DECAY_EVERY)
            gain = local_gain(phi, lr, mode_settings.local_steps)
        schedules = [mode_schedule(seed, round_number, CLIENTS, modes, mode_settings.strata) for seed in seeds]
        mode_of_client = torch.stack(schedules)
        random = generator(mode_settings.seed, "toy clients", modes, round_number)
        order = torch.rand(mode_settings.reruns, CLIENTS, generator=random).argsort(1)
        takes_part = order < mode_settings.clients_per_round
        weights = federated_round(weights, mode_of_client, takes_part, phi, problem.y, gain)
        if bar is not None:
            bar.update()
    return weights


def decompose(predictions: Tensor, truth: Tensor) -> dict[str, float]:
    """Return bias and variance over re-runs (equation 3), averaged over the grid.

    Args:
        predictions: Predictions (R, G).
        truth: E[y | x], (G,).

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
