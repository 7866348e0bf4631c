# SPDX-License-Identifier: Apache-2.0
"""What came out of a run, in sentences for readers who do not program."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perada.results.report import ScoreUnit, score_title
from perada.studies.report.baselines import PredictedScores, own_and_global, predicted_scores, predicts_with_both
from perada.studies.report.contrasts import ALONE, SHARED, Contrast
from perada.studies.report.facts import right_counts
from perada.studies.report.image_source import describe_images
from perada.studies.report.records import RunRecord

# The command prints the path of its page before it imports anything large.
if TYPE_CHECKING:
    from perada.studies.compare.differences import Difference


@dataclass(frozen=True)
class Point:
    """A point of a list: a statement, and the figures behind it.

    Attributes:
        statement: The statement, which the page emphasizes.
        figures: The figures.
    """

    statement: str
    figures: str


@dataclass(frozen=True)
class Outcome:
    """What came out of a run.

    Attributes:
        headline: The most important statement.
        paragraphs: What was done, and what the scores are.
        points: What the run is better or worse than.
        caveat: What the figures do not show; empty if there are none.
    """

    headline: str
    paragraphs: Sequence[str]
    points: Sequence[Point]
    caveat: str


def describe_outcome(record: RunRecord) -> Outcome | None:
    """Return what came out of a run; None if it has no scores of its clients."""
    scores = predicted_scores(record)
    if all(math.isnan(score) for score in scores.own):
        return None
    points: list[Point] = []
    baselines = record.baselines
    headline = _neutral_headline(record)
    caveat = ""
    if baselines is not None:
        alone = baselines.contrast_with(ALONE)
        shared = baselines.contrast_with(SHARED)
        if alone is not None:
            headline = _write_headline(alone)
            points.append(_compare_with_baseline(alone, "training alone", record))
            points += _describe_single_clients(record, alone)
        if shared is not None:
            points.append(_compare_with_baseline(shared, "one shared model for all clients (FedAvg)", record))
        if alone is not None:
            points.append(Point("What follows:", _describe_consequence(alone)))
        caveat = (
            "A difference is more than chance explains if a t-test over the clients says so (p < 0.05, after Holm's "
            "correction for all differences of the comparison); intervals have 95 % confidence. They cover the choice "
            "of clients, and on images of all clients also that of the test images, which all models have in common. "
            "Each method was trained once, and another random seed can change small differences: `perada "
            "compare --seeds 0 1 2` tells. The other runs are those of "
            f"{baselines.path.name}; those that `perada report --baselines` trained have this run’s learning rates, "
            "and may be better with others."
        )
    else:
        points.append(
            Point(
                "Whether taking part pays is not known.",
                "Each client training alone, and one shared model, were not trained beside this run; `perada report "
                "RUN --baselines --open` trains them.",
            )
        )
    global_difference = own_and_global(record)
    if global_difference is not None and (baselines is None or baselines.contrast_with(SHARED) is None):
        points.append(_compare_with_global_model(global_difference, record))
    return Outcome(headline, [_describe_run(record), _describe_scores(record, scores)], points, caveat)


def _neutral_headline(record: RunRecord) -> str:
    clients = _format_count(len(record.client_names), "client")
    return f"{clients} trained together for {_format_count(len(record.rounds), 'round')}"


def _write_headline(alone: Contrast) -> str:
    """Return what taking part brought in comparison with training alone."""
    sign_on_own = _sign_beyond_chance(alone.own)
    sign_on_everyone = 0 if alone.everyone is None else _sign_beyond_chance(alone.everyone)
    if sign_on_own > 0:
        if sign_on_everyone < 0:
            return "Taking part helps on a client’s own images, and harms on those of all clients"
        return "Taking part pays: clients predict their own images better than alone"
    if sign_on_own == 0:
        if sign_on_everyone > 0:
            return "No clear difference from training alone on a client’s own images; better on those of all clients"
        if sign_on_everyone < 0:
            return "No gain from taking part: no clear difference on own images, and worse on those of all clients"
        return "No clear difference from training alone"
    if sign_on_everyone > 0:
        return "Taking part costs accuracy on a client’s own images, and helps on those of all clients"
    return "Training alone is better here"


def _describe_consequence(alone: Contrast) -> str:
    """Return what a client can conclude from the comparison with training alone."""
    sign_on_own = _sign_beyond_chance(alone.own)
    sign_on_everyone = 0 if alone.everyone is None else _sign_beyond_chance(alone.everyone)
    if sign_on_own > 0:
        return "a client that wants to predict its own images better has a reason to take part."
    if sign_on_everyone > 0:
        cost = "costs some accuracy there" if sign_on_own < 0 else "brings no clear gain there"
        return (
            "take part if images like those of other clients matter. If only a client’s own images count, taking "
            f"part {cost}, and training alone sends nothing."
        )
    return "these figures give no reason to take part; training alone sends nothing."


def _sign_beyond_chance(difference: "Difference") -> int:
    """Return 1 if the run is better by more than chance explains, −1 if it is worse, and 0 otherwise."""
    if not difference.is_significant:
        return 0
    return 1 if difference.mean > 0 else -1


def _describe_run(record: RunRecord) -> str:
    """Return what was done, what a client is, and what predicts."""
    clients = _format_count(len(record.client_names), "client")
    rounds = _format_count(len(record.rounds), "round")
    text = (
        f"{clients} trained together for {rounds}. A client is one participant that keeps its images, such as a "
        "hospital or a scanner; in a round, clients train on their own images and send numbers, but no images"
        f"{_describe_traffic(record)}. The server averages these numbers. "
    )
    images = describe_images(record)
    if images:
        text = f"{images} {text}"
    if not record.private:
        text += "Without differential privacy, they may reveal something about the images. "
    text += _describe_distillation(record)
    if predicts_with_both(record):
        text += (
            "A client predicts with two models: its own (the personal model) together with the common one (the global "
            "model). An image that does not look like its own is left to the common one."
        )
    elif record.personal_models:
        text += "A client predicts with its own model (the personal model), which it keeps."
    else:
        text += "All clients predict with one common model (the global model)."
    return text


def _describe_distillation(record: RunRecord) -> str:
    """Return what the server does with public images, with a space after it; empty if it does nothing."""
    training = record.info.get("training")
    if not isinstance(training, dict) or not training.get("distillation_steps"):
        return ""
    num_images = training.get("public_images")
    images = f"{num_images:,} public images" if num_images else "public images"
    return (
        f"On {images}, whose labels it does not need, the server then teaches the common model what the clients’ "
        "models predict (distillation). "
    )


def _describe_scores(record: RunRecord, predicted: PredictedScores) -> str:
    """Return what the scores are shares or means of, and the scores of the run."""
    own_mean = record.unit.text(_average_scores(predicted.own))
    num_images = sum(record.test_images)
    images = f"the {num_images:,} test images" if num_images else "test images"
    if record.first_metric == "accuracy" and record.unit.symbol:
        text = (
            f"A percentage is the share of a client’s test images that are predicted correctly. In means every client "
            f"counts the same. No model was trained on {images}. Of its own images a client predicts {own_mean} "
            "correctly"
        )
        personal = record.scores_of_clients.get("personal/local_test", [])
        if predicts_with_both(record) and any(not math.isnan(score) for score in personal):
            text += f" ({record.unit.text(_average_scores(personal))} with its own model only)"
    else:
        better = "lower" if record.lower_is_better else "higher"
        text = (
            f"Scores are {score_title(record.first_metric)} on {images}, means over clients; {better} is better, and "
            f"no model was trained on them. On its own images a client reaches {own_mean}"
        )
    if any(not math.isnan(score) for score in predicted.everyone):
        text += f", of those of all clients {record.unit.text(_average_scores(predicted.everyone))}"
    return f"{text}."


def _describe_traffic(record: RunRecord) -> str:
    """Return how much a client sends in a round, in parentheses; empty if this is not known."""
    megabytes = record.last("comm/up_mb") / max(1, len(record.client_names))
    if math.isnan(megabytes):
        return ""
    return f" ({megabytes:.2g} MB a client and round)"


def _compare_with_baseline(contrast: Contrast, opponent: str, record: RunRecord) -> Point:
    """Return how a run does against a baseline, on own images and on those of all clients."""
    lower_is_better = record.lower_is_better
    own_difference = contrast.own
    statement = f"Compared with {opponent}: {_describe_verdict(own_difference)} on own images"
    figures = _describe_difference(
        own_difference, record.unit, contrast.baseline.mean("own"), lower_is_better=lower_is_better
    )
    if contrast.everyone is not None:
        statement += f", {_describe_verdict(contrast.everyone)} on images of all clients"
        everyone_figures = _describe_difference(
            contrast.everyone, record.unit, contrast.baseline.mean("all"), lower_is_better=lower_is_better
        )
        figures = f"Own images: {figures} Images of all clients: {everyone_figures}"
    return Point(f"{statement}.", figures)


def _compare_with_global_model(difference: "Difference", record: RunRecord) -> Point:
    """Return how what clients predict with does against the run's own global model, on own images."""
    finite = [score for score in record.global_local if not math.isnan(score)]
    verdict = _describe_verdict(difference)
    return Point(
        f"Compared with this run’s global model, the one that the server has: {verdict} on own images.",
        _describe_difference(
            difference, record.unit, sum(finite) / len(finite), lower_is_better=record.lower_is_better
        ),
    )


def _describe_verdict(difference: "Difference") -> str:
    direction = _sign_beyond_chance(difference)
    if direction > 0:
        return "better"
    return "worse" if direction < 0 else "no clear difference"


def _describe_difference(
    difference: "Difference", unit: ScoreUnit, baseline_mean: float, *, lower_is_better: bool
) -> str:
    """Return both mean scores, their difference with its interval, and how many clients are better and worse.

    A difference above zero is an improvement, also where lower scores are better.
    """
    sign = -1 if lower_is_better else 1
    text = (
        f"{unit.number(baseline_mean + sign * difference.mean)} instead of {unit.text(baseline_mean)}, "
        f"{_format_signed(difference.mean, unit)}{_name_unit(unit)}"
    )
    if not math.isnan(difference.low):
        text += f" (95 % interval {_format_signed(difference.low, unit)} to {_format_signed(difference.high, unit)})"
    num_clients = sum(not math.isnan(value) for value in difference.of_clients)
    num_equal = num_clients - difference.num_better - difference.num_worse
    text += f"; {difference.num_better} of {num_clients} clients better, {difference.num_worse} worse"
    if num_equal:
        text += f", {num_equal} equal"
    if not difference.is_significant:
        text += ". Chance may explain the difference"
    return f"{text}."


def _describe_single_clients(record: RunRecord, alone: Contrast) -> list[Point]:
    """Return for how many clients the difference to training alone is more than chance explains.

    The test compares two shares of correct predictions (Fisher's exact test). It takes the mistakes of both models as
    independent, although both read the same images, so it finds too few differences rather than too many.

    Returns:
        One point; none if scores are not counts of images.
    """
    tests = compare_counts(record, alone)
    if not tests:
        return []
    better = [test.client for test in tests if test.is_significant and test.difference > 0]
    worse = [test.client for test in tests if test.is_significant and test.difference < 0]
    num_level = len(tests) - len(better) - len(worse)
    names = record.client_names
    parts = []
    if better:
        parts.append(f"better off: {', '.join(names[client] for client in better[:5])}")
    if worse:
        parts.append(f"worse off: {', '.join(names[client] for client in worse[:5])}")
    largest = max(tests, key=lambda test: abs(test.difference))
    signed_count = f"{largest.difference:+d}".replace("-", "−")
    parts.append(f"the largest difference is {signed_count} of {largest.num_images} images ({names[largest.client]})")
    fewest = min(test.num_images for test in tests)
    most = max(test.num_images for test in tests)
    range_text = str(fewest) if fewest == most else f"{fewest} to {most}"
    return [
        Point(
            f"For {num_level} of {len(tests)} single clients the test images are too few to tell this run from "
            "training alone.",
            f"A client has {range_text} of its own; {'; '.join(parts)}.",
        )
    ]


@dataclass(frozen=True)
class CountTest:
    """The test of a client's correct predictions against those of its baseline.

    Attributes:
        client: Number of the client.
        num_images: Number of its test images.
        difference: Correct predictions of the run minus those of the baseline.
        is_significant: Whether this is more than chance explains, after Holm's correction for the number of clients.
    """

    client: int
    num_images: int
    difference: int
    is_significant: bool


def compare_counts(record: RunRecord, contrast: Contrast) -> list[CountTest]:
    """Compare each client's correct predictions with those of a baseline with the same test images.

    Returns:
        The tests of the clients that have scores; empty if scores are not counts of images, or the baseline is a mean
        over several seeds.
    """
    own_counts = right_counts(record, predicted_scores(record).own)
    scores = contrast.baseline.scores["own"]
    if not own_counts or len(scores) != 1:
        return []
    other_counts = right_counts(record, scores[0].tolist())
    if not other_counts:
        return []
    from scipy.stats import fisher_exact

    from perada.studies.compare.differences import LEVEL, holm

    tests = []
    p_values = []
    for client, (own_count, other_count) in enumerate(zip(own_counts, other_counts, strict=True)):
        if own_count is None or other_count is None:
            continue
        counts = [
            [own_count.right, own_count.num_images - own_count.right],
            [other_count.right, other_count.num_images - other_count.right],
        ]
        p_values.append(float(fisher_exact(counts).pvalue))
        tests.append(CountTest(client, own_count.num_images, own_count.right - other_count.right, is_significant=False))
    corrected = []
    for test, p_value in zip(tests, holm(p_values), strict=True):
        corrected.append(replace(test, is_significant=p_value < LEVEL))
    return corrected


def _average_scores(client_scores: Sequence[float]) -> float:
    """Return the mean of the scores that are not NaN, of which there is one."""
    finite = [score for score in client_scores if not math.isnan(score)]
    return sum(finite) / len(finite)


def _format_signed(value: float, unit: ScoreUnit) -> str:
    """Return a difference with its sign; 0 has none."""
    text = f"{unit.factor * value:+.1f}" if unit.symbol else f"{value:+.3g}"
    if float(text) == 0:
        return "0"
    return text.replace("-", "−")


def _name_unit(unit: ScoreUnit) -> str:
    return " points" if unit.symbol else ""


def _format_count(number: int, word: str) -> str:
    """Return a number and what is counted.

    >>> _format_count(1, "round"), _format_count(12, "client")
    ('1 round', '12 clients')
    """
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
