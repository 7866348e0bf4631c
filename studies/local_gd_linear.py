# SPDX-License-Identifier: Apache-2.0
"""Local-GD on the linear problems of Zhu, Vardhan & Mazumdar (https://arxiv.org/abs/2412.07971v1, section 5).

M nodes have N samples of dimension d each. In a round every node takes L gradient steps on its loss from the global
model w, and a server rule aggregates the resulting models w_i into the next w. All tensors are float64.

Gradient descent stays in w plus the span of the node's samples. The L steps are therefore computed in coordinates c of
that span, w_i = w + Z_iᵀ c, where a step costs N² instead of N d operations.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perada.core.checks import installed
from perada.core.seeding import derive_seed, generator
from perada.core.states import State
from perada.data import Dirichlet
from perada.data.partitions import Split
from perada.server import Aggregation, Mean, ServerRule, Updates

MAX_STEP = 2.0
"""Gradient descent on a quadratic function diverges if the learning rate times the curvature is at least this."""
MAX_PASSES = 1_000_000
"""Maximum number of steps of the SVM's solver, which would not terminate on data that cannot be separated."""


@dataclass(frozen=True)
class Problem:
    """Data of M nodes.

    Attributes:
        x: Samples (M, N, d).
        y: Outputs (M, N); -1 or 1 in a classification.
        truth: True model (M, d) of each node.
        sizes: Number (M,) of samples of each node; None if all have N. Otherwise N is the largest of them, and ``x``
            and ``y`` are padded with zeros.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    sizes: Tensor | None = None

    @property
    def together(self) -> "Problem":
        """The same samples on a single node, for centralized training; ``truth`` is still (M, d)."""
        x = self.x.flatten(0, 1)
        y = self.y.flatten()
        if self.sizes is not None:
            is_sample = torch.arange(self.x.shape[1]) < self.sizes.unsqueeze(-1)
            x = x[is_sample.flatten()]
            y = y[is_sample.flatten()]
        return Problem(x.unsqueeze(0), y.unsqueeze(0), self.truth)


def regression(dimension: int, nodes: int = 10, samples: int = 50, seed: int = 0) -> Problem:
    """Draw a linear regression with independent true models.

    x ~ N(0, 1), w_i* ~ N(0, 4) and y = xᵀ w_i* + noise with noise ~ N(0, 0.04), where the second parameters are
    variances.

    Args:
        dimension: Dimension d.
        nodes: Number M of nodes.
        samples: Number N of samples per node.
        seed: Seed of all draws.
    """
    draw = generator(seed, "local-gd/regression", dimension)
    x = torch.randn(nodes, samples, dimension, generator=draw, dtype=torch.float64)
    truth = 2 * torch.randn(nodes, dimension, generator=draw, dtype=torch.float64)
    noise = 0.2 * torch.randn(nodes, samples, generator=draw, dtype=torch.float64)
    return Problem(x, _apply(x, truth) + noise, truth)


def classification(dimension: int, nodes: int = 10, samples: int = 50, noise: float = 0.5, seed: int = 0) -> Problem:
    """Draw a classification with labels y = sign(xᵀ w_i*), x ~ N(0, 1), w_i* = w* + z_i, w* ~ N(0, 1).

    Args:
        dimension: Dimension d.
        nodes: Number M of nodes.
        samples: Number N of samples per node.
        noise: Standard deviation of z_i, which the paper does not state.
        seed: Seed of all draws.
    """
    draw = generator(seed, "local-gd/classification", dimension)
    x = torch.randn(nodes, samples, dimension, generator=draw, dtype=torch.float64)
    common = torch.randn(dimension, generator=draw, dtype=torch.float64)
    truth = common + noise * torch.randn(nodes, dimension, generator=draw, dtype=torch.float64)
    return Problem(x, torch.where(_apply(x, truth) >= 0, 1.0, -1.0).double(), truth)


def dirichlet_classification(
    dimension: int, alpha: float, nodes: int = 10, samples: int = 500, seed: int = 0
) -> Problem:
    """Draw labels y = sign(xᵀ w*) of one true model w*, divided among nodes in Dirichlet proportions (appendix B.1).

    The positive and the negative samples are each divided in proportions drawn from Dir(α), so that nodes differ in
    their number of samples and in their share of positive ones. Every node has at least one sample.

    Args:
        dimension: Dimension d.
        alpha: Concentration α; the smaller it is, the more the nodes differ.
        nodes: Number M of nodes.
        samples: Number of samples of all nodes together.
        seed: Seed of all draws.
    """
    draw = generator(seed, "local-gd/dirichlet", dimension)
    x = torch.randn(samples, dimension, generator=draw, dtype=torch.float64)
    truth = torch.randn(dimension, generator=draw, dtype=torch.float64)
    is_positive = x @ truth >= 0
    y = torch.where(is_positive, 1.0, -1.0).double()

    every_sample = Split(is_positive.long().numpy(), np.arange(samples))
    no_test_set = Split(every_sample.labels[:0], every_sample.index[:0])
    partition = Dirichlet(nodes, alpha, min_per_client=1)
    shares, _ = partition.split(every_sample, no_test_set, derive_seed(seed, "local-gd/dirichlet nodes"))

    sizes = torch.tensor([len(share) for share in shares])
    padded_x = torch.zeros(nodes, int(sizes.max()), dimension, dtype=torch.float64)
    padded_y = torch.zeros(nodes, int(sizes.max()), dtype=torch.float64)
    for node, share in enumerate(shares):
        rows = torch.as_tensor(share)
        padded_x[node, : len(rows)] = x[rows]
        padded_y[node, : len(rows)] = y[rows]
    return Problem(padded_x, padded_y, truth.unsqueeze(0), sizes)


def _apply(x: Tensor, w: Tensor) -> Tensor:
    """Return the products (M, N) of samples (M, N, d) with one model (d,) for all nodes, or with models (M, d)."""
    return (x @ w.expand(len(x), -1).unsqueeze(-1)).squeeze(-1)


Local = Callable[[Tensor], Tensor]
"""Function of the global model (d,) that returns the models (M, d) of the nodes after their local steps."""


def federate(local: Local, dimension: int, rounds: int, rule: ServerRule | None = None) -> Tensor:
    """Run rounds from w⁰ = 0.

    Args:
        local: Local steps of a round.
        dimension: Dimension d.
        rounds: Number K of rounds.
        rule: Server rule; the mean by default.

    Returns:
        The global models (K + 1, d), from w⁰ to w^K.
    """
    if rule is None:
        rule = Mean()
    server_state: dict[str, State] = {}
    w = torch.zeros(dimension, dtype=torch.float64)
    path = [w]
    for round_number in range(rounds):
        models = local(w)
        num_nodes = len(models)
        aggregation = Aggregation(
            Updates({"w": models}),
            torch.full((num_nodes,), 1 / num_nodes, dtype=torch.float64),
            {"w": w},
            frozenset({"w"}),
            round_number,
            server_state,
        )
        w = rule(aggregation)["w"]
        path.append(w)
    return torch.stack(path)


def regression_steps(problem: Problem, steps: int, lr: float) -> Local:
    """Return L steps of gradient descent on ½‖y_i − X_i w‖² at every node.

    This is the loss without the 1/N of the paper's section 2.1; docs/studies/local_gd.md explains why.

    Args:
        problem: Data of the nodes.
        steps: Number L of steps.
        lr: Learning rate.

    Raises:
        ValueError: If gradient descent would diverge with this learning rate.
    """
    gram = problem.x @ problem.x.mT
    steepest = torch.linalg.eigvalsh(gram)[:, -1].max().item()
    if not 0 < lr * steepest < MAX_STEP:
        raise ValueError(
            f"lr={lr!r} diverges in dimension {problem.x.shape[-1]}: the curvature is {steepest:.3g}; choose a "
            f"positive number below {MAX_STEP / steepest:.3g}"
        )

    def local(w: Tensor) -> Tensor:
        gap = (problem.y - _apply(problem.x, w)).unsqueeze(-1)  # (M, N, 1): y − X w
        c = torch.zeros_like(gap)
        for _ in range(steps):
            c += lr * (gap - gram @ c)
        return w + (problem.x.mT @ c).squeeze(-1)

    return local


def classification_steps(problem: Problem, steps: int, lr: float, decay: float) -> Local:
    """Return L steps of gradient descent on mean_j exp(−y_ij x_ijᵀ w) + λ/2 ‖w − w^k‖² at every node.

    Equation 12 has the sum over j; docs/studies/local_gd.md explains why the mean is taken here.

    Args:
        problem: Data of the nodes.
        steps: Number L of steps.
        lr: Learning rate.
        decay: Weight decay λ.

    Raises:
        ValueError: When the steps are taken, if they diverge.
    """
    signed = problem.y.unsqueeze(-1) * problem.x  # y x, (M, N, d), whose product with w is the margin
    gram = signed @ signed.mT
    if problem.sizes is None:
        count = torch.tensor(signed.shape[1])
    else:
        count = problem.sizes.view(-1, 1, 1)

    def local(w: Tensor) -> Tensor:
        margin = _apply(signed, w).unsqueeze(-1)  # (M, N, 1): of the global model
        c = torch.zeros_like(margin)
        for _ in range(steps):
            # Padding is zero in `signed`, so its entries of c do not change a model.
            c += lr * (torch.exp(-margin - gram @ c) / count - decay * c)
        models = w + (signed.mT @ c).squeeze(-1)
        if not models.isfinite().all():
            raise ValueError(f"lr={lr!r} diverges in dimension {signed.shape[-1]}; choose a smaller lr")
        return models

    return local


def centralized(problem: Problem, steps: int, lr: float, *, classify: bool) -> Tensor:
    """Return the model (d,) after gradient descent from 0 on all samples, as on a single node, with λ = 0.

    Args:
        problem: Data of the nodes.
        steps: Number of steps of gradient descent.
        lr: Learning rate.
        classify: Whether the problem is a classification rather than a regression.
    """
    all_data = problem.together
    if classify:
        local = classification_steps(all_data, steps, lr, decay=0.0)
    else:
        local = regression_steps(all_data, steps, lr)
    return federate(local, problem.x.shape[-1], rounds=1)[-1]


def closed_form(problem: Problem, rounds: int, steps: int | None = None, lr: float = 0.0) -> Tensor:
    """Compute the global models of Local-GD on the regression in closed form.

    The steps of a node map w to (I − P_i) w + Q_i. In the limit of many steps, P_i = X_i⁺X_i and Q_i = X_i⁺y_i
    (equation 4). After L steps with learning rate η, I − P_i = (I − η X_iᵀX_i)^L and Q_i = P_i X_i⁺y_i. With the means
    P̄ and Q̄ over the nodes, w^K = Σ_{k<K} (I − P̄)^k Q̄ (equation 6), which is computed from the eigenvalues of P̄.

    Args:
        problem: Data of the nodes.
        rounds: Number K of rounds.
        steps: Number L of steps; None for the limit of many steps.
        lr: Learning rate η, which is used only with ``steps``.

    Returns:
        The global models (K + 1, d), from w⁰ = 0 to w^K.
    """
    u, s, v = torch.linalg.svd(problem.x, full_matrices=False)  # (M, N, N), (M, N), (M, N, d)
    # Share (M, N) of the distance to the node's solution that its steps close, along each singular vector.
    closed = torch.ones_like(s)
    if steps is not None:
        closed = 1 - (1 - lr * s.square()) ** steps
    pull = closed / s * (u.mT @ problem.y.unsqueeze(-1)).squeeze(-1)
    q_mean = (v.mT @ pull.unsqueeze(-1)).squeeze(-1).mean(0)  # Q̄ (d,)

    # All models are in the span of the samples, in which P̄ is an r × r matrix instead of d × d.
    basis = torch.linalg.qr(problem.x.flatten(0, 1).T)[0]  # (d, r)
    v_in_basis = v @ basis  # (M, N, r)
    p_mean = (v_in_basis.mT @ (closed.unsqueeze(-1) * v_in_basis)).mean(0)
    eigenvalues, eigenvectors = torch.linalg.eigh(p_mean)
    # Rounding errors can lead out of (0, 1].
    eigenvalues = eigenvalues.clamp(1e-300, 1)

    # Σ_{k<K} (1 − p)^k = (1 − (1 − p)^K) / p, (K, r), by functions without cancellation for small p.
    powers = torch.arange(1, rounds + 1, dtype=torch.float64).unsqueeze(-1)
    geometric_sums = -torch.expm1(powers * torch.log1p(-eigenvalues)) / eigenvalues
    models = geometric_sums * (eigenvectors.mT @ (basis.T @ q_mean)) @ (basis @ eigenvectors).T
    return torch.cat([torch.zeros_like(models[:1]), models])


def least_norm(problem: Problem) -> Tensor:
    """Return the centralized solution X⁺y (d,), which has the smallest norm of all models with the smallest error."""
    all_data = problem.together
    y = all_data.y[0].unsqueeze(-1)
    solution: Tensor = torch.linalg.lstsq(all_data.x[0], y, driver="gelsd").solution
    return solution.squeeze(-1)


def max_margin(problem: Problem) -> Tensor:
    """Return the hard-margin SVM (d,) through the origin: minimal ‖w‖ with y xᵀw ≥ 1 for all samples (equation 15).

    scikit-learn's ``SVC`` always has an intercept b. Each sample is passed twice, as (x, y) and (−x, −y): together the
    two constraints are y xᵀw ≥ 1 + |b|, so an intercept can only increase the norm, and b = 0. C = 10¹⁰ leaves no
    slack.

    Raises:
        ValueError: If no hyperplane through the origin separates the classes.
    """
    svm = installed("sklearn.svm", "The study", "studies")
    exceptions = installed("sklearn.exceptions", "The study", "studies")
    all_data = problem.together
    x = all_data.x[0]
    y = all_data.y[0]
    machine = svm.SVC(kernel="linear", C=1e10, tol=1e-6, cache_size=500, max_iter=MAX_PASSES)
    with warnings.catch_warnings():
        # If the solver does not converge, an error is raised below.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        machine.fit(torch.cat([x, -x]).numpy(), torch.cat([y, -y]).numpy())
    w = torch.tensor(machine.coef_[0])
    is_converged = machine.n_iter_.max() < MAX_PASSES
    smallest_margin = (y * (x @ w)).min()
    if not is_converged or smallest_margin < 1 - 1e-3:
        raise ValueError(
            f"{len(x)} samples of dimension {x.shape[1]} cannot be separated; use a higher dimension or fewer samples"
        )
    return w


def direction_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return ‖w₁/‖w₁‖ − w₂/‖w₂‖‖ along the last axis; NaN for a model of zeros, which has no direction.

    >>> direction_distance(torch.tensor([3.0, 0.0]), torch.tensor([-0.5, 0.0])).item()
    2.0
    """
    distance: Tensor = (_normalized(first) - _normalized(second)).norm(dim=-1)
    return distance


def _normalized(models: Tensor) -> Tensor:
    """Return models (..., d) divided by their norms."""
    unit_models: Tensor = models / models.norm(dim=-1, keepdim=True)
    return unit_models


def accuracy(w: Tensor, truth: Tensor) -> Tensor:
    """Return the expected accuracy of models on new samples of all nodes.

    Two hyperplanes through the origin disagree on a share of angle/π of Gaussian samples, so no test set is drawn.

    Args:
        w: Models (..., d).
        truth: True model (M, d) of each node.

    Returns:
        Accuracies (...,), from 0 to 1.
    """
    cosine = _normalized(w) @ _normalized(truth).T
    error: Tensor = torch.arccos(cosine.clamp(-1, 1)) / math.pi
    return 1 - error.mean(-1)
