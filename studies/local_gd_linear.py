# SPDX-License-Identifier: Apache-2.0
"""Local-GD on the linear problems of Zhu, Vardhan & Mazumdar (https://arxiv.org/abs/2412.07971v1, section 5).

M nodes hold N samples each of dimension d. In a round every node takes L gradient steps on its own loss from the global
model w, and a server rule aggregates the models w_i that they reach into the next w. All tensors are float64.

Gradient descent never leaves w plus the span of the node's own samples. The L steps are therefore taken in coordinates
of that span: w_i = w + Z_iᵀ c, a gradient step on c is the gradient step on w_i, and costs N² instead of N d.
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
"""Limit on the steps of the SVM's solver, which would not end on data that cannot be separated."""


@dataclass(frozen=True)
class NodeData:
    """Data of M nodes.

    Attributes:
        x: Samples (M, N, d).
        y: Outputs (M, N); of a classification, -1 or 1.
        truth: Each node's own true model (M, d).
        sizes: Samples of each node (M,) where they differ. N is then the largest of them, and the rows of ``x`` and
            ``y`` behind a node's own are zero.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    sizes: Tensor | None = None

    @property
    def together(self) -> "NodeData":
        """The same samples on one node, for centralized training; ``truth`` is still (M, d)."""
        x = self.x.flatten(0, 1)
        y = self.y.flatten()
        if self.sizes is not None:
            is_sample = torch.arange(self.x.shape[1]) < self.sizes.unsqueeze(-1)
            x = x[is_sample.flatten()]
            y = y[is_sample.flatten()]
        return NodeData(x.unsqueeze(0), y.unsqueeze(0), self.truth)


def regression(dimension: int, nodes: int = 10, samples: int = 50, seed: int = 0) -> NodeData:
    """Draw a linear regression with unrelated truths: x ~ N(0, 1), w_i* ~ N(0, 4), y = xᵀ w_i* + noise ~ N(0, 0.04).

    The second parameters are variances.
    """
    draw = generator(seed, "local-gd/regression", dimension)
    x = torch.randn(nodes, samples, dimension, generator=draw, dtype=torch.float64)
    truth = 2 * torch.randn(nodes, dimension, generator=draw, dtype=torch.float64)
    noise = 0.2 * torch.randn(nodes, samples, generator=draw, dtype=torch.float64)
    return NodeData(x, _apply_models(x, truth) + noise, truth)


def classification(dimension: int, nodes: int = 10, samples: int = 50, noise: float = 0.5, seed: int = 0) -> NodeData:
    """Draw a classification with labels y = sign(xᵀ w_i*), x ~ N(0, 1), w_i* = w* + z_i, w* ~ N(0, 1).

    Args:
        dimension: d.
        nodes: M.
        samples: N.
        noise: Standard deviation of z_i. The paper does not give it.
        seed: Seed of all draws.
    """
    draw = generator(seed, "local-gd/classification", dimension)
    x = torch.randn(nodes, samples, dimension, generator=draw, dtype=torch.float64)
    common = torch.randn(dimension, generator=draw, dtype=torch.float64)
    truth = common + noise * torch.randn(nodes, dimension, generator=draw, dtype=torch.float64)
    return NodeData(x, torch.where(_apply_models(x, truth) >= 0, 1.0, -1.0).double(), truth)


def dirichlet_classification(
    dimension: int, alpha: float, nodes: int = 10, samples: int = 500, seed: int = 0
) -> NodeData:
    """Draw labels y = sign(xᵀ w*) of one true model w*, divided among nodes in Dirichlet proportions (appendix B.1).

    The positive and the negative samples are each divided in proportions drawn from Dir(α), so that nodes differ in
    their number of samples and in their share of positive ones. Every node has at least one sample.

    Args:
        dimension: d.
        alpha: α; the smaller, the less alike the nodes.
        nodes: M.
        samples: Samples of all nodes together.
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
    return NodeData(padded_x, padded_y, truth.unsqueeze(0), sizes)


def _apply_models(x: Tensor, w: Tensor) -> Tensor:
    """Return the products (M, N) of samples (M, N, d) with one model (d,) for all nodes, or with models (M, d)."""
    return (x @ w.expand(len(x), -1).unsqueeze(-1)).squeeze(-1)


Local = Callable[[Tensor], Tensor]
"""Returns the models (M, d) that the nodes reach from the global model (d,)."""


def federate(local: Local, dimension: int, rounds: int, rule: ServerRule | None = None) -> Tensor:
    """Run rounds from w⁰ = 0.

    Args:
        local: What the nodes do in a round.
        dimension: d.
        rounds: K.
        rule: How the server aggregates; the mean by default.

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


def regression_steps(problem: NodeData, steps: int, lr: float) -> Local:
    """Return L steps of gradient descent on ½‖y_i − X_i w‖² at every node.

    This is the loss without the 1/N of the paper's section 2.1; docs/studies/local_gd.md explains why.

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

    def descend(w: Tensor) -> Tensor:
        gap = (problem.y - _apply_models(problem.x, w)).unsqueeze(-1)  # (M, N, 1): y − X w
        c = torch.zeros_like(gap)
        for _ in range(steps):
            c += lr * (gap - gram @ c)
        return w + (problem.x.mT @ c).squeeze(-1)

    return descend


def classification_steps(problem: NodeData, steps: int, lr: float, decay: float) -> Local:
    """Return L steps of gradient descent on mean_j exp(−y_ij x_ijᵀ w) + λ/2 ‖w − w^k‖² at every node.

    Equation 12 has the sum over j; docs/studies/local_gd.md explains why the mean is taken here.

    Args:
        problem: The data.
        steps: L.
        lr: Learning rate.
        decay: λ.

    Raises:
        ValueError: When the steps are taken, if they diverge.
    """
    signed = problem.y.unsqueeze(-1) * problem.x  # (M, N, d): y x, so that the margin is a product with it
    gram = signed @ signed.mT
    if problem.sizes is None:
        count = torch.tensor(signed.shape[1])
    else:
        count = problem.sizes.view(-1, 1, 1)

    def descend(w: Tensor) -> Tensor:
        margin = _apply_models(signed, w).unsqueeze(-1)  # (M, N, 1)
        c = torch.zeros_like(margin)
        for _ in range(steps):
            # The padding after a node's samples is zero, so its entries of c move no model.
            c += lr * (torch.exp(-margin - gram @ c) / count - decay * c)
        models = w + (signed.mT @ c).squeeze(-1)
        if not models.isfinite().all():
            raise ValueError(f"lr={lr!r} diverges in dimension {signed.shape[-1]}; choose a smaller lr")
        return models

    return descend


def centralized(problem: NodeData, steps: int, lr: float, *, classify: bool) -> Tensor:
    """Return the model (d,) after gradient descent from 0 on all samples, as on a single node, with λ = 0.

    Args:
        problem: The data.
        steps: Steps of gradient descent.
        lr: Learning rate.
        classify: Whether the problem is a classification, or else a regression.
    """
    all_data = problem.together
    if classify:
        local = classification_steps(all_data, steps, lr, decay=0.0)
    else:
        local = regression_steps(all_data, steps, lr)
    return federate(local, problem.x.shape[-1], rounds=1)[-1]


def closed_form(problem: NodeData, rounds: int, steps: int | None = None, lr: float = 0.0) -> Tensor:
    """Return the global models of Local-GD on the regression, without running it.

    A node's steps take w to (I − P_i) w + Q_i. Where they converge, P_i = X_i⁺X_i and Q_i = X_i⁺y_i (equation 4). After
    L steps of rate η, I − P_i = (I − η X_iᵀX_i)^L and Q_i = P_i X_i⁺y_i. With the means P̄ and Q̄ over the nodes,
    w^K = Σ_{k<K} (I − P̄)^k Q̄ (equation 6), here by the eigenvalues of P̄.

    Args:
        problem: The data.
        rounds: K.
        steps: L; None for the limit of many steps.
        lr: η; only with ``steps``.

    Returns:
        (K + 1, d), from w⁰ = 0 to w^K.
    """
    u, s, v = torch.linalg.svd(problem.x, full_matrices=False)  # (M, N, N), (M, N), (M, N, d)
    # (M, N): how much of the gap to the node's solution its steps close, along each singular vector.
    closed = torch.ones_like(s)
    if steps is not None:
        closed = 1 - (1 - lr * s.square()) ** steps
    rotated_outputs = (u.mT @ problem.y.unsqueeze(-1)).squeeze(-1)  # (M, N)
    pull = closed / s * rotated_outputs
    q_of_nodes = (v.mT @ pull.unsqueeze(-1)).squeeze(-1)  # Q (M, d)
    q_mean = q_of_nodes.mean(0)  # Q̄ (d,)

    # All models lie in the span of the samples, so P̄ is diagonalized there: r × r instead of d × d.
    basis = torch.linalg.qr(problem.x.flatten(0, 1).T)[0]  # (d, r)
    v_in_basis = v @ basis  # (M, N, r)
    p_mean = (v_in_basis.mT @ (closed.unsqueeze(-1) * v_in_basis)).mean(0)
    eigenvalues, eigenvectors = torch.linalg.eigh(p_mean)
    eigenvalues = eigenvalues.clamp(1e-300, 1)  # rounding can lead out of (0, 1]

    # (K, r): Σ_{k<K} (1 − p)^k = (1 − (1 − p)^K) / p, without cancellation for small p.
    powers = torch.arange(1, rounds + 1, dtype=torch.float64).unsqueeze(-1)
    geometric_sums = -torch.expm1(powers * torch.log1p(-eigenvalues)) / eigenvalues
    q_of_eigenvectors = eigenvectors.mT @ (basis.T @ q_mean)
    models = geometric_sums * q_of_eigenvectors @ (basis @ eigenvectors).T
    return torch.cat([torch.zeros_like(models[:1]), models])


def least_norm(problem: NodeData) -> Tensor:
    """Return the centralized solution X⁺y (d,): of all models with the least error, the one of least norm."""
    all_data = problem.together
    y = all_data.y[0].unsqueeze(-1)
    solution: Tensor = torch.linalg.lstsq(all_data.x[0], y, driver="gelsd").solution
    return solution.squeeze(-1)


def max_margin(problem: NodeData) -> Tensor:
    """Return the hard-margin SVM through the origin (d,): least ‖w‖ with y xᵀw ≥ 1 for all samples (equation 15).

    scikit-learn's ``SVC`` always has an intercept b. It is given every sample twice, (x, y) and (−x, −y): together the
    two constraints are y xᵀw ≥ 1 + |b|, so that an intercept can only cost, and b = 0. C = 10¹⁰ leaves no slack.

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
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)  # an error is raised below
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
    """Return ‖w₁/‖w₁‖ − w₂/‖w₂‖‖ along the last axis; NaN for the model 0, which has no direction.

    >>> direction_distance(torch.tensor([3.0, 0.0]), torch.tensor([-0.5, 0.0])).item()
    2.0
    """
    distance: Tensor = (_normalize_models(first) - _normalize_models(second)).norm(dim=-1)
    return distance


def _normalize_models(weights: Tensor) -> Tensor:
    """Return models (..., d) of norm 1."""
    unit_models: Tensor = weights / weights.norm(dim=-1, keepdim=True)
    return unit_models


def accuracy(w: Tensor, truth: Tensor) -> Tensor:
    """Return the expected accuracy of models on new samples of all nodes.

    Two hyperplanes through the origin disagree on a share of angle/π of a Gaussian, so no test set is drawn.

    Args:
        w: Models (..., d).
        truth: The nodes' true models (M, d).
    """
    cosine = _normalize_models(w) @ _normalize_models(truth).T
    test_error: Tensor = torch.arccos(cosine.clamp(-1, 1)) / math.pi
    return 1 - test_error.mean(-1)
