# SPDX-License-Identifier: Apache-2.0
"""The page of `perada report`: its numbers against plain loops, its files, and names that are hostile."""

import csv
import json
import math
import re
import shutil
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from scipy.stats import sem, ttest_rel

import perada
from perada.cli import main
from perada.core.text import printable
from perada.results.report import TITLES
from perada.studies.report import figures
from perada.studies.report.facts import expected_calibration_error, paired_difference
from perada.studies.report.page import as_csv, write_page
from perada.studies.report.plotting import label_points, new_axes, report_style
from perada.studies.report.records import CLASSIFICATION, RunRecord, read_records
from perada.studies.report.several import comparison, group_runs
from perada.tasks import Classification, MultiLabel

SCRIPT = "<script>alert(1)</script>"
NAMES = [f"{SCRIPT}$x_1$", "=1+1", '"onload="x', "-->", "\x1b[31m\x07\u202e赤", "six"]
SHOWN = [printable(name) for name in NAMES]


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and the text in the cells of its tables."""

    def __init__(self, path):
        super().__init__()
        self.tags = []
        self.tables = {}
        self.text = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables[len(self.tables)] = []
        elif tag == "tr":
            self.tables[len(self.tables) - 1].append([])
        elif tag in ("td", "th"):
            self.tables[len(self.tables) - 1][-1].append("")

    def handle_data(self, data):
        self.text.append(data)
        if self.tags and self.tags[-1][0] in ("td", "th") and data.strip():
            self.tables[len(self.tables) - 1][-1][-1] += data


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Folders of two seeds of PerAda and one of FedAvg, and what `perada.finetune` returned."""
    root = tmp_path_factory.mktemp("runs")
    created = []
    data = tiny.data()
    named = perada.data.FederatedData(data.train, data.test, data.public, classes=NAMES[:3], client_names=NAMES[1:])
    for seed, algorithm in ((0, "perada"), (1, "perada"), (0, "fedavg")):
        options = tiny.options | {"algorithm": algorithm, "seed": seed, "default_root_dir": root}
        created.append(tiny.finetune(named, rounds=2, **options))
    return [root / "lightning_logs" / f"version_{number}" for number in range(3)], created


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    output = tmp_path_factory.mktemp("page")
    main(["report", str(runs[0][0]), "--output", str(output)])
    return output


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_page_loads_nothing_and_runs_nothing(page):
    result = Page(page / "index.html")
    assert {tag for tag, _ in result.tags} & {"script", "link", "iframe", "img", "object", "base"} == set()
    for tag, attributes in result.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("href", "src", "xlink:href"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:image/png")) or (page / value).is_file(), value
    assert "url(http" not in (page / "index.html").read_text()


def test_names_are_text(page):
    text = (page / "index.html").read_text(encoding="utf-8")
    assert SCRIPT not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;$x_1$" in text
    assert {row["client"] for row in rows(page / "clients.csv")} == {"'=1+1", "'-->", *NAMES[2:3], "?[31m??赤", "six"}


def test_a_page_has_no_characters_that_a_terminal_or_browser_obeys(page):
    for file in (page / "index.html", *page.glob("*.csv")):
        content = file.read_text(encoding="utf-8")
        assert all(letter.isprintable() or letter == "\n" for letter in content), file.name
    assert "?[31m??赤" in (page / "index.html").read_text(encoding="utf-8")


def test_a_run_with_a_journal_is_private_although_it_has_no_configuration(tmp_path):
    """As that of `perada.finetune`, whose journal is written before the first round."""
    (tmp_path / "metrics.csv").write_text("epoch,step,personal/local_test\n0,0,0.9321\n")
    (record,) = read_records(tmp_path)
    assert not record.private
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "privacy_ledger.jsonl").write_text("")
    (record,) = read_records(tmp_path)
    assert record.private


@pytest.fixture(scope="module")
def checkpoints(tiny, tmp_path_factory):
    """The checkpoint of a run with client privacy and of one without, by whether it is private."""
    data = tiny.data()
    without_public = perada.data.FederatedData(data.train, data.test)
    files = {}
    for private in (True, False):
        folder = tmp_path_factory.mktemp("run")
        options = tiny.options | {"algorithm": "fedavg", "default_root_dir": folder, "weighting": "uniform"}
        if private:
            options["client_privacy"] = perada.ClientPrivacy(noise_multiplier=1.0, max_norm=1.0, delta=1e-3)
        tiny.finetune(without_public, rounds=1, **options)
        files[private] = next(folder.rglob("*.ckpt"))
    return files


UNKNOWN_RUN = "epoch,step,train/local_loss,personal/local_test\n0,0,0.5123,0.9321\n"
"""Rounds of a run of which neither a record nor a configuration is left."""


def shown_scores(folder, output):
    """Whether the page of a folder shows its score or its loss."""
    write_page(output, read_records(folder))
    texts = [file.read_text(encoding="utf-8") for file in output.iterdir() if file.suffix in (".html", ".csv")]
    return any("93.2" in text or "0.932" in text or "0.512" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "private"),
    [
        ("checkpoints/privacy_ledger.head", "", True),
        ("checkpoints/best/privacy_ledger.jsonl", "", True),
        ("privacy_ledger (copy).jsonl", "", True),
        ("hparams.yaml", "client_privacy: {noise_multiplier: 1.0}\n", True),
        ("hparams.yaml", "privacy: [\n", True),
        ("hparams.yaml", "seed_everything: 1\nprivacy: null\n", False),
        ("hparams.yaml", "{}\n", False),
        ("config.yaml", "", False),
        ("../../privacy_ledger.jsonl", "", True),
        ("../../other/privacy_ledger.jsonl", "", False),
        ("checkpoints/last.ckpt", "no checkpoint", True),
    ],
)
def test_scores_are_left_out_if_any_file_shows_that_an_unknown_run_was_private(tmp_path, name, content, private):
    folder = tmp_path / "lightning_logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(UNKNOWN_RUN)
    assert shown_scores(folder, tmp_path / "before")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)
    assert shown_scores(folder, tmp_path / "after") != private


@pytest.mark.parametrize("private", [True, False])
def test_a_checkpoint_shows_whether_an_unknown_run_was_private(tmp_path, checkpoints, private):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.csv").write_text(UNKNOWN_RUN)
    shutil.copy(checkpoints[private], folder / "checkpoints" / "last.ckpt")
    assert shown_scores(folder, tmp_path / "page") != private


@pytest.mark.parametrize(
    ("config", "private"),
    [
        ("privacy: {noise_multiplier: 1.0}\n", True),
        ("client_privacy:\n  noise_multiplier: 1.0\n", True),
        ("privacy: null\nclient_privacy: null\n", False),
        ("seed_everything: 1\n", False),
        ("privacy: {noise_multiplier: [\n", True),
    ],
)
def test_scores_of_a_private_run_are_left_out_before_its_first_evaluation(tmp_path, config, private):
    """The folder of a run that has just begun: no `run.json`, and no ε among its metrics yet."""
    (tmp_path / "metrics.csv").write_text("epoch,step,train/local_loss,personal/local_test\n0,0,0.5123,0.9321\n")
    (tmp_path / "config.yaml").write_text(config)
    (record,) = read_records(tmp_path)
    assert record.private == private
    output = tmp_path / "page"
    write_page(output, [record])
    texts = [file.read_text(encoding="utf-8") for file in output.iterdir() if file.suffix in (".html", ".csv")]
    assert any("93.2" in text or "0.932" in text for text in texts) != private
    assert any("0.512" in text for text in texts) != private


def test_ids_are_different_and_links_within_the_page_lead_somewhere(page):
    tags = Page(page / "index.html").tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {
        value[1:] for _, own in tags for value in (own.get("href"), own.get("xlink:href")) if value and value[0] == "#"
    }
    assert links
    assert links <= set(ids)


def test_everybody_is_told_what_a_figure_shows(page):
    tags = Page(page / "index.html").tags
    pictures = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(pictures) == len(list(page.glob("*.png"))) >= 8
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 20 for picture in pictures)
    assert (
        sum(tag == "table" for tag, _ in tags)
        == sum(tag == "caption" for tag, _ in tags)
        == len(list(page.glob("*.csv")))
    )
    assert ("html", {"lang": "en"}) in tags
    names = [tag for tag, _ in tags if tag in ("h1", "h2", "h3")]
    assert names[0] == "h1" and names.count("h1") == 1


def test_each_client_is_there_before_and_after(page, runs):
    run = runs[1][0]
    result = rows(page / "clients.csv")
    after = run.metrics["clients"]["personal/local_test"]
    before = run.metrics["initial"]["personal/local_test"]
    assert [float(row["personal/local_test"]) for row in result] == pytest.approx(sorted(after), abs=1e-5)
    order = [SHOWN[1:].index(row["client"].removeprefix("'")) for row in result]
    found_before = [float(row["before: personal/local_test"]) for row in result]
    assert found_before == pytest.approx([before[i] for i in order], abs=1e-5)
    tables = [table for table in Page(page / "index.html").tables.values() if table[0][0] == "client"]
    shown = next(table for table in tables if "last round" in table[0])
    place = shown[0].index("own images")
    assert "before: own images" in shown[0] and not any("personal/" in head for head in shown[0])
    assert [row[place] for row in shown[1:]] == [f"{100 * value:.1f}" for value in sorted(after)]


def test_the_page_shows_when_each_client_took_part_last(page, runs):
    run = runs[1][0]
    last = run.metrics["clients"]["last_round"]
    result = rows(page / "clients.csv")
    order = [SHOWN[1:].index(row["client"].removeprefix("'")) for row in result]
    assert [row["last_round"] for row in result] == [str(last[client]) for client in order]
    tables = [table for table in Page(page / "index.html").tables.values() if table[0][0] == "client"]
    shown = next(table for table in tables if "last round" in table[0])
    place = shown[0].index("last round")
    assert [row[place] for row in shown[1:]] == [str(last[client]) if last[client] else "never" for client in order]


def test_the_page_shows_what_the_mean_hides(tmp_path):
    scores = {"personal/local_test": 0.5, "personal/local_test_weighted": 0.75, "personal/local_test_recent": 0.625}
    info = {"num_classes": 2, "clients": ["north", "south"]}
    record = RunRecord("run", tmp_path, info, [{"round": 0} | scores], test_images=[3, 31])
    record.scores_of_clients = {"personal/local_test": [0.4, 0.6], "last_round": [1, 0]}
    text = write_page(tmp_path / "page", [record]).read_text(encoding="utf-8")
    for name, value in (("own images", 50), ("weighted by images", 75), ("recent clients", 62.5)):
        assert f"{name}</dt><dd>{value:.1f} %</dd>" in text
    assert ">never</td>" in text
    even = write_page(
        tmp_path / "even", [RunRecord("run", tmp_path, info, [{"round": 0} | scores], test_images=[3, 30])]
    )
    assert "weighted by images</dt>" not in even.read_text(encoding="utf-8")


def test_the_partition_and_the_mistakes_are_those_of_the_run(page, runs, tiny):
    result = rows(page / "partition_train.csv")
    assert [int(row["all"]) for row in result] == list(tiny.sizes)
    data = tiny.data()
    run = runs[1][0]
    for row in rows(page / "mistakes_personal.csv"):
        client = SHOWN[1:].index(row["client"].removeprefix("'"))
        x, y = data.test[client].tensors
        with torch.no_grad():
            predicted = run.personal(client)(x).argmax(-1)
        assert float(row["accuracy"]) == pytest.approx((predicted == y).float().mean().item(), abs=1e-5)
        wrong = [(int(a), int(b)) for a, b in zip(y, predicted, strict=True) if a != b]
        if wrong:
            most = max(map(wrong.count, wrong))
            num_ties = sum(wrong.count(mistake) == most for mistake in set(wrong))
            each = " each" if num_ties > 1 else ""
            assert row["most frequent mistake"].endswith(f": {most}{each}")
            assert row["most frequent mistake"].count(" taken for ") == min(num_ties, 2)


def test_images_with_several_labels_are_counted_once(tmp_path):
    info = {
        "task": MultiLabel().record(),
        "num_classes": 2,
        "classes": ["edema", "mass"],
        "clients": ["north", "south"],
    }
    info |= {"algorithm": "Ditto", "backbone": "test_resnet", "training": {"metric": "auto"}}
    record = RunRecord("run", tmp_path, info, [{"round": 0, "train/local_loss": 0.5, "params/trained": 59780}])
    record.partition = {"train": [[3, 2], [1, 4]]}
    record.train_sizes = [4, 5]
    text = write_page(tmp_path / "page", [record]).read_text(encoding="utf-8")
    assert "Ditto on test_resnet, 2 clients, 2 classes, 1 round. Scores are AUROC, in %." in text
    assert "a client has 4 to 5 images." in text
    assert "59,780" in text
    assert [row["all labels"] for row in rows(tmp_path / "page" / "partition_train.csv")] == ["5", "5"]


@pytest.mark.parametrize("metric", [["f1", "auroc"], [{"f1": {"average": "macro"}}, "ece"], {"f1": {}}])
def test_the_page_says_what_the_first_metric_is(tmp_path, metric):
    info = {"num_classes": 2, "clients": ["north"], "training": {"metric": metric}}
    record = RunRecord("run", tmp_path, info, [{"round": 0}])
    assert "Scores are f1, in %." in write_page(tmp_path / "page", [record]).read_text(encoding="utf-8")


def test_a_paired_difference_is_that_of_scipy():
    random = np.random.default_rng(0)
    one, other = random.random((2, 30))
    difference = paired_difference([*one, math.nan], [*other, 0.0])
    assert len(difference.differences) == 30
    assert difference.standard_error == pytest.approx(sem(one - other))
    assert difference.mean / difference.standard_error == pytest.approx(ttest_rel(one, other).statistic)


def svg_texts(figure):
    """The texts in a figure, which the SVG has as text."""
    return [element.text for element in ElementTree.fromstring(figure.svg).iter() if element.tag.endswith("text")]


def test_points_have_the_names_of_their_clients(tmp_path):
    names = ["north", "south", "east"]
    record = RunRecord("run", tmp_path, {"num_classes": 2, "clients": names})
    record.scores_of_clients = {"personal/local_test": [0.5, 0.5, 0.75]}
    record.global_local = [0.25, 0.25, 1.0]
    texts = svg_texts(figures.personal_and_global(record, "figure"))
    assert {"north, south", "east"} <= set(texts)  # the first two are the same point
    assert set(names) <= set(svg_texts(figures.before_and_after(record, "figure")))


def test_labels_of_close_points_do_not_overlap():
    points = [
        (26, 74),
        (44, 79),
        (48, 81),
        (58, 89),
        (66, 89),
        (68, 93),
        (70, 87),
        (76, 86),
        (82, 93),
        (87, 87),
        (88, 88),
    ]
    labels = [
        "noisy",
        "mirrored",
        "sheared",
        "negative",
        "small",
        "faint",
        "blurred",
        "turned",
        "lit",
        "thick",
        "plain",
    ]
    with report_style():
        drawn, axes = new_axes()
        axes.plot(*zip(*points, strict=True), "o", markersize=5)
        label_points(axes, points, labels)
        drawn.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
        centres = axes.transData.transform(points)
    assert [text.get_text() for text in axes.texts] == labels
    for number, (box, centre) in enumerate(zip(boxes, centres, strict=True)):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        gap_x = max(box.x0 - centre[0], centre[0] - box.x1, 0)
        gap_y = max(box.y0 - centre[1], centre[1] - box.y1, 0)
        assert math.hypot(gap_x, gap_y) < 12  # pixels, of 100 in an inch: it stands beside its point


def test_paired_differences_name_their_clients(runs):
    _, differences = comparison([record for folder in runs[0] for record in read_records(folder)])
    (figure,) = differences.figures
    texts = svg_texts(figure)
    (row,) = differences.tables[0].rows
    scores = [np.array(run.metrics["clients"]["personal/local_test"]) for run in runs[1]]
    order = np.argsort(scores[2] - (scores[0] + scores[1]) / 2, kind="stable")
    expected = [printable(NAMES[1:][client]) for client in order]
    assert [text for text in texts if text in expected] == expected
    assert row[0] == "FedAvg" and "FedAvg" in texts and "mean" in texts


def record_with_errors(folder, name, errors, metric="mae"):
    """A run of two rounds whose clients' last mean absolute errors are these."""
    task = {"has_classes": metric == "accuracy"}
    info = {"algorithm": name, "clients": ["north", "south", "east"], "training": {"metric": metric}, "task": task}
    mean = sum(errors) / len(errors)
    rounds = [{"round": 0, "personal/local_test": 2 * mean}, {"round": 1, "personal/local_test": mean}]
    return RunRecord(name, folder, info, rounds, {"personal/local_test": errors})


def test_errors_of_several_runs_have_the_unit_of_their_targets_and_lower_ones_are_better(tmp_path):
    first = record_with_errors(tmp_path / "a", "first", [4.0, 5.0, 6.0])
    second = record_with_errors(tmp_path / "b", "second", [3.0, 5.5, 5.0])
    scores, differences = comparison([first, second])
    texts = svg_texts(scores.figures[0])
    assert "own images, MAE" in texts
    ticks = [float(text) for text in texts if re.fullmatch(r"\d+(\.\d+)?", text or "")]
    assert max(ticks) <= 12  # twice the mean error of 5, and not 100 times that
    assert not any("%" in (text or "") for figure in differences.figures for text in svg_texts(figure))
    (row,) = csv.DictReader(as_csv(differences.tables[0]).splitlines())
    assert float(row["mean difference"]) == pytest.approx((-1 + 0.5 - 1) / 3, abs=1e-5)
    assert (row["clients better"], row["clients worse"]) == ("2", "1")
    page = write_page(tmp_path / "page", [first, second], with_scores=True)
    texts = [text.strip() for text in Page(page).text]
    assert "4.5" in texts  # the mean error of the second run
    assert "450.00" not in texts


def test_errors_and_shares_are_not_compared(tmp_path):
    first = record_with_errors(tmp_path / "a", "first", [4.0, 5.0, 6.0])
    second = record_with_errors(tmp_path / "b", "second", [0.5, 0.5, 0.5], metric="accuracy")
    with pytest.raises(ValueError, match="mae and accuracy"):
        comparison([first, second])


RAW_NAME = re.compile(r"\b(personal|global|train|comm|params|privacy|theory|updates|clients|deploy|server)/\w+")


def test_raw_names_of_metrics_are_tooltips_only(page, tmp_path):
    names = [name for name in TITLES if "/" in name]
    names += ["personal/local_test_f1_per_class_p10", "train/own_loss", "privacy/release_epsilon_std", "theory/new_std"]
    rounds = [dict.fromkeys(names, 0.5) | {"round": number} for number in range(2)]
    every = write_page(tmp_path, [RunRecord("run", tmp_path, rounds=rounds)], with_scores=True)
    for path in (page / "index.html", every):
        contents = Page(path)
        assert [text for text in contents.text if RAW_NAME.search(text)] == []
        assert not any(RAW_NAME.search(attributes.get("aria-label") or "") for _, attributes in contents.tags)
    tooltips = [attributes["title"] for tag, attributes in Page(every).tags if tag == "th" and "title" in attributes]
    assert set(names) <= set(tooltips)


def test_nested_settings_have_rows_of_their_own(page, runs):
    training = runs[1][0].info["training"]
    settings = {row["setting"]: row["value"] for row in rows(page / "run.csv")}
    assert settings["training.optimizer"] == training["optimizer"]
    assert settings["training.algorithm.class"] == "PerAda"
    assert "{" not in "".join(
        value for name, value in settings.items() if "images" not in name and "phases" not in name
    )


def test_the_default_task_of_a_record_is_classification():
    record = Classification().record()
    assert {name: record[name] for name in CLASSIFICATION} == CLASSIFICATION


def test_runs_that_differ_in_the_seed_are_one_row(runs):
    scores, differences = comparison([record for folder in runs[0] for record in read_records(folder)])
    result = list(csv.DictReader(as_csv(scores.tables[0]).splitlines()))
    assert [(row["run"], row["runs"], row["seeds"]) for row in result] == [
        ("PerAda", "2", "0, 1"),
        ("FedAvg", "1", "0"),
    ]
    values = [run.metrics["rounds"][-1]["personal/local_test"] for run in runs[1]]
    assert float(result[0]["personal/local_test"]) == pytest.approx((values[0] + values[1]) / 2, abs=1e-5)
    assert float(result[0]["± personal/local_test"]) == pytest.approx(abs(values[0] - values[1]) / 2, abs=1e-5)
    each = [np.array(run.metrics["clients"]["personal/local_test"]) for run in runs[1]]
    difference = each[2] - (each[0] + each[1]) / 2
    (row,) = csv.DictReader(as_csv(differences.tables[0]).splitlines())
    assert (row["run"], row["less"], row["clients"]) == ("FedAvg", "PerAda", "5")
    assert float(row["mean difference"]) == pytest.approx(difference.mean(), abs=1e-5)
    assert float(row["standard error"]) == pytest.approx(difference.std(ddof=1) / math.sqrt(5), abs=1e-5)


def test_groups_are_named_by_what_differs(tmp_path):
    def record(name, rate, seed):
        config = f"seed_everything: {seed}\ntraining: {{lr_local: {rate}}}\n"
        return RunRecord(name, tmp_path, {"algorithm": "PerAda", "seed": seed}, config=config)

    result = group_runs([record("a", 0.1, 0), record("b", 0.2, 0), record("c", 0.1, 1), RunRecord("d", tmp_path)])
    assert [group.name for group in result] == ["PerAda: lr_local=0.1", "PerAda: lr_local=0.2", "d"]
    assert [len(group.runs) for group in result] == [2, 1, 1]


@pytest.mark.slow
def test_a_saved_run_and_a_comparison_have_pages_too(runs, tmp_path, capsys):
    runs[1][0].save(tmp_path / "saved")
    (record,), (folder,) = read_records(tmp_path / "saved"), read_records(runs[0][0])
    assert record.scores_of_clients == folder.scores_of_clients
    assert (record.confusion, record.by_round) == (folder.confusion, folder.by_round)
    row = {"stage": "run", "label": SCRIPT, "variant": [], "personal/local_test": 0.5, "global/global_test": None}
    curve = [{"round": 1, "personal/local_test": 0.25}, {"round": 2, "personal/local_test": 0.5}]
    records = [row | {"seed": seed, "history": curve} for seed in (0, 1)] + [row | {"seed": 0, "label": "b"}]
    records.append(row | {"seed": 0, "label": "c", "failed": "no", "point": {}})
    (tmp_path / "compare.json").write_text(json.dumps(records))
    main(["report", str(tmp_path / "compare.json"), "--output", str(tmp_path / "page")])
    main(["report", str(tmp_path / "compare.json")])
    assert capsys.readouterr().out.count("25.00") == 1  # the curve of both seeds
    result = rows(tmp_path / "page" / "comparison.csv")
    assert [(row["run"], row["runs"], row["personal/local_test"]) for row in result] == [
        (SCRIPT, "2", "0.5"),
        ("b", "1", "0.5"),
    ]
    assert SCRIPT not in (tmp_path / "page" / "index.html").read_text()


def test_a_folder_of_an_earlier_perada_has_its_rounds(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,personal/local_test,step\n0,0.25,1\n1,0.5,3\n")
    main(["report", str(tmp_path), "--output", str(tmp_path / "page")])
    assert [row["personal/local_test"] for row in rows(tmp_path / "page" / "rounds.csv")] == ["0.25", "0.5"]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("metrics"),
        lambda content: content.update(num_clients=10**12),
        lambda content: content["metrics"]["clients"].update({"personal/local_test": [1.0]}),
        lambda content: content["metrics"]["predictions"]["personal"].update(confusion=[[0, 99, 0, 1]]),
        lambda content: content["metrics"]["predictions"]["personal"].update(confusion=[[-9, -9, 0, 1]]),
        lambda content: content["metrics"]["partition"]["train"][0].__setitem__(0, -1),
        lambda content: content["metrics"]["rounds"][0].update(round="inf"),
        lambda content: content.update(command=[1, None]),
        lambda content: content["metrics"]["partition"].update(train="x"),
        lambda content: content["metrics"].update(by_round=[{"round": "x"}]),
        lambda content: content["metrics"]["rounds"].append(3),
        lambda content: content["info"].update(clients=[1, 2]),
    ],
)
def test_a_broken_file_is_named_in_one_line(runs, tmp_path, change):
    content = json.loads((runs[0][0] / "run.json").read_text())
    change(content)
    (tmp_path / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"run\.json' is broken") as caught:
        main(["report", str(tmp_path), "--output", str(tmp_path / "page")])
    assert "\n" not in str(caught.value)


def test_what_cannot_be_written_to_is_rejected_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"--output=.*file is a file"):
        main(["report", "nowhere", "--output", str(tmp_path / "file")])
    with pytest.raises(NotADirectoryError, match=r"--output=.*page .*'.*file' is a file"):
        main(["report", "nowhere", "--output", str(tmp_path / "file" / "page")])
    with pytest.raises(FileNotFoundError, match=r"no metrics\.csv"):
        main(["report", str(tmp_path), "--output", str(tmp_path / "page")])


def test_without_output_several_runs_are_tables(runs, capsys):
    main(["report", *map(str, runs[0][:2])])
    output = capsys.readouterr().out
    assert all(str(folder) in output for folder in runs[0][:2])
    assert output.count("| round |") == 2


def test_no_predictions_have_no_calibration_error():
    assert math.isnan(expected_calibration_error({"count": [0], "right": [0], "confidence": [0.0]}))
