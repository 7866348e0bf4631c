# SPDX-License-Identifier: Apache-2.0
"""Loggers of recipes: they get the scores by round and the options, and a run that they alone log can be reported."""

import json

import pytest
import yaml

from perada.cli import main
from tests.recipes import recipe

WANDB = {"class_path": "WandbLogger", "init_args": {"offline": True}}
RECIPE = recipe(
    trainer={"max_epochs": 2, "devices": 1},
    data={"image_size": 32},
    federated={"algorithm": "FedAvg"},
    training={"local_steps": 2},
) | {"seed_everything": 3}


@pytest.fixture
def fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(logger):
        recipe = RECIPE | {"trainer": RECIPE["trainer"] | {"logger": logger}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        main(["fit", "--config", "recipe.yaml"])
        return tmp_path

    return run


def test_a_run_that_tensorboard_logs_can_be_reported(fit, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = fit({"class_path": "TensorBoardLogger", "init_args": {"save_dir": "."}}) / "lightning_logs" / "version_0"
    assert not (folder / "metrics.csv").exists()
    events = EventAccumulator(str(folder)).Reload()
    scores = [event.value for event in events.Scalars("personal/local_test")]
    rounds = json.loads((folder / "run.json").read_text())["metrics"]["rounds"]
    assert scores == pytest.approx([row["personal/local_test"] for row in rounds])
    assert {event.value for event in events.Scalars("round")} == {0.0, 1.0}
    options = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert options["training"]["local_steps"] == 2
    assert options["seed_everything"] == 3
    capsys.readouterr()
    main(["report", str(folder)])
    assert f"{100 * scores[-1]:.2f}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # what the service's client warns of is its own
def test_wandb_offline_gets_the_rounds(fit, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = fit([{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}, WANDB])
    config = dict(wandb.run.config)
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert config["training"]["local_steps"] == 2
    rounds = json.loads((folder / "lightning_logs" / "version_0" / "run.json").read_text())["metrics"]["rounds"]
    assert summary["personal/local_test"] == pytest.approx(rounds[-1]["personal/local_test"])
    assert summary["round"] == 1
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_the_rounds(fit, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # files, so that the test needs no database
    from mlflow.tracking import MlflowClient

    where = f"file:{tmp_path / 'mlruns'}"
    logger = {"class_path": "MLFlowLogger", "init_args": {"tracking_uri": where, "experiment_name": "perada"}}
    folder = fit([{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}, logger])
    client = MlflowClient(where)
    experiment = client.get_experiment_by_name("perada")
    (run,) = client.search_runs([experiment.experiment_id])
    rounds = json.loads((folder / "lightning_logs" / "version_0" / "run.json").read_text())["metrics"]["rounds"]
    logged = [one.value for one in client.get_metric_history(run.info.run_id, "personal/local_test")]
    assert logged == pytest.approx([row["personal/local_test"] for row in rounds])
    assert run.data.params["training/local_steps"] == "2"
