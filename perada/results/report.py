# SPDX-License-Identifier: Apache-2.0
"""Tables of a run's metrics in Markdown. Nothing large is imported."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from perada.core.text import is_spread, printable

TEST_MODE = (
    "Test mode, not private: the noise is derived from the run's seed (secure_rng: false). Whoever knows or guesses "
    "the seed can remove the noise, regardless of ε. Do not release models trained this way."
)
SCORES = ("personal/local_test", "personal/global_test", "global/global_test")
SCORES_OF_BOTH = ("both/local_test", "both/global_test")
"""Scores of predictions with both models of a client, which not all runs have."""
TYPICAL = "typical/local_test"
"""Share of a client's test images that look like its training images."""
TYPICAL_OF_ALL = "typical/global_test"
"""Share of all clients' test images that look like a client's training images."""
TYPICAL_SHARES = "typical/"
"""How names of shares of images begin that look like a client's training images."""
SCORE_GROUPS = ("personal/", "global/", "both/")
"""How names of scores begin."""
ENTROPY = "global/entropy"
MODES = ("global/best_mode", "global/worst_mode", ENTROPY)
PRIVACY = "privacy/"
EPSILONS = {
    "privacy/server_epsilon": "ε server",
    "privacy/release_epsilon": "ε release",
    "privacy/client_epsilon": "ε client",
    "privacy/server_epsilon_mean": "ε server",
    "privacy/release_epsilon_mean": "ε release",
    "privacy/client_epsilon_max": "ε client (max)",
}
"""Titles of the columns with each client's ε, and with the ε after a round."""
LAST_ROUND = "last_round"
"""Metric of each client: the last round in which it took part, counted from 1; 0 for none."""
UNEVEN = 10
"""Ratio of the clients' numbers of test images above which the weighted mean is shown beside the plain one."""
TITLES = {
    LAST_ROUND: "last round",
    "personal/local_test": "own images",
    "personal/global_test": "all clients' images",
    "global/global_test": "global model",
    "global/local_test": "global model on own images",
    "both/local_test": "both models, own images",
    "both/global_test": "both models, all clients' images",
    TYPICAL: "own images that look typical",
    TYPICAL_OF_ALL: "all clients' images that look typical",
    "global/best_mode": "best mode",
    "global/worst_mode": "worst mode",
    ENTROPY: "entropy of the modes",
    "train/skipped_steps": "skipped local steps",
    "server/skipped_steps": "skipped distillation steps",
    "server/distilled": "distilled models",
    "params/trained": "parameters trained",
    "params/sent": "parameters sent",
    "comm/up_mb": "MB to the server",
    "comm/down_mb": "MB to clients",
    "clients/drawn": "clients selected",
    "clients/failed": "clients failed",
    "deploy/selected": "sites selected",
    "deploy/answered": "sites used",
    "deploy/seconds": "seconds",
    "privacy/server_epsilon_std": "ε server, std",
    "privacy/server_epsilon_max": "ε server (max)",
    "privacy/release_epsilon_std": "ε release, std",
    "privacy/release_epsilon_max": "ε release (max)",
    "privacy/epsilon_mean": "ε",
    "privacy/epsilon_max": "ε (max)",
    "privacy/client_norm": "clipping norm of client updates",
    "privacy/test_mode": "test mode",
    "theory/averaged_distance": "distance of the average to the local models",
    "theory/distilled_distance": "distance of the distilled model to the local models",
    "theory/personal_distance": "distance of the personal models to the global model",
    "theory/ensemble_accuracy": "accuracy of the local models' ensemble",
    "theory/ensemble_error": "error of the local models' ensemble",
    "theory/global_gradient": "squared gradient norm, global",
    "theory/personal_gradient": "squared gradient norm, personal",
    "updates/norm_median": "median update norm",
    "updates/norm_max": "largest update norm",
    "updates/norm_max_client": "client of the largest update norm",
    "updates/cosine_min": "smallest cosine to the mean update",
    "updates/cosine_min_client": "client of the smallest cosine",
    "updates/lora_error": "error of averaged LoRA",
    "updates/lora_residual": "residual of averaged LoRA factors",
}
"""Titles of metrics in tables for people; files keep the names of the metrics."""
SCORE_TITLES = {
    "auroc": "AUROC",
    "f1_macro": "macro F1",
    "f1_weighted": "weighted F1",
    "f1_per_class": "F1 per class",
    "precision_macro": "macro precision",
    "recall_macro": "macro recall",
    "ece": "ECE",
    "dice": "Dice",
    "miou": "mean IoU",
    "mae": "MAE",
    "mse": "MSE",
    "rmse": "RMSE",
    "r2": "R²",
    "pearson": "Pearson correlation",
    "mcc": "MCC",
    "kappa": "Cohen's κ",
}
"""Titles of the metrics that models are scored by; others have their names, with spaces."""
_STATISTICS = {
    "std": "std",
    "worst": "worst client",
    "p10": "10th percentile",
    "weighted": "weighted by images",
    "recent": "recent clients",
}
ROWS = 20
"""Largest number of clients in a table."""
SHIFTS_FILE = "shifts.json"
"""Scores by kind of corruption and severity, in a run's folder."""


@dataclass(frozen=True)
class ScoreUnit:
    """How scores are shown.

    Attributes:
        factor: Factor of the number that is shown.
        symbol: What follows a number, with a space before it.
        format_spec: Format of a number.
    """

    factor: float
    symbol: str
    format_spec: str

    def number(self, score: float) -> str:
        """Format a score without its unit; a dash for NaN.

        >>> SHARES.number(0.5), NUMBERS.number(12.3456)
        ('50.00', '12.35')
        """
        return "–" if math.isnan(score) else format(self.factor * score, self.format_spec)

    def text(self, score: float) -> str:
        """Format a score with its unit.

        >>> SHARES.text(0.5), NUMBERS.text(12.3456)
        ('50.00 %', '12.35')
        """
        return "–" if math.isnan(score) else self.number(score) + self.symbol

    def label(self, quantity: str) -> str:
        """Label an axis.

        >>> SHARES.label("score"), NUMBERS.label("score")
        ('score in %', 'score')
        """
        return f"{quantity} in{self.symbol}" if self.symbol else quantity


SHARES = ScoreUnit(factor=100, symbol=" %", format_spec=".2f")
"""Unit of scores between 0 and 1."""
NUMBERS = ScoreUnit(factor=1, symbol="", format_spec=".4g")
"""Unit of scores of predicted numbers, which have the unit of the targets."""


def unit_of(task_record: Mapping[str, Any]) -> ScoreUnit:
    """Return the unit of the scores of a task, from its record (:meth:`.Task.record`)."""
    return SHARES if task_record.get("has_classes", True) else NUMBERS


def first_metric(info: Mapping[str, Any]) -> str:
    """Return the metric of the scores of a run, the first of several, from ``Run.info``.

    >>> first_metric({"training": {"metric": [{"MulticlassFBetaScore": {"beta": 2.0}}, "auroc"]}})
    'MulticlassFBetaScore'
    >>> first_metric({"training": {"metric": "auto"}, "task": {"default_metric": "dice"}}), first_metric({})
    ('dice', 'accuracy')
    """
    training = info.get("training") or {}
    metric = training.get("metric") or "auto"
    # A list of metrics, or a dictionary of a metric's name and its options, or a list of these.
    while metric and isinstance(metric, list | tuple | dict):
        metric = next(iter(metric))
    if metric == "auto":
        task = info.get("task") or {}
        metric = task.get("default_metric", "accuracy")
    return str(metric)


def title(name: str) -> str:
    """Return the title of a metric in tables: words, also for a metric that perada does not know.

    >>> title("personal/local_test"), title("personal/local_test_ece"), title("global/global_test_f1_macro")
    ('own images', 'own images, ECE', 'global model, macro F1')
    >>> title("personal/global_test_worst"), title("personal/fog"), title("train/local_loss")
    ("all clients' images, worst client", 'fog, personal models', 'training loss, local')
    >>> title("personal/local_test_f1_weighted"), title("theory/personal_gradient_std"), title("my_own/metric_b")
    ('own images, weighted F1', 'squared gradient norm, personal, std', 'my own: metric b')
    >>> title("both/fog"), title("typical/fog")
    ('fog, both models', 'fog, images that look typical')
    """
    words = TITLES | EPSILONS
    if name in words:
        return words[name]
    if name.startswith((*SCORE_GROUPS, "theory/")) and is_spread(name):
        mean, _, ending = name.rpartition("_")
        return f"{title(mean)}, {_STATISTICS[ending]}"
    for score in (*SCORES, *SCORES_OF_BOTH):
        if name.startswith(f"{score}_"):
            return f"{TITLES[score]}, {score_title(name.removeprefix(f'{score}_'))}"
    group, _, metric = name.partition("/")
    if group == "train" and metric.endswith("_loss"):
        return f"training loss, {_replace_underscores(metric.removesuffix('_loss'))}"
    # Other scores are on a shifted test set, whose name users choose.
    if group == "personal" and metric:
        return f"{metric}, personal models"
    if group == "global" and metric:
        return f"{metric}, global model"
    if group == "both" and metric:
        return f"{metric}, both models"
    if name.startswith(TYPICAL_SHARES) and metric:
        return f"{metric}, images that look typical"
    if metric:
        return f"{_replace_underscores(group)}: {_replace_underscores(metric)}"
    return _replace_underscores(name)


def title_with_metric(name: str, metric: str) -> str:
    """Return the title of a metric; that of a plain score names the ``metric`` that it is, unless it is accuracy.

    >>> title_with_metric("personal/local_test", "dice"), title_with_metric("personal/local_test", "accuracy")
    ('own images, Dice', 'own images')
    >>> title_with_metric("personal/local_test_ece", "auroc")
    'own images, ECE'
    """
    if name in (*SCORES, *SCORES_OF_BOTH) and metric != "accuracy":
        return f"{title(name)}, {score_title(metric)}"
    return title(name)


def score_title(metric: str) -> str:
    """Return the title of a metric that models are scored by.

    >>> score_title("balanced_accuracy"), score_title("auroc")
    ('balanced accuracy', 'AUROC')
    """
    return SCORE_TITLES.get(metric) or _replace_underscores(metric)


def _replace_underscores(name: str) -> str:
    return name.replace("_", " ")


def scores_beside(means: Iterable[Mapping[str, float]], test_images: Iterable[int]) -> list[str]:
    """Return the metrics to show next to the mean score on own images where it would mislead on its own.

    Args:
        means: Scores of runs, or of a run's rounds, by name.
        test_images: Numbers of test images of the clients.

    Returns:
        The weighted mean if the numbers of test images differ by more than a factor of :data:`UNEVEN`, and the mean
        over the clients that took part recently if it differs.

    >>> scores_beside([{"personal/local_test": 0.5, "personal/local_test_recent": 0.75}], [3, 31])
    ['personal/local_test_weighted', 'personal/local_test_recent']
    >>> scores_beside([{"personal/local_test": 0.5, "personal/local_test_recent": 0.5}], [3, 30, 0])
    []
    """
    score = SCORES[0]
    tested = [count for count in test_images if count]
    names = []
    if tested and max(tested) > UNEVEN * min(tested):
        names.append(f"{score}_weighted")
    recent = f"{score}_recent"
    # In a file of results a score that is NaN is None.
    rows_with_both = [row for row in means if row.get(score) is not None and row.get(recent) is not None]
    # If all clients are recent, both are means of the same scores, up to rounding.
    if any(abs(row[recent] - row[score]) > 1e-9 for row in rows_with_both):
        names.append(recent)
    return names


def table(column_titles: Sequence[str], rows: Sequence[Sequence[str]], left_columns: int = 1) -> str:
    """Lay out a Markdown table.

    Control characters and column separators in cells are replaced, since names may come from anyone's file.

    Args:
        column_titles: Titles of the columns.
        rows: Cells of each row.
        left_columns: Number of columns, from the first, that are aligned left. The others are aligned right.

    >>> print(table(["a", "b"], [["x", "10"]]))
    | a |  b |
    |---|---:|
    | x | 10 |
    """
    # Not by tabulate (0.10): its format `github` does not align numbers right in rendered Markdown, its `pipe` pads the
    # titles of narrow columns, and the cells of both would have to be cleaned here all the same.
    all_rows = []
    for row in (column_titles, *rows):
        all_rows.append([printable(text).replace("|", "¦") for text in row])
    widths = []
    rules = []
    for column in range(len(column_titles)):
        longest = max(len(row[column]) for row in all_rows)
        # Markdown needs three characters for a rule, of which a colon at its end aligns the column right.
        if column < left_columns:
            width = max(longest, 1)
            rules.append("-" * (width + 2))
        else:
            width = max(longest, 2)
            rules.append("-" * (width + 1) + ":")
        widths.append(width)
    lines = []
    for row in all_rows:
        cells = []
        for column, text in enumerate(row):
            if column < left_columns:
                cells.append(text.ljust(widths[column]))
            else:
                cells.append(text.rjust(widths[column]))
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, f"|{'|'.join(rules)}|")
    return "\n".join(lines)


def epsilon_text(value: float) -> str:
    """Format an ε with two decimal places.

    >>> epsilon_text(2.345), epsilon_text(float("inf")), epsilon_text(float("nan"))
    ('2.35', '∞', '–')
    """
    if math.isnan(value):
        return "–"
    return "∞" if value == math.inf else f"{value:.2f}"


def mean_and_std(values: Sequence[float]) -> str:
    """Format the mean ± (population) standard deviation of several ε.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([1.0, float("inf")])
    ('2.00 ± 1.00', '∞')
    """
    if not all(map(math.isfinite, values)):
        return epsilon_text(fmean(values))
    return f"{epsilon_text(fmean(values))} ± {epsilon_text(pstdev(values))}"


def client_table(
    scores_of_clients: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    test_mode: bool = False,
    client_names: Sequence[str] | None = None,
    unit: ScoreUnit = SHARES,
    metric: str = "accuracy",
    means: Mapping[str, float] | None = None,
    zero_shot: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Lay out a table with one row per client, up to ``ROWS``, and mean and standard deviation over all clients.

    Args:
        scores_of_clients: Each client's scores by name, NaN if it has none; ε if the name begins with ``privacy/``.
        sizes: Training images of each client.
        test_mode: Whether to add :data:`TEST_MODE`.
        client_names: Names of the clients; their numbers by default.
        unit: Unit of the scores.
        metric: The metric of the scores, the first of several.
        means: Means over the clients by name. Of those that are NaN no mean over the other clients is shown.
        zero_shot: Each client's scores before training by name, for a row with their means; None for no such row.
    """
    client_names = client_names or [str(client) for client in range(len(sizes))]
    rows = []
    for client, size in enumerate(sizes[:ROWS]):
        cells = [cell(name, values[client], unit) for name, values in scores_of_clients.items()]
        rows.append([client_names[client], str(size), *cells])
    if len(sizes) > ROWS:
        empty_cells = [""] * (1 + len(scores_of_clients))
        rows.append([f"… {len(sizes) - ROWS} more", *empty_cells])
    mean_cells = []
    for name, values in scores_of_clients.items():
        is_undefined = math.isnan((means or {}).get(name, 0))
        mean_cells.append("– ± –" if is_undefined else _mean_cell(name, values, unit))
    rows.append(["mean ± std", "", *mean_cells])
    if zero_shot:
        zero_shot_cells = []
        for name in scores_of_clients:
            zero_shot_cells.append(_mean_cell(name, zero_shot[name], unit) if name in zero_shot else "")
        rows.append(["zero-shot, mean ± std", "", *zero_shot_cells])
    titles = [title_with_metric(name, metric) for name in scores_of_clients]
    text = table(["client", "training images", *titles], rows)
    if test_mode:
        text += f"\n\n{TEST_MODE}"
    return text


def notes_on_means(
    means: Mapping[str, float],
    test_images: Sequence[int],
    recent: Sequence[bool],
    span: int,
    unit: ScoreUnit = SHARES,
) -> list[str]:
    """Return the lines below the table of clients that qualify the mean score on own images.

    Args:
        means: Scores of the run by name.
        test_images: Numbers of test images of the clients.
        recent: Whether each client took part in one of the last rounds.
        span: Number of these rounds.
        unit: Unit of the scores.
    """
    score = SCORES[0]
    lines = []
    for name in scores_beside([means], test_images):
        value = unit.number(means.get(name, math.nan))
        if name.endswith("_weighted"):
            tested = [count for count in test_images if count]
            lines.append(
                f"Clients have {min(tested)} to {max(tested)} test images. Weighted by these numbers, the mean of "
                f"{title(score)} is {value}."
            )
        else:
            rounds = f"the last {span} rounds"
            if span == 1:
                rounds = "the last round"
            lines.append(
                f"Mean of {title(score)} over the {sum(recent)} of {len(recent)} clients that took part in {rounds}: "
                f"{value}."
            )
    return lines


def _mean_cell(name: str, values: Sequence[float], unit: ScoreUnit) -> str:
    """Format the mean ± standard deviation over the clients that have the score."""
    if name == LAST_ROUND:
        return ""
    available = [value for value in values if not math.isnan(value)]
    if name.startswith(PRIVACY):
        return mean_and_std(available) if available else "–"
    if not available:
        return "– ± –"
    return f"{cell(name, fmean(available), unit)} ± {cell(name, pstdev(available), unit)}"


def shift_names(names: Iterable[str]) -> list[str]:
    """Return the names of mean scores on shifted test sets, sorted by shift, personal models first.

    Shares of images that look typical are among them.

    >>> shift_names(["personal/local_test", "personal/fog", "personal/fog_std", "global/fog", "comm/up_mb"])
    ['personal/fog', 'global/fog']
    >>> shift_names(["typical/fog", "both/fog", "global/fog", "typical/local_test", "typical/global_test"])
    ['global/fog', 'both/fog', 'typical/fog']
    """
    scores = {name for name in names if name.startswith((*SCORE_GROUPS, TYPICAL_SHARES)) and not is_spread(name)}
    order_of_groups = ["personal", "global", "both", "typical"]

    def sort_key(name: str) -> tuple[str, int]:
        group, _, shift = name.partition("/")
        return shift, order_of_groups.index(group)

    return sorted(scores - {*SCORES, *SCORES_OF_BOTH, TYPICAL, TYPICAL_OF_ALL, *MODES}, key=sort_key)


def scores_of_both(names: Iterable[str]) -> list[str]:
    """Return those of some names that are scores of predictions with both models, in the order of tables.

    >>> scores_of_both(["both/global_test", "both/local_test", "both/local_test_std", "personal/local_test"])
    ['both/local_test', 'both/global_test']
    """
    available = set(names)
    return [name for name in SCORES_OF_BOTH if name in available]


def shift_tables(
    scores_of_shifts: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], unit: ScoreUnit = SHARES
) -> list[str]:
    """Lay out a table of the score by kind of corruption and severity, for each shift and model.

    Runs whose clients predict with both models have a table of the shares of images that look typical, too.

    Args:
        scores_of_shifts: By shift and kind, the ``severity`` values, and the score at each of them by model.
        unit: Unit of the scores.
    """
    tables = []
    for shift, curve_of_kind in scores_of_shifts.items():
        all_severities: dict[float, None] = {}  # in order
        for curve in curve_of_kind.values():
            all_severities.update(dict.fromkeys(curve["severity"]))
        for model in ("personal", "global", "both", "typical"):
            if not all(model in curve for curve in curve_of_kind.values()):
                continue
            name = f"{model}/{shift}"
            header = [title(name), *(f"severity {severity:g}" for severity in all_severities), "mean"]
            rows = []
            for kind, curve in curve_of_kind.items():
                scores = dict(zip(curve["severity"], curve[model], strict=True))
                cells = [cell(name, scores.get(severity, math.nan), unit) for severity in all_severities]
                rows.append([kind, *cells, cell(name, fmean(curve[model]), unit)])
            tables.append(table(header, rows))
    return tables


def mode_line(scores: Mapping[str, float], unit: ScoreUnit = SHARES) -> str:
    """Format the scores of an ensemble's single models on one line; empty without an ensemble."""
    return ", ".join(f"{title(name)} {cell(name, scores[name], unit)}" for name in MODES if name in scores)


def cell(name: str, value: float, unit: ScoreUnit = SHARES) -> str:
    """Format one metric for a table; ``unit`` is that of scores."""
    if name == LAST_ROUND:
        return round_text(value)
    if name.startswith(PRIVACY):
        return epsilon_text(value)
    if name.startswith("train/"):
        return f"{value:.4f}"
    if name.startswith(("theory/", "updates/")) and name != "theory/ensemble_accuracy":
        return f"{value:.4g}"
    if name == ENTROPY:
        return f"{value:.4f} nats"
    if name.startswith(TYPICAL_SHARES):
        return percent(value)
    return unit.number(value)


def round_text(value: float) -> str:
    """Format the last round in which a client took part; a dash for NaN.

    >>> round_text(3), round_text(0), round_text(math.nan)
    ('3', 'never', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value else "never"


def percent(value: float) -> str:
    """Format a share in percent with two decimal places; a dash for NaN."""
    return "–" if math.isnan(value) else f"{100 * value:.2f}"
