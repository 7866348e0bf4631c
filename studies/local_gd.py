# SPDX-License-Identifier: Apache-2.0
"""``perada study local-gd``: where many local steps lead (Zhu, Vardhan & Mazumdar, Figures 1 and 2).

The paper is https://arxiv.org/abs/2412.07971v1; what is computed is in ``local_gd_linear``, ``local_gd_curves`` and
``local_gd_head``. Here are the options, the files and the figure.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser
from tqdm import tqdm

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
QUICK: dict[str, Any] = {
    "nodes": Nodes(5, 10),
    "regression": RegressionSettings(
        200, (30, 50, 70, 100, 200), rounds=30, local_steps=100, lr=1e-3, central_steps=500
    ),
    "classification": ClassificationSettings(200, (75, 100, 200), rounds=30, lr=0.05, central_steps=2000),
    "dirichlet": DirichletSettings(
        nodes=5, samples=50, dimension=200, rounds=30, local_steps=100, lr=0.05, central_steps=3000
    ),
    "head": HeadSettings("digits", rounds=10, local_steps=10),
}
"""Settings of ``--quick``."""

TO_CENTRAL = {"plain_central": "G – C", "modified_central": "G-Mod – C"}
ACCURACIES = {"plain_accuracy": "G", "modified_accuracy": "G-Mod", "central_accuracy": "C", "svm_accuracy": "SVM"}
"""Labels of curves of a classification."""

Line = tuple[str, Sequence[float], list[float], str]
"""Label, x, y and matplotlib's format of a curve."""
Panel = tuple[str, str, bool, list[Line]]
"""Title, label of x, whether y is logarithmic, curves."""


def study(
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
    """What local gradient descent with many local steps converges to: linear models, and a head on a frozen backbone.

    Args:
        output: Folder to write local_gd.json, local_gd.png and local_gd_dirichlet.png to.
        seed: Of all draws.
        nodes: The nodes of the linear problems.
        regression: The linear regression.
        classification: The linear classification.
        dirichlet: The linear classification whose samples are divided in Dirichlet proportions.
        head: The head of a pretrained backbone.
        quick: Small problems, whatever else is said: some seconds, and no files needed.

    Returns:
        ``settings``, ``seconds`` each part took, and the curves of each part.

    Raises:
        ValueError: If an option cannot be used.
        FileExistsError: If ``output`` is a file.
        FileNotFoundError: If images or weights are missing.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    options: dict[str, Any] = {
        "nodes": nodes,
        "regression": regression,
        "classification": classification,
        "dirichlet": dirichlet,
        "head": head,
    }
    if quick:
        options = QUICK
        nodes, regression, classification, dirichlet, head = options.values()
    check_output(output)
    load_images(head)  # says at once if they are missing
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    sizes = [len({problem.dimension, *problem.dimensions}) for problem in (regression, classification)]
    with tqdm(total=sum(sizes) + len(dirichlet.alphas) + 4, desc="local-gd", dynamic_ncols=True) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "regression": partial(by_dimension, regression_at, nodes, regression, seed, advance),
            "classification": partial(by_dimension, classification_at, nodes, classification, seed, advance),
            "dirichlet": partial(dirichlet_curves, dirichlet, seed, advance),
            "head": partial(head_curves, head, seed, advance),
        }
        for name, compute in parts.items():
            began = time.perf_counter()
            found[name] = compute()
            seconds[name] = round(time.perf_counter() - began, 1)
    settings = {"seed": seed, **{name: asdict(value) for name, value in options.items()}}
    written = {"settings": settings, "seconds": seconds, **found}
    print(summary(found))
    figures = {"local_gd": draw(found), "local_gd_dirichlet": draw_dirichlet(found["dirichlet"])}
    write(output, "local_gd", json.dumps(written), figures)
    return written


def draw(found: dict[str, Any]) -> "Figure":
    """Draw panels (a) to (i) of the paper's Figure 1, of what :func:`study` returns."""
    figure = new_figure(9.8, 7.8)
    panels = [*_regression_panels(found["regression"]), *_classification_panels(found["classification"])]
    panels += _head_panels(found["head"])
    _draw_panels(figure.subplots(3, 3).flat, panels)
    return figure


def draw_dirichlet(found: dict[str, Curves]) -> "Figure":
    """Draw the panels of the paper's Figure 2: for each α, distance of directions and accuracy by round."""
    figure = new_figure(6.8, 2.6 * len(found))
    panels = []
    for alpha, curves in found.items():
        rounds = range(1, len(curves["plain_central"]) + 1)
        distances = _lines(curves, TO_CENTRAL, ["-", "-"], rounds)
        constants = {name: curves[name] * len(rounds) for name in ("central_accuracy", "svm_accuracy")}
        accuracies = _lines(curves | constants, ACCURACIES, ["-", "--", "k:", "-."], rounds)
        panels += [
            (f"α = {alpha}: distance of directions", "round", False, distances),
            (f"α = {alpha}: expected accuracy", "round", False, accuracies),
        ]
    _draw_panels(figure.subplots(len(found), 2).flat, panels)
    return figure


def _draw_panels(axes: "Iterable[Axes]", panels: Sequence[Panel]) -> None:
    """Draw each panel on its axis, with letters from (a)."""
    for letter, axis, (title, xlabel, log, lines) in zip("abcdefghijklmnopqrstuvwxyz", axes, panels, strict=False):
        for label, x, y, style in lines:
            axis.plot(x, y, style, label=label, markersize=3, linewidth=1.2)
        axis.set_title(f"({letter}) {title}", fontsize="medium")
        axis.set_xlabel(xlabel)
        if log:
            axis.set_yscale("log")
        axis.legend(fontsize="small")


def _regression_panels(found: dict[str, Curves]) -> list[Panel]:
    rounds, by_d = found["rounds"], found["dimensions"]
    labels = {"central": "G – C", "closed": "G – closed form, L steps", "limit": "G – closed form, L → ∞"}
    distances = _lines(rounds, labels, ["-", "--", ":"], range(len(rounds["central"])))
    ends = labels | {"central_least_norm": "C – X⁺y"}
    errors = {"error": "G", "central_error": "C"}
    return [
        ("regression: ‖w₁ − w₂‖/d", "round", False, distances),
        ("regression: ‖w₁ − w₂‖/d", "dimension d", True, _lines(by_d, ends, ["o-", "s--", "d:", "^-."])),
        ("regression: generalisation error / d", "dimension d", True, _lines(by_d, errors, ["o-", "^-."])),
    ]


def _classification_panels(found: dict[str, Curves]) -> list[Panel]:
    by_d = found["dimensions"]
    ks = range(1, len(found["rounds"]["plain_central"]) + 1)
    rounds = found["rounds"] | {"central_svm": found["rounds"]["central_svm"] * len(ks)}  # a constant
    to_svm = {"plain_svm": "G – SVM", "modified_svm": "G-Mod – SVM", "central_svm": "C – SVM"}
    distance = "classification: distance of directions"
    by_round = _lines(rounds, TO_CENTRAL | to_svm, ["-", "-", "--", "--", "k:"], ks)
    svm = _lines(by_d, to_svm, ["o-", "o-", "k^:"])
    return [
        (distance, "round", False, by_round),
        (distance, "dimension d", False, _lines(by_d, TO_CENTRAL, ["o-", "o-"])),
        ("classification: direction to the SVM", "dimension d", False, svm),
        (
            "classification: expected accuracy",
            "dimension d",
            False,
            _lines(by_d, ACCURACIES, ["o-", "s--", "k^:", "d-."]),
        ),
    ]


def _head_panels(found: Curves) -> list[Panel]:
    ks = range(1, len(found["plain_central"]) + 1)
    right = {"plain_accuracy": "G", "modified_accuracy": "G-Mod", "central_accuracy": "C, same steps"}
    return [
        ("head: direction to the centralized one", "round", False, _lines(found, TO_CENTRAL, ["-"] * 2, ks)),
        ("head: test accuracy", "round", False, _lines(found, right, ["-"] * 3, ks)),
    ]


def _lines(curves: Curves, labels: dict[str, str], styles: list[str], x: Sequence[float] | None = None) -> list[Line]:
    """The named curves with their labels and styles, by default against the dimension."""
    x = curves["dimension"] if x is None else x
    return [(label, x, curves[name], style) for (name, label), style in zip(labels.items(), styles, strict=True)]


def summary(found: dict[str, Any]) -> str:
    """The ends of the curves, as a table."""
    linear, halves, head = found["regression"]["rounds"], found["classification"]["rounds"], found["head"]
    scale, central = linear["scale"][0], head["central_accuracy"][-1]
    rows = [
        ("regression: largest distance to the closed form, relative", max(linear["closed"]) / scale, None),
        ("regression: distance to X⁺y at the end, relative", linear["least_norm"][-1] / scale, None),
        ("classification: direction to C", halves["plain_central"][-1], halves["modified_central"][-1]),
        ("classification: direction to the SVM", halves["plain_svm"][-1], halves["modified_svm"][-1]),
        *_dirichlet_rows(found["dirichlet"]),
        ("head: direction to C", head["plain_central"][-1], head["modified_central"][-1]),
        (f"head: accuracy (C {central:.4f})", head["plain_accuracy"][-1], head["modified_accuracy"][-1]),
    ]
    numbers = [[name, *("" if one is None else f"{one:.4g}" for one in ends)] for name, *ends in rows]
    return table(["", "Local-GD", "modified"], numbers)


def _dirichlet_rows(found: dict[str, Curves]) -> list[tuple[str, float, float]]:
    """Rows of :func:`summary` for each α."""
    rows = []
    for alpha, curves in found.items():
        central = curves["central_accuracy"][-1]
        rows += [
            (f"Dirichlet {alpha}: direction to C", curves["plain_central"][-1], curves["modified_central"][-1]),
            (
                f"Dirichlet {alpha}: expected accuracy (C {central:.4f})",
                curves["plain_accuracy"][-1],
                curves["modified_accuracy"][-1],
            ),
        ]
    return rows


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study local-gd``."""
    parser.add_function_arguments(study, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="Small problems, which overrides other options: seconds.")
    study(**parser.instantiate(parser.parse_args(words)))
