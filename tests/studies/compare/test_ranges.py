# SPDX-License-Identifier: Apache-2.0
"""``perada compare --tune NAME=lo..hi``: settings drawn from a range, on held-out images, resumed from the results."""

import json
import math
import random
import sys

import pytest
import yaml

from perada.cli import main
from perada.cli.runs import PeradaCLI
from perada.studies.compare.grid import Range, corners, has_range, inside, parse_grid, propose
from tests import recipes

RATE = "training.lr_local+training.lr_personal"


OUT = ["--output", "out/r.json"]
DISTILLING = {"federated": {"clients_per_round": 2}, "distillation": {"steps": 1, "batch_size": 4}}
TINY = yaml.safe_dump(recipes.recipe(data={"public_fraction": 0.2}, **DISTILLING))


def started_lines(text):
    return [line for line in text.splitlines() if line.startswith("---")]


def timeless(records):
    return [{k: v for k, v in record.items() if not k.startswith("seconds")} for record in records]


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)


def results(name="r"):
    with open(f"out/{name}.json") as file:
        return json.load(file)


def test_what_a_range_is():
    assert parse_grid(["a.lr_server=1e-3..1", "b=0.5..2", "c=0.1..10:log", "d=0,1", "e=../x"]) == {
        "a.lr_server": Range(1e-3, 1.0, True),
        "b": Range(0.5, 2.0, False),
        "c": Range(0.1, 10.0, True),
        "d": ["0", "1"],
        "e": ["../x"],
    }
    assert not parse_grid(["model.lr=0.1..1:linear"])["model.lr"].log
    assert has_range(parse_grid(["a=1..4"])) and not has_range(parse_grid(["a=1,4"]))
    assert corners(parse_grid(["a=1..4", "b=x,y"])) == [{"a": "1", "b": "x"}, {"a": "4", "b": "y"}]


def test_draws_are_uniform_or_logarithmic_and_whole():
    grid = parse_grid(["lr=1e-4..1", "share=-1.5..2.5", "steps=1..8", "kind=a,b"])
    points = [propose(grid, [], number, "random", 3) for number in range(200)]
    logs, shares = (
        [(number(point) - low) / (high - low) for point in points]
        for number, low, high in (
            (lambda point: math.log10(float(point["lr"])), -4, 0),
            (lambda point: float(point["share"]), -1.5, 2.5),
        )
    )
    for drawn in (logs, shares):  # of a uniform variable mean and variance are 1/2 and 1/12, give or take 4 errors
        mean = sum(drawn) / 200
        assert abs(mean - 1 / 2) < 4 * math.sqrt(1 / 12 / 200)
        assert abs(sum((x - mean) ** 2 for x in drawn) / 200 - 1 / 12) < 0.025
        assert min(drawn) >= 0 and max(drawn) <= 1
    assert {point["steps"] for point in points} == {str(n) for n in range(1, 9)}
    assert {point["kind"] for point in points} == {"a", "b"}
    assert len({point["lr"] for point in points}) == 200


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_tpe_draws_more_of_what_scored_well(sampler):
    logs = [-4 + 4 * (n + 0.5) / 20 for n in range(20)]
    told = [({"lr": f"{10**log:.5g}"}, -((log + 2) ** 2)) for log in logs]
    points = [propose(parse_grid(["lr=1e-4..1"]), told, number, sampler, 0) for number in range(20, 50)]
    assert all(inside(parse_grid(["lr=1e-4..1"]), point) for point in points)
    near = sum(abs(math.log10(float(point["lr"])) + 2) < 1 for point in points)
    assert near >= 23 if sampler == "tpe" else near < 23  # of 30, where chance gives 15 ± 2.7


def test_what_diverged_counts_as_worst():
    rates = [10 ** (-4 + 4 * (n + 0.5) / 20) for n in range(20)]
    told = [({"lr": f"{rate:.5g}"}, None if rate > 0.01 else 0.5 + n % 3 / 100) for n, rate in enumerate(rates)]
    drawn = [float(propose(parse_grid(["lr=1e-4..1"]), told, number, "tpe", 0)["lr"]) for number in range(20, 50)]
    assert sum(rate <= 0.01 for rate in drawn) >= 25  # of 30, where chance gives 15


def test_a_point_follows_from_what_is_told_alone():
    grid = parse_grid(["lr=1e-4..1"])
    draws = random.Random(0)
    told = [({"lr": f"{10 ** draws.uniform(-4, 0):.5g}"}, draws.random()) for _ in range(8)]
    assert propose(grid, told, 8, "tpe", 1) == propose(
        grid, [*told, ({"lr": "7"}, 9.0), ({"x": "1"}, 9.0)], 8, "tpe", 1
    )
    assert propose(grid, told, 8, "tpe", 1) != propose(grid, told, 9, "tpe", 1)
    assert propose(grid, told, 8, "tpe", 1) != propose(grid, told, 8, "tpe", 2)


COMMAND = ["compare", "tiny.yaml", "--algorithms", "fedavg", "ditto", "--tune", f"{RATE}=0.001..1"]


def quick(make_cli, task, threads, anonymous):
    """In place of a run: scores that follow from the rate, best at 0.01; ditto fails above 0.3."""
    given = dict(word.split("=", 1) for word in task.args if "=" in word)
    rate = float(given["--training.lr_local"])
    if rate > 0.3 and any("Ditto" in word for word in task.args):
        return {"failed": "too large", "seconds": 0.1}
    value = 1 - abs(math.log10(rate) + 2) / 4
    scores = {"personal/local_test": value, "personal/global_test": value / 2, "global/global_test": value}
    return {"run": scores | {"diverged": False}, "seconds": 0.1} | ({"start": scores} if task.scores_start else {})


def of(records, stage, label):
    return [record for record in records if record["stage"] == stage and record["label"] == label]


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_each_algorithm_gets_so_many_trials_and_the_file_is_all_that_is_kept(sampler, capsys, monkeypatch):
    monkeypatch.setattr("perada.studies.compare.running.attempt", quick)
    command = [*COMMAND, "--sampler", sampler, "--trials"]

    def run(trials, *out):
        try:
            main([*command, str(trials), *out])
        except SystemExit:  # some failed
            pass
        return capsys.readouterr().out

    shown = run(8, *OUT)
    records = results()
    firsts = []
    for label in ("fedavg", "ditto"):
        records_of_label = of(records, "tune", label)
        rates = [float(one["point"][RATE]) for one in records_of_label]
        assert len(set(rates)) == 8 and all(1e-3 <= rate <= 1 for rate in rates)
        assert all("--data.evaluate_on=validation" in one["args"] for one in records_of_label)
        best = min(
            (rate for rate, one in zip(rates, records_of_label, strict=True) if "failed" not in one),
            key=lambda r: abs(math.log10(r) + 2),
        )
        (final,) = of(records, "run", label)
        assert float(final["point"][RATE]) == best and "--data.evaluate_on=validation" not in final["args"]
        firsts.append(rates[:5])
    assert firsts[0] == firsts[1]
    assert any("failed" in one for one in records)
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("---")][-1] == "18/18"
    assert shown.count("| chosen |") == 2
    # Stopped before the last trial of one algorithm and the last three of the other, it ends with the same records.
    kept = of(records, "tune", "fedavg")[:7] + of(records, "tune", "ditto")[:5]
    with open("out/part.json", "w") as file:
        json.dump(kept, file)
    again = run(8, "--output", "out/part.json")
    failed = sum("failed" in one for one in kept)
    assert len(started_lines(again)) == 18 - len(kept) + failed
    assert timeless(results("part")) == timeless(records)
    # More trials go on where the last ones ended.
    run(9, *OUT)
    assert [len(of(results(), "tune", label)) for label in ("fedavg", "ditto")] == [9, 9]


@pytest.mark.slow
def test_runs_from_a_range_are_those_of_perada_fit():
    main([*COMMAND[:3], "fedavg", *COMMAND[5:], "--trials", "2", *OUT])
    records = results()
    for one in of(records, "tune", "fedavg") + of(records, "run", "fedavg"):
        cli = PeradaCLI(one["args"], run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
        assert one["personal/local_test"] == pytest.approx(cli.model.scores["personal/local_test"], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tune", "training.lr_local=0.1..0.01"], "0.1 is not below 0.01; write the lower end first"),
        (["--tune", "training.lr_local=0..0.1"], "a logarithmic range must begin above zero; raise 0 or add :linear"),
        (["--tune", "training.lr_local=0.1..1,2"], "a range cannot be mixed with values"),
        (["--tune", "model.lr_locl=0.1..1"], "--tune --model.lr_locl=0.1 with ditto"),
        (["--tune", "training.lr_local=-1..1:linear"], "--tune --training.lr_local=-1 with ditto: .*lr_local must be"),
        (["--tune", "training.lr_local=0.1,1", "--trials", "4"], "--trials 4 requires a range; add --tune NAME=lo..hi"),
        (["--tune", "training.lr_local=0.1,1", "--sampler", "random"], "--sampler random requires a range; add --tune"),
        (
            ["--choose_by", "personal/local_test"],
            "--choose_by personal/local_test requires settings to choose from; add",
        ),
        (["--vary", "training.lr_local=0.1..1"], "--vary training.lr_local: a range cannot be varied"),
    ],
)
def test_what_is_no_range_is_rejected_before_anything_runs(words, message, tmp_path):
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        main(["compare", "tiny.yaml", "--algorithms", "ditto", *words, *OUT])
    assert not (tmp_path / "out").exists()


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=r"optuna, .*'perada\[tune\]'"):
        main([*COMMAND, *OUT])
