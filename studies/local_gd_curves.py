# SPDX-License-Identifier: Apache-2.0
"""The curves of the Local-GD study: distances and errors by round and by dimension."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from perada.core.checks import check_integer, check_number
from perada.server import ModifiedLocalGD, ServerRule
from perada.studies import local_gd_linear as linear

Curves = dict[str, list[float]]
Advance = Callable[[str], None]
"""Called with the name of each finished step, for a progress bar."""


@dataclass(frozen=True)
class Counts:
    """Settings whose integers, also those in tuples, are at least 1.

    Raises:
        ValueError: If one is not, or a tuple is empty.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if not values:
                values = (0,)  # an empty tuple is rejected like a 0
            for number in values:
                if type(number) is int:  # bool is a subclass of int
                    check_integer(f"{type(self).__name__}: {name}", number)


@dataclass(frozen=True)
class RegressionSettings(Counts):
    """The linear regression, panels (a) to (c).

    Args:
        dimension: Dimension d of the curves by round.
        dimensions: Dimensions d of the curves by dimension.
        rounds: Communication rounds R.
        local_steps: Local steps L of a node in a round.
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
        dimension: Dimension d of the curves by round.
        dimensions: Dimensions d of the curves by dimension.
        rounds: Communication rounds R.
        local_steps: Local steps L of a node in a round.
        lr: Learning rate, on the mean of a node's exponential losses.
        decay: λ, the pull towards the global model.
        noise: Standard deviation of the differences between the nodes' true models.
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
        nodes: Number of nodes M.
        samples: Training samples of all nodes together.
        dimension: Dimension d.
        rounds: Communication rounds R.
        local_steps: Local steps L of a node in a round.
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
        count: Number of nodes M.
        samples: Training samples N of each node.
    """

    count: int = 10
    samples: int = 50


def regression_at(dimension: int, nodes: Nodes, regression: RegressionSettings, seed: int) -> Curves:
    """Return the curves of one dimension by round, from w⁰ on.

    Distances are ‖w₁ − w₂‖/d. ``closed`` and ``limit`` are those of the global model to its closed form, for L steps
    and for infinitely many; ``least_norm`` is to X⁺y, ``central`` to the trained centralized model. ``error`` is mean_i
    ‖w − w_i*‖²/d. With one value: ``central_least_norm``, ``central_error``, and ``scale``, ‖X⁺y‖/d.
    """
    problem = linear.regression(dimension, nodes.count, nodes.samples, seed)
    local = linear.regression_steps(problem, regression.local_steps, regression.lr)
    path = linear.federate(local, dimension, regression.rounds)
    closed_form = linear.closed_form(problem, regression.rounds, regression.local_steps, regression.lr)
    closed_form_in_the_limit = linear.closed_form(problem, regression.rounds)
    central = linear.centralized(problem, regression.central_steps, regression.lr, classify=False)
    least_norm = linear.least_norm(problem)

    def distance(path_of_models: Tensor, target: Tensor) -> Tensor:
        norm: Tensor = (path_of_models - target).norm(dim=-1)
        return norm / dimension

    return _to_lists(
        closed=distance(path, closed_form),
        limit=distance(path, closed_form_in_the_limit),
        least_norm=distance(path, least_norm),
        central=distance(path, central),
        error=_mean_error(path, problem.truth),
        central_least_norm=(central - least_norm).norm() / dimension,
        central_error=_mean_error(central, problem.truth),
        scale=least_norm.norm() / dimension,
    )


def _mean_error(w: Tensor, truth: Tensor) -> Tensor:
    """Return the mean over nodes of ‖w − w_i*‖²/d, for models (..., d)."""
    return (w.unsqueeze(-2) - truth).square().mean((-1, -2))


def classification_at(dimension: int, nodes: Nodes, classification: ClassificationSettings, seed: int) -> Curves:
    """Return the curves of one dimension by round, from the first round on, since w⁰ = 0 has no direction.

    For each of ``plain`` and ``modified`` Local-GD: the distances in direction ``…_central`` and ``…_svm``, to the
    centralized model and to the hard-margin SVM, and ``…_accuracy``. With one value: ``central_svm``,
    ``central_accuracy`` and ``svm_accuracy``.
    """
    problem = linear.classification(dimension, nodes.count, nodes.samples, classification.noise, seed)
    return _classification_curves(problem, classification)


def _classification_curves(
    problem: linear.NodeData, curve_settings: ClassificationSettings | DirichletSettings
) -> Curves:
    """Return the curves of :func:`classification_at` for any classification."""
    dimension = problem.x.shape[-1]
    local = linear.classification_steps(problem, curve_settings.local_steps, curve_settings.lr, curve_settings.decay)
    central = linear.centralized(problem, curve_settings.central_steps, curve_settings.lr, classify=True)
    svm = linear.max_margin(problem)
    curves: dict[str, Tensor] = {}
    rules: dict[str, ServerRule | None] = {"plain": None, "modified": ModifiedLocalGD()}
    for name, rule in rules.items():
        path = linear.federate(local, dimension, curve_settings.rounds, rule)[1:]
        curves[f"{name}_central"] = linear.direction_distance(path, central)
        curves[f"{name}_svm"] = linear.direction_distance(path, svm)
        curves[f"{name}_accuracy"] = linear.accuracy(path, problem.truth)
    curves["central_svm"] = linear.direction_distance(central, svm)
    curves["central_accuracy"] = linear.accuracy(central, problem.truth)
    curves["svm_accuracy"] = linear.accuracy(svm, problem.truth)
    return _to_lists(**curves)


def dirichlet_curves(dirichlet: DirichletSettings, seed: int, advance: Advance) -> dict[str, Curves]:
    """Return the curves of :func:`classification_at` for nodes in Dirichlet proportions, by the text of α.

    They also have, by node, the number of ``samples`` and of those labelled 1, ``positive``.
    """
    curves_of_alpha: dict[str, Curves] = {}
    for alpha in dirichlet.alphas:
        problem = linear.dirichlet_classification(dirichlet.dimension, alpha, dirichlet.nodes, dirichlet.samples, seed)
        curves = _classification_curves(problem, dirichlet)
        assert problem.sizes is not None
        counts = _to_lists(samples=problem.sizes.double(), positive=(problem.y > 0).double().sum(1))
        curves_of_alpha[f"{alpha:g}"] = curves | counts
        advance(f"Dirichlet, α = {alpha:g}")
    return curves_of_alpha


def _to_lists(**tensors: Tensor) -> Curves:
    """Return tensors as lists; a number becomes a list of one."""
    return {name: tensor.reshape(-1).tolist() for name, tensor in tensors.items()}


def by_dimension(
    curves_at: Callable[[int, Nodes, Any, int], Curves],
    nodes: Nodes,
    settings: RegressionSettings | ClassificationSettings,
    seed: int,
    advance: Advance,
) -> dict[str, Curves]:
    """Return the curves by round at one dimension, and the last value of each curve at several dimensions.

    Args:
        curves_at: Returns the curves of one dimension: :func:`regression_at` or :func:`classification_at`.
        nodes: The nodes.
        settings: Settings with the dimensions.
        seed: Seed of all draws.
        advance: Called after each dimension.

    Returns:
        ``{"rounds": curves, "dimensions": curves}``; the latter with the dimensions themselves as ``dimension``.
    """
    curves_of: dict[int, Curves] = {}
    for dimension in sorted({settings.dimension, *settings.dimensions}):
        curves_of[dimension] = curves_at(dimension, nodes, settings, seed)
        advance(f"d = {dimension}")
    by_round = curves_of[settings.dimension]
    ends: Curves = {"dimension": [float(dimension) for dimension in settings.dimensions]}
    for name in by_round:
        ends[name] = [curves_of[dimension][name][-1] for dimension in settings.dimensions]
    return {"rounds": by_round, "dimensions": ends}
