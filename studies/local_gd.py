# SPDX-License-Identifier: Apache-2.0
"""``perada study local-gd``: where many local steps lead (Zhu, Vardhan & Mazumdar, Figure 1).

The paper is https://arxiv.org/abs/2412.07971v1; what is computed is in ``local_gd_linear``, ``local_gd_curves`` and
``local_gd_head``. Here are the options, the files and the figure.
"""

import json
import time
from collections.abc import Callable, Sequence
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
    Nodes,
    RegressionSettings,
    by_dimension,
    classification_at,
    regression_at,
)
from perada.studies.local_gd_head import HeadSettings, head_curves, load_images

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NODES, REGRESSION, CLASSIFICATION, HEAD = Nodes(), RegressionSettings(), ClassificationSettings(), HeadSettings()
"""The paper's settings, where it gives them."""
QUICK: dict[str, Any] = {
    "nodes": Nodes(5, 10),
    "regression": RegressionSettings(
        200, (30, 50, 70, 100, 200), rounds=30, local_steps=100, lr=1e-3, central_steps=500
    ),
    "classification": ClassificationSettings(200, (75, 100, 200), rounds=30, lr=0.05, central_steps=2000),
    "head": HeadSettings("digits", rounds=10, local_steps=10),
}
"""Settings of ``--quick``."""

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
    head: HeadSettings = HEAD,
    quick: bool = False,
) -> dict[str, Any]:
    """What local gradient descent with many local steps converges to: linear models, and a head on a frozen backbone.

    Args:
        output: Folder to write local_gd.json and local_gd.png to.
        seed: Of all draws.
        nodes: The nodes of the linear problems.
        regression: The linear regression.
        classification: The linear classification.
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
    options: dict[str, Any] = {"nodes": nodes, "regression": regression, "classification": classification, "head": head}
    if quick:
        options = QUICK
        nodes, regression, classification, head = options.values()
    check_output(output)
    load_images(head)  # says at once if they are missing
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    sizes = [len({problem.dimension, *problem.dimensions}) for problem in (regression, classification)]
    with tqdm(total=sum(sizes) + 4, desc="local-gd", dynamic_ncols=True) as bar:

        def advance(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "regression": partial(by_dimension, regression_at, nodes, regression, seed, advance),
            "classification": partial(by_dimension, classification_at, nodes, classification, seed, advance),
            "head": partial(head_curves, head, seed, advance),
        }
        for name, compute in parts.items():
            began = time.perf_counter()
            found[name] = compute()
            seconds[name] = round(time.perf_counter() - began, 1)
    settings = {"seed": seed, **{name: asdict(value) for name, value in options.items()}}
    written = {"settings": settings, "seconds": seconds, **found}
    print(summary(found))
    write(output, "local_gd", json.dumps(written), draw(found))
    return written


def draw(found: dict[str, Any]) -> "Figure":
    """Draw panels (a) to (i) of the paper's Figure 1, of what :func:`study` returns."""
    figure = new_figure(9.8, 7.8)
    panels = [*_regression_panels(found["regression"]), *_classification_panels(found["classification"])]
    panels += _head_panels(found["head"])
    for letter, axis, (title, xlabel, log, lines) in zip("abcdefghi", figure.subplots(3, 3).flat, panels, strict=True):
        for label, x, y, style in lines:
            axis.plot(x, y, style, label=label, markersize=3, linewidth=1.2)
        axis.set_title(f"({letter}) {title}", fontsize="medium")
        axis.set_xlabel(xlabel)
        if log:
            axis.set_yscale("log")
        axis.legend(fontsize="small")
    return figure


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
    to_central = {"plain_central": "G – C", "modified_central": "G-Mod – C"}
    to_svm = {"plain_svm": "G – SVM", "modified_svm": "G-Mod – SVM", "central_svm": "C – SVM"}
    right = {"plain_accuracy": "G", "modified_accuracy": "G-Mod", "central_accuracy": "C", "svm_accuracy": "SVM"}
    distance = "classification: distance of directions"
    by_round = _lines(rounds, to_central | to_svm, ["-", "-", "--", "--", "k:"], ks)
    svm = _lines(by_d, to_svm, ["o-", "o-", "k^:"])
    return [
        (distance, "round", False, by_round),
        (distance, "dimension d", False, _lines(by_d, to_central, ["o-", "o-"])),
        ("classification: direction to the SVM", "dimension d", False, svm),
        ("classification: expected accuracy", "dimension d", False, _lines(by_d, right, ["o-", "s--", "k^:", "d-."])),
    ]


def _head_panels(found: Curves) -> list[Panel]:
    ks = range(1, len(found["plain_central"]) + 1)
    to_central = {"plain_central": "G – C", "modified_central": "G-Mod – C"}
    right = {"plain_accuracy": "G", "modified_accuracy": "G-Mod", "central_accuracy": "C, same steps"}
    return [
        ("head: direction to the centralized one", "round", False, _lines(found, to_central, ["-"] * 2, ks)),
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
        ("head: direction to C", head["plain_central"][-1], head["modified_central"][-1]),
        (f"head: accuracy (C {central:.4f})", head["plain_accuracy"][-1], head["modified_accuracy"][-1]),
    ]
    numbers = [[name, *("" if one is None else f"{one:.4g}" for one in ends)] for name, *ends in rows]
    return table(["", "Local-GD", "modified"], numbers)


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study local-gd``."""
    parser.add_function_arguments(study, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="Small problems, which overrides other options: seconds.")
    study(**parser.instantiate(parser.parse_args(words)))
