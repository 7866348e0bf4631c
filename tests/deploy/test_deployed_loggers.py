# SPDX-License-Identifier: Apache-2.0
"""Loggers of a recipe in a deployed run: they get what `metrics.csv` has, by the names of a simulation."""

import csv
import re

import pytest
import yaml
from pytorch_lightning.loggers import Logger

from perada.cli import main
from perada.cli.deployed_recipes import server_recipe
from perada.deploy.transport import LocalTransport

from .parties import Parties
from .test_site_file import PART, RECIPE


class Recorder(Logger):
    """Keeps what it gets, by step; fails from a step on."""

    name = version = "recorder"

    def __init__(self, fails=10**6):
        super().__init__()
        self.rows = {}
        self.fails = fails

    def log_metrics(self, metrics, step=None):
        if step >= self.fails:
            raise OSError("the disk is full")
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, params, *args, **kwargs):
        raise AssertionError


@pytest.mark.slow
def test_loggers_get_the_metrics_of_a_simulation_by_their_names(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto")
    loop, _ = parties.simulated()
    recorder = Recorder()
    workers = parties.workers()
    coordinator = parties.coordinator(LocalTransport(workers), loggers=[recorder])
    coordinator.run()
    coordinator.close()
    names = {name for row in loop.history for name in row} | {"deploy/selected", "deploy/answered", "deploy/seconds"}
    assert {name for row in recorder.rows.values() for name in row} <= names | {"epoch"}
    for name in ("train/personal_loss", "personal/local_test", "global/global_test", "params/sent"):
        result = [recorder.rows[step].get(name) for step in (0, 1)]
        assert result == [pytest.approx(row[name], rel=1e-6) if name in row else None for row in loop.history], name
    with (tmp_path / "server" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            given = recorder.rows[int(row.pop("epoch"))]
            assert {name: float(value) for name, value in row.items() if value} == {
                name: value for name, value in given.items() if name != "epoch"
            }
    parties.rounds = 2
    again = Recorder()
    parties.coordinator(LocalTransport(workers), resume=True, loggers=[again]).run()
    assert again.rows == recorder.rows  # each start logs the whole run


@pytest.mark.slow
def test_a_logger_that_fails_costs_no_round(tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path)
    failing = Recorder(fails=1)
    other = Recorder()
    coordinator = parties.coordinator(LocalTransport(parties.workers()), loggers=[failing, other])
    assert coordinator.run().done == 2
    assert (set(failing.rows), set(other.rows)) == ({0}, {0, 1})
    assert caplog.text.count("Recorder failed and is not used any more: the disk is full (OSError)") == 1


def test_a_recipes_loggers_write_into_the_runs_folder(tmp_path):
    pytest.importorskip("tensorboard")
    board = {"class_path": "TensorBoardLogger", "init_args": {"name": "board", "save_dir": "logs"}}
    for given, expected in (
        (None, []),
        (True, []),
        ("CSVLogger", []),
        ("TensorBoardLogger", [str(tmp_path / "run")]),
        (["CSVLogger", board], [str(tmp_path / "run" / "logs")]),
    ):
        (tmp_path / "recipe.yaml").write_text(
            yaml.safe_dump(RECIPE | {"trainer": RECIPE["trainer"] | {"logger": given}})
        )
        actual = server_recipe(str(tmp_path / "recipe.yaml"), tmp_path / "run").loggers
        assert [logger.save_dir for logger in actual] == expected


def test_callbacks_are_rejected(tmp_path):
    callbacks = {"callbacks": [{"class_path": "LearningRateMonitor"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"trainer": RECIPE["trainer"] | callbacks}))
    with pytest.raises(ValueError, match="callbacks cannot be deployed"):
        server_recipe(str(tmp_path / "recipe.yaml"))


@pytest.mark.slow
def test_tensorboard_gets_the_rounds(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = RECIPE | {"trainer": RECIPE["trainer"] | {"max_epochs": 2, "logger": "TensorBoardLogger"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    paths = []
    approved = {}
    for _ in range(2):  # first to learn the digests
        paths = []
        for n, name in enumerate("ab"):
            content = {"name": name, "data": PART | {"client": n}, "state": name, "may_send": ["counts", "losses"]}
            content["recipes"] = [{"recipe": "recipe.yaml"} | approved]
            paths.append(tmp_path / f"{name}.yaml")
            paths[-1].write_text(yaml.safe_dump(content))
        main(["deploy", "check", str(paths[0])])
        approved = dict(re.findall("(sha256|digest): ([0-9a-f]{64})", capsys.readouterr().out))
    run = ["deploy", "run", str(tmp_path / "recipe.yaml"), "--folder", str(tmp_path / "run"), "--min-sites", "2"]
    main([*run, "--local", *map(str, paths)])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    events = EventAccumulator(str(tmp_path / "run" / "lightning_logs" / "version_0")).Reload()
    for name in ("personal/local_test", "train/personal_loss", "comm/up_mb", "deploy/answered"):
        scalars = events.Scalars(name)
        assert [(event.step, event.value) for event in scalars] == [
            (int(row["epoch"]), pytest.approx(float(row[name]))) for row in rows if row[name]
        ]
        assert scalars
