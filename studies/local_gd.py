# SPDX-License-Identifier: Apache-2.0
"""``perada study local-gd``: where many local steps lead (Zhu, Vardhan & Mazumdar, Figures 1 and 2).

The paper is https://arxiv.org/abs/2412.07971v1; what is computed is in ``local_gd_linear``, ``local_gd_curves`` and
``local_gd_head``. Here are the options, the files and the figure.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from tqdm import tqdm

from perada.core.checks import check_installed
from perada.results.report import table
from perada.studies.drawing import check_output, new_figure, write
from perada.studies.local_gd_curves import (
    ClassificationSettings,
    Curves,
    DirichletSettings,
    Nodes,
    RegressionSettings,
    by_dimension,
    classification_at,
    dirichlet_curves,
    regression_at,
)
from perada.studies.local_gd_head import HeadSettings, head_curves, load_images

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NODES = Nodes()
REGRESSION = RegressionSettings()
CLASSIFICATION = ClassificationSettings()
DIRICHLET = DirichletSettings()
HEAD = HeadSettings()
"""The paper's settings, where it gives them."""

# Settings of --quick.
QUICK_NODES = Nodes(count=5, samples=10)
QUICK_REGRESSION = RegressionSettings(
    dimension=200, dimensions=(30, 50, 70, 100, 200), rounds=30, local_steps=100, lr=1e-3, central_steps=500
)
QUICK_CLASSIFICATION = ClassificationSettings(
    dimension=200, dimensions=(75, 100, 200), rounds=30, lr=0.05, central_steps=2000
)
QUICK_DIRICHLET = DirichletSettings(
    nodes=5, samples=50, dimension=200, rounds=30, local_steps=100, lr=0.05, central_steps=3000
)
QUICK_HEAD = HeadSettings(dataset="digits", rounds=10, local_steps=10)


@dataclass(frozen=True)
class Line:
    """A curve of a figure.

    Attributes:
        label: Its name in the legend.
        x, y: Its points.
        style: matplotlib's format.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a figure.

    Attributes:
        title: Title, without the letter.
        xlabel: Label of the x-axis.
        lines: Its curves.
        log_y: Whether the y-axis is logarithmic.
    """

    title: str
    xlabel: str
    lines: list[Line]
    log_y: bool = False


@dataclass(frozen=True)
class SummaryRow:
    """A row of the printed table: a number for Local-GD and for Modified Local-GD, None if there is none."""

    name: str
    plain: float
    modified: float | None = None


def study_local_steps(
    *,
    output: Path,
    seed: int = 0,
    nodes: Nodes = NODES,
    regression: RegressionSettings = REGRESSION,
    classification: ClassificationSettings = CLASSIFICATION,
    dirichlet: DirichletSettings = DIRICHLET,
    head: HeadSettings = HEAD,
    quick: bool = False,
) -> dict[str, Any]:
    """Limits of local gradient descent with many local steps: linear models, and a head on a frozen backbone.

    Args:
        output: Folder to write local_gd.json, local_gd.png and local_gd_dirichlet.png to.
        seed: Seed of all draws.
        nodes: The nodes of the linear problems.
        regression: The linear regression.
        classification: The linear classification.
        dirichlet: The linear classification whose samples are divided in Dirichlet proportions.
        head: The head of a pretrained backbone.
        quick: Small problems that take seconds and need no files; overrides other options.

    Returns:
        ``settings``, ``seconds`` each part took, and the curves of each part.

    Raises:
        ValueError: If an option cannot be used.
        FileExistsError: If ``output`` is a file.
        FileNotFoundError: If images or weights are missing.
        ModuleNotFoundError: If matplotlib or scikit-learn is not installed.
    """
    if quick:
        nodes = QUICK_NODES
        regression = QUICK_REGRESSION
        classification = QUICK_CLASSIFICATION
        dirichlet = QUICK_DIRICHLET
        head = QUICK_HEAD
    check_output(output)
    check_installed("this study", "studies", "sklearn")  # otherwise missed only after minutes, by the first SVM
    load_images(head)  # raises at once if they are missing

    num_dimensions = len({regression.dimension, *regression.dimensions})
    num_dimensions += len({classification.dimension, *classification.dimensions})
    head_steps = 4  # features and three heads
    num_steps = num_dimensions + len(dirichlet.alphas) + head_steps
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with tqdm(total=num_steps, desc="local-gd", dynamic_ncols=True) as bar:

        def advance(step: str) -> None:
            bar.set_postfix_str(step)
            bar.update()

        experiments: dict[str, Callable[[], dict[str, Any]]] = {
            "regression": partial(by_dimension, regression_at, nodes, regression, seed, advance),
            "classification": partial(by_dimension, classification_at, nodes, classification, seed, advance),
            "dirichlet": partial(dirichlet_curves, dirichlet, seed, advance),
            "head": partial(head_curves, head, seed, advance),
        }
        for name, compute in experiments.items():
            started_at = time.perf_counter()
            results[name] = compute()
            seconds[name] = round(time.perf_counter() - started_at, 1)
    settings = {
        "seed": seed,
        "nodes": asdict(nodes),
        "regression": asdict(regression),
        "classification": asdict(classification),
        "dirichlet": asdict(dirichlet),
        "head": asdict(head),
    }
    content = {"settings": settings, "seconds": seconds, **results}
    print(summarize_curves(results))
    figures = {"local_gd": draw_panels(results), "local_gd_dirichlet": draw_dirichlet(results["dirichlet"])}
    write(output, "local_gd", json.dumps(content), figures)
    return content


def draw_panels(results: dict[str, Any]) -> "Figure":
    """Draw panels (a) to (i) of the paper's Figure 1.

    Args:
        results: What :func:`study_local_steps` returns.
    """
    figure = new_figure(9.8, 7.8)
    panels = [
        *_regression_panels(results["regression"]),
        *_classification_panels(results["classification"]),
        *_head_panels(results["head"]),
    ]
    _draw_panels(figure.subplots(3, 3).flat, panels)
    return figure


def draw_dirichlet(curves_of_alpha: dict[str, Curves]) -> "Figure":
    """Draw the panels of the paper's Figure 2: for each α, distance of directions and accuracy by round."""
    figure = new_figure(6.8, 2.6 * len(curves_of_alpha))
    panels = []
    for alpha, curves in curves_of_alpha.items():
        rounds = _rounds_of(curves["plain_central"])
        distances = _distances_to_central(curves)
        accuracies = [
            Line("G", rounds, curves["plain_accuracy"]),
            Line("G-Mod", rounds, curves["modified_accuracy"], "--"),
            Line("C", rounds, curves["central_accuracy"] * len(rounds), "k:"),
            Line("SVM", rounds, curves["svm_accuracy"] * len(rounds), "-."),
        ]
        panels.append(Panel(f"α = {alpha}: distance of directions", "round", distances))
        panels.append(Panel(f"α = {alpha}: expected accuracy", "round", accuracies))
    _draw_panels(figure.subplots(len(curves_of_alpha), 2).flat, panels)
    return figure


def _rounds_of(curve: Sequence[float]) -> range:
    """Return the rounds of a curve that begins after the first round."""
    return range(1, len(curve) + 1)


def _draw_panels(all_axes: "Iterable[Axes]", panels: Sequence[Panel]) -> None:
    """Draw each panel on its axes, with letters from (a)."""
    for letter, axes, panel in zip(ascii_lowercase, all_axes, panels, strict=False):
        for line in panel.lines:
            axes.plot(line.x, line.y, line.style, label=line.label, markersize=3, linewidth=1.2)
        axes.set_title(f"({letter}) {panel.title}", fontsize="medium")
        axes.set_xlabel(panel.xlabel)
        if panel.log_y:
            axes.set_yscale("log")
        axes.legend(fontsize="small")


def _regression_panels(curves: dict[str, Curves]) -> list[Panel]:
    """Return panels (a) to (c)."""
    by_round = curves["rounds"]
    rounds = range(len(by_round["central"]))
    distances_by_round = [
        Line("G – C", rounds, by_round["central"]),
        Line("G – closed form, L steps", rounds, by_round["closed"], "--"),
        Line("G – closed form, L → ∞", rounds, by_round["limit"], ":"),
    ]
    ends = curves["dimensions"]
    dimensions = ends["dimension"]
    distances_by_dimension = [
        Line("G – C", dimensions, ends["central"], "o-"),
        Line("G – closed form, L steps", dimensions, ends["closed"], "s--"),
        Line("G – closed form, L → ∞", dimensions, ends["limit"], "d:"),
        Line("C – X⁺y", dimensions, ends["central_least_norm"], "^-."),
    ]
    errors = [
        Line("G", dimensions, ends["error"], "o-"),
        Line("C", dimensions, ends["central_error"], "^-."),
    ]
    return [
        Panel("regression: ‖w₁ − w₂‖/d", "round", distances_by_round),
        Panel("regression: ‖w₁ − w₂‖/d", "dimension d", distances_by_dimension, log_y=True),
        Panel("regression: generalisation error / d", "dimension d", errors, log_y=True),
    ]


def _classification_panels(curves: dict[str, Curves]) -> list[Panel]:
    """Return panels (d) to (g)."""
    by_round = curves["rounds"]
    rounds = _rounds_of(by_round["plain_central"])
    distances_by_round = [
        Line("G – C", rounds, by_round["plain_central"]),
        Line("G-Mod – C", rounds, by_round["modified_central"]),
        Line("G – SVM", rounds, by_round["plain_svm"], "--"),
        Line("G-Mod – SVM", rounds, by_round["modified_svm"], "--"),
        Line("C – SVM", rounds, by_round["central_svm"] * len(rounds), "k:"),
    ]
    ends = curves["dimensions"]
    dimensions = ends["dimension"]
    distances_by_dimension = [
        Line("G – C", dimensions, ends["plain_central"], "o-"),
        Line("G-Mod – C", dimensions, ends["modified_central"], "o-"),
    ]
    directions_to_svm = [
        Line("G – SVM", dimensions, ends["plain_svm"], "o-"),
        Line("G-Mod – SVM", dimensions, ends["modified_svm"], "o-"),
        Line("C – SVM", dimensions, ends["central_svm"], "k^:"),
    ]
    accuracies = [
        Line("G", dimensions, ends["plain_accuracy"], "o-"),
        Line("G-Mod", dimensions, ends["modified_accuracy"], "s--"),
        Line("C", dimensions, ends["central_accuracy"], "k^:"),
        Line("SVM", dimensions, ends["svm_accuracy"], "d-."),
    ]
    return [
        Panel("classification: distance of directions", "round", distances_by_round),
        Panel("classification: distance of directions", "dimension d", distances_by_dimension),
        Panel("classification: direction to the SVM", "dimension d", directions_to_svm),
        Panel("classification: expected accuracy", "dimension d", accuracies),
    ]


def _distances_to_central(curves: Curves) -> list[Line]:
    """Return the distances of both global models to the centralized one, by round."""
    rounds = _rounds_of(curves["plain_central"])
    return [
        Line("G – C", rounds, curves["plain_central"]),
        Line("G-Mod – C", rounds, curves["modified_central"]),
    ]


def _head_panels(curves: Curves) -> list[Panel]:
    """Return panels (h) and (i)."""
    rounds = _rounds_of(curves["plain_central"])
    distances = _distances_to_central(curves)
    accuracies = [
        Line("G", rounds, curves["plain_accuracy"]),
        Line("G-Mod", rounds, curves["modified_accuracy"]),
        Line("C, same steps", rounds, curves["central_accuracy"]),
    ]
    return [
        Panel("head: direction to the centralized one", "round", distances),
        Panel("head: test accuracy", "round", accuracies),
    ]


def summarize_curves(results: dict[str, Any]) -> str:
    """Return a table of the ends of the curves.

    Args:
        results: What :func:`study_local_steps` returns.
    """
    regression = results["regression"]["rounds"]
    scale = regression["scale"][0]
    rows = [
        SummaryRow("regression: largest distance to the closed form, relative", max(regression["closed"]) / scale),
        SummaryRow("regression: distance to X⁺y at the end, relative", regression["least_norm"][-1] / scale),
    ]
    rows += _classification_rows(results["classification"]["rounds"])
    rows += _dirichlet_rows(results["dirichlet"])
    rows += _head_rows(results["head"])
    body = []
    for row in rows:
        modified = "" if row.modified is None else f"{row.modified:.4g}"
        body.append([row.name, f"{row.plain:.4g}", modified])
    return table(["", "Local-GD", "modified"], body)


def _last_row(name: str, curves: Curves, curve: str) -> SummaryRow:
    """Return a row with the last value of a curve for Local-GD and for Modified Local-GD."""
    return SummaryRow(name, curves[f"plain_{curve}"][-1], curves[f"modified_{curve}"][-1])


def _classification_rows(curves: Curves) -> list[SummaryRow]:
    return [
        _last_row("classification: direction to C", curves, "central"),
        _last_row("classification: direction to the SVM", curves, "svm"),
    ]


def _dirichlet_rows(curves_of_alpha: dict[str, Curves]) -> list[SummaryRow]:
    rows = []
    for alpha, curves in curves_of_alpha.items():
        central_accuracy = curves["central_accuracy"][-1]
        rows.append(_last_row(f"Dirichlet {alpha}: direction to C", curves, "central"))
        rows.append(_last_row(f"Dirichlet {alpha}: expected accuracy (C {central_accuracy:.4f})", curves, "accuracy"))
    return rows


def _head_rows(curves: Curves) -> list[SummaryRow]:
    central_accuracy = curves["central_accuracy"][-1]
    return [
        _last_row("head: direction to C", curves, "central"),
        _last_row(f"head: accuracy (C {central_accuracy:.4f})", curves, "accuracy"),
    ]


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study local-gd``."""
    parser.add_function_arguments(study_local_steps, as_group=False, skip={"quick"})
    parser.add_argument(
        "--quick", action="store_true", help="Solve small problems within seconds; overrides other options."
    )
    study_local_steps(**parser.instantiate(parser.parse_args(words)))
