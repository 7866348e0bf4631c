# SPDX-License-Identifier: Apache-2.0
"""What the panels of the Local-GD study show: distances and errors by round and by dimension, as numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.server import ModifiedLocalGD, ServerRule
from perada.studies import local_gd_linear as linear

Curves = dict[str, list[float]]
Advance = Callable[[str], None]
"""Told what was finished, for a progress bar."""


@dataclass(frozen=True)
class Counts:
    """Settings of which each whole number, or each of a tuple of them, is 1 or more.

    Raises:
        ValueError: Otherwise, with the name and the value.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for count in (value or (0,)) if isinstance(value, tuple) else (value,):
                if type(count) is int:
                    check_integer(f"{type(self).__name__}: {name}", count)


@dataclass(frozen=True)
class RegressionSettings(Counts):
    """The linear regression, panels (a) to (c).

    Args:
        dimension: d of the curves by round.
        dimensions: Those of the curves by dimension.
        rounds: Communication rounds R.
        local_steps: L.
        lr: Learning rate, on half the sum of a node's squared errors.
        central_steps: Steps of the centralized model.
    """

    dimension: int = 1500
    dimensions: tuple[int, ...] = (100, 200, 300, 400, 450, 500, 550, 600, 700, 850, 1000, 1250, 1500, 2000)
    rounds: int = 200
    local_steps: int = 200
    lr: float = 1e-4
    central_steps: int = 10_000


@dataclass(frozen=True)
class ClassificationSettings(Counts):
    """The linear classification, panels (d) to (g).

    Args:
        dimension: d of the curves by round.
        dimensions: Those of the curves by dimension.
        rounds: Communication rounds R.
        local_steps: L.
        lr: Learning rate, on the mean of a node's exponential losses.
        decay: λ, the pull towards the global model.
        noise: Standard deviation of what tells the nodes' true models apart.
        central_steps: Steps of the centralized model.
    """

    dimension: int = 1500
    dimensions: tuple[int, ...] = (600, 800, 1000, 1250, 1500, 2000, 3000)
    rounds: int = 120
    local_steps: int = 150
    lr: float = 0.01
    decay: float = 1e-4
    noise: float = 0.5
    central_steps: int = 20_000


@dataclass(frozen=True)
class DirichletSettings(Counts):
    """The linear classification whose samples are divided in Dirichlet proportions (Figure 2).

    Args:
        alphas: α of each division.
        nodes: M.
        samples: Training samples of all nodes together.
        dimension: d.
        rounds: Communication rounds R.
        local_steps: L.
        lr: Learning rate, on the mean of a node's exponential losses.
        decay: λ, the pull towards the global model.
        central_steps: Steps of the centralized model.
    """

    alphas: tuple[float, ...] = (0.5, 0.3)
    nodes: int = 10
    samples: int = 500
    dimension: int = 1500
    rounds: int = 150
    local_steps: int = 150
    lr: float = 0.01
    decay: float = 1e-4
    central_steps: int = 22_500

    def __post_init__(self) -> None:
        super().__post_init__()
        for alpha in self.alphas:
            check_number("DirichletSettings: alphas", alpha, gt=0)


@dataclass(frozen=True)
class Nodes(Counts):
    """The nodes of the linear problems.

    Args:
        count: M.
        samples: Training samples N of each.
    """

    count: int = 10
    samples: int = 50


def regression_at(dimension: int, nodes: Nodes, settings: RegressionSettings, seed: int) -> Curves:
    """One dimension's curves by round, w⁰ first.

    Distances are ‖w₁ − w₂‖/d. ``closed`` and ``limit``: the global model to its closed form, for L steps and for
    infinitely many; ``least_norm`` to X⁺y, ``central`` to the trained centralized model. ``error`` is mean_i
    ‖w − w_i*‖²/d. With one value: ``central_least_norm``, ``central_error``, and ``scale``, ‖X⁺y‖/d.
    """
    problem = linear.regression(dimension, nodes.count, nodes.samples, seed)
    steps, lr, rounds = settings.local_steps, settings.lr, settings.rounds
    path = linear.federate(linear.regression_steps(problem, steps, lr), dimension, rounds)
    central = linear.centralized(problem, settings.central_steps, lr, classify=False)
    best = linear.least_norm(problem)
    return _numbers(
        closed=(path - linear.closed_form(problem, rounds, steps, lr)).norm(dim=-1) / dimension,
        limit=(path - linear.closed_form(problem, rounds)).norm(dim=-1) / dimension,
        least_norm=(path - best).norm(dim=-1) / dimension,
        central=(path - central).norm(dim=-1) / dimension,
        error=_error(path, problem.truth),
        central_least_norm=(central - best).norm() / dimension,
        central_error=_error(central, problem.truth),
        scale=best.norm() / dimension,
    )


def _error(w: Tensor, truth: Tensor) -> Tensor:
    """Mean over nodes of ‖w − w_i*‖²/d, for models (..., d)."""
    return (w.unsqueeze(-2) - truth).square().mean((-1, -2))


def classification_at(dimension: int, nodes: Nodes, settings: ClassificationSettings, seed: int) -> Curves:
    """One dimension's curves by round, from the first round on: w⁰ = 0 has no direction.

    For each of ``plain`` and ``modified`` Local-GD: distance in direction ``…_central`` and ``…_svm``, to the
    centralized model and to the hard-margin SVM, and ``…_accuracy``. With one value: ``central_svm``,
    ``central_accuracy`` and ``svm_accuracy``.
    """
    problem = linear.classification(dimension, nodes.count, nodes.samples, settings.noise, seed)
    return _classification_curves(problem, settings)


def _classification_curves(problem: linear.Problem, settings: ClassificationSettings | DirichletSettings) -> Curves:
    """Curves of :func:`classification_at`, of any classification."""
    dimension = problem.x.shape[-1]
    local = linear.classification_steps(problem, settings.local_steps, settings.lr, settings.decay)
    central = linear.centralized(problem, settings.central_steps, settings.lr, classify=True)
    svm = linear.max_margin(problem)
    curves: dict[str, Tensor] = {}
    rules: dict[str, ServerRule | None] = {"plain": None, "modified": ModifiedLocalGD()}
    for name, rule in rules.items():
        path = linear.federate(local, dimension, settings.rounds, rule)[1:]
        curves[f"{name}_central"] = linear.direction_distance(path, central)
        curves[f"{name}_svm"] = linear.direction_distance(path, svm)
        curves[f"{name}_accuracy"] = linear.accuracy(path, problem.truth)
    return _numbers(
        **curves,
        central_svm=linear.direction_distance(central, svm),
        central_accuracy=linear.accuracy(central, problem.truth),
        svm_accuracy=linear.accuracy(svm, problem.truth),
    )


def dirichlet_curves(settings: DirichletSettings, seed: int, advance: Advance) -> dict[str, Curves]:
    """Curves of :func:`classification_at` for each α, by its text, of nodes in Dirichlet proportions.

    Beside them, by node: ``samples`` and ``positive``, its number of samples and of those labelled 1.
    """
    by_alpha: dict[str, Curves] = {}
    for alpha in settings.alphas:
        problem = linear.dirichlet_classification(settings.dimension, alpha, settings.nodes, settings.samples, seed)
        curves = _classification_curves(problem, settings)
        assert problem.sizes is not None
        nodes = _numbers(samples=problem.sizes.double(), positive=(problem.y > 0).double().sum(1))
        by_alpha[f"{alpha:g}"] = curves | nodes
        advance(f"Dirichlet, α = {alpha:g}")
    return by_alpha


def _numbers(**curves: Tensor) -> Curves:
    return {name: curve.reshape(-1).tolist() for name, curve in curves.items()}


def by_dimension(
    at: Callable[[int, Nodes, Any, int], Curves],
    nodes: Nodes,
    settings: RegressionSettings | ClassificationSettings,
    seed: int,
    advance: Advance,
) -> dict[str, Curves]:
    """Curves by round at one dimension, and the last value of every curve at many.

    Returns:
        ``{"rounds": curves, "dimensions": curves}``; the latter with the dimensions themselves as ``dimension``.
    """
    dimensions = settings.dimensions
    found: dict[int, Curves] = {}
    for d in sorted({settings.dimension, *dimensions}):
        found[d] = at(d, nodes, settings, seed)
        advance(f"d = {d}")
    by_round = found[settings.dimension]
    table: Curves = {name: [found[d][name][-1] for d in dimensions] for name in by_round}
    return {"rounds": by_round, "dimensions": {"dimension": [float(d) for d in dimensions]} | table}
