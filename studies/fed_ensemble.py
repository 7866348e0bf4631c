# SPDX-License-Identifier: Apache-2.0
"""``perada study fed-ensemble``: Table 1 and Figure 2 of Fed-ensemble (Shi et al., 2021)."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from tqdm import tqdm

from perada.results.report import table
from perada.studies.drawing import check_output, new_figure, write
from perada.studies.toy_regression import (
    Problem,
    Settings,
    basis,
    decompose,
    local_gain,
    make_problem,
    train,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID = 400
"""Points of [-1, 1] that bias and variance are averaged over."""
PAPER = {1: (0.109, 0.0496), 2: (0.117, 0.0115), 10: (0.112, 0.0063), 20: (0.113, 0.0045), 40: (0.112, 0.0042)}
"""Bias and variance by K as published (Table 1), for comparison only."""


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The rows beside the paper's, as a table."""
    header = ["K", "rounds", "bias", "squared bias", "variance", "× K", "of one mode"]
    header += ["bias (paper)", "variance (paper)"]
    body = []
    for row in rows:
        modes, published = row["modes"], PAPER.get(row["modes"])
        paper = [f"{published[0]:.3f}", f"{published[1]:.4f}"] if published else ["–", "–"]
        variance = f"{row['variance']:.4f} ± {row['variance_se']:.4f}"
        scaled, single = f"{modes * row['variance']:.4f}", f"{row['mode_variance']:.4f}"
        biases = [f"{row['bias']:.3f}", f"{row['squared_bias']:.4f}"]
        body.append([str(modes), str(row["rounds"]), *biases, variance, scaled, single, *paper])
    return table(header, body)


def draw(
    problem: Problem, x: Tensor, curves: dict[int, tuple[Tensor, Tensor]], rows: Sequence[dict[str, Any]]
) -> "Figure":
    """Draw the first re-run's modes and their mean, FedAvg's re-runs, and the variance against K.

    ``x`` is the grid (G,); ``curves``, by K, predictions of the modes of the first re-run (K, G) and averaged
    predictions of all (R, G).
    """
    figure = new_figure(11, 3.6)
    axes = figure.subplots(1, 3)
    least, most = min(curves), max(curves)
    panels = (
        (most, curves[most][0], f"K = {most}: modes of one run (± 2 s.d.)"),
        (least, curves[least][1], f"K = {least}: re-runs (± 2 s.d.)"),
    )
    for axis, (modes, spread, title) in zip(axes, panels, strict=False):
        middle, width = spread.mean(0), 2 * spread.std(0)
        axis.fill_between(x, middle - width, middle + width, color="tab:green", alpha=0.3)
        axis.plot(x, torch.sin(2 * math.pi * x), "k--", linewidth=1, label="E[y | x]")
        axis.plot(x, curves[modes][1][0], "tab:blue", label="averaged" if modes > 1 else "one run")
        axis.plot(problem.x[:20].flatten(), problem.y[:20].flatten(), ".", color="tab:red", markersize=3)
        axis.set(title=title, xlabel="x", ylim=(-2.5, 2.5))
        axis.legend(loc="lower left")
    numbers, variances = [row["modes"] for row in rows], [row["variance"] for row in rows]
    axes[2].loglog(numbers, variances, "o-", label="here")
    axes[2].loglog(list(PAPER), [variance for _, variance in PAPER.values()], "s:", label="paper")
    axes[2].loglog(numbers, [variances[0] * numbers[0] / k for k in numbers], "k--", linewidth=1, label="∝ 1/K")
    axes[2].set(title="variance over re-runs", xlabel="modes K")
    axes[2].legend()
    return figure


def study(
    *, output: Path, modes: Sequence[int] = tuple(PAPER), quick: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    """Bias and variance of Fed-ensemble's prediction on its toy regression, against the number of modes K.

    Args:
        output: Folder to write fed_ensemble.json and fed_ensemble.png to.
        modes: The K to compare, ascending.
        quick: 10 re-runs of 20 rounds for K = 1, 2 and 4, whatever else is said.
        **settings: See :class:`~perada.studies.toy_regression.Settings`.

    Returns:
        For each K: modes, rounds, what :func:`decompose` returns, and ``mode_variance``, that of mode 0 alone.

    Raises:
        ValueError: If an option cannot be used.
        FileExistsError: If ``output`` is a file.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    given = Settings(**settings)
    if quick:
        modes, given = (1, 2, 4), replace(given, reruns=10, rounds=20, ages=None)
    if not modes or min(modes) < 1 or list(modes) != sorted(set(modes)):
        raise ValueError(f"modes={list(modes)} cannot be compared; give different numbers from 1, ascending")
    check_output(output)
    problem = make_problem(given.seed)
    local_gain(basis(problem.x, problem.centres), given.lr, given.local_steps)  # refuses a rate that diverges
    x = (torch.arange(GRID, dtype=torch.float64) + 0.5) * 2 / GRID - 1
    phi, truth = basis(x, problem.centres), torch.sin(2 * math.pi * x)
    rows, curves = [], {}
    with tqdm(total=sum(map(given.length, modes)), desc="rounds", dynamic_ncols=True) as bar:
        for count in modes:
            bar.set_postfix(modes=count)
            weights = train(problem, given, count, bar)
            averaged = weights.mean(1) @ phi.mT
            alone = decompose(weights[:, 0] @ phi.mT, truth)["variance"]
            scores = decompose(averaged, truth) | {"mode_variance": alone}
            rows.append({"modes": count, "rounds": given.length(count), **scores})
            curves[count] = (weights[0] @ phi.mT, averaged)
    print(summary(rows))
    numbers = json.dumps({"settings": asdict(given), "rows": rows}, indent=1)
    write(output, "fed_ensemble", numbers, {"fed_ensemble": draw(problem, x, curves, rows)})
    return rows


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study fed-ensemble``."""
    parser.add_function_arguments(study, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="10 re-runs of 20 rounds for K = 1, 2 and 4.")
    study(**parser.parse_args(words))
