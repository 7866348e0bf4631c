# SPDX-License-Identifier: Apache-2.0
"""What a page says came out of a run, against SciPy's tests, closed forms, and the images that were written."""

import csv
import json
import math
import re

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from perada.cli import main
from perada.studies.compare.differences import difference
from perada.studies.report.baselines import own_and_global, read_baselines
from perada.studies.report.contrasts import ALONE, SHARED, with_shared_images
from perada.studies.report.facts import RightCount, right_counts
from perada.studies.report.image_source import names_of_sets
from perada.studies.report.outcome import compare_counts, describe_outcome
from perada.studies.report.page import with_pictures, write_page
from perada.studies.report.pictures import find_predicted_images
from perada.studies.report.records import RunRecord
from perada.studies.report.sections import sections
from perada.system.digests import sealed
from perada.tasks import MultiLabel, Regression

NAMES = ["north", "south", "east", "west", "centre", "coast"]
IMAGES = [20, 40, 30, 50, 47, 60]
INFO = {"num_classes": 2, "clients": NAMES, "algorithm": "PerAda", "backbone": "test_resnet", "seed": 0}


def shares(*right):
    """Scores of clients that predict these numbers of their images correctly."""
    return [number / images for number, images in zip(right, IMAGES, strict=True)]


def a_run(folder, personal, everyone=None, **options):
    clients = {"personal/local_test": list(personal)}
    if everyone is not None:
        clients["personal/global_test"] = list(everyone)
    options = {"info": INFO, "test_images": IMAGES, "seed": 0} | options
    rounds = [{"round": number, "comm/up_mb": 0.6} for number in range(3)]
    return RunRecord("run", folder, rounds=rounds, scores_of_clients=clients, **options)


def entry(algorithm, personal, everyone=None, *, seed=0, megabytes=0.1, **fields):
    """A run in a file of `perada compare`."""
    clients = {"personal/local_test": list(personal)}
    record = {
        "stage": "run",
        "recipe": "quickstart",
        "label": algorithm.lower(),
        "seed": seed,
        "args": ["--config", "quickstart", f"--federated.algorithm=perada.algorithms.fedavg.{algorithm}"],
        "variant": [],
        "point": {},
        "varied": {},
        "digest": "",
        "chosen_by": ["personal/local_test", "personal/global_test"],
        "personal/local_test": float(np.mean(personal)),
        "client_test_images": IMAGES,
        "client_names": NAMES,
        "metric": "accuracy",
        "mb_sent": megabytes,
    }
    if everyone is not None:
        clients["personal/global_test"] = list(everyone)
    return record | {"clients": clients} | fields


def write(path, *entries):
    path.write_text(json.dumps([sealed(one) for one in entries]), encoding="utf-8")
    return path


OWN = shares(15, 30, 27, 40, 34, 50)
EVERYONE = [0.7, 0.72, 0.69, 0.71, 0.7, 0.73]
OWN_ALONE = shares(14, 31, 20, 41, 30, 50)
EVERYONE_ALONE = [0.3, 0.35, 0.31, 0.28, 0.33, 0.3]
OWN_SHARED = shares(10, 20, 15, 30, 20, 33)
EVERYONE_SHARED = [0.7, 0.7, 0.7, 0.7, 0.7, 0.7]


@pytest.fixture
def run(tmp_path):
    """A run with both baselines."""
    path = write(
        tmp_path / "baselines.json",
        entry("Standalone", OWN_ALONE, EVERYONE_ALONE, megabytes=0),
        entry("FedAvg", OWN_SHARED, EVERYONE_SHARED),
    )
    record = a_run(tmp_path, OWN, EVERYONE)
    record.baselines = read_baselines(path, record)
    return record


def test_a_lead_of_a_few_shared_images_is_not_called_better():
    """Twelve clients with nearly the same model: all are right on 14 more of 575 images, which chance explains."""
    other = np.full(12, 0.657)
    personal_scores = other + 0.024 + np.linspace(-0.002, 0.002, 12)
    plain = difference("this run", "shared", personal_scores[None], other[None])
    assert plain.is_significant
    widened = with_shared_images(plain, (float(personal_scores.mean()), 0.657), 575, num_tests=4)
    assert not widened.is_significant
    error = math.sqrt((personal_scores.mean() * (1 - personal_scores.mean()) + 0.657 * (1 - 0.657)) / 575)
    assert widened.high - widened.mean == pytest.approx(stats.t(11).ppf(0.975) * error, rel=1e-3)
    far_ahead = difference("this run", "alone", personal_scores[None] + 0.2, other[None])
    assert with_shared_images(far_ahead, (float(personal_scores.mean()) + 0.2, 0.657), 575, num_tests=4).is_significant


def holm_by_hand(p_values):
    """For each p-value the largest of the corrected ones up to it, in increasing order."""
    ordered = sorted(p_values)
    corrected = [(len(ordered) - place) * value for place, value in enumerate(ordered)]
    return [min(1, max(corrected[: ordered.index(value) + 1])) for value in p_values]


def interval_with_images(pair, num_images):
    """Interval and p-value of a mean difference, with the binomial error of the images that both rows share."""
    differences = np.subtract(*pair)
    of_clients = np.var(differences, ddof=1) / len(differences)
    of_images = sum(np.mean(row) * (1 - np.mean(row)) / num_images for row in pair)
    error = math.sqrt(of_clients + of_images)
    student = stats.t(len(differences) - 1)
    mean = np.mean(differences)
    half_width = student.ppf(0.975) * error
    return mean - half_width, mean + half_width, 2 * student.sf(abs(mean) / error)


def test_figures_are_those_of_paired_t_tests(run):
    pairs = [(OWN, OWN_ALONE), (OWN, OWN_SHARED), (EVERYONE, EVERYONE_ALONE), (EVERYONE, EVERYONE_SHARED)]
    # The means of both test sets are a third criterion of a comparison, and count in the correction.
    for place in (0, 1):
        pairs.append(tuple(np.add(pairs[place][side], pairs[place + 2][side]) / 2 for side in (0, 1)))
    tests = [stats.ttest_rel(*pair) for pair in pairs]
    corrected = holm_by_hand([float(test.pvalue) for test in tests])
    results = []
    for name in (ALONE, SHARED):
        contrast = run.baselines.contrast_with(name)
        results += [contrast.own, contrast.everyone]
    expected_order = [0, 2, 1, 3]
    for entry, place in zip(results, expected_order, strict=True):
        interval = tests[place].confidence_interval(0.95)
        low = interval.low
        high = interval.high
        adjusted = corrected[place]
        if place in (2, 3):  # the clients' models have all test images in common
            low, high, p_value = interval_with_images(pairs[place], sum(run.test_images))
            adjusted = max(adjusted, min(1, 4 * p_value))
        assert [entry.low, entry.high] == pytest.approx([low, high])
        assert entry.adjusted_p_value == pytest.approx(adjusted)
    low, high = (100 * value for value in tests[0].confidence_interval(0.95))
    mean = 100 * float(np.mean(np.subtract(OWN, OWN_ALONE)))
    text = describe_outcome(run).points[0].figures
    expected = (
        f"{100 * np.mean(OWN):.1f} instead of {100 * np.mean(OWN_ALONE):.1f} %, {mean:+.1f} points "
        f"(95 % interval {low:+.1f} to {high:+.1f})"
    )
    assert expected.replace("-", "−") in text
    better = sum(a > b for a, b in zip(OWN, OWN_ALONE, strict=True))
    worse = sum(a < b for a, b in zip(OWN, OWN_ALONE, strict=True))
    assert f"{better} of 6 clients better, {worse} worse, {6 - better - worse} equal. Chance may explain" in text


NOISE = np.array([0.01, -0.01, 0.005, -0.005, 0.01, -0.01])


@pytest.mark.parametrize(
    ("personal", "everyone", "headline", "consequence"),
    [
        (0.2, 0.2, "Taking part pays", "has a reason to take part"),
        (0.2, -0.2, "helps on a client’s own images, and harms", "has a reason to take part"),
        (0.0, 0.2, "No clear difference .* own images; better on", "brings no clear gain there"),
        (0.0, 0.0, "No clear difference from training alone$", "no reason to take part"),
        (0.0, -0.2, "No gain from taking part", "no reason to take part"),
        (-0.2, 0.2, "costs accuracy on a client’s own images, and helps", "costs some accuracy there"),
        (-0.2, 0.0, "Training alone is better here", "no reason to take part"),
        (-0.2, -0.2, "Training alone is better here", "no reason to take part"),
        (0.2, None, "Taking part pays", "has a reason to take part"),
        (0.0, None, "No clear difference from training alone$", "no reason to take part"),
    ],
)
def test_the_headline_follows_from_both_test_sets(tmp_path, personal, everyone, headline, consequence):
    scores_of_others = None if everyone is None else 0.5 + 0 * NOISE
    path = write(tmp_path / "file.json", entry("Standalone", 0.5 + 0 * NOISE, scores_of_others, megabytes=0))
    scores = None if everyone is None else 0.5 + everyone + NOISE
    record = a_run(tmp_path, 0.5 + personal + NOISE, scores)
    record.baselines = read_baselines(path, record)
    outcome = describe_outcome(record)
    assert re.search(headline, outcome.headline)
    (follows,) = (point.figures for point in outcome.points if point.statement == "What follows:")
    assert consequence in follows


def test_lower_errors_are_better(tmp_path):
    info = INFO | {"task": Regression().record(), "num_classes": 1}
    info["training"] = {"metric": "auto"}
    errors = [3.0, 2.0, 4.0, 3.5, 2.5, 3.2]
    record = a_run(tmp_path, errors, info=info)
    others = [error + 1 + place / 100 for place, error in enumerate(errors)]
    fields = {"metric": "mae", "has_classes": False, "chosen_by": ["-personal/local_test"]}
    path = write(tmp_path / "file.json", entry("Standalone", others, megabytes=0, **fields))
    record.baselines = read_baselines(path, record)
    outcome = describe_outcome(record)
    assert outcome.headline.startswith("Taking part pays")
    assert f"{np.mean(errors):.4g} instead of {np.mean(others):.4g}, +1.02 (" in outcome.points[0].figures
    assert "lower is better" in outcome.paragraphs[1]
    assert right_counts(record, errors) == []


def test_clients_predict_with_both_models_where_the_run_does(tmp_path):
    record = a_run(tmp_path, OWN, EVERYONE, info=INFO | {"prediction": "both"})
    both = shares(16, 32, 28, 41, 35, 52)
    record.scores_of_clients |= {"both/local_test": both, "both/global_test": EVERYONE_SHARED}
    path = write(tmp_path / "file.json", entry("Standalone", OWN_ALONE, EVERYONE_ALONE, megabytes=0))
    record.baselines = read_baselines(path, record)
    contrast = record.baselines.contrast_with(ALONE)
    assert contrast.own.mean == pytest.approx(np.mean(np.subtract(both, OWN_ALONE)))
    assert contrast.everyone.mean == pytest.approx(np.mean(np.subtract(EVERYONE_SHARED, EVERYONE_ALONE)))
    outcome = describe_outcome(record)
    assert "its own (the personal model) together with the common one" in outcome.paragraphs[0]
    assert f"{100 * np.mean(both):.1f} % correctly" in outcome.paragraphs[1]
    (table,) = (table for section in sections(record) for table in section.tables if table.name == "clients_right")
    texts = {row[0]: row[2] for row in table.rows}
    assert texts == {name: f"{round(score * n)} of {n}" for name, score, n in zip(NAMES, both, IMAGES, strict=True)}
    record.info["prediction"] = "personal"
    assert "together with the common one" not in describe_outcome(record).paragraphs[0]


def test_mistakes_and_confidence_are_those_of_what_clients_predict_with(tmp_path):
    """Of a run that predicts with both models of a client: theirs are drawn, and each model has its table."""
    # Rows of client, class, predicted class and number of images.
    confusion = {
        "personal": [[0, 0, 0, 15], [0, 1, 0, 5]],
        "global": [[0, 0, 0, 9], [0, 0, 1, 11]],
        "both": [[0, 0, 0, 18], [0, 0, 1, 2]],
    }
    bins = {"personal": [0.9, 15], "global": [0.8, 9], "both": [0.85, 18]}
    calibration = {
        model: {"count": [0, 20], "right": [0, right], "confidence": [0.0, confidence]}
        for model, (confidence, right) in bins.items()
    }
    record = a_run(tmp_path, OWN, confusion=confusion, calibration=calibration)
    result = {section.key: section for section in sections(record)}
    confusion_figure, by_client = result["confusion"].figures
    assert "both models of each client together" in confusion_figure.alt
    assert "0 was taken for 1 (2 times)" in confusion_figure.alt
    assert "1 clients" in by_client.alt
    assert [table.name for table in result["confusion"].tables] == [
        "mistakes_personal",
        "mistakes_global",
        "mistakes_both",
    ]
    accuracies = [table.rows[0][2] for table in result["confusion"].tables]
    assert accuracies == [15 / 20, 9 / 20, 18 / 20]
    # The distance of confidence and accuracy in the only bin.
    assert "personal models 15.0 %, global model 35.0 %, both models 5.0 %" in result["calibration"].intro
    del confusion["both"]
    result = {section.key: section for section in sections(record)}
    assert "each client's personal model" in result["confusion"].figures[0].alt


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ("Digits", "The images are scikit-learn’s handwritten digits, divided among simulated participants."),
        (
            "{class_path: perada.data.Scanners, "
            "init_args: {dataset: {class_path: RandomPart, init_args: {dataset: CIFAR10}}}}",
            "The images are the photographs of CIFAR-10, divided among simulated participants; the scanners, which "
            "change how they look, are simulated, too.",
        ),
        (
            "{class_path: perada.data.Scanners, init_args: {dataset: mine.Scans}}",
            "The scanners, which change how images look, are simulated.",
        ),
        ("{class_path: perada.data.Images, init_args: {root: scans}}", ""),
        ("null", ""),
    ],
)
def test_the_lead_says_if_images_or_scanners_are_simulated(tmp_path, dataset, sentence):
    record = a_run(tmp_path, OWN, config=f"data:\n  dataset: {dataset}\n")
    lead, _ = describe_outcome(record).paragraphs
    assert lead.startswith(f"{sentence} 6 clients" if sentence else "6 clients trained together")


@pytest.mark.parametrize("config", ["", "[", "data: 3", "data: {dataset: {class_path: [1]}}", "data: {dataset: 3}"])
def test_a_configuration_that_names_no_set_says_nothing_of_images(config):
    assert names_of_sets(config) == []


def test_sets_within_one_another_without_end_are_not_followed(tmp_path):
    config = "data: {dataset: &a {class_path: Scanners, init_args: {dataset: *a}}}"
    assert names_of_sets(config) == ["Scanners"] * 10


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"distillation_steps": 20, "public_images": 359}, "On 359 public images, whose"),
        ({"distillation_steps": 20}, "On public images, whose"),
        ({"distillation_steps": 0, "public_images": 359}, None),
        ({}, None),
    ],
)
def test_the_lead_names_distillation_and_public_images(tmp_path, training, sentence):
    lead, _ = describe_outcome(a_run(tmp_path, OWN, info=INFO | {"training": training})).paragraphs
    assert ("distillation" in lead) == (sentence is not None)
    assert sentence is None or sentence in lead


@pytest.mark.parametrize(("right", "images"), [(34, 47), (0, 5), (47, 47), (1, 1), (500, 1000)])
def test_the_interval_of_a_count_is_wilsons(right, images):
    """The solutions p of |p − k/n| = z √(p (1 − p) / n), found as roots of the quadratic."""
    z = stats.norm.ppf(0.975)
    share = right / images
    roots = np.roots([1 + z**2 / images, -(2 * share + z**2 / images), share**2])
    count = RightCount.of(right, images)
    assert [count.low, count.high] == pytest.approx(sorted(roots.real.tolist()), abs=1e-9)


def test_shares_that_count_no_images_have_no_counts(tmp_path):
    record = a_run(tmp_path, OWN)
    assert [count.right for count in right_counts(record, OWN)] == [15, 30, 27, 40, 34, 50]
    assert right_counts(record, [*OWN[:5], math.nan])[5] is None
    assert right_counts(record, [*OWN[:5], 0.512345]) == []
    for change in (
        {"task": MultiLabel().record()},
        {"task": {"has_classes": True, "exclusive": True, "per_pixel": True, "default_metric": "accuracy"}},
        {"training": {"metric": "f1_macro"}},
    ):
        assert right_counts(a_run(tmp_path, OWN, info=INFO | change), OWN) == []


def fisher_by_hand(right, other, images):
    """The sum of the hypergeometric probabilities that are not above that of the table."""
    total = right + other
    probabilities = {}
    for first in range(max(0, total - images), min(images, total) + 1):
        probabilities[first] = (
            math.comb(images, first) * math.comb(images, total - first) / math.comb(2 * images, total)
        )
    observed = probabilities[right]
    return sum(value for value in probabilities.values() if value <= observed * (1 + 1e-7))


def test_single_clients_are_told_apart_by_counts(tmp_path):
    personal = (19, 30, 27, 10, 34, 50)
    alone = (4, 31, 25, 41, 30, 50)
    path = write(tmp_path / "file.json", entry("Standalone", shares(*alone), megabytes=0))
    record = a_run(tmp_path, shares(*personal))
    record.baselines = read_baselines(path, record)
    p_values = [fisher_by_hand(*counts) for counts in zip(personal, alone, IMAGES, strict=True)]
    expected = [value < 0.05 for value in holm_by_hand(p_values)]
    tests = compare_counts(record, record.baselines.contrast_with(ALONE))
    assert [test.is_significant for test in tests] == expected
    assert sum(expected) == 2
    assert [test.difference for test in tests] == [a - b for a, b in zip(personal, alone, strict=True)]
    point = describe_outcome(record).points[1]
    assert point.statement.startswith("For 4 of 6 single clients the test images are too few")
    assert "better off: north; worse off: west; the largest difference is −31 of 50 images (west)" in point.figures


def test_the_strongest_row_is_the_opponent(tmp_path):
    weak = entry("FedAvg", shares(1, 1, 1, 1, 1, 1), EVERYONE_SHARED, variant=["--training.lr_local=9"])
    path = write(tmp_path / "file.json", weak, entry("FedAvg", OWN_SHARED, EVERYONE_SHARED))
    baselines = read_baselines(path, a_run(tmp_path, OWN, EVERYONE))
    assert baselines.contrast_with(ALONE) is None
    assert baselines.contrast_with(SHARED).baseline.mean("own") == pytest.approx(np.mean(OWN_SHARED))


def test_names_may_be_left_out_of_the_file(tmp_path):
    path = write(tmp_path / "file.json", entry("Standalone", OWN_ALONE, megabytes=0, client_names=None))
    assert read_baselines(path, a_run(tmp_path, OWN)).contrast_with(ALONE) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client_test_images": [21, *IMAGES[1:]]}, "different test images"),
        ({"client_names": [*NAMES[:5], "lake"]}, "different clients"),
        ({"metric": "auroc"}, "different metrics"),
        ({"seed": 7}, "no seed has finished runs of all rows"),
        ({"mb_sent": 0.2}, "neither training alone nor FedAvg"),
        ({"failed": "ValueError"}, "neither training alone nor FedAvg"),
    ],
)
def test_a_file_that_does_not_fit_is_rejected(tmp_path, changes, message):
    path = write(tmp_path / "file.json", entry("Standalone", OWN_ALONE, megabytes=0) | changes)
    with pytest.raises(ValueError, match=message):
        read_baselines(path, a_run(tmp_path, OWN))


def test_a_missing_file_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--baselines=.*nothing\.json"):
        read_baselines(tmp_path / "nothing.json", a_run(tmp_path, OWN))


def test_without_baselines_the_page_says_that_the_gain_is_not_known(tmp_path):
    record = a_run(tmp_path, OWN, global_local=OWN_SHARED)
    outcome = describe_outcome(record)
    assert outcome.headline == "6 clients trained together for 3 rounds"
    assert outcome.points[0].statement == "Whether taking part pays is not known."
    difference = own_and_global(record)
    reference = stats.ttest_rel(OWN, OWN_SHARED)
    assert difference.mean == pytest.approx(np.mean(np.subtract(OWN, OWN_SHARED)))
    assert difference.p_value == pytest.approx(float(reference.pvalue))
    assert "this run’s global model, the one that the server has: better on own images" in outcome.points[1].statement
    record.global_local = OWN
    assert own_and_global(record) is None


def test_the_page_begins_with_the_outcome(run, tmp_path):
    text = write_page(tmp_path / "page", [run]).read_text(encoding="utf-8")
    headline = describe_outcome(run).headline
    assert f"<h1>{headline}</h1>" in text
    assert text.index("own images, training alone") < text.index('id="clients"')
    assert text.index('id="clients"') < text.index('<details class="technical">')
    with (tmp_path / "page" / "clients_right.csv").open(encoding="utf-8") as file:
        rows = {row["client"]: row for row in csv.DictReader(file)}
    assert rows["centre"]["right"] == "34 of 47"
    assert rows["centre"]["95 % interval"] == "58 to 83 %"
    assert float(rows["centre"]["training alone"]) == pytest.approx(30 / 47, abs=1e-6)
    assert not re.search(r"\d\.\d\d %", text)


def test_private_scores_are_left_out_with_their_baselines(run, tmp_path):
    run.has_signs_of_privacy = True
    text = write_page(tmp_path / "page", [run]).read_text(encoding="utf-8")
    assert "training alone" not in text
    assert f"{100 * np.mean(OWN):.1f}" not in text
    assert "The first figure" not in text and "The band" not in text  # there are no such figures


def predictions(folder, rows, model="personal", num_public=3):
    """A folder of `perada predict --config` with a picture for each row of client, class and predicted class."""
    (folder / "predictions" / "public").mkdir(parents=True)
    lines = [f"image,client,label,personal,global,{model if model == 'both' else 'other'},example_picture"]
    for number, (client, label, predicted) in enumerate(rows):
        path = f"predictions/{number}.png"
        Image.new("L", (8, 8), 20 * number).save(folder / path)
        personal = predicted if model == "personal" else 1 - predicted
        lines.append(f"{number},{client},{label},{personal},0,{predicted if model == 'both' else ''},{path}")
    lines.append("99,0,0,1,1,,")
    for number in range(num_public):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / "predictions" / "public" / f"{number}.png")
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("model", ["personal", "both"])
def test_right_and_wrong_predictions_are_shown(tmp_path, model):
    rows = [(0, 0, 0), (0, 1, 0), (1, 1, 1), (5, 0, 1)]
    folder = predictions(tmp_path / "predicted", rows, model)
    result = find_predicted_images(folder, num_clients=6, num_classes=2)
    assert [(image.client, image.label, image.predicted) for image in result] == rows
    record = with_pictures([a_run(tmp_path, OWN)], None, folder)
    assert [example.is_right for example in record.predicted_examples] == [True, False, True, False]
    assert [picture[0, 0].tolist() for picture in record.public_pictures] == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    text = write_page(tmp_path / "page", [record]).read_text(encoding="utf-8")
    assert text.count("✓</text>") == text.count("✗ (") == 2
    assert "Share this page only with those who may see the images." in text
    assert "3 of the server’s public images" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [((9, 0, 0), "has a client 9, but the run has 6"), ((0, 2, 0), "has a class 2, but the run has 2")],
)
def test_pictures_of_another_run_are_rejected(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        find_predicted_images(predictions(tmp_path / "damaged", [row]), num_clients=6, num_classes=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN", "--baselines"], "--baselines needs --output"),
        (["RUN", "--baselines", "--watch", "--output", "page"], "cannot be combined with --watch"),
        (["RUN", "RUN", "--output", "page", "--baselines"], "needs the folder of a single run"),
        (["RUN", "--output", "page", "--baselines", "nothing.json"], "needs a run with scores of its clients"),
    ],
)
def test_baselines_need_a_page_of_one_finished_run(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("epoch,step,personal/local_test\n0,0,0.9321\n")
    with pytest.raises(ValueError, match=message):
        main(["report", *[str(tmp_path / "run") if word == "RUN" else word for word in words]])


@pytest.mark.slow
def test_baselines_are_trained_once_with_the_runs_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.max_epochs=1", "--data.train_limit=200", "--data.test_limit=200", "--seed_everything=3"]
    main(["fit", "--config", "digits", *options])
    folder = tmp_path / "lightning_logs" / "version_0"
    main(["report", str(folder), "--baselines", "--output", "page"])
    trained = (folder / "baselines.json").read_bytes()
    entries = json.loads(trained)
    assert [(one["label"], one["seed"]) for one in entries if one["stage"] == "run"] == [
        ("standalone", 3),
        ("fedavg", 3),
    ]
    assert "Compared with training alone" in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    capsys.readouterr()
    main(["report", str(folder), "--baselines", "--output", "page"])
    assert "1/2" not in capsys.readouterr().out
    assert (folder / "baselines.json").read_bytes() == trained
    main(["report", str(folder), "--output", "again"])  # those of the folder
    assert "Compared with training alone" in (tmp_path / "again" / "index.html").read_text(encoding="utf-8")
