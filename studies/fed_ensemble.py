# SPDX-License-Identifier: Apache-2.0
"""``perada study fed-ensemble``: Table 1 and Figure 2 of Fed-ensemble (Shi et al., 2021)."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from tqdm import tqdm

from perada.results.report import table
from perada.studies.drawing import check_output, new_figure, write
from perada.studies.toy_regression import (
    ModeSettings,
    Problem,
    basis,
    decompose,
    local_gain,
    make_problem,
    train,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 400
"""Points of [-1, 1] that bias and variance are averaged over."""


@dataclass(frozen=True)
class Published:
    """Bias and variance as published."""

    bias: float
    variance: float


PAPER = {
    1: Published(0.109, 0.0496),
    2: Published(0.117, 0.0115),
    10: Published(0.112, 0.0063),
    20: Published(0.113, 0.0045),
    40: Published(0.112, 0.0042),
}
"""The paper's Table 1 by K, for comparison only."""


@dataclass(frozen=True)
class GridPredictions:
    """Predictions on the grid.

    Attributes:
        modes: Predictions of the modes of the first re-run (K, G).
        averaged: Their means in all re-runs (R, G).
    """

    modes: Tensor
    averaged: Tensor


def summarize_modes(results_of_modes: Sequence[dict[str, Any]]) -> str:
    """Return a table of the results beside the paper's.

    Args:
        results_of_modes: What :func:`study_modes` returns.
    """
    header = ["K", "rounds", "bias", "squared bias", "variance", "× K", "of one mode"]
    header += ["bias (paper)", "variance (paper)"]
    body = []
    for row in results_of_modes:
        modes = row["modes"]
        cells = [
            str(modes),
            str(row["rounds"]),
            f"{row['bias']:.3f}",
            f"{row['squared_bias']:.4f}",
            f"{row['variance']:.4f} ± {row['variance_se']:.4f}",
            f"{modes * row['variance']:.4f}",
            f"{row['mode_variance']:.4f}",
        ]
        if modes in PAPER:
            cells += [f"{PAPER[modes].bias:.3f}", f"{PAPER[modes].variance:.4f}"]
        else:
            cells += ["–", "–"]
        body.append(cells)
    return table(header, body)


def draw_modes(
    problem: Problem, x: Tensor, predictions: dict[int, GridPredictions], results_of_modes: Sequence[dict[str, Any]]
) -> "Figure":
    """Draw the first re-run's modes and their mean, the re-runs of the smallest K, and the variance against K.

    Args:
        problem: The data.
        x: The grid (G,).
        predictions: Predictions by K.
        results_of_modes: What :func:`study_modes` returns.
    """
    figure = new_figure(11, 3.6)
    axes_of_modes, axes_of_reruns, axes_of_variance = figure.subplots(1, 3)
    largest = max(predictions)
    _draw_predictions(axes_of_modes, problem, x, predictions[largest].averaged[0], predictions[largest].modes, largest)
    axes_of_modes.set_title(f"K = {largest}: modes of one run (± 2 s.d.)")
    smallest = min(predictions)
    averaged = predictions[smallest].averaged
    _draw_predictions(axes_of_reruns, problem, x, averaged[0], averaged, smallest)
    axes_of_reruns.set_title(f"K = {smallest}: re-runs (± 2 s.d.)")
    _draw_variance(axes_of_variance, results_of_modes)
    return figure


def _draw_predictions(
    axes: "Axes", problem: Problem, x: Tensor, prediction: Tensor, others: Tensor, modes: int
) -> None:
    """Draw a prediction (G,) with the truth and some data, and the mean of others (…, G) ± 2 standard deviations."""
    mean = others.mean(0)
    width = 2 * others.std(0)
    axes.fill_between(x, mean - width, mean + width, color="tab:green", alpha=0.3)
    axes.plot(x, torch.sin(2 * math.pi * x), "k--", linewidth=1, label="E[y | x]")
    axes.plot(x, prediction, "tab:blue", label="averaged" if modes > 1 else "one run")
    axes.plot(problem.x[:20].flatten(), problem.y[:20].flatten(), ".", color="tab:red", markersize=3)
    axes.set(xlabel="x", ylim=(-2.5, 2.5))
    axes.legend(loc="lower left")


def _draw_variance(axes: "Axes", results_of_modes: Sequence[dict[str, Any]]) -> None:
    """Draw the variance against K, with the paper's and with a line of slope -1."""
    modes = [row["modes"] for row in results_of_modes]
    variances = [row["variance"] for row in results_of_modes]
    axes.loglog(modes, variances, "o-", label="here")
    axes.loglog(list(PAPER), [published.variance for published in PAPER.values()], "s:", label="paper")
    axes.loglog(modes, [variances[0] * modes[0] / k for k in modes], "k--", linewidth=1, label="∝ 1/K")
    axes.set(title="variance over re-runs", xlabel="modes K")
    axes.legend()


def study_modes(
    *, output: Path, modes: Sequence[int] = tuple(PAPER), quick: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    """Bias and variance of Fed-ensemble's prediction on its toy regression, against the number of modes K.

    Args:
        output: Folder to write fed_ensemble.json and fed_ensemble.png to.
        modes: Numbers of modes K to compare, ascending.
        quick: 10 re-runs of 20 rounds for K = 1, 2 and 4; overrides other options.
        **settings: See :class:`~perada.studies.toy_regression.ModeSettings`.

    Returns:
        For each K: modes, rounds, what :func:`decompose` returns, and ``mode_variance``, that of mode 0 alone.

    Raises:
        ValueError: If an option cannot be used.
        FileExistsError: If ``output`` is a file.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    training = ModeSettings(**settings)
    if quick:
        modes = (1, 2, 4)
        training = replace(training, reruns=10, rounds=20, ages=None)
    if not modes or min(modes) < 1 or list(modes) != sorted(set(modes)):
        raise ValueError(f"modes={list(modes)} cannot be compared; list distinct integers >= 1 in ascending order")
    check_output(output)
    problem = make_problem(training.seed)
    local_gain(basis(problem.x, problem.centres), training.lr, training.local_steps)  # raises if the rate diverges
    x = (torch.arange(GRID, dtype=torch.float64) + 0.5) * 2 / GRID - 1
    phi = basis(x, problem.centres)
    truth = torch.sin(2 * math.pi * x)
    rows = []
    predictions = {}
    num_rounds = sum(training.length(number) for number in modes)
    with tqdm(total=num_rounds, desc="rounds", dynamic_ncols=True) as bar:
        for number in modes:
            bar.set_postfix(modes=number)
            weights = train(problem, training, number, bar)
            averaged = weights.mean(1) @ phi.mT
            variance_of_mode = decompose(weights[:, 0] @ phi.mT, truth)["variance"]
            row = {
                "modes": number,
                "rounds": training.length(number),
                **decompose(averaged, truth),
                "mode_variance": variance_of_mode,
            }
            rows.append(row)
            predictions[number] = GridPredictions(modes=weights[0] @ phi.mT, averaged=averaged)
    print(summarize_modes(rows))
    content = json.dumps({"settings": asdict(training), "rows": rows}, indent=1)
    write(output, "fed_ensemble", content, {"fed_ensemble": draw_modes(problem, x, predictions, rows)})
    return rows


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study fed-ensemble``."""
    parser.add_function_arguments(study_modes, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="10 re-runs of 20 rounds for K = 1, 2 and 4.")
    study_modes(**parser.parse_args(words))
