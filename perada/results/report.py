# SPDX-License-Identifier: Apache-2.0
"""What a run measured, as tables of Markdown. Nothing large is imported."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from perada.core.text import is_spread, printable

TEST_MODE = (
    "Test mode, not private: noise follows from the run's seed (secure_rng: false). Whoever knows or guesses it can "
    "take the noise off, whatever ε says. Do not release what was trained so."
)
SCORES = ("personal/local_test", "personal/global_test", "global/global_test")
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
"""What the columns of each client's ε, and of those after a round, are called."""
LAST_ROUND = "last_round"
"""Among the values of each client, the last round in which it took part, counted from 1; 0 for none."""
UNEVEN = 10
"""The weighted mean is shown beside the plain one where one client has so many times the test images of another."""
TITLES = {
    LAST_ROUND: "last round",
    "personal/local_test": "own images",
    "personal/global_test": "all clients' images",
    "global/global_test": "global model",
    "global/local_test": "global model on own images",
    "global/best_mode": "best mode",
    "global/worst_mode": "worst mode",
    ENTROPY: "entropy of the modes",
}
"""What scores are called in tables that people read; files keep the names of the metrics."""
_FIGURES = {
    "std": "std",
    "worst": "worst client",
    "p10": "10th percentile",
    "weighted": "weighted by images",
    "recent": "recent clients",
}
ROWS = 20
"""Clients that a table shows."""
SHIFTS_FILE = "shifts.json"
"""Scores by kind of corruption and severity, in a run's folder."""


def title(name: str) -> str:
    """The words for a metric in a table that people read; a name without words of its own stays.

    >>> title("personal/local_test"), title("personal/local_test_ece"), title("global/global_test_ece")
    ('own images', 'own images, ece', 'global model, ece')
    >>> title("personal/global_test_worst"), title("personal/fog"), title("train/local_loss")
    ("all clients' images, worst client", 'fog, personal models', 'training loss, local')
    >>> title("personal/local_test_f1_weighted"), title("theory/personal_distance_std")
    ('own images, f1_weighted', 'theory/personal_distance_std')
    """
    words = TITLES | EPSILONS
    if name in words:
        return words[name]
    if name.startswith(("personal/", "global/")) and is_spread(name):
        mean, _, ending = name.rpartition("_")
        return f"{title(mean)}, {_FIGURES[ending]}"
    for score in SCORES:
        if name.startswith(f"{score}_"):
            return f"{TITLES[score]}, {name.removeprefix(f'{score}_')}"
    group, _, rest = name.partition("/")
    if group == "train" and rest.endswith("_loss"):
        return f"training loss, {rest.removesuffix('_loss')}"
    if group in ("personal", "global") and rest:  # a shifted test set
        return f"{rest}, {'personal models' if group == 'personal' else 'global model'}"
    return name


def scores_beside(means: Iterable[Mapping[str, float]], test_images: Iterable[int]) -> list[str]:
    """Names of the figures that belong beside the mean score on own images, since it hides something.

    Args:
        means: Scores of runs, or of a run's rounds, by name.
        test_images: Numbers of test images of the clients.

    Returns:
        The weighted mean where the numbers of test images differ by more than :data:`UNEVEN` times, and the mean over
        the clients that took part lately where that is another.

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
    # Both are means of the same scores where all clients are recent, but for rounding.
    if any(abs(row[f"{score}_recent"] - row[score]) > 1e-9 for row in means if {score, f"{score}_recent"} <= set(row)):
        names.append(f"{score}_recent")
    return names


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out a Markdown table; the first columns, as many as ``left``, are aligned left, the others right.

    Control characters and what would end a cell are replaced: names may come from anyone's file.

    >>> print(table(["a", "b"], [["x", "10"]]))
    | a |  b |
    |---|---:|
    | x | 10 |
    """
    header, *rows = [[printable(cell).replace("|", "¦") for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    widths = [max(width, 1 + (column >= left)) for column, width in enumerate(widths)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column >= left else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    rule = "|".join("-" * (width + 1) + "-:"[column >= left] for column, width in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def epsilon_text(value: float) -> str:
    """An ε with two digits.

    >>> epsilon_text(2.345), epsilon_text(float("inf")), epsilon_text(float("nan"))
    ('2.35', '∞', '–')
    """
    return "–" if math.isnan(value) else "∞" if value == math.inf else f"{value:.2f}"


def mean_and_std(values: Sequence[float]) -> str:
    """Mean ± standard deviation of several ε, those of a whole population.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([1.0, float("inf")])
    ('2.00 ± 1.00', '∞')
    """
    if not all(map(math.isfinite, values)):
        return epsilon_text(fmean(values))
    return f"{epsilon_text(fmean(values))} ± {epsilon_text(pstdev(values))}"


def client_table(
    scores: Mapping[str, Sequence[float]],
    sizes: Sequence[int],
    test_mode: bool = False,
    names: Sequence[str] | None = None,
) -> str:
    """One row per client, then mean and standard deviation of all; of many clients the first ``ROWS`` are shown.

    Args:
        scores: Each client's scores by name, NaN where it has none; ε where the name begins with ``privacy/``.
        sizes: Training images of each client.
        test_mode: Whether the noise of a private run follows from its seed, which is then said.
        names: Of the clients; by default their numbers.
    """
    called, rows = names or [str(client) for client in range(len(sizes))], []
    for client, size in enumerate(sizes[:ROWS]):
        rows.append([called[client], str(size), *(cell(name, values[client]) for name, values in scores.items())])
    if len(sizes) > ROWS:
        rows.append([f"… {len(sizes) - ROWS} more", *[""] * (1 + len(scores))])
    rows.append(["mean ± std", "", *(_spread(name, values) for name, values in scores.items())])
    shown = table(["client", "training images", *map(title, scores)], rows)
    return f"{shown}\n\n{TEST_MODE}" if test_mode else shown


def notes_on_means(
    means: Mapping[str, float], test_images: Sequence[int], recent: Sequence[bool], span: int
) -> list[str]:
    """Lines below the table of clients on what the mean score on own images hides.

    Args:
        means: Scores of the run by name.
        test_images: Numbers of test images of the clients.
        recent: Whether each client took part in one of the last rounds.
        span: Number of these rounds.
    """
    score = SCORES[0]
    lines = []
    for name in scores_beside([means], test_images):
        value = percent(means.get(name, math.nan))
        if name.endswith("_weighted"):
            tested = [count for count in test_images if count]
            lines.append(
                f"Clients have {min(tested)} to {max(tested)} test images. Weighted by these numbers, the mean of "
                f"{title(score)} is {value}."
            )
        else:
            rounds = "the last round" if span == 1 else f"the last {span} rounds"
            lines.append(
                f"Mean of {title(score)} over the {sum(recent)} of {len(recent)} clients that took part in {rounds}: "
                f"{value}."
            )
    return lines


def _spread(name: str, values: Sequence[float]) -> str:
    """Mean ± standard deviation of the clients that have the score."""
    known = [value for value in values if not math.isnan(value)]
    if name == LAST_ROUND:
        return ""
    if not known:
        return "–" if name.startswith(PRIVACY) else "– ± –"
    return mean_and_std(known) if name.startswith(PRIVACY) else f"{percent(fmean(known))} ± {percent(pstdev(known))}"


def shift_names(names: Iterable[str]) -> list[str]:
    """Those of the ``names`` that are mean scores on a shifted test set.

    >>> shift_names(["personal/local_test", "personal/fog", "personal/fog_std", "global/fog", "comm/up_mb"])
    ['personal/fog', 'global/fog']
    """
    scores = [name for name in names if name.startswith(("personal/", "global/")) and not is_spread(name)]
    return sorted({*scores} - {*SCORES, *MODES}, key=lambda name: (name.partition("/")[2], name[0] != "p"))


def shift_tables(kinds: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[str]:
    """For each shift of corruptions and each model, a table of its score by kind and severity, and of their mean.

    By shift, kind of corruption and model (or ``severity``) the ``kinds`` have the score at each severity.
    """
    tables = []
    for shift, curves in kinds.items():
        severities = list(dict.fromkeys(severity for curve in curves.values() for severity in curve["severity"]))
        for model in ("personal", "global"):
            if all(model in curve for curve in curves.values()):
                header = [title(f"{model}/{shift}"), *(f"severity {severity:g}" for severity in severities), "mean"]
                tables.append(table(header, [_curve_row(*one, model, severities) for one in curves.items()]))
    return tables


def _curve_row(kind: str, curve: Mapping[str, Sequence[float]], model: str, severities: Sequence[float]) -> list[str]:
    known = dict(zip(curve["severity"], curve[model], strict=True))
    return [kind, *(percent(known.get(severity, math.nan)) for severity in severities), percent(fmean(curve[model]))]


def mode_line(scores: Mapping[str, float]) -> str:
    """What the models of an ensemble do alone, on one line; empty where there is no ensemble."""
    return ", ".join(f"{title(name)} {cell(name, scores[name])}" for name in MODES if name in scores)


def cell(name: str, value: float) -> str:
    """One metric as a table shows it."""
    if name == LAST_ROUND:
        return round_text(value)
    if name.startswith(PRIVACY):
        return epsilon_text(value)
    if name.startswith("train/"):
        return f"{value:.4f}"
    if name.startswith(("theory/", "updates/")) and name != "theory/ensemble_accuracy":
        return f"{value:.4g}"
    return f"{value:.4f} nats" if name == ENTROPY else percent(value)


def round_text(value: float) -> str:
    """The last round in which a client took part; a dash for NaN.

    >>> round_text(3), round_text(0), round_text(math.nan)
    ('3', 'never', '–')
    """
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if value else "never"


def percent(value: float) -> str:
    """A share in percent with two digits; a dash for NaN."""
    return "–" if value != value else f"{100 * value:.2f}"
