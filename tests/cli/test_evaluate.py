# SPDX-License-Identifier: Apache-2.0
"""``perada evaluate``: models on the command line, and mistakes in it."""

import json

import pytest
import timm
import torch
import yaml

import perada
from perada.cli.evaluate import parse_model
from perada.cli.main import main
from perada.data import Digits, Dirichlet, FederatedDataModule
from tests.rejections import raises_naming

RECIPE = {
    "model": {"backbone": "test_resnet", "pretrained": False},
    "data": {
        "dataset": "Digits",
        "partition": {"class_path": "Dirichlet", "init_args": {"num_clients": 3, "alpha": 1.0}},
        "image_size": 32,
        "test_limit": 90,
    },
    "trainer": {"accelerator": "cpu"},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a recipe, a run and weights."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = FederatedDataModule(dataset=Digits(), partition=Dirichlet(3, alpha=1.0), image_size=32, test_limit=90)
    run = perada.finetune(
        "test_resnet",
        data,
        pretrained=False,
        adapter="head",
        algorithm="ditto",
        rounds=1,
        local_steps=2,
        logger=False,
        enable_progress_bar=False,
    )
    run.save(folder / "ours")
    torch.save(timm.create_model("test_resnet", num_classes=10).state_dict(), folder / "vendor.pt")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def test_tables_and_files(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    models = ["ours:personal", "global=ours:global", "vendor.pt"]
    main(["evaluate", *models, "--config", "recipe.yaml", "--output", "out", "--data.test_limit=60"])
    printed = capsys.readouterr().out
    assert "| client | images |" in printed and "ours:personal − vendor" in printed
    record = json.loads((here / "out" / "evaluation.json").read_text())
    assert record["models"] == ["ours:personal", "global", "vendor"]
    images = {row["client"]: row["images"] for row in record["rows"]}
    assert images.pop("pooled") == sum(images.values()) == 60


def test_models_on_the_command_line(here, monkeypatch):
    monkeypatch.chdir(here)
    assert parse_model("ours")[0::2] == ("ours", None)
    assert parse_model("vendor.pt").name == "vendor"
    assert parse_model("last year=ours:both") == ("last year", parse_model("ours").path, "both")
    # A path may contain what else separates.
    (here / "a=b:global").mkdir()
    assert parse_model("a=b:global") == ("a=b:global", parse_model("a=b:global").path, None)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["nowhere", "--config=recipe.yaml"], ["nowhere"]),
        (["ours"], ["--config"]),
        (["ours", "ours", "--config=recipe.yaml"], ["two models", "ours"]),
        (["vendor.pt:global", "--config=recipe.yaml"], ["vendor", "global"]),
        (["ours", "--config=nowhere.yaml"], ["nowhere.yaml"]),
        (["ours", "--config=recipe.yaml", "--output=recipe.yaml"], ["--output", "recipe.yaml"]),
    ],
)
def test_mistakes(here, words, facts, monkeypatch):
    monkeypatch.chdir(here)
    with raises_naming((ValueError, OSError), *facts):
        main(["evaluate", *words])
