# SPDX-License-Identifier: Apache-2.0
"""Metrics by which models are scored, and what is said of clients' scores."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics
import torchmetrics.classification
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from perada.core.checks import OptionError, invalid_option
from perada.core.text import near_names

MetricChoice = str | Sequence[str | Mapping[str, Any]]
"""What can be asked for: ``auto``, a name, or a list of names and of ``{torchmetrics class: options}``."""
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "f1_macro": ("F1Score", {"average": "macro"}),
    "f1_weighted": ("F1Score", {"average": "weighted"}),
    "f1_per_class": ("F1Score", {"average": "none"}),
    "precision_macro": ("Precision", {"average": "macro"}),
    "precision_per_class": ("Precision", {"average": "none"}),
    "recall_macro": ("Recall", {"average": "macro"}),
    "recall_per_class": ("Recall", {"average": "none"}),
    "ece": ("CalibrationError", {"n_bins": 15, "norm": "l1"}),
    "mcc": ("MatthewsCorrCoef", {}),
    "kappa": ("CohenKappa", {}),
}
"""Metrics of torchmetrics by short names: the class without ``Multiclass`` or ``Multilabel``, and its options."""
TAKEN = ("std", "worst", "p10", "weighted", "recent")
"""Endings of the names of scores, which no metric may be called."""


Compute = Callable[[Tensor, Tensor], Tensor]
"""Score of predictions (B, K), which are probabilities, and classes (B,) or labels (B, K).

A number, or one for each class (K,), NaN for a class that does not occur.
"""


@dataclass(frozen=True)
class Metric:
    """One metric of a run: its name in logs, how it is computed, and whether a lower score is the better one.

    Accuracy is not computed but counted.
    """

    name: str
    compute: Compute | None
    lower_is_better: bool = False


def _over_classes(score: Compute, needs_both: bool, predictions: Tensor, labels: Tensor) -> Tensor:
    """Mean score of the classes that occur, or that occur ``both`` ways; NaN where there is none."""
    truth = labels.long() if labels.dim() == 2 else torch.nn.functional.one_hot(labels, predictions.shape[-1])
    occur = (truth.sum(0) > 0) & ((truth.sum(0) < len(truth)) | (not needs_both))
    scores = [score(predictions[:, k], truth[:, k]) for k in occur.nonzero().flatten().tolist()]
    return torch.stack(scores).mean() if scores else torch.tensor(math.nan)


def balanced_accuracy(predictions: Tensor, labels: Tensor) -> Tensor:
    """Mean share of right predictions over the classes that occur, of predictions (B, K) and classes (B,).

    >>> float(balanced_accuracy(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 0, 1])))
    0.5
    """
    right = (predictions.argmax(1) == labels).double()
    return torch.stack([right[labels == k].mean() for k in labels.unique()]).mean()


OWN: dict[str, Compute | None] = {
    "accuracy": None,
    "auroc": partial(_over_classes, binary_auroc, True),
    "average_precision": partial(_over_classes, binary_average_precision, False),
    "balanced_accuracy": balanced_accuracy,
}


def metric_names(choice: MetricChoice) -> list[str]:
    """Names of the metrics in a choice, in order; those of ``auto`` depend on the data.

    Raises:
        ValueError: If one is unknown, or given twice.

    >>> metric_names(["accuracy", {"MulticlassFBetaScore": {"beta": 2.0, "name": "f2"}}])
    ['accuracy', 'f2']
    """
    return [name for name, _, _ in _entries(choice)]


def score_names(choice: MetricChoice) -> dict[str, bool]:
    """Names of the scores of personal and global models, and whether the lower score is the better one.

    >>> score_names(["accuracy", "ece"])["global/global_test_ece"]
    True
    """
    scores: dict[str, bool] = {}
    for place, (metric, kind, _) in enumerate(_entries(choice)):
        metric_class = _torchmetrics(f"Multiclass{NAMED[kind][0]}" if kind in NAMED else kind)
        lower_is_better = metric_class is not None and metric_class.higher_is_better is False
        for name in ("personal/local_test", "personal/global_test", "global/global_test"):
            full = f"{name}_{metric}" if place else name
            scores[full] = lower_is_better
            if name != "global/global_test":
                scores |= {f"{full}_std": True, f"{full}_worst": lower_is_better, f"{full}_p10": lower_is_better}
            if name == "personal/local_test":
                scores |= {f"{full}_weighted": lower_is_better, f"{full}_recent": lower_is_better}
    return scores


def make_metrics(choice: MetricChoice, multilabel: bool, classes: int) -> list[Metric]:
    """The metrics of a choice, for data with so many classes, or labels an image.

    Raises:
        ValueError: If one is unknown, is not for such data, or its options are not torchmetrics'.
    """
    return [_make(*entry, multilabel, classes) for entry in _entries(choice)]


def _entries(choice: object) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, metric and options of each entry of a choice."""
    if not choice or not isinstance(choice, str | Sequence | Mapping):
        raise invalid_option("metric", choice, "a name such as 'accuracy' or a list of names")
    entries = [_entry(entry) for entry in ([choice] if isinstance(choice, str | Mapping) else choice)]
    names = [name for name, _, _ in entries]
    for name in names:
        if name in TAKEN or not re.fullmatch(r"[\w.-]+", name):
            raise OptionError(
                f"metric: the name {name!r} cannot be used; give one of letters, digits and _, but {', '.join(TAKEN)}",
                name="metric",
            )
        if names.count(name) > 1:
            raise ValueError(
                f"metric has {name!r} twice; leave one out, or give one another name, {{CLASS: {{name: …}}}}"
            )
    if "auto" in names and len(names) > 1:
        raise OptionError(
            "metric='auto' cannot be one of several; write 'accuracy' or 'auroc'", name="metric", value="auto"
        )
    return entries


def _entry(entry: object) -> tuple[str, str, dict[str, Any]]:
    kind, given = next(iter(entry.items())) if isinstance(entry, Mapping) and len(entry) == 1 else (entry, {})
    known_names = [*OWN, *NAMED, "auto"]
    if not isinstance(kind, str) or not (kind in known_names or _torchmetrics(kind)):
        classes = [name for name in dir(torchmetrics.classification) if _torchmetrics(name)]
        # A class of torchmetrics without the task that its name begins with, such as F1Score.
        for_tasks = [name for name in classes if name in (f"Multiclass{kind}", f"Multilabel{kind}")]
        close = [*near_names(str(kind), known_names, limit=2), *for_tasks] or near_names(str(kind), classes, limit=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"choose from {', '.join(known_names)}"
        raise OptionError(
            f"metric={kind!r} is unknown: {hint} (or a classification class of torchmetrics)", name="metric", value=kind
        )
    if not isinstance(given or {}, Mapping):
        raise OptionError(
            f"metric {kind!r} has the options {given!r}; give a mapping, {{{kind}: {{OPTION: VALUE}}}}",
            name="metric",
            value=kind,
        )
    options = dict(given or {})
    if options and kind in known_names:
        raise OptionError(
            f"metric {kind!r} takes no options; name the class of torchmetrics that has them", name="metric", value=kind
        )
    return str(options.pop("name", kind)), kind, options


def _torchmetrics(name: str) -> type[torchmetrics.Metric] | None:
    metric_class = (
        getattr(torchmetrics.classification, name, None) if name.startswith(("Multiclass", "Multilabel")) else None
    )
    return metric_class if inspect.isclass(metric_class) and issubclass(metric_class, torchmetrics.Metric) else None


def _make(name: str, kind: str, options: dict[str, Any], multilabel: bool, classes: int) -> Metric:
    if kind == "auto":
        name = kind = "auroc" if multilabel else "accuracy"
    if kind == "balanced_accuracy" and multilabel:
        raise OptionError(
            "metric='balanced_accuracy' is for one class an image; choose 'recall_macro' or 'auroc'",
            name="metric",
            value="balanced_accuracy",
        )
    if kind in OWN:
        return Metric(name, OWN[kind])
    prefix, count = ("Multilabel", "num_labels") if multilabel else ("Multiclass", "num_classes")
    base, defaults = NAMED.get(kind, (kind, {}))
    metric_type = _torchmetrics(prefix + base if kind in NAMED else kind)
    if metric_type is None or not metric_type.__name__.startswith(prefix):
        data = "several labels" if multilabel else "one class"
        raise OptionError(
            f"metric={kind!r} is not for data with {data} an image; choose another", name="metric", value=kind
        )
    metric_class = metric_type
    options = defaults | options | {count: classes}

    def compute(predictions: Tensor, labels: Tensor) -> Tensor:
        metric = metric_class(**options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)  # of a class
            metric.update(predictions, labels.long())
            value: Tensor = metric.compute()
        if not value.dim():
            return value
        occurs = labels.sum(0) if multilabel else labels.bincount(minlength=classes)
        return value.where(occurs > 0, math.nan)

    try:
        example = torch.eye(classes).repeat(2, 1)
        score = compute(example, example if multilabel else example.argmax(1))
        if not isinstance(score, Tensor) or score.shape not in (torch.Size([]), torch.Size([classes])):
            raise TypeError("it gives neither a number nor one for each class")
    except Exception as error:  # every metric refuses in its own way
        reason = " ".join(str(error).split())
        raise OptionError(
            f"metric {kind!r} cannot be used: {reason}; correct its options, or choose another",
            name="metric",
            value=kind,
        ) from error
    return Metric(name, compute, metric_class.higher_is_better is False)


def spread(
    name: str,
    values: Tensor,
    lower_is_better: bool = False,
    sizes: Tensor | None = None,
    recent: Sequence[bool] | None = None,
) -> dict[str, float]:
    """What is said of the clients' scores (M,), NaN where a client has none: mean, deviation, and the badly off.

    That is the mean ``name``, ``_std``, ``_worst``, ``_p10`` (the score that a tenth of the clients do not reach) and,
    with the ``sizes`` (M,) of what each was scored on, ``_weighted``. With ``recent``, whether each client took part
    lately, ``_recent`` is the mean over those that did. All are NaN where no such client has a score.
    """
    scored = ~values.isnan()
    scores = values[scored]
    statistics = {
        name: float(scores.mean()),
        f"{name}_std": float(scores.std(correction=0)) if len(scores) else math.nan,
    }
    worst, tenth = (1.0, 0.9) if lower_is_better else (0.0, 0.1)
    for ending, share in (("_worst", worst), ("_p10", tenth)):
        statistics[name + ending] = float(scores.double().quantile(share)) if len(scores) else math.nan
    if sizes is not None:
        weights = sizes[scored].double()
        statistics[f"{name}_weighted"] = float((scores * weights).sum() / weights.sum()) if len(scores) else math.nan
    if recent is not None:
        took_part = torch.tensor(recent, dtype=torch.bool, device=values.device)
        statistics[f"{name}_recent"] = float(values[scored & took_part].mean())
    return statistics
