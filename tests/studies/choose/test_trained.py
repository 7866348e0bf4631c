# SPDX-License-Identifier: Apache-2.0
"""Searches that train: trials in segments, the choice, and what the written recipe trains to."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from perada.cli import main
from perada.cli.runs import build_compared
from perada.data import Digits
from perada.studies.choose import candidates, command
from perada.studies.choose.recipe_file import format_recipe, recipe_words
from perada.studies.compare.running import OutOfTimeError, RunTask, Segment, attempt
from tests import recipes

HELD_OUT = ["--data.client_validation=0.2", "--data.client_validation_seed=3", "--data.evaluate_on=validation"]
METHODS = ("standalone", "fedavg", "ditto")


class BlankTestDigits(Digits):
    """Test images are black: what is measured on them says nothing of the digits."""

    def _load_images(self):
        images, labels = super()._load_images()
        return (images if self.train else torch.zeros_like(images)), labels


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = recipes.recipe(
        trainer={"max_epochs": 4},
        model={"pretrained": "perada:fashion_test_resnet"},
        data={"train_limit": 150},
        training={"local_steps": 4, "lr_local": 0.1, "lr_personal": 0.1},
    )
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    return "tiny.yaml"


def states_of(cli):
    """The tensors of a finished run by their place in its federation."""
    tensors = {}

    def collect(value, place):
        if isinstance(value, torch.Tensor):
            tensors[place] = value.clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(item, (*place, key))
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                collect(item, (*place, number))

    collect(cli.loop.context.federation.state_dict(), ())
    return tensors


SLOW_ALGORITHMS = [pytest.param(name, marks=pytest.mark.slow) for name in ("FedBN", "Ditto", "PerAda")]


@pytest.mark.parametrize("algorithm", ["FedAvgFT", *SLOW_ALGORITHMS])
def test_a_trial_in_stretches_ends_like_an_uninterrupted_fit(recipe, tmp_path, algorithm):
    args = ["--config", recipe, "--trainer.logger=false", f"--federated.algorithm={algorithm}", *HELD_OUT]
    args += ["--model.adapter=residual", "--trainer.check_val_every_n_epoch=4", "--training.momentum=0.9"]
    if algorithm == "PerAda":
        args += ["--data.public_fraction=0.2", "--distillation.steps=2", "--distillation.batch_size=8"]
    built = []

    def build(words):
        built.append(build_compared(words))
        return built[-1]

    checkpoint = None
    for last_round in (1, 2, 4):
        segment = Segment(last_round, tmp_path / f"after_{last_round}.ckpt", start=checkpoint)
        result = attempt(build, RunTask(args, False, segment), threads=1)
        checkpoint = segment.checkpoint
        assert "failed" not in result
        assert len(result["run"]["seconds_of_rounds"]) in (1, 2)
    in_stretches = built[-1]

    uninterrupted = build_compared(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        uninterrupted.trainer.fit(uninterrupted.model, uninterrupted.datamodule)
    finally:
        torch.set_num_threads(threads)
    expected = states_of(uninterrupted)
    actual = states_of(in_stretches)
    assert expected.keys() == actual.keys()
    assert expected
    for place, tensor in expected.items():
        assert torch.equal(actual[place], tensor), place
    assert in_stretches.model.scores == uninterrupted.model.scores


def test_a_run_ends_when_its_time_is_over(recipe):
    args = ["--config", recipe, "--trainer.logger=false", "--federated.algorithm=FedAvg"]
    result = attempt(build_compared, RunTask(args, False, end_by=0.0), threads=1)
    assert result["failed"].startswith(OutOfTimeError.__name__)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(command, "METHODS", {name: candidates.METHODS[name] for name in METHODS})
    monkeypatch.setattr(command, "CANDIDATES", (3,))
    monkeypatch.setattr(command, "num_draws_for", lambda held_out: 2)


def read_records(folder):
    return json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))


def scores_by_run(records):
    return {(r["label"], r["stage"], *r["varied"].items(), r["seed"]): r["clients"] for r in records}


@pytest.mark.slow
def test_blank_test_images_change_the_verdict_but_not_the_choice(recipe, few):
    words = ["choose", recipe, "--budget", "1h", "--seeds", "0", "1"]
    main([*words, "--output", "normal"])
    blank = f"--data.dataset={__name__}.BlankTestDigits"
    main([*words, "--output", "blank", blank])
    normal = scores_by_run(read_records("normal"))
    without_images = scores_by_run(read_records("blank"))
    assert normal.keys() == without_images.keys()
    for run, clients in normal.items():
        assert (without_images[run] == clients) == (run[1] == "tune")
    first, second = (yaml.safe_load(Path(folder, "best.yaml").read_text()) for folder in ("normal", "blank"))
    for content in (first, second):
        del content["data"]["dataset"]
    assert first == second


@pytest.mark.slow
def test_the_recipe_trains_to_exactly_what_was_measured_with_its_seed(recipe, few, tmp_path):
    main(["choose", recipe, "--budget", "1h", "--seeds", "0", "1"])
    best = yaml.safe_load(Path("choice/best.yaml").read_text())
    chosen = best["federated"]["algorithm"]["class_path"].rpartition(".")[2].lower()
    cli = build_compared(["--config", "choice/best.yaml", "--trainer.logger=false"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
    finally:
        torch.set_num_threads(threads)
    (record,) = [r for r in read_records("choice") if r["stage"] == "run" and r["label"] == chosen and r["seed"] == 0]
    for name in ("personal/local_test", "personal/global_test"):
        assert cli.model.scores[name] == record[name]
    main(["check", "choice/best.yaml"])
    assert not (tmp_path / "choice" / "trials").exists()


NAMES = ["st-marys", "westend", "harbour"]


@pytest.mark.slow
def test_no_file_of_an_anonymous_search_has_the_name_of_a_client(few, recipe, tmp_path, capsys):
    digits = Digits()
    for number in range(90):
        name = NAMES[number % 3]
        path = tmp_path / "images" / name / f"digit_{int(digits.labels[number]) % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[number][0].numpy()).save(path)
    content = yaml.safe_load(Path(recipe).read_text())
    content["data"] = {
        "dataset": {"class_path": "Images", "init_args": {"root": "images", "gray": True}},
        "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
        "image_size": 16,
    }
    Path(recipe).write_text(yaml.safe_dump(content))
    main(["choose", recipe, "--budget", "1h", "--seeds", "0", "--anonymous"])
    files = [path for path in (tmp_path / "choice").rglob("*") if path.is_file()]
    assert {"best.yaml", "choice.md", "results.json", "search.json"} <= {path.name for path in files}
    for path in files:
        for name in NAMES:
            assert name.encode() not in path.read_bytes()
    shown = capsys.readouterr()
    for name in NAMES:
        assert name not in shown.out + shown.err
    # Without the option they are there, so the search above can find them.
    main(["choose", recipe, "--budget", "1h", "--seeds", "0", "--output", "named"])
    assert NAMES[0] in Path("named/results.json").read_text()


@pytest.mark.slow
def test_the_recipe_for_sites_is_accepted_by_deploy_init(recipe, tmp_path):
    Path("public").mkdir()
    for number in range(4):
        Image.new("L", (16, 16), 10 * number).save(f"public/{number}.png")
    content = yaml.safe_load(Path(recipe).read_text())
    public = {"root": "public", "size": 16}
    content["data"]["public"] = {"class_path": "UnlabelledFolder", "init_args": public}
    path = tmp_path / "method.yaml"
    path.write_text(yaml.safe_dump(content))
    words = ["--config", str(path), "--trainer.logger=false", "--federated.algorithm=null"]
    words += ["--federated.algorithm=Ditto", "--federated.algorithm.prox_strength=0.3", "--model.adapter=residual"]
    cli = build_compared(recipe_words(words, "both", 2))
    best = tmp_path / "best.yaml"
    best.write_text(format_recipe(cli, ["chosen"], {"federated.algorithm": "the reason"}))
    main(["deploy", "init", str(best), str(tmp_path / "app")])
    assert "the reason" in "".join(path.read_text() for path in (tmp_path / "app").rglob("*.yaml"))
