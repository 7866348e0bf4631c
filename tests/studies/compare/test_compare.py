# SPDX-License-Identifier: Apache-2.0
"""``perada compare``: every recipe, algorithm and seed once, settings chosen on validation images, and one table."""

import json
import math
import os
import time
from argparse import ArgumentError
from contextlib import contextmanager
from functools import partial
from inspect import signature
from multiprocessing import active_children, get_context
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace
from PIL import Image

from benchmarks.image_text import save_image_text
from perada.algorithms import ALGORITHMS, make_algorithm
from perada.algorithms.registry import methods
from perada.algorithms.specs import class_path_of
from perada.cli import main
from perada.cli.recipes import comparison_file
from perada.cli.runs import PeradaCLI
from perada.core.rounds import sample_cohort
from perada.data import Digits
from perada.scores.metrics import score_names
from perada.studies.compare import file, launcher
from perada.studies.compare.command import ComparisonRunner
from perada.studies.compare.entries import ENTRIES
from perada.studies.compare.grid import parse_grid
from perada.studies.compare.plan import SELECTION_SCORES, Plan
from perada.studies.compare.results import GridTrial, Results, choose_trial, score, trials_of
from perada.studies.compare.running import RunTask, epsilons, same_budget, task_runner
from perada.studies.compare.tables import curve_tables, grid_table, summary
from perada.system.digests import KEY
from perada.tasks import Classification, Regression
from tests import recipes
from tests.comparisons import plan_of
from tests.digests import without

comparison = partial(file.expand_comparison, find=comparison_file)
DISTILLING = {"federated": {"clients_per_round": 2}, "distillation": {"steps": 1, "batch_size": 4}}
TINY = yaml.safe_dump(recipes.recipe(data={"public_fraction": 0.2}, **DISTILLING))
GRID = ["--tune", "training.lr_personal+training.lr_local=0.01,0.3,0.1"]


class BlankDigits(Digits):
    """Test images are black: what is measured on them says nothing of the digits."""

    def _load_images(self):
        images, labels = super()._load_images()
        return (images if self.train else torch.zeros_like(images)), labels


def rows(text):
    """The rows of the last table before the advice, by their first cell."""
    text = text.split("\n\nWhich row to take")[0]
    lines = [line for line in text.split("\n\n|")[-1].splitlines() if "|" in line]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(split[0][1:], row[1:], strict=True)) for row in split[2:]}


def started_runs(text):
    """What was run, without numbers and times."""
    lines = [line for line in text.splitlines() if line.startswith("---")]
    return [line.split(" ", 2)[2].rsplit(" (", 1)[0] for line in lines]


def timeless(records):
    return [{k: v for k, v in record.items() if not k.startswith(("seconds", KEY))} for record in records]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


@pytest.fixture
def read_results(tmp_path):
    return lambda: json.loads((tmp_path / "out" / "r.json").read_text())


OUT = ["--output", "out/r.json"]
WEIGHTS = "--model.pretrained=perada:fashion_test_resnet"


def test_each_algorithm_and_seed_once_and_not_again(recipe, read_results, tmp_path, capsys):
    words = ["compare", recipe, "--algorithms", "fedavg", "ditto", "--seeds", "0", "1", *OUT]
    main([*words[:4], "--seeds", "0", *OUT, "--training.lr_local=0.2"])
    partial = read_results()
    assert [(record["label"], record["seed"]) for record in partial] == [("before fine-tuning", 0), ("fedavg", 0)]
    capsys.readouterr()
    main([*words, "--training.lr_local=0.2"])
    output = capsys.readouterr().out
    assert started_runs(output) == ["ditto, seed 0", "fedavg, seed 1", "ditto, seed 1"]
    assert [line.split()[1] for line in output.splitlines() if line.startswith("---")] == ["2/4", "3/4", "4/4"]
    records = read_results()
    assert all(record in records for record in partial)
    table = rows(output)
    assert list(table) == ["before fine-tuning", "fedavg", "ditto", "full fine-tuning, for comparison"]
    scores = [100 * r["personal/local_test"] for r in records if r["label"] == "ditto"]
    mean = sum(scores) / 2
    spread = abs(scores[0] - scores[1]) / 2**0.5
    assert table["ditto"]["own images"] == f"{mean:.2f} ± {spread:.2f}"
    head = 96 * 10 + 10  # test_resnet's features and 10 classes
    assert (table["ditto"]["trained"], table["ditto"]["sent"]) == (f"{2 * head:,}", f"{head:,}")
    assert table["fedavg"]["trained"] == f"{head:,}"
    assert float(table["fedavg"]["MB sent"]) == pytest.approx(4 * head / 1e6, abs=0.005)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.yaml"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["r.json"]


def test_the_row_of_a_head_from_class_names_is_zero_shot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_image_text("clip", tmp_path / "clip")
    model = {"backbone": "hf:clip", "pretrained": True, "adapter": "lora", "text_head": {"templates": ["a {}."]}}
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(recipes.recipe(model=model, data={"image_size": 32})))
    main(["fit", "--config", "text.yaml", "--federated.algorithm=FedAvg"])
    of_fit = rows(capsys.readouterr().out)
    main(["compare", "text.yaml", "--algorithms", "fedavg", "--federated.algorithm=FedAvg"])
    table = rows(capsys.readouterr().out)
    assert list(table) == ["zero-shot", "fedavg", "full fine-tuning, for comparison"]
    assert of_fit["zero-shot, mean ± std"]["own images"].split(" ± ")[0] == table["zero-shot"]["own images"]
    assert of_fit["mean ± std"]["own images"].split(" ± ")[0] == table["fedavg"]["own images"]


def fit_scores(*words):
    """A run's scores, without `perada compare`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cli = PeradaCLI(
            ["--config", "tiny.yaml", "--trainer.logger=false", "--federated.algorithm=PerAda", *words], run=False
        )
        cli.trainer.fit(cli.model, cli.datamodule)
    finally:
        torch.set_num_threads(threads)
    return cli.model.scores


@pytest.mark.slow
def test_the_grid_is_chosen_from_on_validation_images(recipe, read_results, capsys):
    steps = ["--training.local_steps=6", "--federated.algorithm.distill=false", "--data.train_limit=600", WEIGHTS]
    command = ["compare", recipe, "--algorithms", "perada_no_kd", "--seeds", "3", *OUT, *GRID, *steps]
    main(command)
    shown = capsys.readouterr().out
    records = read_results()
    held_out = ["--data.client_validation=0.2", "--data.evaluate_on=validation"]
    rates = {
        rate: ["--seed_everything=3", *steps, f"--training.lr_personal={rate}", f"--training.lr_local={rate}"]
        for rate in ("0.01", "0.3", "0.1")
    }
    expected = {rate: fit_scores(*words, *held_out) for rate, words in rates.items()}
    assert len({scores["personal/local_test"] for scores in expected.values()}) > 1
    for rate, record in zip(rates, records[:3] if records[0]["stage"] == "tune" else records[1:4], strict=True):
        assert (record["stage"], record["point"]) == ("tune", {GRID[1].split("=")[0]: rate})
        assert expected[rate].items() <= record.items()
    means = {rate: (s["personal/local_test"] + s["personal/global_test"]) / 2 for rate, s in expected.items()}
    best = max(means, key=means.get)
    assert best != "0.01"  # a choice, not the first value
    assert f"--training.lr_local={best} chosen, validation score {100 * means[best]:.2f} %" in shown
    assert fit_scores(*rates[best]).items() <= records[-1].items()
    assert rows(shown)["perada_no_kd"]["chosen"] == best
    grid = [line for line in shown.splitlines() if line.startswith("| perada_no_kd")][:3]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in grid]
    assert [row[1:] for row in cells] == [
        [rate, f"{100 * means[rate]:.2f}", "chosen" * (rate == best)] for rate in rates
    ]
    # With other test images the grid gives the same, and only the table changes.
    main([*command, "--output", "out/blank.json", "--data.dataset=BlankDigits"])
    with open("out/blank.json") as file:
        blank = json.load(file)
    measured = ("personal/local_test", "personal/global_test", "global/global_test")
    for stage, same in (("tune", True), ("run", False)):
        pair = [[[r[name] for name in measured] for r in made if r["stage"] == stage] for made in (records, blank)]
        assert (pair[0] == pair[1]) is same


@pytest.mark.slow
def test_a_command_goes_on_where_it_stopped(recipe, read_results, tmp_path, capsys):
    command = ["compare", recipe, "--algorithms", "fedavg", "standalone", *OUT, *GRID]
    main(command)
    uninterrupted = read_results()
    assert [record["stage"] for record in uninterrupted] == ["start"] + ["tune"] * 6 + ["run"] * 2
    lost = [
        record
        for record in uninterrupted
        if record["label"] == "fedavg" and record["point"] == uninterrupted[2]["point"]
    ]
    rest = [record for record in uninterrupted if record not in lost]
    (tmp_path / "out" / "r.json").write_text(json.dumps(rest))
    capsys.readouterr()
    main(command)
    again = "fedavg, seed 0, lr_personal+lr_local="
    assert [line.startswith(again) for line in started_runs(capsys.readouterr().out)] == [True] * len(lost)
    assert timeless(read_results()) == timeless(uninterrupted)
    assert all(record in read_results() for record in rest)
    main(command)
    assert started_runs(capsys.readouterr().out) == []
    (tmp_path / "tiny.yaml").write_text("# a comment\n" + TINY)
    main(command)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("train_limit: 60", "train_limit: 50"))
    with pytest.raises(ValueError, match=r"out/r\.json' .*'tiny\.yaml'"):
        main(command)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
def test_several_processes_give_what_one_gives(recipe, tmp_path, capsys):
    command = ["compare", recipe, "--algorithms", "perada", "fedavg_ft", "--seeds", "0", "1"]
    for jobs in ("1", "2"):
        main([*command, "--jobs", jobs, "--output", f"{jobs}.json"])
    one, two = (json.loads((tmp_path / f"{jobs}.json").read_text()) for jobs in "12")
    key = str
    assert sorted(map(key, timeless(one))) == sorted(map(key, timeless(two)))
    assert [r["label"] for r in one if r["stage"] == "run"] == [r["label"] for r in two if r["stage"] == "run"]


class Stopped(Exception):
    """Raised where the runs would begin."""


def test_several_processes_take_seed_after_seed(recipe, monkeypatch):
    """Also when durations are known: within a seed the longest comes first, and a cut leaves whole seeds."""
    taken = []

    @contextmanager
    def recorder(*_):
        def carry_out(tasks):
            taken.extend(task.args for task in tasks)
            if tasks:  # none of them tunes
                raise Stopped
            return iter(())

        yield carry_out

    durations = {"ditto": 9.0, "fedavg": 1.0, "fedprox": 5.0}
    monkeypatch.setattr(launcher, "task_runner", recorder)
    monkeypatch.setattr(Results, "seconds", lambda self, label="": durations.get(label, 0.0))
    with pytest.raises(Stopped):
        main(["compare", recipe, "--algorithms", *sorted(durations)[::-1], "--seeds", "4", "1", "--jobs", "2"])
    seeds = [word for args in taken for word in args if word.startswith("--seed_everything=")]
    algorithms = [next(word.rpartition(".")[2] for word in args if "algorithm=perada" in word) for args in taken]
    assert seeds == ["--seed_everything=4"] * 3 + ["--seed_everything=1"] * 3
    assert algorithms == ["Ditto", "FedProx", "FedAvg"] * 2


def stub(args):
    """In place of a run: its process dies, or says with what it was called."""
    if "die" in args:
        os._exit(7)
    print("not for standard output")
    raise ValueError(f"{args[:-1]} with {torch.get_num_threads()} and {os.environ['OMP_NUM_THREADS']} threads")


@pytest.mark.slow
def test_a_process_that_dies_takes_its_own_run_along_only(capfd):
    tasks = [RunTask([word], scores_start=word == "b") for word in ("a", "die", "b", "c", "die", "d")]
    before = dict(os.environ)
    with task_runner(stub, threads=3, jobs=2) as carry_out:
        events = list(carry_out(tasks))
        events += [(6 + number, result) for number, result in carry_out([RunTask(["e"], scores_start=False)])]
    assert sorted(number for number, result in events if result is None) == list(range(7))
    results = {number: result for number, result in events if result is not None}
    for number in (0, 2, 3, 5):
        assert results[number]["failed"] == f"ValueError: {tasks[number][0]} with 3 and 3 threads"
    assert results[6]["failed"] == "ValueError: ['e'] with 3 and 3 threads"
    assert all(results[number]["failed"].startswith("its process was killed or crashed") for number in (1, 4))
    assert active_children() == []
    assert dict(os.environ) == before
    assert "not for standard output" not in capfd.readouterr().out


def slow(args):
    """In place of a run: it says that it has begun, and ends in an hour."""
    Path(args[0]).touch()
    time.sleep(3600)


def test_a_comparison_that_is_stopped_ends_its_processes_and_no_others(tmp_path):
    other = get_context("spawn").Process(target=time.sleep, args=(3600,))
    other.start()
    with pytest.raises(KeyboardInterrupt), task_runner(slow, threads=1, jobs=2) as carry_out:
        for _ in carry_out([RunTask([str(tmp_path / name)], scores_start=False) for name in "abc"]):
            raise KeyboardInterrupt
    for child in active_children():
        if child is not other:
            child.join(30)
    assert active_children() == [other] and not (tmp_path / "c").exists()
    other.kill()
    other.join(30)


@pytest.mark.parametrize(
    ("option", "names", "message"),
    [
        (
            "--federated.algorithm=Ditto",
            "fedavg",
            r"--algorithms fedavg: an option .* changes it to perada\.algorithms\.",
        ),
        (
            "--federated.algorithm.distill=true",
            "perada_no_kd",
            r"--algorithms perada_no_kd: .* changes it to distill=True",
        ),
        (
            "--config=overlay.yaml",
            "fedprox",
            r"--algorithms fedprox: an option or a --config for all runs changes it to per",
        ),
    ],
)
@pytest.mark.every(3)
def test_a_row_does_not_show_another_algorithm_than_its_name_says(recipe, tmp_path, option, names, message):
    (tmp_path / "overlay.yaml").write_text("federated: {algorithm: FedAvg}")
    with pytest.raises(ValueError, match=message):
        main(["compare", recipe, "--algorithms", names, option])
    main(["compare", recipe, "--algorithms", "fedprox", "--federated.algorithm.prox_strength=0.5", *OUT])


@pytest.mark.slow
def test_the_other_runs_go_on_when_one_fails(recipe, read_results, capsys):
    command = ["compare", recipe, "--algorithms", "fedrep", "fedavg", *OUT]  # fedrep has nothing to share of a head
    for _ in range(2):  # what failed is tried again
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 1
        shown = capsys.readouterr()
        assert started_runs(shown.out)[0] == "fedrep, seed 0"
        assert (
            shown.out.rstrip()
            .splitlines()[-1]
            .startswith("- fedrep, seed 0: ValueError: algorithm FedRep has nothing ")
        )
        assert "fedrep, seed 0 failed: ValueError" in shown.err
        table = rows(shown.out)
        assert table["fedrep (1 of 1 failed)"]["own images"] == "–"
        assert table["fedavg"]["own images"] != "–"
    failed = [record for record in read_results() if "failed" in record]
    assert [record["label"] for record in failed] == ["fedrep"]
    assert "\n" not in failed[0]["failed"]
    with pytest.raises(SystemExit):
        main([*command[:-1], "out/grid.json", *GRID])
    shown = capsys.readouterr().out
    assert "fedrep: every run of the grid failed or diverged" in shown
    grid = [line.split("|") for line in shown.splitlines() if line.startswith("| fedrep ")]
    assert [(row[3].strip(), row[4].strip()) for row in grid[:3]] == [("failed", "")] * 3


@pytest.mark.filterwarnings("ignore:round 1:UserWarning")
def test_a_run_that_diverged_is_not_chosen(recipe, read_results, capsys):
    with pytest.raises(SystemExit):
        main(["compare", recipe, "--algorithms", "fedavg", *OUT, "--tune=training.lr_local=1e38",
              "--training.momentum=0.9",
              "--training.local_steps=4"])  # fmt: skip
    assert [(record["diverged"], record["stage"]) for record in read_results()] == [(True, "tune")]
    assert "every run of the grid failed or diverged" in capsys.readouterr().err


def test_choice():
    def record_with(local, everywhere, diverged=False):
        return {"personal/local_test": local, "personal/global_test": everywhere, "diverged": diverged}

    records = [record_with(0.9, 0.1), record_with(0.4, 0.8), record_with(0.8, 0.4)]
    tried = [GridTrial({"lr": str(number)}, [record]) for number, record in enumerate(records)]
    assert choose_trial(tried) == choose_trial(tried[1:]) == tried[1]
    assert [score(record) for record in records] == pytest.approx([0.5, 0.6, 0.6])
    diverged = GridTrial({"lr": "4"}, [record_with(None, None, True)])
    failed = GridTrial({"lr": "5"}, [{"failed": "x"}])
    assert choose_trial([*tried, diverged, failed]) == choose_trial(tried)
    assert choose_trial([GridTrial({"lr": "4"}, [record_with(1.0, 1.0, True)]), GridTrial({"lr": "5"}, [None])]) is None


@pytest.mark.every(8)
@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ("training.lr_local", "cannot be parsed; write NAME=V1,V2"),
        ("=0.1", "cannot be parsed"),
        ("training.lr_local=", "cannot be parsed"),
        ("training.lr_local=0.1,,0.2", "cannot be parsed"),
        ("training.lr_local+=0.1", "cannot be parsed"),
        ("training.lr_local=0.1,0.1", "has a duplicate value"),
        ("training.lr_local+training.lr_local=0.1", "training.lr_local is set twice"),
        ("a.prox_strength+a.init_args.prox_strength=1", "a.init_args.prox_strength is set twice"),
        ("data.evaluate_on=test,validation", "cannot be tuned"),
        ("model.lr_locl=0.1", "--tune --model.lr_locl=0.1 with ditto: (?s:.*)lr_locl"),
        ("training.lr_local=0.1,high", "--tune --training.lr_local=high with ditto: (?s:.*)high"),
        ("training.lr_local=0.1,-1", "--tune --training.lr_local=-1 with ditto: (?s:.*)lr_local must be .*, got -1.0"),
        ("federated.algorithm.prox_strength=1,2", "prox_strength=1 with fedavg"),
    ],
)
def test_what_cannot_be_tuned_is_rejected_before_anything_runs(recipe, tmp_path, tune, words):
    with pytest.raises(ValueError, match=words):
        main(["compare", recipe, "--algorithms", "ditto", "fedavg", "--tune", tune, *OUT])
    assert not (tmp_path / "out").exists()


def test_paper_needs_algorithms(recipe):
    with pytest.raises(ValueError, match="--paper determines"):
        main(["compare", recipe, "--paper"])


@pytest.mark.every(4)
@pytest.mark.parametrize("content", ["{", "[1]", '[{"label": "fedavg", "seed": 0}]', "3"])
def test_a_file_of_something_else_is_not_overwritten(recipe, tmp_path, content):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=r"r\.json' has no results"):
        main(["compare", recipe, "--output", "r.json"])
    assert (tmp_path / "r.json").read_text() == content


def algorithm(*words):
    return PeradaCLI(["--config", "tiny.yaml", "--trainer.logger=false", *words], run=False).loop.algorithm


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("asked", "planned"), [(["all", "ditto"], list(ENTRIES)), (["ditto", "fedavg", "ditto"], ["ditto", "fedavg"])]
)
def test_each_name_is_one_row_and_all_stands_for_every_one(recipe, monkeypatch, asked, planned):
    rows = []
    monkeypatch.setattr(Plan, "_check_row", lambda plan, row: rows.append(row[1]))  # which parses each
    monkeypatch.setattr(ComparisonRunner, "run", lambda comparison: 0)
    main(["compare", recipe, "--algorithms", *asked])
    assert rows == planned


MINE = """
from perada.algorithms import Algorithm
from perada.algorithms.perada import Ditto

class Mine(Ditto):
    def __init__(self, strength: float = 1.0) -> None:
        super().__init__(strength)
        self.strength = strength
"""


def test_a_class_of_ones_own_is_a_row_by_its_path(recipe, monkeypatch):
    Path("own_rows.py").write_text(MINE)
    tune = "--tune=own_rows.Mine:federated.algorithm.strength=0.5,2"
    plan = plan_of(monkeypatch, recipe, "--algorithms", "fedavg", "own_rows.Mine", tune)
    assert [row[1] for row in plan.rows] == ["fedavg", "own_rows.Mine"]
    assert [plan.count(name) for name in ("fedavg", "own_rows.Mine")] == [0, 2]
    job = plan.job(plan.rows[1], 0, "run", {"federated.algorithm.strength": "2"})
    assert job.label == "own_rows.Mine"
    made = PeradaCLI(job.args, run=False).loop.algorithm
    assert (type(made).__name__, made.strength) == ("Mine", 2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dito", "--algorithms='dito' is unknown; did you mean 'ditto'"),
        ("fedavg,ditto", "separate names by spaces: --algorithms fedavg ditto"),
        ("fedpac", "--algorithms='fedpac' is unknown; choose one of .* or the path of a custom class"),
        ("own_rows.Other", "own_rows"),
        ("nowhere.Mine", "nowhere"),
    ],
)
def test_an_algorithm_that_there_is_not_is_rejected(recipe, name, message):
    Path("own_rows.py").write_text(MINE)
    with pytest.raises((ValueError, ArgumentError), match=message):
        main(["compare", recipe, "--algorithms", "fedavg", name])


@pytest.mark.every(6)
@pytest.mark.parametrize("name", methods())
def test_a_row_has_the_algorithm_and_the_rule_of_its_recipe(recipe, name):
    """Arguments in which methods of one algorithm do not differ are those of the recipe that is compared."""
    compared = ["--model.adapter=lora", "--model.adapter_options=null", "--model.train_backbone=false"]
    cli = PeradaCLI(["--config", recipe], run=False)
    same_row = "perada" if name == "perada_table5" else name
    row = PeradaCLI(["--config", recipe, *ENTRIES[same_row].words(cli), *compared], run=False).loop
    written = PeradaCLI(["--config", recipe, "--config", f"method/{name}", *compared], run=False).loop
    assert type(row.algorithm) is type(written.algorithm)
    assert repr(row.server_rule) == repr(written.server_rule)
    for option in methods()[name].options:
        assert repr(getattr(row.algorithm, option)) == repr(getattr(written.algorithm, option))


@pytest.mark.slow
def test_entries_are_the_named_algorithms(recipe):
    common_words = [
        "--federated.algorithm=PerAda",
        "--federated.algorithm.prox_strength=7",
        "--federated.algorithm.distill=false",
    ]
    mine = type(make_algorithm("perada"))
    cli = PeradaCLI(["--config", recipe], run=False)
    assert type(cli.loop.algorithm) is mine
    assert set(methods()) - set(ENTRIES) == {"perada_table5"}  # PerAda with another learning rate
    assert {entry.class_path for entry in ENTRIES.values()} == {class_path_of(kind) for kind in ALGORITHMS.values()}
    for name in ENTRIES:
        made = algorithm(*common_words[:2], *ENTRIES[name].words(cli))
        expected = methods()[name].make()
        assert type(made) is type(expected)
        if type(made) is mine:  # the recipe's own algorithm keeps what the recipe says
            expected.prox_strength = 7
        options = signature(type(made)).parameters.keys() - {"base"}
        plain = [{k: v for k, v in vars(one).items() if k in options} for one in (made, expected)]
        assert plain[0] == plain[1], name
    assert algorithm(*common_words, *ENTRIES["perada"].words(cli)).uses_distillation
    whole = algorithm(*common_words, *ENTRIES["fed_ensemble_perada"].words(cli))
    assert (type(whole.base), whole.base.uses_distillation) == (mine, True)


@pytest.mark.slow
def test_what_papers_train(recipe):
    cli = PeradaCLI(["--config", recipe], run=False)

    def trained(name):
        words = ENTRIES[name].words(cli, paper=True)
        model = PeradaCLI(["--config", recipe, "--trainer.logger=false", *words], run=False).model
        return model.adapter, model.train_backbone

    assert {name: trained(name) for name in ("fedavg", "ditto", "perada", "fedalt_adapter", "modified_local_gd")} == {
        "fedavg": ("full", False),
        "ditto": ("full", False),
        "perada": ("head", False),
        "fedalt_adapter": ("head", True),
        "modified_local_gd": ("full", False),
    }


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("given", "lora", "dual"),
    [
        ("head", None, None),
        ("residual {last_blocks: 1, norm: group}", {"last_blocks": 1}, {"last_blocks": 1}),
        (
            "lora {last_blocks: 1, r: 2, lora_dropout: 0.1}",
            {"last_blocks": 1, "r": 2, "lora_dropout": 0.1},
            {"last_blocks": 1, "r": 2},
        ),
        ("dual_lora {r: 2, gate: false}", {"r": 2}, {"r": 2, "gate": False}),
    ],
)
def test_an_adapter_of_its_own_has_the_options_that_it_knows(recipe, given, lora, dual):
    adapter, _, options = given.partition(" ")
    adapter_words = [f"--model.adapter={adapter}", *([f"--model.adapter_options={options}"] if options else [])]
    cli = PeradaCLI(["--config", recipe, *adapter_words], run=False)

    def model(name):
        words = [*adapter_words, "--trainer.logger=false", *ENTRIES[name].words(cli), *ENTRIES[name].adapter_words(cli)]
        classifier = PeradaCLI(["--config", recipe, *words], run=False).model
        return classifier.adapter, classifier.adapter_options

    assert model("flexlora") == ("lora", lora or {})
    assert model("feddpa") == ("dual_lora", dual or {})
    assert model("fedalt_row") == ("dual_lora", (dual or {}) | {"gate": True})


@pytest.mark.slow
def test_an_adapter_for_all_runs_is_not_that_of_algorithms_with_one_of_their_own(recipe, tmp_path):
    """``--model.adapter`` on the command line is as if the recipe had it; ``--vary`` is for every algorithm."""
    arguments = Namespace(recipes=[recipe], algorithms=["fedavg", "feddpa", "fedalt_row", "rolora"], seeds=[0], vary=[])
    arguments.update(
        Namespace(
            tune=[], set=[], variants=[], trials=None, sampler="tpe", choose_by=list(SELECTION_SCORES), paper=False
        )
    )
    arguments.update(Namespace(redivide=False, tune_seeds=[]))
    make = partial(PeradaCLI, run=False)

    def adapters(*words):
        plan = Plan(make, arguments, words)
        models = [make(plan.job(row, 0, "run", {}).args).model for row in plan.rows]
        return [(model.adapter, model.adapter_options) for model in models]

    assert adapters("--model.adapter=lora", "--model.adapter_options={r: 2, lora_dropout: 0.1}") == [
        ("lora", {"r": 2, "lora_dropout": 0.1}),
        ("dual_lora", {"r": 2}),
        ("dual_lora", {"r": 2, "gate": True}),
        ("lora", {"r": 2, "lora_dropout": 0.1}),
    ]
    arguments.vary = ["model.adapter=lora,head"]
    assert [adapter for adapter, _ in adapters()] == ["lora", "head"] * 4


@pytest.mark.slow
def test_phases_share_the_budget_of_local_steps(recipe, read_results):
    full = ["--model.adapter=full", "--training.local_steps=4", "--trainer.max_epochs=2"]
    main(["compare", recipe, "--algorithms", "fedavg", "fedrep", "fedalt_input", "fedsim_output", *OUT, *full])
    assert {r["label"]: r["local_steps"] for r in read_results() if r["stage"] == "run"} == dict.fromkeys(
        ("fedavg", "fedrep", "fedalt_input", "fedsim_output"), 8
    )


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.local_steps=5"], ["--training.local_steps=2"]),
        (["--training.local_steps=1"], ["--training.local_steps=1"]),
        (["--training.local_steps=null", "--training.local_epochs=3"], ["--training.local_epochs=1.5"]),
        (["--training.local_steps=5", "--federated.algorithm.head_epochs=2"], []),
        (["--training.local_steps=5", "--federated.algorithm=null", "--federated.algorithm=FedAvg"], []),
    ],
)
def test_budgets(recipe, words, expected):
    base = ["--config", recipe, "--trainer.logger=false", "--federated.algorithm=FedRep"]
    assert same_budget(PeradaCLI([*base, *words], run=False)) == expected


@pytest.mark.slow
def test_recipes_keep_their_own_algorithm(recipe, capsys):
    main(["compare", recipe, "--federated.algorithm=Standalone"])
    table = rows(capsys.readouterr().out)
    assert list(table)[:2] == ["before fine-tuning", "tiny"]
    assert table["tiny"]["sent"] == "0"


def record(label, **values):
    return {"label": label, "stage": "run", "seed": 0, "variant": [], "point": {}, "args": []} | values


def test_summary_marks_what_is_not_known():
    records = [
        record("before fine-tuning", stage="start", **{"personal/local_test": 0.5}),
        record("x", **{"personal/local_test": 0.25, "params/trained": 1234.0, "params/sent": 5.0,
                       "mb_sent": 0.5, "seconds_per_round": 1.25}),
    ]  # fmt: skip
    table = rows(summary(records))
    assert table["before fine-tuning"]["own images"] == "50.00"
    assert table["before fine-tuning"]["global model"] == "–"
    assert table["x"]["trained"] == "1,234"
    assert table["x"]["s / round"] == "1.2"


def test_initial_models_that_differ_have_rows_of_their_own_and_none_failed():
    starts = [
        record("before fine-tuning", stage="start", varied={"data.alpha": alpha}, **{"personal/local_test": value})
        for alpha, value in (("1", 0.5), ("0.3", 0.25))
    ]
    table = rows(summary([*starts, record("x", **{"personal/local_test": 0.25})]))
    assert list(table)[:3] == ["before fine-tuning, alpha=1", "before fine-tuning, alpha=0.3", "x"]
    assert not any("failed" in name for name in table)
    lost = record("y", stage="tune", failed="no", diverged=False)
    assert "y (failed)" in rows(summary([*starts, lost]))


def test_what_means_of_factors_lost_is_a_column():
    residual = "updates/lora_residual"
    error = "updates/lora_error"
    by_name = record("fedavg", history=[{"round": 1, residual: 0.25}, {"round": 2, residual: 0.75}])
    rule = record("svd", history=[{"round": 1, residual: 0.5, error: 0.0}, {"round": 2, residual: 0.5, error: 0.125}])
    table = rows(summary([by_name, rule, record("x", history=[{"round": 1, "personal/local_test": 0.5}])]))
    assert {name: row["lost"] for name, row in table.items()} == {"fedavg": "50.00", "svd": "6.25", "x": "–"}
    assert "lost" not in rows(summary([record("x")]))["x"]


def test_what_the_mean_hides_has_columns_where_it_hides_something():
    """The weighted mean where test sets differ by more than ten times, the mean of those that took part lately."""
    scores = {"personal/local_test": 0.5, "personal/local_test_weighted": 0.75, "personal/local_test_recent": 0.5}
    table = rows(summary([record("x", **scores, test_images=[3, 30])]))
    assert [name for name in table["x"] if "own images" in name] == ["own images"]
    other = scores | {"personal/local_test_recent": 0.625, "test_images": [3, 31]}
    table = rows(summary([record("before fine-tuning", stage="start"), record("x", **other)]))
    assert table["x"]["own images, weighted by images"] == "75.00"
    assert table["x"]["own images, recent clients"] == "62.50"
    assert list(table["x"])[:3] == ["own images", "own images, weighted by images", "own images, recent clients"]
    assert table["before fine-tuning"]["own images, recent clients"] == "–"


def test_rows_with_stale_models_are_named():
    stale = {"stale_clients": 1, "num_clients": 20, "seed": 0}
    records = [record("x", **stale), record("x", **stale | {"stale_clients": 3, "seed": 1}), record("y")]
    shown = summary(records)
    assert "Personal models of clients that have not taken part" in shown
    assert "- x: 3 of 20 clients with seed 1" in shown
    assert "- y" not in shown
    assert "models of clients" not in summary([record("y", stale_clients=0, num_clients=20)])


@pytest.mark.slow
def test_a_run_says_who_took_part_when(recipe, read_results, capsys):
    """Of FedAvg, whose clients predict with the newest model, none is stale."""
    options = ["--federated.clients_per_round=1", "--trainer.max_epochs=2"]
    main(["compare", recipe, "--algorithms", "fedavg", "ditto", *options, *OUT])
    result = capsys.readouterr()
    runs = {one["label"]: one for one in read_results() if one["stage"] == "run"}
    clients = runs["ditto"]["num_clients"]
    last = [0] * clients
    for round in range(2):
        for client in sample_cohort(0, round, clients, 1):
            last[client] = round + 1
    assert runs["ditto"]["last_rounds"] == runs["fedavg"]["last_rounds"] == last
    assert (runs["fedavg"]["stale_clients"], runs["ditto"]["stale_clients"]) == (0, last.count(0))
    assert f"- ditto: {last.count(0)} of {clients} clients" in result.out and "- fedavg:" not in result.out
    assert "have not taken part" not in result.err  # the note below the table is said once


def test_shifts_have_columns():
    scores = {"personal/local_test": 0.25, "personal/fog": 0.5, "personal/fog_std": 0.1, "global/fog": 0.4}
    plain = record("before fine-tuning", stage="start", **{"personal/local_test": 0.5})
    table = rows(summary([plain, record("x", **scores), record("x", **scores | {"personal/fog": 0.7, "seed": 1})]))
    assert table["x"]["fog, personal models"] == "60.00 ± 14.14"
    assert table["x"]["fog, global model"] == "40.00 ± 0.00"
    assert table["before fine-tuning"]["fog, personal models"] == "–"
    assert not any("std" in name for name in table["x"])


def test_epsilon_has_columns_where_a_run_was_private(tmp_path):
    scores = {"personal/local_test": 0.5, "personal/global_test": 0.3, "diverged": False}
    spent = [
        {"privacy/server_epsilon_mean": 1.0, "privacy/release_epsilon_mean": 2.0, "privacy/release_epsilon_max": 2.25},
        {"privacy/server_epsilon_mean": 2.0, "privacy/release_epsilon_mean": 3.0, "privacy/release_epsilon_max": 3.5},
    ]
    # A run's history has more beside: it is not shown, and infinity goes through a file of JSON.
    without_noise = dict.fromkeys(spent[0], math.inf) | {"privacy/release_epsilon_std": math.nan, "train/loss": 1.0}
    records = [record("private", **scores, **epsilons(spent[0])), record("private", **scores, **epsilons(spent[1]))]
    records[1]["seed"] = 1
    records += [record("no noise", **scores, **epsilons(without_noise)), record("open", **scores)]
    records.append(record("lost", stage="tune", point={"lr": "1"}, failed="ValueError: no"))
    results = Results(tmp_path / "r.json")
    results.records = records
    results.arrange([])
    text = summary(Results(tmp_path / "r.json").records)
    table = rows(text)
    assert [name for name in table["open"] if name.startswith("ε")] == ["ε server", "ε release", "ε max"]
    shown = {label: [row[f"ε {name}"] for name in ("server", "release", "max")] for label, row in table.items()}
    assert shown == {
        "private": ["1.50 ± 0.71", "2.50 ± 0.71", "3.50"],
        "no noise": ["∞", "∞", "∞"],
        "open": ["–", "–", "–"],
        "lost (failed)": ["–", "–", "–"],
    }
    assert "ε max: its largest." in text
    assert "sees at most ε max = ∞ of 3 runs, at as many times the δ." in text
    assert "sees at most ε max = 5.75 of 2 runs, at as many times the δ." in summary(records[:2])
    assert "ε" not in summary([record("open", **scores)])
    assert rows(summary([record("x", **{"privacy/client_epsilon_max": 4.0})]))["x"]["ε client"] == "4.00"


def test_rows_of_other_options_and_seeds_that_failed():
    scores = {"personal/local_test": 0.5, "personal/global_test": 0.3, "diverged": False}
    records = [
        record("x", **scores),
        record("x", variant=["--paper"], **scores),
        record("y", **scores),
        record("y", seed=1, failed="ValueError: no"),
        record("z", stage="tune", point={"lr": "1"}, **scores),
        record("z", stage="tune", point={"lr": "2"}, variant=["--tune=lr=1,2"], failed="ValueError: too high"),
    ]
    shown = summary(records)
    assert list(rows(shown)) == ["x", "x --paper", "y (1 of 2 failed)", "z (failed)"]
    assert "- y, seed 1: ValueError: no" in shown
    assert grid_table(records).splitlines()[2:4] == [
        "| z |  1 |  40.00 | chosen |",
        "| z |  2 | failed |        |",
    ]
    assert "- z, seed 0, 2: ValueError: too high" in grid_table(records)


def test_a_setting_is_judged_by_its_mean_over_the_seeds_of_the_grid():
    def trial(rate, seed, personal, **fields):
        scores = {"personal/local_test": personal, "personal/global_test": personal, "diverged": False}
        return record("z", stage="tune", point={"lr": rate}, seed=seed, **scores, **fields)

    # The second value is best with the first seed only, and the third failed with one of two seeds.
    records = [
        trial("1", 7, 0.5),
        trial("1", 8, 0.7),
        trial("2", 7, 0.6),
        trial("2", 8, 0.4),
        trial("3", 7, 0.9),
        trial("3", 8, 0.9, failed="ValueError: no"),
    ]
    best = choose_trial(trials_of(records))
    assert best.point == {"lr": "1"}
    assert choose_trial(trials_of(records[::2])).point == {"lr": "3"}
    text = grid_table(records)
    # The sample deviation of 50 and 70, and of 60 and 40.
    assert text.splitlines()[2:5] == [
        "| z |  1 | 60.00 ± 14.14 | chosen |",
        "| z |  2 | 50.00 ± 14.14 |        |",
        "| z |  3 |        failed |        |",
    ]
    assert "± is the sample standard deviation over seeds." in text


@pytest.mark.slow
def test_each_seed_divides_anew_and_others_choose(recipe, read_results, capsys):
    words = ["compare", recipe, "--algorithms", "fedavg", "--seeds", "0", "1", "--redivide", *OUT]
    main([*words, "--tune", "training.lr_local=0.01,0.3", "--tune_seeds", "5", "6"])
    records = read_results()
    tried = [(r["point"]["training.lr_local"], r["seed"]) for r in records if r["stage"] == "tune"]
    assert tried == [("0.01", 5), ("0.01", 6), ("0.3", 5), ("0.3", 6)]
    for made in records:
        assert f"--data.seed={made['seed']}" in made["args"]
    means = {}
    for rate in ("0.01", "0.3"):
        scores = [score(r) for r in records if r["stage"] == "tune" and r["point"]["training.lr_local"] == rate]
        means[rate] = sum(scores) / 2
    best = max(means, key=means.get)
    finals = [r for r in records if r["stage"] == "run"]
    assert [(r["point"]["training.lr_local"], r["seed"]) for r in finals] == [(best, 0), (best, 1)]
    assert f"chosen, validation score {100 * means[best]:.2f} ± " in capsys.readouterr().out
    # It goes on where it stopped, with further seeds.
    main([*words, "--tune", "training.lr_local=0.01,0.3", "--tune_seeds", "5", "6", "7"])
    assert [line.split(", lr")[0] for line in started_runs(capsys.readouterr().out)] == ["fedavg, seed 7"] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tune_seeds", "1"], "--tune_seeds 1 requires settings to try; add --tune"),
        (["--tune_seeds", "one"], "--tune_seeds: must be an integer, got 'one'"),
        (["--redivide", "--data.seed=2"], "--redivide takes data.seed from each run's seed, but data.seed is set too"),
        (["--redivide", "--vary", "data.seed=1,2"], "--redivide takes data.seed"),
        (["--redivide", "--tune", "data.seed=1,2"], "--redivide takes data.seed"),
        (["--redivide", "--set", "fedavg:data.seed=1"], "--redivide takes data.seed"),
        (["--redivide", "--variants", "other={data.seed: 1}"], "--redivide takes data.seed"),
    ],
)
def test_seeds_that_contradict_each_other_are_rejected(recipe, more, message):
    with pytest.raises(ValueError, match=message):
        main(["compare", recipe, "--algorithms", "fedavg", *more])


@pytest.mark.slow
def test_two_recipes_have_rows_of_their_own(recipe, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.yaml").write_text(TINY)
    main(["compare", recipe, "other/tiny.yaml", "--algorithms", "standalone"])
    assert list(rows(capsys.readouterr().out))[:4] == [
        "tiny before fine-tuning",
        "other/tiny before fine-tuning",
        "tiny standalone",
        "other/tiny standalone",
    ]


@pytest.mark.slow
def test_values_that_are_varied_are_rows_and_each_is_tuned(recipe, read_results, capsys):
    grid = ["--tune", "training.lr_personal+training.lr_local=0.01,0.3", "--seeds", "1", "2"]
    main(["compare", recipe, "--algorithms", "fedavg", "--vary", "data.public_fraction=0.2,0.4", *grid, *OUT])
    result = rows(capsys.readouterr().out)
    labels = ["fedavg, public_fraction=0.2", "fedavg, public_fraction=0.4"]
    assert [label for label in result if label.startswith("fedavg")] == labels
    for label, share in zip(labels, ("0.2", "0.4"), strict=True):
        rows_of_label = [record for record in read_results() if record["label"] == label]
        assert [(record["stage"], record["seed"]) for record in rows_of_label] == [("tune", 1)] * 2 + [
            ("run", 1),
            ("run", 2),
        ]
        assert all(f"--data.public_fraction={share}" in record["args"] for record in rows_of_label)
    with pytest.raises(ValueError, match=r"--tune and --vary .*training\.lr_local"):
        main(["compare", recipe, *grid, "--vary", "training.lr_local=1,2"])
    with pytest.raises(ValueError, match=r"--vary 'a\.b'.*NAME=V1"):
        main(["compare", recipe, "--vary", "a.b"])


@pytest.mark.slow
def test_scores_after_several_rounds_are_a_table(recipe, read_results, capsys):
    main(
        ["compare", recipe, "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2", "--seeds", "0", "1", *OUT]
    )
    text = capsys.readouterr().out
    runs = [record for record in read_results() if record["stage"] == "run"]
    assert [[row["round"] for row in record["history"]] for record in runs] == [[2, 3]] * 2
    for name, words in (("personal/local_test", "own images"), ("global/global_test", "global model")):
        row = text.partition(f"| {words} after round")[2].splitlines()[2]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        means = [sum(record["history"][place][name] for record in runs) / 2 for place in (0, 1)]
        assert cells[0] == "tiny"
        assert [cell.split(" ± ")[0] for cell in cells[1:]] == [f"{100 * mean:.2f}" for mean in means]
        assert runs[0][name] == runs[0]["history"][-1][name]


COMPARISON = """
# What the paper prints.
compare:
  recipes: [tiny.yaml]
  algorithms: [perada_no_kd, perada]
  seeds: [3]
  vary: {data.public: [null, {class_path: Digits, init_args: {train: false}}]}
  output: out/r.json
data: {test_limit: 20}
federated: {algorithm.prox_strength: 2.0}
"""


def test_a_file_says_what_is_compared(recipe, read_results, tmp_path, capsys):
    (tmp_path / "table.yaml").write_text(COMPARISON)
    words = comparison(["table.yaml", "--data.test_limit=30"])
    assert words == [
        *("tiny.yaml", "--algorithms", "perada_no_kd", "perada", "--seeds", "3"),
        '--vary=data.public=null,{"class_path": "Digits", "init_args": {"train": false}}',
        *("--output", "out/r.json"),
        *("--data.test_limit=20", "--federated.algorithm.prox_strength=2.0", "--data.test_limit=30"),
    ]
    assert comparison([recipe, "--seeds", "1"]) == [recipe, "--seeds", "1"]
    with pytest.raises(ValueError, match=r"'table\.yaml' .*'tiny\.yaml'"):
        comparison(["table.yaml", recipe])
    with pytest.raises(ValueError, match=r"'table\.yaml' .*perada compare table\.yaml"):
        main(["fit", "--config", "table.yaml"])


@pytest.mark.slow
def test_ensembles_have_columns_of_their_modes(recipe, read_results, capsys):
    main(["compare", recipe, "--algorithms", "fedavg", "fed_ensemble", "--seeds", "0", "1", *OUT])
    result = rows(capsys.readouterr().out)
    runs = [record for record in read_results() if record["label"] == "fed_ensemble"]
    best, entropy = (sum(record[name] for record in runs) / 2 for name in ("global/best_mode", "global/entropy"))
    assert result["fed_ensemble"]["best mode"].startswith(f"{100 * best:.2f} ± ")
    assert result["fed_ensemble"]["entropy of the modes"].startswith(f"{entropy:.2f} ± ")
    assert result["fedavg"]["worst mode"] == "–"


@pytest.mark.slow
def test_a_grid_can_be_that_of_some_algorithms(recipe, read_results, capsys):
    grid = ["--tune", "fedavg:training.lr_personal+training.lr_local=0.01,0.3"]
    grid += [
        "--tune",
        "perada_no_kd,ditto:training.lr_local=0.2",
        "--tune",
        "ditto:federated.algorithm.prox_strength=1,2,3",
    ]
    words = ["compare", recipe, "--algorithms", "fedavg", "perada_no_kd", "ditto", *grid]
    main([*words, *OUT])
    tried = [(record["label"], record["point"]) for record in read_results() if record["stage"] == "tune"]
    both = "training.lr_personal+training.lr_local"
    strength = "federated.algorithm.prox_strength"
    assert tried == [
        ("fedavg", {both: "0.01"}),
        ("fedavg", {both: "0.3"}),
        ("perada_no_kd", {"training.lr_local": "0.2"}),
        *(("ditto", {"training.lr_local": "0.2", strength: value}) for value in "123"),
    ]
    assert "algorithms differ in their number of settings" in capsys.readouterr().err.lower()
    main([*words, "--tune", "perada:training.lr_local=1,2", *OUT])
    assert started_runs(capsys.readouterr().out) == []
    with pytest.raises(ValueError, match="'perda', which is not an algorithm"):
        main([*words, "--tune", "perda:training.lr_local=1,2"])
    with pytest.raises(ValueError, match=r"training\.lr_local .*twice"):
        main([*words, "--tune", "training.lr_local=1,2"])


@pytest.mark.slow
def test_settings_of_some_algorithms_reach_their_runs_only(recipe, monkeypatch):
    words = [
        "--set",
        "fedavg,ditto:training.lr_local+training.lr_personal=0.3",
        "ditto:federated.algorithm.prox_strength=7",
    ]
    # An option of one algorithm counts more than an option of all.
    for before in ([], ["--training.lr_local=0.9"]):
        plan = plan_of(monkeypatch, recipe, "--algorithms", "fedavg", "ditto", "perada_no_kd", *before, *words)
        clis = {row[1]: plan.make_cli(plan.job(row, 0, "run", {}).args) for row in plan.rows}
        rates = {name: cli.config.training.lr_local for name, cli in clis.items()}
        assert rates["fedavg"] == rates["ditto"] == 0.3
        assert rates["perada_no_kd"] != 0.3
        assert clis["ditto"].loop.algorithm.prox_strength == 7
        assert clis["perada_no_kd"].loop.algorithm.prox_strength != 7


BALANCED = {"class_path": "BalancedDirichlet", "init_args": {"num_clients": 4, "alpha": 2.0}}
CHANGED = {"data": {"flip": True, "partition": BALANCED}, "training": {"lr_local": 0.3}}


@pytest.mark.slow
def test_variants_are_rows_of_several_changes_each(recipe, tmp_path, monkeypatch):
    section = {"recipes": [recipe], "algorithms": ["ditto", "fedavg"], "variants": {"as it is": {}, "both": CHANGED}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"compare": section, "training": {"lr_local": 0.7}}))
    plan = plan_of(monkeypatch, "rows.yaml")
    jobs = [plan.job(row, 0, "run", {}) for row in plan.rows]
    labels = ["ditto, as it is", "ditto, both", "fedavg, as it is", "fedavg, both"]
    assert [job.label for job in jobs] == labels
    assert [job.varied for job in jobs[:2]] == [{"variant": "as it is"}, {"variant": "both"}]
    plain, both = (plan.make_cli(job.args).datamodule for job in jobs[2:])
    assert (plain.prepare.flip, type(plain.division.partition).__name__) == (False, "IID")
    assert (both.prepare.flip, both.division.partition.alpha) == (True, 2.0)
    # A variant changes what all runs have.
    rates = [plan.make_cli(job.args).loop.training.lr_local for job in jobs[2:]]
    assert rates == [0.7, 0.3]


@pytest.mark.slow
def test_variants_are_run_and_shown_by_their_names(recipe, read_results, capsys):
    words = ["compare", recipe, "--algorithms", "fedavg", WEIGHTS, *OUT]
    words += ["--variants", "plain={}", "faster={training: {lr_local: 3.0, lr_personal: 3.0}}"]
    main(words)
    output = capsys.readouterr().out
    assert started_runs(output) == ["fedavg, plain, seed 0", "fedavg, faster, seed 0"]
    table = rows(output)
    assert list(table) == ["before fine-tuning", "fedavg, plain", "fedavg, faster", "full fine-tuning, for comparison"]
    scores = {r["label"]: r["global/global_test"] for r in read_results() if r["stage"] == "run"}
    expected = fit_scores(
        "--federated.algorithm=FedAvg", "--training.lr_local=3.0", "--training.lr_personal=3.0", WEIGHTS
    )
    assert scores["fedavg, faster"] == expected["global/global_test"] != scores["fedavg, plain"]
    main(words)
    assert started_runs(capsys.readouterr().out) == []


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flipped"], "cannot be parsed; write a name and options, for example 'mirrored="),
        (["={}"], "cannot be parsed"),
        (["a=[1]"], "cannot be parsed"),
        (["a={"], "cannot be parsed"),
        (["a={}", "a={flip: true}"], "'a' is used twice; give each variant a unique name"),
        (["a={seed_everything: 3}"], "--variants 'a' cannot be tuned or varied: --seeds sets"),
        (["a={data: {evaluate_on: test}}"], "this determines what is scored"),
        (
            ["a={training.lr_local: 1}", "--vary=training.lr_local=1,2"],
            "'a' and --tune or --vary both set training.lr_local; leave one out",
        ),
        (["a={lr_locl: 1}"], "lr_locl"),
    ],
)
def test_variants_that_cannot_be_run_are_rejected(recipe, words, message):
    with pytest.raises((ValueError, ArgumentError), match=message):
        main(["compare", recipe, "--algorithms", "fedavg", "--variants", *words])


@pytest.mark.slow
def test_a_grid_is_chosen_from_by_the_score_that_is_named(recipe, read_results, capsys):
    """The records of the grid are used again, and say what chose."""
    main(["compare", recipe, "--algorithms", "ditto", *GRID, *OUT])
    names = ["personal/local_test", "global/global_test"]
    tried = [record for record in read_results() if record["stage"] == "tune"]
    words = ["own images", "global model"]
    for values, record in zip(((0.1, 0.9, 0.5), (0.9, 0.1, 0.5)), (0, 1), strict=True):
        rewritten = [without(one) | {names[record]: value} for one, value in zip(tried, values, strict=True)]
        (Path("out") / "r.json").write_text(json.dumps(rewritten))
        capsys.readouterr()
        main(["compare", recipe, "--algorithms", "ditto", *GRID, "--choose_by", names[record], *OUT])
        output = capsys.readouterr().out
        assert started_runs(output) == [f"ditto, seed 0, lr_personal+lr_local={('0.3', '0.01')[record]}"]
        assert f"in %: {words[record]}, of held-out" in output
        assert {one.get("chosen_by", [""])[0] for one in read_results() if one["stage"] == "tune"} == {names[record]}


def test_settings_are_chosen_by_the_prediction_that_clients_make(recipe, monkeypatch):
    """FedAvg's clients have one model to predict with, Ditto's and those that fine-tune FedAvg's have two."""
    words = [recipe, "--algorithms", "fedavg", "standalone", "ditto", "fedavg_ft"]
    words += ["--tune", "training.lr_local=0.1,0.3"]
    both_models = "--evaluation.prediction=both"
    chosen_by = []
    for options in ([both_models], [], [both_models, "--choose_by", "personal/local_test"]):
        plan = plan_of(monkeypatch, *words, *options)
        chosen_by.append([plan.job(row, 0, "tune", {}).chosen_by for row in plan.rows])
    one = ["personal/local_test", "personal/global_test"]
    both = ["both/local_test", "both/global_test"]
    assert chosen_by == [[one, one, both, both], [one] * 4, [["personal/local_test"]] * 4]


def test_the_table_of_the_grid_names_the_prediction_that_chose():
    of_both = {"both/local_test": 0.5, "both/global_test": 0.3, "chosen_by": ["both/local_test", "both/global_test"]}
    trials = [
        scored_record("fedavg", 0, 0.4, stage="tune", point={"a": "1"}, diverged=False),
        scored_record("ditto", 0, 0.1, stage="tune", point={"a": "1"}, diverged=False, **of_both),
    ]
    text = grid_table(trials)
    assert "mean of own images and all clients' images, by both models of a client where it has both" in text
    ditto = [line.split("|")[3].strip() for line in text.splitlines() if line.startswith("| ditto")]
    assert ditto == ["40.00"]  # the mean of 50 and 30


def scored_record(label, seed, value, **more):
    return {
        **dict(stage="run", label=label, recipe="r", seed=seed, point={}, args=[str(value)], variant=[], varied={}),
        **{name: value for name in ("personal/local_test", "personal/global_test", "global/global_test")},
        **more,
    }


def test_rows_of_other_choices_and_values_are_not_averaged():
    """Chosen by other scores, varied by options of the same short name, or scored by round."""
    curve = [{"round": 1, "personal/local_test": 0.1}, {"round": 2, "personal/local_test": 0.9}]
    other = [{"round": 1, "personal/local_test": 0.5}, {"round": 2, "personal/local_test": 0.6}]
    records = [
        scored_record("ditto", 0, 0.2, variant=["--tune=a=1,2"], history=curve),
        scored_record("ditto", 0, 0.4, variant=["--tune=a=1,2", "--choose_by=global/global_test"], history=other),
        scored_record("d, batch_size=4", 0, 0.5, variant=["--data.batch_size=4"]),
        scored_record("d, batch_size=4", 0, 0.7, variant=["--distillation.batch_size=4"]),
    ]
    result = rows(summary(records))
    assert [row["own images"] for row in result.values()] == ["20.00", "40.00", "50.00", "70.00"]
    assert list(result)[:2] == ["ditto", "ditto --choose_by=global/global_test"]  # what both have is not said
    lines = curve_tables(records).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in lines[2:]]
    assert cells == [["10.00", "90.00"], ["50.00", "60.00"]]


@pytest.mark.slow
def test_diagnostics_are_kept_of_every_round(recipe, read_results, capsys):
    options = (
        "--evaluation.diagnostics=[ensemble_error]",
        "--trainer.max_epochs=2",
        "--trainer.check_val_every_n_epoch=2",
    )
    main(["compare", recipe, "--algorithms", "fedavg", *options, *OUT])
    lines = capsys.readouterr().out.splitlines()
    (history,) = [record["history"] for record in read_results() if record["stage"] == "run"]
    assert [row["round"] for row in history] == [1, 2]
    assert "global/global_test" not in history[0] and "global/global_test" in history[1]
    heading = "| accuracy of the local models' ensemble after round"
    table = lines.index(next(line for line in lines if line.startswith(heading)))
    shown = [float(cell) for cell in lines[table + 2].split("|")[2:-1]]
    assert shown == [float(f"{row['theory/ensemble_accuracy']:.4g}") for row in history]


@pytest.mark.slow
def test_the_initial_model_is_scored_for_each_value_that_changes_it(recipe, read_results, capsys):
    weights = "--vary", "model.pretrained=false,perada:fashion_test_resnet"
    main(["compare", recipe, *weights, "--seeds", "0", "1", *OUT])
    result = rows(capsys.readouterr().out)
    starts = [record for record in read_results() if record["stage"] == "start"]
    assert [(start["varied"], start["seed"]) for start in starts] == [
        ({"model.pretrained": value}, seed) for seed in (0, 1) for value in ("false", "perada:fashion_test_resnet")
    ]
    for value in ("false", "perada:fashion_test_resnet"):
        scores = [start["global/global_test"] for start in starts if start["varied"]["model.pretrained"] == value]
        row = result[f"before fine-tuning, pretrained={value}"]
        assert row["global model"].startswith(f"{50 * sum(scores):.2f} ± ")
    main(["compare", recipe, "--vary", "training.local_steps=1,2", "--output", "out/s.json"])
    assert [name for name in rows(capsys.readouterr().out) if name.startswith("before")] == ["before fine-tuning"]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--vary", "data.batch_size=2,4", "--data.batch_size=8"],
            r"--data\.batch_size is set for every run but also tuned",
        ),
        (["--vary", "seed_everything=1,2"], "--seeds sets the seeds"),
        (["--tune", "data.seed+data.client_validation=1,2"], "determines what is scored"),
        (["--tune", "fedavg:training.lr_local=1,2"], "is for named algorithms; add --algorithms"),
        (["--tune", ":training.lr_local=1,2", "--algorithms", "fedavg"], "is for '', which is not an algorithm"),
        (
            ["--tune", "training.lr_local=1,2", "--algorithms", "standalone", "--choose_by", "global/global_test"],
            "standalone has no global model",
        ),
        (
            [
                "--tune",
                "training.lr_local=1,2",
                "--algorithms",
                "fedavg",
                "--choose_by",
                "personal/local_test_f1_macro",
            ],
            "--choose_by personal/local_test_f1_macro: there is no such score with this --evaluation.metric; choose "
            "one of ",
        ),
        (
            ["--vary", "trainer.max_epochs=1,2", "data.seed=0,1", "--trainer.max_epochs", "3"],
            "--trainer.max_epochs is set for every run but also tuned or var",
        ),
        (
            ["--vary", "trainer.max_epochs=1,2", "data.seed=0,1", "--data.seed=3"],
            "--data.seed is set for every run but also tuned or varied",
        ),
        (
            ["--tune=training.lr_local+training.lr_personal=0.1,1", "--training.lr_personal=1"],
            "--training.lr_personal is set for every run but also tuned",
        ),
        (["--set", "fedavg:training.lr_local=1"], "--set 'fedavg:training.lr_local=1' is for named algorithms"),
        (
            ["--set", "perda:training.lr_local=1", "--algorithms", "fedavg"],
            "--set 'perda:training.lr_local=1' is for 'perda', which is not an algorithm",
        ),
        (
            ["--set", "fedavg:training.lr_local=1,2", "--algorithms", "fedavg"],
            r"--set training\.lr_local must have one value per algorithm; use --tune",
        ),
        (
            [
                "--set",
                "fedavg:training.lr_local=1",
                "--tune",
                "fedavg:training.lr_personal+training.lr_local=1,2",
                "--algorithms",
                "fedavg",
            ],
            r"--set sets training\.lr_local to one value, but --tune or --vary to others",
        ),
    ],
)
def test_what_contradicts_itself_is_rejected_before_anything_runs(recipe, words, message):
    with pytest.raises(ValueError, match=message):
        main(["compare", recipe, *words])


@pytest.mark.parametrize("option", ["--model.pretrained", "--vary=model.pretrained", "--tune=model.pretrained"])
def test_weights_that_are_missing_are_noticed_before_anything_runs(recipe, tmp_path, option):
    """Those of the recipe are there."""
    with pytest.raises((FileNotFoundError, ValueError), match=r"nowhere\.safetensors"):
        main(["compare", recipe, f"{option}=nowhere.safetensors", "--output", str(tmp_path / "results.json")])
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compare:\n", "'t.yaml' lists no recipes to compare"),
        (
            "compare: {recipes: tiny.yaml, vary: [1, 2]}\n",
            r"compare\.vary must be a mapping of options .*, got \[1, 2\]",
        ),
    ],
)
def test_files_that_cannot_be_compared(recipe, tmp_path, text, message):
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        comparison(["t.yaml"])


def test_a_value_need_not_be_a_list_and_the_command_line_counts(recipe, tmp_path):
    text = "compare: {recipes: tiny.yaml, vary: {a.b: resnet18, c.d: 12}}\n"
    (tmp_path / "t.yaml").write_text(text)
    assert comparison(["--jobs", "2", "t.yaml"]) == [
        "tiny.yaml",
        "--vary=a.b=resnet18",
        "--vary=c.d=12",
        "--jobs",
        "2",
    ]
    (tmp_path / "t.yaml").write_text("compare: {recipes: tiny.yaml, vary: {a.b: ['1, 2', c]}}\n")
    (vary,) = comparison(["t.yaml"])[1:]
    assert parse_grid([vary.removeprefix("--vary=")]) == {"a.b": ["1, 2", "c"]}
    (tmp_path / "t.yaml").write_text(text)
    (tmp_path / "over.yaml").write_text("trainer: {}\n")
    (tmp_path / "weights.safetensors").write_bytes(b"\xff\xfe")
    options = ["--config", "over.yaml", "--model.pretrained", "weights.safetensors"]  # files, but no recipes to compare
    assert comparison(["t.yaml", *options]) == [
        "tiny.yaml",
        "--vary=a.b=resnet18",
        "--vary=c.d=12",
        *options,
    ]
    assert comparison(["tiny.yaml", *options]) == ["tiny.yaml", *options]
    assert comparison(["t.yaml", "--vary", "c.d=3"]) == [
        "tiny.yaml",
        "--vary=a.b=resnet18",
        "--vary",
        "c.d=3",
    ]


def test_the_lower_error_is_chosen():
    """Of scores with a minus; a mean with another score."""
    records = [
        {"diverged": False, "personal/local_test_ece": ece, "personal/local_test": accuracy, "chosen_by": by}
        for ece, accuracy, by in (
            (0.3, 0.9, ["-personal/local_test_ece"]),
            (0.1, 0.2, ["-personal/local_test_ece"]),
            (0.1, 0.4, ["personal/local_test", "-personal/local_test_ece"]),
        )
    ]
    assert [score(record) for record in records] == pytest.approx([-0.3, -0.1, 0.15])
    best = choose_trial([GridTrial({"lr": str(number)}, [record]) for number, record in enumerate(records[:2])])
    assert best == GridTrial({"lr": "1"}, [records[1]])
    run = {"stage": "tune", "label": "ditto", "recipe": "r", "seed": 0, "variant": ["--tune=lr=0,1"]}
    tried = [run | record | {"point": {"lr": str(n)}} for n, record in enumerate(records[:2])]
    shown = grid_table(tried)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[2:4]]
    assert cells == [["ditto", "0", "30.00", ""], ["ditto", "1", "10.00", "chosen"]]
    assert "own images, ECE, of held-out validation images; the lowest is chosen" in shown
    assert "-personal" not in shown


def test_scores_of_numbers_have_the_targets_units():
    """Mean absolute errors of 12.5 and 7.25 years, by which the lower is chosen."""
    records = [
        record("fedavg", stage="tune", point={"lr": lr}, has_classes=False, diverged=False)
        | {"personal/local_test": error, "chosen_by": ["-personal/local_test"]}
        for lr, error in (("0.1", 12.5), ("0.3", 7.25))
    ]
    grid = grid_table(records)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in grid.splitlines()[2:4]]
    assert cells == [["fedavg", "0.1", "12.5", ""], ["fedavg", "0.3", "7.25", "chosen"]]
    assert "Scores of lr: own images" in grid and "%" not in grid
    text = summary([one | {"stage": "run"} for one in records[:1]])
    assert rows(text)["fedavg"]["own images"] == "12.5"
    assert "Scores in the units of the targets." in text
    text = summary([one | {"stage": "run", "metric": "mae"} for one in records[:1]])
    assert "Scores: MAE in the units of the targets." in text
    history = [{"round": 0, "personal/local_test": 14.5}, {"round": 1, "personal/local_test": 12.5}]
    curves = curve_tables([records[0] | {"stage": "run", "history": history}])
    assert list(rows(curves)["fedavg"].values()) == ["14.5", "12.5"]


def test_the_task_decides_which_scores_of_the_automatic_metric_are_better():
    assert score_names("auto", Regression())["personal/local_test"] is True
    assert score_names("auto", Classification())["personal/local_test"] is False
    assert score_names("auto")["personal/local_test"] is False


def test_scores_to_choose_by_are_those_of_the_metrics():
    falls = score_names(["accuracy", "ece", {"MulticlassHammingDistance": {"name": "off"}}])
    assert falls["personal/local_test"] is falls["personal/local_test_worst"] is falls["global/global_test"] is False
    assert (
        falls["personal/local_test_ece"] is falls["personal/local_test_std"] is falls["global/global_test_off"] is True
    )
    assert "personal/local_test_auroc" not in falls


@pytest.mark.parametrize(("by_client", "kept"), [(True, "and the images of each client"), (False, "± does not cover")])
def test_redividing_warns_of_test_images_that_stay(recipe, tmp_path, monkeypatch, by_client, kept):
    for client in ("north", "south"):
        for number in range(4):
            path = tmp_path / "images" / client / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (16, 16), 10 * number).save(path)
    partition = {"class_path": "ByDomain", "init_args": {"column": "client"}}
    if not by_client:
        partition = {"class_path": "IID", "init_args": {"num_clients": 2}}
    data = {"dataset": {"class_path": "Images", "init_args": {"root": "images"}}, "partition": partition}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipes.recipe() | {"data": data | {"image_size": 16}}))
    monkeypatch.setattr(ComparisonRunner, "run", lambda runner: 0)
    words = ["compare", "mine.yaml", "--algorithms", "fedavg", "standalone"]
    with pytest.warns(UserWarning, match=rf"'mine\.yaml' .*Images.*{kept}"):
        main([*words, "--redivide"])
    # Neither without the option nor for a set that data.seed does divide.
    main(words)
    main(["compare", recipe, "--algorithms", "fedavg", "standalone", "--redivide"])


def test_arguments_that_only_the_own_algorithm_of_a_recipe_has_are_named(recipe, monkeypatch, recwarn):
    """λ of PerAda in a recipe is not that of Ditto, so their rows would differ by more than the algorithm."""
    monkeypatch.setattr(ComparisonRunner, "run", lambda runner: 0)
    content = yaml.safe_load(Path(recipe).read_text())
    content["federated"]["algorithm"] = {"class_path": "PerAda", "init_args": {"prox_strength": 0.125}}
    Path("with_lambda.yaml").write_text(yaml.safe_dump(content))
    words = ["compare", "with_lambda.yaml", "--algorithms", "perada", "perada_no_kd", "ditto", "mtl"]
    with pytest.warns(UserWarning, match=r"prox_strength=0\.125 for PerAda.* ditto 1\.0\. .*--set ditto:"):
        main(words)
    recwarn.clear()
    option = "federated.algorithm.prox_strength"
    for others in (
        ["--set", f"ditto:{option}=1"],
        ["--tune", f"ditto:{option}=0.1,1"],
        ["--vary", f"{option}=0.1,1"],
    ):
        algorithms = ["perada", "ditto"] if others[0] == "--vary" else ["perada", "ditto", "fedavg"]
        main(["compare", "with_lambda.yaml", "--algorithms", *algorithms, *others])
    # The recipe has the default, too.
    content["federated"]["algorithm"]["init_args"]["prox_strength"] = 1.0
    Path("with_lambda.yaml").write_text(yaml.safe_dump(content))
    main(words)
    assert not [warning for warning in recwarn if "prox_strength" in str(warning.message)]
