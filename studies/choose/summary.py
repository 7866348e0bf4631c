# SPDX-License-Identifier: Apache-2.0
"""What a search found, in sentences: the advice, what to expect, and a paragraph for an e-mail."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from perada.results.report import SHARES, score_title
from perada.studies.choose.candidates import METHODS
from perada.studies.choose.trials import CLEAR_LEAD, HeldOutScores, lead
from perada.studies.compare.comparison import CRITERIA, EVERYONE, MEAN, MODELS, OWN, ComparedRow, Comparison
from perada.studies.compare.differences import PRIOR_DEGREES_OF_FREEDOM, Difference

ALONE = "standalone"
BOTH_SENTENCE = (
    "Images that look like the client's own are judged by its own model, and others with the help of the shared one."
)


@dataclass(frozen=True)
class Interval:
    """A score that is expected, and the 95 % prediction interval of a training with another seed."""

    mean: float
    low: float
    high: float


def row_of(comparison: Comparison, label: str, way: str) -> ComparedRow | None:
    """Return the row of a method and a way to predict; None if it was not trained on all images."""
    for name in (f"{label}, {MODELS[way]}", label):
        for row in comparison.rows:
            if row.name == name:
                return row
    return None


def expected_score(comparison: Comparison, row: ComparedRow, criterion: str) -> Interval:
    """Return what a training with another seed is expected to reach on the same test images.

    The spread over seeds is pooled over all rows, since few seeds hardly show that of one row. With one seed, the
    interval is not known, and its ends are NaN.
    """
    from scipy import stats

    mean = row.mean(criterion)
    num_seeds = len(comparison.seeds)
    if num_seeds < 2:
        return Interval(mean, math.nan, math.nan)
    variances = []
    for other in comparison.rows:
        with_score = np.isfinite(other.scores[criterion]).all(0)
        means = other.scores[criterion][:, with_score].mean(1)
        variances.append(float(means.var(ddof=1)))
    # Differences are judged in the same way: the spread of all rows counts as much as two more seeds.
    own_degrees = num_seeds - 1
    degrees = own_degrees + PRIOR_DEGREES_OF_FREEDOM
    own_variance = float(np.nanmean(row.scores[criterion], 1).var(ddof=1))
    variance = (own_degrees * own_variance + PRIOR_DEGREES_OF_FREEDOM * fmean(variances)) / degrees
    student = stats.t(degrees)
    half_width = float(student.ppf(0.975)) * math.sqrt(variance * (1 + 1 / num_seeds))
    return Interval(mean, mean - half_width, mean + half_width)


def metric_phrase(comparison: Comparison, metric: str, score: float) -> str:
    """Return a score in words.

    A share of right images is a number of images of a hundred, which everybody reads alike.
    """
    if metric == "accuracy" and comparison.unit is SHARES:
        return f"right on {100 * score:.0f} of 100 images"
    return f"{score_title(metric)} {comparison.unit.text(score)}"


def interval_text(comparison: Comparison, interval: Interval) -> str:
    """Return a score with its interval."""
    text = comparison.unit.text(interval.mean)
    if math.isnan(interval.low):
        return f"{text} (one seed: how much another one differs is not known)"
    low = interval.low
    high = interval.high
    if comparison.unit is SHARES:
        low = max(low, 0.0)
        high = min(high, 1.0)
    return f"{text} ({comparison.unit.number(low)} to {comparison.unit.number(high)} with another seed)"


def certainty(entry: Difference, comparison: Comparison) -> str:
    """Return whether a difference is larger than chance explains, in words."""
    if len(comparison.seeds) == 1:
        return "one seed cannot tell whether that is chance"
    return "more than chance explains" if entry.is_significant else "which chance may explain"


def difference_between(
    comparison: Comparison, criterion: str, first: ComparedRow, second: ComparedRow
) -> Difference | None:
    """Return the difference between two rows; None if they are one row."""
    for entry in comparison.differences(criterion, reference=first.name):
        if entry.second == second.name:
            return entry
    return None


def format_points(comparison: Comparison, value: float) -> str:
    """Return a difference of scores with its sign and unit."""
    if comparison.unit is SHARES:
        return f"{100 * value:+.1f} percentage points".replace("-", "−")
    return f"{value:+.3g}".replace("-", "−")


def advice(
    comparison: Comparison | None, chosen: HeldOutScores, second: HeldOutScores | None, *, goal: str, metric: str
) -> list[str]:
    """Return the advice as paragraphs: what to take, what to expect, and what would change it.

    Args:
        comparison: The runs on all training images; None if they cannot be compared.
        chosen: What the held-out images chose.
        second: The best setting of another method; None if there is none.
        goal: What the choice shall be good at.
        metric: Name of the metric.
    """
    method = METHODS[chosen.candidate.method]
    text = f"**Take {method.title}.** {method.sentence}"
    if chosen.way == "both":
        text += f" {BOTH_SENTENCE}"
    if chosen.candidate.method == ALONE:
        text += " Training together was not better on held-out images, so nothing needs to be sent."
    paragraphs = [text]
    if second is not None:
        paragraphs.append(_describe_choice(chosen, second, goal))
    row = None if comparison is None else row_of(comparison, chosen.candidate.method, chosen.way)
    if comparison is None or row is None:
        paragraphs.append(
            "This was chosen on held-out images only: it was not compared with other methods on test images."
        )
        return paragraphs
    expectations = []
    for criterion in (OWN, EVERYONE):
        if criterion in comparison.criteria:
            interval = expected_score(comparison, row, criterion)
            expectations.append(f"- {CRITERIA[criterion]}: {interval_text(comparison, interval)}")
    paragraphs.append("\n".join([f"What to expect of `best.yaml` ({score_title(metric)}):", "", *expectations]))
    paragraphs += _compare_with_alone(comparison, row)
    together = None if second is None else row_of(comparison, second.candidate.method, second.way)
    if row.trains_alone and together is not None:
        paragraphs.append(_describe_training_together(comparison, together, row))
    paragraphs += _find_doubts(comparison, row)
    return paragraphs


def _describe_choice(chosen: HeldOutScores, second: HeldOutScores, goal: str) -> str:
    """Return how clearly the held-out images chose."""
    difference = lead(chosen, second)
    unit = chosen.unit
    if difference.mean == 0:
        return f"On images that clients held out of training, {second.candidate.method} is level with it."
    text = f"By {goal_text(goal)}, on images that clients held out of training, it is ahead of "
    text += f"{second.candidate.method} by {unit.number(difference.mean)} ± {unit.number(difference.standard_error)} "
    text += "(standard error)"
    if not difference.mean > CLEAR_LEAD * difference.standard_error:
        return f"{text}. Chance may have chosen between the two."
    return f"{text}."


def _compare_with_alone(comparison: Comparison, row: ComparedRow) -> list[str]:
    """Return what a row gains over training alone."""
    alone = row_of(comparison, ALONE, "personal")
    if alone is None or alone is row:
        return []
    parts = []
    for criterion in (OWN, EVERYONE):
        if criterion not in comparison.criteria:
            continue
        entry = difference_between(comparison, criterion, row, alone)
        if entry is not None:
            sentence = f"{_change_text(comparison, entry)} on {CRITERIA[criterion]}"
            if criterion == OWN:
                sentence += f" (better at {entry.num_better} of {comparison.num_clients} clients, worse at "
                sentence += f"{entry.num_worse})"
            parts.append(f"{sentence}, {certainty(entry, comparison)}")
    return [f"Compared with training alone: {'; '.join(parts)}."] if parts else []


def _describe_training_together(comparison: Comparison, together: ComparedRow, alone: ComparedRow) -> str:
    """Return how the best method that sends something compares with training alone, the choice."""
    parts = []
    for criterion in (OWN, EVERYONE):
        if criterion in comparison.criteria:
            entry = difference_between(comparison, criterion, together, alone)
            if entry is not None:
                change = f"{_change_text(comparison, entry)} on {CRITERIA[criterion]}"
                parts.append(f"{change} ({certainty(entry, comparison)})")
    return f"The best way of training together that was found, {together.name}, is {' and '.join(parts)}."


def _change_text(comparison: Comparison, entry: Difference) -> str:
    """Return a difference in words, which are the same where lower scores are better."""
    if entry.mean == 0:
        return "equal"
    direction = "better" if entry.mean > 0 else "worse"
    return f"{direction} by {format_points(comparison, abs(entry.mean)).removeprefix('+')}"


def _find_doubts(comparison: Comparison, row: ComparedRow) -> list[str]:
    """Return by which goals the test images favour another row, and whether that is more than chance."""
    lines = []
    for criterion in comparison.criteria:
        best = comparison.best(criterion)
        if best is row:
            continue
        entry = difference_between(comparison, criterion, best, row)
        if entry is None:
            continue
        lead = format_points(comparison, entry.mean).removeprefix("+")
        lines.append(f"- {CRITERIA[criterion]}: {best.name} is ahead by {lead}, {certainty(entry, comparison)}")
    if not lines:
        return []
    head = "On the test images, which had no part in the choice, other rows are ahead by some goals:"
    tail = "Recipes of all methods of the last rung are in the folder `recipes`."
    return ["\n".join([head, "", *lines, "", tail])]


def email(  # facts of one paragraph
    comparison: Comparison | None,
    chosen: HeldOutScores,
    second: HeldOutScores | None,
    *,
    metric: str,
    num_clients: int,
    num_train: int,
    num_test: int,
    rounds: int,
) -> str:
    """Return a paragraph for readers who know nothing of federated learning.

    Args:
        comparison: The runs on all training images; None if they cannot be compared.
        chosen: What the held-out images chose.
        second: The best setting of another method; None if there is none.
        metric: Name of the metric.
        num_clients: Number of clients.
        num_train: Number of all training images.
        num_test: Number of all test images.
        rounds: Rounds of training.
    """
    method = METHODS[chosen.candidate.method]
    sentences = [
        f"We tested how the {num_clients} sites can best train an image model together without exchanging images, on "
        f"{num_train} training images and {num_test} test images.",
        f"Best suited: {_use_plain_words(method.sentence)}",
    ]
    if chosen.way == "both":
        sentences.append(_use_plain_words(BOTH_SENTENCE))
    row = None if comparison is None else row_of(comparison, chosen.candidate.method, chosen.way)
    if comparison is None or row is None:
        sentences.append("This is a first result: it was not confirmed on test images.")
        return " ".join(sentences)
    sentences.append(_describe_scores(comparison, row, metric))
    sentences += _describe_gain(comparison, row)
    together = None if second is None else row_of(comparison, second.candidate.method, second.way)
    if row.trains_alone and together is not None:
        sentences.append(_use_plain_words(_describe_training_together(comparison, together, row)))
    if not row.trains_alone:
        sentences.append(
            f"Images stay where they are: in each of the {rounds} rounds a site sends {_size_text(row.megabytes)} of "
            "model parameters."
        )
    sentences.append(_describe_limits(comparison))
    return " ".join(sentences)


def _use_plain_words(sentence: str) -> str:
    """Return a sentence with the word that a newcomer uses for a client."""
    for client, site in (("clients", "sites"), ("client", "site")):
        sentence = sentence.replace(client, site)
    return sentence


def _describe_scores(comparison: Comparison, row: ComparedRow, metric: str) -> str:
    text = f"On its own test images a site's model is {metric_phrase(comparison, metric, row.mean(OWN))}"
    if metric != "accuracy":
        text = f"On a site's own test images: {metric_phrase(comparison, metric, row.mean(OWN))}"
    if EVERYONE in comparison.criteria:
        text += f", on the test images of all sites {metric_phrase(comparison, metric, row.mean(EVERYONE))}"
    return f"{text} (means over the sites)."


def _describe_gain(comparison: Comparison, row: ComparedRow) -> list[str]:
    """Return the sentence on training alone, where there is one."""
    alone = row_of(comparison, ALONE, "personal")
    if alone is None or alone is row:
        return []
    entry = difference_between(comparison, OWN, row, alone)
    if entry is None:
        return []
    text = f"Compared with every site training alone, that is {_change_text(comparison, entry)} on own images"
    text += f" ({certainty(entry, comparison)})"
    if EVERYONE in comparison.criteria:
        abroad = difference_between(comparison, EVERYONE, row, alone)
        if abroad is not None:
            text += f" and {_change_text(comparison, abroad)} on images of all sites"
            text += f" ({certainty(abroad, comparison)})"
    return [f"{text}."]


def _size_text(megabytes: float) -> str:
    return f"{1000 * megabytes:.0f} kB" if megabytes < 1 else f"{megabytes:.1f} MB"


def _describe_limits(comparison: Comparison) -> str:
    if len(comparison.seeds) == 1:
        return "Training was done once, so that other results are possible when it is repeated."
    return f"The figures are means of {len(comparison.seeds)} trainings; new images may give other ones."


def goal_text(goal: str) -> str:
    """Return a goal in words."""
    return "the mean of own images and all clients' images" if goal == MEAN else CRITERIA[goal]


def list_lines(lines: Sequence[str]) -> str:
    """Return lines as a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)
