# SPDX-License-Identifier: Apache-2.0
"""Metrics by which models are scored, and statistics of the clients' scores."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from perada.core.checks import OptionError, invalid_option
from perada.core.text import near_names
from perada.tasks import Keypoints, Regression, Segmentation, Task
from perada.tasks.base import SummedMetric

if TYPE_CHECKING:
    # The import stands where it is used: it takes seconds, and a saved run predicts without it.
    import torchmetrics

MetricChoice = str | Sequence[str | Mapping[str, Any]]
"""The option ``metric``: ``auto``, a name, or a list of names and of ``{torchmetrics class: options}``."""


class TorchMetric(NamedTuple):
    """A metric of torchmetrics that has a short name.

    Attributes:
        class_name: Name of its class, without ``Multiclass`` or ``Multilabel``.
        options: Options of the class.
    """

    class_name: str
    options: dict[str, Any]


SHORT_NAMES = {
    "f1_macro": TorchMetric("F1Score", {"average": "macro"}),
    "f1_weighted": TorchMetric("F1Score", {"average": "weighted"}),
    "f1_per_class": TorchMetric("F1Score", {"average": "none"}),
    "precision_macro": TorchMetric("Precision", {"average": "macro"}),
    "precision_per_class": TorchMetric("Precision", {"average": "none"}),
    "recall_macro": TorchMetric("Recall", {"average": "macro"}),
    "recall_per_class": TorchMetric("Recall", {"average": "none"}),
    "ece": TorchMetric("CalibrationError", {"n_bins": 15, "norm": "l1"}),
    "mcc": TorchMetric("MatthewsCorrCoef", {}),
    "kappa": TorchMetric("CohenKappa", {}),
}
"""Metrics of torchmetrics by short names."""
RESERVED_NAMES = ("std", "worst", "p10", "weighted", "recent")
"""Names that a metric cannot have, since they are suffixes of the names of scores."""

Compute = Callable[[Tensor, Tensor], Tensor]
"""Function of probabilities (B, K) and of classes (B,) or labels (B, K) that returns a score.

The score is a number, or one for each class (K,) with NaN for classes that do not occur.
"""


@dataclass(frozen=True)
class Metric:
    """One metric of a run.

    Attributes:
        name: Name in logs.
        compute: Function that computes it from all predictions; None for accuracy, which is counted, and for a metric
            that is summed.
        lower_is_better: Whether a lower score is better.
        summed: Computes it from sums over images.
    """

    name: str
    compute: Compute | None
    lower_is_better: bool = False
    summed: SummedMetric | None = None

    @property
    def is_accuracy(self) -> bool:
        """Whether it is accuracy, which is counted."""
        return self.compute is None and self.summed is None


def _mean_over_classes(score: Compute, needs_both: bool, predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean score of the classes that occur; NaN if none does.

    Args:
        score: Function that computes the score of one class against all others.
        needs_both: Whether a class is included only if there are images of other classes too.
        predictions: Predictions (B, K).
        labels: Classes (B,) or labels (B, K).
    """
    if labels.dim() == 2:
        # An unknown label is NaN or negative, and is left out of its class's score.
        has_label = labels >= 0
        truth = labels.where(has_label, 0).long()
    else:
        truth = torch.nn.functional.one_hot(labels, predictions.shape[-1])
        has_label = torch.ones_like(truth, dtype=torch.bool)
    counts = truth.sum(0)
    occurs = counts > 0
    if needs_both:
        occurs = occurs & (counts < has_label.sum(0))
    scores = []
    for k in occurs.nonzero().flatten().tolist():
        rows = has_label[:, k]
        scores.append(score(predictions[rows, k], truth[rows, k]))
    if not scores:
        return torch.tensor(math.nan)
    return torch.stack(scores).mean()


def balanced_accuracy(predictions: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean of the accuracies of all classes that occur, from predictions (B, K) and classes (B,).

    >>> float(balanced_accuracy(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 0, 1])))
    0.5
    """
    right = (predictions.argmax(1) == labels).double()
    return torch.stack([right[labels == k].mean() for k in labels.unique()]).mean()


def _binary_auroc(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the area under the ROC curve of one class, given its scores (N,) and labels 0 or 1 (N,)."""
    from torchmetrics.functional.classification import binary_auroc

    return binary_auroc(scores, labels)


def _binary_average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the average precision of one class, given its scores (N,) and labels 0 or 1 (N,)."""
    from torchmetrics.functional.classification import binary_average_precision

    return binary_average_precision(scores, labels)


BUILT_IN: dict[str, Compute | None] = {
    "accuracy": None,
    "auroc": partial(_mean_over_classes, _binary_auroc, True),
    "average_precision": partial(_mean_over_classes, _binary_average_precision, False),
    "balanced_accuracy": balanced_accuracy,
}


SUMMED_METRICS = {
    **Segmentation().summed_metrics(num_classes=1),
    **Regression().summed_metrics(num_classes=1),
    **Keypoints(image_size=1).summed_metrics(num_classes=2),
}
"""Metrics of masks, of numbers and of keypoints by name, with options of their own."""


def metric_names(choice: MetricChoice) -> list[str]:
    """Return the names of the metrics that an option selects, in order; ``auto`` stays, since it depends on the data.

    Raises:
        ValueError: If a metric is unknown, or listed twice.

    >>> metric_names(["accuracy", {"MulticlassFBetaScore": {"beta": 2.0, "name": "f2"}}])
    ['accuracy', 'f2']
    """
    return [name for name, _, _ in _parse_entries(choice)]


def score_names(choice: MetricChoice, task: Task | None = None) -> dict[str, bool]:
    """Return the names of the scores of personal and global models, and whether a lower score is better.

    Args:
        choice: Value of the option ``metric``.
        task: What the models predict, which ``auto`` chooses the metric by; None if the labels decide, whose tasks have
            metrics of which higher scores are better.

    >>> score_names(["accuracy", "ece"])["global/global_test_ece"]
    True
    """
    is_error_by_name: dict[str, bool] = {}
    for place, entry in enumerate(_parse_entries(choice)):
        kind = entry.kind
        if kind == "auto" and task is not None:
            kind = task.default_metric
        class_name = f"Multiclass{SHORT_NAMES[kind].class_name}" if kind in SHORT_NAMES else kind
        metric_class = _torchmetrics_class(class_name)
        lower_is_better = metric_class is not None and metric_class.higher_is_better is False
        if kind in SUMMED_METRICS:
            lower_is_better = SUMMED_METRICS[kind].lower_is_better
        names = (
            "personal/local_test",
            "personal/global_test",
            "global/global_test",
            "both/local_test",
            "both/global_test",
        )
        for name in names:
            full_name = f"{name}_{entry.name}" if place else name
            is_error_by_name[full_name] = lower_is_better
            if name != "global/global_test":
                is_error_by_name[f"{full_name}_std"] = True
                is_error_by_name[f"{full_name}_worst"] = lower_is_better
                is_error_by_name[f"{full_name}_p10"] = lower_is_better
            if name.endswith("/local_test"):
                is_error_by_name[f"{full_name}_weighted"] = lower_is_better
                is_error_by_name[f"{full_name}_recent"] = lower_is_better
    return is_error_by_name


def make_metrics(choice: MetricChoice, task: Task, num_classes: int) -> list[Metric]:
    """Create the metrics that an option selects.

    Args:
        choice: Value of the option ``metric``.
        task: What the models predict.
        num_classes: Number of classes, or of labels per image.

    Raises:
        ValueError: If a metric is unknown, does not support the data, or rejects its options.
    """
    return [_make_metric(entry, task, num_classes) for entry in _parse_entries(choice)]


class _Entry(NamedTuple):
    """An entry of the option ``metric``.

    Attributes:
        name: Name in logs.
        kind: Short name, or class of torchmetrics.
        options: Options of the class.
    """

    name: str
    kind: str
    options: dict[str, Any]


def _parse_entries(choice: object) -> list[_Entry]:
    """Parse the option ``metric``; raise a ValueError if it is invalid."""
    if not choice or not isinstance(choice, str | Sequence | Mapping):
        raise invalid_option("metric", choice, "a name such as 'accuracy' or a list of names")
    choices = [choice] if isinstance(choice, str | Mapping) else choice
    entries = [_parse_entry(entry) for entry in choices]
    names = [entry.name for entry in entries]
    for name in names:
        if name in RESERVED_NAMES or not re.fullmatch(r"[\w.-]+", name):
            reserved = ", ".join(RESERVED_NAMES)
            raise OptionError(
                f"metric: the name {name!r} is invalid; choose a name of letters, digits and _, except {reserved}",
                name="metric",
            )
        if names.count(name) > 1:
            raise ValueError(
                f"metric contains {name!r} twice; leave one out, or give one a different name, {{CLASS: {{name: …}}}}"
            )
    if "auto" in names and len(names) > 1:
        raise OptionError(
            "metric='auto' cannot be part of a list; use 'accuracy' or 'auroc'", name="metric", value="auto"
        )
    return entries


def _parse_entry(entry: object) -> _Entry:
    """Parse an entry of the option ``metric``: a name, or ``{class of torchmetrics: options}``."""
    kind = entry
    options: object = {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        kind, options = next(iter(entry.items()))
    short_names = [*BUILT_IN, *SHORT_NAMES, *SUMMED_METRICS, "auto"]
    if not isinstance(kind, str) or not (kind in short_names or _torchmetrics_class(kind)):
        raise OptionError(
            f"metric={kind!r} is unknown: {_suggest_names(kind, short_names)} (or a classification class of "
            "torchmetrics)",
            name="metric",
            value=kind,
        )
    if not isinstance(options or {}, Mapping):
        raise OptionError(
            f"metric {kind!r}: options must be a mapping, got {options!r}; write {{{kind}: {{OPTION: VALUE}}}}",
            name="metric",
            value=kind,
        )
    class_options: dict[str, Any] = {}
    if isinstance(options, Mapping):
        class_options = dict(options)
    if class_options and kind in short_names:
        raise OptionError(
            f"metric {kind!r} takes no options; use the torchmetrics class that has them", name="metric", value=kind
        )
    name = str(class_options.pop("name", kind))
    return _Entry(name, kind, class_options)


def _suggest_names(name: object, short_names: Sequence[str]) -> str:
    """Return a suggestion of names for an unknown metric."""
    import torchmetrics.classification

    class_names = [known for known in dir(torchmetrics.classification) if _torchmetrics_class(known)]
    # The name may be that of a class without its task, such as F1Score.
    with_task = (f"Multiclass{name}", f"Multilabel{name}")
    close = near_names(str(name), short_names, limit=2)
    close.extend(class_name for class_name in class_names if class_name in with_task)
    if not close:
        close = near_names(str(name), class_names, limit=3)
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"choose from {', '.join(short_names)}"


def _torchmetrics_class(name: str) -> "type[torchmetrics.Metric] | None":
    """Return the torchmetrics class for data with one class, or several labels, per image; None if there is none."""
    if not name.startswith(("Multiclass", "Multilabel")):
        return None
    import torchmetrics.classification

    metric_class = getattr(torchmetrics.classification, name, None)
    if inspect.isclass(metric_class) and issubclass(metric_class, torchmetrics.Metric):
        return metric_class
    return None


def _make_metric(entry: _Entry, task: Task, num_classes: int) -> Metric:
    """Create the metric of an entry; raise an OptionError if it does not support the data or its options."""
    name = entry.name
    kind = entry.kind
    if kind == "auto":
        kind = task.default_metric
        name = kind
    summed = task.summed_metrics(num_classes)
    if kind in summed:
        return Metric(name, None, summed[kind].lower_is_better, summed=summed[kind])
    supported_names = list(summed)
    if task.has_classes:
        supported_names.insert(0, "accuracy")
    # The predictions of all pixels would have to be stored.
    only_sums = task.per_pixel or not task.has_classes
    if only_sums and kind not in supported_names:
        supported = ", ".join(supported_names)
        raise OptionError(
            f"metric={kind!r} does not support data with {task.labels_per_image}; choose from {supported}",
            name="metric",
            value=kind,
        )
    if kind == "balanced_accuracy" and not task.exclusive:
        raise OptionError(
            "metric='balanced_accuracy' requires one class per image; choose 'recall_macro' or 'auroc'",
            name="metric",
            value="balanced_accuracy",
        )
    if kind in BUILT_IN:
        return Metric(name, BUILT_IN[kind])
    class_name = kind
    defaults: dict[str, Any] = {}
    if kind in SHORT_NAMES:
        class_name = task.metric_prefix + SHORT_NAMES[kind].class_name
        defaults = SHORT_NAMES[kind].options
    metric_class = _torchmetrics_class(class_name)
    if metric_class is None or not metric_class.__name__.startswith(task.metric_prefix):
        raise OptionError(
            f"metric={kind!r} does not support data with {task.labels_per_image}; choose a different metric",
            name="metric",
            value=kind,
        )
    options = defaults | entry.options | {task.metric_size_option: num_classes}
    compute = partial(_compute_torchmetric, metric_class, options, task, num_classes)
    try:
        _try_metric(compute, task, num_classes)
    except Exception as error:  # metrics raise errors of any kind
        reason = " ".join(str(error).split())
        raise OptionError(
            f"metric {kind!r} fails: {reason}; correct its options, or choose a different metric",
            name="metric",
            value=kind,
        ) from error
    return Metric(name, compute, metric_class.higher_is_better is False)


UNKNOWN_LABEL = -1
"""Value by which metrics of torchmetrics recognise an unknown label."""


def _compute_torchmetric(
    metric_class: "Callable[..., torchmetrics.Metric]",
    options: dict[str, Any],
    task: Task,
    num_classes: int,
    predictions: Tensor,
    labels: Tensor,
) -> Tensor:
    """Compute a metric of torchmetrics, with NaN for classes that do not occur."""
    has_label = task.known(labels)
    if not has_label.all():
        options = options | {"ignore_index": UNKNOWN_LABEL}
    metric = metric_class(**options)
    with warnings.catch_warnings():
        # A class without samples is expected, and gets NaN below.
        warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
        metric.update(predictions, labels.where(has_label, UNKNOWN_LABEL).long())
        value: Tensor = metric.compute()
    if not value.dim():
        return value
    counts = task.class_counts(labels, num_classes)
    return value.where(counts > 0, math.nan)


def _try_metric(compute: Compute, task: Task, num_classes: int) -> None:
    """Compute a metric on perfect predictions; raise if it fails, or if its result is not a score."""
    predictions = torch.eye(num_classes).repeat(2, 1)
    # 0 is the decision between presence and absence of a label, and below the largest entry of each row.
    labels = task.predicted(predictions)
    score = compute(predictions, labels)
    if not isinstance(score, Tensor) or score.shape not in (torch.Size([]), torch.Size([num_classes])):
        raise TypeError("it returns neither a number nor one per class")


def by_suffix(metrics: Sequence[Metric]) -> dict[str, Metric]:
    """Return metrics by the suffix of the names of their scores, which is empty for the first one.

    >>> list(by_suffix([Metric("accuracy", None), Metric("auroc", None)]))
    ['', '_auroc']
    """
    metric_of = {}
    for index, metric in enumerate(metrics):
        suffix = f"_{metric.name}" if index else ""
        metric_of[suffix] = metric
    return metric_of


def spread(
    name: str,
    values: Tensor,
    lower_is_better: bool = False,
    sizes: Tensor | None = None,
    recent: Sequence[bool] | None = None,
    is_failed: Tensor | None = None,
) -> dict[str, float]:
    """Compute statistics of the clients' scores: mean, standard deviation, and the tail of poorly served clients.

    Args:
        name: Name of the score.
        values: Score (M,) of each client; NaN if a client has none.
        lower_is_better: Whether a lower score is better.
        sizes: Number (M,) of images on which each client is scored.
        recent: Whether each client took part recently.
        is_failed: Mask (M,) of the clients that have no score because outputs of their models are NaN or infinite; by
            default none.

    Returns:
        The mean as ``name``, and with suffixes ``_std``, ``_worst`` and ``_p10``, the score that a tenth of the clients
        do not reach. With ``sizes`` also ``_weighted``, the mean over images; with ``recent`` also ``_recent``, the
        mean over clients that took part recently. All are NaN if no such client has a score. All are NaN, too, if a
        client has failed: statistics of the other clients would look like those of all.
    """
    # Means of many clients' scores, and standard deviations that are small compared to a mean, need the digits.
    values = values.double()
    if is_failed is not None and is_failed.any():
        values = torch.full_like(values, torch.nan)
    scored = ~values.isnan()
    scores = values[scored]
    any_scored = len(scores) > 0
    worst = 1.0 if lower_is_better else 0.0
    tenth = 0.9 if lower_is_better else 0.1
    statistics = {
        name: float(scores.mean()),
        f"{name}_std": float(scores.std(correction=0)) if any_scored else math.nan,
        f"{name}_worst": _quantile_of_scores(scores, worst),
        f"{name}_p10": _quantile_of_scores(scores, tenth),
    }
    if sizes is not None:
        weights = sizes[scored].double()
        statistics[f"{name}_weighted"] = float((scores * weights).sum() / weights.sum()) if any_scored else math.nan
    if recent is not None:
        took_part = torch.tensor(recent, dtype=torch.bool, device=values.device)
        statistics[f"{name}_recent"] = float(values[scored & took_part].mean())
    return statistics


def _quantile_of_scores(scores: Tensor, share: float) -> float:
    """Return a quantile of scores; NaN if there are none."""
    if not len(scores):
        return math.nan
    return float(scores.double().quantile(share))
