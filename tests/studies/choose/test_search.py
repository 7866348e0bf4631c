# SPDX-License-Identifier: Apache-2.0
"""The search with runs that are made up: what it runs, what it chooses by, and when it ends."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from perada.cli import main
from perada.studies.choose import candidates, command, search
from perada.studies.compare import launcher
from perada.studies.compare.comparison import Comparison
from perada.studies.compare.running import Event
from tests import recipes

NAMES = ["north-clinic", "south-clinic", "west-clinic"]
TINY = recipes.recipe(trainer={"max_epochs": 9})
METHODS = ("standalone", "fedavg", "ditto")


def complete_rounds(task):
    """The rounds of a complete run with the options of a task, the last of which counts."""
    return [int(word.split("=")[1]) for word in task.args if word.startswith("--trainer.max_epochs=")][-1]


def made_up_result(task, score, seconds):
    """The result of a run in which all clients have a score."""
    rounds = complete_rounds(task) if task.segment is None else task.segment.last_round
    clients = {
        name: [score] * 3
        for name in ("personal/local_test", "personal/global_test", "both/local_test", "both/global_test")
    }
    if not any("Ditto" in word for word in task.args):
        clients = {name: scores for name, scores in clients.items() if name.startswith("personal")}
    run = {
        "clients": clients,
        "client_names": NAMES,
        "client_test_images": [10, 10, 10],
        "metric": "accuracy",
        "has_classes": True,
        "diverged": False,
        "mb_sent": 0.0 if any("Standalone" in word for word in task.args) else 0.1,
        "seconds_of_rounds": [seconds / rounds] * rounds,
    }
    return {"run": run, "seconds": seconds}


class Runs:
    """Stands for the processes that train: made-up scores, and a clock that runs as long as training would.

    Attributes:
        tasks: The runs that were started.
        score: Returns the score of a run.
        seconds_of_round: Returns the duration of a round of a run.
        interrupt_after: Number of runs after which Ctrl-C is pressed; None for never.
    """

    def __init__(self):
        self.tasks = []
        self.now = 1000.0
        self.seconds_of_round = lambda task: 1.0
        self.interrupt_after = None
        self.score = lambda task: 0.5

    def time(self):
        return self.now

    @contextmanager
    def runner(self, make_cli, threads, jobs, anonymous):
        yield self.carry_out

    def carry_out(self, tasks):
        for number, task in enumerate(tasks):
            yield Event(number, None)
            if self.interrupt_after is not None and len(self.tasks) == self.interrupt_after:
                raise KeyboardInterrupt
            rounds = complete_rounds(task) if task.segment is None else task.segment.last_round
            # A trial goes on from its checkpoint.
            former = [t.segment.last_round for t in self.tasks if task.segment and t.args == task.args]
            seconds = (rounds - max(former, default=0)) * self.seconds_of_round(task) + 0.5
            self.tasks.append(task)
            score = self.score(task)
            if task.end_by is not None and self.now + seconds > task.end_by:
                seconds = max(0.0, task.end_by - self.now)
                score = "OutOfTimeError: the time for all runs was over"
            self.now += seconds
            if isinstance(score, str):
                yield Event(number, {"failed": score, "seconds": seconds})
            else:
                yield Event(number, made_up_result(task, score, seconds))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    made_up = Runs()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.setattr(launcher, "task_runner", made_up.runner)
    monkeypatch.setattr(search.time, "time", made_up.time)
    few = {name: candidates.METHODS[name] for name in METHODS}
    monkeypatch.setattr(command, "METHODS", few)
    monkeypatch.setattr(command, "CANDIDATES", (6, 3))
    monkeypatch.setattr(command, "num_draws_for", lambda held_out: 1)
    return made_up


def is_trial(task):
    return task.segment is not None


def method_of(task):
    return next(name for name in ("Standalone", "FedAvg", "Ditto") if any(name in word for word in task.args))


def choose(*words):
    # The made-up runs take place one after another.
    main(["choose", "tiny.yaml", "--budget", "30m", "--jobs", "1", *words])


def written(path="choice/best.yaml"):
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))


def test_held_out_images_choose_also_where_test_images_favour_another_method(runs, capsys):
    held_out = {"Standalone": 0.5, "FedAvg": 0.7, "Ditto": 0.6}
    tested = {"Standalone": 0.5, "FedAvg": 0.4, "Ditto": 0.95}
    runs.score = lambda task: (held_out if is_trial(task) else tested)[method_of(task)]
    choose()
    assert written()["federated"]["algorithm"]["class_path"].endswith("FedAvg")
    # What the test images say is not hidden.
    shown = capsys.readouterr().out
    assert "Take one shared model (FedAvg)" in shown
    assert "own images: ditto, personal model is ahead by 55.0 percentage points, more than chance explains" in shown
    assert Comparison.from_file("choice/results.json").best("own").name == "ditto, personal model"
    for task in runs.tasks:
        # Trials do not even read the test images.
        assert ("--data.evaluate_on=validation" in task.args) == is_trial(task)


def test_the_first_setting_of_all_pulled_methods_has_the_strength_of_the_recipe(runs, tmp_path):
    content = recipes.recipe(trainer={"max_epochs": 9})
    content["federated"] = {
        "algorithm": {"class_path": "PerAda", "init_args": {"distill": False, "prox_strength": 0.25}}
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    choose()
    first_of_ditto = next(task for task in runs.tasks if method_of(task) == "Ditto")
    strengths = [word for word in first_of_ditto.args if word.startswith("--federated.algorithm.prox_strength=")]
    assert strengths == ["--federated.algorithm.prox_strength=0.25"]
    others = [task.args for task in runs.tasks if method_of(task) == "FedAvg"]
    assert not any("prox_strength" in word for args in others for word in args)


@pytest.mark.slow
def test_if_training_alone_is_chosen_the_page_has_what_training_together_would_change(runs, tmp_path):
    held_out = {"Standalone": 0.8, "FedAvg": 0.5, "Ditto": 0.7}
    tested = {"Standalone": 0.8, "FedAvg": 0.5, "Ditto": 0.75}
    runs.score = lambda task: (held_out if is_trial(task) else tested)[method_of(task)]
    choose()
    page = (tmp_path / "choice" / "choice.md").read_text()
    assert "Take every client alone" in page
    together = "The best way of training together that was found, ditto, both models, is worse by 5.0"
    # In the advice and in the e-mail.
    assert page.count(together) == 2
    assert (tmp_path / "choice" / "clients.png").is_file()


@pytest.mark.slow
def test_a_third_of_the_settings_remains_within_each_method(runs):
    # Settings with a small rate are better, and FedAvg is worse than every setting of the others.
    def score(task):
        rate = next(float(word.split("=")[1]) for word in reversed(task.args) if "lr_local" in word)
        return 0.6 - rate - (0.3 if method_of(task) == "FedAvg" else 0.0)

    runs.score = score
    choose("--training.lr_local=0.1", "--training.lr_personal=0.1")
    trained = {}
    for task in runs.tasks:
        if is_trial(task):
            trained.setdefault((method_of(task), task.segment.last_round), []).append(task.args)
    for method in ("Standalone", "FedAvg", "Ditto"):
        # The first setting was also timed with two rounds.
        assert [len(trained[method, rounds]) for rounds in (2, 1, 3, 9)] == [1, 6, 2, 1]
        best_first = sorted(trained[method, 1], key=lambda args: -score(next(t for t in runs.tasks if t.args == args)))
        assert {tuple(args) for args in trained[method, 3]} <= {tuple(args) for args in best_first[:3]}
    assert [task.args[-1] for task in runs.tasks if not is_trial(task)]


@pytest.mark.slow
def test_trials_take_as_many_steps_as_on_all_images(runs):
    choose("--training.local_steps=null", "--training.local_epochs=2", "--output", "epochs")
    for task in runs.tasks:
        # Two passes over four fifths of the images and half a pass more.
        assert ("--training.local_epochs=2.5" in task.args) == is_trial(task)
    assert written("epochs/best.yaml")["training"]["local_epochs"] == 2
    runs.tasks.clear()
    # The recipe sets the number of steps.
    choose()
    assert not any("local_epochs" in word for task in runs.tasks for word in task.args)


@pytest.mark.slow
def test_the_last_rung_trains_each_method_with_all_seeds(runs):
    choose("--seeds", "4", "5")
    seeds = [word for task in runs.tasks if not is_trial(task) for word in task.args if "seed_everything" in word]
    assert seeds == ["--seed_everything=4"] * 3 + ["--seed_everything=5"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [3, 5, 10, 20])
@pytest.mark.parametrize("seconds_per_round", [0.5, 1.0])
def test_it_ends_within_the_budget(runs, minutes, seconds_per_round):
    runs.seconds_of_round = lambda task: seconds_per_round
    start = runs.now
    choose("--budget", f"{minutes}m")
    assert runs.now - start <= 1.1 * 60 * minutes
    assert written()


@pytest.mark.slow
@pytest.mark.parametrize("slower", [6, 10])
def test_it_ends_within_the_budget_if_runs_become_slower_than_measured(runs, slower):
    def score(task):
        if len(runs.tasks) > 3:
            runs.seconds_of_round = lambda task: slower
        return 0.5

    runs.score = score
    start = runs.now
    choose("--budget", "6m")
    assert runs.now - start <= 1.1 * 360
    assert "time ran out" in Path("choice/choice.md").read_text(encoding="utf-8")


def test_too_small_a_budget_is_rejected_at_once_with_what_is_needed(runs):
    # Two rounds of training alone took 2.5 seconds. At this rate five rounds take 6.25 seconds, of each of three
    # methods on held-out images and on all images.
    with pytest.raises(ValueError, match=r"--budget 20 s .*5 rounds, .*40 s; .*--data\.image_size"):
        choose("--budget", "20s")
    assert len(runs.tasks) == 1
    assert not Path("choice/best.yaml").exists()


def test_runs_have_fewer_rounds_if_the_budget_is_too_small_for_all(runs, tmp_path, capsys):
    choose("--budget", "1m")
    assert runs.now - 1000.0 <= 66
    finals = [task for task in runs.tasks if not is_trial(task)]
    assert {method_of(task) for task in finals} == {"Standalone", "FedAvg", "Ditto"}
    rounds = {complete_rounds(task) for task in finals}
    assert len(rounds) == 1
    assert 5 <= min(rounds) < 9
    assert written()["trainer"]["max_epochs"] == min(rounds)
    explained = f"{min(rounds)} of the recipe's 9 rounds"
    assert explained in capsys.readouterr().out
    page = (tmp_path / "choice" / "choice.md").read_text()
    # Before the advice, which may not hold after all rounds.
    assert page.index(f"only {explained}") < page.index("**Take ")
    recipe = (tmp_path / "choice" / "best.yaml").read_text()
    assert f"the original recipe has 9\n  max_epochs: {min(rounds)}\n" in recipe


def adapter_of(task):
    """The adapter of a run, and the blocks in which it is."""
    adapter = [word.split("=")[1] for word in task.args if word.startswith("--model.adapter=")]
    blocks = [word.split("=", 1)[1] for word in task.args if word.startswith("--model.adapter_options=")]
    return (adapter[-1] if adapter else "the recipe's", blocks[-1] if blocks else "null")


RESIDUAL = ("--model.adapter=residual",)
SLOW_ADAPTER = {"the recipe's": 20.0, "head": 0.5, "residual": 2.0}


def slow_adapters(task):
    """Seconds of a round: the recipe's adapter, in all blocks, takes very long."""
    kind, blocks = adapter_of(task)
    return 20.0 if blocks == "null" and kind != "head" else SLOW_ADAPTER[kind]


def test_a_recipe_whose_adapter_takes_too_long_is_searched_with_cheaper_ones_first(runs, tmp_path, capsys):
    runs.seconds_of_round = slow_adapters
    runs.score = lambda task: 0.8 if adapter_of(task)[0] == "head" else 0.5
    choose("--budget", "4m", *RESIDUAL)
    assert runs.now - 1000.0 <= 1.1 * 240
    # The recipe's adapter was timed with one method only, and stopped early.
    timed = [task for task in runs.tasks if slow_adapters(task) == 20.0]
    assert [method_of(task) for task in timed] == ["Standalone"]
    assert timed[0].end_by <= 1000.0 + 0.1 * 240 + 1
    finals = [task for task in runs.tasks if not is_trial(task)]
    assert finals
    assert {complete_rounds(task) for task in finals} == {9}
    assert written()["model"]["adapter"] == "head"
    assert "cheapest adapter" in capsys.readouterr().out
    assert "so cheaper adapters were tried first" in (tmp_path / "choice" / "choice.md").read_text()
    assert "there was no time for dearer adapters" in (tmp_path / "choice" / "best.yaml").read_text()


@pytest.mark.slow
def test_dearer_adapters_are_tried_with_all_methods_where_there_is_time(runs):
    runs.seconds_of_round = slow_adapters
    runs.score = lambda task: {"head": 0.6, "residual": 0.7}[adapter_of(task)[0]] if is_trial(task) else 0.6
    choose("--budget", "12m", *RESIDUAL)
    complete = [task for task in runs.tasks if is_trial(task) and task.segment.last_round == 9]
    methods_of_adapter = {}
    for task in complete:
        methods_of_adapter.setdefault(adapter_of(task), set()).add(method_of(task))
    assert ("head", "null") in methods_of_adapter
    assert ("residual", '{"last_blocks": 1}') in methods_of_adapter
    assert all(methods == {"Standalone", "FedAvg", "Ditto"} for methods in methods_of_adapter.values())
    best = written()["model"]
    assert best["adapter"] == "residual"
    # Of equal ones, the cheapest.
    assert best["adapter_options"] == {"last_blocks": 1}
    runs.tasks.clear()
    choose("--budget", "12m", *RESIDUAL)
    assert runs.tasks == []


@pytest.mark.slow
def test_checkpoints_of_trials_are_kept_until_a_larger_budget_would_try_no_more(runs):
    choose("--budget", "1m")
    checkpoint = Path("choice/trials/some.ckpt")
    checkpoint.parent.mkdir()
    checkpoint.touch()
    choose("--budget", "1m")
    assert checkpoint.exists()
    choose("--budget", "1h")
    assert not checkpoint.parent.exists()
    # They have the names of clients.
    choose("--budget", "1m", "--anonymous", "--output", "anonymous")
    Path("anonymous/trials").mkdir()
    choose("--budget", "1m", "--anonymous", "--output", "anonymous")
    assert not Path("anonymous/trials").exists()


@pytest.mark.slow
def test_time_that_is_too_short_for_a_dearer_adapter_goes_into_settings_of_the_cheapest(runs, tmp_path):
    runs.seconds_of_round = lambda task: 0.5 if adapter_of(task)[0] == "head" else 20.0

    def score(task):
        return 0.7 if "--training.lr_local=0.3" in task.args else 0.5

    runs.score = score
    words = ("--budget", "4m", "--training.lr_local=0.1", *RESIDUAL)
    choose(*words)
    assert runs.now - 1000.0 <= 1.1 * 240
    complete = [task for task in runs.tasks if is_trial(task) and task.segment.last_round == 9]
    assert {adapter_of(task)[0] for task in complete} == {"head"}
    assert len({method_of(task) for task in complete}) == 3
    assert written()["training"]["lr_local"] == 0.3
    assert "dearer adapters, from residual in the last block on" in (tmp_path / "choice" / "choice.md").read_text()
    runs.tasks.clear()
    choose(*words)
    assert runs.tasks == []


def test_a_larger_budget_replaces_the_shorter_runs_of_a_smaller_one(runs, tmp_path):
    choose("--budget", "1m")
    choose("--budget", "30m")
    assert written()["trainer"]["max_epochs"] == 9
    records = json.loads((tmp_path / "choice" / "results.json").read_text())
    finals = [record for record in records if record["stage"] == "run"]
    assert {record["point"]["trainer.max_epochs"] for record in finals} == {"9"}
    assert sorted((record["label"], record["seed"]) for record in finals) == [
        (method, seed) for method in ("ditto", "fedavg", "standalone") for seed in (0, 1, 2)
    ]
    page = (tmp_path / "choice" / "choice.md").read_text()
    assert "of the recipe's 9 rounds" not in page
    # The former trials, on the same draw with fewer rounds, are not listed beside the new ones.
    settings = page.split("Every setting")[1]
    assert len(re.findall(r"\| ditto +\| +0 \|", settings)) == 1


@pytest.mark.slow
def test_an_interrupted_search_gives_its_verdict_and_goes_on_without_repeating_a_run(runs, tmp_path):
    scores = {"Standalone": 0.5, "FedAvg": 0.7, "Ditto": 0.6}
    runs.score = lambda task: scores[method_of(task)]
    choose("--output", "whole")
    whole = list(runs.tasks)
    for stop in (2, 12, len(whole) - 2):
        runs.tasks.clear()
        runs.interrupt_after = stop
        folder = f"stopped{stop}"
        with pytest.raises(KeyboardInterrupt):
            choose("--output", folder)
        assert Path(folder, "best.yaml").exists() == (stop > 2)
        if stop > 2:
            page = (tmp_path / folder / "choice.md").read_text()
            assert "The search was interrupted" in page
        runs.interrupt_after = None
        choose("--output", folder)
        assert [task.args for task in runs.tasks] == [task.args for task in whole]
        assert written(f"{folder}/best.yaml") == written("whole/best.yaml")
        assert "interrupted" not in (tmp_path / folder / "choice.md").read_text()
    runs.tasks.clear()
    choose("--output", "whole")
    assert runs.tasks == []


@pytest.mark.slow
def test_failed_settings_are_listed_and_never_chosen(runs, tmp_path):
    def score(task):
        rate = next((word for word in reversed(task.args) if "lr_local" in word), "")
        if method_of(task) == "Ditto" and rate:
            return "RuntimeError: out of memory"
        return 0.9 if method_of(task) == "Ditto" else 0.5

    runs.score = score
    choose()
    page = (tmp_path / "choice" / "choice.md").read_text()
    assert page.count("RuntimeError: out of memory") == 5
    assert "Take a model of each client" in page
    assert "prox_strength" not in str(written())


@pytest.mark.slow
def test_a_method_that_cannot_be_trained_is_left_out_with_its_reason(runs, tmp_path):
    runs.score = lambda task: "ValueError: no" if method_of(task) == "FedAvg" else 0.5
    choose()
    assert "- fedavg: not tried, since ValueError: no" in (tmp_path / "choice" / "choice.md").read_text()


def test_an_anonymous_search_writes_no_name_of_a_client(runs, tmp_path):
    folder = tmp_path / "images"
    from PIL import Image

    for name in NAMES:
        for label in ("a", "b"):
            (folder / name / label).mkdir(parents=True)
            for number in range(6):
                Image.new("L", (16, 16), 20 * number).save(folder / name / label / f"{number}.png")
    data = {
        "dataset": {"class_path": "Images", "init_args": {"root": "images"}},
        "partition": {"class_path": "ByDomain", "init_args": {"column": "client"}},
        "image_size": 16,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"data": data}))

    def score(task):
        return f"OSError: images/{NAMES[1]}/a/1.png is broken" if method_of(task) == "FedAvg" else 0.5

    runs.score = score
    choose("--anonymous", "--output", "anonymous")
    contents = {path: path.read_bytes() for path in (tmp_path / "anonymous").rglob("*") if path.is_file()}
    assert "images/client 1/a/1.png is broken" in (tmp_path / "anonymous" / "choice.md").read_text()
    assert len(contents) >= 4
    for path, content in contents.items():
        for name in NAMES:
            # The made-up runs return names, as those of an anonymous search do not.
            if path.name != "results.json" and path.name != "choice.md":
                assert name.encode() not in content


@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_a_private_recipe_is_rejected_with_the_reason(runs, section):
    with pytest.raises(ValueError, match=rf"{section} .*--{section}=null"):
        choose(f"--{section}.target_epsilon=3")
    assert runs.tasks == []


@pytest.mark.slow
def test_other_options_and_other_recipes_do_not_go_on(runs, tmp_path):
    choose()
    with pytest.raises(ValueError, match=r"goal 'mean', .*'own'"):
        choose("--goal", "own")
    with pytest.raises(ValueError, match="search with options"):
        choose("--training.momentum=0.5")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY | {"seed_everything": 3}))
    with pytest.raises(ValueError, match=r"earlier version of 'tiny\.yaml'"):
        choose()


def test_a_folder_of_others_is_not_written_into(runs, tmp_path):
    (tmp_path / "choice").mkdir()
    (tmp_path / "choice" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no search"):
        choose()


@pytest.mark.parametrize("data", [{"partition": {"class_path": "IID", "init_args": {"num_clients": 1}}}])
def test_one_client_has_nothing_to_choose(runs, tmp_path, data):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipes.recipe(data=data)))
    with pytest.raises(ValueError, match="one client"):
        choose()


@pytest.mark.slow
def test_the_results_are_those_of_a_comparison(runs):
    choose()
    records = json.loads(Path("choice/results.json").read_text(encoding="utf-8"))
    stages = {record["stage"] for record in records}
    assert stages == {"tune", "run"}
    rows = {row.name for row in Comparison.from_file("choice/results.json").rows}
    assert rows == {"standalone", "fedavg", "ditto, personal model", "ditto, both models"}
