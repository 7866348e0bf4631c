# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe is parsed and runs, on small data and a small backbone."""

from pathlib import Path

import pytest
import yaml

from perada.cli import main
from perada.cli.words import recipes

ROOT = Path(__file__).parents[2] / "recipes"
FILES = sorted(ROOT.rglob("*.yaml"))
NAMES = [path.relative_to(ROOT).with_suffix("").as_posix() for path in FILES]
SMALL = """
    --trainer.fast_dev_run=true --trainer.accelerator=cpu --trainer.enable_progress_bar=false
    --model.backbone=test_resnet --model.pretrained=false
    --data.dataset=Digits --data.partition.num_clients=4 --data.train_limit=300 --data.test_limit=40
    --data.image_size=16 --data.batch_size=4
    --federated.clients_per_round=2 --federated.distillation.steps=1 --federated.distillation.batch_size=4
""".split()


def test_recipes_are_found_by_name():
    assert sorted(recipes()) == sorted(NAMES)
    assert len(NAMES) > 1


@pytest.mark.parametrize("name", NAMES)
def test_recipe_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    public = [] if name == "quickstart" else ["--data.public=null", "--data.public_fraction=0.1"]
    private = ["--model.backbone=test_vit"] if name.startswith("dp/") else []  # no BatchNorm
    main(["fit", "--config", name, *SMALL, *public, *private])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines] == ["client", "0", "1", "2", "3", "mean ± std"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_recipe_says_what_it_is_and_fixes_its_seed(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    content = yaml.safe_load(path.read_text())
    assert isinstance(content["seed_everything"], int)
    assert content["trainer"]["max_epochs"] > 0
    assert content["federated"]["algorithm"]["class_path" if isinstance(content["federated"]["algorithm"], dict) else 0]
